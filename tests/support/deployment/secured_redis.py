"""Redis as ``examples/deploy/redis`` sets it up: TLS, users with few rights, sentinels."""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from redis import Redis
from redis.exceptions import RedisError

from bench.support.paths import ROOT
from bench.support.waiting import wait_until
from services.store.embedded import find_free_port

RECIPE = ROOT / "examples" / "deploy" / "redis"
PASSWORDS = {
    name: f"{name}-secret" for name in ("potstill", "backup", "replica", "sentinel", "operator")
}
#: The bundled Valkey has no TLS, so these tests need a server of the system.
BINARY = shutil.which("redis-server") or shutil.which("valkey-server")
MASTER = "potstill"


def fill_in(text: str, certificates: Path, **places: str) -> str:
    """Replace the paths and passwords of a file of the recipe."""
    for name, password in PASSWORDS.items():
        text = text.replace(f"PASSWORD_OF_{name.upper()}", password)
    text = text.replace("/etc/redis/tls", str(certificates))
    for old, new in places.items():
        text = text.replace(old, new)
    return text


def make_certificates(folder: Path) -> Path:
    """Run the recipe's script for 127.0.0.1; returns the folder of the certificates."""
    script = RECIPE / "make_certificates.sh"
    subprocess.run(
        ["sh", script, folder, "127.0.0.1", "localhost"], check=True, capture_output=True
    )
    return folder


@dataclass
class SecuredServer:
    """One process of redis-server: a job store, a replica of one, or a sentinel."""

    folder: Path
    certificates: Path
    port: int = field(default_factory=find_free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """Start a job store with the recipe's files; ``options`` come last and win."""
        self.folder.mkdir(exist_ok=True)
        users = self.folder / "users.acl"
        users.write_text(fill_in((RECIPE / "users.acl").read_text(), self.certificates))
        text = (RECIPE / "redis.conf").read_text()
        text = text.replace("/etc/redis/users.acl", str(users))
        text = text.replace("dir /data", f"dir {self.folder}")
        text = text.replace("tls-port 6379", f"tls-port {self.port}")
        self._launch(fill_in(text, self.certificates), "redis.conf", *options)
        try:
            wait_until(self._answers, 30)
        except AssertionError:
            self.kill()
            raise AssertionError((self.folder / "server.log").read_text()[-2000:]) from None

    def watch(self, master: int, *options: str) -> None:
        """Start a sentinel that watches the master on this port."""
        self.folder.mkdir(exist_ok=True)
        text = (RECIPE / "sentinel.conf").read_text()
        text = text.replace("tls-port 26379", f"tls-port {self.port}")
        text = text.replace("redis-1.example.org 6379", f"127.0.0.1 {master}")
        text = text.replace("dir /data", f"dir {self.folder}")
        self._launch(fill_in(text, self.certificates), "sentinel.conf", "--sentinel", *options)

    def _launch(self, text: str, name: str, *options: str) -> None:
        assert BINARY is not None
        config = self.folder / name
        config.write_text(text)
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen([BINARY, config, *options], stdout=log, stderr=log)

    def _answers(self) -> bool:
        try:
            with self.connect("operator") as client:
                return bool(client.ping())
        except RedisError:
            return False

    def connect(self, user: str) -> Redis:
        """A client of this server as one of the recipe's users."""
        return Redis(
            host="127.0.0.1",
            port=self.port,
            username=user,
            password=PASSWORDS[user],
            ssl=True,
            ssl_ca_certs=str(self.certificates / "ca.crt"),
            socket_timeout=5,
            decode_responses=True,
            protocol=2,
        )

    @property
    def url(self) -> str:
        """KD_REDIS_URL of this server alone, without the password."""
        return f"rediss://potstill@127.0.0.1:{self.port}/0"

    def kill(self) -> None:
        """Kill the server as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    stop = kill


class SentinelCluster:
    """A master, a replica and three sentinels."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.certificates = make_certificates(folder / "tls")
        self.stores = [SecuredServer(folder / name, self.certificates) for name in ("one", "two")]
        self.sentinels = [SecuredServer(folder / f"s{n}", self.certificates) for n in range(3)]
        master, replica = self.stores
        master.start("--port", "0")
        replica.start("--replicaof", "127.0.0.1", str(master.port))
        for sentinel in self.sentinels:
            sentinel.watch(master.port)
        wait_until(self._is_complete, 60)

    def _is_complete(self) -> bool:
        """Whether the replica is in step, and each sentinel knows the replica and the others."""
        with self.stores[1].connect("operator") as client:
            state = cast(dict[str, Any], client.info("replication"))
        if state.get("master_link_status") != "up":
            return False
        return all(self._know(sentinel) for sentinel in self.sentinels)

    def _know(self, sentinel: SecuredServer) -> bool:
        try:
            found = self.ask(sentinel)
        except RedisError:
            return False
        return int(found["num-slaves"]) == 1 and int(found["num-other-sentinels"]) == 2

    def ask(self, sentinel: SecuredServer) -> dict[str, Any]:
        """What a sentinel says of the master."""
        with Redis(
            port=sentinel.port,
            ssl=True,
            ssl_ca_certs=str(self.certificates / "ca.crt"),
            decode_responses=True,
            protocol=2,
        ) as client:
            return cast(dict[str, Any], client.sentinel_master(MASTER))

    @property
    def url(self) -> str:
        """KD_REDIS_URL of the group, without the password."""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"sentinels://potstill@{hosts}/0?master={MASTER}"

    def fail_over(self) -> float:
        """Kill the master; returns the seconds until the sentinels name the other one."""
        self.stores[0].kill()
        began = time.monotonic()
        port = str(self.stores[1].port)
        wait_until(lambda: str(self.ask(self.sentinels[0])["port"]) == port, 120)
        return time.monotonic() - began

    def stop(self) -> None:
        """End all processes."""
        for server in (*self.sentinels, *self.stores):
            server.kill()
