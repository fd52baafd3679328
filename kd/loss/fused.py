"""The loss: LM head, distillation and cross-entropy in one chunked pass that never builds (N, V).

    L = (1 - alpha) sum_n c_n T^2 D(p_n, q_n)             divergence from the teacher, both at T
      +      alpha  sum_n [(1 - e) -log q_gold - e mean_v log q_v]     smoothed hard label
      +           z sum_n LSE(s_n)^2                      z-loss: keeps the logits from drifting

with s the student's logits, q = softmax(s / T) in D and softmax(s) in the hard label's term, p the
teacher at T (``kd.loss.targets``), and c_n = (1 + H_n)^w over its mean, H the teacher's entropy
(``kd.loss.token_weights``).

D = KL(p || q) = -E_p[log q] - H(p) is linear in p. Where p is an unbiased sample, so are value and
gradient: their mean over draws is full distillation. Such a sample need not sum to 1: with W its
sum, the gradient with respect to s is (1 - alpha) c T [W q - p] + alpha [softmax(s) - label]
+ 2 z LSE(s) softmax(s). At T = 1 all its terms share one softmax, and the hard label is one more
entry. ``kd.loss.divergences`` has the other D.

The gradient for the temperature is (1 - alpha) sum_n c_n [2 T D + T^2 dD/dT]. dD/dT has two parts:
through the student's logits over T it is -1/T (dD/d(s/T) . s/T); through the teacher's logits it
has the same form. For entries, autograd makes the teacher's part from the gradients for their
weights and for H, because ``kd.loss.sparse_targets`` decodes both as functions of T.

Shapes: N positions that have a target, of the whole pass or of one chunk; V vocabulary, D hidden
width, E entries.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kd.kernels.available import can_run_kernels
from kd.loss.aligned.targets import settle_targets
from kd.loss.chunk_size import PLAIN_LOGIT_BYTES, choose_chunk_positions
from kd.loss.divergences import compute_divergence, compute_logit_gradient, compute_slope
from kd.loss.objective import Objective
from kd.loss.sparse_targets import SparseTarget
from kd.loss.student_rows import StudentRows
from kd.loss.tail_control import HeadCorrection
from kd.loss.targets import TargetChunk, Targets, subtract_target_, widen_logprobs
from kd.loss.token_weights import compute_token_weights
from kd.loss.whole_targets import Distribution, TopTarget
from kd.models.lm_head import LMHead
from kd.models.products.wide import add_product_, write_product_


class LossTerms(NamedTuple):
    """Sums over N positions in nats, float64.

    total = (1 - alpha) kd + alpha (ce + smoothing) + z, where ``kd`` is the divergence times T^2,
    ``ce`` the cross-entropy of the hard label itself, ``smoothing`` what label smoothing adds to
    it, and ``z`` the weighted squares. ``total`` carries the gradients; the other terms are for
    reports. ``entropy`` is the teacher's at T, if its records have it.
    """

    total: Tensor
    kd: Tensor
    ce: Tensor
    z: Tensor
    entropy: Tensor
    smoothing: Tensor


def compute_distillation_loss(
    hidden_ND: Tensor,
    lm_head: LMHead,
    targets: Targets,
    objective: Objective,
    chunk_size: int | None = None,
    correction: HeadCorrection | None = None,
) -> LossTerms:
    """Return the summed loss of N positions, with exact gradients.

    The gradients are those for the hidden states, for the LM head's weight and bias, and for the
    temperature of ``targets``. ``chunk_size`` is how many positions have logits at a time; None
    lets ``kd.loss.chunk_size`` choose. ``correction`` is a term that is added to ``kd``. Divide
    ``total`` by the number of targets of the whole optimiser step, not of this micro-batch. Call
    backward once: it hands the gradients over without a copy. Matrix products run in the dtype of
    ``hidden_ND``, everything else in float32 or better.
    Raises ``ValueError`` for an objective that the targets cannot serve.
    """
    targets = settle_targets(hidden_ND, lm_head, targets, chunk_size)
    teacher = targets.teacher
    temperature = targets.temperature
    if teacher is None and objective.alpha != 1.0:
        raise ValueError(
            f"alpha must be 1 without the teacher's records, but got {objective.alpha}"
        )
    if teacher is not None and objective.divergence != "forward_kl" and not teacher.whole:
        raise ValueError(f"{objective.divergence} needs all of p: use profile hidden or dense")
    learned = isinstance(temperature, Tensor) and temperature.requires_grad
    if learned and isinstance(teacher, TopTarget):
        raise ValueError(
            "the k most probable tokens do not determine another temperature: "
            "use profile tempered or hidden"
        )
    # Autograd sees only tensors that are arguments of their own, so entries are passed apart.
    entries = (
        (teacher.weights_E, teacher.entropy_N)
        if learned and isinstance(teacher, SparseTarget)
        else (None, None)
    )
    weight_N = compute_token_weights(targets, objective)
    work = _LossInputs(lm_head, targets, objective, weight_N, chunk_size, correction)
    inputs = (hidden_ND, lm_head.weight, lm_head.bias, temperature if learned else None, *entries)
    return LossTerms(*_FusedLMHead.apply(*inputs, work))


@dataclass(frozen=True)
class LossChunk:
    """The targets of the positions ``rows``: one chunk of the pass."""

    rows: slice
    gold_N: Tensor
    teacher: TargetChunk | None
    weight_N: Tensor | None

    @property
    def entries(self) -> SparseTarget | None:
        """The teacher's target if it consists of entries, else None."""
        return self.teacher if isinstance(self.teacher, SparseTarget) else None

    def weigh(self, value: float, like: Tensor) -> float | Tensor:
        """``value`` times the token weights, (N, 1) in the dtype of ``like``.

        Where all positions weigh 1, it is ``value`` itself.
        """
        return value if self.weight_N is None else (self.weight_N * value).to(like.dtype)[:, None]

    def multiply_by_total(self, values_N: Tensor) -> Tensor:
        """``values_N`` times W, the sum of the teacher's weights, (N,)."""
        total_N = None if self.teacher is None else self.teacher.total_N
        return values_N if total_N is None else total_N * values_N

    def weigh_softmax(self, value: float, like: Tensor) -> float | Tensor:
        """``value`` times the token weights and W: a number, or (N, 1) in the dtype of ``like``."""
        total_N = None if self.teacher is None else self.teacher.total_N
        weight = self.weigh(value, like)
        return weight if total_N is None else weight * total_N[:, None].to(like.dtype)

    def sum(self, values_N: Tensor) -> Tensor:
        """The sum of ``values_N`` times the token weights, float64."""
        values_N = values_N.double()
        return values_N.sum() if self.weight_N is None else values_N @ self.weight_N


def split_into_chunks(
    targets: Targets, size: int, dtype: torch.dtype, weight_N: Tensor | None = None
) -> Iterator[LossChunk]:
    """Split N positions into chunks of ``size``.

    All of p comes in ``dtype``. ``weight_N`` are the token weights; None means that all weigh 1.
    """
    for start in range(0, len(targets), size):
        rows = slice(start, min(start + size, len(targets)))
        teacher = None if targets.teacher is None else targets.teacher.take_chunk(rows, dtype)
        yield LossChunk(
            rows, targets.gold_N[rows], teacher, None if weight_N is None else weight_N[rows]
        )


@dataclass(frozen=True)
class _LossInputs:
    """The inputs of the pass that it does not differentiate."""

    lm_head: LMHead
    targets: Targets
    objective: Objective
    weight_N: Tensor | None
    chunk_size: int | None
    correction: HeadCorrection | None

    @property
    def soft(self) -> float:
        """The weight of the divergence: (1 - alpha) ``scale``."""
        return (1.0 - self.objective.alpha) * self.scale

    @property
    def scale(self) -> float:
        """T^2, or 1 if only the teacher is tempered."""
        return self.student_temperature**2

    @property
    def student_temperature(self) -> float:
        """T, or 1 if only the teacher is tempered."""
        return 1.0 if self.objective.teacher_only else self.targets.temperature_value

    def can_use_kernels(self, hidden_ND: Tensor) -> bool:
        """Return whether GPU kernels can do this pass: of entries, hard labels and forward KL."""
        sparse = self.targets.teacher is None or isinstance(self.targets.teacher, SparseTarget)
        return sparse and self.objective.divergence == "forward_kl" and can_run_kernels(hidden_ND)


@dataclass
class _LossPass:
    """The sums of the chunks so far, and the needed gradients, in the order of the inputs."""

    work: _LossInputs
    d_hidden_ND: Tensor | None
    d_weight: Tensor | None
    d_bias: Tensor | None
    d_temperature: Tensor | None
    d_weights_E: Tensor | None
    d_entropy_N: Tensor | None
    kd: Tensor
    ce: Tensor
    z: Tensor
    entropy: Tensor
    smoothing: Tensor

    @classmethod
    def of(
        cls, work: _LossInputs, inputs: tuple[Tensor | None, ...], needed: tuple[bool, ...]
    ) -> _LossPass:
        """An empty pass, with a gradient for each of ``inputs`` that is ``needed``."""
        hidden_ND = inputs[0]
        assert hidden_ND is not None
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        # A row of the hidden states' gradient is written once. The others are sums over chunks, in
        # a wider dtype.
        dtypes = (hidden_ND.dtype, wide, wide, torch.float64, torch.float64, torch.float64)
        # The first chunk writes that of the weight, so it is not filled with zeros before.
        fills = (torch.zeros_like, torch.empty_like, *[torch.zeros_like] * 4)
        gradients = (
            fill(each, dtype=dtype) if each is not None and need else None
            for each, dtype, need, fill in zip(inputs, dtypes, needed, fills, strict=True)
        )
        d_hidden_ND, d_weight, d_bias, d_temperature, d_weights_E, d_entropy_N = gradients
        if d_temperature is not None:
            # T is on the CPU: each chunk would wait for the device.
            d_temperature = d_temperature.to(hidden_ND.device)
        if d_weight is not None:
            d_weight[work.lm_head.vocabulary if len(work.targets) else 0 :].zero_()
        sums = hidden_ND.new_zeros(5, dtype=torch.float64)
        return cls(
            work, d_hidden_ND, d_weight, d_bias, d_temperature, d_weights_E, d_entropy_N, *sums
        )

    @property
    def gradients(self) -> list[Tensor | None]:
        return [
            self.d_hidden_ND,
            self.d_weight,
            self.d_bias,
            self.d_temperature,
            self.d_weights_E,
            self.d_entropy_N,
        ]

    @property
    def wants_logits(self) -> bool:
        """True if the gradient with respect to the logits is needed."""
        return not (self.d_hidden_ND is None and self.d_weight is None and self.d_bias is None)

    @property
    def wants_slope(self) -> bool:
        """True if E_q[log q] is needed: by the gradient for T, if the student is tempered."""
        return self.d_temperature is not None and not self.work.objective.teacher_only

    @property
    def total(self) -> Tensor:
        alpha = self.work.objective.alpha
        return (1.0 - alpha) * self.kd + alpha * (self.ce + self.smoothing) + self.z

    def run(self, hidden_ND: Tensor) -> None:
        """Process all chunks."""
        work = self.work
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        in_kernels = work.can_use_kernels(hidden_ND)
        size = work.chunk_size or choose_chunk_positions(
            work.lm_head.vocabulary,
            hidden_ND.device,
            hidden_ND.element_size() if in_kernels else PLAIN_LOGIT_BYTES,
        )
        if in_kernels:
            process = self._process_chunk_in_kernels
        else:
            # New memory costs a CPU as much as two passes over it, so chunks share one buffer.
            room_NV = hidden_ND.new_empty(min(size, len(hidden_ND)), work.lm_head.vocabulary)
            process = functools.partial(self._process_chunk, room_NV)
        for chunk in split_into_chunks(work.targets, size, dtype, work.weight_N):
            process(chunk, hidden_ND)
        if work.correction is not None:
            self._add_correction(work.correction)

    def _add_correction(self, correction: HeadCorrection) -> None:
        """Add the term e . k (W m + bias), with its gradients k e mᵀ for W and k e for the bias.

        e and m are the vectors of ``correction``, k is the scale of the LM head.
        """
        lm_head = self.work.lm_head
        excess_V = correction.excess_V.double() * lm_head.scale
        weight_VD = lm_head.weight[: len(excess_V)]
        logits_V = (weight_VD @ correction.direction_D.to(weight_VD.dtype)).double()
        if lm_head.bias is not None:
            logits_V += lm_head.bias[: len(excess_V)]
        self.kd += self.work.scale * (excess_V @ logits_V)
        excess_V = excess_V * self.work.soft
        if self.d_weight is not None:
            d_weight_VD = self.d_weight[: len(excess_V)]
            factors = (excess_V, correction.direction_D)
            d_weight_VD.addr_(*(each.to(d_weight_VD.dtype) for each in factors))
        if self.d_bias is not None:
            self.d_bias[: len(excess_V)] += excess_V

    def _process_chunk(self, room_NV: Tensor, chunk: LossChunk, hidden_ND: Tensor) -> None:
        """Add one chunk in PyTorch; its logits use the memory ``room_NV``."""
        lm_head = self.work.lm_head
        objective = self.work.objective
        teacher = chunk.teacher
        s_NV = lm_head.compute_logits(hidden_ND[chunk.rows], room_NV[: len(chunk.gold_N)])
        gold_s_N = s_NV.gather(1, chunk.gold_N[:, None])[:, 0]
        mean_s_N = s_NV.mean(1) if objective.label_smoothing > 0.0 else None
        # The soft cap's derivative needs s later. Without a cap, softmax(s) overwrites s.
        kept_NV, out_NV = (s_NV, None) if lm_head.softcap else (None, s_NV)
        soft_NV = None
        # At T = 1 forward KL and the hard label share one softmax.
        at_one = self.work.student_temperature == 1.0
        if teacher is not None and at_one and self._can_use_sums(teacher):
            q_NV, lse_N = self._add_kl_and_softmax(chunk, teacher, s_NV, out_NV)
        else:
            soft_NV = self._add_apart(chunk, teacher, s_NV) if teacher is not None else None
            q_NV, lse_N = _compute_softmax(s_NV, out_NV)
        mean_nll_N = None if mean_s_N is None else lse_N - mean_s_N
        hard = self._add_labels(lse_N - gold_s_N, mean_nll_N, lse_N)
        if self.wants_logits:
            g_NV = self._write_gradient(chunk, q_NV, soft_NV, hard)
            # The chain rule of ``LMHead.transform``: d/dz c tanh(kz / c) = k (1 - (s / c)²).
            if kept_NV is not None and lm_head.softcap:
                g_NV.mul_(kept_NV.div_(lm_head.softcap).square_().neg_().add_(1.0))
            if lm_head.scale != 1.0:
                g_NV.mul_(lm_head.scale)
            self._backpropagate_lm_head(chunk.rows, hidden_ND, g_NV)

    def _process_chunk_in_kernels(self, chunk: LossChunk, hidden_ND: Tensor) -> None:
        """Add one chunk of entries or hard labels on a GPU; the gradient overwrites the logits."""
        lm_head = self.work.lm_head
        objective = self.work.objective
        temperature = self.work.student_temperature
        alpha = objective.alpha
        e = objective.label_smoothing
        student = StudentRows.of(
            hidden_ND[chunk.rows],
            lm_head,
            chunk.gold_N,
            chunk.entries,
            temperature,
            smoothing=e > 0.0,
            slope=self.wants_slope,
        )
        hard = self._add_labels(student.nll_N, student.mean_nll_N, student.rows.lse_N)
        if chunk.entries is not None:
            self._add_forward_kl(
                chunk, chunk.entries, student.expected_N, student.negentropy_N, student.logq_E
            )
        if self.wants_logits:
            soft = 0.0 if chunk.entries is None else (1.0 - alpha) * temperature
            g_NV = student.turn_into_gradient_(
                hard, chunk.weigh(soft, student.nll_N), alpha * (1.0 - e), alpha * e
            )
            self._backpropagate_lm_head(chunk.rows, hidden_ND, g_NV)

    def _add_labels(
        self, nll_N: Tensor, mean_nll_N: Tensor | None, lse_N: Tensor
    ) -> float | Tensor:
        """Add the terms that need no teacher; return the factor of softmax(s) in their gradient.

        ``nll_N`` is -log q of the hard label; ``mean_nll_N`` the mean of -log q over all tokens,
        None without label smoothing. The factor is a number, or (N, 1).
        """
        alpha = self.work.objective.alpha
        z = self.work.objective.z_loss
        e = self.work.objective.label_smoothing
        self.ce += nll_N.sum(dtype=torch.float64)
        if mean_nll_N is not None:
            self.smoothing += e * (mean_nll_N - nll_N).sum(dtype=torch.float64)
        if z == 0.0:
            return alpha
        self.z += z * lse_N.double().square().sum()
        return alpha + 2.0 * z * lse_N[:, None]

    def _can_use_sums(self, teacher: TargetChunk) -> bool:
        """Return whether the divergence and its slopes need no more than E_p[s] and LSE(s)."""
        forward = self.work.objective.divergence == "forward_kl"
        return forward and (self.d_temperature is None or not isinstance(teacher, Distribution))

    def _add_kl_and_softmax(
        self, chunk: LossChunk, teacher: TargetChunk, s_NV: Tensor, out_NV: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Add forward KL for logits s (over T); return softmax(s) and LSE(s)."""
        expected_s_N = teacher.compute_expected_N(s_NV)
        entries = chunk.entries if self.d_weights_E is not None else None
        s_E = None if entries is None else entries.gather_logits(s_NV)
        # E_q[log q] needs s and q at once, so q may then not overwrite s.
        q_NV, lse_N = _compute_softmax(s_NV, None if self.wants_slope else out_NV)
        negentropy_N = torch.linalg.vecdot(q_NV, s_NV) - lse_N if self.wants_slope else None
        logq_E = None if entries is None or s_E is None else s_E - entries.spread(lse_N)
        expected_N = expected_s_N - chunk.multiply_by_total(lse_N)
        self._add_forward_kl(chunk, teacher, expected_N, negentropy_N, logq_E)
        return q_NV, lse_N

    def _add_apart(self, chunk: LossChunk, teacher: TargetChunk, s_NV: Tensor) -> Tensor | None:
        """Add a divergence that shares no softmax with the hard label; return its gradient.

        The gradient is None if the logits need none.
        """
        temperature = self.work.student_temperature
        s_NV = s_NV / temperature
        if not self._can_use_sums(teacher):
            assert isinstance(teacher, Distribution)
            return self._add_divergence(chunk, teacher, torch.log_softmax(s_NV, 1, out=s_NV))
        q_NV, _ = self._add_kl_and_softmax(chunk, teacher, s_NV, out_NV=s_NV)
        if not self.wants_logits:
            return None
        return subtract_target_(q_NV, teacher).mul_(
            chunk.weigh((1.0 - self.work.objective.alpha) * temperature, q_NV)
        )

    def _add_forward_kl(
        self,
        chunk: LossChunk,
        teacher: TargetChunk,
        expected_N: Tensor,
        negentropy_N: Tensor | None,
        logq_E: Tensor | None,
    ) -> None:
        """Add -E_p[log q] - H, and its slopes in T, in the entries' weights and in H.

        The slope in T needs ``negentropy_N``, E_q[log q]; those of the entries need ``logq_E``.
        """
        work = self.work
        kl_N = -expected_N - teacher.entropy_N
        self.entropy += teacher.entropy_N.sum(dtype=torch.float64)
        self.kd += work.scale * chunk.sum(kl_N)
        if self.d_temperature is not None and negentropy_N is not None:
            along_N = chunk.multiply_by_total(negentropy_N) - expected_N
            slope = chunk.sum(2.0 * kl_N - along_N) * work.student_temperature
            self.d_temperature += (1.0 - work.objective.alpha) * slope
        if self.d_weights_E is not None and self.d_entropy_N is not None and logq_E is not None:
            assert isinstance(teacher, SparseTarget) and isinstance(
                work.targets.teacher, SparseTarget
            )
            weight_N = torch.ones_like(kl_N) if chunk.weight_N is None else chunk.weight_N
            share_N = -work.soft * weight_N
            self.d_entropy_N[chunk.rows] = share_N
            self.d_weights_E[work.targets.teacher.find_entries(chunk.rows)] = (
                teacher.spread(share_N) * logq_E
            )

    def _add_divergence(
        self, chunk: LossChunk, teacher: Distribution, logq_NV: Tensor
    ) -> Tensor | None:
        """Add any divergence of whole distributions and its slope in T; return its gradient.

        The gradient is None if the logits need none.
        """
        work = self.work
        objective = self.work.objective
        temperature = self.work.student_temperature
        logp_NV = widen_logprobs(teacher.logp_NV, logq_NV.shape[1])
        found = compute_divergence(objective.divergence, objective.beta, logp_NV, logq_NV)
        self.entropy += teacher.entropy_N.sum(dtype=torch.float64)
        self.kd += work.scale * chunk.sum(found.value_N)
        if self.d_temperature is not None:
            along_N = compute_slope(found.b_NV, logp_NV) / work.targets.temperature_value
            if not objective.teacher_only:
                along_N = temperature**2 * along_N + temperature * compute_slope(
                    found.a_NV, logq_NV
                )
                along_N -= 2.0 * temperature * found.value_N
            self.d_temperature -= chunk.sum(along_N) * (1.0 - objective.alpha)
        if not self.wants_logits:
            return None
        g_NV = compute_logit_gradient(found.a_NV, logq_NV.exp())
        return g_NV.mul_(chunk.weigh((1.0 - objective.alpha) * temperature, g_NV))

    def _write_gradient(
        self, chunk: LossChunk, q_NV: Tensor, soft_NV: Tensor | None, hard: float | Tensor
    ) -> Tensor:
        """The gradient with respect to s, written over ``q_NV``, which holds softmax(s)."""
        alpha = self.work.objective.alpha
        e = self.work.objective.label_smoothing
        g_NV = q_NV
        # Without a hard label and z-loss, softmax(s) has no part in the gradient.
        if soft_NV is not None and isinstance(hard, float) and hard == 0.0:
            return soft_NV
        share = 0.0 if chunk.teacher is None or soft_NV is not None or alpha == 1.0 else 1.0 - alpha
        factor = chunk.weigh_softmax(share, g_NV)
        if soft_NV is not None or isinstance(factor, Tensor) or isinstance(hard, Tensor):
            hard = hard.to(g_NV.dtype) if isinstance(hard, Tensor) else hard
            g_NV.mul_(hard + factor)  # otherwise the factor is 1 - alpha + alpha
        if share > 0.0 and chunk.teacher is not None:
            chunk.teacher.subtract_(g_NV, chunk.weigh(share, g_NV))
        if soft_NV is not None:
            g_NV.add_(soft_NV)
        if alpha > 0.0:
            gold = torch.arange(len(chunk.gold_N), device=g_NV.device) * g_NV.shape[1]
            gold += chunk.gold_N
            label = g_NV.new_full((1,), -alpha * (1.0 - e)).expand(len(gold))
            g_NV.view(-1).index_add_(0, gold, label)
        return g_NV.sub_(alpha * e / g_NV.shape[1]) if alpha * e > 0.0 else g_NV

    def _backpropagate_lm_head(self, rows: slice, hidden_ND: Tensor, g_NV: Tensor) -> None:
        """Turn the gradient with respect to x Wᵀ + b into those for x, W and b."""
        lm_head = self.work.lm_head
        if self.d_bias is not None:
            self.d_bias[: lm_head.vocabulary] += g_NV.sum(0, dtype=self.d_bias.dtype)
        # Rounded only here, after the bias had its sum: the products run in this dtype.
        g_NV = g_NV.to(hidden_ND.dtype)
        if self.d_hidden_ND is not None:
            torch.mm(g_NV, lm_head.weight, out=self.d_hidden_ND[rows])
        if self.d_weight is not None:
            put = add_product_ if rows.start else write_product_
            put(self.d_weight[: lm_head.vocabulary], g_NV.T, hidden_ND[rows])


def _compute_softmax(s_NV: Tensor, out_NV: Tensor | None) -> tuple[Tensor, Tensor]:
    """softmax(s), in ``out_NV`` (which may be s) or in new memory, and LSE(s), (N,) in float64.

    The greatest probability is exp(max s - LSE(s)), which gives LSE(s). On a CPU a softmax and two
    maxima take half the time of a log-softmax and its exponentials, and LSE(s) - s is rounded no
    more than s itself.
    """
    greatest_N = s_NV.amax(1).double()
    q_NV = torch.softmax(s_NV, 1, out=out_NV)
    return q_NV, greatest_N - q_NV.amax(1).double().log()


class _FusedLMHead(torch.autograd.Function):
    """Forward computes loss and gradients chunk by chunk; backward scales the gradients in place.

    The gradients stay unscaled until backward: dividing by the token count first would underflow in
    float16.
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight, bias, temperature, weights_E, entropy_N, work: _LossInputs):  # type: ignore[no-untyped-def]
        inputs = hidden_ND, weight, bias, temperature, weights_E, entropy_N
        work = replace(work, lm_head=work.lm_head.cast(hidden_ND.dtype))
        loss = _LossPass.of(work, inputs, ctx.needs_input_grad[:6])
        loss.run(hidden_ND)
        ctx.gradients = loss.gradients
        ctx.places = [None if each is None else (each.device, each.dtype) for each in inputs]
        ctx.mark_non_differentiable(loss.kd, loss.ce, loss.z, loss.entropy, loss.smoothing)
        return loss.total, loss.kd, loss.ce, loss.z, loss.entropy, loss.smoothing

    @staticmethod
    def backward(ctx, d_total, *others):  # type: ignore[no-untyped-def]
        if ctx.gradients is None:
            raise RuntimeError(
                "the first backward already took the gradients of this loss: compute the loss again"
            )
        # Kept gradients would double their memory, which for the weight is that of the LM head.
        gradients = ctx.gradients
        ctx.gradients = None
        # Scaled in place, then brought to where the input is, and to its dtype.
        scaled = [
            None if gradient is None else gradient.mul_(d_total).to(*place)
            for gradient, place in zip(gradients, ctx.places, strict=True)
        ]
        return *scaled, None
