"""Random targets of each form, LM heads of each shape, and the reference for the loss over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kd.loss.dense import compute_dense_loss as dense_loss_of
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.sparse_targets import SparseTarget
from kd.loss.targets import Targets, TeacherTarget
from kd.loss.whole_targets import DenseTarget, HiddenTarget, TopTarget
from kd.models.lm_head import LMHead

#: Positions with a target, the vocabulary, and the width of the hidden states.
N = 23
V = 61
D = 12
PROFILES = ["sparse", "top", "dense", "hidden"]


def random_entries(
    generator: torch.Generator, positions: int = N, vocabulary: int = V
) -> SparseTarget:
    """Return entries; in rows of more than two one weight is slightly negative, as after rounding.

    The weights of the rows sum to 1, 0.6 and 1.5 in turn, as those of a sample may.
    """
    counts = torch.randint(1, 9, (positions,), generator=generator)
    ids = torch.cat(
        [torch.randperm(vocabulary, generator=generator)[:count] for count in counts.tolist()]
    )
    parts = []
    for row, count in enumerate(counts.tolist()):
        weight = torch.rand(count, generator=generator, dtype=torch.float64) + 0.1
        weight = weight / weight.sum()
        if count > 2:
            weight[0] = -0.003
            weight[1:] *= 1.003 / weight[1:].sum()
        parts.append(weight * (1.0, 0.6, 1.5)[row % 3])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    entropy = torch.rand(positions, generator=generator, dtype=torch.float64) * 3
    return SparseTarget(offsets, ids, torch.cat(parts), entropy, torch.where(counts > 4, 2, 0))


def random_target(profile: str, generator: torch.Generator, temperature: float) -> TeacherTarget:
    logits_NV = torch.randn(N, V, generator=generator) * 3
    if profile == "sparse":
        return random_entries(generator)
    if profile == "top":
        top = torch.softmax(logits_NV.double(), 1).topk(7, 1)
        return TopTarget(top.indices, top.values, 1.0 - top.values.sum(1))
    if profile == "dense":
        return DenseTarget(torch.log_softmax(logits_NV, 1).half(), temperature)
    head = LMHead(
        torch.randn(V + 2, 5, generator=generator),
        torch.randn(V + 2, generator=generator),
        1.5,
        6.0,
        V,
    )
    codes = torch.randint(-127, 128, (N, 5), generator=generator).to(torch.int8)
    return HiddenTarget(codes, torch.rand(N, generator=generator) / 60, head, temperature)


def dense_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, head: LMHead, targets: Targets, alpha: float
) -> Tensor:
    """Return the dense reference of the objective."""
    return dense_loss_of(
        x, replace(head, weight=weight, bias=bias), targets, Objective(alpha)
    ).total


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def random_targets(seed: int, profile: str = "sparse", temperature: float = 1.0) -> Targets:
    generator = torch.Generator().manual_seed(seed)
    target = random_target(profile, generator, temperature)
    gold_N = torch.randint(0, V, (N,), generator=generator)
    entropy_N = 3 * torch.rand(N, generator=generator).double()
    entropy_N[4] = torch.nan  # a cache may not know the entropy of a position
    return Targets(gold_N, target, temperature, entropy_N)


# 23 positions are no multiple of 3: the last chunk is shorter.
CHUNKS = pytest.mark.parametrize("chunk", [None, 3], ids=["one chunk", "many chunks"])


@dataclass(frozen=True)
class Shape:
    """A student's LM head has these besides a plain matrix."""

    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    padding: int = 0


SHAPES = {
    "plain": Shape(),
    "bias": Shape(bias=True),
    "scale+padding": Shape(scale=0.0625, padding=3),
    "softcap": Shape(softcap=2.5),
    "all": Shape(True, 1.7, 4.0, 3),
}


def require_parity(
    targets: Targets,
    shape: Shape,
    objective: Objective,
    chunk: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compare the value, the parts and each gradient with the dense float64 reference.

    The tolerance is 1e-5 in float32 and 1e-10 in float64.
    """
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V + shape.padding, D, generator=generator).to(dtype).requires_grad_()
    bias = (
        torch.randn(V + shape.padding, generator=generator).to(dtype).requires_grad_()
        if shape.bias
        else None
    )
    head = LMHead(weight, bias, shape.scale, shape.softcap, V)

    terms = compute_distillation_loss(x, head, targets, objective, chunk)
    (terms.total / 7).backward()

    wide = [
        None if each is None else each.detach().double().requires_grad_()
        for each in (x, weight, bias)
    ]
    plain = replace(head, weight=wide[1], bias=wide[2])
    theirs = targets
    if isinstance(targets.temperature, Tensor):
        theirs = replace(targets, temperature=targets.temperature.detach().clone().requires_grad_())
    expected = dense_loss_of(wide[0], plain, theirs, objective)
    (expected.total / 7).backward()
    for name in ("total", "kd", "ce", "z", "entropy", "smoothing"):
        found, reference = (getattr(each, name).item() for each in (terms, expected))
        assert found == pytest.approx(reference, rel=tolerance, abs=1e-12), name
    parts = (
        (1 - objective.alpha) * terms.kd + objective.alpha * (terms.ce + terms.smoothing) + terms.z
    )
    assert float(parts) == pytest.approx(terms.total.item(), rel=1e-12)
    for ours, reference in zip((x, weight, bias), wide, strict=True):
        if ours is not None:
            assert relative(ours.grad, reference.grad) < tolerance
    if isinstance(targets.temperature, Tensor) and targets.temperature.requires_grad:
        slope = theirs.temperature.grad.item() if theirs.temperature.grad is not None else 0.0
        assert targets.temperature.grad.item() == pytest.approx(slope, rel=tolerance, abs=tolerance)
    if shape.padding:
        assert not weight.grad[V:].any(), "padding must not be trained"


LEVERS = {
    "plain": Objective(0.2),
    "smoothing": Objective(0.3, label_smoothing=0.1),
    "z": Objective(0.0, z_loss=0.01),
    "weights": Objective(0.2, entropy_weighting=-1.5),
    "teacher only": Objective(0.2, teacher_only=True),
    "all": Objective(0.4, label_smoothing=0.2, z_loss=0.02, entropy_weighting=2.0),
    "all, teacher only": Objective(0.4, "forward_kl", 0.5, 0.2, 0.02, 2.0, True),
    "hard only": Objective(1.0, label_smoothing=0.2, z_loss=0.02),
}


def learned(targets: Targets, temperature: float) -> Targets:
    """Return the targets with a temperature that receives a gradient."""
    return replace(
        targets, temperature=torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    )
