"""What a GPU would refuse or return too early is found without one, on a simulated GPU.

The tests themselves are in ``on_the_device``. Each file of them runs in a process whose torch has
the simulated GPU (``tests/support/simulated_gpu``), because no process can give it back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS
from tests.support.simulated_gpu.device import CAPABILITY
from tests.support.simulated_gpu.library import find_compiler

FOLDER = Path(__file__).with_name("on_the_device")

pytestmark = [
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="needs a build of torch without CUDA"
    ),
    pytest.mark.skipif(
        find_compiler() is None and not os.environ.get("CI"), reason="needs a C++ compiler"
    ),
]


def run_on_the_device(file: str, marks: str = "not long", capability: str = "8.0") -> None:
    command = [
        sys.executable, "-m", "tests.support.simulated_gpu", "-m", "pytest", "-n", "0", "-q",
        "-p", "no:cacheprovider", "-m", marks, str(FOLDER / file),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), CAPABILITY: capability}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=4 * PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.long
def test_the_rules_of_a_gpu() -> None:
    run_on_the_device("rules.py")


def test_what_the_hot_path_waits_for() -> None:
    run_on_the_device("waits.py")


@pytest.mark.long
def test_activations_that_wait_on_the_host() -> None:
    run_on_the_device("offload.py")


@pytest.mark.long
def test_records_on_their_way() -> None:
    run_on_the_device("records.py")


@pytest.mark.long
@pytest.mark.parametrize("capability", ["7.5", "8.0"])
def test_packed_rows_of_some_architectures(capability: str) -> None:
    run_on_the_device("architectures.py", capability=capability)


@pytest.mark.long
@pytest.mark.parametrize("capability", ["7.5", "8.0"])
def test_packed_rows_of_all_other_architectures(capability: str) -> None:
    run_on_the_device("architectures.py", "long", capability)


@pytest.mark.long
def test_a_job() -> None:
    run_on_the_device("jobs.py")


@pytest.mark.slow
def test_jobs_with_every_lever() -> None:
    run_on_the_device("jobs.py", "long")
