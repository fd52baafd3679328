"""Students against the whole distribution of a running teacher, on the held-out text.

    KL(p || q) = sum_v p_v log(p_v / q_v)            TV(p, q) = sum_v |p_v - q_v| / 2            both at T = 1

1 - TV is the chance that speculative decoding accepts a token that the student proposes (Leviathan et al., 2023).
Every model reads a batch once; of its logits a chunk of positions exists at a time.

Shapes: N positions that have a target, V vocabulary, D hidden width, B bins of confidence, C spans of context length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kd.batches import Batch, Source, validation_batches
from kd.config.evaluation import EvaluationConfig
from kd.evaluation.calibration import Calibration
from kd.evaluation.text import bits_per_byte
from kd.models import Head, head_of, hidden_states, require_context, require_document_isolation
from kd.precision import float32_products

#: Numbers that a chunk's (N, V) holds; one exists for each model, and some five more.
CHUNK_ELEMENTS = 2**22
#: Spans of context: 1 token, 2 to 3, 4 to 7, and so on, the last one open.
SPANS = 21
TEACHER = "teacher"


@dataclass(frozen=True)
class Reader:
    """A model in evaluation mode, and its head."""

    model: PreTrainedModel
    head: Head

    @classmethod
    def of(cls, model: PreTrainedModel, vocabulary: int, device: torch.device) -> Reader:
        """``model`` on ``device``."""
        nn.Module.to(model, device)
        return cls(model.eval(), head_of(model, vocabulary))

    def require_fit(self, sequence_length: int, packing: bool) -> None:
        """Raise ``ModelError`` if the model cannot read such sequences as they are meant."""
        require_context(self.model, sequence_length)
        if packing:
            require_document_isolation(self.model)

    def states(self, batch: Batch) -> Tensor:
        """Hidden states (N, D) of the positions that have a target."""
        return hidden_states(self.model, batch.tokens_BT, batch.positions_BT).flatten(0, 1)[batch.rows_N]


@dataclass(frozen=True)
class Sums:
    """Sums over N positions, float64; of the teacher itself all that compares with it is trivial.

    ``kl_C`` and ``count_C`` are by the tokens of the document that the model sees, in spans of powers of two.
    """

    ce: Tensor
    kl: Tensor
    variation: Tensor
    agreed: Tensor
    shared: Tensor
    kl_C: Tensor
    count_C: Tensor
    calibration: Calibration

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@torch.no_grad()
def compare(
    students: Mapping[str, Reader], teacher: Reader | None, source: Source, batch_size: int, options: EvaluationConfig
) -> dict[str, Sums]:
    """The sums of every student, and of the teacher where there is one; empty where nothing is held out.

    Without a teacher only cross-entropy and calibration mean something: each student is compared with itself.
    """
    everyone = {**students, **({TEACHER: teacher} if teacher is not None else {})}
    totals: dict[str, Sums] = {}
    with float32_products():
        for batch in validation_batches(source, batch_size):
            for name, sums in _batch_sums(everyone, batch, options):
                totals[name] = totals[name] + sums if name in totals else sums
    return totals


def _batch_sums(readers: Mapping[str, Reader], batch: Batch, options: EvaluationConfig) -> Iterator[tuple[str, Sums]]:
    """The sums of every reader, a chunk of positions after the other."""
    device = next(iter(readers.values())).model.device
    batch = batch.to(device)
    states = {name: reader.states(batch) for name, reader in readers.items()}
    context_N = _context(batch)
    size = max(CHUNK_ELEMENTS // next(iter(readers.values())).head.vocabulary, 1)
    for start in range(0, len(batch), size):
        rows = slice(start, start + size)
        said = {name: reader.head.logits(states[name][rows]).log_softmax(1) for name, reader in readers.items()}
        for name, q_NV in said.items():
            yield name, measure(said.get(TEACHER, q_NV), q_NV, batch.gold_N[rows], context_N[rows], options)


def _context(batch: Batch) -> Tensor:
    """Tokens (N,) of its document that a model has seen at each position that has a target, that one included."""
    if batch.positions_BT is not None:
        return batch.positions_BT.reshape(-1)[batch.rows_N] + 1
    return batch.rows_N % batch.tokens_BT.shape[1] + 1


def measure(p_NV: Tensor, q_NV: Tensor, gold_N: Tensor, context_N: Tensor, options: EvaluationConfig) -> Sums:
    """The sums of a student with log-probabilities ``q_NV`` against a teacher with ``p_NV``."""
    kl_N = (p_NV.exp() * (p_NV - q_NV)).sum(1, dtype=torch.float64)
    best_N, place_N = q_NV.max(1)
    span_N = torch.bucketize(context_N, 2 ** torch.arange(1, SPANS, device=context_N.device), right=True)
    member_CN = nn.functional.one_hot(span_N, SPANS).double().T
    return Sums(
        ce=-q_NV.gather(1, gold_N[:, None]).sum(dtype=torch.float64),
        kl=kl_N.sum(),
        variation=(p_NV.exp() - q_NV.exp()).abs().sum(dtype=torch.float64) / 2,
        agreed=(place_N == p_NV.argmax(1)).double().sum(),
        shared=_shared(p_NV, q_NV, min(options.top_k, p_NV.shape[1])),
        kl_C=member_CN @ kl_N,
        count_C=member_CN.sum(1),
        calibration=Calibration.of(best_N.exp(), place_N == gold_N, options.bins),
    )


def _shared(p_NV: Tensor, q_NV: Tensor, k: int) -> Tensor:
    """The sum over positions of the share of the k most probable tokens that two models have in common."""
    ours_Nk, theirs_Nk = q_NV.topk(k, dim=1).indices, p_NV.topk(k, dim=1).indices
    return (ours_Nk[:, :, None] == theirs_Nk[:, None, :]).double().sum() / k


def facts(sums: Sums, text_bytes: int | None, against_teacher: bool) -> dict[str, Any]:
    """Means over the positions, as a report has them; without a teacher those that need none."""
    count = float(sums.count_C.sum())
    loss = float(sums.ce) / count
    found: dict[str, Any] = {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": bits_per_byte(loss, int(count), text_bytes) if text_bytes else None,
        "calibration_error": sums.calibration.error,
        "reliability": sums.calibration.curve(),
    }
    if not against_teacher:
        return found
    variation = float(sums.variation) / count
    return found | {
        "kl": float(sums.kl) / count,
        "total_variation": variation,
        "acceptance": 1.0 - variation,
        "agreement": float(sums.agreed) / count,
        "top_k_agreement": float(sums.shared) / count,
        "kl_by_context": _by_context(sums),
    }


def _by_context(sums: Sums) -> list[dict[str, Any]]:
    """Mean KL where the model sees ``first`` to ``last`` tokens of the document."""
    rows = enumerate(zip(sums.count_C.tolist(), sums.kl_C.tolist(), strict=True))
    return [
        {"first": 2**span, "last": 2 ** (span + 1) - 1, "tokens": int(count), "kl": kl / count}
        for span, (count, kl) in rows
        if count
    ]
