"""Ranks that share a student's training follow the curve of one process, with every lever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.support.ranks import run_ranks
from kd.parallel.group import ALONE
from tests.support.kd.shared_training import (
    capture_profiles,
    change,
    curve,
    evaluations,
    farthest,
    make_shared_job,
    train_alone,
    train_and_list_temperatures,
    train_half,
    train_on_few_targets,
    train_student,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.long]

Job = dict[str, Any]


@pytest.fixture(scope="module")
def job(tiny_teacher: Path, tiny_text: Path) -> Job:
    steps = {"max_steps": 6, "eval_steps": 3, "save_steps": 2, "warmup_steps": 1}
    return make_shared_job(tiny_teacher, tiny_text, **steps)


@pytest.fixture(scope="module")
def caches(job: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return capture_profiles(job, tmp_path_factory.mktemp("home"), "threshold", "tempered", "hidden")


LEVERS: dict[str, Job] = {
    "plain": {},
    "untied": {"student": {"init": {"layers": 2, "hidden_size": 16, "tie_word_embeddings": False}}},
    "checkpointing": {"train": {"gradient_checkpointing": "full"}},
    "groups": {
        "student": {"init": {"layers": 4, "hidden_size": 16}},
        "train": {"gradient_checkpointing": "sqrt"},
    },
    "average": {"train": {"ema_decay": 0.9}},
    "lion": {"train": {"optim": "lion", "learning_rate": 1e-3}},
    "schedule-free": {
        "train": {"optim": "schedule_free", "lr_scheduler_type": "constant_with_warmup"}
    },
    "muon": {"train": {"optim": "muon"}},
    "lars": {"train": {"optim": "lars", "optim_args": {"momentum": 0.9}}},
    "adafactor": {"train": {"optim": "adafactor"}},
    "clipped": {"train": {"max_grad_norm": 0.1}},
    "lora": {"student": {"init": None, "lora": {"rank": 4}}},
    "hidden": {"cache": {"profile": "hidden"}, "loss": {"divergence": "reverse_kl"}},
    "features": {"cache": {"profile": "hidden"}, "loss": {"features": {"weight": 0.5}}},
    "learned temperature": {
        "cache": {"profile": "tempered"},
        "loss": {"temperature": {"mode": "adversarial", "init": 1.5, "min": 1.0, "max": 2.0}},
    },
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "lever",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "plain")) for name in LEVERS],
)
def test_two_ranks_make_the_student_of_one(
    job: Job, caches: dict[str, str], tmp_path: Path, lever: str, strategy: str
) -> None:
    changed = change(job, **LEVERS[lever])
    if lever == "lora":
        changed["student"]["model"] = changed["teacher"]["model"]
    cache = caches[changed["cache"].get("profile", "threshold")]
    one = train_alone(changed, cache, str(tmp_path / "one"))
    shared = change(changed, train={"strategy": strategy})
    two, _ = run_ranks(2, train_student, shared, cache, str(tmp_path / "two"))
    for name in ("loss", "grad_norm", "learning_rate", "temperature"):
        assert curve(two, name) == pytest.approx(curve(one, name), rel=1e-5)
    for own, other in zip(evaluations(one), evaluations(two), strict=True):
        assert other == pytest.approx(own, rel=1e-4)
    assert farthest(one, two) < 1e-4


def test_ranks_that_draw_other_dropout_look_ahead_to_one_temperature(
    job: Job, caches: dict[str, str], tmp_path: Path
) -> None:
    learned = {"mode": "lookahead", "interval": 1, "init": 1.5, "min": 1.0, "max": 2.0}
    job = change(
        job, train={"dropout": 0.3, "strategy": "ddp"}, loss={"temperature": learned},
        cache={"profile": "tempered"},
    )  # fmt: skip
    folder = str(tmp_path / "two")
    one, other = run_ranks(2, train_and_list_temperatures, job, caches["tempered"], folder)
    assert len(set(one)) > 4
    assert one == other


def test_a_step_is_a_mean_over_its_tokens_where_some_ranks_have_none(tmp_path: Path) -> None:
    whole = train_on_few_targets(ALONE, str(tmp_path / "whole"), 4)
    losses = curve(whole)
    assert losses.count(0.0) == 1, "one step has no target at all"
    found = [train_on_few_targets(ALONE, str(tmp_path / "parts"), 1)]
    for strategy in ("ddp", "fsdp"):
        folder = str(tmp_path / strategy)
        found += run_ranks(2, train_on_few_targets, folder, 1, strategy)[:1]
    for other in found:
        for name in ("loss", "grad_norm", "tokens"):
            assert curve(other, name) == pytest.approx(curve(whole, name), rel=1e-6)
        assert farthest(whole, other) < 1e-6


def test_weights_of_tokens_do_not_depend_on_how_a_step_is_cut(
    job: Job, caches: dict[str, str], tmp_path: Path
) -> None:
    weights = {"entropy_weighting": 2.0, "alpha": 0.3}
    job = change(job, loss=weights, cache={"profile": "tempered"})
    cache = caches["tempered"]
    found = []
    for size in (8, 1):
        cut = change(job, train={"batch_size": size, "gradient_accumulation_steps": 8 // size})
        folder = str(tmp_path / f"{size}")
        found.append(train_alone(cut, cache, folder, dtype="float64"))
    found += run_ranks(2, train_student, cut, cache, str(tmp_path / "two"), "float64")[:1]
    for other in found[1:]:
        assert curve(other, "kd_loss") == pytest.approx(curve(found[0], "kd_loss"), rel=1e-7)
        assert farthest(found[0], other) < 1e-6


@pytest.mark.slow
def test_ddp_follows_one_process_to_nine_digits_in_float64(
    job: Job, caches: dict[str, str], tmp_path: Path
) -> None:
    long = change(job, train={"max_steps": 100, "eval_steps": 50, "save_steps": 100})
    cache = caches["threshold"]
    one = train_alone(long, cache, str(tmp_path / "one"), dtype="float64")
    for ranks in (2, 4):
        folder = str(tmp_path / f"{ranks}")
        many, *_ = run_ranks(ranks, train_student, long, cache, folder, "float64")
        assert len(curve(many)) == 100
        assert curve(many) == pytest.approx(curve(one), rel=1e-9)


def test_a_run_goes_on_with_other_strategies_and_numbers_of_ranks(
    job: Job, caches: dict[str, str], tmp_path: Path
) -> None:
    job = change(job, train={"max_steps": 12, "ema_decay": 0.9})
    cache = caches["threshold"]
    whole = train_alone(job, cache, str(tmp_path / "whole"))
    folder = str(tmp_path / "parts")
    train_alone(job, cache, folder, stop=2)
    for ranks, strategy, stop in ((2, "fsdp", 4), (4, "fsdp", 6), (2, "ddp", 8), (4, "fsdp", 10)):
        shared = change(job, train={"strategy": strategy})
        run_ranks(ranks, train_student, shared, cache, folder, "float32", stop)
    newest = sorted((tmp_path / "parts" / "checkpoints").iterdir())[-1]
    assert newest.name == "step-00000010"
    assert len(list(newest.glob("shard-*.safetensors"))) == 4
    parts = train_alone(job, cache, folder)
    assert curve(parts, "step") == curve(whole, "step")
    assert curve(parts) == pytest.approx(curve(whole), rel=1e-5)
    assert farthest(whole, parts) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["muon", "adafactor"])
def test_optimisers_of_whole_matrices_go_on_with_other_numbers_of_ranks(
    job: Job, caches: dict[str, str], tmp_path: Path, optim: str
) -> None:
    job = change(job, train={"max_steps": 8, "optim": optim})
    cache = caches["threshold"]
    whole = train_alone(job, cache, str(tmp_path / "whole"))
    shared = change(job, train={"strategy": "fsdp"})
    folder = str(tmp_path / "parts")
    for ranks, stop in ((2, 2), (4, 4)):
        run_ranks(ranks, train_student, shared, cache, folder, "float32", stop)
    parts = train_alone(job, cache, folder)
    assert curve(parts) == pytest.approx(curve(whole), rel=1e-5)
    assert farthest(whole, parts) < 1e-4


@pytest.mark.slow
def test_a_damaged_part_of_a_checkpoint_is_skipped_by_name(
    job: Job, caches: dict[str, str], tmp_path: Path
) -> None:
    shared = change(job, train={"strategy": "fsdp"})
    cache = caches["threshold"]
    folder = tmp_path / "run"
    run_ranks(2, train_student, shared, cache, str(folder), "float32", 4)
    part = folder / "checkpoints/step-00000004/shard-00002-model-00001-of-00001.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    found, _ = run_ranks(2, train_student, shared, cache, str(folder))
    whole, _ = run_ranks(2, train_student, shared, cache, str(tmp_path / "whole"))
    assert curve(found) == curve(whole)
    assert farthest(found, whole) == 0.0
    (warning,) = found["warnings"]
    assert warning == (
        "checkpoint step-00000004 is damaged and was skipped: "
        "shard-00002-model-00001-of-00001.safetensors differs from what was saved."
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parts_in_the_host_memory_make_the_same_student(
    job: Job, caches: dict[str, str], tmp_path: Path, precision: str
) -> None:
    """A CPU has no other memory, but the copies and the optimiser on the host are the same."""
    sharded = change(job, train={"strategy": "fsdp", "ema_decay": 0.9, "precision": precision})
    offloaded = change(sharded, train={"fsdp_offload": True})
    cache = caches["threshold"]
    one, _ = run_ranks(2, train_student, sharded, cache, str(tmp_path / "one"))
    other, _ = run_ranks(2, train_student, offloaded, cache, str(tmp_path / "other"))
    assert curve(other) == curve(one)
    assert curve(other, "grad_norm") == curve(one, "grad_norm")
    assert farthest(one, other) == 0.0


@pytest.mark.slow
def test_both_strategies_train_in_bfloat16(
    job: Job, caches: dict[str, str], tmp_path: Path
) -> None:
    half = change(job, train={"precision": "bf16"})
    one = train_alone(half, caches["threshold"], str(tmp_path / "one"))
    for strategy in ("ddp", "fsdp"):
        shared = change(half, train={"strategy": strategy})
        folder = str(tmp_path / strategy)
        two, _ = run_ranks(2, train_student, shared, caches["threshold"], folder)
        assert curve(two) == pytest.approx(curve(one), rel=2e-3)


@pytest.mark.slow
def test_parts_of_weights_in_bfloat16_are_rounded_as_well_as_whole_ones(
    job: Job, caches: dict[str, str], tmp_path: Path
) -> None:
    """The draws of the rounding are others on each rank, so the curves agree within it."""
    rounded = change(job, train={"precision": "bf16_pure"})
    one = train_alone(rounded, caches["threshold"], str(tmp_path / "one"))
    shared = change(rounded, train={"strategy": "fsdp"})
    two, _ = run_ranks(2, train_student, shared, caches["threshold"], str(tmp_path / "two"))
    assert curve(two) == pytest.approx(curve(one), rel=1e-2)
    # A bfloat16 has 8 significant bits.
    largest = max(float(abs(each).max()) for each in one["weights"].values())
    assert farthest(one, two) < largest * 2**-5


@pytest.mark.slow
def test_all_parts_leave_out_the_steps_that_overflow_float16(
    job: Job, caches: dict[str, str], tmp_path: Path
) -> None:
    half = change(job, train={"precision": "fp16"})
    one = train_half(ALONE, half, caches["threshold"], str(tmp_path / "one"))
    assert one["progress"]["scale_watch"]["skipped"] > 0
    for strategy in ("ddp", "fsdp"):
        shared = change(half, train={"strategy": strategy})
        folder = str(tmp_path / strategy)
        two, _ = run_ranks(2, train_half, shared, caches["threshold"], folder)
        assert two["progress"]["scale_watch"] == one["progress"]["scale_watch"]
        assert curve(two) == pytest.approx(curve(one), rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_layers_are_gathered_before_they_are_called(
    job: Job, caches: dict[str, str], tmp_path: Path, checkpointing: str
) -> None:
    sharded = change(job, train={"strategy": "fsdp", "gradient_checkpointing": checkpointing})
    compiled = change(sharded, train={"compile": "default"})
    one, _ = run_ranks(2, train_student, sharded, caches["threshold"], str(tmp_path / "one"))
    two, _ = run_ranks(2, train_student, compiled, caches["threshold"], str(tmp_path / "two"))
    assert curve(two) == pytest.approx(curve(one), rel=1e-5)
    assert farthest(one, two) < 1e-4
    (report,) = (each for each in two["lines"] if each.get("check") == "compile")
    assert report["facts"]["graphs"] > 0


@pytest.mark.slow
def test_ranks_go_back_together_after_a_spike(
    job: Job, caches: dict[str, str], tmp_path: Path
) -> None:
    job = change(job, train={"max_steps": 16, "save_steps": 5, "eval_steps": 16})
    cache = caches["threshold"]
    one = train_alone(job, cache, str(tmp_path / "one"), spoilt=13)
    assert one["progress"]["rollbacks"] == 1
    for strategy in ("ddp", "fsdp"):
        shared = change(job, train={"strategy": strategy})
        folder = str(tmp_path / strategy)
        two, _ = run_ranks(2, train_student, shared, cache, folder, "float32", None, 13)
        assert two["progress"]["rollbacks"] == 1
        assert curve(two) == pytest.approx(curve(one), rel=1e-5)


def test_copies_stay_equal_with_dropout_and_steps_that_are_rounded_stochastically(
    job: Job, caches: dict[str, str], tmp_path: Path
) -> None:
    rounded = change(
        job,
        student={"init": {"layers": 2, "hidden_size": 16}},
        train={"precision": "bf16_pure", "strategy": "ddp", "dropout": 0.1},
    )
    found, _ = run_ranks(2, train_student, rounded, caches["threshold"], str(tmp_path / "run"))
    first, second = found["digests"]
    assert first == second
