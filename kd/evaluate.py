"""How good the student is on the held-out sequences: perplexity, calibration, KL to the teacher's records, agreement.

What takes the whole teacher, or a closer look at the finished student, is in ``kd.evaluation``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from kd.batches import Source, validation_batches
from kd.config.loss import LearnedTemperature, LossConfig, Ramp
from kd.evaluation.calibration import BINS, Calibration, calibrate
from kd.evaluation.text import bits_per_byte
from kd.losses import Score, score
from kd.models import Head
from kd.precision import Precision, target_hidden_states
from kd.targets import TargetDecoder


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
    scores, calibration, tokens = [], Calibration.none(BINS, device), 0
    for batch in validation_batches(source, batch_size):
        batch = batch.to(device)
        hidden_ND = target_hidden_states(student, batch, precision)
        scores.append(score(hidden_ND, head, decoder.targets(batch.gold_N, batch.teacher, temperature)))
        calibration += calibrate(hidden_ND, head, batch.gold_N)
        tokens += len(batch)
    if not tokens:
        return {}
    found = _means(scores, tokens) | {"validation_calibration_error": calibration.error}
    if text_bytes:
        found["validation_bits_per_byte"] = bits_per_byte(found["validation_loss"], tokens, text_bytes)
    return found


def _means(scores: list[Score], tokens: int) -> dict[str, Any]:
    loss = sum(part.ce for part in scores) / tokens
    comparable = sum(part.comparable for part in scores)
    with_teacher = any(part.kd is not None for part in scores)
    return {
        "validation_loss": loss,
        "validation_perplexity": math.exp(min(loss, 700.0)),
        "validation_kl": sum(part.kd or 0.0 for part in scores) / tokens if with_teacher else None,
        "validation_agreement": sum(part.agreed for part in scores) / comparable if comparable else None,
    }
