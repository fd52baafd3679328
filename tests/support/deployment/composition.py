"""A running composition of docker-compose.yml: build, start, kill and ask its containers."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.support.paths import ROOT
from bench.support.waiting import wait_until
from services.store.embedded import find_free_port

TARGETS = ("api", "worker")
TAG = "test"
#: Seconds that one command of Docker may take; the build of an image is given more.
COMMAND_SECONDS = 300
BUILD_SECONDS = 3600
#: Seconds that the example's job may take in a container on a busy machine.
JOB_SECONDS = 3000


def find_problem_of_engine() -> str | None:
    """Why no container can run here; None where a Docker engine with Compose answers."""
    for command in (["docker", "version"], ["docker", "compose", "version"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except FileNotFoundError:
            return "docker is not installed"
        except subprocess.TimeoutExpired:
            return "the Docker engine does not answer"
        if done.returncode != 0:
            return (done.stderr or done.stdout).strip().splitlines()[-1]
    return None


def run_docker(*words: str, seconds: float = COMMAND_SECONDS, **environment: str) -> str:
    """Run ``docker`` and return its output. A failure is an error with what it said."""
    done = subprocess.run(
        ["docker", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-3000:]
        raise AssertionError(f"docker {shlex.join(words[:4])} failed: {said}")
    return done.stdout


def build_image(target: str) -> None:
    """Build one image with the tag ``test``.

    KD_DOCKER_BUILD_FLAGS adds flags, for example ``--network host``; TORCH_INDEX is the index of
    torch in the worker's image, as in docker-compose.yml.
    """
    flags = shlex.split(os.environ.get("KD_DOCKER_BUILD_FLAGS", ""))
    if target == "worker":
        flags += ["--build-arg", f"TORCH_INDEX={os.environ.get('TORCH_INDEX', '')}"]
    name = f"potstill-{target}:{TAG}"
    run_docker("build", "--target", target, "--tag", name, *flags, ".", seconds=BUILD_SECONDS)


@dataclass
class Composition:
    """The services ``redis``, ``api`` and ``worker-cpu`` with volumes of their own."""

    backups: Path
    port: int = field(default_factory=find_free_port)
    key: str = ""

    def compose(self, *words: str) -> str:
        """Run ``docker compose`` for this composition."""
        environment = {
            "COMPOSE_PROJECT_NAME": f"potstill-test-{os.getpid()}",
            "COMPOSE_PROFILES": "cpu",
            "POTSTILL_TAG": TAG,
            "KD_PORT": str(self.port),
            "KD_BACKUPS": str(self.backups),
            "KD_LEASE_SECONDS": "5",
        }
        return run_docker("compose", *words, **environment)

    def start(self) -> None:
        """Make a key and start the services without the GPU's worker, each until it is healthy."""
        words = ["run", "--rm", "tools", "keys", "new", "me", "--scopes", "admin"]
        self.key = self.compose(*words).strip().splitlines()[-1]
        self.compose("up", "--no-build", "--detach", "api", "worker-cpu")
        for service in ("redis", "api", "worker-cpu"):
            self.await_health(service)

    def close(self) -> None:
        """Remove containers and volumes."""
        self.compose("down", "--volumes", "--timeout", "20")

    def inspect(self, service: str) -> dict[str, Any]:
        """What the engine knows of the container of a service."""
        container = self.compose("ps", "--all", "--quiet", service).strip()
        (found,) = json.loads(run_docker("inspect", container))
        return dict(found)

    def await_health(self, service: str) -> None:
        """Wait until the container's own health check succeeds."""
        wait_until(lambda: self.inspect(service)["State"]["Health"]["Status"] == "healthy", 300)

    def execute(self, service: str, script: str) -> str:
        """Run a shell script in the container of a service."""
        return self.compose("exec", "-T", service, "sh", "-c", script)

    # -- jobs

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """Send a request until the API answers it; returns the body."""

        def attempt() -> httpx.Response | None:
            try:
                answer = httpx.request(
                    method,
                    f"http://127.0.0.1:{self.port}{path}",
                    headers={"Authorization": f"Bearer {self.key}"},
                    timeout=20,
                    trust_env=False,
                    **options,
                )
            except httpx.TransportError:
                return None
            return None if answer.status_code in (429, 503) else answer

        answer = wait_until(attempt)
        assert answer.is_success, answer.text
        return answer.json()

    def submit(self, job: dict[str, Any]) -> str:
        """Submit a job; returns its id."""
        return str(self.ask("POST", "/jobs", json=job)["id"])

    def await_progress(self, job_id: str, stage: str, least: int) -> int:
        """Wait until ``least`` units of a stage are done; returns how many are done then."""

        def reached() -> int | None:
            job = self.ask("GET", f"/jobs/{job_id}")
            assert job["status"] not in ("succeeded", "failed", "cancelled"), job
            done = (job["progress"]["done"] or 0) if job["stage"] == stage else 0
            return done if done >= least and job["status"] == "running" else None

        return int(wait_until(reached, JOB_SECONDS))

    def await_success(self, job_id: str) -> dict[str, Any]:
        """Wait until the job has ended, and return it; it must have succeeded."""

        def ended() -> dict[str, Any] | None:
            job = self.ask("GET", f"/jobs/{job_id}")
            return job if job["finished_at"] else None

        job = wait_until(ended, JOB_SECONDS)
        assert job["status"] == "succeeded", job["error"]
        return job

    def hash_outcome(self, job: dict[str, Any]) -> dict[str, str]:
        """The sha256 of the student's weights and of each file of the cache."""
        cache = f"/data/caches/{job['cache']['fingerprint']}"
        student = f"/data/runs/{job['id']}/student/model.safetensors"
        lines = self.execute(
            "worker-cpu",
            f"sha256sum < {student}; cd {cache} && find . -type f | sort | xargs sha256sum",
        ).splitlines()
        return {line.split()[1]: line.split()[0] for line in lines}

    def forget_caches(self) -> None:
        """Delete all caches, so that the next job captures anew."""
        self.execute("worker-cpu", "rm -rf /data/caches/*")
