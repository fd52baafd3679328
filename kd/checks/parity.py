"""The fused loss against the plain one: value and gradients on a few tokens, before any step is taken.

Both start from the same logits: those that the fused pass made, in the dtype of its matrix products. Near the teacher
the gradient is what two nearly equal distributions differ by, and logits rounded otherwise have another one. How far
these logits are from exact ones is compared by itself.

Shapes: N positions that have a target, D hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kd.checks.verdict import Verdict
from kd.dense_loss import dense_loss_of, teacher_logits, token_weights
from kd.losses import Objective, distillation_loss
from kd.models import Head
from kd.precision import float32_products
from kd.targets import DenseTarget, HiddenTarget, SparseTarget, Target, Targets, TopTarget

#: The largest error, as a share of what is compared, by the dtype of the products.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
#: What is compared counts as no smaller than this share of what it is made of: where student and teacher agree it is 0.
LEAST = 0.1
#: Rounding of both logits, in units of their size: by so much log p and log q may differ and their order be anyone's.
TIE = 8.0
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
    errors, loss = _compare(hidden_ND, head, targets, objective) if count else ({}, 0.0)
    allowed = {name: _allowed(name, hidden_ND.dtype) for name in errors}
    worst = max(errors, key=lambda name: _ordered(errors[name] / allowed[name]), default="loss")
    limit, found = allowed.get(worst, 0.0), errors.get(worst, 0.0)
    ok = found <= limit  # False for NaN, too
    message = (
        f"On {count} tokens the {worst} of the fused pass and of a dense float64 one are {found:.1e} of their size "
        f"apart, {'and nothing is further' if ok else 'which is wrong'}: {limit:.0e} is allowed."
    )
    facts = {"tokens": count, "allowed": limit, "errors": errors, "loss": loss / max(count, 1)}
    return Verdict("parity", ok, message, "" if ok else _REMEDY, facts)


def _compare(hidden_ND: Tensor, head: Head, targets: Targets, objective: Objective) -> tuple[dict[str, float], float]:
    """The errors by name, and what the loss should be."""
    with torch.enable_grad(), float32_products():
        products_NV, fused = _fused(hidden_ND, head, targets, objective)
        dense = _dense(products_NV, hidden_ND, head, targets, objective)
    return _errors(fused, dense), float(dense.values["loss"])


def _allowed(name: str, dtype: torch.dtype) -> float:
    """Of the same logits the loss is summed up in float32 or better, whatever the products are in."""
    return TOLERANCE[torch.promote_types(dtype, torch.float32) if name == "loss" else dtype]


def _ordered(error: float) -> float:
    return math.inf if math.isnan(error) else error


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


# ---------------------------------------------------------------------- the two passes

_Values = dict[str, Tensor]


@dataclass(frozen=True)
class _Watched(Head):
    """A head that keeps the products it makes, chunk by chunk."""

    products: list[Tensor] = field(default_factory=list)

    def product(self, hidden_ND: Tensor, room_NV: Tensor | None = None) -> Tensor:
        z_NV = super().product(hidden_ND, room_NV)
        self.products.append(z_NV.detach().clone())  # its memory becomes that of the gradient
        return z_NV


def _fused(hidden_ND: Tensor, head: Head, targets: Targets, objective: Objective) -> tuple[Tensor, _Values]:
    """x Wᵀ as the fused pass makes it; and its summed loss and gradients, by name.

    They are of leaves of its own: the student's gradients stay what they are.
    """
    hidden_ND, weight = hidden_ND.clone().requires_grad_(), _leaf(head.weight)
    bias = None if head.bias is None else _leaf(head.bias)
    watched = _Watched(weight, bias, head.scale, head.softcap, head.vocabulary)
    total = distillation_loss(hidden_ND, watched, targets, objective).total
    inputs = {"hidden states": hidden_ND, "head weight": weight, "head bias": bias, "T": targets.temperature}
    values = {"loss": total.detach(), **_gradients(total, inputs)}
    products_NV = torch.cat(watched.products)
    return products_NV, {"logits": products_NV, **values}


@dataclass(frozen=True)
class _Dense:
    """What should be, by name in float64; how large where student and teacher differ; and what ties leave undecided."""

    values: _Values
    sizes: dict[str, float]
    undecided: dict[str, float]


def _dense(products_NV: Tensor, hidden_ND: Tensor, head: Head, targets: Targets, objective: Objective) -> _Dense:
    """The loss of these x Wᵀ, and its gradients through the head, by hand: with its weight as the fused pass has it."""
    hidden_ND, vocabulary = hidden_ND.double(), head.vocabulary
    logits_NV = hidden_ND @ head.weight.detach()[:vocabulary].double().T
    weight_VD = head.weight.detach()[:vocabulary].to(products_NV.dtype).double()
    z_NV = products_NV.double().detach().requires_grad_()  # in float64, too, one of its own
    s_NV = head.transform(z_NV if head.bias is None else z_NV + head.bias.detach()[:vocabulary].double())
    total = dense_loss_of(s_NV, targets, objective).total
    found = _gradients(total, {"logits": z_NV, "T": targets.temperature})
    g_NV = found.pop("gradient of logits")
    padded_NV = F.pad(g_NV, (0, len(head.weight) - vocabulary))
    values = {
        "logits": logits_NV,
        "loss": total.detach(),
        "gradient of hidden states": g_NV @ weight_VD,
        "gradient of head bias": padded_NV.sum(0),
        **found,
    }
    if head.weight.requires_grad:
        values["gradient of head weight"] = padded_NV.T @ hidden_ND
    row_N = torch.linalg.vector_norm(hidden_ND, dim=1)
    moved_N, slope = _moved_by_ties(s_NV.detach(), products_NV.dtype, targets, objective)
    moved_N = moved_N * abs(head.scale)
    undecided = {
        "gradient of hidden states": _norm(moved_N) * float(weight_VD.norm(dim=1).amax()),
        "gradient of head weight": _norm(moved_N * row_N),
        "gradient of head bias": float(moved_N.sum()),
        "gradient of T": slope,
    }
    return _Dense(values, _sizes(g_NV, row_N, weight_VD, targets.temperature_value), undecided)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _gradients(total: Tensor, inputs: dict[str, Tensor | float | None]) -> _Values:
    """Of those that require one."""
    wanted = {name: each for name, each in inputs.items() if isinstance(each, Tensor) and each.requires_grad}
    found = torch.autograd.grad(total, list(wanted.values()), retain_graph=True)  # both passes use the targets' graph
    return {f"gradient of {name}": each for name, each in zip(wanted, found, strict=True)}


# ---------------------------------------------------------------------- how far apart they may be


def _errors(fused: _Values, dense: _Dense) -> dict[str, float]:
    """Norms of the differences, less what is undecided, over norms of what should be."""
    errors = {}
    for name, found in fused.items():
        expected = dense.values[name]
        distance = _norm(found - expected.to(found.dtype)) - dense.undecided.get(name, 0.0)
        size = max(_norm(expected), LEAST * dense.sizes[name], torch.finfo(torch.float64).tiny)
        errors[name] = 0.0 if distance < 0.0 else distance / size
    return errors


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _sizes(g_NV: Tensor, row_N: Tensor, weight_VD: Tensor, temperature: float) -> dict[str, float]:
    """How large each is where student and teacher differ; ``row_N`` are the norms of the hidden states.

    The fused pass rounds ``g_NV``, the gradient for the logits, to the dtype of its products, and what these make of
    it may cancel: they count as no smaller than what its norm could give. And T^2 multiplies the rounding of a
    divergence, even where that falls as 1 / T^2.
    """
    count = len(g_NV)
    weight = _norm(weight_VD) / math.sqrt(len(weight_VD))
    hidden = _norm(row_N) / math.sqrt(count)
    reach = max(_norm(g_NV), math.sqrt(count))
    return {
        "logits": weight * hidden * math.sqrt(g_NV.numel() / weight_VD.shape[1]),
        "loss": count * max(1.0, temperature**2),
        "gradient of hidden states": weight * reach,
        "gradient of head weight": hidden * reach,
        "gradient of head bias": reach,
        "gradient of T": count * max(1.0, temperature),
    }


def _moved_by_ties(s_NV: Tensor, dtype: torch.dtype, targets: Targets, objective: Objective) -> tuple[Tensor, float]:
    """By how much total variation's gradients for the logits, (N,), and for T may move: a tie has either sign.

    Where p and q are equal up to rounding, the other sign of q - p moves A of ``kd.divergences`` by q, and A - q sum(A)
    by twice that mass, as a sum of absolute values.
    """
    if objective.divergence != "total_variation" or not isinstance(targets.teacher, DenseTarget | HiddenTarget):
        return s_NV.new_zeros(len(s_NV)), 0.0
    temperature = targets.temperature_value
    student = 1.0 if objective.teacher_only else temperature
    s_NV, t_NV = s_NV / student, teacher_logits(targets.teacher) / temperature
    logp_NV, logq_NV = t_NV.log_softmax(1), s_NV.log_softmax(1)
    eps = TIE * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    size_N1 = s_NV.abs().amax(1, keepdim=True) + t_NV.clamp(min=-100.0).abs().amax(1, keepdim=True)
    q_NV = logq_NV.exp()
    tied_NV = q_NV.where((logp_NV - logq_NV).abs() <= eps * size_N1, 0.0)
    tied_N, weight_N = tied_NV.sum(1), (1.0 - objective.alpha) * token_weights(targets, objective)
    slope_N = -torch.linalg.vecdot(tied_NV, logq_NV) - tied_N * torch.linalg.vecdot(q_NV, logq_NV)
    slope = float((weight_N * slope_N).sum()) * (student + student**2 / temperature)
    return 2.0 * tied_N * weight_N * student, slope
