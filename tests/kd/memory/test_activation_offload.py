"""Activations that wait in host memory: the same gradients, and counts of what is copied.

The copies are made on a CPU too, where a job is refused because they save nothing.
Shapes: B sequences, L positions, D hidden width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kd.config.train import TrainConfig
from kd.memory import activation_offload
from kd.memory.activation_checkpointing import checkpoint_activations
from kd.memory.activation_offload import offload_activations
from kd.memory.parallel import estimate_rank
from kd.memory.step_bytes import StepShape
from kd.memory.step_memory import describe_step
from kd.models.attention.isolation import isolate_documents
from kd.models.layers import compute_hidden_states, find_decoder_layers
from kd.models.precision import Precision, round_parameters
from kd.text.packed_rows import PackedRows
from tests.support.kd.students import make_llama
from tests.support.kd.zoo import build

FLOAT32 = Precision("cpu", torch.float32)
BFLOAT16 = Precision("cpu", torch.bfloat16)
BATCH, LENGTH, WIDTH, LAYERS = 4, 64, 64, 4
VOCABULARY = 50


def make_student(dropout: float = 0.0) -> PreTrainedModel:
    student = make_llama(VOCABULARY, WIDTH, LAYERS, num_key_value_heads=1,
                         attention_dropout=dropout)  # fmt: skip
    isolate_documents(student)
    return student.train()


def compute_gradients(
    student: PreTrainedModel, precision: Precision = FLOAT32
) -> tuple[Tensor, list[Tensor]]:
    """The hidden states of packed rows of two documents, and the gradient of each parameter."""
    vocabulary = student.config.get_text_config().vocab_size
    torch.manual_seed(0)
    tokens_BL = torch.randint(vocabulary, (BATCH, LENGTH))
    positions_BL = torch.arange(LENGTH).remainder(LENGTH // 2).expand(BATCH, LENGTH)
    with precision.autocast():
        hidden_BLD = compute_hidden_states(student, tokens_BL, PackedRows.of(positions_BL))
    hidden_BLD.float().square().sum().backward()
    gradients = [p.grad for p in student.parameters() if p.grad is not None]
    student.zero_grad(set_to_none=True)
    return hidden_BLD.detach(), gradients


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of each copy to the host, which is really made."""
    sizes: list[int] = []
    real = activation_offload.copy_to_pieces

    def count(flat: Tensor) -> list[Tensor]:
        sizes.append(flat.nbytes)
        return real(flat)

    with monkeypatch.context() as patched:
        patched.setattr(activation_offload, "copy_to_pieces", count)
        yield sizes


def assert_same_gradients(student: PreTrainedModel, precision: Precision, how: Any) -> None:
    other = copy.deepcopy(student)
    checkpoint_activations(student, how)
    checkpoint_activations(other, how)
    offload_activations(other)
    hidden, gradients = compute_gradients(student, precision)
    offloaded, found = compute_gradients(other, precision)
    assert torch.equal(hidden, offloaded)
    assert len(gradients) == len(found) > LAYERS
    assert all(torch.equal(*pair) for pair in zip(gradients, found, strict=True))


@pytest.mark.parametrize("how", ["none", "full", "sqrt", 2])
@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_gradients_are_the_same_to_the_bit(
    precision: Precision, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counting(monkeypatch) as sizes:
        assert_same_gradients(make_student(dropout=0.1), precision, how)
    assert len(sizes) >= 2, "something was copied"


def test_weights_in_bfloat16_have_the_same_gradients() -> None:
    student = make_student()
    round_parameters(student, torch.bfloat16)
    assert_same_gradients(student, BFLOAT16, "none")


def test_experts_have_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    student = build("mixtral", hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS)
    with counting(monkeypatch) as sizes:
        assert_same_gradients(student.train(), FLOAT32, "none")
    assert sizes


def measure_kept_bytes(student: PreTrainedModel, least: int = 2**16) -> int:
    """The bytes of all memory that the layers keep, counted by another path than the code's.

    It is that of tensors of ``least`` bytes or more; parameters are known by their addresses.
    """
    known = {each.untyped_storage().data_ptr() for each in student.parameters()}
    kept: dict[tuple[int, int], int] = {}
    alive: list[Tensor] = []
    inside: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in known and storage.nbytes() >= least:
            kept[inside[-1], storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    for number, layer in enumerate(find_decoder_layers(student)):
        layer.register_forward_pre_hook(lambda *_, number=number: inside.append(number))
        layer.register_forward_hook(lambda *_: inside.clear())
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        compute_gradients(student)
    return sum(kept.values())


def test_all_that_layers_keep_is_copied_once_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = measure_kept_bytes(make_student())
    student = make_student()
    offload_activations(student)
    with counting(monkeypatch) as sizes:
        compute_gradients(student)
    assert expected > 10 * LAYERS * BATCH * LENGTH * WIDTH
    assert sum(sizes) == expected


def test_weights_that_autocast_casts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cast matrices of 256 x 256 have 128 KiB; with one short row no activation has 64."""
    student = make_llama(VOCABULARY, 256, 2).train()
    offload_activations(student)
    with counting(monkeypatch) as sizes, BFLOAT16.autocast():
        compute_hidden_states(student, torch.arange(8)[None]).float().sum().backward()
    assert sizes == []


@pytest.mark.parametrize(("how", "groups"), [("full", LAYERS), ("sqrt", 2)])
def test_checkpoints_copy_the_hidden_states_that_enter_them(
    how: Any, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = make_student()
    checkpoint_activations(student, how)
    offload_activations(student)
    with counting(monkeypatch) as sizes:
        compute_gradients(student)
    assert sizes == [4 * BATCH * LENGTH * WIDTH] * groups


def test_an_evaluation_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    student = make_student()
    offload_activations(student)
    with counting(monkeypatch) as sizes:
        compute_gradients(student.eval())
        with torch.no_grad():
            compute_hidden_states(student.train(), torch.arange(50).expand(8, 50))
    assert sizes == []


def test_a_pass_that_fails_leaves_no_hook_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    student = make_student()
    offload_activations(student)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = find_decoder_layers(student)[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        compute_gradients(student)
    handle.remove()
    with counting(monkeypatch) as sizes:
        values = torch.ones(2**16, requires_grad=True) * 2
        values.square().sum().backward()
    assert sizes == []


# ---------------------------------------------------------------------- what is told of it


def describe(student: PreTrainedModel, **changes: Any) -> StepShape:
    options = TrainConfig(max_steps=1, batch_size=BATCH).model_copy(update=changes)
    return describe_step(student, options, LENGTH, VOCABULARY, FLOAT32)


def estimate(student: PreTrainedModel, **changes: Any) -> int:
    return describe(student, **changes).estimate().activations


def test_two_layers_stay_on_the_device() -> None:
    student = make_student()
    plain = estimate(student)
    offloaded = estimate(student, activation_offload=True)
    layer = (plain - offloaded) / (LAYERS - 2)
    # The widths of its matrices tell within a third what a layer keeps.
    assert layer == pytest.approx(measure_kept_bytes(make_student(), 1) / LAYERS, rel=1 / 3)
    boundary = 4 * BATCH * LENGTH * WIDTH
    full = estimate(student, gradient_checkpointing="full")
    both = estimate(student, gradient_checkpointing="full", activation_offload=True)
    assert full - both == pytest.approx((LAYERS - 1) * boundary, abs=2)


@pytest.mark.parametrize(("how", "tolerance"), [("none", 1 / 3), ("full", 0.0), ("sqrt", 0.0)])
def test_the_memory_of_the_host_is_counted(
    how: Any, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = make_student()
    changes = {"activation_offload": True, "gradient_checkpointing": how}
    memory = estimate_rank(describe(student, **changes), "single", 1)
    checkpoint_activations(student, how)
    offload_activations(student)
    with counting(monkeypatch) as sizes:
        compute_gradients(student)
    assert memory.offloaded == pytest.approx(sum(sizes), rel=tolerance)
    assert estimate_rank(describe(student), "single", 1).offloaded == 0
    assert memory.warn_of_host(2 * memory.offloaded, 2) is None
    warning = memory.warn_of_host(2 * memory.offloaded - 1, 2)
    assert warning is not None
    assert "train.activation_offload" in warning
    # Batches are those of all ranks.
    plain = estimate_rank(describe(student), "single", 1)
    assert plain.warn_of_host(2**20, 2, 2**20) is None
    assert "train.batch_size" in (plain.warn_of_host(2**20, 2, 2**20 + 1) or "")
