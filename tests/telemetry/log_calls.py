"""The log calls of a source tree, found by reading it: what each says, how loudly, and with which fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LEVELS = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "exception": "error",
    "critical": "critical",
}
# Not fields of the line: how the exception that it is about is given.
NOT_FIELDS = {"exc_info", "stack_info"}
# What a Backoff says when something is away, and when it is back.
OUTAGE = frozenset({"error"})
RECOVERY = frozenset({"seconds", "failures"})
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class LogCall:
    """One event that one place may log. `open`: with fields that are decided at run time as well."""

    event: str
    level: str
    fields: frozenset[str]
    open: bool
    place: str


class UnreadableCall(Exception):
    """A log call that cannot be held against the catalogue."""


def log_calls(directory: Path) -> Iterator[LogCall]:
    for file in sorted(directory.rglob("*.py")):
        yield from calls_in(file.read_text(), str(file.relative_to(directory)))


def calls_in(source: str, name: str) -> Iterator[LogCall]:
    """Raises UnreadableCall for a call whose event is not a literal."""
    tree = ast.parse(source)
    if any(isinstance(node, ast.ClassDef) and node.name == "Backoff" for node in tree.body):
        return  # It says what it was made with, and that is found where it is made.
    logs = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _makes_logger(node.value):
            logs = True
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if [ast.unparse(target) for target in targets] != ["log"]:
                raise UnreadableCall(f"{name}:{node.lineno}: name the logger `log`, so that its calls are found")
    yield from _within(tree, None, name, logs)


def _within(node: ast.AST, function: Function | None, name: str, logs: bool) -> Iterator[LogCall]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield from _call(child, function, f"{name}:{child.lineno}", logs)
        yield from _within(child, child if isinstance(child, Function) else function, name, logs)


def _call(call: ast.Call, function: Function | None, place: str, logs: bool) -> Iterator[LogCall]:
    if isinstance(call.func, ast.Name) and call.func.id == "Backoff":
        outage, recovered = (_literals(argument, place) for argument in call.args[:2])
        spread = [_spread(keyword.value, function) for keyword in call.keywords if keyword.arg == "about"]
        about = {field for found in spread for field in found or ()}
        yield from (LogCall(event, "warning", OUTAGE | about, None in spread, place) for event in outage if event)
        yield from (LogCall(event, "info", RECOVERY | about, None in spread, place) for event in recovered if event)
        return
    if not isinstance(call.func, ast.Attribute) or not _is_logger(call.func.value, logs):
        return
    level = LEVELS.get(call.func.attr)
    if level is None:
        raise UnreadableCall(f"{place}: log.{call.func.attr}() is not a way to log that is known here")
    if len(call.args) != 1:
        raise UnreadableCall(f"{place}: a log call has one positional argument, its event")
    fields: set[str] = set()
    is_open = False
    for keyword in call.keywords:
        if keyword.arg is not None:
            fields.add(keyword.arg)
            continue
        found = _spread(keyword.value, function)
        is_open = is_open or found is None
        fields |= found or set()
    for event in _literals(call.args[0], place):
        if event is not None:
            yield LogCall(event, level, frozenset(fields - NOT_FIELDS), is_open, place)


def _makes_logger(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("structlog.get_logger", "get_logger")


def _is_logger(node: ast.expr, logs: bool) -> bool:
    """`logs`: whether the module has a logger. Elsewhere, `log` is something else."""
    return _makes_logger(node) or (logs and isinstance(node, ast.Name) and node.id == "log")


def _literals(node: ast.expr, place: str) -> list[str | None]:
    """The values that an expression may have, if they are written there."""
    if isinstance(node, ast.IfExp):
        return _literals(node.body, place) + _literals(node.orelse, place)
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str)):
        return [node.value]
    raise UnreadableCall(f"{place}: the event `{ast.unparse(node)}` is not a literal; write it out where it is logged")


def _spread(node: ast.expr, function: Function | None) -> set[str] | None:
    """The keys of a dictionary that is written in the same function. None when they are decided elsewhere."""
    if isinstance(node, ast.Dict):
        keys: set[str] = set()
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                inner = _spread(value, function)
                if inner is None:
                    return None
                keys |= inner
            elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                keys.add(key.value)
            else:
                return None
        return keys
    if isinstance(node, ast.Name) and function is not None:
        written = [
            one.value
            for one in ast.walk(function)
            if isinstance(one, ast.Assign) and [ast.unparse(target) for target in one.targets] == [node.id]
        ]
        if len(written) == 1:
            return _spread(written[0], function)
    return None
