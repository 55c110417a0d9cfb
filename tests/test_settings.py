"""Settings: names operators know, rules that are enforced, messages that say what to change."""

from __future__ import annotations

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
        ({"N_JOBS_PER_WORKER": "0"}, ["N_JOBS_PER_WORKER=0", "greater than or equal to 1"]),
        ({"PORT": "70000"}, ["PORT=70000", "65535"]),
        ({"LEASE_DURATION_SECONDS": "soon"}, ["LEASE_DURATION_SECONDS=soon", "number"]),
        ({"BG_JOB_HEARTBEAT": "120"}, ["120", "at most a third", "LEASE_DURATION_SECONDS=30"]),
        ({"HOLDFAST_DATABASE_SCHEMA": "a;drop"}, ["HOLDFAST_DATABASE_SCHEMA=a;drop", "lower-case"]),
        ({"HOLDFAST_DATABASE_POOL_MIN": "20"}, ["DATABASE_POOL_MIN=20", "DATABASE_POOL_MAX=10"]),
        ({"HOLDFAST_ALLOWED_HOSTS": "a.example, http://b:1"}, ["HOLDFAST_ALLOWED_HOSTS=a.example", "'http://b:1'"]),
        ({"HOLDFAST_LOG_LEVEL": "loud"}, ["HOLDFAST_LOG_LEVEL=loud", "debug"]),
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
