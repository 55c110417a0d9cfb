"""No message shows a secret of the settings, however malformed the setting is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from holdfast.db.connect import connection_parameters
from holdfast.errors import OperatorError
from holdfast.settings import Settings, environment_names, load_settings
from holdfast.settings.secrets import NOT_SHOWN, shown_url
from holdfast.signals.redis_url import parse_redis_url
from holdfast.telemetry.redaction import Redactor, secrets_of

CORE = "TOPSECRET"
SECRET_FIELDS = sorted(name for name, field in Settings.model_fields.items() if not field.repr)
# What a password may begin and end with, and stand in.
WRAPPING = st.text(alphabet="/?#@:%&=,;' \"\\[]+$a1\n\0", max_size=4)
TEMPLATES = (
    "{0}",
    "u:{0}@h/d",
    "u:{0}@h:abc/d",
    "//u:{0}@h",
    "mysql://u:{0}@h/d",
    "postgresql://u:{0}@h/d",
    "postgresql://u:{0}@h:abc/d",
    "postgresql://u:{0}",
    "postgresql://u@h:5432/d?password={0}",
    "host=h password={0}",
    "host=h password='{0}",
    "host=h password={0} nonsense",
    "redis://u:{0}@h:abc",
    "redis://:{0}@h/zero",
    "redis://u:{0}",
    "redis+sentinel://h?sentinel_password={0}",
    "redis:u:{0}@h",
    "ftp://u:{0}@h",
    "http://u:{0}@h:0",
    "http://{0}@",
    "authorization=Bearer {0}",
    "whsec_{0}",
)


def is_recognisable(template: str, before: str, after: str) -> bool:
    """Whether the password stands where one can stand.

    Where the host is missing, what comes after an @ of the password looks like a host. A password alone with :// after
    it looks like a scheme.
    """
    return ("@" in template or "@" not in before) and (template != "{0}" or "://" not in after)


def messages(field: str, value: str) -> Iterator[str]:
    """All that is said when a setting has this value."""
    given_names = environment_names(Settings.model_fields[field])
    try:
        loaded = load_settings({given_names[-1]: value, "HOLDFAST_TRACES": "true"})
    except OperatorError as error:
        yield str(error)
        return
    yield from (repr(loaded), str(loaded))
    # Every process makes its redactor of the settings, whatever is in them.
    yield Redactor(secrets_of(loaded)).text("a line of the log")
    for session in (False, True):
        with_url = loaded if loaded.database_url else loaded.model_copy(update={"database_url": "host=h"})
        try:
            connection_parameters(with_url, "test", session=session)
        except OperatorError as error:
            yield str(error)
    if loaded.redis_url is not None:
        try:
            yield repr(parse_redis_url(loaded.redis_url))
        except OperatorError as error:
            yield str(error)


def test_settings_that_hold_secrets_are_known() -> None:
    assert SECRET_FIELDS == [
        "database_url",
        "direct_database_url",
        "otlp_endpoint",
        "otlp_headers",
        "otlp_traces_endpoint",
        "otlp_traces_headers",
        "redis_url",
        "webhook_secrets",
    ]


@pytest.mark.parametrize("field", SECRET_FIELDS)
@settings(max_examples=300, deadline=None)
@given(template=st.sampled_from(TEMPLATES), before=WRAPPING, after=WRAPPING)
def test_no_message_about_a_setting_shows_its_secret(field: str, template: str, before: str, after: str) -> None:
    assume(is_recognisable(template, before, after))
    for message in messages(field, template.format(f"{before}{CORE}{after}")):
        assert CORE not in message


@settings(max_examples=300, deadline=None)
@given(template=st.sampled_from(TEMPLATES), before=WRAPPING, after=WRAPPING)
def test_shown_url_has_no_secret(template: str, before: str, after: str) -> None:
    assume(is_recognisable(template, before, after))
    url = template.format(f"{before}{CORE}{after}")
    # What comes after "://" is where hosts stand.
    assert CORE not in shown_url(url) or url.startswith("a://")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:p@h:5432/d", "postgresql://***@h:5432/d"),
        ("redis+sentinel://a:1,b:2/name", "redis+sentinel://a:1,b:2/…"),
        ("redis://u:p@[::1]:6379/0?x=y", "redis://***@[::1]:6379/0?…"),
        ("mysql://u:p@h/d", "mysql://***@h/d"),
        ("ftp://host", "ftp://host"),
        ("nothing", NOT_SHOWN),
    ],
)
def test_shown_url_shows_where_it_leads(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_errors_of_pydantic_have_no_values() -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(webhook_secrets=CORE)  # type: ignore[call-arg]
    assert CORE not in str(refused.value)


def test_log_lines_have_no_headers_of_the_collector() -> None:
    loaded = load_settings({"OTEL_EXPORTER_OTLP_HEADERS": f"x-team={CORE}%21,broken-{CORE}"})
    redactor = Redactor(secrets_of(loaded))
    for text in (f"x-team={CORE}%21", f"{CORE}!", f"broken-{CORE}"):
        assert CORE not in redactor.text(text)


@pytest.mark.parametrize("field", ["database_url", "direct_database_url", "redis_url", "otlp_endpoint"])
@pytest.mark.parametrize("password", [f"{CORE}[", f"]{CORE}", f"[{CORE}]", f"{CORE}[::1"])
def test_log_lines_have_no_password_with_brackets(field: str, password: str) -> None:
    """Python's urlsplit raises ValueError for such a URL."""
    loaded = load_settings({}).model_copy(update={field: f"scheme://u:{password}@h/0"})
    assert CORE not in Redactor(secrets_of(loaded)).text(f"cannot log in with {password}")


@pytest.mark.parametrize(
    ("variable", "command"),
    [
        ("DATABASE_URL", "migrate"),
        ("DATABASE_URL", "doctor"),
        ("DIRECT_DATABASE_URL", "doctor"),
        ("REDIS_URL", "doctor"),
    ],
)
def test_command_does_not_print_the_password_of_a_malformed_url(
    variable: str, command: str, database_url: str, tmp_path: Path
) -> None:
    environ = {"PATH": os.environ["PATH"], "COLUMNS": "200", "DATABASE_URL": database_url}
    environ |= {"HOLDFAST_DATABASE_TIMEOUT": "1", variable: f"mysql://u:{CORE}@127.0.0.1:1/d"}
    done = holdfast(command, environ, tmp_path)
    assert done.returncode != 0
    assert CORE not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("variable", "command", "code", "says"),
    [
        ("DATABASE_URL", "migrate", 78, "DATABASE_URL cannot be connected to"),
        ("DATABASE_URL", "serve", 78, "DATABASE_URL cannot be connected to"),
        ("DATABASE_URL", "doctor", 1, "cannot be connected to"),
        ("DIRECT_DATABASE_URL", "doctor", 1, "Correct HOLDFAST_DIRECT_DATABASE_URL"),
        ("REDIS_URL", "serve", 78, "percent-encode what is not a letter or a digit"),
        ("REDIS_URL", "web", 78, "percent-encode what is not a letter or a digit"),
        ("REDIS_URL", "worker", 78, "percent-encode what is not a letter or a digit"),
        ("REDIS_URL", "doctor", 1, "fix: Correct the variable"),
    ],
)
@pytest.mark.parametrize("password", [f"{CORE}[", f"[{CORE}]"])
def test_command_understands_or_refuses_a_password_with_brackets(
    variable: str, command: str, code: int, says: str, password: str, database_url: str, tmp_path: Path
) -> None:
    graph = "from langgraph.graph import START, StateGraph\n"
    graph += "graph = StateGraph(dict).add_node('n', lambda state: state).add_edge(START, 'n')\n"
    (tmp_path / "graph.py").write_text(graph)
    (tmp_path / "langgraph.json").write_text('{"dependencies": ["."], "graphs": {"g": "./graph.py:graph"}}')
    scheme = "redis" if variable == "REDIS_URL" else "postgresql"
    environ = {"PATH": os.environ["PATH"], "COLUMNS": "400", "DATABASE_URL": database_url, "PORT": "0"}
    environ |= {"HOLDFAST_DATABASE_TIMEOUT": "1", variable: f"{scheme}://u:{password}@127.0.0.1:1/0"}
    done = holdfast(command, environ, tmp_path)
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr
    assert CORE not in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("variable", ["DATABASE_URL", "DIRECT_DATABASE_URL", "REDIS_URL"])
def test_server_refuses_a_malformed_url_before_it_starts_processes(
    variable: str, database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "langgraph.json").write_text('{"dependencies": ["."], "graphs": {"g": "./graph.py:graph"}}')
    environ = {"PATH": os.environ["PATH"], "DATABASE_URL": database_url, "PORT": "0"}
    done = holdfast("serve", {**environ, variable: f"mysql://u:{CORE}@127.0.0.1:1/d"}, tmp_path)
    assert done.returncode == 78, done.stderr
    [line] = map(json.loads, done.stderr.splitlines())
    assert line["event"] == "process.refused"
    assert line["error"].startswith(variable)
    assert CORE not in done.stderr


def holdfast(command: str, environ: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast", command], env=environ, cwd=cwd, capture_output=True, text=True, timeout=60
    )
