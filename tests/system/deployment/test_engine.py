"""The images and the composition in a Docker engine: ``make test-containers``.

The example's job runs undisturbed, and again while its worker's container is killed during the
capture and during the training, and Redis is restarted. Without ``KD_TEST_CONTAINERS=1`` the tests
are skipped; with it, an engine that does not answer is a failure. ``KD_TEST_JOB`` changes fields of
the job, for example "train.max_steps=80 data.max_train_samples=200".
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.support.paths import ROOT
from kd.config.jobfile import load_config
from tests.support.deployment.composition import (
    TAG,
    TARGETS,
    Composition,
    build_image,
    find_problem_of_engine,
    run_docker,
)

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("KD_TEST_CONTAINERS") != "1",
        reason="needs a Docker engine, which `make test-containers` uses",
    ),
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(9000),
]

#: Megabytes that an image may have above those of its base, python:3.11-slim.
MOST_MEGABYTES = {"api": 300}
SERVICES = ("redis", "api", "worker-cpu")


def say(line: str) -> None:
    """Print a line of the log that pytest does not capture with ``-s``."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def read_size(image: str) -> float:
    """Megabytes of an image, with its base."""
    return int(run_docker("image", "inspect", "--format", "{{.Size}}", image)) / 1e6


@pytest.fixture(scope="module")
def images() -> None:
    """Both images, built from this tree."""
    if problem := find_problem_of_engine():
        pytest.fail(f"No Docker engine: {problem}. Start one, then run `make test-containers`.")
    for target in TARGETS:
        began = time.monotonic()
        build_image(target)
        size = read_size(f"potstill-{target}:{TAG}")
        base = read_size("python:3.11-slim")
        took = time.monotonic() - began
        say(f"{target}: {size:.0f} MB, {size - base:.0f} MB above its base; built in {took:.0f} s")


@pytest.fixture(scope="module")
def composition(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composition]:
    folder = tmp_path_factory.mktemp("backups")
    made = Composition(folder)
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_the_image_of_the_api_is_small(images: None) -> None:
    base = read_size("python:3.11-slim")
    for target, most in MOST_MEGABYTES.items():
        assert read_size(f"potstill-{target}:{TAG}") - base < most


def test_the_image_of_the_api_has_neither_torch_nor_an_installer(images: None) -> None:
    script = "import importlib.util as u; print([n for n in ('torch', 'pip') if u.find_spec(n)])"
    words = ("run", "--rm", "--network=none", f"potstill-api:{TAG}", "python", "-c", script)
    assert run_docker(*words).strip() == "[]"


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_is_healthy_unprivileged_and_cannot_write_to_its_root(
    composition: Composition, service: str
) -> None:
    found = composition.inspect(service)
    assert found["State"]["Health"]["Status"] == "healthy"
    assert found["HostConfig"]["ReadonlyRootfs"] is True
    assert found["HostConfig"]["CapDrop"] == ["ALL"]
    assert composition.execute(service, "id -u").strip() not in ("", "0")
    tried = composition.execute(
        service,
        "for place in / /usr /app /etc; do touch $place/x 2>/dev/null && echo $place; done; true",
    )
    assert tried.strip() == ""


@pytest.mark.parametrize("name", ["api-host.yml", "worker-host.yml"])
def test_compose_reads_the_recipes_for_several_hosts(name: str) -> None:
    folder = ROOT / "examples" / "deploy" / "compose"
    files = ("--env-file", str(folder / "hosts.env.example"), "-f", str(folder / name))
    assert run_docker("compose", *files, "config", "--quiet") == ""


def test_killed_containers_change_nothing_of_the_student(composition: Composition) -> None:
    changes = os.environ.get("KD_TEST_JOB", "").split()
    config = load_config(ROOT / "examples" / "austen" / "job.yaml", changes)
    assert config.train is not None
    assert config.train.max_steps is not None
    steps = config.train.max_steps
    job: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    began = time.monotonic()
    expected = composition.hash_outcome(composition.await_success(composition.submit(job)))
    say(f"the example's job, undisturbed: {time.monotonic() - began:.0f} s, {len(expected)} files")

    composition.forget_caches()
    began = time.monotonic()
    job_id = composition.submit(job)
    done = composition.await_progress(job_id, "precompute", 1)
    restart_worker(composition, f"in the capture, {done} sequences done")
    assert composition.ask("GET", f"/jobs/{job_id}")["stage"] == "precompute"
    done = composition.await_progress(job_id, "train", round(0.3 * steps))
    restart_worker(composition, f"in the training, {done} steps done")
    done = composition.await_progress(job_id, "train", round(0.55 * steps))
    composition.compose("restart", "redis")
    say(f"restarted Redis after {done} steps")
    ended = composition.await_success(job_id)
    say(f"the disturbed job: {time.monotonic() - began:.0f} s, attempt {ended['attempt']}")
    assert composition.hash_outcome(ended) == expected
    say("student and cache equal those of the undisturbed job, bit for bit")


def restart_worker(composition: Composition, when: str) -> None:
    """Kill the container of the worker with SIGKILL and start it again."""
    composition.compose("kill", "worker-cpu")
    assert composition.inspect("worker-cpu")["State"]["ExitCode"] == 137
    composition.compose("start", "worker-cpu")
    say(f"killed and restarted the worker's container {when}")


def test_the_tools_make_a_backup_that_they_can_read(composition: Composition) -> None:
    composition.backups.chmod(0o777)
    for words in ("backup /backups/one", "restore --check /backups/one"):
        composition.compose("run", "--rm", "tools", *words.split())
    assert (Path(composition.backups) / "one" / "backup.json").is_file()
