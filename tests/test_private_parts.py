"""Parts of libraries that Holdfast relies on although they are not documented. docs/dependencies.md lists them.

When a test fails here after an update: read what changed, check the module of ours that is named, and put in the new
digest.
"""

from __future__ import annotations

import hashlib
import inspect
import tomllib
from pathlib import Path
from typing import Any

import psycopg
import pytest
import uvicorn
from packaging.requirements import Requirement
from psycopg_pool import AsyncConnectionPool
from psycopg_pool.pool_async import AddConnection
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

ROOT = Path(__file__).parent.parent
# By our module: what it relies on, and the digest of its source.
PARTS: dict[str, list[tuple[Any, str]]] = {
    "db/buffered_pipeline.py": [
        (psycopg.AsyncPipeline._communicate_gen, "e1b241de73fce8e7"),
        (psycopg.AsyncPipeline._enqueue_sync, "976a6bf02bf2dbe0"),
        (psycopg.AsyncPipeline._exit_gen, "fd7793ca0482bd86"),
        (psycopg.AsyncPipeline._fetch_gen, "c2bcdf56de27f102"),
    ],
    "db/reconnecting_pool.py": [
        (AsyncConnectionPool.schedule_task, "ac81e34158d5c6e8"),
        (AddConnection, "447fb98ef8bd97b3"),
    ],
    "api/http_limits.py": [
        (HttpToolsProtocol, "6ee10f52764cf4cb"),
        (RequestResponseCycle, "4b9aaa6f7139e151"),
        (FlowControl, "db30658d315eb11c"),
    ],
    "api/websocket_limits.py": [
        (WebSocketsSansIOProtocol, "c5feda3de23d0a07"),
    ],
    "api/server.py": [
        (uvicorn.Server.startup, "2aa1d70a244bfcf2"),
        (uvicorn.Server.handle_exit, "553276efa26e09ea"),
    ],
}


def digest(part: Any) -> str:
    """Of a class, the digest of its methods and not of its attributes. To find the source of a class `inspect` parses
    the whole module, which raised SystemError once in a full run."""
    functions = [one for one in vars(part).values() if inspect.isfunction(one)] if inspect.isclass(part) else [part]
    source = "".join(inspect.getsource(function) for function in functions)
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("module", "part", "known"),
    [(module, part, known) for module, parts in PARTS.items() for part, known in parts],
    ids=[f"{module} {part.__qualname__}" for module, parts in PARTS.items() for part, _ in parts],
)
def test_private_part_is_as_it_was_read(module: str, part: Any, known: str) -> None:
    assert (ROOT / "src" / "holdfast" / module).exists()
    assert digest(part) == known, f"{part.__qualname__} has changed: check src/holdfast/{module}"


def test_libraries_with_private_parts_have_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = {one.name: one for one in map(Requirement, project["dependencies"])}
    for name in ("psycopg", "psycopg-pool", "uvicorn"):
        assert any(specifier.operator == "<" for specifier in requirements[name].specifier), name
