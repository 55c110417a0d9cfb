"""Prints docs/api.md from the OpenAPI document of the API: `python -m holdfast.api.reference`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from holdfast.api.app import describe
from holdfast.api.context import WebContext
from holdfast.graphs.config import ProjectConfig
from holdfast.settings import load_settings

INTRODUCTION = """# HTTP API

This page lists every route of a server and every object in its bodies. It is generated from `/openapi.json`
(`make docs`). A running server serves the same description at `/docs`, with the routes of the project's own app.

The API is the LangGraph Server API with additions. [Migration](migration.md) lists the differences. Each page about a
feature has examples.

Routes that read a body can also refuse with `413` and `415`. All routes can refuse with `422` and `503`. With API keys
or [custom auth](auth.md), they can also refuse with `401`, `403` and `429`. The lists of refusals leave these out.

| refusal | meaning |
| --- | --- |
{refusals}

A name in **bold** is required.
"""
COMMON_STATUSES = frozenset({"413", "415", "422", "503"})
# Descriptions of a response that only repeat its status.
UNSAID = frozenset({"Success.", "Successful Response"})
METHODS = ("get", "post", "put", "patch", "delete")
Schema = Mapping[str, Any]


def document() -> dict[str, Any]:
    """The OpenAPI document of a server without a project. Nothing is started or connected."""
    project = ProjectConfig(Path("langgraph.json"), Path.cwd(), {}, (), {}, {}, (), "langgraph.json")
    settings = load_settings({}, database_url="postgresql://nowhere")
    web = SimpleNamespace(settings=settings, catalog=SimpleNamespace(project=project), auth=None)
    return describe(cast("WebContext", web)).document()


def page(described: Schema) -> str:
    """The whole page."""
    by_tag: dict[str, list[str]] = {}
    for path, operations in described["paths"].items():
        for method in METHODS:
            if operation := operations.get(method):
                tag = operation.get("tags", ["other"])[0]
                by_tag.setdefault(tag, []).append("\n".join(_operation(method, path, operation)))
    lines = [INTRODUCTION.replace("{refusals}", "\n".join(_refusals(described)))]
    for tag, operations in by_tag.items():
        lines += [f"## {tag.capitalize()}", "", *operations]
    lines += ["## Objects", ""]
    for name, schema in sorted(described["components"]["schemas"].items()):
        lines += _object(name, schema)
    return "\n".join(lines).rstrip() + "\n"


def _operation(method: str, path: str, operation: Schema) -> Iterator[str]:
    yield f"### {operation['summary']}"
    yield ""
    yield f"`{method.upper()} {path}`"
    yield ""
    if description := operation.get("description"):
        yield _prose(description)
        yield ""
    if parameters := operation.get("parameters"):
        yield "| parameter | in | type | meaning |"
        yield "| --- | --- | --- | --- |"
        for one in parameters:
            name = f"**`{one['name']}`**" if one.get("required") else f"`{one['name']}`"
            meaning = _cell(one.get("description", one["schema"].get("description", "")))
            yield f"| {name} | {one['in']} | {_type(one['schema'])} | {meaning} |"
        yield ""
    if taken := _schema(operation.get("requestBody", {})):
        yield f"Body: {_type(taken)}"
        yield ""
    yield "| answer | body | meaning |"
    yield "| --- | --- | --- |"
    responses: Mapping[str, Schema] = operation["responses"]
    refusals = sorted(status for status in responses if status >= "400" and status not in COMMON_STATUSES)
    for status, response in sorted(responses.items()):
        if status < "400":
            meaning = "" if response["description"] in UNSAID else _cell(response["description"])
            body = _schema(response)
            yield f"| `{status}` | {_type(body) if body else ''} | {meaning} |"
    yield ""
    if refusals:
        yield "Refusals: " + ", ".join(f"`{status}`" for status in refusals)
        yield ""


def _refusals(described: Schema) -> Iterator[str]:
    """One row for each status, with the description that most operations give it."""
    found: dict[str, Counter[str]] = {}
    for operations in described["paths"].values():
        for method in METHODS:
            for status, response in operations.get(method, {}).get("responses", {}).items():
                if status >= "400":
                    found.setdefault(status, Counter())[response["description"]] += 1
    for status, descriptions in sorted(found.items()):
        yield f"| `{status}` | {_cell(descriptions.most_common(1)[0][0])} |"


def _schema(content_holder: Schema) -> Schema | None:
    """The schema of a body or an answer: of JSON if it may be JSON."""
    content: Mapping[str, Schema] = content_holder.get("content", {})
    kinds = sorted(content, key=lambda kind: kind != "application/json")
    return content[kinds[0]].get("schema") if kinds else None


def _object(name: str, schema: Schema) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    if description := schema.get("description"):
        yield _prose(description)
        yield ""
    if not (fields := schema.get("properties")):
        yield f"{_type(schema)}"
        yield ""
        return
    required = schema.get("required", ())
    yield "| field | type | meaning |"
    yield "| --- | --- | --- |"
    for field, value in fields.items():
        shown = f"**`{field}`**" if field in required else f"`{field}`"
        yield f"| {shown} | {_type(value)} | {_cell(value.get('description', ''))} |"
    yield ""


def _type(schema: Schema) -> str:
    """A schema in a few words, with a link to each object that it names."""
    if reference := schema.get("$ref"):
        name = reference.rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[several])) + _default(schema)
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"]) + _default(schema)
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any JSON")
    if isinstance(kind, list):
        return " or ".join(kind) + _default(schema)
    if kind == "array":
        items = schema.get("items", {})
        return ("array" if not items else f"array of {_type(items)}") + _default(schema)
    return str(schema.get("format", kind)) + _bounds(schema) + _default(schema)


def _bounds(schema: Schema) -> str:
    low = schema.get("minimum", schema.get("minLength"))
    above, high = schema.get("exclusiveMinimum"), schema.get("maximum", schema.get("maxLength"))
    parts = [
        f"at least {low:,.10g}" if low is not None else "",
        f"more than {above:,.10g}" if above is not None else "",
        f"at most {high:,.10g}" if high is not None else "",
    ]
    characters = " characters" if "minLength" in schema or "maxLength" in schema else ""
    said = ", ".join(part for part in parts if part)
    return f" ({said}{characters})" if said else ""


def _default(schema: Schema) -> str:
    value = schema.get("default")
    if value is None or value == [] or value == {}:
        return ""
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return f", default `{shown}`"


def _prose(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;")


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|")


if __name__ == "__main__":
    print(page(document()), end="")
