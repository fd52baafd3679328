"""Hosts by their IPv6 addresses, and processes that share a host's name and a process id."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from celery import Celery

from services.process.health import check_api
from services.process.names import name_process
from services.redis_url import parse_sentinels
from services.settings import Settings
from services.store.connection import connect_redis, make_broker


@pytest.mark.parametrize(
    ("place", "hosts"),
    [
        ("[::1]:26400", (("::1", 26400),)),
        ("[fd00::5]", (("fd00::5", 26379),)),
        ("fd00::5", (("fd00::5", 26379),)),
        ("user:word@[::1]:1,[fd00::5]:2,b.example.org", (
            ("::1", 1), ("fd00::5", 2), ("b.example.org", 26379))),
        ("a.example.org:1,10.0.0.1:2", (("a.example.org", 1), ("10.0.0.1", 2))),
    ],
)  # fmt: skip
def test_sentinels_have_addresses_of_both_kinds(
    place: str, hosts: tuple[tuple[str, int], ...]
) -> None:
    url = f"sentinel://{place}/0?master=potstill"
    group = parse_sentinels(url)
    assert group is not None
    assert group.hosts == hosts
    with connect_redis(url) as client:
        watchers = client.connection_pool.sentinel_manager.sentinels
    asked = [each.connection_pool.connection_kwargs for each in watchers]
    assert tuple((each["host"], each["port"]) for each in asked) == hosts
    # As the transport of Celery reads it.
    broker = Celery(broker=make_broker(url, 1.0).url).connection()
    assert (broker.hostname, broker.port) == hosts[0]


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class SixServer(HTTPServer):
    address_family = socket.AF_INET6


@pytest.fixture
def port() -> Iterator[int]:
    try:
        server = SixServer(("::1", 0), Healthy)
    except OSError:
        pytest.skip("this machine has no IPv6")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("host", ["::1", "::"])
def test_the_check_of_a_container_asks_where_the_api_listens(port: int, host: str) -> None:
    assert check_api(Settings(host=host, port=port)) == ""


def test_two_processes_of_one_number_have_two_names() -> None:
    assert name_process() != name_process()
