"""``kd up``: run the job store, the API and the workers, and restart those that end.

    kd up --+-- valkey-server     (unless KD_REDIS_URL names one)
            +-- services.api
            +-- services.worker   (one or more) -- services.worker.stage_child

The output of a process goes to ``KD_HOME``/logs. The processes end when this process ends, even if
it is killed. Only the job store then lives on, and the next ``kd up`` adopts it.
"""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from redis.exceptions import RedisError

from cache.errors import PotstillError
from services.api.guards.authentication import require_safe_bind
from services.process.extras import WORKER, find_missing_packages
from services.process.lasting_loops import start_loop
from services.settings import Settings, make_address
from services.store.connection import connect_redis, describe_failure, require_suitable_store
from services.store.embedded import StoreUnavailable, find_bind_error, find_free_port, provide_redis
from services.store.jobs.store import JobStore
from services.worker.stage_process import build_module_command, build_package_environment

#: The time that the API may take to start.
START_SECONDS = 60.0
#: The time between two checks whether a process has ended.
RESTART_CHECK_SECONDS = 0.5
#: A process that lived longer counts as healthy, and its pauses begin anew.
HEALTHY_SECONDS = 60.0
#: The longest pause before a process is started again.
LONGEST_PAUSE_SECONDS = 30.0

#: What to do where the packages of a worker are missing.
INSTALL_WORKER = "pip install 'potstill[worker]' installs what a worker needs."

Say = Callable[[str], None]


class StartError(PotstillError):
    """A process of the service did not start."""

    type = "start_failed"


@dataclass
class ServiceProcess:
    """A process that is started again when it ends, after a pause that doubles each time."""

    name: str
    module: str
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    #: Where in the log the output of the last start begins.
    log_from: int = 0
    failures: int = 0

    def start(self) -> None:
        """Start the process; its output is appended to the log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.log_from = log.tell()
            self.process = subprocess.Popen(
                build_module_command(self.module),
                env=os.environ | self.environment | build_package_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C reaches only this process, which then stops the others in order.
                start_new_session=True,
            )
        self.started = time.monotonic()

    def restart_if_ended(self, say: Say) -> None:
        """Start the process again if it has ended and its pause is over."""
        if self.process is None or self.process.poll() is None:
            return
        lived = time.monotonic() - self.started
        self.failures = 0 if lived > HEALTHY_SECONDS else self.failures
        if lived < min(2.0**self.failures, LONGEST_PAUSE_SECONDS):
            return
        self.failures += 1
        say(
            f"{self.name} ended with code {self.process.returncode} and is started again;"
            f" see {self.log}"
        )
        self.start()

    def read_log_tail(self) -> str:
        """Return the last output of the process since its last start."""
        return self.log.read_bytes()[self.log_from :][-1500:].decode(errors="replace").strip()


@contextmanager
def running(settings: Settings, workers: int, say: Say) -> Iterator[Settings]:
    """Run the whole service until the block ends; yield the settings with its port and address.

    Where the packages of a worker are missing, none is started, and that is said once.
    Raises ``UnsafeBind`` or ``KeysError`` before anything is started.
    """
    require_safe_bind(settings)
    if settings.port:
        _require_port(settings.port, settings.host)
    port = settings.port or find_free_port()
    address = make_address(settings.host, port)
    settings = settings.model_copy(update={"port": port, "server": address})
    if missing := find_missing_packages(WORKER):
        say(f"No worker runs here: {_describe_missing(missing)} {INSTALL_WORKER}")
        workers = 0
    with provide_redis(settings) as (url, ensure_store):
        _require_store(url)
        settings = settings.model_copy(update={"redis_url": url})
        processes = _list_processes(settings, workers)
        stopping = threading.Event()
        restart = partial(_restart_ended, processes, ensure_store, stopping, say)
        try:
            for process in processes:
                process.start()
            _await_api(settings, processes[0])
            restarter = start_loop("restarter", restart, stopping)
            try:
                yield settings
            finally:
                stopping.set()
                restarter.join()
        finally:
            # The workers need their grace time to save, and some more to end.
            stop_processes(processes, settings.stop_grace_seconds + 10)


def require_worker_packages() -> None:
    """Raise ``StartError`` if a package that a worker needs is not installed."""
    if missing := find_missing_packages(WORKER):
        raise StartError(f"No worker can run here: {_describe_missing(missing)}", INSTALL_WORKER)


def _describe_missing(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed."


def _require_port(port: int, host: str) -> None:
    error = find_bind_error(port, host)
    if error is None:
        return
    if error.errno == errno.EADDRINUSE:
        raise StartError(
            f"Port {port} of {host} is in use.",
            "Stop the program that listens there, or use another port: --port 0 finds a free one.",
        )
    detail = f"The API cannot listen on port {port} of {host}: {error.strerror}."
    remedy = "Give an address of this machine with --host, or another port with --port."
    raise StartError(detail, remedy)


def _require_store(url: str) -> None:
    try:
        with connect_redis(url) as client:
            client.ping()
            require_suitable_store(client)
            JobStore(client).require_known_format()
    except (RedisError, ValueError) as error:  # ValueError: not the URL of a server
        detail = f"The server of KD_REDIS_URL {describe_failure(error)}."
        raise StoreUnavailable(detail, "Start the server, or unset the variable.") from None


def _list_processes(settings: Settings, workers: int) -> list[ServiceProcess]:
    modules = {"api": "services.api"}
    modules |= {f"worker-{number}": "services.worker" for number in range(1, workers + 1)}
    environment = settings.environment()
    return [
        ServiceProcess(name, module, environment, settings.home / "logs" / f"{name}.log")
        for name, module in modules.items()
    ]


def _await_api(settings: Settings, api: ServiceProcess) -> None:
    deadline = time.monotonic() + START_SECONDS
    answer = ""
    while time.monotonic() < deadline:
        if api.process is None or api.process.poll() is not None:
            break
        with suppress(httpx.TransportError):
            # The environment may name a proxy, which could not reach this machine.
            response = httpx.get(f"{settings.server}/readyz", timeout=5, trust_env=False)
            if response.is_success:
                return
            answer = response.text
        time.sleep(0.05)
    raise StartError(f"The API did not start: {answer or api.read_log_tail()}", f"See {api.log}.")


def _restart_ended(
    processes: list[ServiceProcess],
    ensure_store: Callable[[], None],
    stopping: threading.Event,
    say: Say,
) -> None:
    while not stopping.wait(RESTART_CHECK_SECONDS):
        try:
            # The store first: the other processes need it when they start.
            ensure_store()
        except StoreUnavailable as error:
            say(str(error))
        for process in processes:
            process.restart_if_ended(say)


def stop_processes(services: list[ServiceProcess], patience: float) -> None:
    """Ask every process to end; kill those that have not ended after ``patience`` seconds.

    Another Ctrl-C kills them at once.
    """
    processes = [service.process for service in services if service.process is not None]
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
