"""How a route is declared.

    routes = Routes(tags=["threads"])

    @routes.get("/threads/{thread_id}", summary="Get a thread", responses=answers(Thread, 404))
    async def get(web: Web, thread_id: UUID) -> Response: ...

`api/router.py` serves what is declared here, `api/arguments.py` reads what the function's parameters ask for, and
`api/openapi.py` describes both.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.responses import Response

from holdfast.api.arguments import Arguments
from holdfast.api.destructive import destroys
from holdfast.api.idempotency import creates

# In the place of a method: a WebSocket's handshake. No HTTP request has an empty method.
SOCKET = ""

Endpoint = Callable[..., Awaitable[Any]]
Declared = TypeVar("Declared", bound=Endpoint)


@dataclass(eq=False)
class Route:
    """A path, its methods and the function that answers. Functions return a Response; those of a WebSocket, None."""

    path: str
    """With parameters in braces: `/threads/{thread_id}`. `{name:path}` takes slashes as well."""
    methods: frozenset[str]
    endpoint: Endpoint
    public: bool
    """Whether requests are answered without checking authentication and the content type."""
    described: dict[str, Any] | None
    """The description in `/openapi.json`, as arguments of `APIRouter.add_api_route`; None: not described."""
    pattern: re.Pattern[str] = field(init=False)
    arguments: Arguments = field(init=False)
    creates: bool = field(init=False)
    """Whether it takes an Idempotency-Key."""
    destroys: bool = field(init=False)
    """Whether unknown fields and query parameters are refused."""

    def __post_init__(self) -> None:
        self.pattern = _pattern(self.path)
        self.arguments = Arguments(self.endpoint, frozenset(self.pattern.groupindex))
        self.creates = creates(self.path, self.methods)
        self.destroys = destroys(self.path, self.methods)

    @property
    def depth(self) -> int | None:
        """The number of slashes in the paths that it matches; None if there can be any number."""
        return None if ":path}" in self.path else self.path.count("/")


class Routes:
    """Routes that are switched on and off together. Where several match, the first is taken."""

    def __init__(self, tags: Iterable[str] = (), *, public: bool = False) -> None:
        self._tags = list(tags)
        self._public = public
        self.declared: list[Route] = []

    def get(self, path: str, **described: Any) -> Callable[[Declared], Declared]:
        return self._declare("GET", path, described)

    def post(self, path: str, **described: Any) -> Callable[[Declared], Declared]:
        return self._declare("POST", path, described)

    def put(self, path: str, **described: Any) -> Callable[[Declared], Declared]:
        return self._declare("PUT", path, described)

    def patch(self, path: str, **described: Any) -> Callable[[Declared], Declared]:
        return self._declare("PATCH", path, described)

    def delete(self, path: str, **described: Any) -> Callable[[Declared], Declared]:
        return self._declare("DELETE", path, described)

    def websocket(self, path: str) -> Callable[[Declared], Declared]:
        return self._declare(SOCKET, path, None)

    def add_page(self, path: str, endpoint: Callable[..., Awaitable[Response]]) -> None:
        """Add a page for people, which `/openapi.json` does not describe."""
        self.declared.append(Route(path, frozenset({"GET", "HEAD"}), endpoint, self._public, None))

    def _declare(self, method: str, path: str, described: dict[str, Any] | None) -> Callable[[Declared], Declared]:
        if described is not None:
            described = {"tags": self._tags, **described}

        def declare(endpoint: Declared) -> Declared:
            self.declared.append(Route(path, frozenset({method}), endpoint, self._public, described))
            return endpoint

        return declare


def _pattern(path: str) -> re.Pattern[str]:
    """The expression that a route's paths match in full."""
    parts = re.split(r"\{(\w+)(:path)?\}", path)
    literals, names, kinds = parts[::3], parts[1::3], parts[2::3]
    expression = re.escape(literals[0])
    for name, kind, literal in zip(names, kinds, literals[1:], strict=True):
        expression += f"(?P<{name}>{'.*' if kind else '[^/]+'})" + re.escape(literal)
    return re.compile(expression)
