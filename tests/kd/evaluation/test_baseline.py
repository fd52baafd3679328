"""The baseline is what a job on cross-entropy alone would train, and is not taken for the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kd.config.jobfile import parse_config
from kd.errors import Interrupted
from kd.evaluation.baseline import build_starting_student, make_cross_entropy_job, train_baseline
from kd.models.loading import build_student
from kd.models.tokenizers import get_vocabulary_size
from kd.progress import SILENT, Event, Monitor
from kd.stages.capture import run_precompute
from kd.stages.source import open_source
from kd.training import checkpoint
from kd.training.loop import train
from tests.support.kd.students import assert_same, copy_weights

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def job(job: dict[str, Any]) -> dict[str, Any]:
    return {
        **job,
        "loss": {"alpha": 0.2, "temperature": 1.5, "label_smoothing": 0.1},
        "cache": {"profile": "dense"},
    }


@pytest.fixture(scope="module")
def home(job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    run_precompute(parse_config(job), home, home / "run", SILENT)
    return home


@pytest.mark.long
def test_the_baseline_is_what_the_job_with_alpha_1_trains(
    job: dict[str, Any], home: Path, tmp_path: Path
) -> None:
    tokenizer, source = open_source(parse_config(job), home, home / "run", SILENT)
    events: list[Event] = []
    found = train_baseline(parse_config(job), source, tokenizer, tmp_path, Monitor(events.append))

    alone = parse_config(job | {"loss": {"alpha": 1.0, "label_smoothing": 0.1}})
    torch.manual_seed(42)
    expected = build_student(alone.student, tokenizer, 32)
    train(alone, source, expected, get_vocabulary_size(tokenizer), tmp_path / "alone", SILENT)
    assert_same(copy_weights(found), copy_weights(expected))

    taught = build_starting_student(parse_config(job), tokenizer)
    train(
        parse_config(job),
        source,
        taught,
        get_vocabulary_size(tokenizer),
        tmp_path / "taught",
        SILENT,
    )
    assert not torch.equal(
        next(iter(copy_weights(taught).values())), next(iter(copy_weights(found).values()))
    )
    assert {event.type for event in events} <= {"stage", "progress", "warning"}, (
        "no metrics of a second run"
    )
    assert [event.data["done"] for event in events if event.type == "progress"] == [1, 2, 3, 4]


def test_a_baseline_that_was_stopped_goes_on_and_one_that_is_done_is_done(
    job: dict[str, Any], home: Path, tmp_path: Path
) -> None:
    config = parse_config(job)
    tokenizer, source = open_source(config, home, home / "run", SILENT)
    whole = train_baseline(config, source, tokenizer, tmp_path / "whole", SILENT)
    steps: list[int] = []

    def listen(event: Event) -> None:
        if event.type == "progress":
            steps.append(event.data["done"])

    with pytest.raises(Interrupted):
        train_baseline(
            config, source, tokenizer, tmp_path / "cut", Monitor(listen, lambda: bool(steps))
        )
    assert steps == [1]
    resumed = train_baseline(config, source, tokenizer, tmp_path / "cut", Monitor(listen))
    assert_same(copy_weights(resumed), copy_weights(whole))
    assert steps == [1, 2, 3, 4]
    resumed = train_baseline(config, source, tokenizer, tmp_path / "cut", Monitor(listen))
    assert_same(copy_weights(resumed), copy_weights(whole))
    assert steps == [1, 2, 3, 4], "nothing was trained again"
    assert checkpoint.list_checkpoints(tmp_path / "cut" / "baseline" / "checkpoints")


def test_all_that_is_the_teacher_s_goes_and_the_rest_stays(job: dict[str, Any]) -> None:
    asked = parse_config(
        job
        | {
            "loss": {
                "alpha": 0.2,
                "divergence": "jsd",
                "entropy_weighting": 1.0,
                "label_smoothing": 0.1,
                "temperature": {"mode": "adversarial"},
            },
            "train": job["train"] | {"report_to": ["tensorboard"]},
            "evaluation": {"baseline": True},
        }
    )
    plain = make_cross_entropy_job(asked)
    assert plain.loss.hard_labels_only and plain.loss.temperature == 1.0
    assert (plain.loss.divergence, plain.loss.entropy_weighting) == ("forward_kl", 0.0)
    assert plain.loss.label_smoothing == 0.1
    assert plain.train is not None and plain.train.report_to == ()
    assert not plain.evaluation.baseline
    assert plain.student == asked.student and plain.data == asked.data and plain.train.seed == 42
