"""Webhooks: signing, sending, and allowed addresses."""

from __future__ import annotations

from pydantic import Field, field_validator

from holdfast.settings.fields import Seconds, Section, setting_names
from holdfast.settings.retention import MAX_TTL_SECONDS
from holdfast.settings.signing_secrets import split_secrets, usable_secrets


class WebhookSettings(Section):
    webhook_secrets: str | None = Field(
        None,
        repr=False,
        validation_alias=setting_names("WEBHOOK_SECRETS"),
        description="Secrets that webhooks are signed with (Standard Webhooks), separated by commas: `whsec_` and 24 "
        "to 64 bytes in base64. All of them sign, so receivers can change from one to the next. The secrets of tenants "
        "are computed from these: `holdfast webhooks secret TENANT`. Unset: not signed.",
    )
    webhook_allow_private: bool = Field(
        False,
        validation_alias=setting_names("WEBHOOK_ALLOW_PRIVATE"),
        description="Whether webhooks may lead to addresses that are not public. For development only: it lets every "
        "caller who may create a run call servers behind the firewall.",
    )
    webhook_timeout: Seconds = Field(
        10.0,
        ge=0.1,
        le=120,
        validation_alias=setting_names("WEBHOOK_TIMEOUT_SECONDS"),
        description="Seconds a webhook's receiver has to answer, redirects included. A delivery whose sender has died "
        "is sent again after this time and 5 seconds more.",
    )
    webhook_retry_base: Seconds = Field(
        5.0,
        ge=0.01,
        le=3600,
        validation_alias=setting_names("WEBHOOK_RETRY_BASE_SECONDS"),
        description="Seconds before the first retry of a webhook. The next pauses are 6, 24, 120, 720 and 2160 times "
        "that, the last one repeatedly; with jitter.",
    )
    webhook_retry_for: Seconds = Field(
        86_400.0,
        ge=1,
        le=2_592_000,
        validation_alias=setting_names("WEBHOOK_RETRY_FOR_SECONDS"),
        description="Seconds after which a webhook that was not accepted is given up.",
    )
    webhook_ttl: Seconds = Field(
        604_800.0,
        ge=60,
        le=MAX_TTL_SECONDS,
        validation_alias=setting_names("WEBHOOK_TTL_SECONDS"),
        description="Seconds a webhook that was delivered or given up can be seen and sent again.",
    )

    @field_validator("webhook_secrets")
    @classmethod
    def _usable_secrets(cls, value: str | None) -> str | None:
        return usable_secrets(value)

    @property
    def signing_secrets(self) -> list[str]:
        return split_secrets(self.webhook_secrets)
