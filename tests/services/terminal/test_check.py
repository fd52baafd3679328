"""``kd check`` on real jobs: the student learns a few sequences, and no file stays behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cache.errors import PotstillError
from kd.config.jobfile import parse_config
from kd.errors import ConfigError
from kd.progress import Monitor
from kd.stages.capture import run_precompute
from services.terminal.cli import app

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def job(tiny_teacher: Path, tiny_text: Path) -> dict[str, Any]:
    return {
        "teacher": {"model": str(tiny_teacher)},
        "student": {"init": {"layers": 2, "hidden_size": 64}},
        "data": {"train": str(tiny_text), "sequence_length": 16},
        "cache": {"threshold": 0.1},
        "loss": {"alpha": 0.2},
        "train": {
            "max_steps": 10_000,
            "learning_rate": 3e-3,
            "weight_decay": 0.5,
            "warmup_steps": 1000,
        },
    }


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # the command changes to the folder that a job's paths start from
    return tmp_path / "home"


def check(job: dict[str, Any], home: Path, *arguments: str) -> Any:
    file = home.parent / "job.yaml"
    file.write_text(yaml.safe_dump(job), encoding="utf-8")
    return CliRunner().invoke(app, ["check", str(file), "--home", str(home), *arguments])


@pytest.mark.long
def test_a_sound_job_passes_and_leaves_nothing(job: dict[str, Any], home: Path) -> None:
    done = check(job, home, "--json")
    assert done.exit_code == 0, done.output
    verdict = json.loads(done.stdout)
    assert verdict["ok"] and verdict["check"] == "overfit"
    facts = verdict["facts"]
    assert facts["sequences"] == 4 and facts["learning_rate"] == 3e-3
    assert facts["before"] - facts["after"] > 0.9 * (facts["before"] - facts["floor"])
    assert list(home.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"cache": {"profile": "tempered"}, "loss": {"alpha": 0.2, "temperature": 1.5}},
        {"cache": {"profile": "topk", "k": 12}},
        {
            "cache": {"profile": "hidden"},
            "loss": {
                "divergence": "jsd",
                "temperature": {"schedule": "linear", "start": 2.0, "end": 1.0},
            },
        },
        {"kind": "train", "loss": {"alpha": 1.0, "label_smoothing": 0.1}},
    ],
    ids=["tempered", "topk", "hidden", "plain text"],
)
def test_every_kind_of_job_is_checked(
    changes: dict[str, Any], job: dict[str, Any], home: Path
) -> None:
    done = check(job | changes, home, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["ok"]


@pytest.mark.long
def test_a_far_too_low_learning_rate_is_reported(job: dict[str, Any], home: Path) -> None:
    done = check(job, home, "--set", "train.learning_rate=1e-9")
    assert done.exit_code == 1
    assert "Likely: " in done.stderr and "train.learning_rate" in done.stderr
    assert "do not affect the loss" not in done.stderr
    above = re.findall(r"^(?:before|after) +(\d+\.\d+) above the floor$", done.stdout, re.MULTILINE)
    assert (
        len(above) == 2
        and f"went from {above[0]} to {above[1]} nats per token above its floor" in done.stderr
    )


@pytest.mark.long
def test_a_sealed_cache_needs_no_teacher(
    job: dict[str, Any], home: Path, tiny_teacher: Path
) -> None:
    config = parse_config(
        job | {"data": job["data"] | {"max_train_samples": 6, "max_eval_samples": 2}}
    )
    (home / "run").mkdir(parents=True)
    fingerprint = run_precompute(config, home, home / "run", Monitor()).cache["fingerprint"]
    student = {"init": {"layers": 2, "hidden_size": 64, "tokenizer": str(tiny_teacher)}}
    named = {"kind": "train", "cache": {"fingerprint": fingerprint}, "student": student}
    rest = {name: job[name] for name in ("loss", "train")}
    done = check(named | rest, home, "--json")
    assert done.exit_code == 0, done.output
    assert {path.name for path in home.iterdir()} == {"caches", "run", "texts"}


def test_a_job_that_trains_nothing_is_refused(job: dict[str, Any], home: Path) -> None:
    done = check({name: job[name] for name in ("teacher", "data")} | {"kind": "precompute"}, home)
    assert isinstance(done.exception, ConfigError) and "trains no student" in str(done.exception)
    done = check(job | {"data": {"train": "nowhere.txt"}}, home)
    assert isinstance(done.exception, PotstillError) and "nowhere.txt" in str(done.exception)
    assert not home.exists()
