from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.graphs.config import DEFAULT_PATH, GraphTarget, load_config

from .conftest import Project

GOOD = {"agent": "./agent.py:graph"}


def test_a_file_and_a_module_target(project: Project) -> None:
    config = project.configure(
        graphs={
            "file": "./sub/agent.py:graph",
            "module": "shop.agents:graph",
            "described": {"path": "agent.py:graph", "description": "Sells."},
        }
    )
    assert config.graphs == {
        "file": GraphTarget("file", "./sub/agent.py:graph", project.root / "sub/agent.py", None, "graph", None),
        "module": GraphTarget("module", "shop.agents:graph", None, "shop.agents", "graph", None),
        "described": GraphTarget("described", "agent.py:graph", project.root / "agent.py", None, "graph", "Sells."),
    }
    assert config.path == project.path
    assert config.directory == project.root
    assert config.warnings == ()


def test_other_sections_are_kept_as_they_are(project: Project) -> None:
    http = {"disable_mcp": True, "cors": {"allow_origins": ["*"]}}
    config = project.configure(graphs=GOOD, http=http, python_version="3.11", auth={"path": "./auth.py:auth"})
    assert config.raw["http"] == http
    assert config.raw["auth"] == {"path": "./auth.py:auth"}
    assert config.warnings == ()


def test_unknown_keys_are_warnings(project: Project) -> None:
    config = project.configure(graphs={"a": {"path": "a.py:g", "descripton": "x"}}, dependancies=[])
    assert config.warnings == (
        f"{project.path}: unknown key \"dependancies\"; did you mean 'dependencies'?",
        f"{project.path}: unknown key \"graphs.a.descripton\"; did you mean 'description'?",
    )


def test_unknown_keys_of_the_store_are_warnings(project: Project) -> None:
    store = {"indx": {}, "index": {"dim": 3}, "ttl": {"default": 5}}
    warnings = " ".join(project.configure(graphs=GOOD, store=store).warnings)
    for key in ("store.indx", "store.index.dim", "store.ttl.default"):
        assert f'unknown key "{key}"' in warnings


def test_env_as_a_map(project: Project) -> None:
    assert project.configure(graphs=GOOD, env={"A": "1", "B": ""}).env == {"A": "1", "B": ""}


def test_env_as_a_file(project: Project) -> None:
    project.write("conf/dev.env", "A=1\n# comment\nexport B='two words'\nBARE\n")
    assert project.configure(graphs=GOOD, env="conf/dev.env").env == {"A": "1", "B": "two words"}


def test_dependencies_default_to_none(project: Project) -> None:
    assert project.configure(graphs=GOOD).dependencies == ()
    assert project.configure(graphs=GOOD, dependencies=[".", " httpx "]).dependencies == (".", "httpx")


@pytest.mark.parametrize(
    ("document", "key", "cause"),
    [
        ({}, "graphs", "missing"),
        ({"graphs": {}}, "graphs", "empty"),
        ({"graphs": ["./a.py:g"]}, "graphs", "must be an object of graph ids, not an array"),
        ({"graphs": {"a": 3}}, "graphs.a", "must be a string or an object with a path, not a number"),
        ({"graphs": {"a": {"description": "x"}}}, "graphs.a.path", "missing"),
        ({"graphs": {"a": {"path": None}}}, "graphs.a.path", "not null"),
        ({"graphs": {"a": {"path": "a.py:g", "description": []}}}, "graphs.a.description", "not an array"),
        ({"graphs": {"a": {"path": "a.py:g", "description": "a\0b"}}}, "graphs.a.description", "NUL characters"),
        ({"graphs": {"a": {"path": "a.py:g", "description": "a\ud800b"}}}, "graphs.a.description", "surrogate pair"),
        ({"graphs": {"a": "./a.py"}}, "graphs.a", "'./a.py' must look like \"./file.py:variable\""),
        ({"graphs": {"a": "./a.py:not-a-name"}}, "graphs.a", "must look like"),
        ({"graphs": {"a": ":g"}}, "graphs.a", "must look like"),
        ({"graphs": {"a": "a-b.c:g"}}, "graphs.a", "'a-b.c' is neither a .py file nor a module name"),
        ({"graphs": {"a": "./a.ts:g"}}, "graphs.a", "only Python graphs"),
        ({"graphs": {"": "a.py:g"}}, "graphs.''", "must not be empty"),
        ({"graphs": {"a/b": "a.py:g"}}, "graphs.'a/b'", 'must not contain "/"'),
        ({"graphs": {"a\nb": "a.py:g"}}, "graphs.'a\\nb'", "control characters"),
        ({"graphs": {" a": "a.py:g"}}, "graphs.' a'", "begin or end with a space"),
        ({"graphs": GOOD, "dependencies": "."}, "dependencies", "an array of strings, not a string"),
        ({"graphs": GOOD, "dependencies": [".", 1]}, "dependencies[1]", "must be a string, not a number"),
        ({"graphs": GOOD, "dependencies": [""]}, "dependencies[0]", "must not be empty"),
        ({"graphs": GOOD, "env": ["A"]}, "env", "the path of a file or an object of strings, not an array"),
        ({"graphs": GOOD, "env": {"A": True}}, "env.A", "must be a string, not a boolean"),
        ({"graphs": GOOD, "env": {"A=B": "x"}}, "env.'A=B'", "not a usable name"),
        ({"graphs": GOOD, "env": {"A": "x\0"}}, "env.A", "NUL"),
        ({"graphs": GOOD, "env": ".env"}, "env", "the file '.env' does not exist"),
    ],
)
def test_a_wrong_shape_names_the_key_and_the_cause(
    project: Project, document: dict[str, Any], key: str, cause: str
) -> None:
    message = project.failure(**document)
    assert message.startswith(f"{key}: ")
    assert cause in message


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"graphs": {\n  "a": "b.py:c",\n}}', "not valid JSON: "),
        ("", "not valid JSON: Expecting value at line 1, column 1"),
        ("[]", "must hold a JSON object, not an array"),
    ],
)
def test_a_file_that_is_not_an_object(project: Project, text: str, cause: str) -> None:
    project.path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(project.path)
    assert str(caught.value).startswith(f"{project.path}: {cause}")


def test_broken_json_names_line_and_column(project: Project) -> None:
    project.path.write_text('{\n  "graphs": {]\n}')
    with pytest.raises(ConfigError, match=r"at line 2, column 14$"):
        load_config(project.path)


def test_bytes_that_are_not_text(project: Project) -> None:
    project.path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match=r"langgraph\.json: not UTF-8 text: .* at byte 7"):
        load_config(project.path)


def test_an_env_file_that_is_not_text(project: Project) -> None:
    (project.root / ".env").write_bytes(b"A=\xff\xfe")
    assert project.failure(graphs=GOOD, env=".env") == "env: the file '.env' is not UTF-8 text"


def test_a_byte_order_mark_is_no_matter(project: Project) -> None:
    project.path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"graphs": GOOD}).encode())
    assert list(load_config(project.path).graphs) == ["agent"]


def test_a_missing_file(project: Project) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(project.path)
    assert str(caught.value).startswith(f"{project.path}: the file does not exist. Holdfast looked for {project.path}.")


def test_a_directory_in_place_of_the_file(project: Project) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(project.root)
    assert str(caught.value).startswith(f"{project.root}: cannot be read: ")


class TestGraphsFromTheEnvironment:
    environ = {"LANGSERVE_GRAPHS": '{"agent": "./agent.py:graph"}'}  # noqa: RUF012

    def test_stand_in_for_the_default_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        config = load_config(DEFAULT_PATH, self.environ)
        assert config.graphs["agent"].file == tmp_path / "agent.py"
        assert config.directory == tmp_path
        assert config.source == "LANGSERVE_GRAPHS"

    def test_do_not_replace_the_file(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(project.root)
        project.path.write_text(json.dumps({"graphs": {"other": "./other.py:graph"}}))
        assert list(load_config(DEFAULT_PATH, self.environ).graphs) == ["other"]

    def test_do_not_replace_a_file_named_explicitly(self, project: Project) -> None:
        with pytest.raises(ConfigError, match="the file does not exist"):
            load_config(project.path, self.environ)

    def test_are_read_from_what_is_passed_in_only(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("LANGSERVE_GRAPHS", self.environ["LANGSERVE_GRAPHS"])
        with pytest.raises(ConfigError, match="the file does not exist"):
            load_config(DEFAULT_PATH, {})

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("{", "LANGSERVE_GRAPHS: not valid JSON: "),
            ("[]", "LANGSERVE_GRAPHS: graphs: must be an object of graph ids, not an array"),
            ('{"a": 1}', "LANGSERVE_GRAPHS: graphs.a: must be a string"),
        ],
    )
    def test_wrong_ones_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, message: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError) as caught:
            load_config(DEFAULT_PATH, {"LANGSERVE_GRAPHS": value})
        assert str(caught.value).startswith(message)
