"""How many positions have logits at a time, and the bytes that this moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.support.small.caches import make_codec, make_identity
from kd.loss.chunk_size import (
    GPU_ELEMENTS,
    GPU_SHARE,
    PLAIN_LOGIT_BYTES,
    choose_gpu_chunk_positions,
    count_head_gradient_bytes,
    suits_kernels,
)
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.targets import Targets
from kd.models.lm_head import LMHead

pytestmark = pytest.mark.usefixtures("one_thread")
GIB = 2**30
N = 23
V = 41
D = 8


@pytest.mark.parametrize("vocabulary", [2_048, 49_152, 151_669, 262_144])
@pytest.mark.parametrize("logit_bytes", [2, 4, PLAIN_LOGIT_BYTES])
def test_a_chunk_of_a_gpu_is_a_power_of_two_within_its_share(
    vocabulary: int, logit_bytes: int
) -> None:
    sizes = [
        choose_gpu_chunk_positions(vocabulary, free * GIB, logit_bytes) for free in range(1, 200)
    ]
    for free, size in enumerate(sizes, 1):
        assert size & (size - 1) == 0
        share = min(free * GIB * GPU_SHARE / logit_bytes, GPU_ELEMENTS) / vocabulary
        assert size == 1 or share / 2 < size <= share
    assert sizes == sorted(sizes)
    assert len(set(sizes)) <= 9, "it changes where the free memory doubles, and nowhere else"
    assert choose_gpu_chunk_positions(vocabulary, 0, logit_bytes) == 1


def test_kernels_leave_room_for_eight_times_as_many_logits() -> None:
    free = 2 * GIB
    in_kernels = choose_gpu_chunk_positions(49_152, free, 2)
    assert in_kernels == 8 * choose_gpu_chunk_positions(49_152, free)


@pytest.mark.parametrize(
    ("profile", "divergence", "suits"),
    [
        ("threshold", "forward_kl", True),
        ("tempered", "forward_kl", True),
        (None, "forward_kl", True),
        ("topk", "forward_kl", False),
        ("hidden", "forward_kl", False),
        ("dense", "reverse_kl", False),
    ],
)
def test_the_kernels_know_sampled_records_and_labels(
    profile: str | None, divergence: str, suits: bool
) -> None:
    codec = None
    if profile is not None:
        codec = make_identity(300, codec=make_codec(profile)).record_codec()
    assert suits_kernels(codec, divergence) == suits


#: How often an operation moves the tensor that it writes.
MOVES = {"mm.out": 1, "addmm_.default": 2, "mul_.Tensor": 2}


class GradientTraffic(TorchDispatchMode):
    """Counts the bytes that operations read and write of the gradient of a weight (V, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        found = function(*arguments, **(named or {}))
        if isinstance(found, Tensor) and found.shape == (V, D):
            name = str(function).removeprefix("aten.")
            self.bytes += MOVES.get(name, 0) * found.nbytes
        return found


def compute_gradient(count: int, chunk: int) -> tuple[Tensor, int]:
    """The gradient of a weight with three rows of padding, and the bytes that it moved."""
    generator = torch.Generator().manual_seed(1)
    hidden_ND = torch.randn(count, D, generator=generator)
    weight = torch.randn(V + 3, D, generator=generator).requires_grad_()
    head = LMHead(weight, None, 1.0, None, V)
    targets = Targets(torch.randint(V, (count,), generator=generator), None)
    torch.full((V + 3, D), torch.nan)  # memory that a new tensor may get
    with GradientTraffic() as traffic:
        compute_distillation_loss(hidden_ND, head, targets, Objective(1.0), chunk).total.backward()
    assert weight.grad is not None
    return weight.grad, traffic.bytes


@pytest.mark.parametrize("chunk", [1, 4, 7, N])
def test_the_bytes_of_the_weight_s_gradient_are_those_that_a_pass_moves(chunk: int) -> None:
    gradient, moved = compute_gradient(N, chunk)
    # The whole weight is scaled in the end, its padding included: here that is not counted.
    scaled = 2 * 4 * V * D
    assert moved + scaled == count_head_gradient_bytes(V * D, -(-N // chunk))
    assert torch.equal(gradient[V:], torch.zeros(3, D))
    torch.testing.assert_close(gradient, compute_gradient(N, N)[0])


def test_the_gradient_of_no_position_is_zero() -> None:
    assert torch.equal(compute_gradient(0, 4)[0], torch.zeros(V + 3, D))
