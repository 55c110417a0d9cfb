"""The settings of Postgres that Holdfast depends on, given for each session.

A role or a database may have defaults of its own: a `statement_timeout` for people, a stricter isolation level, a time
zone. Each of them would break something that nobody looks for there, so none is left to chance. How long Holdfast waits
for Postgres is decided on its own side (`db/answer_timeout.py`).

`default_transaction_read_only` is left alone: operators and providers switch it on to stop all writes, for example
before a disk is full. Then runs wait, as in any outage.
"""

from __future__ import annotations

from holdfast.settings import Settings

# For a session, and for a transaction behind PgBouncer.
_COMMON = {
    # A write that takes longer than the role may wait would fail each time that it is tried.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "standard_conforming_strings": "on",
    "TimeZone": "UTC",
    "DateStyle": "ISO,MDY",
    "IntervalStyle": "postgres",
}
# For a session only: a transaction says it when it begins, and has no use for the last.
_SESSION = {
    # Statements look at what is committed when they begin, not when their transaction did. Under a stricter level the
    # loser of two that meet would fail instead of waiting.
    "default_transaction_isolation": r"read\ committed",
    "default_transaction_deferrable": "off",
    # Listeners and pooled connections are idle most of the time.
    "idle_session_timeout": "0",
}
# Postgres 17 and later have a limit for transactions as well. Not among the options of a connection: an earlier server
# would refuse a name that it does not know.
_HAS_TRANSACTION_TIMEOUT = 170000
_NO_TRANSACTION_TIMEOUT = (
    f"CASE WHEN current_setting('server_version_num')::integer >= {_HAS_TRANSACTION_TIMEOUT} "
    "THEN set_config('transaction_timeout', '0', true) END"
)
# Of the values of synchronous_commit only `off` acknowledges what a crash of Postgres can undo. Which of the others it
# is (`remote_apply`, for example) is for the operator to say, so it cannot be among the options of a connection.
_SYNCHRONOUS_COMMIT_ON = (
    "CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', {local}) END"
)
# Where a session cannot be set, behind PgBouncer.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"


def _for_us(settings: Settings) -> dict[str, str]:
    return {
        "search_path": settings.db_schema,
        # A process that is stopped in the middle of a transaction must not keep its locks: whoever takes over its runs
        # waits for them.
        "idle_in_transaction_session_timeout": f"{settings.lease * 1000:.0f}",
        **_COMMON,
    }


def startup_options(settings: Settings, more: dict[str, str]) -> str:
    """What a connection is opened with."""
    options = {
        **_for_us(settings),
        # All hot statements have an index to use. A plan made while a table was still empty would read it whole, and
        # stay cached after it has grown.
        "enable_seqscan": "off",
        **_SESSION,
        **more,
    }
    return " ".join(f"-c {name}={value}" for name, value in options.items())


def no_transaction_timeout(server_version: int, *, local: bool = False) -> bytes | None:
    """The statement that is left for a session, or with `local` for a transaction, once the server's version is
    known. None: an earlier version has nothing to be set."""
    if server_version < _HAS_TRANSACTION_TIMEOUT:
        return None
    return b"SET LOCAL transaction_timeout = 0" if local else b"SET transaction_timeout = 0"


def session_statement(server_version: int) -> bytes:
    """The statement that gives a session what cannot be among the options of its connection."""
    parts = [_SYNCHRONOUS_COMMIT_ON.format(local="false")]
    if server_version >= _HAS_TRANSACTION_TIMEOUT:
        parts.append("set_config('transaction_timeout', '0', false)")
    return f"SELECT {', '.join(parts)}".encode()


def transaction_options(settings: Settings) -> bytes:
    """A statement that gives them to a transaction: behind PgBouncer the next one may have another session."""
    values = ", ".join(f"set_config('{name}', '{value}', true)" for name, value in _for_us(settings).items())
    kept = _SYNCHRONOUS_COMMIT_ON.format(local="true")
    return f"SELECT {values}, {kept}, {_NO_TRANSACTION_TIMEOUT}".encode()
