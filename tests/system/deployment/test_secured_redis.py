"""The service on a job store with TLS, passwords, users of few rights, and sentinels.

The files are those of ``examples/deploy/redis``. The bundled Valkey has no TLS, so these tests need
redis-server of the system.
"""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError

from bench.support.harness import Parts
from bench.support.paths import ROOT
from kd.client.wire.jobs import TERMINAL_STATUSES
from services.process.health import check_worker
from services.settings import Settings
from services.store.connection import connect_redis, make_broker
from tests.support.deployment.secured_redis import (
    BINARY,
    PASSWORDS,
    RECIPE,
    SecuredServer,
    SentinelCluster,
    make_certificates,
)

needs_server = pytest.mark.skipif(
    BINARY is None, reason="needs redis-server (with TLS) on PATH: apt-get install redis-server"
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SecuredServer]:
    server = SecuredServer(tmp_path / "store", make_certificates(tmp_path / "tls"))
    server.start()
    yield server
    server.stop()


def make_parts(folder: Path, url: str, certificates: Path) -> Parts:
    """A service that gets URL, password and certificate as an operator gives them."""
    folder.mkdir()
    password = folder / "password"
    password.write_text(PASSWORDS["potstill"])
    return Parts(
        folder / "home",
        redis_url=url,
        redis_password_file=password,
        redis_ca_file=certificates / "ca.crt",
    )


@needs_server
def test_api_worker_and_queue_work_over_tls_as_a_user_of_few_rights(
    store: SecuredServer, tmp_path: Path
) -> None:
    parts = make_parts(tmp_path / "service", store.url, store.certificates)
    try:
        parts.start_api()
        parts.start_worker()
        assert check_worker(parts.settings) == ""
        first = parts.submit("quick")
        assert parts.wait_for(first, *TERMINAL_STATUSES).status == "succeeded"
        held = parts.submit("endless")
        parts.wait_for(held, "running")
        for action, status in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
            parts.http.post(f"/jobs/{held}/{action}").raise_for_status()
            parts.wait_for(held, status)
        for path in ("/jobs", f"/jobs/{first}", f"/jobs/{first}/metrics", "/caches", "/workers"):
            assert parts.http.get(path).is_success, path
        assert parts.http.get("/readyz").is_success
        assert parts.http.get("/metrics").is_success
        with parts.http.stream("GET", f"/jobs/{first}/events/stream") as stream:
            assert stream.is_success, stream.read()
            assert "succeeded" in "".join(stream.iter_text())
        assert parts.http.delete(f"/jobs/{first}").is_success
        with store.connect("operator") as client:
            refused = client.acl_log()
        assert [(entry["reason"], entry["object"]) for entry in refused] == []
    finally:
        parts.close()


@needs_server
def test_the_user_of_the_service_may_not_do_more(store: SecuredServer) -> None:
    with store.connect("potstill") as client:
        for words in (
            "FLUSHALL", "CONFIG GET dir", "KEYS *", "ACL LIST", "SHUTDOWN",
            "SET other 1", "GET other", "CLIENT LIST", "MONITOR", "REPLICAOF no one",
        ):  # fmt: skip
            with pytest.raises(NoPermissionError):
                client.execute_command(*words.split())
        assert client.set("kd:mine", "1")


@needs_server
def test_the_user_of_backups_may_back_up_and_restore(store: SecuredServer, tmp_path: Path) -> None:
    parts = make_parts(tmp_path / "service", store.url, store.certificates)
    job_id = parts.submit("quick")
    password = tmp_path / "backup-password"
    password.write_text(PASSWORDS["backup"])
    variables = parts.settings.environment() | {
        "KD_REDIS_URL": store.url.replace("potstill@", "backup@"),
        "KD_REDIS_PASSWORD_FILE": str(password),
    }
    for words in (["backup", "saved"], ["restore", "saved", "--force"]):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "services.terminal.cli",
                words[0],
                tmp_path / words[1],
                *words[2:],
            ],
            cwd=ROOT,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert parts.job(job_id).status == "queued"
    with store.connect("operator") as client:
        assert client.acl_log() == []
    parts.close()


@needs_server
def test_a_server_with_another_certificate_is_refused(store: SecuredServer, tmp_path: Path) -> None:
    strangers = make_certificates(tmp_path / "other")
    settings = Settings(redis_url=store.url, redis_ca_file=strangers / "ca.crt")
    assert settings.redis_url is not None
    with connect_redis(settings.redis_url) as client, pytest.raises(RedisConnectionError) as seen:
        client.ping()
    assert "certificate" in str(seen.value).lower()
    assert isinstance(seen.value.__cause__ or seen.value, (ssl.SSLError, RedisConnectionError))


def test_every_command_of_the_scripts_is_among_the_user_s_rights() -> None:
    rule = next(
        line
        for line in (RECIPE / "users.acl").read_text().splitlines()
        if line.startswith("user potstill ")
    )
    allowed = set(re.findall(r"\+(\w+)", rule))
    files = [path for path in (ROOT / "services").rglob("*") if path.suffix in (".lua", ".py")]
    text = "".join(path.read_text() for path in files)
    called = {name.lower() for name in re.findall(r"redis\.p?call\(\s*['\"](\w+)", text)}
    assert called
    assert called <= allowed


@needs_server
@pytest.mark.long
def test_jobs_go_on_after_the_master_of_a_group_has_died(tmp_path: Path) -> None:
    group = SentinelCluster(tmp_path / "group")
    parts = make_parts(tmp_path / "service", group.url, group.certificates)
    try:
        parts.start_api()
        parts.start_worker()
        during = parts.submit("steps")
        parts.wait_for(during, "running")
        parts.child_pid(during)
        group.fail_over()
        job = parts.wait_for(during, *TERMINAL_STATUSES)
        assert job.status == "succeeded", job.error
        steps = (parts.settings.run_dir(during) / "steps").read_text().split()
        assert steps == [str(step) for step in range(60)]
        after = parts.submit("quick")
        assert parts.wait_for(after, *TERMINAL_STATUSES).status == "succeeded"
        assert parts.http.get(f"/jobs/{after}").json()["status"] == "succeeded"
    finally:
        parts.close()
        group.stop()


# ---------------------------------------------------------------------- the settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"redis_url": "http://host/0"}, "begins with http://; expected one of redis://"),
        ({"redis_url": "redis://[::1"}, "KD_REDIS_URL: Invalid IPv6 URL"),
        ({"redis_url": "sentinel://a:1,b:2/0"}, "names no master"),
        (
            {"redis_url": "redis://h/0", "redis_ca_file": Path("ca")},
            "needs a KD_REDIS_URL of rediss",
        ),
        ({"redis_url": "rediss://h/0", "redis_ca_file": Path("none.crt")}, "is not a file"),
    ],
)
def test_a_wrong_address_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Settings(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["unix:///run/redis.sock?db=3", "redis://", "redis:///1"])
def test_an_address_without_files_stays_as_it_is(url: str) -> None:
    settings = Settings(redis_url=url)
    assert settings.redis_url == url
    connect_redis(settings.redis_url).close()


def test_the_password_keeps_the_user_and_reaches_every_client(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("p@ss/word")
    url = "sentinels://me@a:1,b/3?master=m"
    settings = Settings(redis_url=url, redis_password_file=password)
    again = Settings(redis_url=settings.redis_url, redis_password_file=password)
    assert again.redis_url == settings.redis_url
    assert settings.redis_url is not None
    broker = make_broker(settings.redis_url, 2.0)
    assert broker.url == "sentinel://me:p%40ss%2Fword@a:1/3;sentinel://me:p%40ss%2Fword@b:26379/3"
    assert broker.transport_options["master_name"] == "m"
    assert broker.use_ssl == {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    with connect_redis(settings.redis_url) as client:
        options = client.connection_pool.connection_kwargs
    assert (options["username"], options["password"], options["db"]) == ("me", "p@ss/word", 3)
