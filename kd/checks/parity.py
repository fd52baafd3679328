"""The fused loss against the plain one: value and gradients on a few tokens, before any step is taken.

Shapes: N positions that have a target, D hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kd.checks.verdict import Verdict
from kd.dense_loss import dense_loss
from kd.losses import LossTerms, Objective, distillation_loss
from kd.models import Head
from kd.precision import float32_products
from kd.targets import DenseTarget, HiddenTarget, SparseTarget, Target, Targets, TopTarget

#: The largest error, as a share of what is compared, by the dtype of the hidden states.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
#: What is compared counts as no smaller than this share of what it is made of: where student and teacher agree it is 0.
LEAST = 0.1
_REMEDY = (
    "This is a bug in the loss or in how records are decoded: please report it with your job's `loss` and `cache`."
)


def parity(hidden_ND: Tensor, head: Head, targets: Targets, objective: Objective, tokens: int) -> Verdict:
    """Compare the fused loss of the first ``tokens`` positions with a dense one in float64, value and gradients.

    The gradients are those for the hidden states, for head weight, bias and temperature where these require one. It
    leaves no gradient behind. It holds a float64 copy of the head while it runs.
    """
    count = min(tokens, len(targets))
    hidden_ND, targets = hidden_ND.detach()[:count], first(targets, count)
    with torch.enable_grad(), float32_products():
        fused = _Outcome.of(distillation_loss, hidden_ND, head, targets, objective)
        dense = _Outcome.of(dense_loss, hidden_ND, head, targets, objective)
    errors = _errors(fused, dense, _sizes(hidden_ND, head)) if count else {}
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else math.inf, default="loss")
    allowed, found = TOLERANCE[hidden_ND.dtype], errors.get(worst, 0.0)
    ok = found <= allowed  # False for NaN, too
    message = (
        f"On {count} tokens the {worst} of the fused pass differs from that of a dense float64 one by {found:.1e} of "
        f"its size, {'and nothing by more' if ok else 'which is wrong'}: {allowed:.0e} is allowed."
    )
    facts = {"tokens": count, "allowed": allowed, "errors": errors, "loss": dense.value / max(count, 1)}
    return Verdict("parity", ok, message, "" if ok else _REMEDY, facts)


def first(targets: Targets, count: int) -> Targets:
    """The targets of the first ``count`` positions."""
    teacher = None if targets.teacher is None else _first(targets.teacher, count)
    entropy_N = None if targets.entropy_N is None else targets.entropy_N[:count]
    return replace(targets, gold_N=targets.gold_N[:count], teacher=teacher, entropy_N=entropy_N)


def _first(teacher: Target, count: int) -> Target:
    match teacher:
        case SparseTarget() | TopTarget():
            return teacher.chunk(slice(0, count))  # a target of its own kind
        case DenseTarget():
            return replace(teacher, logprobs_NV=teacher.logprobs_NV[:count])
        case HiddenTarget():
            return replace(teacher, hidden_ND=teacher.hidden_ND[:count], scale_N=teacher.scale_N[:count])
    raise TypeError(f"a target of kind {type(teacher).__name__} cannot be cut")


@dataclass(frozen=True)
class _Outcome:
    """A summed loss and its gradients by name."""

    value: float
    gradients: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        loss: Callable[[Tensor, Head, Targets, Objective], LossTerms],
        hidden_ND: Tensor,
        head: Head,
        targets: Targets,
        objective: Objective,
    ) -> _Outcome:
        """What ``loss`` gives, for leaves of its own: the student's gradients stay what they are."""
        hidden_ND, weight = hidden_ND.clone().requires_grad_(), _leaf(head.weight)
        bias = None if head.bias is None else _leaf(head.bias)
        total = loss(hidden_ND, replace(head, weight=weight, bias=bias), targets, objective).total
        inputs = {"hidden states": hidden_ND, "head weight": weight, "head bias": bias, "T": targets.temperature}
        wanted = {name: each for name, each in inputs.items() if isinstance(each, Tensor) and each.requires_grad}
        found = torch.autograd.grad(total, list(wanted.values()), retain_graph=True)  # both use the targets' graph
        return cls(
            float(total.detach()), {f"gradient of {name}": each for name, each in zip(wanted, found, strict=True)}
        )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _sizes(hidden_ND: Tensor, head: Head) -> dict[str, float]:
    """How large the loss and each gradient are where student and teacher differ."""
    count = max(len(hidden_ND), 1)
    row = float(torch.linalg.vector_norm(head.weight.detach().float())) / math.sqrt(len(head.weight))
    return {
        "loss": count,
        "gradient of hidden states": row * math.sqrt(count),
        "gradient of head weight": float(torch.linalg.vector_norm(hidden_ND.detach().float())),
        "gradient of head bias": math.sqrt(count),
        "gradient of T": count,
    }


def _errors(fused: _Outcome, dense: _Outcome, sizes: dict[str, float]) -> dict[str, float]:
    """Norms of the differences over norms of what should be."""
    errors = {"loss": abs(fused.value - dense.value) / max(abs(dense.value), LEAST * sizes["loss"])}
    for name, expected in dense.gradients.items():
        difference = torch.linalg.vector_norm(fused.gradients[name].double() - expected.double())
        size = float(torch.linalg.vector_norm(expected.double()))
        errors[name] = float(difference) / max(size, LEAST * sizes[name])
    return errors
