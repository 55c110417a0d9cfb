"""When a cron is due: a schedule read on the wall clock of a timezone.

Five fields are cron's own: minute, hour, day of month, month, day of week. A sixth, at the *end*, is the second, as the
LangGraph server reads it. Where clocks change, Debian's cron is followed. A schedule for certain times (neither minute
nor hour begins with `*`) fires once per time: at the end of the gap when the time is skipped, the first time when it
comes twice. Any other schedule is an interval and is not affected by the change.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from holdfast.errors import InvalidRequest

ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


@dataclass(frozen=True)
class Schedule:
    # Six fields with the second first.
    expression: str
    zone: tzinfo
    # True: for certain times of the day. False: an interval.
    certain: bool

    @classmethod
    def parse(cls, schedule: str, timezone: str | None) -> Schedule:
        """Raises InvalidRequest for a schedule or a timezone that does not exist, or that never comes."""
        fields = ALIASES.get(schedule.strip().lower(), schedule).split()
        if len(fields) not in (5, 6) or "=" in fields[0]:
            raise InvalidRequest(f"schedule: '{schedule}' {_what_is_wrong(fields)}.")
        second = fields.pop() if len(fields) == 6 else "0"
        expression = " ".join([second, *fields])
        parsed = cls(expression, _zone(timezone), not (fields[0].startswith("*") or fields[1].startswith("*")))
        try:
            first = parsed.after(datetime.now(UTC))
        except (CronSimError, ValueError, TypeError, AssertionError) as error:
            # The parser raises the last three for some invalid schedules, such as steps of a last weekday.
            reason = str(error) if isinstance(error, CronSimError) else "it makes no sense"
            raise InvalidRequest(f"schedule: '{schedule}' is not a cron expression: {reason}.") from None
        if first is None:
            raise InvalidRequest(f"schedule: '{schedule}' never comes.")
        return parsed

    def after(self, moment: datetime) -> datetime | None:
        """The first due time later than `moment`, in UTC; None when there is none in the next fifty years."""
        local = moment.astimezone(self.zone)
        for found in CronSim(self.expression, local.replace(tzinfo=None) if self.certain else local):
            due = self._instant(found) if self.certain else found.astimezone(UTC)
            # In an hour that occurs twice, the wall clock alone may yield its first occurrence.
            if due > moment:
                return due
        return None

    def _instant(self, wall: datetime) -> datetime:
        """The instant at which the wall clock shows a time: the first one if there are two, and the end of the gap if
        there is none."""
        while True:
            instant = wall.replace(tzinfo=self.zone, fold=0).astimezone(UTC)
            if instant.astimezone(self.zone).replace(tzinfo=None, fold=0) == wall:
                return instant
            wall = wall.replace(second=0) + timedelta(minutes=1)


def _what_is_wrong(fields: list[str]) -> str:
    """What is wrong with the form of a schedule. Recognises some forms of other cron systems."""
    if fields and fields[0].startswith("@"):
        return f"is not one of {', '.join(ALIASES)}"
    if fields and "=" in fields[0]:
        return "names a timezone: put that into `timezone`"
    if len(fields) == 7:
        return "has 7 fields: there is none for years. Give 5, or 6 with the seconds last, and an `end_time`"
    return f"has {len(fields)} fields; cron has 5, or 6 with the seconds last"


@cache
def _known_zones() -> frozenset[str]:
    return frozenset(available_timezones())


def _zone(timezone: str | None) -> tzinfo:
    if timezone is None or timezone == "UTC":
        return UTC
    # Compared with the list, because ZoneInfo treats a name as a path, which may be a directory or lie outside its
    # database.
    if timezone not in _known_zones():
        raise InvalidRequest(f"timezone: '{timezone}' is not an IANA timezone such as 'Europe/Berlin'.")
    return ZoneInfo(timezone)
