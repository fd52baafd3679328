"""The device of a worker, with the driver's library or with a stand-in for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.support.harness import Parts
from bench.support.paths import ROOT
from bench.support.waiting import wait_until
from kd.memory.host import read_memory_bytes
from services.store.queue import publish_hint
from services.worker import devices
from services.worker.devices import DeviceError, Gpu, WorkerDevice, take_device
from tests.support.commands import kd

A = "GPU-aaaa"
B = "GPU-bbbb"
C = "GPU-cccc"
TWO = f"{A} 1000\n{B} 2000\n"

TAKE = """
import json, os, sys
from pathlib import Path
from cache.errors import PotstillError
from services.worker.devices import take_device
try:
    device = take_device(os.environ.get("KD_DEVICES"), Path(sys.argv[1]))
    uuids = [gpu.uuid for gpu in device.gpus]
    print(json.dumps([device.kind, uuids, device.build_environment()]), flush=True)
except PotstillError as error:
    print(json.dumps([error.type, error.detail, error.remedy]), flush=True)
sys.stdin.read()
"""

Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in for libnvidia-ml."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler")
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    out = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", out, ROOT / "tests" / "support" / "nvml.c"], check=True
    )
    return folder


@pytest.fixture
def driver(library: Path, tmp_path: Path) -> dict[str, str]:
    """Variables with which a process sees the GPUs that the file gpus lists."""
    (tmp_path / "gpus").write_text(TWO)
    return {"LD_LIBRARY_PATH": str(library), "NVML_GPUS": str(tmp_path / "gpus")}


@pytest.fixture
def run(driver: dict[str, str], tmp_path: Path) -> Iterator[Run]:
    """A process that takes a device and keeps it until its stdin ends."""
    processes: list[subprocess.Popen[str]] = []

    def start(**environment: str) -> subprocess.Popen[str]:
        plain = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CUDA_", "KD_"))
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", TAKE, str(tmp_path / "home")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
                env=plain | driver | environment,
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.mark.long
def test_each_worker_takes_a_gpu_of_its_own(run: Run) -> None:
    assert told(run()) == ["cuda", [A], {"CUDA_VISIBLE_DEVICES": A}]
    second = run()
    assert told(second) == ["cuda", [B], {"CUDA_VISIBLE_DEVICES": B}]
    third = run()
    time.sleep(2)
    assert third.poll() is None
    second.kill()
    assert told(third)[1] == [B], "it waited for a free one"


@pytest.mark.long
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1"}, [B]),
        ({"CUDA_VISIBLE_DEVICES": B}, [B]),
        ({"CUDA_VISIBLE_DEVICES": "7,0"}, []),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"KD_DEVICES": "1"}, [B]),
        ({"KD_DEVICES": "1, 0"}, [B, A]),
        ({"KD_DEVICES": "GPU-bb", "CUDA_VISIBLE_DEVICES": "0"}, [B]),
        ({"KD_DEVICES": "cpu"}, []),
        ({"KD_DEVICES": "cpu,cpu"}, []),
    ],
)
def test_the_operator_says_which(
    run: Run, environment: dict[str, str], expected: list[str]
) -> None:
    kind, found, _ = told(run(**environment))
    assert (kind, found) == ("cuda" if expected else "cpu", expected)


@pytest.mark.long
def test_a_worker_of_two_gpus_waits_for_both(run: Run) -> None:
    first = run()
    assert told(first)[1] == [A]
    both = run(KD_DEVICES="0,1")
    time.sleep(1.5)
    assert both.poll() is None
    assert told(run())[1] == [B], "it holds neither while it waits"


def test_a_gpu_that_does_not_exist_is_named(run: Run) -> None:
    word, detail, remedy = told(run(KD_DEVICES="2"))
    assert word == "device_lost"
    assert "'2'" in detail
    assert A in remedy


def test_the_cpu_may_be_several_devices_but_not_beside_a_gpu(run: Run, tmp_path: Path) -> None:
    two = take_device("cpu, cpu", tmp_path)
    assert (two.kind, two.hidden, two.list_names()) == ("cpu", True, ["cpu", "cpu"])
    assert take_device("cpu", tmp_path).list_names() == ["cpu"]
    word, detail, _ = told(run(KD_DEVICES="cpu,0"))
    assert (word, detail) == (
        "device_lost",
        "KD_DEVICES is 'cpu,0', which mixes the CPU with GPUs.",
    )


@pytest.mark.long
def test_a_driver_in_trouble_is_no_reason_to_compute_on_the_cpu(run: Run) -> None:
    word, detail, _ = told(run(NVML_GPUS="/nowhere"))
    assert (word, detail) == ("device_lost", "The NVIDIA driver does not answer: Unknown Error.")
    assert told(run(NVML_GPUS="/nowhere", KD_DEVICES="cpu"))[0] == "cpu"


@pytest.mark.long
def test_the_parts_of_a_divided_gpu_are_devices(run: Run, driver: dict[str, str]) -> None:
    Path(driver["NVML_GPUS"]).write_text(f"MIG MIG-1:10,MIG-2:20\n{C} 30\n")
    assert [told(run())[1] for _ in range(3)] == [["MIG-1"], ["MIG-2"], [C]]


def test_a_job_sees_no_more_gpus_than_it_asks_for() -> None:
    two = WorkerDevice((Gpu(A, 0, "A", 2000), Gpu(B, 1, "B", 1000)))
    assert two.build_environment() == {"CUDA_VISIBLE_DEVICES": f"{A},{B}"}
    assert two.build_environment(1) == {"CUDA_VISIBLE_DEVICES": A}
    assert two.build_environment(0) == {"CUDA_VISIBLE_DEVICES": ""}
    assert (two.kind, two.memory_bytes) == ("cuda", 1000)
    assert WorkerDevice().build_environment() == {}
    assert WorkerDevice().build_environment(0) == {"CUDA_VISIBLE_DEVICES": ""}


def test_a_cpu_counts_as_so_many_devices_as_kd_devices_says() -> None:
    one = WorkerDevice(hidden=True)
    three = WorkerDevice(hidden=True, cpus=3)
    assert (WorkerDevice().count, one.count, three.count) == (0, 0, 3)
    assert one.build_environment() == {"CUDA_VISIBLE_DEVICES": "", "KD_DEVICES": "cpu"}
    assert three.build_environment(2) == {"CUDA_VISIBLE_DEVICES": "", "KD_DEVICES": "cpu,cpu"}
    assert three.build_environment()["KD_DEVICES"] == "cpu"


def test_without_a_driver_it_is_the_cpu_and_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "find_gpus", list)
    device = take_device(None, tmp_path)
    assert (device.kind, device.gpus) == ("cpu", ())
    assert 2**28 < device.memory_bytes <= read_memory_bytes()
    assert device.name
    device.require_alive()
    with pytest.raises(DeviceError, match="KD_DEVICES names"):
        take_device("0", tmp_path)


# Through a whole worker


def start_worker(parts: Parts, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    process = parts.start("services.worker", **environment)
    wait_until(lambda: any(worker.pid == process.pid for worker in parts.jobs.list_workers()))
    return process


@pytest.mark.long
def test_a_worker_says_what_it_computes_on_and_its_child_sees_it(
    new_parts: Callable[..., Parts], driver: dict[str, str]
) -> None:
    parts = new_parts()
    start_worker(parts, driver)
    (state,) = parts.jobs.list_workers()
    assert state.device.model_dump() == {
        "kind": "cuda",
        "name": "Pretended GPU",
        "index": "0",
        "count": 1,
        "memory_bytes": 1000,
        "price": None,
    }
    job = parts.wait_for(parts.submit("environment"), "succeeded", "failed")
    lines = (parts.settings.run_dir(job.id) / "environment").read_text().split("\n")
    assert f"CUDA_VISIBLE_DEVICES={A}" in lines


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that sees no GPU")
def test_a_job_with_a_gpu_that_torch_does_not_see_fails_at_its_start(
    new_parts: Callable[..., Parts], driver: dict[str, str]
) -> None:
    parts = new_parts(child_module="services.worker.stage_child")
    start_worker(parts, driver)
    job_id = parts.submit("any")
    job = parts.wait_for(job_id, "succeeded", "failed")
    assert job.error is not None
    assert job.error.type == "device_unusable"
    assert "gave this job 1 GPU, but torch sees none" in job.error.detail
    assert job.error.remedy
    assert not (parts.settings.run_dir(job_id) / "config.json").exists(), "nothing was begun"
    # A job that asks for no GPU was promised none: it fails later, for a reason of its own.
    without = parts.wait_for(parts.submit("any", resources={"gpus": 0}), "succeeded", "failed")
    assert without.error is not None
    assert without.error.type != "device_unusable"


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that sees no GPU")
def test_doctor_names_the_driver_and_a_gpu_that_torch_does_not_see(driver: dict[str, str]) -> None:
    done = kd("doctor", "--json", **driver)
    assert done.returncode == 1, "a worker here would take a GPU that no job can use"
    (gpu,) = [each for each in json.loads(done.stdout) if each["what"] == "gpu"]
    assert not gpu["ok"]
    assert "driver 580.65.06 for CUDA 13.0 lists Pretended GPU" in gpu["detail"]
    assert "but torch sees none" in gpu["detail"]


@pytest.mark.long
def test_a_job_waits_for_a_worker_that_fits(
    new_parts: Callable[..., Parts], driver: dict[str, str]
) -> None:
    parts = new_parts()
    start_worker(parts, {"KD_DEVICES": "cpu"})
    large = parts.submit("quick", resources={"gpus": 1, "memory": 1500})
    two = parts.submit("quick", resources={"gpus": 2})
    parts.wait_for(parts.submit("quick"), "succeeded")
    assert parts.job(large).status == parts.job(two).status == "queued"
    start_worker(parts, driver | {"KD_DEVICES": "1"})

    def has_succeeded() -> bool:
        # The other worker may take a hint and drop it. The reconciler would send it again.
        publish_hint(parts.queue, large, "train")
        return parts.job(large).status == "succeeded"

    assert wait_until(has_succeeded)
    assert parts.job(two).status == "queued"


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.long
def test_a_gpu_that_vanishes_ends_the_worker_and_costs_the_next_job_nothing(
    new_parts: Callable[..., Parts], driver: dict[str, str], busy: bool
) -> None:
    parts = new_parts()
    worker = start_worker(parts, driver)
    running = parts.submit("endless") if busy else None
    if running:
        parts.wait_for(running, "running")
    Path(driver["NVML_GPUS"]).unlink()
    job_id = parts.submit("quick")
    if running:
        parts.jobs.change("cancel", running)
    assert worker.wait(20) == 1
    assert (parts.job(job_id).status, parts.job(job_id).attempt) == ("queued", 0)
    Path(driver["NVML_GPUS"]).write_text(TWO)
    start_worker(parts, driver)
    publish_hint(parts.queue, job_id, "train")
    assert parts.wait_for(job_id, "succeeded", "failed").attempt == 1
