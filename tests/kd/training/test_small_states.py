"""Trainings that need less memory, through the whole loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kd.config.job import JobConfig
from kd.errors import Interrupted
from kd.progress import SILENT, Monitor
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.text.packing import Document, pack_documents
from kd.tracking.metrics import read_metrics
from kd.training.loop import train
from tests.support.kd.quantizers import needs_torchao
from tests.support.kd.students import assert_same, copy_weights, make_llama
from tests.support.kd.training import make_text_job, stop_after

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 50
STEPS = 7


def make_job(**changes: Any) -> JobConfig:
    options = {"max_steps": STEPS, "batch_size": 4, "eval_steps": 3, "save_steps": 2}
    rest = {"logging_steps": 1, "learning_rate": 1e-2, "early_stopping_patience": 100}
    return make_text_job(options | rest | changes)


def make_source(job: JobConfig) -> PlainText:
    """Rows in which each token is mostly the one before it plus three."""
    generator = np.random.default_rng(0)
    jumps = 3 + (generator.random((40, 16)) < 0.2) * generator.integers(0, VOCABULARY, (40, 16))
    rows = (jumps.cumsum(1) % VOCABULARY).astype(np.uint32)
    texts = [Document(row) for row in rows]
    return PlainText(Corpus(*(pack_documents(part, job.data) for part in (texts[4:], texts[:4]))))


def run(job: JobConfig, folder: Path, monitor: Monitor = SILENT) -> dict[str, Tensor]:
    """The weights that training leaves."""
    student = make_llama(VOCABULARY, width=64, attention_dropout=0.1)
    train(job, make_source(job), student, VOCABULARY, folder, monitor)
    return copy_weights(student)


def assert_stops_change_nothing(job: JobConfig, folder: Path) -> dict[str, Tensor]:
    """Stop the training of ``job`` twice; it must end as one that was not stopped."""
    whole = run(job, folder / "whole")
    for step in (1, 4):
        with pytest.raises(Interrupted):
            run(job, folder / "cut", stop_after(step))
    assert_same(run(job, folder / "cut"), whole)
    return whole


# ---------------------------------------------------------------------- a state of 8 bits


@needs_torchao
@pytest.mark.parametrize("ema", [None, 0.9], ids=["", "with an average"])
def test_a_state_of_eight_bits_resumes_bit_for_bit(tmp_path: Path, ema: float | None) -> None:
    job = make_job(optim="adamw_8bit", ema_decay=ema)
    found = assert_stops_change_nothing(job, tmp_path)
    plain = run(make_job(ema_decay=ema), tmp_path / "plain")
    assert any(not torch.equal(found[name], plain[name]) for name in plain), "it is connected"


@needs_torchao
def test_its_checkpoint_holds_plain_tensors(tmp_path: Path) -> None:
    run(make_job(optim="adamw_8bit"), tmp_path)
    folder = sorted((tmp_path / "checkpoints").iterdir())[-1]
    tensors = load_file(folder / "optimizer.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight.exp_avg"
    parts = {key: each for key, each in tensors.items() if key.startswith(f"{name}/")}
    assert {key: (each.dtype, each.numel()) for key, each in parts.items()} == {
        f"{name}/codes": (torch.uint8, 4096),
        f"{name}/scale": (torch.float32, 16),
        f"{name}/qmap": (torch.float32, 256),
    }
    assert tensors["lm_head.weight.exp_avg_sq"].dtype == torch.float32
    groups = json.loads((folder / "state.json").read_text())["groups"]
    assert {type(group["lr"]) for group in groups} == {float}


# ---------------------------------------------------------------------- weights in bfloat16

#: Nats by which the loss of a step may differ from that of float32; training lowers it by 1.
CURVE_TOLERANCE = 0.02


def measure_losses(folder: Path, **changes: Any) -> list[float]:
    """The loss of each of 60 steps that are small beside the weights, about 0.1 in size."""
    rest = {"max_steps": 60, "batch_size": 8, "learning_rate": 1e-4}
    job = make_job(**rest, lr_scheduler_type="constant", **changes)
    student = make_llama(VOCABULARY, width=64, initializer_range=0.1)
    train(job, make_source(job), student, VOCABULARY, folder, SILENT)
    lines = read_metrics(folder / "metrics.jsonl")
    return [line["loss"] for line in lines if line["type"] == "metrics"]


def find_largest_gap(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the training in float32."""
    torch.set_num_threads(1)
    losses = measure_losses(tmp_path_factory.mktemp("float32"))
    assert losses[0] - losses[-1] > 1.0, "the student learns"
    return losses


@pytest.mark.long
@pytest.mark.parametrize("optim", ["adamw", pytest.param("adamw_8bit", marks=needs_torchao)])
def test_weights_in_bfloat16_learn_as_those_in_float32(
    reference: list[float], tmp_path: Path, optim: str
) -> None:
    found = measure_losses(tmp_path, precision="bf16_pure", optim=optim)
    assert find_largest_gap(reference, found) < CURVE_TOLERANCE


@pytest.mark.long
def test_steps_that_are_rounded_to_the_nearest_number_are_lost(
    reference: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this the test above could not fail."""
    monkeypatch.setattr("kd.optim.rounded.copy_stochastic", Tensor.copy_)
    found = measure_losses(tmp_path, precision="bf16_pure")
    assert found[-1] - reference[-1] > 20 * CURVE_TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("optim", ["adamw", pytest.param("adamw_8bit", marks=needs_torchao)])
def test_weights_in_bfloat16_resume_bit_for_bit(tmp_path: Path, optim: str) -> None:
    """With an average in float32, clipping, accumulation and the best weights at the end."""
    job = make_job(
        precision="bf16_pure", optim=optim, ema_decay=0.9, max_grad_norm=0.5, batch_size=2,
        gradient_accumulation_steps=2, gradient_checkpointing="full",
    )  # fmt: skip
    found = assert_stops_change_nothing(job, tmp_path)
    assert {each.dtype for each in found.values()} == {torch.bfloat16}
    folder = sorted((tmp_path / "whole" / "checkpoints").iterdir())[-1]
    weights = load_file(folder / "model.safetensors")
    assert {each.dtype for each in weights.values()} == {torch.bfloat16}
    averages = load_file(folder / "extras.safetensors")
    kinds = {each.dtype for name, each in averages.items() if name.endswith("weight")}
    assert kinds == {torch.float32}


def test_the_floor_of_the_lm_head_changes_weights_in_bfloat16(tmp_path: Path) -> None:
    pure = {"precision": "bf16_pure", "early_stopping_patience": None}
    floored, plain = (
        run(make_job(**pure, lm_head_floor=floor), tmp_path / str(floor)) for floor in (0.5, 0.0)
    )
    assert not torch.equal(floored["lm_head.weight"], plain["lm_head.weight"])


# ---------------------------------------------------------------------- activations on the host


@pytest.mark.long
@pytest.mark.parametrize("how", ["none", "full"])
def test_activations_on_the_host_change_no_weight(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may go on with or without them."""
    # Rows of 16 tokens keep little.
    monkeypatch.setattr("kd.memory.activation_offload.LEAST_BYTES", 2**10)
    jobs = [make_job(gradient_checkpointing=how, activation_offload=on) for on in (False, True)]
    plain = run(jobs[0], tmp_path / "plain")
    assert_same(run(jobs[1], tmp_path / "offloaded"), plain)
    with pytest.raises(Interrupted):
        run(jobs[1], tmp_path / "both", stop_after(3))
    assert_same(run(jobs[0], tmp_path / "both"), plain)
