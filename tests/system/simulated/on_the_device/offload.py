"""Activations that wait on the host: copies beside the device's work, and the same gradients.

Each test that leaves out a wait shows that the simulated GPU would see it missing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kd.memory import activation_offload
from kd.memory.activation_checkpointing import checkpoint_activations
from kd.memory.activation_offload import offload_activations
from kd.models.layers import compute_hidden_states, find_decoder_layers
from kd.text.steps.pinned import find_copy_stream
from tests.support.kd.students import make_llama
from tests.support.simulated_gpu.streams import WAITS, CudaMisused

GPU = torch.device("cuda", 0)
LAYERS = 4
TOKENS_BL = torch.arange(256).remainder(50).view(4, 64)


def make_student(how: Any, offloaded: bool) -> PreTrainedModel:
    student = make_llama(50, 64, LAYERS).to(GPU).train()
    checkpoint_activations(student, how)
    if offloaded:
        offload_activations(student)
    return student


def compute_gradients(student: PreTrainedModel) -> list[Tensor]:
    """The gradients of two micro-batches, which are added up."""
    tokens_BL = TOKENS_BL.to(GPU)
    for batch in (tokens_BL, tokens_BL.flip(1)):
        compute_hidden_states(student, batch).square().sum().backward()
    return [each.grad.cpu() for each in student.parameters() if each.grad is not None]


def differs(how: Any = "none") -> bool:
    """Whether the offload changes a gradient."""
    found = compute_gradients(make_student(how, True))
    expected = compute_gradients(make_student(how, False))
    assert len(found) == len(expected) > LAYERS
    return not all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("how", ["none", "full", "sqrt", 2])
def test_gradients_are_the_same_to_the_bit(how: Any) -> None:
    assert not differs(how)


def test_bytes_that_have_not_arrived_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload._HostCopy, "fetch", activation_offload._HostCopy.begin)
    assert differs()


def test_memory_that_is_given_back_too_early_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(copies: Any) -> None:
        copies.originals.clear()
        copies.by_address.clear()

    monkeypatch.setattr(activation_offload._LayerCopies, "forget_originals", forget)
    with pytest.raises(CudaMisused, match="record_stream"):
        differs()


def test_copies_that_do_not_wait_for_the_work_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def hurry(device: torch.device, purpose: str) -> Iterator[torch.cuda.Stream]:
        with torch.cuda.stream(find_copy_stream(device, purpose)) as stream:
            yield stream

    monkeypatch.setattr(activation_offload, "beside_work", hurry)
    with pytest.raises(CudaMisused, match="had not waited"):
        differs()


@pytest.mark.parametrize(("how", "copied"), [("none", LAYERS), ("full", LAYERS), ("sqrt", 2)])
def test_copies_come_back_while_the_layer_above_is_computed(
    how: Any, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those of the last layer are asked for before they are on their way."""
    late = set()
    fetch = activation_offload._HostCopy.fetch

    def note(copy: Any) -> Tensor:
        if copy.back is None:
            late.add(id(copy.layer))
        layers.append(copy.layer)
        return fetch(copy)

    layers: list[Any] = []
    monkeypatch.setattr(activation_offload._HostCopy, "fetch", note)
    student = make_student(how, True)
    hidden_BLD = compute_hidden_states(student, TOKENS_BL.to(GPU))
    before = WAITS.total()
    hidden_BLD.square().sum().backward()
    assert WAITS.total() == before
    assert len({id(each) for each in layers}) == copied
    assert late == {id(layers[0])}


def test_a_backward_pass_that_breaks_off_leaves_no_copy_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    student = make_student("full", True)
    hidden_BLD = compute_hidden_states(student, TOKENS_BL.to(GPU))

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    find_decoder_layers(student)[-1].mlp.register_forward_pre_hook(fail)
    stream = find_copy_stream(GPU, activation_offload.STREAM)
    with pytest.raises(RuntimeError, match="out of memory"):
        hidden_BLD.square().sum().backward()
    assert not stream.query(), "the layer below is on its way"
    del hidden_BLD
    gc.collect()
    assert stream.query()
