"""Where webhooks may lead: not behind the server's own firewall, however that is written."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest

from holdfast.graphs.webhooks import WebhooksSection
from holdfast.resources.webhook_urls import RefusedUrl, UrlPolicy, is_public

PUBLIC = UrlPolicy(WebhooksSection(), allow_private=False)
ANYWHERE = UrlPolicy(WebhooksSection(), allow_private=True)

NOT_URLS = [
    "",
    "/hook",
    "//example.com/hook",
    "example.com/hook",
    "ftp://example.com/hook",
    "file:///etc/passwd",
    "gopher://example.com",
    "javascript:alert(1)",
    "http://",
    "http:///hook",
    "https://:443/hook",
    "https://user:word@example.com/hook",
    "https://user@example.com/hook",
    "https://example.com:0/hook",
    "https://example.com:99999/hook",
    "https://example.com:port/hook",
    "https://exa mple.com/hook",
    "https://example.com/ho ok",
    "https://example.com/hook\r\nx: y",
    "https://example.com/h\u0000ook",
    "https://ex\u00e4mple.com/hook",
    "https://example.com\\@127.0.0.1/hook",
    "https://[::1/hook",
    "https://[1:2]/hook",
    "https://example.com/" + "x" * 2048,
]
NOT_PUBLIC = [
    "http://localhost/hook",
    "http://LOCALHOST./hook",
    "http://api.localhost:8123/hook",
    "http://127.0.0.1/hook",
    "http://127.1/hook",
    "http://2130706433/hook",
    "http://0x7f000001/hook",
    "http://0177.0.0.1/hook",
    "http://127.0.0.1./hook",
    "http://0.0.0.0/hook",
    "http://[::1]/hook",
    "http://[::]/hook",
    "http://[::ffff:127.0.0.1]/hook",
    "http://[::127.0.0.1]/hook",
    "http://[64:ff9b::7f00:1]/hook",
    "http://[2002:7f00:1::]/hook",
    "http://10.1.2.3/hook",
    "http://172.16.0.1/hook",
    "http://192.168.1.1/hook",
    "http://100.64.0.1/hook",
    "http://169.254.169.254/latest/meta-data",
    "http://[fe80::1]/hook",
    "http://[fd00:ec2::254]/hook",
    "http://100.100.100.200/hook",
    "http://168.63.129.16/hook",
    "http://192.0.0.192/hook",
    "http://224.0.0.1/hook",
    "http://[ff02::1]/hook",
    "http://255.255.255.255/hook",
    "http://240.0.0.1/hook",
]


@pytest.mark.parametrize("url", NOT_URLS)
def test_what_is_no_url_to_call(url: str) -> None:
    for policy in (PUBLIC, ANYWHERE):
        with pytest.raises(RefusedUrl, match=r"\.$"):
            policy.check(url)


@pytest.mark.parametrize("url", NOT_PUBLIC)
def test_what_is_not_public(url: str) -> None:
    with pytest.raises(RefusedUrl, match=r"\.$"):
        PUBLIC.check(url)
    ANYWHERE.check(url)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://example.com", ("https", "example.com", 443)),
        ("http://Example.com./a?b=c#d", ("http", "example.com", 80)),
        ("https://example.com:8443/hook", ("https", "example.com", 8443)),
        ("https://93.184.216.34/hook", ("https", "93.184.216.34", 443)),
        ("https://[2606:4700::1111]/hook", ("https", "2606:4700::1111", 443)),
        ("https://my_host.example.com/hook", ("https", "my_host.example.com", 443)),
    ],
)
def test_what_may_be_called(url: str, origin: tuple[str, str, int]) -> None:
    assert PUBLIC.check(url).origin == origin


def test_an_address_with_an_interface_is_not_public() -> None:
    assert not is_public(ipaddress.ip_address("2606:4700::1111%eth0"))
    assert is_public(ipaddress.ip_address("2606:4700::1111"))
    assert is_public(ipaddress.ip_address("::ffff:8.8.8.8"))
    assert is_public(ipaddress.ip_address("64:ff9b::8.8.8.8"))


@pytest.mark.parametrize(
    ("section", "url", "allowed"),
    [
        ({"require_https": True}, "http://example.com/hook", False),
        ({"require_https": True}, "https://example.com/hook", True),
        ({"allowed_ports": (443, 8443)}, "https://example.com/hook", True),
        ({"allowed_ports": (443, 8443)}, "https://example.com:8443/hook", True),
        ({"allowed_ports": (443, 8443)}, "https://example.com:8444/hook", False),
        ({"allowed_ports": (443,)}, "http://example.com/hook", False),
        ({"allowed_domains": ("example.com",)}, "https://example.com/hook", True),
        ({"allowed_domains": ("example.com",)}, "https://EXAMPLE.com./hook", True),
        ({"allowed_domains": ("example.com",)}, "https://a.example.com/hook", False),
        ({"allowed_domains": ("example.com",)}, "https://badexample.com/hook", False),
        ({"allowed_domains": ("*.example.com",)}, "https://a.b.example.com/hook", True),
        ({"allowed_domains": ("*.example.com",)}, "https://example.com/hook", False),
        ({"allowed_domains": ("*.example.com",)}, "https://badexample.com/hook", False),
        ({"allowed_domains": ()}, "https://example.com/hook", False),
        ({"max_url_length": 24}, "https://example.com/hook", True),
        ({"max_url_length": 23}, "https://example.com/hook", False),
        ({"disabled": True}, "https://example.com/hook", False),
    ],
)
def test_what_a_project_allows(section: dict[str, Any], url: str, allowed: bool) -> None:
    policy = UrlPolicy(WebhooksSection(**section), allow_private=False)
    if allowed:
        policy.check(url)
    else:
        with pytest.raises(RefusedUrl, match=r"\.$"):
            policy.check(url)
