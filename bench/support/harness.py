"""The real parts of the service as processes: server, API and workers, started by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS, wait_until
from bench.support.warm import SERVICE, ForkedProcess, get_warm_python
from kd.client.wire.jobs import Job
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from services.settings import Settings
from services.store.connection import connect_redis
from services.store.embedded import EmbeddedServer, find_binary, find_free_port
from services.store.jobs.store import JobStore
from services.store.queue import make_celery_app, publish_hint

Started = subprocess.Popen[bytes] | ForkedProcess


def make_body(name: str, kind: str = "train", **changes: Any) -> dict[str, Any]:
    """Make a job of valid form; bench/support/scripted_child.py does what ``name`` says."""
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


def make_config(name: str, kind: str = "train", **changes: Any) -> JobConfig:
    """Make the body of a job and parse it."""
    return parse_config(make_body(name, kind, **changes))


def is_alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Parts:
    """A server in ``folder``/redis, and the processes started beside it.

    The processes are forks of one that has the libraries, which saves seconds of each start.
    Without ``forked`` each is a new Python. With ``redis_url`` among the settings the caller starts
    and stops the server.
    """

    def __init__(
        self,
        folder: Path,
        child_module: str = "bench.support.scripted_child",
        *,
        forked: bool = True,
        **settings: Any,
    ) -> None:
        self.server = EmbeddedServer(folder / "redis", find_binary())
        if "redis_url" not in settings:
            self.server.start()
        port = find_free_port()
        self.settings = Settings(
            home=folder,
            port=port,
            server=f"http://127.0.0.1:{port}",
            child_module=child_module,
            **{
                "redis_url": self.server.url,
                "root": ROOT,
                "lease_seconds": 2.0,
                "stop_grace_seconds": 5.0,
                "silence_seconds": 30.0,
                **settings,
            },
        )
        assert self.settings.redis_url is not None
        self.jobs = JobStore(connect_redis(self.settings.redis_url), self.settings.max_attempts)
        self.queue = make_celery_app(self.settings.redis_url, socket_timeout=2.0)
        # The first job waits for the imports of the process that checks it: seconds, or more.
        self.http = httpx.Client(base_url=self.settings.server, timeout=60)
        self.forked = forked
        self._processes: list[Started] = []

    def start(self, module: str, *arguments: str, **environment: str) -> Started:
        """Start a part of the service as a process; ``close`` ends it."""
        self.settings.home.joinpath("logs").mkdir(exist_ok=True)
        log_file = self.settings.home / "logs" / f"{module}-{len(self._processes)}.log"
        env = os.environ | self.settings.environment() | environment
        with log_file.open("wb") as log, Path(os.devnull).open() as nothing:
            process = self._launch(module, arguments, (nothing.fileno(), log.fileno()), env)
        self._processes.append(process)
        return process

    def _launch(
        self, module: str, arguments: Sequence[str], files: tuple[int, int], env: dict[str, str]
    ) -> Started:
        """Start a process with this input and output, in a fork if the environment allows it."""
        stdin, log = files
        warm = get_warm_python(SERVICE)
        if self.forked and warm.suits(env):
            return warm.start(module, arguments, [stdin, log, log], ROOT, env, new_session=True)
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=stdin,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=env,
            start_new_session=True,
        )

    def start_api(self) -> Started:
        """Start the API and wait until it answers."""
        process = self.start("services.api")
        wait_until(lambda: process.poll() is None and self.answers("/healthz"))
        return process

    def answers(self, path: str) -> bool:
        """Return whether the API answers ``path`` with success."""
        try:
            return self.http.get(path).is_success
        except httpx.TransportError:
            return False

    def start_worker(self, *queues: str) -> Started:
        """Start a worker and wait until it is ready."""
        process = self.start("services.worker", *queues)
        wait_until(lambda: any(worker.pid == process.pid for worker in self.jobs.list_workers()))
        return process

    def submit(self, name: str, kind: str = "train", **changes: Any) -> str:
        """Write a job into the record and send its hint, without the API."""
        wanted = make_config(name, kind, **changes)
        job_id = self.jobs.create(wanted).id
        publish_hint(self.queue, job_id, wanted.stages[0])
        return job_id

    def job(self, job_id: str) -> Job:
        """Read the job, which must exist."""
        job = self.jobs.get(job_id)
        assert job is not None
        return job

    def wait_for(self, job_id: str, *statuses: str, seconds: float = PATIENCE_SECONDS) -> Job:
        """Wait until the job has one of the statuses; returns the job."""
        return wait_until(
            lambda: job if (job := self.job(job_id)).status in statuses else None, seconds
        )

    def child_pid(self, job_id: str) -> int:
        """Wait until the script has written its process id; returns it."""
        file = self.settings.run_dir(job_id) / "pid"
        return int(wait_until(lambda: file.exists() and file.read_text()))

    def events(self, job_id: str) -> list[tuple[str, dict[str, Any]]]:
        """Type and data of every event of a job."""
        entries = self.jobs.redis.xrange(f"kd:job:{job_id}:events")
        return [(fields["type"], json.loads(fields["data"])) for _, fields in entries]

    def statuses(self, job_id: str) -> list[str]:
        """Return the statuses of a job, in order."""
        return [data["status"] for kind, data in self.events(job_id) if kind == "status"]

    def close(self) -> None:
        """End every process, and the server."""
        self.end_processes()
        self.http.close()
        self.queue.close()
        self.jobs.redis.close()
        self.server.stop()

    def end_processes(self) -> None:
        """End every process that was started; the server stays."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
