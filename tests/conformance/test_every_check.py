"""No check of the wire may get lost."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

CHECKS = {f"c{number:02}" for number in range(1, 65)}


def test_every_check_has_a_test() -> None:
    modules = [
        importlib.import_module(f"{__package__}.{file.stem}") for file in Path(__file__).parent.glob("test_c_*.py")
    ]
    found = {
        match[1]
        for module in modules
        for name, value in vars(module).items()
        if callable(value) and (match := re.match(r"test_(c\d\d)_", name))
    }
    assert found == CHECKS, f"without a test, or no check: {sorted(found ^ CHECKS)}"
