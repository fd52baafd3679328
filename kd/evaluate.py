"""How good the student is on the held-out sequences: perplexity, calibration, KL to the teacher's records, agreement.

What takes the whole teacher, or a closer look at the finished student, is in ``kd.evaluation``.

Shapes: N positions that have a target, V vocabulary, D hidden width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kd.batches import Source, validation_batches
from kd.config.loss import LearnedTemperature, LossConfig, Ramp
from kd.evaluation.calibration import BINS, Calibration
from kd.evaluation.text import bits_per_byte
from kd.losses import chunk_positions, in_parts
from kd.models import Head
from kd.precision import Precision, target_hidden_states
from kd.targets import TargetDecoder, Targets


def evaluation_temperature(loss: LossConfig) -> float:
    """The temperature that a job's evaluations are made at: one for all of them, so that they can be compared.

    A number as it is, of a schedule its end, of a learned one where it begins; 1 where the teacher alone is tempered.
    """
    if isinstance(loss.temperature, Ramp):
        return loss.temperature.end
    if isinstance(loss.temperature, LearnedTemperature):
        return 1.0 if loss.temperature.mode == "teacher_only" else loss.temperature.init
    return loss.temperature


@torch.no_grad()
def evaluate(
    student: nn.Module,
    head: Head,
    source: Source,
    decoder: TargetDecoder,
    batch_size: int,
    precision: Precision,
    device: torch.device,
    temperature: float = 1.0,
    text_bytes: int | None = None,
) -> dict[str, Any]:
    """Means over the held-out targets; empty where nothing is held out.

    ``validation_kl`` is at ``temperature``; from a sampled record it is unbiased but noisy. ``validation_agreement``
    counts the positions where the record knows the teacher's best token: all of them, but with sampled records only
    those where it has more than the threshold. ``validation_calibration_error`` is of 15 bins, at T = 1.
    ``validation_bits_per_byte`` needs the bytes of the held-out text (``kd.evaluation.text``).
    """
    student.eval()
    scores, tokens = [], 0
    for batch in validation_batches(source, batch_size):
        batch = batch.to(device)
        hidden_ND = target_hidden_states(student, batch, precision)
        scores.append(score(hidden_ND, head, decoder.targets(batch.gold_N, batch.teacher, temperature)))
        tokens += len(batch)
    if not tokens:
        return {}
    found = _means(scores, tokens)
    if text_bytes:
        found["validation_bits_per_byte"] = bits_per_byte(found["validation_loss"], tokens, text_bytes)
    return found


@dataclass(frozen=True)
class Score:
    """Sums over N positions, in nats; ``kd`` is KL at the targets' T, without the T^2 of the loss.

    On ``agreed`` of the ``comparable`` positions the best tokens are the same; ``calibration`` is at T = 1.
    """

    ce: float
    kd: float | None
    agreed: int
    comparable: int
    calibration: Calibration


@torch.no_grad()
def score(hidden_ND: Tensor, head: Head, targets: Targets, chunk: int | None = None) -> Score:
    """How good the model is whose final hidden states are ``hidden_ND``; logits exist ``chunk`` positions at a time."""
    ce, kd, agreed, comparable = 0.0, 0.0, 0, 0
    calibration = Calibration.none(BINS, hidden_ND.device)
    size = chunk or chunk_positions(head.vocabulary, hidden_ND.device)
    for part in in_parts(targets, size, torch.promote_types(hidden_ND.dtype, torch.float32)):
        logq_NV = torch.log_softmax(head.logits(hidden_ND[part.rows]), 1)
        ce -= float(logq_NV.gather(1, part.gold_N[:, None]).sum(dtype=torch.float64))
        most_N, best_N = logq_NV.max(1)
        calibration += Calibration.of(most_N.exp(), best_N == part.gold_N)
        if part.teacher is not None:
            known_N = part.teacher.best_N()
            agreed += int((best_N == known_N).sum())
            comparable += int((known_N >= 0).sum())
            kd -= float((part.teacher.expected_N(_tempered(logq_NV, targets)) + part.teacher.entropy_N).sum())
    return Score(ce, None if targets.teacher is None else kd, agreed, comparable, calibration)


def _tempered(logq_NV: Tensor, targets: Targets) -> Tensor:
    """The same at the targets' temperature; written over."""
    temperature = targets.temperature_value
    return logq_NV if temperature == 1.0 else torch.log_softmax(logq_NV.div_(temperature), 1)


def _means(scores: list[Score], tokens: int) -> dict[str, Any]:
    loss = sum(part.ce for part in scores) / tokens
    comparable = sum(part.comparable for part in scores)
    with_teacher = any(part.kd is not None for part in scores)
    calibration = sum((part.calibration for part in scores[1:]), scores[0].calibration)
    return {
        "validation_loss": loss,
        "validation_perplexity": math.exp(min(loss, 700.0)),
        "validation_kl": sum(part.kd or 0.0 for part in scores) / tokens if with_teacher else None,
        "validation_agreement": sum(part.agreed for part in scores) / comparable if comparable else None,
        "validation_calibration_error": calibration.error,
    }
