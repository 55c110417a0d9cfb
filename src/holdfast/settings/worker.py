"""The worker: its slots, lease, retries and limits."""

from __future__ import annotations

from pydantic import Field, field_validator

from holdfast.settings.fields import Seconds, Section, prefixed_name, setting_names
from holdfast.settings.hosts import usable_host


class WorkerSettings(Section):
    jobs: int = Field(
        10,
        ge=1,
        le=10_000,
        validation_alias=setting_names("N_JOBS_PER_WORKER"),
        description="Runs a worker process executes at once. Use a high number for graphs that wait for models, a low "
        "one for graphs that compute.",
    )
    health_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        validation_alias=prefixed_name("HEALTH_PORT"),
        description="The port where a worker answers /live, /ready and /metrics; under `dev` and `serve`, the "
        "supervisor for all its workers. Unset: none. 0: any free port, which is logged. Several `holdfast worker` on "
        "one machine need different ports.",
    )
    health_host: str = Field(
        "127.0.0.1",
        validation_alias=prefixed_name("HEALTH_HOST"),
        description="The address for HOLDFAST_HEALTH_PORT. In a container: 0.0.0.0.",
    )
    run_timeout: Seconds = Field(
        86_400.0,
        le=31_536_000,
        validation_alias=setting_names("BG_JOB_TIMEOUT_SECS"),
        description="Seconds a run may take from its first start, take-overs and retries included, before it ends "
        "as `timeout`.",
    )
    max_retries: int = Field(
        3,
        ge=0,
        le=1000,
        validation_alias=setting_names("BG_JOB_MAX_RETRIES"),
        description="How often a run that failed with a transient error is tried again before it ends as `error`.",
    )
    retry_base: Seconds = Field(
        1.0,
        le=3600,
        validation_alias=setting_names("RETRY_BASE_SECONDS"),
        description="Seconds before the first retry; doubles each time, with jitter.",
    )
    retry_cap: Seconds = Field(
        60.0,
        le=86_400,
        validation_alias=setting_names("RETRY_CAP_SECONDS"),
        description="The longest pause between two tries, in seconds.",
    )
    max_crashes: int = Field(
        3,
        ge=1,
        le=1000,
        validation_alias=prefixed_name("MAX_CRASHES"),
        description="How many workers may die while they execute a run that makes no progress in between, before it "
        "becomes a dead letter. One more if the last of them was executing other runs as well.",
    )
    lease: Seconds = Field(
        30.0,
        ge=1,
        le=3600,
        validation_alias=setting_names("LEASE_DURATION_SECONDS"),
        description="Seconds after its last renewal until a worker counts as lost. If it is short, a lost machine is "
        "noticed sooner, but a slow worker may lose its runs.",
    )
    heartbeat: Seconds = Field(
        5.0,
        ge=0.1,
        le=1200,
        validation_alias=setting_names("HEARTBEAT_INTERVAL_SECONDS", "BG_JOB_HEARTBEAT"),
        description="Seconds between two renewals of a worker's lease; at most a third of the lease.",
    )
    session_grace: Seconds = Field(
        1.6,
        ge=0.2,
        le=60,
        validation_alias=setting_names("SESSION_GRACE_SECONDS"),
        description="Seconds a worker's heartbeat session may be gone from Postgres before the worker counts as "
        "lost; an eighth of it if all sessions of its process are gone. Must cover a reconnect.",
    )
    reaper_interval: Seconds = Field(
        1.0,
        ge=0.1,
        le=60,
        validation_alias=setting_names("REAPER_INTERVAL_SECONDS"),
        description="Seconds between two looks for lost workers; a tenth of it while runs are being executed. Each "
        "look is a statement; a longer interval delays take-over.",
    )
    poll_interval: Seconds = Field(
        5.0,
        ge=0.1,
        le=60,
        validation_alias=setting_names("POSTGRES_POLL_INTERVAL_SECONDS"),
        description="Seconds between the slow polls behind every hint. A lost hint costs at most this much latency.",
    )
    degraded_poll: Seconds = Field(
        0.5,
        ge=0.05,
        le=60,
        validation_alias=setting_names("DEGRADED_POLL_SECONDS"),
        description="Seconds between two polls while hints do not arrive. Each poll costs every process a few "
        "statements; a longer interval makes streams later.",
    )
    signal_ping: Seconds | None = Field(
        None,
        ge=0.1,
        le=300,
        validation_alias=setting_names("SIGNAL_PING_SECONDS"),
        description="Seconds between a process's pings to itself. A missing echo shows that hints do not arrive. "
        "Unset: 15 over Postgres, where each is a statement, and 5 over Redis.",
    )
    drain_timeout: float = Field(
        25.0,
        ge=0,
        le=86_400,
        validation_alias=setting_names("WORKER_DRAIN_TIMEOUT"),
        description="Seconds a stopping worker lets its runs continue before it returns them to the queue. Keep it "
        "below the "
        "orchestrator's kill delay (30 s under Kubernetes).",
    )
    journal_buffer_bytes: int = Field(
        8 * 1024 * 1024,
        ge=64 * 1024,
        le=1024**3,
        validation_alias=setting_names("JOURNAL_BUFFER_BYTES"),
        description="Bytes of one run that may wait for a commit; above it the run waits.",
    )
    max_entry_bytes: int = Field(
        64 * 1024 * 1024,
        ge=64 * 1024,
        le=512 * 1024**2,
        validation_alias=setting_names("MAX_ENTRY_BYTES"),
        description="The largest single event or checkpoint value in bytes; a run that writes a larger one fails.",
    )
    blocked_loop: Seconds = Field(
        1.0,
        ge=0.05,
        le=600,
        validation_alias=setting_names("BLOCKED_LOOP_SECONDS"),
        description="Seconds graph code may block the worker's event loop before this is logged, with line and run.",
    )
    blocked_loop_limit: float = Field(
        60.0,
        ge=0,
        le=86_400,
        validation_alias=setting_names("BLOCKED_LOOP_LIMIT_SECONDS"),
        description="Seconds graph code may block the worker's event loop before the worker returns its runs and ends. "
        "The run that blocks gets a crash (HOLDFAST_MAX_CRASHES), the others do not. If it is too short, runs that "
        "compute for long are stopped. 0: never; then one run can delay all others without limit.",
    )

    @field_validator("health_host")
    @classmethod
    def _usable_health_host(cls, value: str) -> str:
        return usable_host(value)
