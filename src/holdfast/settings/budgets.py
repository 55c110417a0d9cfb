"""Budgets: what a run may use without a limit in its request or its assistant."""

from __future__ import annotations

from pydantic import Field

from holdfast.settings.fields import Section, setting_names


class BudgetSettings(Section):
    default_max_cost_usd: float | None = Field(
        None,
        gt=0,
        le=1_000_000,
        allow_inf_nan=False,
        validation_alias=setting_names("DEFAULT_MAX_COST_USD"),
        description="US dollars after which a run is stopped. Counts models with a known price. Unset: no limit.",
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        le=2**53,
        validation_alias=setting_names("DEFAULT_MAX_TOKENS"),
        description="Tokens, of input and output together, after which a run is stopped. Unset: no limit.",
    )
    default_max_seconds: float | None = Field(
        None,
        gt=0,
        le=31_536_000,
        allow_inf_nan=False,
        validation_alias=setting_names("DEFAULT_MAX_SECONDS"),
        description="Seconds from its first start after which a run is stopped. Unset: BG_JOB_TIMEOUT_SECS alone.",
    )
    default_max_steps: int | None = Field(
        None,
        ge=1,
        le=2**53,
        validation_alias=setting_names("DEFAULT_MAX_STEPS"),
        description="Steps of its graph after which a run is stopped. Unset: no limit but the graph's recursion limit.",
    )

    @property
    def default_budget(self) -> dict[str, float | int]:
        """The limits that are set, in the format of a run's budget."""
        limits = {
            "max_cost_usd": self.default_max_cost_usd,
            "max_tokens": self.default_max_tokens,
            "max_seconds": self.default_max_seconds,
            "max_steps": self.default_max_steps,
        }
        return {name: limit for name, limit in limits.items() if limit is not None}
