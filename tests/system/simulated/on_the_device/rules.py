"""The simulated GPU computes as a CPU does, and breaks where a GPU would, or should."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from kd.capture.host_copy import HostCopy
from kd.text.steps.pinned import copy_to_device
from tests.support.simulated_gpu.streams import WAITS, CudaMisused
from tests.support.simulated_gpu.tensors import DevicesMixed, SimulatedTensor

GPU = torch.device("cuda")
NOT_WRITTEN = 0xAB


def test_a_model_trains_as_on_a_cpu() -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    there = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    there.load_state_dict(here.state_dict())
    there.to(GPU)
    values = torch.randn(4, 5)
    for model, inputs in ((here, values), (there, values.to(GPU))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), inputs.argmax(-1) % 2).backward()
            optimizer.step()
    for mine, theirs in zip(here.parameters(), there.parameters(), strict=True):
        assert theirs.device == torch.device("cuda:0")
        torch.testing.assert_close(theirs.cpu(), mine)


@pytest.mark.parametrize(
    "mix",
    [
        lambda there, here: there + here,
        lambda there, here: torch.cat([there, here]),
        lambda there, here: here[there.long()],
        lambda there, here: there.add_(here),
        lambda there, here: torch.where(there > 1, there, here),
    ],
)
def test_an_operation_takes_tensors_of_one_device(mix: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(DevicesMixed, match="two devices"):
        mix(torch.arange(3.0, device=GPU), torch.arange(3.0))


def test_numbers_and_indices_of_the_host_are_taken() -> None:
    there = torch.arange(3.0, device=GPU)
    assert (there * torch.tensor(2.0)).tolist() == [0.0, 2.0, 4.0]
    assert there[torch.tensor([2, 0])].tolist() == [2.0, 0.0]
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()


def test_waits_are_counted() -> None:
    there = torch.arange(3.0, device=GPU)
    before = WAITS.copy()
    there.sum().item()
    there.nonzero()
    there.cpu()
    assert WAITS - before == {
        "_local_scalar_dense": 1, "nonzero": 1, "copy to the host": 1,
    }  # fmt: skip


# ---------------------------------------------------------------------- copies


def start_copy() -> tuple[HostCopy, np.ndarray]:
    values = np.arange(1, 5, dtype=np.uint8)
    return HostCopy.start({"values": copy_to_device(values, GPU)}), values


def test_a_copy_arrives_when_somebody_waits_and_not_before() -> None:
    copy, values = start_copy()
    assert copy.tensors["packed"].tolist() == [NOT_WRITTEN] * 4
    np.testing.assert_array_equal(copy.wait()["values"], values)


def test_memory_that_a_second_stream_reads_must_be_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SimulatedTensor, "record_stream", lambda *_: None)
    copy, _ = start_copy()
    with pytest.raises(CudaMisused, match="record_stream"):
        copy.wait()


def test_a_pinned_source_must_not_change_before_its_copy_has_ended() -> None:
    source = torch.arange(4.0).pin_memory()
    there = source.to(GPU, non_blocking=True)
    torch.cuda.synchronize()
    source.zero_()  # the copy has ended
    source.to(GPU, non_blocking=True)
    source.fill_(1.0)
    with pytest.raises(CudaMisused, match="was written before"):
        torch.cuda.synchronize()
    assert there.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_copy_into_memory_that_is_not_pinned_must_block() -> None:
    there = torch.arange(3.0, device=GPU)
    with pytest.raises(CudaMisused, match="not pinned"):
        there.to("cpu", non_blocking=True)
    with pytest.raises(CudaMisused, match="not pinned"):
        torch.empty(3).copy_(there, non_blocking=True)


def test_pinned_memory_is_told_from_other_memory() -> None:
    pinned = torch.arange(64.0).pin_memory()
    assert pinned.is_pinned() and pinned[8:].is_pinned()
    assert pinned.tolist() == list(range(64))
    assert not torch.arange(64.0).is_pinned()


# ---------------------------------------------------------------------- attention


@pytest.mark.parametrize("window", [(-1, 0), (2, 0)])
def test_variable_length_attention_equals_that_of_each_document(window: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 4, 6]
    q_THD, k_TKD, v_TKD = (
        torch.randn(11, heads, 8, generator=generator, dtype=torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    )
    there = [each.detach().to(GPU).requires_grad_() for each in (q_THD, k_TKD, v_TKD)]
    bounds_C = torch.tensor([0, 1, 5, 11], dtype=torch.int32, device=GPU)
    found = varlen_attn(*there, bounds_C, bounds_C, 6, 6, window_size=window, enable_gqa=True)
    parts = []
    for q, k, v in zip(*(each.split(lengths) for each in (q_THD, k_TKD, v_TKD)), strict=True):
        place = torch.arange(len(q))
        distance = place[:, None] - place
        seen = (distance >= 0) & ((distance <= window[0]) | (window[0] < 0))
        parts.append(
            functional.scaled_dot_product_attention(
                *(each.transpose(0, 1).float() for each in (q, k, v)), seen, enable_gqa=True
            ).transpose(0, 1)
        )
    expected = torch.cat(parts)
    torch.testing.assert_close(found.cpu().float(), expected, atol=2e-2, rtol=2e-2)
    grad_THD = torch.randn(expected.shape, generator=generator)
    expected.backward(grad_THD)
    found.backward(grad_THD.to(GPU, torch.bfloat16))
    for mine, theirs in zip((q_THD, k_TKD, v_TKD), there, strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(theirs.grad.cpu(), mine.grad, atol=4e-2, rtol=4e-2)
