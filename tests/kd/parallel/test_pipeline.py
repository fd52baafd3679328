"""Ranks that are the stages of a pipeline follow the curve of one process, with every lever."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from bench.support.ranks import run_ranks
from kd.config.loss import LossConfig
from kd.errors import ConfigError, NotFinite
from kd.loss.fused import LossTerms
from kd.models.stages.cut import StudentStage, cut
from kd.parallel.group import Group
from kd.training import step_loss
from kd.training.preparing.requirements import require_stages
from tests.support.kd.shared_training import (
    capture_profiles,
    change,
    curve,
    evaluations,
    farthest,
    hash_tensors,
    make_shared_job,
    train_alone,
    train_student,
)
from tests.support.kd.zoo import build

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.long]

Job = dict[str, Any]


@pytest.fixture(scope="module")
def job(tiny_teacher: Path, tiny_text: Path) -> Job:
    steps = {"max_steps": 6, "eval_steps": 3, "save_steps": 2, "warmup_steps": 1}
    made = make_shared_job(tiny_teacher, tiny_text, **steps)
    return change(made, student={"init": {"layers": 4, "hidden_size": 16}})


@pytest.fixture(scope="module")
def caches(job: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return capture_profiles(
        job, tmp_path_factory.mktemp("home"), "threshold", "tempered", "hidden", "topk"
    )


def stage(job: Job) -> Job:
    return change(job, train={"strategy": "pipeline"})


UNTIED = {"init": {"layers": 4, "hidden_size": 16, "tie_word_embeddings": False}}


@pytest.mark.parametrize("tied", [True, False])
def test_stages_follow_one_process_to_nine_digits_in_float64(
    job: Job, caches: dict[str, str], tmp_path: Path, tied: bool
) -> None:
    long = change(job, train={"max_steps": 24, "eval_steps": 12, "save_steps": 24})
    if not tied:
        long = change(long, student=UNTIED)
    cache = caches["threshold"]
    one = train_alone(long, cache, str(tmp_path / "one"), dtype="float64")
    for ranks in (2, 4):
        folder = str(tmp_path / f"{ranks}")
        many, *_ = run_ranks(ranks, train_student, stage(long), cache, folder, "float64")
        assert len(curve(many)) == 24
        assert curve(many) == pytest.approx(curve(one), rel=1e-9)
        assert curve(many, "grad_norm") == pytest.approx(curve(one, "grad_norm"), rel=1e-9)
        first, *later = zip(evaluations(one), evaluations(many), strict=True)
        # One process alone measures the untrained student in float32, as the report does.
        assert first[1] == pytest.approx(first[0], rel=1e-7)
        for own, other in later:
            assert other == pytest.approx(own, rel=1e-9)
        assert farthest(one, many) < 1e-9


LEVERS: dict[str, Job] = {
    "plain": {},
    "untied": {"student": UNTIED},
    "more micro-batches": {"train": {"batch_size": 1, "gradient_accumulation_steps": 8}},
    "checkpointing": {"train": {"gradient_checkpointing": "sqrt"}},
    "average": {"train": {"ema_decay": 0.9}},
    "clipped": {"train": {"max_grad_norm": 0.1}},
    "lion": {"train": {"optim": "lion", "learning_rate": 1e-3}},
    "lars": {"train": {"optim": "lars"}},
    "muon": {"train": {"optim": "muon"}},
    "adafactor": {"train": {"optim": "adafactor", "learning_rate": 1e-3}},
    "schedule-free": {
        "train": {"optim": "schedule_free", "lr_scheduler_type": "constant_with_warmup"}
    },
    "lora": {"student": {"init": None, "lora": {"rank": 4}}},
    "early stopping": {"train": {"early_stopping_patience": 1, "learning_rate": 0.1}},
    "hard labels": {
        "loss": {
            "alpha": {"schedule": "linear", "start": 0.5, "end": 0.1}, "label_smoothing": 0.1,
        },
    },
    "topk": {"cache": {"profile": "topk"}},
    "hidden": {"cache": {"profile": "hidden"}, "loss": {"divergence": "reverse_kl"}},
    "temperature": {
        "cache": {"profile": "tempered"},
        "loss": {"temperature": {"schedule": "linear", "start": 2.0, "end": 1.0}},
    },
    "learned temperature": {
        "cache": {"profile": "tempered"},
        "loss": {"temperature": {"mode": "adversarial", "init": 1.5, "min": 1.0, "max": 2.0}},
    },
    "entropy of the target": {
        "cache": {"profile": "tempered"},
        "loss": {
            "temperature": {
                "mode": "entropy", "target_entropy": 1.0, "init": 1.5, "min": 1.0, "max": 2.0,
            },
        },
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "lever",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "plain")) for name in LEVERS],
)
def test_two_stages_make_the_student_of_one_process(
    job: Job, caches: dict[str, str], tmp_path: Path, lever: str
) -> None:
    changed = change(job, **LEVERS[lever])
    if lever == "lora":
        changed["student"]["model"] = changed["teacher"]["model"]
    cache = caches[changed["cache"].get("profile", "threshold")]
    one = train_alone(changed, cache, str(tmp_path / "one"))
    staged = change(changed, train={"strategy": "pipeline"})
    two, _ = run_ranks(2, train_student, staged, cache, str(tmp_path / "two"))
    for name in ("loss", "grad_norm", "learning_rate", "temperature"):
        assert curve(two, name) == pytest.approx(curve(one, name), rel=1e-5)
    for own, other in zip(evaluations(one), evaluations(two), strict=True):
        assert other == pytest.approx(own, rel=1e-4)
    # Muon orthogonalises in bfloat16.
    assert farthest(one, two) < (1e-3 if lever == "muon" else 1e-4)


def test_a_run_goes_on_with_other_strategies_and_numbers_of_stages(
    job: Job, caches: dict[str, str], tmp_path: Path
) -> None:
    job = change(job, train={"max_steps": 14, "ema_decay": 0.9})
    cache = caches["threshold"]
    whole = train_alone(job, cache, str(tmp_path / "whole"))
    folder = str(tmp_path / "parts")
    parts: tuple[tuple[int, str, int], ...] = (
        (2, "pipeline", 2), (1, "single", 4), (4, "pipeline", 6), (2, "fsdp", 8),
        (2, "pipeline", 10), (2, "ddp", 12),
    )  # fmt: skip
    for ranks, strategy, stop in parts:
        shared = change(job, train={"strategy": strategy})
        run_ranks(ranks, train_student, shared, cache, folder, "float32", stop)
    found, *_ = run_ranks(4, train_student, stage(job), cache, folder)
    newest = sorted((tmp_path / "parts" / "checkpoints").iterdir())[-1]
    assert newest.name == "step-00000014"
    assert len(list(newest.glob("shard-*.safetensors"))) == 4
    assert curve(found, "step") == curve(whole, "step")
    assert curve(found) == pytest.approx(curve(whole), rel=1e-5)
    assert farthest(whole, found) < 1e-4


def train_and_hash_ends(group: Group, *arguments: Any) -> list[str]:
    """Train as a stage; returns a digest of the embeddings of the first and of the last stage."""
    kept: list[nn.Module] = []

    def keep(student: Any, *rest: Any) -> StudentStage:
        kept.append(student)
        return cut(student, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kd.training.preparing.parts.cut", keep)
        train_student(group, *arguments)
    digests: list[str] = group.gather(hash_tensors(kept[0].get_input_embeddings().parameters()))
    return [digests[0], digests[-1]]


def test_a_tied_weight_stays_equal_on_both_stages_bit_for_bit(
    job: Job, caches: dict[str, str], tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    ends, *_ = run_ranks(4, train_and_hash_ends, stage(job), caches["threshold"], folder)
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_stages_report_every_layer_and_check_every_gradient(
    job: Job, caches: dict[str, str], tmp_path: Path
) -> None:
    cache = caches["threshold"]
    one = train_alone(job, cache, str(tmp_path / "one"))
    two, _ = run_ranks(2, train_student, stage(job), cache, str(tmp_path / "two"))
    checks, others = (
        [line["check"] for line in run["lines"] if line["type"] == "check"] for run in (one, two)
    )
    assert checks == others != []
    for own, other in zip(*(list_layers(run) for run in (one, two)), strict=True):
        assert "grad_norm/layer 1" in own and "learning_rate/head" in own
        # Groups of the optimiser are parts on each stage.
        shared = {name: own[name] for name in own if not name.startswith("grad_norm/group")}
        assert other == pytest.approx(shared, rel=1e-4)


def list_layers(run: dict[str, Any]) -> list[dict[str, float]]:
    """The norms and the rates of the layers at each reported step."""
    return [
        {name: value for name, value in line.items() if name.startswith(("grad_", "learning_"))}
        for line in run["lines"]
        if line["type"] == "scalars"
    ]


@pytest.mark.slow
def test_stages_train_in_bfloat16(job: Job, caches: dict[str, str], tmp_path: Path) -> None:
    half = change(job, train={"precision": "bf16"})
    one = train_alone(half, caches["threshold"], str(tmp_path / "one"))
    two, _ = run_ranks(2, train_student, stage(half), caches["threshold"], str(tmp_path / "two"))
    assert curve(two) == pytest.approx(curve(one), rel=2e-3)


@pytest.mark.slow
def test_stages_go_back_together_after_a_spike(
    job: Job, caches: dict[str, str], tmp_path: Path
) -> None:
    job = change(job, student=UNTIED, train={"max_steps": 16, "save_steps": 5, "eval_steps": 16})
    cache = caches["threshold"]
    one = train_alone(job, cache, str(tmp_path / "one"), spoilt=13)
    assert one["progress"]["rollbacks"] == 1
    folder = str(tmp_path / "two")
    two, _ = run_ranks(2, train_student, stage(job), cache, folder, "float32", None, 13)
    assert two["progress"]["rollbacks"] == 1
    assert curve(two) == pytest.approx(curve(one), rel=1e-5)


def train_to_a_nan(group: Group, *arguments: Any) -> str:
    """Train as a stage, with a loss that is NaN from the third step on; returns the error."""
    compute = step_loss.compute_distillation_loss
    calls = itertools.count()

    def spoil(*inputs: Any) -> LossTerms:
        terms = compute(*inputs)
        return terms._replace(total=terms.total * math.nan) if next(calls) >= 8 else terms

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_loss, "compute_distillation_loss", spoil)
        with pytest.raises(NotFinite) as found:
            train_student(group, *arguments)
    return str(found.value)


def test_a_loss_that_is_not_finite_ends_all_stages_with_one_error(
    job: Job, caches: dict[str, str], tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    errors = run_ranks(2, train_to_a_nan, stage(job), caches["threshold"], folder)
    for error in errors:
        assert error.startswith("At step 3 the loss is nan")
        assert "With train.strategy pipeline the batch is not searched." in error


def test_a_balance_loss_of_routers_is_refused_and_may_be_left_out() -> None:
    student = build("mixtral")
    with pytest.raises(ConfigError, match="no stage sees the routers of all layers of a Mixtral"):
        require_stages(LossConfig(), student, 2)
    require_stages(LossConfig(router_balance=0.0), student, 2)
