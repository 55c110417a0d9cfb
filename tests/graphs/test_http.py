"""The sections `http` and `checkpointer` of langgraph.json, from the file and from the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from holdfast.errors import ConfigError, SettingsError
from holdfast.graphs.checkpointer import CheckpointerSection, checkpointer_section
from holdfast.graphs.config import ProjectConfig, load_config
from holdfast.graphs.http import EXPOSED_HEADERS, CorsSection, HeaderPatterns, HttpSection, http_section, load_app
from holdfast.settings import load_settings
from tests.support import http_project

from .conftest import Project

GRAPHS = {"agent": "./agent.py:graph"}


def with_http(project: Project, http: Any) -> ProjectConfig:
    return project.configure(graphs=GRAPHS, http=http)


@pytest.mark.parametrize("http", [None, {}])
def test_nothing_is_needed(project: Project, http: Any) -> None:
    assert http_section(with_http(project, http)) == HttpSection()


def test_everything(project: Project) -> None:
    section = http_section(
        with_http(
            project,
            {
                "app": "./webapp.py:app",
                "disable_assistants": True,
                "disable_mcp": True,
                "disable_store": False,
                "mount_prefix": "/api/v1/",
                "configurable_headers": {"includes": ["X-Tenant-*"], "excludes": ["x-tenant-secret"]},
                "logging_headers": {"includes": ["user-agent"]},
                "enable_custom_route_auth": True,
                "middleware_order": "auth_first",
                "cors": {
                    "allow_origins": ["https://a.example"],
                    "allow_methods": ["GET"],
                    "allow_headers": ["x-api-key"],
                    "allow_credentials": False,
                    "expose_headers": ["X-Mine"],
                    "max_age": 60,
                },
            },
        )
    )
    assert section == HttpSection(
        app="./webapp.py:app",
        disabled=frozenset({"assistants", "mcp"}),
        mount_prefix="/api/v1",
        configurable_headers=HeaderPatterns(("x-tenant-*",), ("x-tenant-secret",)),
        logging_headers=HeaderPatterns(("user-agent",)),
        enable_custom_route_auth=True,
        middleware_order="auth_first",
        cors=CorsSection(
            allow_origins=("https://a.example",),
            allow_methods=("GET",),
            allow_headers=("x-api-key",),
            allow_credentials=False,
            expose_headers=(*EXPOSED_HEADERS, "x-mine"),
            max_age=60,
        ),
    )


@pytest.mark.parametrize(
    ("cors", "origins", "credentials"),
    [
        ({}, None, False),
        ({"allow_origins": ["*"]}, ("*",), False),
        ({"allow_origins": ["https://a.example"]}, ("https://a.example",), True),
        ({"allow_origins": ["HTTPS://A.example/"]}, ("https://a.example",), True),
        ({"allow_origins": ["https://a.example:443", "http://b:80"]}, ("https://a.example", "http://b"), True),
        (
            {"allow_origins": ["chrome-extension://abc", "http://[::1]:80"]},
            ("chrome-extension://abc", "http://[::1]"),
            True,
        ),
        ({"allow_origins": []}, (), False),
        ({"allow_origin_regex": r"https://.*\.a\.example"}, None, True),
        ({"allow_origins": ["*", "https://a.example"], "allow_credentials": True}, ("*", "https://a.example"), True),
    ],
)
def test_credentials_are_for_origins_that_are_named(
    project: Project, cors: Any, origins: tuple[str, ...] | None, credentials: bool
) -> None:
    found = http_section(with_http(project, {"cors": cors})).cors
    assert (found.allow_origins, found.credentials) == (origins, credentials)


@pytest.mark.parametrize(
    ("http", "key", "cause"),
    [
        ([], "http", "must be an object, not []"),
        ({"app": 3}, "http.app", 'must look like "./file.py:variable"'),
        ({"disable_runs": "yes"}, "http.disable_runs", "must be true or false, not 'yes'"),
        ({"mount_prefix": "api"}, "http.mount_prefix", "'api' must look like \"/api\""),
        ({"mount_prefix": "/a b"}, "http.mount_prefix", "must look like"),
        ({"mount_prefix": 1}, "http.mount_prefix", "1 must look like"),
        (
            {"middleware_order": "last"},
            "http.middleware_order",
            "must be 'middleware_first' or 'auth_first', not 'last'",
        ),
        ({"cors": {"allow_credentials": True}}, "http.cors.allow_credentials", "no origin is named"),
        ({"cors": {"allow_origins": ["*"], "allow_credentials": True}}, "http.cors.allow_credentials", "no origin"),
        ({"enable_custom_route_auth": 1}, "http.enable_custom_route_auth", "must be true or false"),
        ({"configurable_headers": ["x-a"]}, "http.configurable_headers", "must be an object"),
        ({"configurable_headers": {"includes": "x-a"}}, "http.configurable_headers.includes", "an array of strings"),
        ({"logging_headers": {"excludes": [1]}}, "http.logging_headers.excludes", "an array of strings"),
        ({"cors": {"allow_headers": ["\u20ac"]}}, "http.cors.allow_headers", "is not a name of a header"),
        ({"cors": {"expose_headers": ["a\nb"]}}, "http.cors.expose_headers", "is not a name of a header"),
        ({"cors": {"allow_methods": ["GET,"]}}, "http.cors.allow_methods", "is not a name of a header or a method"),
        ({"cors": []}, "http.cors", "must be an object"),
        ({"cors": {"allow_origins": "*"}}, "http.cors.allow_origins", "must be an array of strings, not '*'"),
        (
            {"cors": {"allow_origins": ["app.example.com"]}},
            "http.cors.allow_origins",
            "not 'app.example.com'",
        ),
        (
            {"cors": {"allow_origins": ["https://a.example/path"]}},
            "http.cors.allow_origins",
            "each must be a scheme, a host",
        ),
        ({"cors": {"allow_origins": ["https://*.example"]}}, "http.cors.allow_origins", "http.cors.allow_origin_regex"),
        ({"cors": {"allow_origin_regex": "("}}, "http.cors.allow_origin_regex", "is no regular expression"),
        ({"cors": {"max_age": -1}}, "http.cors.max_age", "a whole number from 0 on, not -1"),
        ({"cors": {"allow_credentials": "no"}}, "http.cors.allow_credentials", "must be true or false"),
    ],
)
def test_a_wrong_shape_names_the_key_and_the_rule(project: Project, http: Any, key: str, cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        http_section(with_http(project, http))
    assert str(caught.value).startswith(f"{project.path}: {key}: ")
    assert cause in str(caught.value)


def test_unknown_keys_are_warnings(project: Project) -> None:
    config = project.configure(
        graphs=GRAPHS,
        http={"disable_thread": True, "cors": {"allow_origin": []}, "configurable_headers": {"include": []}},
        checkpointer={"ttl": {"sweep_interval": 1}},
    )
    assert config.warnings == (
        f"{project.path}: unknown key \"checkpointer.ttl.sweep_interval\"; did you mean 'sweep_interval_minutes'?",
        f"{project.path}: unknown key \"http.disable_thread\"; did you mean 'disable_threads' or 'disable_store' or "
        "'disable_meta'?",
        f"{project.path}: unknown key \"http.configurable_headers.include\"; did you mean 'includes' or 'excludes'?",
        f"{project.path}: unknown key \"http.cors.allow_origin\"; did you mean 'allow_origins' or "
        "'allow_origin_regex'?",
    )


def test_config_warns_of_keys_without_effect(project: Project) -> None:
    serde = {"pickle_fallback": True}
    config = project.configure(graphs=GRAPHS, ui={"a": "./a.tsx"}, webhooks={}, checkpointer={"serde": serde})
    assert config.warnings == (
        f'{project.path}: "checkpointer.serde.pickle_fallback" has no effect: checkpoints are not pickled',
        f'{project.path}: "ui" has no effect: components of a user interface are not served',
    )


def test_config_refuses_encryption_section(project: Project) -> None:
    assert "encryption: not supported" in project.failure(graphs=GRAPHS, encryption={"path": "./e.py:e"})


@pytest.mark.parametrize(
    ("includes", "excludes", "name", "admitted"),
    [
        (["x-*"], [], "x-tenant", True),
        (["x-*"], [], "tenant", False),
        (["*"], ["*key*"], "x-keys", False),
        (["x.y"], [], "xzy", False),
        (["[x]*"], [], "x-1", False),
        ([], [], "x-1", False),
    ],
)
def test_only_stars_are_special_in_patterns(
    includes: list[str], excludes: list[str], name: str, admitted: bool
) -> None:
    assert HeaderPatterns(tuple(includes), tuple(excludes)).admits(name) is admitted


class TestTheEnvironment:
    def test_comes_before_the_file(self, project: Project) -> None:
        config = with_http(project, {"mount_prefix": "/file", "cors": {"allow_origins": ["https://file.example"]}})
        environ = {"MOUNT_PREFIX": "/env/", "CORS_ALLOW_ORIGINS": "https://a.example, https://b.example"}
        section = http_section(config).under(load_settings(environ))
        assert section.mount_prefix == "/env"
        assert section.cors.allow_origins == ("https://a.example", "https://b.example")
        assert section.cors.credentials

    def test_leaves_the_file_alone_when_it_is_silent(self, project: Project) -> None:
        section = http_section(with_http(project, {"mount_prefix": "/file"}))
        assert section.under(load_settings({"MOUNT_PREFIX": "", "CORS_ALLOW_ORIGINS": ""})) == section

    @pytest.mark.parametrize("prefix", ["api", "/a//b", "/a?b", "/a b"])
    def test_a_prefix_that_is_none_is_refused(self, prefix: str) -> None:
        with pytest.raises(SettingsError) as caught:
            load_settings({"MOUNT_PREFIX": prefix})
        assert str(caught.value).startswith(f'MOUNT_PREFIX={prefix}: must look like "/api"')

    @pytest.mark.parametrize("section", ["auth", "checkpointer", "http", "store", "webhooks"])
    def test_holds_whole_sections(self, project: Project, section: str) -> None:
        project.path.write_text(json.dumps({"graphs": GRAPHS, section: {"file": 1}}))
        config = load_config(project.path, {f"LANGGRAPH_{section.upper()}": '{"variable": 2}'})
        assert config.raw[section] == {"variable": 2}

    def test_an_empty_variable_is_none(self, project: Project) -> None:
        project.path.write_text(json.dumps({"graphs": GRAPHS, "http": {"app": "a:b"}}))
        assert load_config(project.path, {"LANGGRAPH_HTTP": ""}).raw["http"] == {"app": "a:b"}

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "LANGGRAPH_HTTP: not valid JSON: "),
            ("[]", "LANGGRAPH_HTTP: must hold a JSON object, not an array"),
        ],
    )
    def test_must_be_json(self, project: Project, text: str, message: str) -> None:
        project.path.write_text(json.dumps({"graphs": GRAPHS}))
        with pytest.raises(ConfigError) as caught:
            load_config(project.path, {"LANGGRAPH_HTTP": text})
        assert str(caught.value).startswith(message)

    def test_is_named_by_errors_and_warnings_about_it(self, project: Project) -> None:
        project.path.write_text(json.dumps({"graphs": GRAPHS, "http": {}}))
        config = load_config(project.path, {"LANGGRAPH_HTTP": '{"app": 1, "cross": 2}'})
        with pytest.raises(ConfigError, match=r"^LANGGRAPH_HTTP: http\.app: "):
            http_section(config)
        assert config.warnings == ("LANGGRAPH_HTTP: unknown key \"http.cross\"; did you mean 'cors'?",)


class TestTheApp:
    def test_there_need_be_none(self, project: Project) -> None:
        assert load_app(with_http(project, {})) is None

    @pytest.mark.parametrize("name", ["app", "plain", "late"])
    def test_any_asgi_application(self, name: str) -> None:
        assert callable(load_app(http_project.project({"app": f"./webapp.py:{name}"})))

    @pytest.mark.parametrize(
        ("spec", "cause"),
        [
            ("./webapp.py:number", "is an object of type int; expected an ASGI application"),
            ("./webapp.py:factory", "is an object of type function; expected an ASGI application"),
            ("./webapp.py:Thread", "is the class Thread; expected an ASGI application"),
            ("./webapp.py:ap", "has no 'ap'; did you mean 'app'"),
            ("./nowhere.py:app", "nowhere.py does not exist"),
            ("nowhere.at_all:app", "there is no module 'nowhere'"),
            ("./broken.py:app", "RuntimeError: forgot a password"),
            ("./webapp.py", "must look like"),
        ],
    )
    def test_app_that_cannot_be_used_is_refused(self, spec: str, cause: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load_app(http_project.project({"app": spec}))
        assert "http.app: " in str(caught.value)
        assert cause in str(caught.value)

    @pytest.mark.servers
    def test_is_tried_before_a_server_starts(self) -> None:
        environ = {**os.environ, "LANGGRAPH_HTTP": '{"app": "./broken.py:app"}'}
        command = [sys.executable, "-m", "holdfast.cli.check_project", str(http_project.PROJECT)]
        checked = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        assert checked.returncode == 78
        assert checked.stderr.startswith("LANGGRAPH_HTTP: http.app: importing ./broken.py:app failed")


class TestTheCheckpointer:
    def test_nothing_is_needed(self, project: Project) -> None:
        assert checkpointer_section(project.configure(graphs=GRAPHS)) == CheckpointerSection()

    def test_checkpointer_section_reads_the_time_to_live(self, project: Project) -> None:
        ttl = {"strategy": "keep_latest", "default_ttl": 90, "sweep_interval_minutes": 0.5, "sweep_limit": 7}
        section = checkpointer_section(project.configure(graphs=GRAPHS, checkpointer={"ttl": ttl}))
        assert section == CheckpointerSection((90.0, "keep_latest"), 30.0, 7)

    @pytest.mark.parametrize(
        ("checkpointer", "key", "cause"),
        [
            ([], "checkpointer", "must be an object"),
            ({"path": "./c.py:c"}, "checkpointer.path", "cannot be used"),
            ({"backend": "mongo"}, "checkpointer.backend", "cannot be used"),
            ({"ttl": 3}, "checkpointer.ttl", "must be an object"),
            ({"ttl": {"strategy": "keep"}}, "checkpointer.ttl.strategy", "'delete' or 'keep_latest', not 'keep'"),
            ({"ttl": {"default_ttl": 0}}, "checkpointer.ttl.default_ttl", "more than 0"),
            ({"ttl": {"sweep_interval_minutes": "1"}}, "checkpointer.ttl.sweep_interval_minutes", "must be minutes"),
            ({"ttl": {"sweep_limit": 0}}, "checkpointer.ttl.sweep_limit", "a whole number from 1 on"),
        ],
    )
    def test_a_wrong_shape_names_the_key_and_the_rule(
        self, project: Project, checkpointer: Any, key: str, cause: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            checkpointer_section(project.configure(graphs=GRAPHS, checkpointer=checkpointer))
        assert str(caught.value).startswith(f"{project.path}: {key}: ")
        assert cause in str(caught.value)
