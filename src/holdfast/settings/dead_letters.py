"""Dead letters and idempotency keys."""

from __future__ import annotations

from pydantic import Field

from holdfast.settings.fields import Seconds, Section, setting_names
from holdfast.settings.retention import MAX_TTL_SECONDS


class DeadLetterSettings(Section):
    graph_gone_after: float = Field(
        86_400.0,
        ge=0,
        le=MAX_TTL_SECONDS,
        validation_alias=setting_names("GRAPH_GONE_AFTER_SECONDS"),
        description="Seconds that a graph must be missing from every worker, while some worker is online, before the "
        "runs that wait for it become dead letters. It must be longer than a deploy takes. 0: they wait for ever.",
    )
    dead_letter_ttl: Seconds = Field(
        2_592_000.0,
        ge=1,
        le=MAX_TTL_SECONDS,
        validation_alias=setting_names("DEAD_LETTER_TTL_SECONDS"),
        description="Seconds a dead letter is kept for a retry, with the thread of a stateless run. After that it is a "
        "failed run like others.",
    )
    idempotency_ttl: Seconds = Field(
        86_400.0,
        ge=1,
        le=MAX_TTL_SECONDS,
        validation_alias=setting_names("IDEMPOTENCY_TTL_SECONDS"),
        description="Seconds an Idempotency-Key is remembered. A request repeated later creates a second time.",
    )
