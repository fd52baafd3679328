"""The noise of a student's gradient: how much of it is the data's, and how much the records'.

    GradientNoise   what the sampled tails add to the gradient of the logits, beside its own size
    BatchNoise      the variance of the whole gradient from sequence to sequence, its part that
                    comes from the records, and the noise scale of the batch

The gradient of a position with respect to its logits is q - p, and g = W q - w with a sample w of p
whose sum is W. With the gradients g and h of two samples of the same position, |g - h|^2 / 2 is an
unbiased estimate of the noise E|g - (q - p)|^2, and g h one of |q - p|^2. Both are summed over a
few sequences.

With the gradient g_i of sequence i for all weights, G its mean and Sigma its covariance, the simple
noise scale is B = tr(Sigma) / |G|^2 (McCandlish et al., "An Empirical Model of Large-Batch
Training", arXiv 1812.06162): steps of B sequences need twice the steps of the largest batch, and
twice the sequences of the smallest. Unbiased from n sequences: |G|^2 is the mean of g_i g_j over
i != j, and tr(Sigma) the mean of |g_i|^2 less that. Where sequence i has two samples of its
records, |g_i - h_i|^2 / 2 is the records' part of tr(Sigma); the rest is the data's.

Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kd.config.job import JobConfig
from kd.evaluation.comparison import EvaluatedModel
from kd.loss.decoder import TargetDecoder
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.ramps import evaluate_ramp
from kd.loss.targets import TeacherTarget, subtract_target_
from kd.memory.step_memory import measure_free_memory
from kd.models.lm_head import LMHead
from kd.models.precision import Precision, compute_target_hidden_states, pick_device
from kd.text.batches import CachedRecords, Source, make_batch
from kd.training.evaluate import choose_evaluation_temperature

#: Elements of (N, V) that exist at once, several times.
_CHUNK_ELEMENTS = 1 << 22
#: Noise above this share of the gradient slows a student down from the start: in
#: docs/benchmarks/quality.md 0.18 cost 0.01 nats, 0.4 cost 0.06 and 1.4 cost 0.14.
NOTABLE_NOISE = 0.2
#: The same for a student near its teacher, which has less to learn.
NOTABLE_NEAR_NOISE = 1.0
#: The noise that an advised setting leaves.
_ADVISED_NOISE = 0.1
#: How much nearer to its teacher than now, in |p - q|^2, a trained student is taken to be.
NEAR = 10.0
#: Steps of fewer tokens than this do not average out the noise of a sample.
_FEW_TOKENS = 4096
#: The least threshold that is advised; records grow with its inverse.
_LEAST_THRESHOLD = 0.001
#: The largest threshold that is advised.
_LARGEST_THRESHOLD = 0.125
#: Sequences whose gradients are measured for the noise scale, at most.
MEASURED_SEQUENCES = 32
#: Sequences that are measured however long they take, and gradients that are kept at once.
_FEW_SEQUENCES, _KEPT_GRADIENTS = 4, 4
#: The records' part of the variance above which a smaller threshold is advised, the part that it
#: leaves, and the part below which a larger one loses nothing.
_LARGE_SHARE, _ADVISED_SHARE, _SMALL_SHARE = 0.2, 0.1, 0.02


@dataclass(frozen=True)
class GradientNoise:
    """The noise of the sampled tails, as a multiple of the gradient's own squared size.

    ``now`` is for the student as it starts, and ``near`` for one that is ``NEAR`` times nearer to
    its teacher.
    """

    now: float
    near: float

    @classmethod
    def of(cls, noise: float, signal: float) -> GradientNoise:
        """Make it from the sums over positions; a signal below the noise floor counts as small."""
        now = noise / max(signal, noise / 1e3, 1e-12)
        return cls(round(now, 4), round(now * NEAR, 4))


@torch.no_grad()
def measure_noise(
    config: JobConfig,
    source: CachedRecords,
    second: CachedRecords,
    student: PreTrainedModel,
    vocabulary: int,
) -> GradientNoise:
    """The noise of the gradient of ``student`` on the sequences of ``second``."""
    device = pick_device()
    measured = EvaluatedModel.of(student, vocabulary, config.data)
    numbers = np.arange(second.train_count)
    first, again = (make_batch(*each.read(numbers)).to(device) for each in (source, second))
    hidden_ND = measured.compute_hidden_states(first)
    temperature = choose_evaluation_temperature(config.loss)
    decoder = TargetDecoder.of(source, device)
    targets = [decoder.decode(each.gold_N, each.teacher, temperature) for each in (first, again)]
    # The sums of |g - h|^2 / 2 and g h over the positions.
    noise = 0.0
    signal = 0.0
    size = max(_CHUNK_ELEMENTS // measured.lm_head.vocabulary, 1)
    for start in range(0, len(hidden_ND), size):
        rows = slice(start, min(start + size, len(hidden_ND)))
        logits_NV = measured.lm_head.compute_logits(hidden_ND[rows]).float()
        q_NV = torch.softmax(logits_NV / temperature, 1)
        g_NV, h_NV = (_compute_gradient(each.teacher, rows, q_NV) for each in targets)
        noise += float((g_NV - h_NV).square().sum()) / 2
        signal += float((g_NV * h_NV).sum())
    return GradientNoise.of(noise, signal)


def _compute_gradient(teacher: TeacherTarget | None, rows: slice, q_NV: Tensor) -> Tensor:
    """The gradient of forward KL with respect to the student's logits, (N, V)."""
    assert teacher is not None, "a sample has a teacher"
    return subtract_target_(q_NV.clone(), teacher.take_chunk(rows, torch.float32))


def advise(config: JobConfig, noise: GradientNoise, tokens: int) -> list[str]:
    """Settings that make the noise small, where it would slow the student down."""
    now = noise.now > NOTABLE_NOISE
    if not now and noise.near <= NOTABLE_NEAR_NOISE:
        return []
    felt = noise.now if now else noise.near
    when = "from the start" if now else f"once the student is {NEAR:g} times nearer to its teacher"
    rest = "little" if tokens < _FEW_TOKENS else "a part"
    lines = [
        (
            f"The sampled tails add {felt:.0%} to the squared size of the gradient {when}, and "
            f"with {tokens:,} tokens a step only {rest} of that averages out: the student learns "
            "more slowly."
        )
    ]
    threshold = max(config.cache.threshold * _ADVISED_NOISE / felt, _LEAST_THRESHOLD)
    if threshold < config.cache.threshold:
        lines.append(f"Set cache.threshold to {threshold:.2g} for records with less noise.")
    if config.cache.profile == "tempered":
        lines.append("Or set cache.profile to hidden, which has no noise at any temperature.")
    steps = 4 * config.require_train().gradient_accumulation_steps
    lines.append(
        f"Or set train.gradient_accumulation_steps to {steps} or more: the noise of a step falls "
        "with its tokens."
    )
    return lines


# ---------------------------------------------------------------------- the noise of a batch


@dataclass(frozen=True)
class BatchNoise:
    """The size and the variance of the gradient of all weights, for one sequence.

    ``gradient`` is |G|^2, ``data`` and ``records`` are the parts of tr(Sigma); all three are
    estimates and may be negative where they are small. ``paired`` sequences have a second sample of
    their records; without one ``records`` is 0.
    """

    gradient: float
    data: float
    records: float
    tokens_per_sequence: float
    measured: int
    paired: int

    @classmethod
    def of(cls, sums: GradientSums, tokens: float) -> BatchNoise:
        """Make it from the sums over at least two sequences of ``tokens`` tokens on average."""
        count = sums.count
        gradient = (sums.square_of_sum - sums.sum_of_squares) / (count * (count - 1))
        whole = sums.sum_of_squares / count - gradient
        records = sums.differences / 2 / sums.paired if sums.paired else 0.0
        return cls(gradient, whole - records, records, tokens, count, sums.paired)

    @property
    def scale(self) -> float | None:
        """The noise scale in sequences; None where the gradient is lost in its noise."""
        variance = self.data + self.records
        return variance / self.gradient if self.gradient > 0 and variance > 0 else None

    @property
    def records_share(self) -> float:
        """The share of the variance that comes from the records, from 0 to 1."""
        whole = self.data + self.records
        return min(max(self.records / whole, 0.0), 1.0) if whole > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the numbers, with the noise scale in sequences and in tokens."""
        scale = self.scale
        tokens = None if scale is None else scale * self.tokens_per_sequence
        return asdict(self) | {
            "records_share": self.records_share,
            "scale_sequences": scale,
            "scale_tokens": tokens,
        }


@dataclass
class GradientSums:
    """Sums over the gradients g_i of sequences, and over h_i - g_i where there is a second h_i."""

    count: int = 0
    paired: int = 0
    sum_of_squares: float = 0.0
    square_of_sum: float = 0.0
    differences: float = 0.0


def measure_batch_noise(
    config: JobConfig,
    source: Source,
    second: CachedRecords | None,
    student: PreTrainedModel,
    vocabulary: int,
    seconds: float = math.inf,
) -> BatchNoise | None:
    """Measure the gradient of each of some training sequences.

    None for fewer than two, and where the gradients that are kept do not fit in the free memory.
    After ``seconds`` only the first few are measured.

    The loss is the job's, as at its first step and without dropout, feature matching, balance of
    experts or the control variate of ``loss.tail_control``. ``second`` has the first sequences of
    ``source`` with another sample. In float32; ``student`` moves to the device.
    """
    most = min(source.train_count, MEASURED_SEQUENCES)
    nn.Module.to(student, pick_device())
    if most < 2 or not _has_room(student):
        return None
    measured = EvaluatedModel.of(student, vocabulary, config.data)
    loss = _SequenceLoss.of(config, source, measured)
    again = 0 if second is None else min(second.train_count, most)
    sums = GradientSums()
    total: list[Tensor] = []
    began = time.monotonic()
    for number in range(most):
        if number >= _FEW_SEQUENCES and time.monotonic() - began > seconds:
            break
        gradient = loss.compute_gradient(source, number)
        sums.count += 1
        sums.sum_of_squares += _dot(gradient, gradient)
        total = _add(total, gradient) if total else [each.clone() for each in gradient]
        if second is not None and number < again:
            other = loss.compute_gradient(second, number)
            difference = [one - two for one, two in zip(other, gradient, strict=True)]
            sums.paired += 1
            sums.differences += _dot(difference, difference)
    tokens = source.read(np.arange(sums.count))[0].positions / sums.count
    sums.square_of_sum = _dot(total, total)
    for name in ("sum_of_squares", "square_of_sum", "differences"):
        # The mean of these gradients is that of the mean loss of a token.
        setattr(sums, name, getattr(sums, name) / max(tokens, 1.0) ** 2)
    return BatchNoise.of(sums, tokens)


def _has_room(student: PreTrainedModel) -> bool:
    """Whether the gradients that are kept at once fit in the free memory, as far as it is known."""
    free = measure_free_memory(student.device)
    trained = sum(each.numel() for each in student.parameters() if each.requires_grad)
    return free is None or _KEPT_GRADIENTS * 4 * trained <= free


@dataclass(frozen=True)
class _SequenceLoss:
    """The loss of one sequence, summed over its tokens."""

    student: PreTrainedModel
    lm_head: LMHead
    decoder: TargetDecoder
    objective: Objective
    temperature: float

    @classmethod
    def of(cls, config: JobConfig, source: Source, measured: EvaluatedModel) -> _SequenceLoss:
        steps = config.require_train().count_steps(source.train_count) or 1
        return cls(
            measured.model,
            measured.lm_head,
            TargetDecoder.of(source, measured.model.device),
            Objective.of(config.loss).with_alpha(evaluate_ramp(config.loss.alpha, 0, steps)),
            choose_evaluation_temperature(config.loss),
        )

    def compute_gradient(self, source: Source, number: int) -> list[Tensor]:
        """Return the gradient for each weight that is trained, in float32."""
        device = self.student.device
        batch = make_batch(*source.read(np.array([number]))).to(device)
        precision = Precision.choose("fp32", device)
        hidden_ND = compute_target_hidden_states(self.student, batch, precision)
        targets = self.decoder.decode(batch.gold_N, batch.teacher, self.temperature)
        head = self.lm_head.refresh(self.student)
        compute_distillation_loss(hidden_ND, head, targets, self.objective).total.backward()
        return list(_take_gradients(self.student))


def _take_gradients(student: PreTrainedModel) -> Iterator[Tensor]:
    for parameter in student.parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            parameter.grad = None
            yield torch.zeros_like(parameter) if gradient is None else gradient.detach()


def _add(total: list[Tensor], gradient: list[Tensor]) -> list[Tensor]:
    """Return ``total`` with ``gradient`` added in place."""
    return [one.add_(other) for one, other in zip(total, gradient, strict=True)]


def _dot(left: list[Tensor], right: list[Tensor]) -> float:
    """The inner product of two gradients, summed in float64."""
    parts = [(one * other).sum(dtype=torch.float64) for one, other in zip(left, right, strict=True)]
    return float(torch.stack(parts).sum())


def advise_on_batch(config: JobConfig, noise: BatchNoise) -> list[str]:
    """Advise on the sequences of a step and on the threshold, for a student as it was measured.

    The records' part of the variance grows about in proportion to ``cache.threshold``.
    """
    return [*_advise_on_size(config, noise), *_advise_on_records(config, noise)]


def _advise_on_size(config: JobConfig, noise: BatchNoise) -> list[str]:
    scale = noise.scale
    if scale is None:
        return [
            (
                f"The gradient is lost in its noise on {noise.measured} sequences: the noise "
                "scale is far above that. A larger batch pays, on several devices too."
            )
        ]
    own = config.require_train().sequences_per_step
    said = (
        f"The noise scale of the batch is {scale:,.1f} sequences "
        f"({scale * noise.tokens_per_sequence:,.0f} tokens), and a step has {own:,}."
    )
    if own * 2 < scale:
        rest = (
            "Twice the sequences a step need little more than half of the steps: raise "
            "train.batch_size or gradient_accumulation_steps, and train.learning_rate with them "
            "(train.batch_scaling)."
        )
    elif own > 4 * scale:
        rest = (
            "Steps of half the sequences learn almost as much each. The noise scale grows while a "
            "student learns: `kd noise` measures it for a finished one."
        )
    else:
        rest = "The two fit: more sequences a step save steps, and cost about as many tokens more."
    return [f"{said} {rest}"]


def _advise_on_records(config: JobConfig, noise: BatchNoise) -> list[str]:
    if not noise.paired:
        return []
    share = noise.records_share
    said = f"{share:.1%} of the gradient's variance comes from the sampled records"
    own = config.cache.threshold
    if share > _LARGE_SHARE and noise.data > 0:
        left = _ADVISED_SHARE / (1 - _ADVISED_SHARE) * noise.data
        threshold = max(own * left / noise.records, _LEAST_THRESHOLD)
        return [
            (
                f"{said}: cache.threshold {threshold:.2g} would leave about {_ADVISED_SHARE:.0%}, "
                f"with records of about {own / threshold:.2g} times the entries."
            )
        ]
    most = min(_LARGEST_THRESHOLD, own * _SMALL_SHARE / max(share, 1e-9))
    if most > 1.5 * own:
        return [
            (
                f"{said}: with a cache.threshold of up to {most:.2g} it stays below "
                f"{_SMALL_SHARE:.0%}, and records are smaller. A student near its teacher has a "
                "smaller gradient, in which the same noise counts more."
            )
        ]
    return [f"{said}, the rest from the data."]
