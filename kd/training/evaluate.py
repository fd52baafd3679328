"""Metrics on the held-out sequences: perplexity, calibration, KL and agreement with the teacher.

They need only the records of the cache. Metrics that need the teacher itself, or more time, are in
``kd.evaluation``.

Shapes: N positions that have a target, V vocabulary, D hidden width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from cache.json_object import Json
from cache.perplexity import BlockLosses, raise_e
from kd.config.loss import LearnedTemperature, LossConfig, Ramp
from kd.loss.aligned.targets import settle_targets
from kd.loss.chunk_size import choose_chunk_positions
from kd.loss.decoder import TargetDecoder
from kd.loss.fused import split_into_chunks
from kd.loss.targets import Targets
from kd.models.lm_head import LMHead
from kd.models.precision import Precision, compute_target_hidden_states
from kd.parallel.group import ALONE, Group
from kd.text.batches import Batch, Source
from kd.text.steps.reading import deal_validation_batches
from kd.training.calibration import BINS, Calibration
from kd.training.saved.state import Evaluation

#: The means that an evaluation has for each domain too.
BY_DOMAIN = (
    "validation_kl", "validation_agreement", "validation_perplexity", "validation_tokens",
)  # fmt: skip


def choose_evaluation_temperature(loss: LossConfig) -> float:
    """The temperature of all evaluations of a job: one for all, so that they can be compared.

    It is the fixed temperature, the end of a schedule, or the start of a learned one; 1 where the
    loss tempers the teacher alone.
    """
    if isinstance(loss.temperature, Ramp):
        return loss.temperature.end
    if isinstance(loss.temperature, LearnedTemperature):
        return 1.0 if loss.temperature.mode == "teacher_only" else loss.temperature.init
    return loss.temperature


@torch.no_grad()
def evaluate_student(
    student: PreTrainedModel,
    lm_head: LMHead,
    source: Source,
    decoder: TargetDecoder,
    batch_size: int,
    precision: Precision,
    device: torch.device,
    temperature: float = 1.0,
    group: Group = ALONE,
    call: Callable[..., BatchScore | None] = lambda work, batch: work(batch),
) -> Evaluation:
    """Compute means over the held-out targets, in nats; empty where nothing is held out.

    ``validation_kl`` is at ``temperature``; from sampled records it is unbiased but noisy.
    ``validation_agreement`` is over the positions whose record has the teacher's best token: all of
    them, or for sampled records those where that token's probability is above the threshold.
    ``validation_calibration_error`` has 15 bins, at T = 1. ``validation_perplexity_low`` and
    ``_high`` are the perplexity's interval (``cache.perplexity``), where it has few tokens. With
    several teachers the means ``BY_DOMAIN`` come for each domain too, as validation_kl/math.

    The ranks of ``group`` share the batches, and all of them get the means over all batches.
    ``call(work, batch)`` returns ``work(batch)``, computed where the parameters are whole; None on
    a rank that another one measures for.
    """
    student.eval()

    def score_batch(batch: Batch) -> BatchScore:
        hidden_ND = compute_target_hidden_states(student, batch, precision)
        targets = decoder.decode(batch.gold_N, batch.teacher, temperature)
        score = score_positions(hidden_ND, lm_head.refresh(student), targets)
        return BatchScore(**vars(score), targets_S=batch.count_targets())

    scores = []
    for counted, domain, batch in deal_validation_batches(source, batch_size, group.readers):
        score = call(score_batch, batch.to(device))
        if counted and score is not None:
            scores.append(replace(score, domain=domain))
    if not group.alone:
        # The scores of all ranks, in the order of the batches.
        dealt = group.gather([each.to_json() for each in scores])
        turns = itertools.chain.from_iterable(itertools.zip_longest(*dealt))
        scores = [BatchScore.from_json(each) for each in turns if each is not None]
    found = _average_scores(scores)
    for domain in dict.fromkeys(score.domain for score in scores if score.domain):
        own = _average_scores([score for score in scores if score.domain == domain])
        found |= {f"{name}/{domain}": own[name] for name in BY_DOMAIN if own}
    return found


@dataclass(frozen=True)
class Score:
    """Sums over N positions, in nats; ``kd`` is KL at the targets' T, without the T^2 of the loss.

    ``ce_N`` are the terms of ``ce``.
    ``comparable`` counts the positions whose record has the teacher's best token, ``agreed`` those
    of them where it is the student's best too. ``calibration`` is at T = 1.
    """

    ce: float
    kd: float | None
    agreed: int
    comparable: int
    calibration: Calibration
    ce_N: NDArray[np.float64]


@dataclass(frozen=True)
class BatchScore(Score):
    """The score of a batch of a domain, and the number of targets of each of its sequences."""

    targets_S: NDArray[Any]
    domain: str = ""

    def to_json(self) -> Json:
        """Return all numbers, for another rank."""
        return vars(self) | {
            "calibration": self.calibration.to_json(),
            "ce_N": self.ce_N.tolist(),
            "targets_S": self.targets_S.tolist(),
        }

    @classmethod
    def from_json(cls, numbers: Json) -> BatchScore:
        """Rebuild the score of another rank."""
        targets_S = np.array(numbers.pop("targets_S"), dtype=np.int64)
        ce_N = np.array(numbers.pop("ce_N"), dtype=np.float64)
        calibration = Calibration.from_json(numbers.pop("calibration"))
        return cls(**numbers, calibration=calibration, ce_N=ce_N, targets_S=targets_S)


@torch.no_grad()
def score_positions(
    hidden_ND: Tensor, lm_head: LMHead, targets: Targets, chunk_size: int | None = None
) -> Score:
    """Score a model by its final hidden states ``hidden_ND``.

    Logits exist for ``chunk_size`` positions at a time (None: chosen by the free memory).
    """
    ce = 0.0
    ce_parts = [hidden_ND.new_empty(0, dtype=torch.float64)]
    kd = 0.0
    agreed = 0
    comparable = 0
    calibration = Calibration.none(BINS, hidden_ND.device)
    size = chunk_size or choose_chunk_positions(lm_head.vocabulary, hidden_ND.device)
    dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    lm_head = lm_head.cast(hidden_ND.dtype)
    targets = settle_targets(hidden_ND, lm_head, targets, size)
    temperature = targets.temperature_value
    for chunk in split_into_chunks(targets, size, dtype):
        logq_NV = torch.log_softmax(lm_head.compute_logits(hidden_ND[chunk.rows]), 1)
        chosen_N = logq_NV.gather(1, chunk.gold_N[:, None])[:, 0]
        ce -= float(chosen_N.sum(dtype=torch.float64))
        ce_parts.append(-chosen_N.double())
        most_N, best_N = logq_NV.max(1)
        calibration += Calibration.of(most_N.exp(), best_N == chunk.gold_N)
        if chunk.teacher is not None:
            # -1 where the record does not have the teacher's best token.
            known_N = chunk.teacher.find_best_N()
            agreed += int((best_N == known_N).sum())
            comparable += int((known_N >= 0).sum())
            # Last, because it writes over the log-probabilities.
            if temperature != 1.0:
                logq_NV = torch.log_softmax(logq_NV.div_(temperature), 1)
            # KL = -H(p) - E_p[log q].
            kd -= float((chunk.teacher.compute_expected_N(logq_NV) + chunk.teacher.entropy_N).sum())
    ce_N = torch.cat(ce_parts).cpu().numpy()
    return Score(ce, None if targets.teacher is None else kd, agreed, comparable, calibration, ce_N)


def _average_scores(scores: list[BatchScore]) -> Evaluation:
    blocks = (BlockLosses.of(each.ce_N, each.targets_S) for each in scores)
    losses = sum(blocks, BlockLosses.none())
    tokens = losses.tokens
    if not tokens:
        return {}
    loss = sum(score.ce for score in scores) / tokens
    kl = sum(score.kd or 0.0 for score in scores) / tokens
    agreed = sum(score.agreed for score in scores)
    comparable = sum(score.comparable for score in scores)
    with_teacher = any(score.kd is not None for score in scores)
    calibration = sum((score.calibration for score in scores[1:]), scores[0].calibration)
    shown = losses.perplexity and losses.perplexity.shown_interval
    ends = asdict(shown) if shown else {}
    return {
        "validation_loss": loss,
        "validation_perplexity": raise_e(loss),
        "validation_tokens": tokens,
        **{f"validation_perplexity_{name}": value for name, value in ends.items()},
        "validation_kl": kl if with_teacher else None,
        "validation_agreement": agreed / comparable if comparable else None,
        "validation_calibration_error": calibration.error,
    }
