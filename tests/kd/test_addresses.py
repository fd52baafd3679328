"""The hosts that a service connects to: the ones that are listed, at addresses that are public."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from typing import Any

import pytest

from kd.addresses import resolve_public_address
from kd.errors import ConfigError

NOT_PUBLIC = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.0.1",  # noqa: S104
    "169.254.169.254", "100.64.0.1",
    "192.0.0.192", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "168.63.129.16",
    "::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:8.8.8.8",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:7f00:1::", "::7f00:1",
]  # fmt: skip


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_an_address_that_is_not_public_is_refused_behind_any_name(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, {"inside.example": ["93.184.215.14", address]})
    with pytest.raises(ConfigError, match="not public"):
        resolve_public_address("inside.example", ["inside.example"])
    assert resolve_public_address("inside.example", ["inside.example", address]) == "93.184.215.14"
    with pytest.raises(ConfigError, match="does not allow the host"):
        resolve_public_address(address, ["inside.example"])
    assert ip_address(resolve_public_address(address, [address])) == ip_address(address)


def test_an_entry_with_a_port_allows_no_other_port(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {"a.example": ["93.184.215.14"]})
    for host, allowed in (
        ("a.example", "a.example:8000"), ("10.1.2.3", "10.1.2.3:8000"),
        ("10.1.2.3", "10.0.0.0/8:8000"), ("fd00::5", "[fd00::5]:8000"),
    ):  # fmt: skip
        assert resolve_public_address(host, [allowed], 8000)
        for port in (443, None):
            with pytest.raises(ConfigError, match="does not allow the host"):
                resolve_public_address(host, [allowed], port)
    assert resolve_public_address("fd00::5", ["fd00::5"], 8000)


def answers(monkeypatch: pytest.MonkeyPatch, table: dict[str, list[str]]) -> None:
    """Replace the resolver, because a test cannot make the real one return these addresses."""

    def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
        if host not in table:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in table[host]
        ]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_a_public_address_is_given_to_connect_to(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {"a.example": ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"]})
    assert resolve_public_address("a.example", ["A.EXAMPLE."]) == "93.184.215.14"
    assert resolve_public_address("A.example.", ["a.example"]) == "93.184.215.14"
    for other in ("b.example", "a.example.evil", "evil-a.example", "", "a"):
        with pytest.raises(ConfigError, match="does not allow the host"):
            resolve_public_address(other, ["a.example"])
    with pytest.raises(ConfigError, match="not found"):
        resolve_public_address("gone.example", ["gone.example"])


def test_networks_and_localhost_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_public_address("localhost", ["localhost"]) in ("127.0.0.1", "::1")
    assert resolve_public_address("127.0.0.1", ["localhost"]) == "127.0.0.1"
    assert resolve_public_address("10.2.3.4", ["10.0.0.0/8"]) == "10.2.3.4"
    answers(monkeypatch, {"vllm": ["172.18.0.5"]})
    with pytest.raises(ConfigError, match=r"172\.18\.0\.5"):
        resolve_public_address("vllm", ["vllm"])
    assert resolve_public_address("vllm", ["vllm", "172.16.0.0/12"]) == "172.18.0.5"


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f000001", "127.1", "a..b", "x" * 300, "é" * 70, "[::1]"]
)
def test_another_spelling_of_an_address_is_no_way_round(host: str) -> None:
    """The resolver accepts numbers in other bases: its answer counts; the name must be listed."""
    with pytest.raises(ConfigError):
        resolve_public_address(host, ["example.org"])
    with pytest.raises(ConfigError):
        resolve_public_address(host, ["example.org", host] if host != "[::1]" else ["127.0.0.1"])
