"""When schedules are due, above all where clocks change."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidRequest
from holdfast.resources.schedules import ALIASES, Schedule


def dues(schedule: str, timezone: str | None, after: str, number: int) -> list[str]:
    """The next due times in UTC, each found from the one before, as firing does it."""
    parsed, moment, found = Schedule.parse(schedule, timezone), datetime.fromisoformat(after), []
    for _ in range(number):
        due = parsed.after(moment)
        assert due is not None
        assert due > moment
        assert due.utcoffset() == UTC.utcoffset(None)
        found.append(due.strftime("%m-%d %H:%M:%S").removesuffix(":00"))
        moment = due
    return found


def test_five_fields_and_six() -> None:
    assert dues("*/20 9 * * MON-FRI", None, "2026-11-13T09:30:00Z", 3) == ["11-13 09:40", "11-16 09:00", "11-16 09:20"]
    assert dues("* * * * * */25", None, "2026-01-01T00:00:30.5Z", 3) == [
        "01-01 00:00:50",
        "01-01 00:01",
        "01-01 00:01:25",
    ]
    assert dues("30 2 * * * 5", None, "2026-01-01T00:00:00Z", 2) == ["01-01 02:30:05", "01-02 02:30:05"]
    assert dues("0 0 L * *", None, "2026-02-01T00:00:00Z", 2) == ["02-28 00:00", "03-31 00:00"]
    # Either the day of the month or the day of the week, when both are given.
    assert dues("0 0 13 * FRI", None, "2026-02-07T00:00:00Z", 3) == ["02-13 00:00", "02-20 00:00", "02-27 00:00"]
    assert dues("@weekly", None, "2026-11-15T00:00:00Z", 1) == ["11-22 00:00"]
    for alias in ALIASES:
        Schedule.parse(f" {alias.upper()} ", None)


def test_a_due_time_is_later_than_the_moment_it_is_asked_for() -> None:
    assert dues("0 9 * * *", None, "2026-01-01T08:59:59.999999Z", 1) == ["01-01 09:00"]
    assert dues("0 9 * * *", None, "2026-01-01T09:00:00Z", 1) == ["01-02 09:00"]


# In New York, 2026: on March 8 two o'clock is three, at 07:00 UTC; on November 1 two is one again, at 06:00 UTC.


def test_a_time_that_is_skipped_is_due_when_the_gap_ends() -> None:
    assert dues("30 2 * * *", "America/New_York", "2026-03-07T12:00:00Z", 2) == ["03-08 07:00", "03-09 06:30"]
    assert dues("30 2 * * * 15", "America/New_York", "2026-03-07T12:00:00Z", 2) == ["03-08 07:00", "03-09 06:30:15"]
    # Two times in one gap are one firing.
    assert dues("0,30 2 * * *", "America/New_York", "2026-03-07T12:00:00Z", 2) == ["03-08 07:00", "03-09 06:00"]


def test_a_time_that_comes_twice_is_due_once() -> None:
    assert dues("30 1 * * *", "America/New_York", "2026-10-31T12:00:00Z", 2) == ["11-01 05:30", "11-02 06:30"]
    assert dues("30 1 * * * 0", "America/New_York", "2026-10-31T12:00:00Z", 2) == ["11-01 05:30", "11-02 06:30"]
    # Asked for in the hour that comes again: 01:10 for the second time.
    assert dues("30 1 * * *", "America/New_York", "2026-11-01T06:10:00Z", 1) == ["11-02 06:30"]


def test_an_interval_stays_one() -> None:
    half_hours = ["11-01 05:00", "11-01 05:30", "11-01 06:00", "11-01 06:30", "11-01 07:00"]
    assert dues("*/30 * * * *", "America/New_York", "2026-11-01T04:59:00Z", 5) == half_hours
    assert dues("0 * * * *", "America/New_York", "2026-03-08T05:59:00Z", 3) == [
        "03-08 06:00",
        "03-08 07:00",
        "03-08 08:00",
    ]


def test_other_clocks() -> None:
    # Half an hour of daylight saving; a midnight that does not exist; a quarter of an hour off.
    assert dues("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T00:00:00Z", 2) == ["10-03 15:30", "10-04 15:15"]
    assert dues("0 0 * * *", "Africa/Cairo", "2026-04-23T00:00:00Z", 2) == ["04-23 22:00", "04-24 21:00"]
    assert dues("0 9 * * *", "Asia/Kathmandu", "2026-01-01T00:00:00Z", 1) == ["01-01 03:15"]


@given(
    st.datetimes(datetime(2026, 10, 31), datetime(2026, 11, 3), timezones=st.just(UTC))  # noqa: DTZ001
    | st.datetimes(datetime(2026, 3, 7), datetime(2026, 3, 10), timezones=st.just(UTC)),  # noqa: DTZ001
    st.sampled_from(["30 1,2 * * *", "0,30 2 * * *", "*/20 1-3 * * *", "0 * * * *", "5 0-23/2 * * * 30"]),
)
def test_schedule_never_goes_back_nor_skips(moment: datetime, schedule: str) -> None:
    """From wherever it is asked, what comes next is what comes next from anywhere before that."""
    parsed = Schedule.parse(schedule, "America/New_York")
    start: datetime | None = datetime(2026, moment.month, moment.day, tzinfo=UTC)
    chain: list[datetime] = []
    while start is not None and (not chain or chain[-1] <= moment):
        start = parsed.after(start)
        assert start is not None
        chain.append(start)
    assert all(one < other for one, other in pairwise(chain))
    assert parsed.after(moment) == next(due for due in chain if due > moment)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("0 0 0 ? * MON 2027", "none for years"),
        ("* * * * * * *", "none for years"),
        ("@reboot", "is not one of @yearly"),
        ("@every 5m", "is not one of @yearly"),
        ("CRON_TZ=UTC 0 0 * * *", "into `timezone`"),
        ("TZ=UTC * * * * * 0", "into `timezone`"),
        ("", "has 0 fields"),
        ("* * * *", "has 4 fields"),
        ("* * * * * * * *", "has 8 fields"),
        ("0 0 * * ?", "Bad day-of-week"),
        ("H * * * *", "Bad minute"),
    ],
)
def test_forms_of_other_schedulers_are_refused_by_name(schedule: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match="schedule: ") as refused:
        Schedule.parse(schedule, None)
    assert said in str(refused.value)


@pytest.mark.parametrize("schedule", ["0 0 31 2 *", "* * */20 * 1L", "* * * * 5L/2", "61 * * * *", "x", "@reboot"])
def test_what_never_comes_is_refused(schedule: str) -> None:
    with pytest.raises(InvalidRequest):
        Schedule.parse(schedule, None)
