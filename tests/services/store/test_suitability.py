"""A server that removes keys, or is a node of a cluster, is refused before a job is lost."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import (
    ConnectionError as Unreachable,
)

from bench.support.harness import Parts
from bench.support.waiting import wait_until
from services.settings import Settings
from services.store.backup import make_backup, open_store
from services.store.connection import (
    StoreUnsuitable,
    connect_redis,
    describe_failure,
    find_volatility,
    require_suitable_store,
)
from services.store.embedded import StoreUnavailable, find_binary, find_free_port
from services.terminal import cli
from services.terminal.commands import up
from services.terminal.commands.doctor import _check_store

Change = Callable[..., None]


@pytest.fixture
def configure(parts: Parts) -> Iterator[Change]:
    """A function that changes settings of the server for this test."""
    client = parts.jobs.redis
    before = {name: client.config_get(name)[name] for name in ("maxmemory", "maxmemory-policy")}

    def change(**settings: str) -> None:
        for name, value in settings.items():
            client.config_set(name.replace("_", "-"), value)

    yield change
    for name, value in before.items():
        client.config_set(name, value)


@pytest.fixture
def cluster_url(tmp_path: Path, parts: Parts) -> Iterator[str]:
    port = find_free_port()
    # Without it the second port is 10,000 above the first, which may be none.
    bus = find_free_port()
    command = [
        find_binary(), "--port", port, "--cluster-enabled", "yes", "--cluster-port", bus,
        "--dir", tmp_path, "--save", "", "--bind", "127.0.0.1",
    ]  # fmt: skip
    server = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    try:
        with connect_redis(url) as client:
            wait_until(lambda: _answers(client) or server.poll() is not None)
        yield url
    finally:
        server.kill()
        server.wait()


def _answers(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except Unreachable:
        return False


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "volatile-ttl"])
def test_a_server_that_removes_keys_is_refused(
    parts: Parts, configure: Change, policy: str
) -> None:
    configure(maxmemory="100mb", maxmemory_policy=policy)
    with pytest.raises(StoreUnsuitable, match=policy) as caught:
        require_suitable_store(parts.jobs.redis)
    assert "noeviction" in caught.value.remedy
    finding = _check_store(parts.settings)
    assert not finding.ok
    assert policy in finding.detail
    configure(maxmemory="0")
    require_suitable_store(parts.jobs.redis)


def test_a_node_of_a_cluster_is_refused(cluster_url: str) -> None:
    with connect_redis(cluster_url) as client, pytest.raises(StoreUnsuitable, match="cluster"):
        require_suitable_store(client)
    finding = _check_store(Settings(redis_url=cluster_url))
    assert not finding.ok
    assert finding.needed


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(lambda url: cli._require_store(Settings(redis_url=url)), id="serve, worker"),
        pytest.param(up._require_store, id="up"),
    ],
)
def test_no_part_of_the_service_starts_on_such_a_server(
    parts: Parts, configure: Change, cluster_url: str, start: Callable[[str], object]
) -> None:
    start(parts.server.url)
    configure(maxmemory="100mb", maxmemory_policy="allkeys-lru")
    with pytest.raises(StoreUnsuitable, match="allkeys-lru"):
        start(parts.server.url)
    with pytest.raises(StoreUnsuitable, match="cluster"):
        start(cluster_url)


def test_a_server_without_a_disk_is_a_warning(cluster_url: str) -> None:
    with connect_redis(cluster_url) as client:
        assert "append-only" in find_volatility(client)


def test_a_user_who_may_not_ask_is_served(parts: Parts) -> None:
    client = parts.jobs.redis
    client.acl_setuser("narrow", enabled=True, passwords=["+word"], keys=["*"],
                       commands=["+@all", "-info"])  # fmt: skip
    _, _, place = str(parts.settings.redis_url).rpartition("@")
    try:
        with connect_redis(f"redis://narrow:word@{place}") as narrow:
            require_suitable_store(narrow)
            assert find_volatility(narrow) == ""
    finally:
        client.acl_deluser("narrow")


def test_a_worker_that_cannot_work_ends_with_an_error(new_parts: Callable[..., Parts]) -> None:
    """The server refuses what Celery waits with: Celery gives up as if it had been asked to."""
    parts = new_parts()
    parts.jobs.redis.acl_setuser("narrow", enabled=True, passwords=["+word"], keys=["*"],
                                 channels=["*"], commands=["+@all", "-brpop"])  # fmt: skip
    _, _, place = str(parts.settings.redis_url).rpartition("@")
    worker = parts.start("services.worker", KD_REDIS_URL=f"redis://narrow:word@{place}")
    wait_until(lambda: worker.poll() is not None, 60)
    assert worker.poll() == 1
    (log,) = parts.settings.home.glob("logs/services.worker-*.log")
    text = log.read_text()
    assert "This worker ends: the job store does not allow this user a command" in text
    assert "Traceback" not in text


def test_a_backup_by_a_user_who_may_not_pause_the_server_says_so(
    parts: Parts, tmp_path: Path
) -> None:
    parts.jobs.redis.acl_setuser("narrow", enabled=True, passwords=["+word"], keys=["*"],
                                 commands=["+@all", "-client", "-info"])  # fmt: skip
    _, _, place = str(parts.settings.redis_url).rpartition("@")
    settings = parts.settings.model_copy(update={"redis_url": f"redis://narrow:word@{place}"})
    try:
        with (
            pytest.raises(StoreUnavailable, match="does not allow this user"),
            open_store(settings) as client,
        ):
            make_backup(tmp_path / "backup", settings, client)
    finally:
        parts.jobs.redis.acl_deluser("narrow")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "is full"),
        (ReadOnlyError("You can't write against a read only replica."), "is a read-only copy"),
        (AuthenticationError("invalid username-password pair"), "refuses the password"),
        (NoPermissionError("this user has no permissions"), "does not allow this user"),
        (ResponseError("unknown command 'EVALSHA'"), "refuses a command: unknown"),
        (Unreachable("Connection refused"), "does not answer: Connection refused"),
    ],
)
def test_a_store_that_answers_is_not_called_silent(error: Exception, words: str) -> None:
    assert describe_failure(error).startswith(words)
