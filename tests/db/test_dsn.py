"""`check_dsn` refuses unusable connection strings before any connection, and does not show their contents."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.db.dsn import check_dsn
from holdfast.errors import DatabaseError


@pytest.mark.parametrize(
    ("dsn", "parameter"),
    [
        ("postgresql://u:hunter2@db/d?sslmode=banana", "sslmode"),
        ("postgresql://u:hunter2@a:1,b:2/d?target_session_attrs=banana", "target_session_attrs"),
        ("host=db password=hunter2 require_auth=banana", "require_auth"),
        ("host=db password=hunter2 ssl_min_protocol_version=banana", "ssl_min_protocol_version"),
        ("service=banana password=hunter2", "service"),
    ],
)
def test_check_dsn_names_parameter_that_libpq_refuses(dsn: str, parameter: str) -> None:
    with pytest.raises(DatabaseError) as refused:
        check_dsn("DATABASE_URL", dsn)
    assert str(refused.value).startswith(f"DATABASE_URL cannot be used: libpq refuses its {parameter}. See https://")
    assert "banana" not in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "parameter",
    ["connect_timeout", "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout"],
)
@pytest.mark.parametrize("value", ["banana", "1.5", "1s", "0x10", "9999999999"])
def test_check_dsn_refuses_invalid_number(parameter: str, value: str) -> None:
    with pytest.raises(DatabaseError) as refused:
        check_dsn("DIRECT_DATABASE_URL", f"postgresql://u:hunter2@db/d?{parameter}={value}")
    said = str(refused.value)
    assert said.startswith(f"DIRECT_DATABASE_URL cannot be used: its {parameter} must be a whole number. See https://")
    assert value not in said.partition("See")[0]
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "dsn",
    [
        "",
        "host=db connect_timeout=10 keepalives=1 keepalives_idle=' 30 ' keepalives_count=+3 tcp_user_timeout=0",
        "postgresql://db/d?connect_timeout=-1&keepalives_interval=",
        "postgresql://u:p@db/d",
        "postgresql://h1:1,h2:2/d?target_session_attrs=read-write",
        "hostaddr=192.0.2.1,192.0.2.2 host=a,b port=1,2",
        "host=/run/postgresql dbname=d",
        "postgresql://db/d?sslmode=verify-full&sslrootcert=system",
        "host=db sslmode=verify-full sslrootcert=/gone.pem",
        "service=fleet",
    ],
)
@pytest.mark.parametrize("environ", [{}, {"PGHOSTADDR": "192.0.2.1", "PGPORT": "1,2", "PGHOST": "a,b"}])
def test_check_dsn_accepts_usable_string(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dsn: str, environ: dict[str, str]
) -> None:
    services = tmp_path / "services"
    services.write_text("[fleet]\nhost=db1,db2\nport=5432,5433\ndbname=d\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    check_dsn("DATABASE_URL", dsn)
