"""Refuses to start a server without authentication that other machines can reach."""

from __future__ import annotations

from holdfast.errors import SettingsError
from holdfast.graphs.config import ProjectConfig
from holdfast.settings import Settings
from holdfast.settings.hosts import listens_beyond_loopback


def needs_login(settings: Settings) -> bool:
    """Whether the server must require authentication: other machines reach it, and ALLOW_KEYLESS is not set."""
    return not settings.allow_keyless and listens_beyond_loopback(settings.host)


def refuse_open_server(settings: Settings, project: ProjectConfig, *, keys: bool) -> None:
    """Raise SettingsError for a server that would be open to other machines. `keys`: whether there are API keys."""
    section = project.raw.get("auth") or {}
    custom = section.get("path") is not None
    studio = settings.studio_auth and not section.get("disable_studio_auth", False)
    closed = not studio if custom else keys
    if closed or not needs_login(settings):
        return
    if custom:
        why = "requests with the header `x-auth-scheme: langsmith` pass without login (HOLDFAST_STUDIO_AUTH)"
        remedy = "Set HOLDFAST_STUDIO_AUTH=false"
    else:
        why = "there are no API keys, and langgraph.json names no custom auth (auth.path)"
        remedy = "Create a key with `holdfast keys create`"
    raise SettingsError(
        f"HOLDFAST_HOST={settings.host}: other machines reach this address, and the server would be open to everybody: "
        f"{why}. {remedy}, or listen on 127.0.0.1, or set HOLDFAST_ALLOW_KEYLESS=true if something else keeps "
        "strangers out."
    )
