"""Settings: names operators know, rules that are enforced, messages that say what to change."""

from __future__ import annotations

import re

import pytest

from holdfast.errors import SettingsError
from holdfast.settings import Settings, environment_names, load_settings


@pytest.mark.parametrize(
    ("variable", "field", "given", "expected"),
    [
        ("DATABASE_URI", "database_url", "postgresql://a/b", "postgresql://a/b"),
        ("DATABASE_URL", "database_url", "postgresql://a/b", "postgresql://a/b"),
        ("REDIS_URI", "redis_url", "redis://a", "redis://a"),
        ("N_JOBS_PER_WORKER", "jobs", "7", 7),
        ("BG_JOB_TIMEOUT_SECS", "run_timeout", "60", 60.0),
        ("BG_JOB_MAX_RETRIES", "max_retries", "5", 5),
        ("BG_JOB_HEARTBEAT", "heartbeat", "2", 2.0),
        ("LEASE_DURATION_SECONDS", "lease", "45", 45.0),
        ("HEARTBEAT_INTERVAL_SECONDS", "heartbeat", "3", 3.0),
        ("REAPER_INTERVAL_SECONDS", "reaper_interval", "2", 2.0),
        ("POSTGRES_POLL_INTERVAL_SECONDS", "poll_interval", "1", 1.0),
        ("WORKER_DRAIN_TIMEOUT", "drain_timeout", "10", 10.0),
        ("STATS_INTERVAL_SECS", "stats_interval", "30", 30.0),
        ("HOLDFAST_PORT", "port", "9000", 9000),
    ],
)
def test_settings_answer_to_the_names_operators_know(variable: str, field: str, given: str, expected: object) -> None:
    assert getattr(load_settings({variable: given}), field) == expected


def test_our_own_name_wins_over_a_borrowed_one() -> None:
    assert load_settings({"HOLDFAST_N_JOBS_PER_WORKER": "3", "N_JOBS_PER_WORKER": "8"}).jobs == 3


def test_a_flag_wins_over_the_environment() -> None:
    assert load_settings({"PORT": "9000"}, port=9001).port == 9001


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"N_JOBS_PER_WORKER": "0"}, ["N_JOBS_PER_WORKER=0: must be at least 1"]),
        ({"PORT": "70000"}, ["PORT=70000: must be at most 65,535"]),
        ({"LEASE_DURATION_SECONDS": "soon"}, ["LEASE_DURATION_SECONDS=soon: must be a number"]),
        ({"LEASE_DURATION_SECONDS": ""}, ["LEASE_DURATION_SECONDS=: must be a number"]),
        ({"DEAD_LETTER_TTL_SECONDS": "inf"}, ["DEAD_LETTER_TTL_SECONDS=inf: must be a number"]),
        ({"DATABASE_TIMEOUT": "0.000001"}, ["DATABASE_TIMEOUT=0.000001: must be at least 0.1"]),
        ({"STREAM_HEARTBEAT_SECONDS": "1e-9"}, ["STREAM_HEARTBEAT_SECONDS=1e-9: must be at least 0.05"]),
        ({"HEADER_TIMEOUT_SECONDS": "0.001"}, ["HEADER_TIMEOUT_SECONDS=0.001: must be at least 0.1"]),
        ({"BODY_TIMEOUT_SECONDS": "0.001"}, ["BODY_TIMEOUT_SECONDS=0.001: must be at least 0.1"]),
        ({"HOLDFAST_HOST": "a..b"}, ["HOLDFAST_HOST=a..b: must be a host name or an IP address"]),
        ({"HOLDFAST_HOST": "a" * 64}, [f"HOLDFAST_HOST={'a' * 64}: must be a host name or an IP address"]),
        ({"HOLDFAST_HEALTH_HOST": "a..b"}, ["HOLDFAST_HEALTH_HOST=a..b: must be a host name or an IP address"]),
        ({"MAX_BODY_BYTES": "1.5"}, ["MAX_BODY_BYTES=1.5: must be a whole number"]),
        ({"WEBHOOK_ALLOW_PRIVATE": "maybe"}, ["WEBHOOK_ALLOW_PRIVATE=maybe: must be true or false"]),
        ({"DEFAULT_MAX_SECONDS": "0"}, ["DEFAULT_MAX_SECONDS=0: must be more than 0"]),
        ({"BG_JOB_HEARTBEAT": "120"}, ["BG_JOB_HEARTBEAT=120: must be at most a third", "LEASE_DURATION_SECONDS=30"]),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "ftp://user:secret@collector"},
            ["OTEL_EXPORTER_OTLP_ENDPOINT=", "collector: must be the URL of an OTLP collector"],
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a..b:1"},
            ["OTEL_EXPORTER_OTLP_ENDPOINT=http://a..b:1: must be the URL of an OTLP collector", "a host name or an IP"],
        ),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"https://{'a' * 64}/v1/traces"},
            [f"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=https://{'a' * 64}", "a host name or an IP address"],
        ),
        ({"HOLDFAST_DATABASE_SCHEMA": "a;drop"}, ["HOLDFAST_DATABASE_SCHEMA=a;drop", "lower-case"]),
        ({"HOLDFAST_DATABASE_POOL_MIN": "20"}, ["DATABASE_POOL_MIN=20", "DATABASE_POOL_MAX=10"]),
        ({"HOLDFAST_ALLOWED_HOSTS": "a.example, http://b:1"}, ["HOLDFAST_ALLOWED_HOSTS=a.example", "'http://b:1'"]),
        ({"HOLDFAST_LOG_LEVEL": "loud"}, ["HOLDFAST_LOG_LEVEL=loud: must be 'debug', 'info', 'warning' or 'error'"]),
        ({"PORT": "x", "N_JOBS_PER_WORKER": "-1"}, ["PORT=x", "N_JOBS_PER_WORKER=-1"]),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_field_the_value_and_the_rule(
    environ: dict[str, str], names: list[str]
) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(environ)
    for name in names:
        assert name in str(error.value)


def test_every_field_says_what_it_is_for() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert environment_names(field)[0].startswith("HOLDFAST_"), name


@pytest.mark.parametrize("value", ["", "x", "-1", "1e30", "nan", "inf", "1.5", "ftp://h/x"])
def test_no_message_is_in_the_words_of_the_validator(value: str) -> None:
    """Each is one sentence with the variable that was set, its value and the rule: never pydantic's own words."""
    for field in Settings.model_fields.values():
        variable = environment_names(field)[-1]
        message = refusal({variable: value})
        if message is not None:
            assert message.startswith(f"{variable}=") or "LEASE_DURATION_SECONDS" in message
            assert re.search(r": (each )?must ", message), message
            assert not re.search("should|unable|parse|Input|Value error", message), message


def refusal(environ: dict[str, str]) -> str | None:
    try:
        load_settings(environ)
    except SettingsError as error:
        return str(error)
    return None


@pytest.mark.parametrize("origin", ["app.example.com", "localhost:3000", "https://", "https://a.example/path", "//a"])
def test_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({"CORS_ALLOW_ORIGINS": f"https://good.example, {origin}"})
    message = str(refused.value)
    assert message.startswith(f"CORS_ALLOW_ORIGINS=https://good.example, {origin}: each must be a scheme, a host")
    assert f"not '{origin}'" in message


def test_origins_are_kept_as_browsers_write_them() -> None:
    given = " HTTPS://A.example/ ,http://b.example:80,https://c.example:8443,*,"
    assert load_settings({"CORS_ALLOW_ORIGINS": given}).cors_allow_origins == (
        "https://a.example,http://b.example,https://c.example:8443,*"
    )
