"""The training loop: resumed equals uninterrupted, and accumulated equals one large batch."""

from __future__ import annotations

import copy
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_model
from torch import nn
from transformers import LlamaForCausalLM

from cache.errors import StorageError
from kd.config.job import JobConfig
from kd.errors import Interrupted, ModelError, TrainingError
from kd.evaluation.teacher_comparison import compare_with_records
from kd.files import read_json
from kd.loss.targets import Targets
from kd.models.precision import Precision, round_parameters
from kd.optim.schedules import make_scheduler
from kd.progress import Event, Monitor
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.text.packing import Document, pack_documents
from kd.tracking.metrics import read_metrics
from kd.training import checkpoint
from kd.training.early_stopping import record_evaluation
from kd.training.loop import train
from kd.training.preparing.job_loss import count_total_steps
from kd.training.saved.state import TrainingProgress
from tests.support.kd.students import assert_same, copy_weights, make_llama
from tests.support.kd.training import (
    VOCABULARY,
    make_source,
    make_text_job,
    poison_forward,
    read_history,
    stop_after,
)


def make_job(**train_options: Any) -> JobConfig:
    options = {
        "max_steps": 8,
        "batch_size": 4,
        "eval_steps": 4,
        "save_steps": 3,
        "logging_steps": 1,
        "warmup_steps": 2,
    }
    return make_text_job(options | train_options)


def make_student(dropout: float = 0.2) -> LlamaForCausalLM:
    """Return a student whose LM head is padded."""
    return make_llama(VOCABULARY + 6, attention_dropout=dropout)


def run(
    job: JobConfig, folder: Path, monitor: Monitor | None = None, dropout: float = 0.2
) -> tuple[Any, TrainingProgress]:
    student = make_student(dropout)
    return student, train(job, make_source(), student, VOCABULARY, folder, monitor or Monitor())


def test_tensorboard_has_each_step_of_a_killed_run_once(tmp_path: Path) -> None:
    """It is killed before its first checkpoint, and again with a damaged one."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    job = make_job(report_to=["tensorboard"])

    def kill_after(step: int) -> Monitor:
        def listen(event: Event) -> None:
            if event.type == "progress" and event.data["done"] == step:
                raise KeyboardInterrupt

        return Monitor(listen)

    for step in (3, 6):
        with pytest.raises(KeyboardInterrupt):
            run(job, tmp_path, kill_after(step))
        time.sleep(1.1)  # the names of its files have the second in which they were begun
    (tmp_path / "checkpoints" / "step-00000003" / "model.safetensors").write_bytes(b"")
    run(job, tmp_path)
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / job.name)).Reload()
    assert [event.step for event in found.Scalars("loss")] == list(range(1, 9))
    assert [event.step for event in found.Scalars("validation_loss")] == [0, 4, 8]


@pytest.mark.long
def test_a_resume_with_another_number_of_threads_warns(tmp_path: Path) -> None:
    job = make_job()
    with pytest.raises(Interrupted):
        run(job, tmp_path, stop_after(3))
    messages: list[str] = []

    stopping = stop_after(5)

    def listen(event: Event) -> None:
        stopping.listen(event)
        if event.type == "warning":
            messages.append(event.data["message"])

    with pytest.raises(Interrupted):
        run(job, tmp_path, Monitor(listen, stopping.should_stop))
    assert not messages, "the same number"
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        run(job, tmp_path, Monitor(listen))
    finally:
        torch.set_num_threads(before)
    assert len(messages) == 1 and f"computed with {before} threads" in messages[0]
    assert f"this process has {before + 1}" in messages[0] and "OMP_NUM_THREADS" in messages[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
def test_the_first_evaluation_is_in_float32_as_the_report_s(tmp_path: Path, precision: str) -> None:
    """Weights that bf16_pure keeps in bfloat16 are the rounded ones, in both."""
    options = {"precision": precision, "optim": "adamw", "max_steps": 1}
    student = make_student(0.0)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    plain = copy.deepcopy(student)
    if precision == "bf16_pure":
        round_parameters(plain, torch.bfloat16)
    job = make_job(**options)
    progress = train(job, make_source(), student, VOCABULARY, tmp_path, Monitor())
    found = compare_with_records(plain.float(), job, make_source(), VOCABULARY)
    expected = found["validation_perplexity"]
    assert progress.first_evaluation is not None
    assert progress.first_evaluation["validation_perplexity"] == pytest.approx(expected, rel=1e-5)
    kept = {"bf16_pure": torch.bfloat16}.get(precision, torch.float32)
    assert {each.dtype for each in student.parameters()} == {kept}


@pytest.mark.long
@pytest.mark.parametrize("stop", range(1, 8))
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path, stop: int) -> None:
    job = make_job()
    whole, _ = run(job, tmp_path / "whole")
    with pytest.raises(Interrupted, match=f"step {stop} of 8"):
        run(job, tmp_path / "cut", stop_after(stop))
    resumed, progress = run(job, tmp_path / "cut")
    assert_same(copy_weights(resumed), copy_weights(whole))
    assert progress.step == 8
    lines = [read_history(tmp_path / name) for name in ("cut", "whole")]
    assert lines[0] == lines[1], "no line lost, doubled or different"


def test_the_profile_of_an_interrupted_training_is_of_all_its_attempts(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="step 3 of 8 of the training; step 4 is the next"):
        run(make_job(), tmp_path, stop_after(3))
    run(make_job(), tmp_path)
    phases = {row["name"]: row for row in read_json(tmp_path / "profile.json")["phases"]}
    assert (phases["optimizer"]["count"], phases["backward"]["count"]) == (8, 8)


def test_a_held_out_part_without_a_token_to_predict_is_told(tmp_path: Path) -> None:
    job = make_job()
    words = [Document(np.array([3], np.uint32))] * job.data.sequence_length
    source = PlainText(Corpus(make_source().corpus.train, pack_documents(words, job.data)))
    events: list[Event] = []
    train(job, source, make_student(), VOCABULARY, tmp_path / "run", Monitor(events.append))
    (warning,) = [event.data["message"] for event in events if event.type == "warning"]
    assert warning.startswith("Held-out sequences: 1, and none has a token to predict.")
    run(job, tmp_path / "other", Monitor(events.append))
    assert sum(event.type == "warning" for event in events) == 1


@pytest.mark.long
def test_killed_before_any_checkpoint_begins_its_history_anew(tmp_path: Path) -> None:
    def killed(event: Event) -> None:
        if event.type == "progress" and event.data["done"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(make_job(), tmp_path / "cut", Monitor(killed))
    assert read_metrics(tmp_path / "cut" / "metrics.jsonl")
    run(make_job(), tmp_path / "cut")
    run(make_job(), tmp_path / "whole")
    cut, whole = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("cut", "whole"))
    assert [(line["type"], line["step"]) for line in cut] == [
        (line["type"], line["step"]) for line in whole
    ]


@pytest.mark.long
def test_killed_between_checkpoints_resumes_from_the_last_one(tmp_path: Path) -> None:
    """After kill -9 the last steps are not saved, and a half-written checkpoint is on the disk."""
    job = make_job()
    whole, _ = run(job, tmp_path / "whole")

    class Killed(BaseException):
        pass

    def listen(event: Event) -> None:
        if event.type == "progress" and event.data["done"] == 5:
            raise Killed

    with pytest.raises(Killed):
        run(job, tmp_path / "cut", Monitor(listen))
    assert [
        path.name for path in checkpoint.list_checkpoints(tmp_path / "cut" / "checkpoints")
    ] == ["step-00000003"]
    shutil.copytree(
        tmp_path / "cut/checkpoints/step-00000003", tmp_path / "cut/checkpoints/.tmp-step-00000006"
    )
    resumed, _ = run(job, tmp_path / "cut")
    assert_same(copy_weights(resumed), copy_weights(whole))


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"]
)
def test_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path, name: str) -> None:
    job = make_job()
    whole, _ = run(job, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(job, tmp_path / "cut", stop_after(6))
    path = tmp_path / "cut" / "checkpoints" / "step-00000006" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    warnings: list[str] = []
    monitor = Monitor(
        lambda event: warnings.append(event.data["message"]) if event.type == "warning" else None
    )
    resumed, _ = run(job, tmp_path / "cut", monitor)
    assert len(warnings) == 1 and "step-00000006" in warnings[0]
    assert_same(copy_weights(resumed), copy_weights(whole))


def test_checkpoint_of_another_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(make_job(), tmp_path, stop_after(3))
    with pytest.raises(TrainingError, match="another job"):
        run(make_job(learning_rate=1e-2), tmp_path)


def test_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    job = make_job()
    first, _ = run(job, tmp_path)
    events: list[str] = []
    second, _ = run(job, tmp_path, Monitor(lambda event: events.append(event.type)))
    assert_same(copy_weights(second), copy_weights(first))
    assert "progress" not in events


def test_save_total_limit(tmp_path: Path) -> None:
    run(make_job(max_steps=10, save_steps=2, save_total_limit=3), tmp_path)
    names = [path.name for path in checkpoint.list_checkpoints(tmp_path / "checkpoints")]
    assert names == ["step-00000006", "step-00000008", "step-00000010"]


def test_accumulation_is_a_mean_over_tokens(tmp_path: Path) -> None:
    """Four micro-batches of 2 with unequal token counts take the same steps as one batch of 8."""
    one, _ = run(make_job(batch_size=8, max_steps=4), tmp_path / "one", dropout=0.0)
    four, _ = run(
        make_job(batch_size=2, gradient_accumulation_steps=4, max_steps=4),
        tmp_path / "four",
        dropout=0.0,
    )
    lines = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "four")]
    for left, right in zip(*lines, strict=True):
        for key in {"loss", "grad_norm", "validation_loss"} & left.keys():
            assert left[key] == pytest.approx(right[key], rel=1e-5)
    for name, tensor in copy_weights(one).items():
        assert torch.allclose(tensor, copy_weights(four)[name], atol=2e-5), name


def test_gradient_checkpointing_changes_memory_not_numbers(tmp_path: Path) -> None:
    plain, _ = run(make_job(), tmp_path / "plain", dropout=0.0)
    saving, _ = run(make_job(gradient_checkpointing=True), tmp_path / "saving", dropout=0.0)
    for name, tensor in copy_weights(plain).items():
        assert torch.allclose(tensor, copy_weights(saving)[name], atol=1e-6), name


@pytest.fixture
def half_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 on a CPU, which the product refuses: loop and loss scaler are the real ones."""

    def choose(name: str, device: torch.device) -> Precision:
        return Precision(
            device.type, {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name, torch.float32)
        )

    monkeypatch.setattr(Precision, "choose", choose)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.usefixtures("half_on_cpu")
def test_half_precision_follows_float32(tmp_path: Path, precision: str) -> None:
    run(make_job(), tmp_path / "wide", dropout=0.0)
    half, _ = run(make_job(precision=precision), tmp_path / "half", dropout=0.0)
    assert all(parameter.dtype == torch.float32 for parameter in half.parameters()), (
        "master weights stay float32"
    )
    losses = [
        [
            line["loss"]
            for line in read_metrics(tmp_path / name / "metrics.jsonl")
            if line["type"] == "metrics"
        ]
        for name in ("wide", "half")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[1] != losses[0]


@pytest.mark.usefixtures("half_on_cpu")
def test_half_precision_resumes_bit_for_bit_with_its_loss_scale(tmp_path: Path) -> None:
    job = make_job(precision="fp16")
    whole, _ = run(job, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(job, tmp_path / "cut", stop_after(4))
    resumed, _ = run(job, tmp_path / "cut")
    assert_same(copy_weights(resumed), copy_weights(whole))


def test_nan_at_the_start_is_found_before_any_step(tmp_path: Path) -> None:
    student = make_student()
    student.model.layers[0].register_forward_hook(
        lambda layer, inputs, output: output * float("nan")
    )
    before = copy_weights(student)
    with pytest.raises(ModelError, match="NaN or infinite"):
        train(make_job(), make_source(), student, VOCABULARY, tmp_path, Monitor())
    assert_same(copy_weights(student), before)


def test_nan_in_the_middle_names_the_step_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    student = make_student()
    poison_forward(student, 4)
    with pytest.raises(TrainingError, match=r"step 4 the loss is nan") as caught:
        train(make_job(), make_source(), student, VOCABULARY, tmp_path, Monitor())
    assert "learning_rate" in caught.value.remedy
    resumed, _ = run(make_job(), tmp_path)
    whole, _ = run(make_job(), tmp_path / "whole")
    assert_same(copy_weights(resumed), copy_weights(whole))


def test_early_stopping_ends_with_the_best_weights(tmp_path: Path) -> None:
    job = make_job(
        max_steps=200, learning_rate=0.05, eval_steps=2, save_steps=1000, early_stopping_patience=2
    )
    student, progress = run(job, tmp_path)
    evaluations = [
        line for line in read_metrics(tmp_path / "metrics.jsonl") if line["type"] == "evaluation"
    ][1:]
    best = min(evaluations, key=lambda line: line["validation_loss"])
    assert progress.step < 200 and progress.step == best["step"] + 4
    kept = make_student()
    folder = tmp_path / "checkpoints" / f"step-{best['step']:08d}"
    load_model(kept, folder / "model.safetensors")
    assert_same(copy_weights(student), copy_weights(kept))
    again, progress_again = run(job, tmp_path)
    assert progress_again.step == progress.step
    assert_same(copy_weights(again), copy_weights(kept))


@pytest.mark.parametrize("first", [math.nan, math.inf])
def test_a_held_out_loss_that_is_not_finite_is_never_the_best(first: float) -> None:
    progress = TrainingProgress(step=2)
    assert not record_evaluation(progress, {"validation_loss": first})
    assert (progress.best_loss, progress.best_step) == (None, 0)
    progress.step = 4
    assert record_evaluation(progress, {"validation_loss": 3.0})
    assert (progress.best_loss, progress.best_step) == (3.0, 4)
    progress.step = 6
    assert not record_evaluation(progress, {"validation_loss": first})
    assert (progress.best_step, progress.evaluations_since_best) == (4, 1)


def test_optimizer_is_adamw(tmp_path: Path) -> None:
    """One step of the loop equals torch's AdamW on the same gradient, with decay and clipping."""
    job = make_job(max_steps=1, warmup_steps=0, max_grad_norm=0.5, weight_decay=0.1)
    student, _ = run(job, tmp_path, dropout=0.0)
    reference = make_student(0.0)
    from kd.loss.fused import compute_distillation_loss
    from kd.loss.objective import Objective
    from kd.models.layers import compute_hidden_states
    from kd.models.lm_head import find_student_head
    from kd.text.batches import make_batch
    from kd.text.steps.order import list_step_indices

    source = make_source()
    batch = make_batch(*source.read(list_step_indices(source.train_count, 4, 42, 0)))
    hidden = compute_hidden_states(reference, batch.tokens_BL, batch.packed).flatten(0, 1)[
        batch.rows_N
    ]
    head = find_student_head(reference, VOCABULARY)
    (
        compute_distillation_loss(hidden, head, Targets(batch.gold_N), Objective(1.0)).total
        / len(batch)
    ).backward()
    nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    groups = [
        {"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in reference.parameters()
    ]
    torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95)).step()
    for name, tensor in copy_weights(reference).items():
        assert torch.allclose(copy_weights(student)[name], tensor, atol=1e-7), name


SCHEDULES: dict[str, dict[str, float]] = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": 100},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 3},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_and_resumes(tmp_path: Path, name: str) -> None:
    warmup = 0 if name == "constant" else 2
    job = make_job(lr_scheduler_type=name, lr_scheduler_kwargs=SCHEDULES[name], warmup_steps=warmup)
    whole, _ = run(job, tmp_path / "whole")
    rates = [
        line["learning_rate"]
        for line in read_metrics(tmp_path / "whole" / "metrics.jsonl")
        if "loss" in line
    ]
    assert job.train is not None
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=job.train.learning_rate)
    reference = transformers.get_scheduler(name, optimizer, warmup, 8, SCHEDULES[name])
    for rate in rates:
        assert rate == pytest.approx(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()
    with pytest.raises(Interrupted):
        run(job, tmp_path / "cut", stop_after(5))
    resumed, _ = run(job, tmp_path / "cut")
    assert_same(copy_weights(resumed), copy_weights(whole))


def test_schedule_that_lacks_an_argument_says_so() -> None:
    job = make_job()
    assert job.train is not None
    options = job.train.model_copy(
        update={"lr_scheduler_type": "warmup_stable_decay"}
    )  # JobConfig refuses it
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    with pytest.raises(TrainingError, match="warmup_stable_decay cannot be made") as caught:
        make_scheduler(optimizer, options, 10)
    assert "lr_scheduler_kwargs" in caught.value.remedy


def test_total_steps_of_epochs() -> None:
    job = make_job(max_steps=None, epochs=2.5, batch_size=4, gradient_accumulation_steps=2)
    assert job.train is not None
    assert count_total_steps(job.train, 33) == 11  # ceil(2.5 * 33 / 8)


def test_precision_table(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert Precision.choose("auto", torch.device("cpu")).dtype == torch.float32
    for capability, dtype in (
        ((7, 0), torch.float16),
        ((8, 0), torch.bfloat16),
        ((9, 0), torch.bfloat16),
    ):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda capability=capability: capability
        )
        assert Precision.choose("auto", gpu).dtype == dtype
    assert (
        Precision.choose("fp16", gpu).scales_loss and not Precision.choose("bf16", gpu).scales_loss
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 120 KiB; mounting one needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_while_saving_leaves_the_last_checkpoint(
    tmp_path: Path, small_disk: Path
) -> None:
    folder = small_disk
    job = make_job(save_steps=1, save_total_limit=1000)
    with pytest.raises(StorageError, match=r"[Nn]o space left"):
        run(job, folder)
    saved = checkpoint.list_checkpoints(folder / "checkpoints")
    assert saved, "some fitted"
    assert not list((folder / "checkpoints").glob(".tmp-*")), "nothing half-written"
    shutil.copytree(folder, tmp_path / "larger")
    resumed, _ = run(job, tmp_path / "larger")
    whole, _ = run(job, tmp_path / "whole")
    assert_same(copy_weights(resumed), copy_weights(whole))


@pytest.mark.long
@pytest.mark.usefixtures("half_on_cpu")
def test_a_step_that_overflows_in_half_precision_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss scale starts too high: steps are skipped until it fits, and the schedule waits."""
    monkeypatch.setattr("kd.models.precision.FIRST_SCALE", 2.0**40)
    job = make_job(
        precision="fp16",
        max_steps=40,
        logging_steps=1,
        eval_steps=40,
        save_steps=40,
    )
    student, _ = run(job, tmp_path, dropout=0.0)
    rates = [
        line["learning_rate"]
        for line in read_metrics(tmp_path / "metrics.jsonl")
        if line["type"] == "metrics"
    ]
    assert rates[0] == rates[1] == 0.0, "warm-up has not begun"
    assert len(set(rates)) > 4, "and then it goes on"
    (check,) = [
        line
        for line in read_metrics(tmp_path / "metrics.jsonl")
        if line.get("check") == "gradients"
    ]
    assert check["ok"], "clipping by an infinite norm would turn all gradients into 0"
    scalars = [line for line in read_history(tmp_path) if line["type"] == "scalars"]
    assert scalars[0]["loss_scale/scale"] == 2.0**40 > scalars[-1]["loss_scale/scale"]
    lost = [line["loss_scale/overflowed_steps"] for line in scalars]
    assert lost[0] == 1 and lost == sorted(lost) and lost[-1] == rates.count(0.0) - 1
    assert all(torch.isfinite(tensor).all() for tensor in copy_weights(student).values())
