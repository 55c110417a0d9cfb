"""What is submitted, and what comes back: `RunRequest` → `NewRun` → `CreatedRun`. See `submit.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Literal
from uuid import UUID

import orjson
from psycopg.rows import DictRow
from uuid_utils.compat import uuid7

from holdfast.db.visibility import EVERYTHING, Visibility
from holdfast.engine.cancel import CancelledRuns
from holdfast.engine.interrupts.resume import resume_of
from holdfast.engine.states import CancelAction, MultitaskStrategy
from holdfast.resources.tenants import Quota
from holdfast.streams.log import LogEvent
from holdfast.streams.serialize import to_json

# A run's priority is between this and minus this. A claim looks at each priority that a tenant uses: thousands of
# different ones would make the claims of all tenants slow.
MAX_PRIORITY = 100

Requester = Literal["request", "cron", "parent", "deadline"]


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What is asked for, before the assistant is known. `kwargs` is what the worker needs and clients may read back."""

    by: Requester = "request"
    run_id: UUID = field(default_factory=uuid7)
    kwargs: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    multitask_strategy: MultitaskStrategy = "enqueue"
    after_seconds: float = 0.0
    priority: int = 0

    # The thread. It is created with the run if it does not exist and `create_thread` is true.
    thread_id: UUID
    create_thread: bool = False
    temporary: bool = False
    thread_metadata: dict[str, Any] = field(default_factory=dict)
    # Minutes without activity, and what happens then.
    thread_ttl: tuple[float, str] | None = None
    # The tenant of a thread that is created, and the one whose quota is checked. A run belongs to its thread's tenant.
    tenant_id: str = ""
    # Whether a thread that is created may continue checkpoints that already exist under its id.
    adopting: bool = True
    # The run is refused, as if the thread did not exist, when the thread is not visible.
    visible: Visibility = EVERYTHING

    # None: the tenant has no limits.
    quota: Quota | None = None
    # The client streams the run: its thread's log gets an `accepted` event in the transaction that creates the run.
    streamed: bool = False

    # The run may resume only what this run has asked.
    answers_run: UUID | None = None
    # The dead letter that this run retries. The run takes over its answers.
    repeats: UUID | None = None
    # The checkpoint that the run continues from already includes the answer in `kwargs`: answer no interrupts.
    answer_applied: bool = False

    @property
    def by_default(self) -> bool:
        """Whether the run gives the default answer to an interrupt whose deadline has passed."""
        return self.by == "deadline"

    @property
    def cancel_action(self) -> CancelAction:
        """How the multitask strategy cancels the thread's unfinished runs, if it does."""
        return "rollback" if self.multitask_strategy == "rollback" else "interrupt"


@dataclass(frozen=True, kw_only=True)
class NewRun(RunRequest):
    """A run that is ready to be created. The row's metadata is the assistant's, under the thread's, under `metadata`.

    Only `submit.py` makes one.
    """

    assistant_id: UUID
    graph_id: str
    assistant_metadata: dict[str, Any] = field(default_factory=dict)
    # `updated_at` of an assistant that came from a cache. The run is refused if the assistant has changed since.
    assistant_updated_at: datetime | None = None

    @property
    def groupable(self) -> bool:
        """Whether it can be created in one statement with runs of other threads: it needs no lock but its thread's."""
        return (
            self.multitask_strategy in ("enqueue", "reject")
            and self.quota is None
            and not self.visible.restricted
            and resume_of(self.kwargs) is None
        )

    @cached_property
    def kwargs_json(self) -> str:
        return to_json(self.kwargs).decode()

    @cached_property
    def metadata_json(self) -> str:
        return to_json(self.metadata).decode()

    @property
    def size(self) -> int:
        """Characters of JSON that are stored for it."""
        return len(self.kwargs_json) + len(self.metadata_json)

    @property
    def thread(self) -> NewThread:
        """The thread that is created with the run if it does not exist."""
        ttl = None if self.temporary else self.thread_ttl
        return NewThread(self.thread_id, self.thread_metadata, ttl, self.tenant_id, self.temporary, self.adopting)


@dataclass(frozen=True)
class NewThread:
    """A thread to be created, if there is none with its id. `ttl`: minutes without activity, and what happens then.

    With `adopting`, it continues checkpoints that already exist under its id; without, such a thread is not created.
    """

    thread_id: UUID
    metadata: dict[str, Any]
    ttl: tuple[float, str] | None = None
    tenant_id: str = ""
    temporary: bool = False
    adopting: bool = True

    @cached_property
    def metadata_json(self) -> str:
        return orjson.dumps(self.metadata).decode()

    @property
    def size(self) -> int:
        """Characters of JSON that are stored for it."""
        return len(self.metadata_json)


@dataclass(frozen=True)
class CreatedRun:
    """A run that was created: its row, whether it can be claimed (now, or when its delay is over), the runs that its
    multitask strategy cancelled, and the `accepted` event if its creation wrote one."""

    new: NewRun
    run: DictRow
    ready: bool
    cancelled: CancelledRuns
    accepted: LogEvent | None = None
