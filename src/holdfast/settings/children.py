"""Child runs: how deep and how many."""

from __future__ import annotations

from pydantic import Field

from holdfast.settings.fields import Section, prefixed_name


class ChildSettings(Section):
    max_child_depth: int = Field(
        5,
        ge=0,
        le=100,
        validation_alias=prefixed_name("MAX_CHILD_DEPTH"),
        description="How many generations of children a run may have below it. A graph that spawns itself is stopped "
        "here. 0: no run may have children.",
    )
    max_children: int = Field(
        100,
        ge=0,
        le=100_000,
        validation_alias=prefixed_name("MAX_CHILDREN"),
        description="How many children one run may have, over all attempts. One more is an error in the run that "
        "spawns it.",
    )
