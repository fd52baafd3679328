"""The real parts of the service as processes, for tests: server, API, workers; each is started and stopped by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from kd.config.job import JobConfig
from kd.jobfile import parse_config
from services.embedded import EmbeddedServer, find_binary, free_port
from services.jobs import JobStore, connect
from services.queue import celery_app, publish
from services.schemas import Job
from services.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")


def wait_until(condition: Callable[[], T], seconds: float = 30.0) -> T:
    """The first true value of ``condition``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.03)
    raise AssertionError(f"not true within {seconds} s")


def body(name: str, kind: str = "train", **changes: Any) -> dict[str, Any]:
    """A job that is valid as far as its form goes; ``name`` is what tests/scripted_child.py acts upon."""
    return {
        "kind": kind,
        "name": name,
        "teacher": None if kind == "train" else {"model": "teacher"},
        "student": {"init": {"layers": 1, "hidden_size": 16, "tokenizer": "teacher"}},
        "data": {"train": "text.txt"},
        "loss": {"alpha": 1.0 if kind == "train" else 0.1},
        "train": {"max_steps": 1},
        **changes,
    }


def config(name: str, kind: str = "train", **changes: Any) -> JobConfig:
    """The same, parsed."""
    return parse_config(body(name, kind, **changes))


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Parts:
    """A server in ``folder``/redis, and what was started beside it."""

    def __init__(self, folder: Path, child_module: str = "tests.scripted_child", **settings: Any) -> None:
        self.server = EmbeddedServer(folder / "redis", find_binary())
        self.server.start()
        port = free_port()
        self.settings = Settings(
            home=folder,
            root=ROOT,
            redis_url=self.server.url,
            port=port,
            server=f"http://127.0.0.1:{port}",
            child_module=child_module,
            **{"lease_seconds": 2.0, "stop_grace_seconds": 5.0, "silence_seconds": 30.0, **settings},
        )
        self.jobs = JobStore(connect(self.server.url), self.settings.max_attempts)
        self.queue = celery_app(self.server.url, socket_timeout=2.0)
        self.http = httpx.Client(base_url=self.settings.server, timeout=10)
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, module: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """A part of the service as a process; it ends with this test at the latest."""
        self.settings.home.joinpath("logs").mkdir(exist_ok=True)
        log_file = self.settings.home / "logs" / f"{module}-{len(self._processes)}.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=os.environ | self.settings.environment() | environment,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def start_api(self) -> subprocess.Popen[bytes]:
        """The API, ready to answer."""
        process = self.start("services.api")
        wait_until(lambda: process.poll() is None and self.answers("/healthz"))
        return process

    def answers(self, path: str) -> bool:
        """Whether the API answers there."""
        try:
            return self.http.get(path).is_success
        except httpx.TransportError:
            return False

    def start_worker(self, *queues: str) -> subprocess.Popen[bytes]:
        """A worker, ready to work."""
        process = self.start("services.worker", *queues)
        wait_until(lambda: any(worker.pid == process.pid for worker in self.jobs.workers()))
        return process

    def submit(self, name: str, kind: str = "train", **changes: Any) -> str:
        """A job straight into the record, with its hint."""
        wanted = config(name, kind, **changes)
        job_id = self.jobs.create(wanted).id
        publish(self.queue, job_id, wanted.stages[0])
        return job_id

    def job(self, job_id: str) -> Job:
        """The job as it stands."""
        job = self.jobs.get(job_id)
        assert job is not None
        return job

    def wait_for(self, job_id: str, *statuses: str, seconds: float = 30.0) -> Job:
        """The job, once it has one of the statuses."""
        return wait_until(lambda: job if (job := self.job(job_id)).status in statuses else None, seconds)

    def child_pid(self, job_id: str) -> int:
        """The process that runs the job, once the script has said which one it is."""
        file = self.settings.run_dir(job_id) / "pid"
        return int(wait_until(lambda: file.exists() and file.read_text()))

    def events(self, job_id: str) -> list[tuple[str, dict[str, Any]]]:
        """Type and data of everything that happened to a job."""
        entries = self.jobs.redis.xrange(f"kd:job:{job_id}:events")
        return [(fields["type"], json.loads(fields["data"])) for _, fields in entries]

    def statuses(self, job_id: str) -> list[str]:
        """The statuses that a job went through."""
        return [data["status"] for kind, data in self.events(job_id) if kind == "status"]

    def close(self) -> None:
        """End every process."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.http.close()
        self.queue.close()
        self.jobs.redis.close()
        self.server.stop()
