"""A student trained by several processes, started by torchrun, is the student of one process."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from kd.config.jobfile import parse_config
from kd.errors import Interrupted, RankLost
from kd.files import RANKS
from kd.pipeline import run_stage
from kd.progress import Event, Monitor
from kd.tracking.metrics import read_metrics
from tests.support.kd.shared_training import curve, evaluations, farthest, make_shared_job
from tests.support.kd.sharing.processes import find_ranks
from tests.support.kd.training import stop_after

pytestmark = pytest.mark.slow

Job = dict[str, Any]


@pytest.fixture(scope="module")
def job(tiny_teacher: Path, tiny_text: Path) -> Job:
    steps = {"max_steps": 20, "eval_steps": 10, "save_steps": 5, "warmup_steps": 2}
    return make_shared_job(tiny_teacher, tiny_text, **steps)


@pytest.fixture(scope="module")
def home(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sealed cache of the job."""
    home = tmp_path_factory.mktemp("home")
    run_stage("precompute", parse_config(job), home, home / "runs" / "capture")
    return home


def train(
    job: Job, home: Path, name: str, ranks: int, monitor: Monitor | None = None
) -> dict[str, Any]:
    """Train in ``ranks`` processes; returns what the run folder holds."""
    folder = home / "runs" / name
    config = parse_config(job | {"resources": {"gpus": ranks if ranks > 1 else None}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KD_DEVICES", ",".join(["cpu"] * ranks))
        run_stage("train", config, home, folder, monitor or Monitor())
    assert not (folder / RANKS).exists()
    return {
        "lines": read_metrics(folder / "metrics.jsonl"),
        "weights": load_file(folder / "student" / "model.safetensors"),
        "report": json.loads((folder / "report.json").read_text()),
    }


def test_two_and_four_processes_follow_the_curve_of_one(job: Job, home: Path) -> None:
    one = train(job, home, "one", 1)
    for ranks, strategy in ((2, "fsdp"), (2, "ddp"), (4, "ddp"), (2, "pipeline")):
        shared = job | {"train": job["train"] | {"strategy": strategy}}
        many = train(shared, home, f"{strategy}-{ranks}", ranks)
        for name in ("loss", "grad_norm", "learning_rate", "tokens"):
            assert curve(many, name) == pytest.approx(curve(one, name), rel=1e-5)
        for own, other in zip(evaluations(one), evaluations(many), strict=True):
            assert other == pytest.approx(own, rel=1e-5)
        assert farthest(one, many) < 1e-4
        assert many["report"]["evaluation"]


def test_a_run_goes_on_with_another_number_of_processes(job: Job, home: Path) -> None:
    whole = train(job, home, "whole", 1)
    for ranks, step in ((1, 4), (2, 9), (4, 14)):
        with pytest.raises(Interrupted, match="Stopped on request"):
            train(job, home, "parts", ranks, stop_after(step))
    parts = train(job, home, "parts", 1)
    assert curve(parts, "step") == curve(whole, "step")
    assert curve(parts) == pytest.approx(curve(whole), rel=1e-5)
    assert farthest(whole, parts) < 1e-4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_finished_run_of_several_processes_measures_nothing_again(
    job: Job, home: Path, strategy: str
) -> None:
    job = job | {"train": job["train"] | {"strategy": strategy}}
    first = train(job, home, f"twice-{strategy}", 2)
    said: list[Event] = []
    again = train(job, home, f"twice-{strategy}", 2, Monitor(said.append))
    phases = [event.data.get("phase") for event in said if event.type == "stage"]
    assert "this run has finished before, and nothing is measured again" in phases
    assert "training" not in phases
    # What a clock says is that of the first time.
    assert again["report"] == first["report"]


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


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_a_killed_rank_ends_all_and_the_resumed_run_is_the_same_bit_for_bit(
    job: Job, home: Path, strategy: str
) -> None:
    job = job | {"train": job["train"] | {"strategy": strategy}}
    whole = train(job, home, f"undisturbed-{strategy}", 2)
    name = f"disturbed-{strategy}"
    for rank, step in ((0, 7), (1, 13)):
        killer = Killer(home, rank, step)
        with pytest.raises(RankLost, match=f"Process {rank} .* killed by SIGKILL"):
            train(job, home, name, 2, killer.monitor)
        assert time.monotonic() - killer.killed_at < 15
        assert find_ranks(home) == {}
    disturbed = train(job, home, name, 2)
    assert curve(disturbed) == curve(whole)
    assert farthest(whole, disturbed) == 0.0
