"""The section `webhooks` of langgraph.json."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import ConfigError, SettingsError
from holdfast.graphs.config import ProjectConfig
from holdfast.graphs.webhooks import WebhooksSection, webhooks_section
from holdfast.settings import load_settings

from .conftest import Project

GRAPHS = {"agent": "./agent.py:graph"}
ENVIRON = {"LG_WEBHOOK_TOKEN": "t0", "LG_WEBHOOK_B": "b", "MINE_TOKEN": "m", "DATABASE_URL": "secret"}


def configured(project: Project, webhooks: Any, **more: Any) -> ProjectConfig:
    return project.configure(graphs=GRAPHS, webhooks=webhooks, **more)


def test_nothing_is_needed(project: Project) -> None:
    assert webhooks_section(configured(project, None), {}) == WebhooksSection()
    assert not WebhooksSection().require_https


def test_a_section_demands_https(project: Project) -> None:
    assert webhooks_section(configured(project, {}), {}) == WebhooksSection(require_https=True)


@pytest.mark.parametrize(
    ("url", "http", "allowed"),
    [
        ({"disable_loopback": False}, {"app": "./app.py:app"}, True),
        ({"disable_loopback": False}, None, False),
        ({"disable_loopback": True}, {"app": "./app.py:app"}, False),
        ({}, {"app": "./app.py:app"}, False),
    ],
)
def test_own_routes_can_be_called_when_the_project_says_so(
    project: Project, url: dict[str, Any], http: dict[str, Any] | None, allowed: bool
) -> None:
    assert webhooks_section(configured(project, {"url": url}, http=http or {}), {}).own_routes is allowed


def test_webhooks_can_be_disabled(project: Project) -> None:
    assert webhooks_section(configured(project, None, http={"disable_webhooks": True}), {}).disabled


def test_everything(project: Project) -> None:
    config = configured(
        project,
        {
            "url": {
                "require_https": False,
                "allowed_domains": ["Example.com", "*.example.org"],
                "allowed_ports": [443, 8443],
                "max_url_length": 100,
                "disable_loopback": True,
            },
            "headers": {"Authorization": "Bearer ${{ env.LG_WEBHOOK_TOKEN }}", "x-both": "${{env.LG_WEBHOOK_B}}/b"},
            "allowed_fields": ["run_id", "status"],
        },
    )
    assert webhooks_section(config, ENVIRON) == WebhooksSection(
        require_https=False,
        allowed_domains=("example.com", "*.example.org"),
        allowed_ports=(443, 8443),
        max_url_length=100,
        headers={"authorization": "Bearer t0", "x-both": "b/b"},
        allowed_fields=frozenset({"run_id", "status"}),
    )
    assert config.warnings == ()


def test_variables_of_the_project_count_and_the_prefix_can_be_another(project: Project) -> None:
    section = {
        "env_prefix": "MINE_",
        "headers": {"x-a": "${{ env.MINE_TOKEN }}", "x-b": "${{ env.MINE_OWN }}"},
        "url": {"allowed_domains": ["example.com"]},
    }
    config = configured(project, section, env={"MINE_TOKEN": "file", "MINE_OWN": "file"})
    assert webhooks_section(config, ENVIRON).headers == {"x-a": "m", "x-b": "file"}


@pytest.mark.parametrize(
    ("section", "key", "cause"),
    [
        ([], "webhooks", "must be a JSON object"),
        ({"url": []}, "webhooks.url", "must be a JSON object"),
        ({"url": {"require_https": "yes"}}, "webhooks.url.require_https", "must be true or false"),
        ({"url": {"allowed_domains": "example.com"}}, "webhooks.url.allowed_domains", "array of strings"),
        ({"url": {"allowed_domains": ["https://example.com"]}}, "webhooks.url.allowed_domains", "neither a host"),
        ({"url": {"allowed_domains": ["*"]}}, "webhooks.url.allowed_domains", "neither a host"),
        ({"url": {"allowed_ports": ["443"]}}, "webhooks.url.allowed_ports", "array of ports"),
        ({"url": {"allowed_ports": [0]}}, "webhooks.url.allowed_ports", "array of ports"),
        ({"url": {"max_url_length": 0}}, "webhooks.url.max_url_length", "whole number"),
        ({"url": {"disable_loopback": "no"}}, "webhooks.url.disable_loopback", "must be true or false"),
        ({"allowed_fields": "status"}, "webhooks.allowed_fields", "array of strings"),
        ({"env_prefix": ""}, "webhooks.env_prefix", "the beginning of a variable"),
        ({"headers": ["Bearer secret"]}, "webhooks.headers", "must be a JSON object"),
        ({"headers": "x-a: secret"}, "webhooks.headers", "must be a JSON object"),
        ({"headers": {"x-a": ["secret"]}}, "webhooks.headers.x-a", "must be a string"),
        ({"headers": {"x-a": 1}}, "webhooks.headers.x-a", "must be a string"),
        ({"headers": {"x a": "1"}}, "webhooks.headers.x a", "not a usable name"),
        ({"headers": {"Host": "1"}}, "webhooks.headers.Host", "set by Holdfast"),
        ({"headers": {"Webhook-Id": "1"}}, "webhooks.headers.Webhook-Id", "set by Holdfast"),
        ({"headers": {"x-a": "a\r\nb: c"}}, "webhooks.headers.x-a", "printable ASCII"),
        ({"headers": {"x-a": "${{ env.DATABASE_URL }}"}}, "webhooks.headers.x-a", "does not begin with LG_WEBHOOK_"),
        ({"headers": {"x-a": "${{ env.LG_WEBHOOK_C }}"}}, "webhooks.headers.x-a", "LG_WEBHOOK_C is not set"),
        ({"headers": {"x-a": "${{ secrets.A }}"}}, "webhooks.headers.x-a", "is no template"),
    ],
)
def test_webhooks_section_reports_invalid_values(project: Project, section: Any, key: str, cause: str) -> None:
    if isinstance(section, dict) and "headers" in section:
        section = {**section, "url": {"allowed_domains": ["example.com"]}}
    with pytest.raises(ConfigError) as caught:
        webhooks_section(configured(project, section), ENVIRON)
    assert f": {key}: " in str(caught.value)
    assert cause in str(caught.value)
    assert "secret" not in str(caught.value).replace("secrets.A", "")


@pytest.mark.parametrize("url", [None, {}, {"allowed_domains": None}, {"require_https": True, "allowed_ports": [443]}])
def test_headers_without_allowed_domains_are_refused(project: Project, url: Any) -> None:
    section = {"headers": {"x-a": "secret ${{ env.LG_WEBHOOK_TOKEN }}"}, "url": url}
    with pytest.raises(ConfigError, match=r": webhooks\.headers: .* webhooks\.url\.allowed_domains") as caught:
        webhooks_section(configured(project, section), ENVIRON)
    assert "secret" not in str(caught.value)
    assert "t0" not in str(caught.value)


@pytest.mark.parametrize("domains", [[], ["example.com"], ["*.example.com"]])
def test_headers_with_allowed_domains_are_accepted(project: Project, domains: list[str]) -> None:
    section = {"headers": {"x-a": "a"}, "url": {"allowed_domains": domains}}
    assert webhooks_section(configured(project, section), ENVIRON).allowed_domains == tuple(domains)


def test_empty_headers_need_no_allowed_domains(project: Project) -> None:
    assert webhooks_section(configured(project, {"headers": {}}), ENVIRON).allowed_domains is None


def test_unknown_keys_are_warned_of(project: Project) -> None:
    config = configured(project, {"header": {}, "url": {"allowed_domain": []}})
    assert [warning.split('"')[1] for warning in config.warnings] == ["webhooks.header", "webhooks.url.allowed_domain"]


@pytest.mark.parametrize("secrets", ["whsec_short", "whsec_" + "A" * 31, "whsec_###", "whsec_" + "A" * 32 + ",x"])
def test_secrets_that_are_none_are_refused_and_not_repeated(secrets: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"HOLDFAST_WEBHOOK_SECRETS": secrets})
    assert str(caught.value) == ("HOLDFAST_WEBHOOK_SECRETS=(secret): each must be whsec_ and 24 to 64 bytes in base64")


def test_secrets_are_not_shown() -> None:
    secret = "whsec_" + "A" * 32
    settings = load_settings({"HOLDFAST_WEBHOOK_SECRETS": f" {secret} ,, {secret}"})
    assert settings.signing_secrets == [secret, secret]
    assert secret not in repr(settings)
    assert load_settings({"HOLDFAST_WEBHOOK_SECRETS": ""}).signing_secrets == []
