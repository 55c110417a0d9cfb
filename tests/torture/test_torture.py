"""The ordeal, short enough for every day, and the proof that its checker can find something."""

from __future__ import annotations

import pytest

from tests.torture.__main__ import torture


@pytest.mark.timeout(900)
async def test_a_fleet_that_is_hurt_loses_and_doubles_nothing() -> None:
    verdict = await torture(seed=20, seconds=120)
    assert verdict.good, verdict.table()
    assert verdict.accepted > 50


@pytest.mark.parametrize(("wrong", "good"), [("deaf", True), ("no-fence", False)])
@pytest.mark.timeout(1500)
async def test_the_checker_finds_a_journal_that_does_not_check_fences(wrong: str, good: bool) -> None:
    """A worker that is cut off is taken for dead long before its lease ends. These do not hear of it, and go on when
    they are back. Fences make that harmless; without them the checker must see what came of it."""
    for seed in range(1, 8):
        verdict = await torture(seed=seed, seconds=25, wrong=wrong, only="a worker cut off")
        stale = next(finding for finding in verdict.violations if finding.what == "stale writes accepted")
        if good or stale.count:
            break  # Whether a zombie has something to say when it is back is a matter of moments.
    assert (stale.count == 0) is good, verdict.table()
    assert verdict.good is good, verdict.table()
