"""``kd ablate`` and ``kd landscape``: one ablation, and a look at one of its runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from services.terminal.exit_codes import INVALID
from tests.support.commands import kd


@pytest.fixture
def job_file(tiny_teacher: Path, tiny_text: Path, tmp_path: Path) -> Path:
    job = {
        "name": "tiny",
        "teacher": {"model": str(tiny_teacher), "batch_size": 4},
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {
            "train": str(tiny_text), "sequence_length": 32, "max_train_samples": 8,
            "validation_fraction": 0.2, "max_eval_samples": 3,
        },
        "train": {"max_steps": 400, "batch_size": 4},
    }  # fmt: skip
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


@pytest.mark.long
def test_kd_ablate_names_an_axis_that_cannot_run(job_file: Path, tmp_path: Path) -> None:
    done = kd("ablate", job_file, "--axis", "optimizers", "--home", tmp_path / "home")
    assert done.returncode == INVALID and "Did you mean optimisers?" in done.stderr
    done = kd("ablate", job_file, "--axis", "loss.alpha=7", "--home", tmp_path / "home")
    assert done.returncode == INVALID and "no setting that can run" in done.stderr
    # Each run would find this only after it has started.
    wrong = ("--set", "train.activation_offload=true", "--set", "resources.gpus=0")
    if not torch.cuda.is_available():
        done = kd("ablate", job_file, "--axis", "precision=fp16", "--home", tmp_path / "home")
        assert done.returncode == INVALID and "fp16 needs a GPU" in done.stderr
        done = kd("ablate", job_file, "--axis", "alpha=0", *wrong, "--home", tmp_path / "home")
        assert done.returncode == INVALID and "activation_offload" in done.stderr
    assert not (tmp_path / "home" / "ablations").exists()


@pytest.mark.long
def test_an_ablation_and_the_landscape_of_a_run(job_file: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    done = kd(
        "ablate", job_file, "--axis", "alpha=0.5,1.5", "--steps", "3", "--home", home, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 runs of 3 steps in " in done.stderr
    assert "alpha 1.5 is refused: loss.alpha: Input should be less than" in done.stderr
    runs = list(json.loads(done.stdout)["runs"].values())
    assert [run["state"] for run in runs] == ["finished", "finished"]
    assert (home / "ablations" / "tiny" / "index.html").is_file()
    run = home / "ablations" / "tiny" / runs[1]["folder"]

    asked = ("--points", "3", "--line-points", "5", "--sequences", "2", "--home", home)
    done = kd("landscape", run, *asked)
    assert done.returncode == 0, done.stderr
    assert f"page: {run / 'landscape' / 'index.html'}" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["train", "held-out"]
