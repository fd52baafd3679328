"""A run that needs more memory than it may have ends as out_of_memory, and the machine lives on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bench.support.harness import Parts, make_config
from bench.support.waiting import wait_until
from kd.client.wire.service import Device, WorkerState
from kd.config.placement import Resources
from kd.memory.host import read_memory_bytes
from kd.memory.model_memory import estimate_least_memory
from services.store.jobs.workers import explain_missing_worker
from services.worker import memory_limit
from services.worker.devices import Gpu, WorkerDevice
from services.worker.failures import describe_kill, describe_memory_limit
from services.worker.memory_limit import MemoryLimit, choose_limit_bytes, measure_group_bytes
from services.worker.supervisor import Attempt
from tests.support.services.runs import attempted, started

MIB = 1 << 20
#: Less than the scripted run `eats` takes at last, and more than Python and our modules take.
LIMIT = 200 * MIB
STUDENT = {"init": {"layers": 2, "hidden_size": 64, "tokenizer": "t"}}

PYTHON_THAT_EATS = f"""
import sys, time
eaten = b"x" * ({LIMIT} * 2)
print("full", flush=True)
time.sleep(300)
"""


@pytest.fixture(params=["control group", "watched"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Limit the memory with a control group, and without one."""
    if request.param == "watched":
        monkeypatch.setattr(memory_limit, "make_group", lambda pid, limit: None)
        return "watched"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        group = memory_limit.make_group(idle.pid, LIMIT)
        idle.communicate(b"\n")
    if group is None:
        pytest.skip("this process may not make a control group")
    with suppress(FileNotFoundError):  # another worker removes empty groups, too
        group.rmdir()
    return "control group"


def test_a_run_that_needs_more_than_its_limit_is_out_of_memory(
    parts: Parts, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make_group = memory_limit.make_group

    def make_noted_group(pid: int, limit_bytes: int) -> Path | None:
        made.append(make_group(pid, limit_bytes))
        return made[-1]

    monkeypatch.setattr(memory_limit, "make_group", make_noted_group)
    changes = {"resources": {"memory": LIMIT}, "student": STUDENT}
    job_id, claim = attempted(parts, "eats", max_attempts=1, **changes)
    folder = parts.settings.run_dir(job_id)
    folder.mkdir(parents=True)
    (folder / "go").touch()
    attempt = Attempt(parts.jobs, parts.settings, claim, WorkerDevice(), threading.Event())
    assert attempt.run().status == "failed"
    error = parts.job(job_id).error
    assert error is not None and error.type == "out_of_memory"
    assert "needed more than 200 MiB of memory, its limit" in error.detail
    assert "need at least about" in error.detail and "resources.memory" in error.remedy
    (group,) = made
    assert (group is None) == (way == "watched")
    assert group is None or not group.exists()


def test_a_run_within_its_limit_is_left_alone(parts: Parts, way: str) -> None:
    _, claim = attempted(parts, "quick", resources={"memory": 2048 * MIB})
    attempt = Attempt(parts.jobs, parts.settings, claim, WorkerDevice(), threading.Event())
    assert attempt.run().status == "succeeded"


@pytest.fixture
def full_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own group that holds twice the limit."""
    process = subprocess.Popen(
        [sys.executable, "-c", PYTHON_THAT_EATS], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == b"full\n"
    yield process
    process.kill()
    process.communicate()


def test_the_memory_of_a_whole_process_group_is_measured(
    full_process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = measure_group_bytes(full_process.pid, LIMIT)
    assert 2 * LIMIT < used < 2 * LIMIT + 100 * MIB
    monkeypatch.setattr(memory_limit, "make_group", lambda pid, limit: None)
    with MemoryLimit(full_process.pid, LIMIT) as narrow, MemoryLimit(os.getpid(), 1 << 50) as wide:
        assert narrow.is_exceeded() and not wide.is_exceeded()


def test_memory_that_processes_share_counts_once() -> None:
    program = f"import os, time\nshared = b'x' * {LIMIT}\n" + "os.fork()\n" * 2
    program += "print('full', flush=True)\ntime.sleep(300)"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        for _ in range(4):
            process.stdout.readline()
        assert measure_group_bytes(process.pid, 4 * LIMIT) < 2 * LIMIT
        rough = measure_group_bytes(process.pid, 1 << 50)
        assert rough > 4 * LIMIT, "each of the four processes counts all of its pages"
    finally:
        os.killpg(process.pid, 9)
        process.communicate()


def test_the_kernel_kills_a_run_first_and_its_guard_last(
    new_parts: Callable[..., Parts],
) -> None:
    parts = new_parts()
    parts.start_worker()
    job_id, pid = started(parts, "endless")
    wait_until(lambda: parts.job(job_id).progress.done)
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    guards = [
        child for child in children if "stdin_guard" in Path(f"/proc/{child}/cmdline").read_text()
    ]
    own = Path("/proc/self/oom_score_adj").read_text()
    assert [Path(f"/proc/{each}/oom_score_adj").read_text() for each in guards] == [own]
    parts.jobs.change("cancel", job_id)
    parts.wait_for(job_id, "cancelled")


@pytest.mark.parametrize(
    "gpus, wanted, limit",
    [
        ((), Resources(memory=LIMIT), LIMIT),
        ((), Resources(memory=1 << 50), None),
        ((), Resources(), None),
        ((Gpu("GPU-1", 0, "g", LIMIT),), Resources(memory=LIMIT), None),
        ((Gpu("GPU-1", 0, "g", LIMIT),), Resources(gpus=0, memory=LIMIT), LIMIT),
    ],
    ids=["asked for", "more than there is", "default", "memory of the GPU", "no GPU wanted"],
)
def test_the_limit_leaves_a_margin_of_the_machine(
    gpus: tuple[Gpu, ...], wanted: Resources, limit: int | None
) -> None:
    chosen = choose_limit_bytes(wanted, WorkerDevice(gpus))
    if limit is not None:
        assert chosen == limit
    else:
        assert 0.7 * read_memory_bytes() < chosen < read_memory_bytes() - 200 * MIB


def test_a_kill_by_the_kernel_names_the_estimate() -> None:
    found = describe_kill(9, "stage train", "host", Path("log.txt"), 3 << 30)
    assert found["type"] == "out_of_memory"
    assert "the host ran out of memory" in found["detail"] and "3 GiB" in found["detail"]
    assert "at least" not in describe_memory_limit("stage train", LIMIT, None)["detail"]


# ---------------------------------------------------------------------- larger than every worker


def test_a_job_larger_than_every_worker_says_so_while_it_waits(parts: Parts) -> None:
    giant = {"layers": 256, "hidden_size": 32768, "tokenizer": "t"}
    config = make_config("quick", student={"init": giant})
    least = estimate_least_memory(config, Path())
    assert least is not None and least > 10 << 40
    job_id = parts.jobs.create(config, least_memory=least).id
    small = Device(memory_bytes=64 << 30)
    parts.jobs.show_worker(WorkerState(id="w", stages=["train"], device=small), 600)
    reason = parts.job(job_id).reason
    assert reason is not None
    assert "need at least" in reason and "TiB" in reason and "more than 64 GiB" in reason
    claim = parts.jobs.claim(job_id, "train", "w", 5)
    assert claim is not None, "it is warned of, not refused"


@pytest.mark.parametrize(
    "devices",
    [[], [Device()], [Device(memory_bytes=64 << 30), Device(memory_bytes=1 << 60)]],
    ids=["no worker", "unknown memory", "one is large enough"],
)
def test_without_proof_nothing_is_said(parts: Parts, devices: list[Device]) -> None:
    job_id = parts.jobs.create(make_config("quick"), least_memory=1 << 46).id
    workers = [
        WorkerState(id=f"w{number}", stages=["train"], device=device)
        for number, device in enumerate(devices)
    ]
    assert explain_missing_worker(parts.job(job_id), workers) is None
