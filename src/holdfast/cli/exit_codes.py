"""What the exit codes of `holdfast` mean. The larger ones are those of sysexits.h."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    FAILURE = 1
    USAGE = 2
    RUN_ERROR = 3
    RUN_CANCELLED = 4
    RUN_TIMEOUT = 5
    UNAVAILABLE = 69
    SOFTWARE = 70
    REPLACE = 75
    CONFIG = 78
    DETACHED = 130


MEANING: dict[ExitCode, str] = {
    ExitCode.OK: "done; for a run: it succeeded",
    ExitCode.FAILURE: "the server refused the request, or the command failed",
    ExitCode.USAGE: "the command line is wrong",
    ExitCode.RUN_ERROR: "the run ended in an error",
    ExitCode.RUN_CANCELLED: "the run was cancelled, or rolled back",
    ExitCode.RUN_TIMEOUT: "the run used up its time",
    ExitCode.UNAVAILABLE: "the server cannot be reached, or its database does not answer",
    ExitCode.SOFTWARE: "a defect in Holdfast",
    ExitCode.REPLACE: "a worker could not go on working, and has handed its runs over; start another",
    ExitCode.CONFIG: "settings, langgraph.json or the database must change first",
    ExitCode.DETACHED: "stopped with Ctrl-C; a run that was being watched goes on",
}


class CommandError(Exception):
    """Ends the command with a message on stderr and an exit code."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILURE) -> None:
        super().__init__(message)
        self.code = code
