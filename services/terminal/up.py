"""All of the service in one terminal: the job store, the API and the workers as subprocesses, kept alive.

    kd up --+-- valkey-server     (unless KD_REDIS_URL names one)
            +-- services.api
            +-- services.worker   (one or more) -- services.worker.child

What a part prints goes to ``KD_HOME``/logs. The parts end when this process does, however it ends; the store, if
this process is killed, lives on and is adopted by the next one.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from redis.exceptions import RedisError

from cache.errors import PotstillError
from services.api.keys import require_safe_bind
from services.embedded import ServerError, free_port, is_free, redis_url
from services.jobs import connect
from services.settings import Settings, address
from services.worker.process import module_command, package_environment

TEND_SECONDS = 0.5
HEALTHY_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 30.0

Say = Callable[[str], None]


class StartError(PotstillError):
    """A part of the service did not start."""

    type = "start_failed"


@dataclass
class Part:
    """A process that is started again when it ends, after a pause that doubles each time."""

    name: str
    module: str
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    log_from: int = 0  # where in the log its output begins
    failures: int = field(default=0)

    def start(self) -> None:
        """Start it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.log_from = log.tell()
            self.process = subprocess.Popen(
                module_command(self.module),
                env=os.environ | self.environment | package_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for kd up, which stops the parts in order
            )
        self.started = time.monotonic()

    def tend(self, say: Say) -> None:
        """Start it again if it has ended and its pause is over."""
        if self.process is None or self.process.poll() is None:
            return
        lived = time.monotonic() - self.started
        self.failures = 0 if lived > HEALTHY_SECONDS else self.failures
        if lived < min(2.0**self.failures, LONGEST_PAUSE_SECONDS):
            return
        self.failures += 1
        say(f"{self.name} ended with code {self.process.returncode} and is started again; see {self.log}")
        self.start()

    def tail(self) -> str:
        """The end of what it has printed since it was last started."""
        return self.log.read_bytes()[self.log_from :][-1500:].decode(errors="replace").strip()


@contextmanager
def running(settings: Settings, workers: int, say: Say) -> Iterator[Settings]:
    """The whole service, until the end of the block; yields the settings with its true port and address.

    Raises ``UnsafeBind`` or ``KeysError`` before anything is started.
    """
    require_safe_bind(settings)
    settings = _with_port(settings)
    with redis_url(settings) as (url, ensure_store):
        _require_store(url)
        settings = settings.model_copy(update={"redis_url": url})
        parts = _parts(settings, workers)
        stopping = threading.Event()
        tender = threading.Thread(target=_tend, args=(parts, ensure_store, stopping, say), name="tender")
        try:
            for part in parts:
                part.start()
            _await_api(settings, parts[0])
            tender.start()
            yield settings
        finally:
            stopping.set()
            if tender.is_alive():
                tender.join()
            stop(parts, settings.stop_grace_seconds + 10)


def _with_port(settings: Settings) -> Settings:
    if settings.port and not is_free(settings.port, settings.host):
        raise StartError(
            f"Port {settings.port} of {settings.host} is in use.",
            "Stop what listens there, or take another port: --port 0 finds a free one.",
        )
    port = settings.port or free_port()
    return settings.model_copy(update={"port": port, "server": address(settings.host, port)})


def _require_store(url: str) -> None:
    try:
        with connect(url) as client:
            client.ping()
    except (RedisError, ValueError) as error:  # ValueError: not a URL of a server
        raise ServerError(f"The server of KD_REDIS_URL does not serve: {error}.", "Start it, or unset it.") from None


def _parts(settings: Settings, workers: int) -> list[Part]:
    logs, environment = settings.home / "logs", settings.environment()
    api = Part("api", "services.api", environment, logs / "api.log")
    names = [f"worker-{number}" for number in range(1, workers + 1)]
    return [api, *(Part(name, "services.worker", environment, logs / f"{name}.log") for name in names)]


def _await_api(settings: Settings, api: Part, seconds: float = 60.0) -> None:
    deadline, answer = time.monotonic() + seconds, ""
    while time.monotonic() < deadline:
        if api.process is None or api.process.poll() is not None:
            break
        with suppress(httpx.TransportError):
            response = httpx.get(f"{settings.server}/readyz", timeout=5, trust_env=False)
            if response.is_success:
                return
            answer = response.text
        time.sleep(0.05)
    raise StartError(f"The API did not start: {answer or api.tail()}", f"See {api.log}.")


def _tend(parts: list[Part], ensure_store: Callable[[], None], stopping: threading.Event, say: Say) -> None:
    while not stopping.wait(TEND_SECONDS):
        try:
            ensure_store()
        except ServerError as error:
            say(str(error))
        for part in parts:
            part.tend(say)


def stop(parts: list[Part], patience: float) -> None:
    """Ask every part to end, and kill what has not after ``patience`` seconds or on another Ctrl-C."""
    processes = [part.process for part in parts if part.process is not None]
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + patience
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
    except KeyboardInterrupt:
        pass
    for process in processes:
        process.kill()
        process.wait()
