"""The declarations of all metrics, and the instruments of one process.

docs/metrics.md is generated from the declarations. Names have base units. Labels have few values, such as graphs,
outcomes and reasons, and never the id of a run, a thread or a tenant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.telemetry.instruments import (
    Counter,
    DisabledCounter,
    DisabledHistogram,
    Histogram,
    Kind,
    MetricDeclaration,
    Role,
)

# A value that is read at each scrape: a number, or a number for each combination of label values.
Reading = float | Mapping[tuple[str, ...], float]
Readings = Mapping[MetricDeclaration, Reading]

WEB: Sequence[Role] = ("web",)
WORKER: Sequence[Role] = ("worker",)
BOTH: Sequence[Role] = ("web", "worker")

# Bounds of buckets in seconds.
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
WAIT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
DURATION_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0, 86_400.0)
# Bounds of buckets in entries.
BATCH_SIZES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0)

ALL_METRICS: dict[str, MetricDeclaration] = {}


def _declare(
    kind: Kind,
    name: str,
    what: str,
    roles: Sequence[Role],
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
    *,
    fleet: bool = False,
) -> MetricDeclaration:
    declared = MetricDeclaration(f"holdfast_{name}", kind, what, frozenset(roles), labels, buckets, fleet)
    assert declared.name not in ALL_METRICS, declared.name
    ALL_METRICS[declared.name] = declared
    return declared


# --- the fleet, as the database knows it ------------------------------------------------------------

DATABASE_UP = _declare(
    "gauge", "database_up", "Whether the database answered the last query for the figures of the fleet", WEB
)
RUNS = _declare(
    "gauge", "runs", "Runs that are not finished, by status: pending or running", WEB, ("status",), fleet=True
)
QUEUE_READY = _declare("gauge", "queue_ready", "Runs that a worker could claim now", WEB, fleet=True)
QUEUE_SCHEDULED = _declare("gauge", "queue_scheduled", "Runs that are not due yet", WEB, fleet=True)
QUEUE_WAITING = _declare(
    "gauge",
    "queue_waiting",
    "Runs behind another run of their thread, or that wait for their children",
    WEB,
    fleet=True,
)
QUEUE_OLDEST = _declare("gauge", "queue_oldest_seconds", "How long the first ready run has been ready", WEB, fleet=True)
QUEUE_UNSERVED = _declare(
    "gauge", "queue_unserved", "Ready runs of a graph that no online worker has", WEB, ("graph",), fleet=True
)
CLAIMS_PER_SECOND = _declare(
    "gauge", "claims_per_second", "Claims of all workers, over the last minute", WEB, fleet=True
)
WORKERS_ONLINE = _declare("gauge", "workers_online", "Workers that claim runs", WEB, fleet=True)
WORKERS_DRAINING = _declare(
    "gauge", "workers_draining", "Workers that claim no more runs and finish theirs", WEB, fleet=True
)
WORKERS_CAPACITY = _declare(
    "gauge", "workers_capacity", "Runs that all online workers can execute at once", WEB, fleet=True
)
WORKERS_LEASE_LEFT = _declare(
    "gauge",
    "workers_lease_left_seconds",
    "Seconds until the first lease of an online or draining worker expires; below 0 it has expired",
    WEB,
    fleet=True,
)
DEAD_LETTERS_OPEN = _declare(
    "gauge",
    "dead_letters_open",
    "Runs that were given up, and neither retried nor discarded",
    WEB,
    ("reason",),
    fleet=True,
)
WEBHOOKS_PENDING = _declare("gauge", "webhooks_pending", "Webhooks in the outbox", WEB, fleet=True)
WEBHOOKS_OLDEST = _declare(
    "gauge", "webhooks_oldest_seconds", "How long the oldest of them has been waiting", WEB, fleet=True
)

# --- runs -------------------------------------------------------------------------------------------

RUNS_CREATED = _declare("counter", "runs_created_total", "Runs created by requests to this process", WEB, ("graph",))
CLAIMS = _declare("counter", "claims_total", "Runs claimed by this worker", WORKER, ("graph",))
ATTEMPTS_ENDED = _declare(
    "counter",
    "attempts_ended_total",
    "Attempts at runs that have ended here. success, error, timeout, interrupted and rolled_back end the run; retry, "
    "handed_back, waiting (for children) and lost do not",
    WORKER,
    ("graph", "outcome"),
)
RETRIES = _declare(
    "counter", "retries_total", "Attempts that ended in a transient error and are tried again", WORKER, ("graph",)
)
TAKEOVERS = _declare(
    "counter",
    "takeovers_total",
    "Runs put back into the queue because their worker was lost; counted by the process that leads the upkeep",
    BOTH,
)
WORKERS_LOST = _declare(
    "counter", "workers_lost_total", "Workers declared lost; counted by the process that leads the upkeep", BOTH
)
DEAD_LETTERS = _declare(
    "counter",
    "dead_letters_total",
    "Runs given up, by the worker that had them or the process that leads the upkeep",
    BOTH,
    ("reason",),
)
ROWS_SET_ASIDE = _declare(
    "counter",
    "upkeep_rows_set_aside_total",
    "Rows that the upkeep cannot process, or a worker cannot claim, and that are set aside for a while",
    BOTH,
)
QUEUE_WAIT = _declare(
    "histogram", "queue_wait_seconds", "From ready to claimed, of first attempts", WORKER, buckets=WAIT_SECONDS
)
CLAIM_TO_START = _declare(
    "histogram",
    "claim_to_start_seconds",
    "From the claim to the start of the graph: opening it and reading its state",
    WORKER,
    buckets=SHORT_SECONDS,
)
START_TO_FIRST_EVENT = _declare(
    "histogram",
    "start_to_first_event_seconds",
    "From the start of the graph to its first event",
    WORKER,
    ("graph",),
    buckets=DURATION_SECONDS,
)
RUN_SECONDS = _declare(
    "histogram",
    "run_seconds",
    "From the start of a run's first attempt to its end, pauses between attempts included",
    WORKER,
    ("graph",),
    buckets=DURATION_SECONDS,
)

# --- the journal ------------------------------------------------------------------------------------

JOURNAL_BATCH = _declare(
    "histogram", "journal_batch_entries", "Events, checkpoints and writes in one commit", WORKER, buckets=BATCH_SIZES
)
JOURNAL_COMMIT = _declare(
    "histogram",
    "journal_commit_seconds",
    "From the beginning of a transaction to its commit",
    WORKER,
    buckets=SHORT_SECONDS,
)
EVENTS_WRITTEN = _declare("counter", "events_written_total", "Events committed to the log", WORKER)

# --- streams ----------------------------------------------------------------------------------------

EVENTS_DELIVERED = _declare(
    "counter", "events_delivered_total", "Events handed to open streams: one to two watchers counts twice", WEB
)
EVENT_LAG = _declare(
    "histogram",
    "event_lag_seconds",
    "From an event's commit until it is sent to a watcher that waits for it; the first of events sent together. "
    "By the database's clock, as far as its offset is known",
    WEB,
    buckets=SHORT_SECONDS,
)
STREAM_WATCHERS = _declare("gauge", "stream_watchers", "Open streams of this process", WEB)
STREAM_THREADS = _declare("gauge", "stream_threads", "Threads that this process follows", WEB)

# --- a worker ---------------------------------------------------------------------------------------

WORKER_ACTIVE = _declare("gauge", "worker_active", "Runs that this worker executes", WORKER)
WORKER_CAPACITY = _declare("gauge", "worker_capacity", "Runs that it can execute at once", WORKER)
WORKER_READY = _declare("gauge", "worker_ready", "Whether it claims runs: it holds a lease and is not draining", WORKER)
WORKER_LEASE_AGE = _declare(
    "gauge", "worker_lease_age_seconds", "Seconds since the lease was renewed; 0 without one", WORKER
)
WORKER_LEASE_LEFT = _declare(
    "gauge", "worker_lease_left_seconds", "Seconds until the lease ends if it is not renewed", WORKER
)
LEASES_LOST = _declare(
    "counter", "leases_lost_total", "Times this process lost its lease and registered as a new worker", WORKER
)
LOOP_BLOCKED = _declare("counter", "loop_blocked_total", "Times graph code has blocked the event loop", WORKER)
LOOP_BLOCKED_SECONDS = _declare("counter", "loop_blocked_seconds_total", "Seconds it was blocked for", WORKER)

# --- every process ----------------------------------------------------------------------------------

INFO = _declare("gauge", "info", "Always 1; the labels say what this process is", BOTH, ("role", "version"))
UPKEEP_LEADING = _declare("gauge", "upkeep_leading", "Whether this process does the upkeep", BOTH)
WEBHOOK_DELIVERIES = _declare(
    "counter",
    "webhook_deliveries_total",
    "Tries to deliver a webhook: delivered, postponed or failed for good; by the process that leads the upkeep",
    BOTH,
    ("result",),
)
SIGNALS_MODE = _declare(
    "gauge",
    "signals_mode",
    "1 for the current carrier of hints: postgres, redis, or polling while hints do not arrive",
    BOTH,
    ("mode",),
)
POOL_SIZE = _declare("gauge", "pool_size", "Connections of the pool that are open", BOTH)
POOL_LIMIT = _declare("gauge", "pool_limit", "Connections that the pool may open", BOTH)
POOL_USED = _declare("gauge", "pool_used", "Connections of the pool that are in use", BOTH)
POOL_WAITING = _declare("gauge", "pool_waiting", "Parts of the process that wait for a connection now", BOTH)
POOL_REQUESTS = _declare("counter", "pool_requests_total", "Requests for a connection of the pool", BOTH)
POOL_WAITED = _declare("counter", "pool_wait_seconds_total", "Seconds that were spent waiting for a connection", BOTH)
POOL_TIMEOUTS = _declare("counter", "pool_timeouts_total", "Requests for a connection that timed out", BOTH)
LOOP_DELAY = _declare(
    "histogram",
    "loop_delay_seconds",
    "How late a timer of the event loop fires, measured twice a second",
    BOTH,
    buckets=SHORT_SECONDS,
)

OUTCOMES = ("success", "error", "timeout", "interrupted", "rolled_back", "retry", "handed_back", "waiting", "lost")
REASONS = ("poison", "retries_exhausted", "graph_gone")
RESULTS = ("delivered", "postponed", "failed")
MODES = ("postgres", "redis", "polling")


class Metrics:
    """The instruments of one process. If not enabled, they do nothing and are not served."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        # The last known number of seconds that the database's clock is ahead of the process's clock.
        self.clock_ahead = 0.0
        counter = Counter if enabled else DisabledCounter
        histogram = Histogram if enabled else DisabledHistogram
        self.runs_created = counter(RUNS_CREATED)
        self.claims = counter(CLAIMS)
        self.attempts_ended = counter(ATTEMPTS_ENDED)
        self.retries = counter(RETRIES)
        self.takeovers = counter(TAKEOVERS)
        self.workers_lost = counter(WORKERS_LOST)
        self.dead_letters = counter(DEAD_LETTERS, [(reason,) for reason in REASONS])
        self.rows_set_aside = counter(ROWS_SET_ASIDE)
        self.queue_wait = histogram(QUEUE_WAIT)
        self.claim_to_start = histogram(CLAIM_TO_START)
        self.start_to_first_event = histogram(START_TO_FIRST_EVENT)
        self.run_seconds = histogram(RUN_SECONDS)
        self.journal_batch = histogram(JOURNAL_BATCH)
        self.journal_commit = histogram(JOURNAL_COMMIT)
        self.events_written = counter(EVENTS_WRITTEN)
        self.events_delivered = counter(EVENTS_DELIVERED)
        self.event_lag = histogram(EVENT_LAG)
        self.leases_lost = counter(LEASES_LOST)
        self.webhook_deliveries = counter(WEBHOOK_DELIVERIES, [(result,) for result in RESULTS])
        self.loop_delay = histogram(LOOP_DELAY)

    def instruments(self, role: Role) -> list[Counter | Histogram]:
        """The instruments that a process of this role serves."""
        if not self.enabled:
            return []
        found = [one for one in vars(self).values() if isinstance(one, Counter | Histogram)]
        return [one for one in found if role in one.declared.roles]
