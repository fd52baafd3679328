"""Check the fused loss against the plain one: value and gradients on a few tokens, before any step.

Both start from the same logits, those that the fused pass made in the dtype of its matrix products.
Near the teacher the gradient is the difference of two nearly equal distributions, so logits that
are rounded differently have a different gradient. These logits are compared with exact ones
separately.

Shapes: N positions that have a target, D hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kd.checks.verdict import Verdict
from kd.loss.aligned.targets import ProjectedTarget, settle_targets
from kd.loss.dense import (
    compute_dense_loss_from_logits,
    compute_teacher_logits,
    compute_token_weights,
)
from kd.loss.fused import compute_distillation_loss
from kd.loss.joined.targets import JoinedTarget, Share
from kd.loss.objective import Objective
from kd.loss.sparse_targets import SparseTarget
from kd.loss.targets import Targets, TeacherTarget, widen_logprobs
from kd.loss.whole_targets import DenseTarget, HiddenTarget, TopTarget
from kd.models.lm_head import LMHead
from kd.models.precision import float32_products

#: The largest relative error allowed, by the dtype of the products.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
#: Errors are relative to at least this share of the typical size of a value (``_estimate_sizes``),
#: because the value itself is 0 where student and teacher agree.
LEAST_SIZE = 0.1
#: Rounding of both logits, in epsilons of their size. Where log p and log q differ by less,
#: rounding decides which is greater.
TIE_ROUNDING = 8.0
#: Elements of the LM head that are float64 at once.
BLOCK_ELEMENTS = 2**24
_REMEDY = (
    "This is a bug in the loss or in how records are decoded: "
    "please report it with your job's `loss` and `cache`."
)


def check_parity(
    hidden_ND: Tensor, lm_head: LMHead, targets: Targets, objective: Objective, tokens: int
) -> Verdict:
    """Compare the fused loss of the first ``tokens`` positions with a dense one in float64.

    It compares the value, and the gradients for the hidden states and for the LM head's weight and
    bias and T where these require one. It leaves no gradient behind. No float64 copy of the LM head
    exists: its products are computed in blocks of the vocabulary.
    """
    count = min(tokens, len(targets))
    targets = settle_targets(hidden_ND, lm_head, targets)
    hidden_ND = hidden_ND.detach()[:count]
    targets = take_first_positions(targets, count)
    errors: dict[str, float] = {}
    loss = 0.0
    if count:
        with torch.enable_grad(), float32_products():
            products_NV, fused = _run_fused(hidden_ND, lm_head, targets, objective)
            dense = _run_dense(products_NV, hidden_ND, lm_head, targets, objective)
        errors, loss = _compute_errors(fused, dense), dense.loss
    allowed = dict.fromkeys(errors, TOLERANCE[hidden_ND.dtype])
    # Both passes sum the loss from the same logits, in float32 or better.
    allowed["loss"] = TOLERANCE[torch.promote_types(hidden_ND.dtype, torch.float32)]
    # NaN is the worst error.
    worst = max(
        errors,
        key=lambda name: (math.isnan(errors[name]), errors[name] / allowed[name]),
        default="loss",
    )
    limit = allowed[worst] if errors else 0.0
    found = errors.get(worst, 0.0)
    ok = found <= limit  # also False for NaN
    message = (
        f"On {count} tokens the {worst} of the fused pass differs from that of a dense float64 "
        f"pass by {found:.1e} of its size, {'the largest error' if ok else 'which is wrong'}: "
        f"{limit:.0e} is allowed."
    )
    facts = {"tokens": count, "allowed": limit, "errors": errors, "loss": loss / max(count, 1)}
    return Verdict("parity", ok, message, "" if ok else _REMEDY, facts)


def take_first_positions(targets: Targets, count: int) -> Targets:
    """The targets of the first ``count`` positions."""
    teacher = targets.teacher if targets.teacher is None else _cut(targets.teacher, count)
    cut = {name: getattr(targets, name) for name in ("entropy_N", "weight_N")}
    cut = {name: None if each is None else each[:count] for name, each in cut.items()}
    return replace(targets, gold_N=targets.gold_N[:count], teacher=teacher, **cut)


def _cut(teacher: TeacherTarget, count: int) -> TeacherTarget:
    """The targets of a teacher at the first ``count`` positions."""
    match teacher:
        case SparseTarget() | TopTarget() | ProjectedTarget():
            return teacher.take_chunk(slice(0, count))  # their chunks are targets, too
        case DenseTarget():
            return replace(teacher, logprobs_NV=teacher.logprobs_NV[:count])
        case HiddenTarget():
            return replace(
                teacher, hidden_ND=teacher.hidden_ND[:count], scale_N=teacher.scale_N[:count]
            )
        case JoinedTarget():
            counts = [int((places_R < count).sum()) for places_R, *_ in teacher.shares]
            shares = zip(teacher.shares, counts, strict=True)
            return JoinedTarget(
                tuple(
                    Share(at[:own], weight, _cut(each, own)) for (at, weight, each), own in shares
                )
            )
        case other:
            raise TypeError(f"a target of kind {type(other).__name__} cannot be cut")


#: Logits, loss or gradients, by name.
_Values = dict[str, Tensor]


@dataclass(frozen=True)
class _RecordingLMHead(LMHead):
    """An LM head that keeps the products x Wᵀ that it makes, chunk by chunk."""

    products: list[Tensor] = field(default_factory=list)

    def multiply(self, hidden_ND: Tensor, room_NV: Tensor | None = None) -> Tensor:
        z_NV = super().multiply(hidden_ND, room_NV)
        self.products.append(z_NV.detach().clone())  # a copy: the gradient overwrites the product
        return z_NV


def _run_fused(
    hidden_ND: Tensor, lm_head: LMHead, targets: Targets, objective: Objective
) -> tuple[Tensor, _Values]:
    """x Wᵀ as the fused pass makes it, and its logits, summed loss and gradients, by name.

    The gradients are those of new leaves, so the student's own stay as they are.
    """
    hidden_ND = hidden_ND.clone().requires_grad_()
    weight = _make_leaf(lm_head.weight)
    bias = None if lm_head.bias is None else _make_leaf(lm_head.bias)
    watched = _RecordingLMHead(weight, bias, lm_head.scale, lm_head.softcap, lm_head.vocabulary)
    total = compute_distillation_loss(hidden_ND, watched, targets, objective).total
    inputs = {
        "hidden states": hidden_ND,
        "head weight": weight,
        "head bias": bias,
        "T": targets.temperature,
    }
    values = {"loss": total.detach(), **_compute_gradients(total, inputs)}
    products_NV = torch.cat(watched.products)
    return products_NV, {"logits": products_NV, **values}


@dataclass(frozen=True)
class _DenseReference:
    """The expected values by name, in float64, with their scales.

    ``sizes`` is how large each is where student and teacher differ. ``undecided`` is by how much
    ties may change it.
    """

    loss: float
    values: dict[str, Tensor | _Product]
    sizes: dict[str, float]
    undecided: dict[str, float]


@dataclass(frozen=True)
class _Product:
    """The matrix aᵀ b in float64, as large as the LM head, computed by blocks of rows."""

    a_NV: Tensor
    b_ND: Tensor

    def measure(self, found_VD: Tensor) -> tuple[float, float]:
        """Return the norms of ``found_VD`` less the product, and of the product."""
        distances = []
        norms = []
        for rows in _cut_rows(found_VD):
            expected_vD = self.a_NV[:, rows].T @ self.b_ND
            distances.append(_compute_norm(found_VD[rows] - expected_vD.to(found_VD.dtype)))
            norms.append(_compute_norm(expected_vD))
        return math.hypot(*distances), math.hypot(*norms)


def _cut_rows(matrix_VD: Tensor) -> list[slice]:
    """Cut the rows of a matrix into blocks of at most ``BLOCK_ELEMENTS``."""
    size = max(BLOCK_ELEMENTS // matrix_VD.shape[1], 1)
    return [slice(first, first + size) for first in range(0, len(matrix_VD), size)]


def _run_dense(
    products_NV: Tensor, hidden_ND: Tensor, lm_head: LMHead, targets: Targets, objective: Objective
) -> _DenseReference:
    """The loss of these x Wᵀ, and its gradients through the LM head, computed by hand.

    The head's weight is rounded as in the fused pass.
    """
    hidden_ND = hidden_ND.double()
    vocabulary = lm_head.vocabulary
    weight_VD = lm_head.weight.detach()[:vocabulary]
    blocks = _cut_rows(weight_VD)
    logits_NV = torch.cat([hidden_ND @ weight_VD[rows].double().T for rows in blocks], 1)
    # In float64 ``double`` copies nothing; ``detach`` keeps the fused pass' tensor as it is.
    z_NV = products_NV.double().detach().requires_grad_()
    biased_NV = z_NV if lm_head.bias is None else z_NV + lm_head.bias.detach()[:vocabulary].double()
    s_NV = lm_head.transform_logits(biased_NV)
    total = compute_dense_loss_from_logits(s_NV, targets, objective).total
    found = _compute_gradients(total, {"logits": z_NV, "T": targets.temperature})
    g_NV = found.pop("gradient of logits")
    padded_NV = F.pad(g_NV, (0, len(lm_head.weight) - vocabulary))
    d_hidden_ND = torch.zeros_like(hidden_ND)
    norms = list[Tensor]()
    for rows in blocks:
        rounded_vD = weight_VD[rows].to(products_NV.dtype).double()
        d_hidden_ND += g_NV[:, rows] @ rounded_vD
        norms.append(rounded_vD.norm(dim=1))
    row_V = torch.cat(norms)
    values: dict[str, Tensor | _Product] = {
        "logits": logits_NV,
        "loss": total.detach(),
        "gradient of hidden states": d_hidden_ND,
        "gradient of head bias": padded_NV.sum(0),
        **found,
    }
    if lm_head.weight.requires_grad:
        values["gradient of head weight"] = _Product(padded_NV, hidden_ND)
    row_N = torch.linalg.vector_norm(hidden_ND, dim=1)
    moved_N, slope = _bound_effect_of_ties(s_NV.detach(), products_NV.dtype, targets, objective)
    moved_N = moved_N * abs(lm_head.scale)
    undecided = {
        "gradient of hidden states": _compute_norm(moved_N) * float(row_V.amax()),
        "gradient of head weight": _compute_norm(moved_N * row_N),
        "gradient of head bias": float(moved_N.sum()),
        "gradient of T": slope,
    }
    sizes = _estimate_sizes(g_NV, hidden_ND, row_V, targets.temperature_value)
    return _DenseReference(float(total.detach()), values, sizes, undecided)


def _make_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _compute_gradients(total: Tensor, inputs: dict[str, Tensor | float | None]) -> _Values:
    """The gradients of ``total`` for those of ``inputs`` that require one, by name."""
    tensors = {name: each for name, each in inputs.items() if isinstance(each, Tensor)}
    wanted = {name: each for name, each in tensors.items() if each.requires_grad}
    # The graph is kept because both passes go through that of the targets.
    found = torch.autograd.grad(total, list(wanted.values()), retain_graph=True)
    return {f"gradient of {name}": each for name, each in zip(wanted, found, strict=True)}


def _compute_errors(fused: _Values, dense: _DenseReference) -> dict[str, float]:
    """Norms of the differences, less the undecided part, over norms of the expected values."""
    errors = {}
    for name, found in fused.items():
        expected = dense.values[name]
        if isinstance(expected, _Product):
            distance, norm = expected.measure(found)
        else:
            distance = _compute_norm(found - expected.to(found.dtype))
            norm = _compute_norm(expected)
        distance -= dense.undecided.get(name, 0.0)
        size = max(norm, LEAST_SIZE * dense.sizes[name], torch.finfo(torch.float64).tiny)
        errors[name] = 0.0 if distance < 0.0 else distance / size
    return errors


def _compute_norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _estimate_sizes(
    g_NV: Tensor, hidden_ND: Tensor, row_V: Tensor, temperature: float
) -> dict[str, float]:
    """The size of each value where student and teacher differ.

    ``row_V`` are the norms of the LM head's rows. The fused pass rounds ``g_NV``, the gradient for
    the logits, to the dtype of its products. Products of it may cancel, so they count as no smaller
    than its norm allows. T^2 multiplies the rounding of a divergence, even where the divergence
    falls as 1 / T^2.
    """
    count = len(g_NV)
    weight = _compute_norm(row_V) / math.sqrt(len(row_V))
    hidden = _compute_norm(hidden_ND) / math.sqrt(count)
    reach = max(_compute_norm(g_NV), math.sqrt(count))
    return {
        "logits": weight * hidden * math.sqrt(g_NV.numel() / hidden_ND.shape[1]),
        "loss": count * max(1.0, temperature**2),
        "gradient of hidden states": weight * reach,
        "gradient of head weight": hidden * reach,
        "gradient of head bias": reach,
        "gradient of T": count * max(1.0, temperature),
    }


def _bound_effect_of_ties(
    s_NV: Tensor, dtype: torch.dtype, targets: Targets, objective: Objective
) -> tuple[Tensor, float]:
    """By how much ties may change total variation's gradients for the logits, (N,), and for T.

    Where p and q are equal up to rounding, q - p may have either sign. The other sign changes A of
    ``kd.loss.divergences`` by q, and A - q sum(A) by twice that mass, as a sum of absolute values.
    """
    if objective.divergence != "total_variation" or not isinstance(
        targets.teacher, DenseTarget | HiddenTarget
    ):
        return s_NV.new_zeros(len(s_NV)), 0.0
    temperature = targets.temperature_value
    student = 1.0 if objective.teacher_only else temperature
    s_NV = s_NV / student
    t_NV = compute_teacher_logits(targets.teacher) / temperature
    logp_NV = widen_logprobs(t_NV.log_softmax(1), s_NV.shape[1])
    logq_NV = s_NV.log_softmax(1)
    eps = TIE_ROUNDING * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    size_N1 = s_NV.abs().amax(1, keepdim=True) + t_NV.clamp(min=-100.0).abs().amax(1, keepdim=True)
    q_NV = logq_NV.exp()
    tied_NV = q_NV.where((logp_NV - logq_NV).abs() <= eps * size_N1, 0.0)
    tied_N = tied_NV.sum(1)
    weight_N = (1.0 - objective.alpha) * compute_token_weights(targets, objective)
    slope_N = -torch.linalg.vecdot(tied_NV, logq_NV) - tied_N * torch.linalg.vecdot(q_NV, logq_NV)
    slope = float((weight_N * slope_N).sum()) * (student + student**2 / temperature)
    return 2.0 * tied_N * weight_N * student, slope
