"""The versions of Python and Postgres that Holdfast is for: `python -m tests.matrix`, or `make test-matrix`.

Each Python gets the built wheel, a smoke test and the tests that need no server; each Postgres the tests of the engine,
the database and the journal. `--full` adds more tests to each; `--only 3.12 --only 17` checks these. A version that
cannot be had is reported, and with CI=true it is a failure. `make test` covers the Postgres that it uses, and the tests
with its Python: these are left out here.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.db.embedded_server import MAJOR_VERSION
from tests.matrix import postgres, pythons, wheel
from tests.matrix.outcome import Failed, Missing

AT_ONCE = 2
PYTHON_OF_TEST = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Outcome:
    name: str
    result: str
    seconds: float
    problem: str = ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--full", action="store_true", help="more tests for each version")
    parser.add_argument("--only", action="append", metavar="VERSION", help="of Python (3.12) or of Postgres (17)")
    chosen = parser.parse_args(arguments)
    known = [*pythons.versions(), *postgres.versions()]
    if unknown := sorted(set(chosen.only or []) - set(known)):
        parser.error(f"there is no version {', '.join(unknown)}; there are {', '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="holdfast-matrix-") as name:
        directory = Path(name)
        directory.chmod(0o755)  # Postgres runs as an account of its own under root.
        outcomes = check(directory, chosen.only, full=chosen.full)
    print()
    for outcome in sorted(outcomes, key=lambda outcome: known.index(outcome.name.split()[-1])):
        print(f"{outcome.name:<14} {outcome.result:<8} {outcome.seconds:4.0f} s")
    bad = {"failed", "missing"} if os.environ.get("CI") else {"failed"}
    return int(any(outcome.result in bad for outcome in outcomes))


def check(directory: Path, only: list[str] | None, *, full: bool) -> list[Outcome]:
    """Check these versions (None: all), a few at once, and print each result as it comes."""
    jobs: dict[str, Callable[..., None]] = {}
    outcomes = []
    if python_versions := [version for version in pythons.versions() if only is None or version in only]:
        try:
            built = wheel.build(directory / "dist")
        except Failed as error:
            print(error)
            return [Outcome(f"Python {version}", "failed", 0) for version in python_versions]
        for version in python_versions:
            tests = [] if version == PYTHON_OF_TEST and only is None and not full else [*pythons.FAST]
            more = [*postgres.TESTS] if full else []
            jobs[f"Python {version}"] = partial(pythons.check, version, built, tests, more)
    for version in postgres.versions():
        if only is None and not full and version == str(MAJOR_VERSION):
            outcomes.append(Outcome(f"Postgres {version}", "by test", 0))
        elif only is None or version in only:
            jobs[f"Postgres {version}"] = partial(postgres.check, version, more=full)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for number, done in enumerate(
            as_completed([pool.submit(_outcome, name, job, directory) for name, job in jobs.items()]), 1
        ):
            outcome = done.result()
            print(f"[{number}/{len(jobs)}] {outcome.name} {outcome.result}, {outcome.seconds:.0f} s", flush=True)
            if outcome.problem:
                print(outcome.problem, flush=True)
            outcomes.append(outcome)
    return outcomes


def _outcome(name: str, job: Callable[..., None], directory: Path) -> Outcome:
    place = directory / name.replace(" ", "-").lower()
    place.mkdir(mode=0o755)
    started = time.monotonic()
    try:
        job(directory=place)
    except Missing as error:
        return Outcome(name, "missing", time.monotonic() - started, str(error))
    except Exception as error:
        problem = str(error) if isinstance(error, Failed) else repr(error)
        return Outcome(name, "failed", time.monotonic() - started, problem)
    return Outcome(name, "passed", time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main())
