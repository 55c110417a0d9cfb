"""Where webhooks may lead: not behind the server's own firewall, however that is written."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest

from holdfast.graphs.webhooks import WebhooksSection
from holdfast.webhooks.urls import RefusedUrl, UrlPolicy, is_public

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
    "http://[fec0::1]/hook",
    "http://[FEC0::1]/hook",
    "http://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/hook",
    "http://[2002:808:808::1]/hook",
    "http://[::ffff:a00:1]/hook",
    "http://10.1/hook",
    "http://0xa.0.0.1/hook",
    "http://012.0.0.1/hook",
    "http://3232235777/hook",
]
# One or both ends of each network, and the neighbours that are public.
NOT_PUBLIC_ADDRESSES = [
    "0.0.0.0",
    "0.255.255.255",
    "10.0.0.0",
    "10.255.255.255",
    "100.64.0.0",
    "100.127.255.255",
    "127.0.0.1",
    "127.255.255.255",
    "168.63.129.16",
    "169.254.0.1",
    "169.254.169.254",
    "172.16.0.0",
    "172.31.255.255",
    "192.0.0.0",
    "192.0.0.8",
    "192.0.0.192",
    "192.0.0.255",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.0.0",
    "192.168.255.255",
    "198.18.0.0",
    "198.19.255.255",
    "198.51.100.7",
    "203.0.113.7",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::808:808",
    "::ffff:10.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:0:808:808",
    "64:ff9b::10.0.0.1",
    "64:ff9b::127.0.0.1",
    "64:ff9b:1::808:808",
    "64:ff9b:1:ffff:ffff:ffff:808:808",
    "100::1",
    "200::1",
    "1fff:ffff::1",
    "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:2::1",
    "2001:10::1",
    "2001:20::1",
    "2001:1ff:ffff::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:a00:1::",
    "2002:808:808::1",
    "3fff::1",
    "3fff:fff:ffff::1",
    "4000::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fd20:ce::254",
    "fe00::1",
    "fe80::1",
    "febf::1",
    "fec0::1",
    "feff::1",
    "ff02::1",
    "ff0e::1",
    "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
]
PUBLIC_ADDRESSES = [
    "1.1.1.1",
    "8.8.8.8",
    "9.255.255.255",
    "11.0.0.0",
    "93.184.216.34",
    "100.63.255.255",
    "100.128.0.0",
    "126.255.255.255",
    "128.0.0.1",
    "168.63.129.17",
    "169.253.255.255",
    "169.255.0.0",
    "172.15.255.255",
    "172.32.0.0",
    "191.255.255.255",
    "192.0.1.0",
    "192.167.255.255",
    "192.169.0.0",
    "198.17.255.255",
    "198.20.0.0",
    "223.255.255.255",
    "2000::1",
    "2001:200::1",
    "2001:4860:4860::8888",
    "2003::1",
    "2606:4700::1111",
    "2a00:1450:4001::1",
    "3ffe:ffff::1",
    "::ffff:8.8.8.8",
    "64:ff9b::8.8.8.8",
]


@pytest.mark.parametrize("url", NOT_URLS)
def test_policy_refuses_invalid_urls(url: str) -> None:
    for policy in (PUBLIC, ANYWHERE):
        with pytest.raises(RefusedUrl, match=r"\.$"):
            policy.check(url)


@pytest.mark.parametrize("url", NOT_PUBLIC)
def test_policy_refuses_addresses_that_are_not_public(url: str) -> None:
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
def test_policy_allows_public_urls(url: str, origin: tuple[str, str, int]) -> None:
    assert PUBLIC.check(url).origin == origin


@pytest.mark.parametrize("address", NOT_PUBLIC_ADDRESSES)
def test_special_address_is_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", PUBLIC_ADDRESSES)
def test_global_unicast_address_is_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_an_address_with_an_interface_is_not_public() -> None:
    assert not is_public(ipaddress.ip_address("2606:4700::1111%eth0"))


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
def test_policy_applies_the_rules_of_the_project(section: dict[str, Any], url: str, allowed: bool) -> None:
    policy = UrlPolicy(WebhooksSection(**section), allow_private=False)
    if allowed:
        policy.check(url)
    else:
        with pytest.raises(RefusedUrl, match=r"\.$"):
            policy.check(url)


OWN_ROUTES = UrlPolicy(WebhooksSection(allow_relative=True, has_app=True, require_https=True), allow_private=False)


@pytest.mark.parametrize("url", ["/", "/hook", "/hook/", "/hooks/a%20b?token=c&d=/e", "/hook/../threads", "/a//b"])
def test_path_is_admitted_where_own_routes_can_be_called(url: str) -> None:
    OWN_ROUTES.admit(url)
    for section, cause in (
        (WebhooksSection(has_app=True), "disable_loopback"),
        (WebhooksSection(allow_relative=True), "http.app"),
        (WebhooksSection(allow_relative=True, has_app=True, disabled=True), "disable_webhooks"),
    ):
        with pytest.raises(RefusedUrl, match=rf"{cause}.*\.$"):
            UrlPolicy(section, allow_private=True).admit(url)


@pytest.mark.parametrize(
    "url", ["//example.com/hook", "//127.0.0.1/", "/\\example.com", "/a b", "/a\r\nx: y", "/\u00e4", "/a#b", "/" * 3000]
)
def test_url_that_is_no_path_of_the_project_is_refused(url: str) -> None:
    with pytest.raises(RefusedUrl, match=r"\.$"):
        OWN_ROUTES.admit(url)


def test_absolute_url_is_checked_where_own_routes_can_be_called() -> None:
    OWN_ROUTES.admit("https://example.com/hook")
    for url in ("http://example.com/hook", "https://localhost/hook", "hook", ""):
        with pytest.raises(RefusedUrl, match=r"\.$"):
            OWN_ROUTES.admit(url)
