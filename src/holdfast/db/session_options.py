"""The Postgres settings that Holdfast depends on, set for each session.

A role or a database may have other defaults: a `statement_timeout` for interactive use, a stricter isolation level, a
time zone. Each of them would break Holdfast in a way that is hard to find. So all of these settings are set explicitly.
Timeouts are on Holdfast's side (`db/answer_timeout.py`).

`default_transaction_read_only` is not set: operators and providers switch it on to stop all writes, for example before
a disk is full. Then runs wait, as in any outage.
"""

from __future__ import annotations

from holdfast.settings import Settings

# Set for a session or, behind PgBouncer, for each transaction.
_COMMON = {
    # With a timeout, a write that takes longer would fail at each retry.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "standard_conforming_strings": "on",
    "TimeZone": "UTC",
    "DateStyle": "ISO,MDY",
    "IntervalStyle": "postgres",
}
# Set for a session only. Behind PgBouncer, BEGIN names the isolation level, and the idle timeout does not matter.
_SESSION_ONLY = {
    # Each statement must see what is committed when it begins. At a stricter level, one of two concurrent writers would
    # fail instead of waiting for the other.
    "default_transaction_isolation": r"read\ committed",
    "default_transaction_deferrable": "off",
    # Listeners and pooled connections are idle most of the time.
    "idle_session_timeout": "0",
}
# Postgres 17 and later have `transaction_timeout`. It cannot be a start-up option of the connection: an earlier server
# would refuse the unknown name.
_TRANSACTION_TIMEOUT_SINCE = 170000
_NO_TRANSACTION_TIMEOUT = (
    f"CASE WHEN current_setting('server_version_num')::integer >= {_TRANSACTION_TIMEOUT_SINCE} "
    "THEN set_config('transaction_timeout', '0', true) END"
)
# With synchronous_commit = off, a crash of Postgres can undo a commit that it has acknowledged. All other values are
# safe, and the operator chooses among them (for example `remote_apply`). So it is set only where it is `off`, which a
# start-up option of the connection cannot do.
_SYNCHRONOUS_COMMIT_ON = (
    "CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', {local}) END"
)
# Begins a transaction behind PgBouncer, where the isolation level cannot be set for the session.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"


def _transaction_settings(settings: Settings) -> dict[str, str]:
    return {
        "search_path": settings.db_schema,
        # A process that freezes in the middle of a transaction must not keep its locks: the worker that takes over its
        # runs would wait for them.
        "idle_in_transaction_session_timeout": f"{settings.lease * 1000:.0f}",
        **_COMMON,
    }


def startup_options(settings: Settings, more: dict[str, str]) -> str:
    """The `options` parameter of a connection string."""
    options = {
        **_transaction_settings(settings),
        # All hot statements have an index. A plan made while a table was empty would scan the whole table, and would
        # stay in the cache after the table has grown.
        "enable_seqscan": "off",
        **_SESSION_ONLY,
        **more,
    }
    return " ".join(f"-c {name}={value}" for name, value in options.items())


def no_transaction_timeout(server_version: int, *, local: bool = False) -> bytes | None:
    """The statement that switches off `transaction_timeout`, for the session or, with `local`, for the transaction.
    None: this version of the server does not have it."""
    if server_version < _TRANSACTION_TIMEOUT_SINCE:
        return None
    return b"SET LOCAL transaction_timeout = 0" if local else b"SET transaction_timeout = 0"


def session_statement(server_version: int) -> bytes:
    """The statement that sets, in a new session, the settings that cannot be start-up options."""
    parts = [_SYNCHRONOUS_COMMIT_ON.format(local="false")]
    if server_version >= _TRANSACTION_TIMEOUT_SINCE:
        parts.append("set_config('transaction_timeout', '0', false)")
    return f"SELECT {', '.join(parts)}".encode()


def transaction_options(settings: Settings) -> bytes:
    """The statement that sets all settings for one transaction. Behind PgBouncer the next one may use another
    session."""
    values = ", ".join(
        f"set_config('{name}', '{value}', true)" for name, value in _transaction_settings(settings).items()
    )
    commit = _SYNCHRONOUS_COMMIT_ON.format(local="true")
    return f"SELECT {values}, {commit}, {_NO_TRANSACTION_TIMEOUT}".encode()
