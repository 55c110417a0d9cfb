"""What the sections of the settings are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


def names(*names: str) -> AliasChoices:
    """The environment variables a field answers to, ours first; the later ones are those operators know
    from LangGraph and Aegra."""
    return AliasChoices(f"HOLDFAST_{names[0]}", *names)


def only_ours(name: str) -> AliasChoices:
    """For words too common to take from an environment that others write to as well."""
    return AliasChoices(f"HOLDFAST_{name}")


Seconds = Annotated[float, Field(gt=0)]


class Section(BaseSettings):
    """Settings that belong together."""

    # Errors are shown by `load_settings`, which knows what is secret; pydantic's own texts have no values.
    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", populate_by_name=True, allow_inf_nan=False, hide_input_in_errors=True
    )
