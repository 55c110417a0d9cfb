"""The building blocks of the settings' sections."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


def setting_names(*names: str) -> AliasChoices:
    """The environment variables of a field: Holdfast's own first, then the names known from LangGraph and Aegra."""
    return AliasChoices(f"HOLDFAST_{names[0]}", *names)


def prefixed_name(name: str) -> AliasChoices:
    """Only the name with the prefix HOLDFAST_, for names that other programs may use, too."""
    return AliasChoices(f"HOLDFAST_{name}")


Seconds = Annotated[float, Field(gt=0)]


class Section(BaseSettings):
    """A group of settings."""

    # `load_settings` formats errors and hides secret values. Pydantic's own messages must contain no values.
    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", populate_by_name=True, allow_inf_nan=False, hide_input_in_errors=True
    )
