"""How good the student is on the held-out sequences: perplexity, KL to the teacher's records, top-1 agreement."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from kd.batches import Source, validation_batches
from kd.losses import Score, score
from kd.models import Head
from kd.precision import Precision, target_hidden_states
from kd.targets import TargetDecoder


@torch.no_grad()
def evaluate(
    student: nn.Module,
    head: Head,
    source: Source,
    decoder: TargetDecoder,
    batch_size: int,
    precision: Precision,
    device: torch.device,
) -> dict[str, Any]:
    """Means over the held-out targets; empty where nothing is held out.

    ``validation_kl`` is at the decoder's temperature; from a sampled record it is unbiased but noisy.
    ``validation_agreement`` counts the positions where the record knows the teacher's best token: all of them, but
    with sampled records only those where it has more than the threshold.
    """
    student.eval()
    scores = []
    tokens = 0
    for batch in validation_batches(source, batch_size):
        batch = batch.to(device)
        hidden_ND = target_hidden_states(student, batch, precision)
        scores.append(score(hidden_ND, head, decoder.targets(batch.gold_N, batch.teacher)))
        tokens += len(batch)
    return _means(scores, tokens)


def _means(scores: list[Score], tokens: int) -> dict[str, Any]:
    if not tokens:
        return {}
    loss = sum(part.ce for part in scores) / tokens
    comparable = sum(part.comparable for part in scores)
    with_teacher = any(part.kd is not None for part in scores)
    return {
        "validation_loss": loss,
        "validation_perplexity": math.exp(min(loss, 700.0)),
        "validation_kl": sum(part.kd or 0.0 for part in scores) / tokens if with_teacher else None,
        "validation_agreement": sum(part.agreed for part in scores) / comparable if comparable else None,
    }
