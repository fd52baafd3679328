"""The estimates of a step's memory and of an optimiser's state, against the real ones."""

from __future__ import annotations

import gc
import mmap
import os
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from kd.config.train import TrainConfig
from kd.files import format_bytes
from kd.memory.step_bytes import StepMemory
from kd.memory.step_memory import (
    estimate_optimizer_bytes,
    measure_free_memory,
    read_peak_memory,
    reset_peak_memory,
)
from kd.models.layers import compute_hidden_states
from kd.models.precision import Precision, round_parameters
from kd.text.packed_rows import PackedRows
from tests.support.kd.memory_script import run_memory_script
from tests.support.kd.optimizers import measure_optimizer_bytes
from tests.support.kd.quantizers import needs_torchao
from tests.support.kd.students import make_llama
from tests.support.kd.training import estimate_memory
from tests.support.kd.zoo import build

CPU = torch.device("cpu")
FLOAT32 = Precision("cpu", torch.float32)
linux = pytest.mark.skipif(sys.platform != "linux", reason="these accounts are Linux's")


def make_options(**changes: Any) -> TrainConfig:
    return TrainConfig(max_steps=1, batch_size=4).model_copy(update=changes)


def make_student(dropout: float = 0.0, tied: bool = True) -> PreTrainedModel:
    return make_llama(layers=3, attention_dropout=dropout, tie_word_embeddings=tied)


def estimate(student: PreTrainedModel, **changes: Any) -> StepMemory:
    return estimate_memory(student, make_options(**changes), 48, 50, FLOAT32)


# ---------------------------------------------------------------------- the parts


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_gradients_are_counted_once(tied: bool) -> None:
    student = make_student(tied=tied)
    numbers = sum(each.numel() for each in student.parameters())
    found = estimate(student)
    assert found.gradients == 4 * numbers
    assert found.weights == 4 * numbers + sum(4 * each.numel() for each in student.buffers())
    student.base_model.requires_grad_(False)
    assert estimate(student).gradients == (0 if tied else 4 * 16 * 50)


def make_gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    )


def make_mixtral() -> PreTrainedModel:
    """A model whose layers have one tensor of three axes for all experts, which Muon skips."""
    return build("mixtral")


def make_wide_student() -> PreTrainedModel:
    """A model whose matrices are large enough for a state of 8 bits."""
    return make_llama(width=64, num_key_value_heads=1)


def make_wide_mixtral() -> PreTrainedModel:
    return build("mixtral", hidden_size=64, intermediate_size=64)


@pytest.mark.parametrize("make", [make_student, make_gpt2, make_mixtral])
@pytest.mark.parametrize(
    "optim",
    [
        "adamw",
        pytest.param("adamw_8bit", marks=needs_torchao),
        "adafactor",
        "muon",
        "lion",
        "lars",
        "schedule_free",
    ],
)
def test_the_optimiser_s_state_is_what_it_really_keeps(optim: str, make: Any) -> None:
    options = make_options(optim=optim)
    assert estimate_optimizer_bytes(make(), options) == measure_optimizer_bytes(make(), options)


@needs_torchao
@pytest.mark.parametrize("make", [make_wide_student, make_wide_mixtral])
def test_a_state_of_eight_bits_is_what_it_really_keeps(make: Any) -> None:
    sizes = {}
    for optim in ("adamw", "adamw_8bit"):
        options = make_options(optim=optim)
        sizes[optim] = estimate_optimizer_bytes(make(), options)
        assert sizes[optim] == measure_optimizer_bytes(make(), options)
    assert sizes["adamw_8bit"] < 0.6 * sizes["adamw"]


def test_a_moving_average_is_one_more_copy() -> None:
    student = make_student()
    numbers = sum(each.numel() for each in student.parameters())
    assert estimate_optimizer_bytes(student, make_options(ema_decay=0.9)) == 3 * 4 * numbers


def test_pure_bfloat16_halves_weights_and_gradients_and_nothing_else() -> None:
    numbers = sum(each.numel() for each in make_student().parameters())
    plain = estimate(make_student(), ema_decay=0.9)
    options = {"precision": "bf16_pure", "ema_decay": 0.9}
    told = estimate(make_student(), **options)
    rounded = make_student()
    round_parameters(rounded, torch.bfloat16)
    # The same is told of a student that is rounded already and of one that is not.
    for found in (told, estimate(rounded, **options)):
        assert plain.weights - found.weights == 2 * numbers
        assert (found.gradients, plain.gradients) == (2 * numbers, 4 * numbers)
        # The average, and a state in float32 as it really is.
        assert found.optimizer == plain.optimizer == 3 * 4 * numbers
        assert found.head == plain.head
    pure = make_options(precision="bf16_pure")
    assert measure_optimizer_bytes(rounded, pure) == 2 * 4 * numbers


def kept_by_a_pass(student: PreTrainedModel, batch: int, length: int) -> int:
    """Bytes of the distinct tensors that autograd keeps, without the parameters."""
    parameters = {each.data_ptr() for each in student.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    positions_BL = torch.cat([torch.arange(length // 2), torch.arange(length // 2)]).expand(
        batch, length
    )
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = compute_hidden_states(
            student.train(),
            torch.zeros(batch, length, dtype=torch.int64),
            PackedRows.of(positions_BL),
        )
    assert hidden.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("make", [make_student, make_wide_student, make_wide_mixtral])
@pytest.mark.parametrize("batch", [1, 4])
def test_activations_are_told_by_the_widths_of_the_matrices(batch: int, make: Any) -> None:
    """Within a third of what autograd keeps; half a layer of gradients comes on top."""
    student = make()
    real = kept_by_a_pass(make(), batch, 48)
    layers = student.config.get_text_config().num_hidden_layers
    found = estimate(student, batch_size=batch).activations
    assert found == pytest.approx(real * (1 + 0.5 / layers), rel=1 / 3)


def test_checkpointing_keeps_as_many_layers_as_it_says() -> None:
    """Three layers keep all activations, those of two layers, or none.

    With checkpointing, the backward pass also holds one layer that it recomputes.
    """
    none, third, full = (
        estimate(make_student(), gradient_checkpointing=how).activations
        for how in ("none", 3, "full")
    )
    boundary = 4 * 48 * 16 * 4
    layer = (none - full + 3 * boundary) / 2
    assert layer > boundary
    assert none - third == pytest.approx(-boundary, abs=2)
    assert none - full == pytest.approx(2 * layer - 3 * boundary, abs=2)


def test_the_head_holds_a_chunk() -> None:
    small, large = (estimate(make_student(), logits_chunk=chunk).head for chunk in (4, 64))
    assert large - small == 2 * 4 * 60 * 50
    assert (
        estimate(make_student(), logits_chunk=10**6).head
        == estimate(make_student(), logits_chunk=4 * 48).head
    )


def test_an_estimate_is_a_sentence_and_a_warning() -> None:
    found = StepMemory(
        weights=2**20, gradients=2**20, optimizer=2**21, activations=3 * 2**30, head=512
    )
    assert found.total == 2**22 + 3 * 2**30 + 512
    assert "expected to need 3.004 GiB" in str(found)
    assert "activations 3 GiB" in str(found)
    offloading = replace(found, offloaded=2**31)
    assert offloading.total == found.total
    assert str(offloading) == f"{found} 2 GiB more lie in the host's memory."
    assert found.warning(None) is None
    assert found.warning(found.total) is None
    assert "3 GiB is free beside the weights" in (found.warning(3 * 2**30 + found.weights) or "")


# ---------------------------------------------------------------------- measured


@linux
def test_the_peak_is_measured_and_restarts() -> None:
    gc.collect()  # memory of other tests must not be freed during this one
    reset_peak_memory(CPU)
    before = read_peak_memory(CPU)
    with mmap.mmap(
        -1, 64 * 2**20
    ) as fresh:  # what malloc gives may be pages that the process has had all along
        for page in range(0, len(fresh), mmap.PAGESIZE):
            fresh[page] = 1
    assert read_peak_memory(CPU) - before == pytest.approx(64 * 2**20, rel=0.1)


@linux
def test_free_memory_is_less_than_the_machine_s() -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < (measure_free_memory(CPU) or 0) < machine


def test_bytes_are_readable() -> None:
    assert [format_bytes(size) for size in (512, 2048, 3.5 * 2**30, 2**41)] == [
        "512 bytes",
        "2 KiB",
        "3.5 GiB",
        "2 TiB",
    ]


CHILD = """
import json, sys
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from kd.config.train import TrainConfig
from kd.files import format_bytes
from kd.memory.activation_checkpointing import checkpoint_activations
from kd.memory.step_memory import read_peak_memory, reset_peak_memory
from tests.support.kd.training import estimate_memory
from kd.models.layers import compute_hidden_states
from kd.models.precision import Precision, round_parameters
from kd.text.packed_rows import PackedRows

CPU = torch.device("cpu")
B = 4
L = 128
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 9,
    "num_attention_heads": 3,
}
positions_BL = torch.arange(L // 2).repeat(2).expand(B, L)
found = {}
for name, ways in {"float32": ("full", "sqrt", 3, "none"), "bfloat16": ("sqrt", "none")}.items():
    precision = Precision("cpu", getattr(torch, name))
    for how in ways:
        student = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()
        options = TrainConfig(max_steps=1, batch_size=B, gradient_checkpointing=how)
        expected = estimate_memory(student, options, L, 512, precision).activations
        checkpoint_activations(student, how)
        for _ in range(2):
            reset_peak_memory(CPU)
            before = read_peak_memory(CPU)
            with precision.autocast():
                tokens_BL = torch.zeros(B, L, dtype=torch.int64)
                hidden = compute_hidden_states(student, tokens_BL, PackedRows.of(positions_BL))
            hidden.float().square().mean().backward()
            del hidden
        found[f"{name} {how}"] = [expected, read_peak_memory(CPU) - before]
print(json.dumps(found))
"""


@pytest.mark.long
def test_the_estimate_is_what_a_step_takes() -> None:
    """The estimate is within a quarter of the measured peak, for every way of checkpointing.

    Measured in a second step, when the gradients exist already.
    """
    # Freed memory goes back to the system at once, so that its account is of what is in use.
    found = run_memory_script(CHILD, MALLOC_TRIM_THRESHOLD_="65536")
    assert len(found) == 6
    assert {
        name: real for name, (expected, real) in found.items() if not 0.9 < expected / real < 1.25
    } == {}, found
