"""A student trained by several processes, started by torchrun, is the student of one process."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from kd.config.jobfile import parse_config
from kd.errors import Interrupted, RankLost
from kd.pipeline import run_stage
from kd.progress import Event, Monitor
from tests.support.kd.sharing.processes import find_ranks

pytestmark = pytest.mark.slow

Job = dict[str, Any]


@pytest.fixture(scope="module")
def job(tiny_teacher: Path, tiny_text: Path) -> Job:
    return {
        "name": "tiny",
        "teacher": {"model": str(tiny_teacher), "batch_size": 4},
        "student": {"init": {"layers": 2, "hidden_size": 16}},
        "data": {
            "train": str(tiny_text), "validation_fraction": 0.2, "sequence_length": 32,
            "max_train_samples": 40, "max_eval_samples": 7,
        },
        "cache": {"shard_sequences": 8},
        "train": {
            "max_steps": 20, "batch_size": 2, "gradient_accumulation_steps": 4, "eval_steps": 10,
            "save_steps": 5, "logging_steps": 1, "learning_rate": 1e-2, "warmup_steps": 2,
        },
        "evaluation": {"max_new_tokens": 4},
    }  # fmt: skip


@pytest.fixture(scope="module")
def home(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sealed cache of the job."""
    home = tmp_path_factory.mktemp("home")
    run_stage("precompute", parse_config(job), home, home / "runs" / "capture")
    return home


def train(job: Job, home: Path, name: str, ranks: int, monitor: Monitor | None = None) -> Path:
    """Train in ``ranks`` processes, and return the run folder."""
    folder = home / "runs" / name
    os.environ["KD_DEVICES"] = ",".join(["cpu"] * ranks)
    try:
        config = parse_config(job | {"resources": {"gpus": ranks if ranks > 1 else None}})
        run_stage("train", config, home, folder, monitor or Monitor())
    finally:
        del os.environ["KD_DEVICES"]
    return folder


def read_lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["type"] == kind]


def curve(folder: Path, name: str = "loss") -> list[float]:
    return [line[name] for line in read_lines(folder, "metrics")]


def numbers(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if isinstance(value, float | int)}


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "student" / "model.safetensors")


def farthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def test_two_and_four_processes_follow_the_curve_of_one(job: Job, home: Path) -> None:
    one = train(job, home, "one", 1)
    for ranks, strategy in ((2, "fsdp"), (2, "ddp"), (4, "ddp")):
        shared = job | {"train": job["train"] | {"strategy": strategy}}
        many = train(shared, home, f"{strategy}-{ranks}", ranks)
        for name in ("loss", "grad_norm", "learning_rate", "tokens"):
            assert curve(many, name) == pytest.approx(curve(one, name), rel=1e-5)
        mine, theirs = (read_lines(each, "evaluation") for each in (one, many))
        for own, other in zip(mine, theirs, strict=True):
            assert numbers(other) == pytest.approx(numbers(own), rel=1e-5)
        assert farthest(weights(one), weights(many)) < 1e-4
        report = json.loads((many / "report.json").read_text())
        assert report["evaluation"]
        assert not (many / "ranks").exists()


class Stopper:
    """Asks for a stop once the run has reported a step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.reached = False
        self.monitor = Monitor(self.listen, lambda: self.reached)

    def listen(self, event: Event) -> None:
        self.reached |= event.type == "metrics" and event.data["step"] >= self.step


def test_a_run_goes_on_with_another_number_of_processes(job: Job, home: Path) -> None:
    whole = train(job, home, "whole", 1)
    for ranks, step in ((1, 4), (2, 9), (4, 14)):
        with pytest.raises(Interrupted, match="Stopped on request"):
            train(job, home, "parts", ranks, Stopper(step).monitor)
    parts = train(job, home, "parts", 1)
    assert curve(parts, "step") == curve(whole, "step")
    assert curve(parts) == pytest.approx(curve(whole), rel=1e-5)
    assert farthest(weights(whole), weights(parts)) < 1e-4


class Killer:
    """Kills a rank with SIGKILL as soon as the run has reported a step."""

    def __init__(self, home: Path, rank: int, step: int) -> None:
        self.home = home
        self.rank = rank
        self.step = step
        self.killed_at = 0.0
        self.monitor = Monitor(self.listen)

    def listen(self, event: Event) -> None:
        if event.type == "metrics" and event.data["step"] >= self.step and not self.killed_at:
            self.killed_at = time.monotonic()
            os.kill(find_ranks(self.home)[self.rank], signal.SIGKILL)


def test_a_killed_rank_ends_all_and_the_resumed_run_is_the_same_bit_for_bit(
    job: Job, home: Path
) -> None:
    whole = train(job, home, "undisturbed", 2)
    for rank, step in ((0, 7), (1, 13)):
        killer = Killer(home, rank, step)
        with pytest.raises(RankLost, match=f"Process {rank} .* killed by SIGKILL"):
            train(job, home, "disturbed", 2, killer.monitor)
        assert time.monotonic() - killer.killed_at < 15
        assert find_ranks(home) == {}
    disturbed = train(job, home, "disturbed", 2)
    assert curve(disturbed) == curve(whole)
    assert farthest(weights(whole), weights(disturbed)) == 0.0
