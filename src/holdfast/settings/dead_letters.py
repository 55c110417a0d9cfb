"""Dead letters and idempotency keys."""

from __future__ import annotations

from pydantic import Field

from holdfast.settings.fields import Seconds, Section, names
from holdfast.settings.retention import LONGEST


class LetterSettings(Section):
    graph_gone_after: float = Field(
        86_400.0,
        ge=0,
        le=LONGEST,
        validation_alias=names("GRAPH_GONE_AFTER_SECONDS"),
        description="Seconds that a graph must be missing from every worker, while some worker is online, before the "
        "runs that wait for it become dead letters. It must be longer than a deploy takes. 0: they wait for ever.",
    )
    dead_letter_ttl: Seconds = Field(
        2_592_000.0,
        ge=1,
        le=LONGEST,
        validation_alias=names("DEAD_LETTER_TTL_SECONDS"),
        description="Seconds a dead letter is kept for a retry, with the thread of a stateless run. After that it is a "
        "failed run like others.",
    )
    idempotency_ttl: Seconds = Field(
        86_400.0,
        ge=1,
        le=LONGEST,
        validation_alias=names("IDEMPOTENCY_TTL_SECONDS"),
        description="Seconds an Idempotency-Key is remembered. A request repeated later creates a second time.",
    )
