"""A message that refuses something names the setting that would allow it."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import RunTimeout
from holdfast.graphs.webhooks import WebhooksSection
from holdfast.webhooks.urls import RefusedUrl, UrlPolicy


@pytest.mark.parametrize(
    ("section", "url", "setting"),
    [
        ({"disabled": True}, "https://example.com/hook", "http.disable_webhooks"),
        ({"max_url_length": 20}, "https://example.com/a-long-path", "webhooks.url.max_url_length"),
        ({"require_https": True}, "http://example.com/hook", "webhooks.url.require_https"),
        ({"allowed_ports": (443,)}, "https://example.com:8443/hook", "webhooks.url.allowed_ports"),
        ({"allowed_domains": ("example.org",)}, "https://example.com/hook", "webhooks.url.allowed_domains"),
        ({}, "http://localhost/hook", "WEBHOOK_ALLOW_PRIVATE"),
        ({}, "http://10.0.0.1/hook", "WEBHOOK_ALLOW_PRIVATE"),
    ],
)
def test_refused_webhook_names_the_setting(section: dict[str, Any], url: str, setting: str) -> None:
    with pytest.raises(RefusedUrl) as refused:
        UrlPolicy(WebhooksSection(**section), allow_private=False).check(url)
    assert setting in str(refused.value)


def test_run_that_is_out_of_time_names_the_setting() -> None:
    assert "BG_JOB_TIMEOUT_SECS" in str(RunTimeout(5))
