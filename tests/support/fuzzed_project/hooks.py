"""What schemathesis loads beside the schema: how to keep generated requests from being all alike, or from lasting."""

from __future__ import annotations

from typing import Any

import schemathesis

GRAPHS = ("echo", "ask", "chat", "parent")
YEAR = 31_536_000


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]) -> None:
    for body in case.body if isinstance(case.body, list) else [case.body]:
        if isinstance(body, dict):
            _temper(body)
    # A run that asks is followed until somebody answers.
    if case.query and str(case.query.get("follow")).lower() in ("true", "t", "yes", "y", "on", "1"):
        case.query["follow"] = "false"


def _temper(body: dict[str, Any]) -> None:
    """Most strings are no assistant, and no run would ever start. A delay that is allowed, but long, would not end."""
    for name in ("assistant_id", "graph_id"):
        given = body.get(name)
        if isinstance(given, str) and len(given) % 3:
            body[name] = GRAPHS[len(given) % len(GRAPHS)]
    after = body.get("after_seconds")
    if isinstance(after, (int, float)) and not isinstance(after, bool) and 0.01 < after <= YEAR:
        body["after_seconds"] = 0.01
    if isinstance(body.get("params"), dict):
        _temper(body["params"])
