"""Ranks that torchrun has started on two hosts run a job as one process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.support.paths import ROOT
from bench.support.waiting import wait_until
from kd.tracking.metrics import read_metrics
from services.store.embedded import find_free_port
from tests.support.kd.shared_training import make_shared_job

pytestmark = pytest.mark.long


class Hosts:
    """Two torchruns of two ranks each; all of them are on this machine."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        self.home = folder / "home"
        self.job = folder / "job.yaml"
        self.job.write_text(yaml.safe_dump(job), encoding="utf-8")
        self.run = self.home / "runs" / job["name"]

    @contextmanager
    def started(self, *settings: str) -> Iterator[list[subprocess.Popen[bytes]]]:
        port = find_free_port()
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", self.job.name),
            *("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"),
            *("-m", "kd.rank", str(self.job)),
            *(word for each in settings for word in ("--set", each)),
        ]
        variables = {"KD_HOME": str(self.home), "KD_DEVICES": "cpu,cpu", "OMP_NUM_THREADS": "1"}
        environment = os.environ | variables | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        made = []
        try:
            for number in range(2):
                with (self.job.parent / f"log-{number}").open("wb") as log:
                    made.append(subprocess.Popen(command, env=environment, stderr=log, stdout=log))
            yield made
        finally:
            for each in made:
                each.kill()
                each.wait()

    def read_logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self.job.parent.glob("log-*")))

    def finish(self, *settings: str) -> None:
        with self.started(*settings) as both:
            assert [each.wait(300) for each in both] == [0, 0], self.read_logs()


def curve(run: Path) -> list[float]:
    return [
        each["loss"] for each in read_metrics(run / "metrics.jsonl") if each["type"] == "metrics"
    ]


@pytest.fixture(scope="module")
def job(tiny_teacher: Path, tiny_text: Path) -> dict[str, Any]:
    options = {"max_steps": 12, "eval_steps": 6, "save_steps": 3, "warmup_steps": 1}
    made = make_shared_job(tiny_teacher, tiny_text, **options)
    return {**made, "kind": "distill", "resources": {"hosts": 2, "gpus": 2}}


@pytest.fixture(scope="module")
def alone(job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    import kd

    home = tmp_path_factory.mktemp("alone")
    kd.run_job(kd.load_job(job, set={"resources": {}}), home=home, progress=False)
    return home / "runs" / job["name"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_two_hosts_follow_one_process_and_go_on_after_one_is_lost(
    job: dict[str, Any], alone: Path, tmp_path: Path, strategy: str
) -> None:
    hosts = Hosts(tmp_path, job)
    with hosts.started(f"train.strategy={strategy}") as (one, other):
        wait_until((hosts.run / "checkpoints/step-00000003").exists, 120)
        other.send_signal(signal.SIGKILL)
        assert one.wait(60) != 0
    assert "The ranks cannot go on together" in hosts.read_logs()
    hosts.finish(f"train.strategy={strategy}")
    assert curve(hosts.run) == pytest.approx(curve(alone), rel=1e-4)
    assert (hosts.run / "student/model.safetensors").is_file()


def test_other_numbers_of_ranks_are_refused(job: dict[str, Any], tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, job)
    with hosts.started("resources.hosts=4", "train.batch_size=4") as both:
        assert 0 not in [each.wait(120) for each in both]
    assert "the job asks for 8 devices" in hosts.read_logs()


def test_the_recipe_for_slurm_trains_on_two_nodes(job: dict[str, Any], tmp_path: Path) -> None:
    """``srun`` and ``scontrol`` are stand-ins: Slurm itself is not here."""
    tools = tmp_path / "venv" / "bin"
    tools.mkdir(parents=True)
    stand_ins = {
        "srun": '"$@" & one=$!; "$@" & two=$!; wait $one && wait $two',
        "scontrol": 'echo "$@" >> "$LOG"; echo localhost',
    }
    for name, text in stand_ins.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    script = (ROOT / "examples/deploy/slurm/several-nodes.sbatch").read_text()
    script = script.replace("/shared/potstill", str(tmp_path))
    (tmp_path / "run.sbatch").write_text(script.replace(":29500", f":{find_free_port()}"))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**job, "resources": {}}))
    variables = {
        "LOG": str(tmp_path / "asked"), "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "KD_DEVICES": "cpu,cpu",
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(tmp_path / "run.sbatch"), str(tmp_path / "job.yaml")],
        env=os.environ | variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = tmp_path / "data/runs" / job["name"]
    assert (run / "student/model.safetensors").is_file()
    assert (tmp_path / "asked").read_text() == "show hostnames n[1-2]\n"
