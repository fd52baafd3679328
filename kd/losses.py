"""The loss: LM head, distillation and cross-entropy in one chunked pass that never builds (N, V).

    L = (1 - alpha) sum_n c_n T^2 D(p_n, q_n)             divergence of teacher and student, both at temperature T
      +      alpha  sum_n [(1 - e) -log q_gold - e mean_v log q_v]     cross-entropy of the smoothed hard label
      +           z sum_n LSE(s_n)^2                      what keeps the logits from drifting

with s the student's logits, q = softmax(s / T) in D and softmax(s) in the label's part, p the teacher at T
(``kd.targets``), and c_n = (1 + H_n)^w over its mean, by the teacher's entropy. D = KL(p || q) = -E_p[log q] - H(p) is
linear in p, so where p is a sample, value and gradient are unbiased: their mean over draws is full distillation. The
gradient with respect to s is (1 - alpha) c T [q - p] + alpha [softmax(s) - label] + 2 z LSE(s) softmax(s); at T = 1 all
of it shares one softmax, and the hard label is one more entry. ``kd.divergences`` has the other D.

The temperature's gradient is (1 - alpha) sum_n c_n [2 T D + T^2 dD/dT]. dD/dT through the student's logits over T is
-1/T times (dD/d(s/T) . s/T); through the teacher's it is the same of its own logits, or what autograd makes of the
gradients for the weights of entries and for H, which ``kd.targets`` decodes as functions of T.

Shapes: N positions that have a target, n of them in a chunk, V vocabulary, D hidden width, E entries.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kd.config.loss import Divergence, LearnedTemperature, LossConfig, Ramp
from kd.divergences import diverge, logit_gradient, slope_N
from kd.models import Head
from kd.student_rows import StudentRows, kernels_run
from kd.targets import Chunk, Distribution, SparseTarget, Targets, TopTarget

CPU_ELEMENTS = 12 * 2**20  # logits of a chunk: 48 MiB in float32; of half as many, matrix products take a tenth longer
CPU_POSITIONS = 1024  # of a small vocabulary: products gain no more from rows, and less memory is nearer
GPU_ELEMENTS, GPU_SHARE = 2**28, 1 / 32  # at most, and of the free memory: a chunk has some copies


@dataclass(frozen=True)
class Objective:
    """What the student should become; the fields are those of ``kd.config.loss``.

    T^2 multiplies every divergence: near each other, the gradients of all but total variation shrink as 1 / T^2, so it
    keeps alpha's meaning when T changes; total variation's shrink as 1 / T, and at T > 1 it gains weight by that much.
    ``teacher_only`` tempers the teacher and leaves the student at T = 1, and there is no T^2.
    """

    alpha: float = 0.0
    divergence: Divergence = "forward_kl"
    beta: float = 0.5
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    entropy_weighting: float = 0.0
    teacher_only: bool = False

    @classmethod
    def of(cls, config: LossConfig) -> Objective:
        """The objective of a job; where alpha has a schedule, at its start."""
        temperature = config.temperature
        return cls(
            alpha=config.alpha.start if isinstance(config.alpha, Ramp) else config.alpha,
            divergence=config.divergence,
            beta=config.beta,
            label_smoothing=config.label_smoothing,
            z_loss=config.z_loss,
            entropy_weighting=config.entropy_weighting,
            teacher_only=isinstance(temperature, LearnedTemperature) and temperature.mode == "teacher_only",
        )

    def at(self, alpha: float) -> Objective:
        """The same with ``alpha`` as the weight of the hard labels."""
        return replace(self, alpha=alpha)


@dataclass(frozen=True)
class LossTerms:
    """Sums over N positions, in nats (float64). ``total`` carries the gradients; the parts are for reporting.

    total = (1 - alpha) kd + alpha (ce + smoothing) + z, with ``kd`` the divergence times T^2, ``ce`` the cross-entropy
    of the hard label itself, ``smoothing`` what smoothing it adds and ``z`` the weighted squares. ``entropy`` is the
    teacher's at T, as far as its records know it.
    """

    total: Tensor
    kd: Tensor
    ce: Tensor
    z: Tensor
    entropy: Tensor
    smoothing: Tensor


def distillation_loss(
    hidden_ND: Tensor, head: Head, targets: Targets, objective: Objective, chunk: int | None = None
) -> LossTerms:
    """The summed loss of N positions; exact gradients for the hidden states, the head's weight and bias, and T.

    T is the targets' own. ``chunk`` is how many positions have logits at a time (``chunk_positions``). Divide ``total``
    by the number of targets of the whole optimiser step, not of this micro-batch, and call backward once: it hands the
    gradients over instead of copying them. Matrix products run in the dtype of ``hidden_ND``, everything else in
    float32 or better. Raises ``ValueError`` for an objective that the targets cannot serve.
    """
    teacher, temperature = targets.teacher, targets.temperature
    if teacher is None and objective.alpha != 1.0:
        raise ValueError(f"alpha must be 1 without the teacher's records, but got {objective.alpha}")
    if teacher is not None and objective.divergence != "forward_kl" and not teacher.whole:
        raise ValueError(f"{objective.divergence} needs all of p: use profile hidden or dense")
    learned = isinstance(temperature, Tensor) and temperature.requires_grad
    if learned and isinstance(teacher, TopTarget):
        raise ValueError(
            "the k most probable tokens say nothing of another temperature: use profile tempered or hidden"
        )
    entries = (teacher.weights_E, teacher.entropy_N) if learned and isinstance(teacher, SparseTarget) else (None, None)
    work = _Work(head, targets, objective, _token_weights(targets, objective), chunk)
    return LossTerms(
        *_FusedHead.apply(hidden_ND, head.weight, head.bias, temperature if learned else None, *entries, work)
    )


def chunk_positions(vocabulary: int, device: torch.device) -> int:
    """How many positions have their logits in memory at a time; on a GPU as many as a share of what is free holds."""
    if device.type != "cuda":
        return max(min(CPU_ELEMENTS // vocabulary, CPU_POSITIONS), 1)
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(min(int(free * GPU_SHARE) // 4, GPU_ELEMENTS) // vocabulary, 1)


def _token_weights(targets: Targets, objective: Objective) -> Tensor | None:
    """(1 + H)^w over its mean, (N,) in float64; a position whose entropy nobody said weighs 1. None where all do."""
    if objective.entropy_weighting == 0.0 or targets.teacher is None or not len(targets):
        return None
    if targets.entropy_N is None:
        raise ValueError("entropy_weighting needs the teacher's entropies, which these targets do not have")
    weight_N = (1.0 + targets.entropy_N).pow(objective.entropy_weighting)
    return (weight_N / weight_N.nanmean()).nan_to_num(nan=1.0)


# ---------------------------------------------------------------------- chunks


@dataclass(frozen=True)
class Part:
    """The targets of one chunk: positions ``rows``."""

    rows: slice
    gold_N: Tensor
    teacher: Chunk | None
    weight_N: Tensor | None

    @property
    def entries(self) -> SparseTarget | None:
        """The teacher's, where it is entries."""
        return self.teacher if isinstance(self.teacher, SparseTarget) else None

    def weighted(self, value: float, like: Tensor) -> float | Tensor:
        """``value`` times the token weights, (n, 1)."""
        return value if self.weight_N is None else (self.weight_N * value).to(like.dtype)[:, None]

    def sum(self, values_N: Tensor) -> Tensor:
        """The weighted sum, float64."""
        values_N = values_N.double()
        return values_N.sum() if self.weight_N is None else values_N @ self.weight_N


def in_parts(targets: Targets, size: int, dtype: torch.dtype, weight_N: Tensor | None = None) -> Iterator[Part]:
    """The N positions in runs of ``size``, their probabilities in ``dtype``; ``weight_N`` weighs positions."""
    for start in range(0, len(targets), size):
        rows = slice(start, min(start + size, len(targets)))
        chunk = None if targets.teacher is None else targets.teacher.chunk(rows, dtype)
        yield Part(rows, targets.gold_N[rows], chunk, None if weight_N is None else weight_N[rows])


# ---------------------------------------------------------------------- the pass


@dataclass(frozen=True)
class _Work:
    """What the pass works on besides the tensors that it differentiates."""

    head: Head
    targets: Targets
    objective: Objective
    weight_N: Tensor | None
    chunk: int | None

    @property
    def soft(self) -> float:
        """The weight of the divergence: (1 - alpha) T^2, or without T^2."""
        return (1.0 - self.objective.alpha) * self.scale

    @property
    def scale(self) -> float:
        """T^2, or 1 where only the teacher has a temperature."""
        return self.student_temperature**2

    @property
    def student_temperature(self) -> float:
        return 1.0 if self.objective.teacher_only else self.targets.temperature_value

    def in_kernels(self, hidden_ND: Tensor) -> bool:
        """Whether the kernels of ``kd.student_rows`` can do it: they know entries, hard labels and forward KL."""
        sparse = self.targets.teacher is None or isinstance(self.targets.teacher, SparseTarget)
        return sparse and self.objective.divergence == "forward_kl" and kernels_run(hidden_ND)


@dataclass
class _Pass:
    """The sums of the chunks so far, and the gradients where they are wanted: of what, in the order of the inputs."""

    work: _Work
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
    def of(cls, work: _Work, inputs: tuple[Tensor | None, ...], needed: tuple[bool, ...]) -> _Pass:
        """Nothing summed yet; a gradient for each of ``inputs`` that is ``needed``."""
        hidden_ND = inputs[0]
        assert hidden_ND is not None
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        dtypes = (hidden_ND.dtype, wide, wide, torch.float64, torch.float64, torch.float64)
        gradients = (
            torch.zeros_like(each, dtype=dtype) if each is not None and need else None
            for each, dtype, need in zip(inputs, dtypes, needed, strict=True)
        )
        d_hidden_ND, d_weight, d_bias, d_temperature, d_weights_E, d_entropy_N = gradients
        sums = hidden_ND.new_zeros(5, dtype=torch.float64)
        return cls(work, d_hidden_ND, d_weight, d_bias, d_temperature, d_weights_E, d_entropy_N, *sums)

    @property
    def gradients(self) -> list[Tensor | None]:
        return [self.d_hidden_ND, self.d_weight, self.d_bias, self.d_temperature, self.d_weights_E, self.d_entropy_N]

    @property
    def wants_logits(self) -> bool:
        """Whether the gradient with respect to the logits is of use."""
        return not (self.d_hidden_ND is None and self.d_weight is None and self.d_bias is None)

    @property
    def total(self) -> Tensor:
        alpha = self.work.objective.alpha
        return (1.0 - alpha) * self.kd + alpha * (self.ce + self.smoothing) + self.z

    @property
    def wants_slope(self) -> bool:
        """Whether the student's own entropy is of use: to the gradient for a temperature that it has, too."""
        return self.d_temperature is not None and not self.work.objective.teacher_only

    def run(self, hidden_ND: Tensor) -> None:
        """All chunks."""
        work, dtype = self.work, torch.promote_types(hidden_ND.dtype, torch.float32)
        size = work.chunk or chunk_positions(work.head.vocabulary, hidden_ND.device)
        if work.in_kernels(hidden_ND):
            chunk = self._chunk_in_kernels
        else:  # fresh memory costs a CPU as much as two passes over it: each chunk writes over the one before
            room_NV = hidden_ND.new_empty(min(size, len(hidden_ND)), work.head.vocabulary)
            chunk = functools.partial(self._chunk, room_NV)
        for part in in_parts(work.targets, size, dtype, work.weight_N):
            chunk(part, hidden_ND)

    def _chunk(self, room_NV: Tensor, part: Part, hidden_ND: Tensor) -> None:
        """One chunk, whose logits may lie in ``room_NV``; softmax(s) is written over them unless they are needed."""
        head, objective, teacher = self.work.head, self.work.objective, part.teacher
        s_NV = head.logits(hidden_ND[part.rows], room_NV[: len(part.gold_N)])
        gold_s_N = s_NV.gather(1, part.gold_N[:, None])[:, 0]
        mean_s_N = s_NV.mean(1) if objective.label_smoothing > 0.0 else None
        kept_NV, out_NV = (s_NV, None) if head.softcap else (None, s_NV)
        soft_NV = None
        if teacher is not None and self.work.student_temperature == 1.0 and self._by_sums(teacher):
            q_NV, lse_N = self._softmax_and_kl(part, teacher, s_NV, out_NV)
        else:
            soft_NV = self._apart(part, teacher, s_NV) if teacher is not None else None
            q_NV, lse_N = _softmax(s_NV, out_NV)
        hard = self._labels(lse_N - gold_s_N, None if mean_s_N is None else lse_N - mean_s_N, lse_N)
        if self.wants_logits:
            g_NV = self._gradient(part, q_NV, soft_NV, hard)
            self._through_head(part.rows, hidden_ND, _through_transform(g_NV, kept_NV, head))

    def _chunk_in_kernels(self, part: Part, hidden_ND: Tensor) -> None:
        """The same of entries or hard labels on a GPU, where the logits become their gradient in one buffer."""
        head, objective, temperature = self.work.head, self.work.objective, self.work.student_temperature
        alpha, e = objective.alpha, objective.label_smoothing
        student = StudentRows.of(
            hidden_ND[part.rows],
            head,
            part.gold_N,
            part.entries,
            temperature,
            smoothing=e > 0.0,
            slope=self.wants_slope,
        )
        hard = self._labels(student.nll_N, student.mean_nll_N, student.lse_N)
        if part.entries is not None:
            self._forward_kl(part, part.entries, student.expected_N, student.negentropy_N, student.logq_E)
        if self.wants_logits:
            soft = 0.0 if part.entries is None else (1.0 - alpha) * temperature
            g_NV = student.gradient_(hard, part.weighted(soft, student.nll_N), alpha * (1.0 - e), alpha * e)
            self._through_head(part.rows, hidden_ND, g_NV)

    def _labels(self, nll_N: Tensor, mean_nll_N: Tensor | None, lse_N: Tensor) -> float | Tensor:
        """Sum up what there is without a teacher; returns the factor of softmax(s) in its gradient.

        ``nll_N`` is the hard label's -log q, ``mean_nll_N`` the mean of all tokens', needed for label smoothing.
        """
        alpha, z, e = self.work.objective.alpha, self.work.objective.z_loss, self.work.objective.label_smoothing
        self.ce += nll_N.sum(dtype=torch.float64)
        if mean_nll_N is not None:
            self.smoothing += e * (mean_nll_N - nll_N).sum(dtype=torch.float64)
        if z == 0.0:
            return alpha
        self.z += z * lse_N.double().square().sum()
        return alpha + 2.0 * z * lse_N[:, None]

    def _by_sums(self, teacher: Chunk) -> bool:
        """Whether E_p[s] and LSE(s) are all that the divergence and its slopes take."""
        forward = self.work.objective.divergence == "forward_kl"
        return forward and (self.d_temperature is None or not isinstance(teacher, Distribution))

    def _softmax_and_kl(self, part: Part, teacher: Chunk, s_NV: Tensor, out_NV: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sum up forward KL for logits s (over T); returns their softmax and LSE as ``_softmax`` does."""
        expected_s_N = teacher.expected_N(s_NV)
        s_E = part.entries.at(s_NV) if part.entries is not None and self.d_weights_E is not None else None
        q_NV, lse_N = _softmax(s_NV, None if self.wants_slope else out_NV)
        negentropy_N = torch.linalg.vecdot(q_NV, s_NV) - lse_N if self.wants_slope else None
        logq_E = s_E - part.entries.spread(lse_N) if part.entries is not None and s_E is not None else None
        self._forward_kl(part, teacher, expected_s_N - lse_N, negentropy_N, logq_E)
        return q_NV, lse_N

    def _apart(self, part: Part, teacher: Chunk, s_NV: Tensor) -> Tensor | None:
        """Sum up a divergence that shares no softmax with the hard label; returns its gradient, if it is wanted."""
        temperature = self.work.student_temperature
        s_NV = s_NV / temperature
        if not self._by_sums(teacher):
            assert isinstance(teacher, Distribution)
            return self._diverge(part, teacher, torch.log_softmax(s_NV, 1, out=s_NV))
        q_NV, _ = self._softmax_and_kl(part, teacher, s_NV, out_NV=s_NV)
        if not self.wants_logits:
            return None
        teacher.subtract_(q_NV, 1.0)
        return q_NV.mul_(part.weighted((1.0 - self.work.objective.alpha) * temperature, q_NV))

    def _forward_kl(
        self, part: Part, teacher: Chunk, expected_N: Tensor, negentropy_N: Tensor | None, logq_E: Tensor | None
    ) -> None:
        """-E_p[log q] - H, and its slopes in T, in the entries' weights and in H.

        The slopes need E_q[log q] (``wants_slope``), and log q of the entries.
        """
        work = self.work
        kl_N = -expected_N - teacher.entropy_N
        self.entropy += teacher.entropy_N.sum(dtype=torch.float64)
        self.kd += work.scale * part.sum(kl_N)
        if self.d_temperature is not None and negentropy_N is not None:
            slope = part.sum(2.0 * kl_N - (negentropy_N - expected_N)) * work.student_temperature
            self.d_temperature += (1.0 - work.objective.alpha) * slope.to(self.d_temperature.device)
        if self.d_weights_E is not None and self.d_entropy_N is not None and logq_E is not None:
            assert isinstance(teacher, SparseTarget) and isinstance(work.targets.teacher, SparseTarget)
            share_N = (-work.soft * torch.ones_like(kl_N)) if part.weight_N is None else -work.soft * part.weight_N
            self.d_entropy_N[part.rows] = share_N
            self.d_weights_E[work.targets.teacher.entries(part.rows)] = teacher.spread(share_N) * logq_E

    def _diverge(self, part: Part, teacher: Distribution, logq_NV: Tensor) -> Tensor | None:
        """Any divergence of whole distributions, its slope in T, and its gradient."""
        work, objective, temperature = self.work, self.work.objective, self.work.student_temperature
        found = diverge(objective.divergence, objective.beta, teacher.logp_NV, logq_NV)
        self.entropy += teacher.entropy_N.sum(dtype=torch.float64)
        self.kd += work.scale * part.sum(found.value_N)
        if self.d_temperature is not None:
            along_N = slope_N(found.b_NV, teacher.logp_NV) / work.targets.temperature_value
            if not objective.teacher_only:
                along_N = temperature**2 * along_N + temperature * slope_N(found.a_NV, logq_NV)
                along_N -= 2.0 * temperature * found.value_N
            slope = -part.sum(along_N) * (1.0 - objective.alpha)
            self.d_temperature += slope.to(self.d_temperature.device)
        if not self.wants_logits:
            return None
        g_NV = logit_gradient(found.a_NV, logq_NV.exp())
        return g_NV.mul_(part.weighted((1.0 - objective.alpha) * temperature, g_NV))

    def _gradient(self, part: Part, q_NV: Tensor, soft_NV: Tensor | None, hard: float | Tensor) -> Tensor:
        """The gradient with respect to s, written over ``q_NV``, softmax(s)."""
        alpha, e, g_NV = self.work.objective.alpha, self.work.objective.label_smoothing, q_NV
        if soft_NV is not None and isinstance(hard, float) and hard == 0.0:
            return soft_NV
        share = 0.0 if part.teacher is None or soft_NV is not None or alpha == 1.0 else 1.0 - alpha
        if soft_NV is not None or part.weight_N is not None or isinstance(hard, Tensor):
            hard = hard.to(g_NV.dtype) if isinstance(hard, Tensor) else hard
            g_NV.mul_(hard + part.weighted(share, g_NV))  # 1 - alpha + alpha otherwise
        if share > 0.0 and part.teacher is not None:
            part.teacher.subtract_(g_NV, part.weighted(share, g_NV))
        if soft_NV is not None:
            g_NV.add_(soft_NV)
        if alpha > 0.0:
            _subtract_gold_(g_NV, part.gold_N, alpha * (1.0 - e))
        return g_NV.sub_(alpha * e / g_NV.shape[1]) if alpha * e > 0.0 else g_NV

    def _through_head(self, rows: slice, hidden_ND: Tensor, g_NV: Tensor) -> None:
        """From the gradient with respect to x Wᵀ + b to those of x, W and b."""
        head = self.work.head
        if self.d_bias is not None:
            self.d_bias[: head.vocabulary] += g_NV.sum(0, dtype=self.d_bias.dtype)
        g_NV = g_NV.to(hidden_ND.dtype)
        if self.d_hidden_ND is not None:
            torch.mm(g_NV, head.weight, out=self.d_hidden_ND[rows])
        if self.d_weight is not None:
            _add_product(self.d_weight[: head.vocabulary], g_NV.T, hidden_ND[rows])


def _softmax(s_NV: Tensor, out_NV: Tensor | None) -> tuple[Tensor, Tensor]:
    """softmax(s), in ``out_NV`` (which may be s) or anew, and LSE(s), (N,) in float64.

    The greatest probability is exp(max s - LSE(s)). A softmax and two maxima take a CPU half the time of a log-softmax
    and its exponentials, and LSE(s) - s is rounded no more than s itself.
    """
    greatest_N = s_NV.amax(1).double()
    q_NV = torch.softmax(s_NV, 1, out=out_NV)
    return q_NV, greatest_N - q_NV.amax(1).double().log()


class _FusedHead(torch.autograd.Function):
    """Forward computes loss and gradients chunk by chunk; backward only scales them, once and in place.

    The gradients stay unscaled until backward: dividing by the token count first would underflow in float16.
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight, bias, temperature, weights_E, entropy_N, work: _Work):  # type: ignore[no-untyped-def]
        inputs = hidden_ND, weight, bias, temperature, weights_E, entropy_N
        cast = weight[: work.head.vocabulary].detach().to(hidden_ND.dtype)  # once, not per chunk
        run = _Pass.of(replace(work, head=replace(work.head, weight=cast)), inputs, ctx.needs_input_grad[:6])
        run.run(hidden_ND)
        ctx.gradients = run.gradients
        ctx.dtypes = [None if each is None else each.dtype for each in inputs]
        ctx.mark_non_differentiable(run.kd, run.ce, run.z, run.entropy, run.smoothing)
        return run.total, run.kd, run.ce, run.z, run.entropy, run.smoothing

    @staticmethod
    def backward(ctx, d_total, *others):  # type: ignore[no-untyped-def]
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss were handed over by the first backward: compute it anew")
        gradients, ctx.gradients = ctx.gradients, None
        return *map(_scaled, gradients, [d_total] * len(gradients), ctx.dtypes), None


def _scaled(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """The gradient times a number, in place, in its input's dtype."""
    return None if gradient is None else gradient.mul_(factor.to(gradient.device)).to(dtype)


def _add_product(sum_VD: Tensor, a_VN: Tensor, b_ND: Tensor) -> None:
    """sum += a b, in place and without rounding a b where dtypes and device allow it."""
    if a_VN.dtype == sum_VD.dtype:
        sum_VD.addmm_(a_VN, b_ND)
    elif a_VN.is_cuda and sum_VD.dtype == torch.float32 and _adds_wide(a_VN.device, a_VN.dtype):
        torch.addmm(sum_VD, a_VN, b_ND, out_dtype=torch.float32, out=sum_VD)
    else:
        sum_VD += a_VN @ b_ND


@functools.cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of ``dtype`` can be added to float32 on this GPU: not every build of torch has the operation."""
    sum_DD, ones_DD = torch.ones(16, 16, device=device), torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(sum_DD, ones_DD, ones_DD, out_dtype=torch.float32, out=sum_DD)
    except RuntimeError:
        return False
    return bool((sum_DD == 17.0).all())


def _subtract_gold_(g_NV: Tensor, gold_N: Tensor, share: float) -> None:
    """g - share * e_gold, in place."""
    gold = torch.arange(len(gold_N), device=g_NV.device) * g_NV.shape[1] + gold_N
    g_NV.view(-1).index_add_(0, gold, g_NV.new_full((1,), -share).expand(len(gold)))


def _through_transform(g_NV: Tensor, s_NV: Tensor | None, head: Head) -> Tensor:
    """Chain rule of ``Head.transform``: d/dz c tanh(kz / c) = k (1 - (s / c)²). Written over both."""
    if s_NV is not None and head.softcap:
        g_NV = g_NV.mul_(s_NV.div_(head.softcap).square_().neg_().add_(1.0))
    return g_NV.mul_(head.scale) if head.scale != 1.0 else g_NV
