"""Tenants: the default limits, and how soon a change takes effect."""

from __future__ import annotations

from pydantic import Field

from holdfast.settings.fields import Seconds, Section, setting_names


class TenantSettings(Section):
    tenant_max_queued: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        validation_alias=setting_names("TENANT_MAX_QUEUED"),
        description="Runs a tenant may have queued, scheduled ones included; another is refused with 429. Unset: any "
        "number. `holdfast tenants set` overrides it for one tenant.",
    )
    tenant_max_running: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        validation_alias=setting_names("TENANT_MAX_RUNNING"),
        description="Runs of a tenant that are executed at once, in the whole fleet; the others stay queued. Set it "
        "alike for all workers; otherwise the largest applies. Unset: any number.",
    )
    tenant_requests_per_second: float | None = Field(
        None,
        gt=0,
        le=1_000_000,
        validation_alias=setting_names("TENANT_REQUESTS_PER_SECOND"),
        description="Requests a second of a tenant that one web process answers, on average; a second's worth may come "
        "at once. More are refused with 429. Unset: any number.",
    )
    tenant_spend_per_day: float | None = Field(
        None,
        ge=0,
        validation_alias=setting_names("TENANT_SPEND_PER_DAY_USD"),
        description="US dollars that a tenant's runs may cost in a day (UTC); from then on new ones are refused with "
        "429. Unset: any amount.",
    )
    key_refresh: Seconds = Field(
        2.0,
        ge=0.05,
        le=60,
        validation_alias=setting_names("KEY_REFRESH_SECONDS"),
        description="Seconds until a web process notices that a key was revoked, the first key was made, or a limit "
        "was changed. Streams and WebSockets of a revoked key end then. Each refresh is one small statement of each "
        "process.",
    )
