"""The arguments of endpoints. The function's signature is read once and determines what is read from each request.

    async def patch(web: Web, thread_id: UUID, body: ThreadPatch, limit: int = 10,
                    prefer: Annotated[str | None, Header()] = None) -> Response: ...

* `WebContext`, `Request` and `WebSocket` by their types;
* a name that is in the path: from there;
* `Annotated[…, Header()]`: a header, by the parameter's name;
* a pydantic model, or `Annotated[…, Body()]`: the JSON body;
* everything else: the query.

FastAPI describes the same signatures in `/openapi.json` (`api/openapi.py`) and defines `Header`, `Query` and `Body`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import orjson
from fastapi import params
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.datastructures import QueryParams
from starlette.requests import HTTPConnection, Request
from starlette.websockets import WebSocket

from holdfast.api.context import WebContext
from holdfast.errors import InvalidRequest

# Problems that an error response lists.
MAX_PROBLEMS = 5
# Marks a value that is missing in a request, and a parameter without a default.
ABSENT: Any = inspect.Parameter.empty
NO_QUERY = QueryParams()


@dataclass(frozen=True, slots=True)
class Argument:
    """One value that is read from a request."""

    name: str
    alias: str
    """The name that clients use; empty for the body."""
    adapter: TypeAdapter[Any]
    default: Any
    """ABSENT if the value is required. It is not copied."""
    several: bool
    """Whether the query may contain it several times."""

    def read(self, given: Any, values: dict[str, Any], problems: list[str]) -> None:
        """Add the value, or a description of what is wrong with it."""
        if given is ABSENT:
            if self.default is ABSENT:
                problems.append(_sentence(self.alias, (), "Field required"))
            else:
                values[self.name] = self.default
            return
        try:
            values[self.name] = self.adapter.validate_python(given, from_attributes=True)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            problems += [_sentence(self.alias, problem["loc"], problem["msg"]) for problem in found]


class Arguments:
    """The arguments of one endpoint. Raises TypeError for a signature with a parameter of another kind."""

    def __init__(self, endpoint: Callable[..., Any], in_path: AbstractSet[str]) -> None:
        self.body: Argument | None = None
        self.query: list[Argument] = []
        self._path: list[Argument] = []
        self._headers: list[Argument] = []
        self._of_context: list[str] = []
        self._of_connection: list[str] = []
        hints = get_type_hints(endpoint, include_extras=True)
        for name, parameter in inspect.signature(endpoint).parameters.items():
            self._add(name, hints[name], parameter.default, in_path)
        if missing := in_path - {argument.name for argument in self._path}:
            raise TypeError(f"{endpoint.__qualname__} has no parameter for {', '.join(sorted(missing))} of its path")

    def _add(self, name: str, annotation: Any, default: Any, in_path: AbstractSet[str]) -> None:
        plain, *marks = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
        if plain is WebContext:
            self._of_context.append(name)
            return
        if plain in (Request, WebSocket):
            self._of_connection.append(name)
            return
        alias, several = name, get_origin(plain) in (list, Sequence)
        adapter = TypeAdapter(annotation)
        if name in in_path:
            self._path.append(Argument(name, alias, adapter, ABSENT, several=False))
        elif any(isinstance(mark, params.Header) for mark in marks):
            self._headers.append(Argument(name, name.replace("_", "-"), adapter, default, several=False))
        elif _is_model(plain) or any(isinstance(mark, params.Body) for mark in marks):
            if self.body is not None:
                raise TypeError(f"{name} and {self.body.name} cannot both be the body")
            self.body = Argument(name, "", adapter, default, several=False)
        else:
            self.query.append(Argument(name, alias, adapter, default, several))

    async def read(self, web: WebContext, connection: HTTPConnection) -> dict[str, Any]:
        """The arguments for a request. Raises InvalidRequest, and the errors of reading the body."""
        body = ABSENT
        if self.body is not None and isinstance(connection, Request):
            body = await _json_of(connection)
        problems: list[str] = []
        values: dict[str, Any] = dict.fromkeys(self._of_context, web)
        for name in self._of_connection:
            values[name] = connection
        in_path: Mapping[str, str] = connection.scope["path_params"]
        for argument in self._path:
            argument.read(in_path[argument.name], values, problems)
        query = connection.query_params if self.query and connection.scope["query_string"] else NO_QUERY
        for argument in self.query:
            given = query.getlist(argument.alias) if argument.several else query.get(argument.alias)
            argument.read(given if argument.alias in query else ABSENT, values, problems)
        for argument in self._headers:
            argument.read(connection.headers.get(argument.alias, ABSENT), values, problems)
        if self.body is not None:
            self.body.read(body, values, problems)
        if problems:
            raise InvalidRequest("; ".join(problems[:MAX_PROBLEMS]))
        return values


async def _json_of(request: Request) -> Any:
    """The value of a request's body; ABSENT when it is empty."""
    try:
        return await request.json()
    except orjson.JSONDecodeError as error:
        if not await request.body():
            return ABSENT
        raise InvalidRequest(f"{error.pos}: JSON decode error") from None


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _sentence(alias: str, place: Sequence[str | int], message: str) -> str:
    where = ".".join([alias, *map(str, place)] if alias else map(str, place))
    return f"{where}: {message}" if where else message
