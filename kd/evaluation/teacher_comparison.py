"""Compare students with the whole distribution of a running teacher, on the held-out text.

    KL(p || q) = sum_v p_v log(p_v / q_v)
    TV(p, q) = sum_v |p_v - q_v| / 2

Both are at T = 1. 1 - TV is the probability that speculative decoding accepts a token that the
student proposes (Leviathan et al., 2023). Every model reads a batch once; its logits exist for one
chunk of positions at a time.

Shapes: N positions that have a target, V vocabulary, D hidden width, K top-k tokens, C spans of
context length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cache.perplexity import BlockLosses, Interval, raise_e
from kd.config.data import DataConfig
from kd.config.job import JobConfig
from kd.loss.decoder import TargetDecoder
from kd.loss.targets import widen_logprobs
from kd.models.attention.causality import require_causal
from kd.models.attention.isolation import isolate_documents
from kd.models.layers import compute_hidden_states, find_device, require_context
from kd.models.lm_head import LMHead, find_lm_head, find_student_head
from kd.models.precision import Precision, float32_products, pick_device
from kd.progress import SILENT, Monitor
from kd.text.batches import Batch, Source
from kd.text.steps.reading import read_validation_batches
from kd.text.text_bytes import compute_bits_per_byte
from kd.training.calibration import Calibration
from kd.training.evaluate import choose_evaluation_temperature, evaluate_student

#: Elements of a chunk's (N, V). One such tensor exists for each model, and about five more.
CHUNK_ELEMENTS = 2**22
#: Spans of context: 1 token, 2 to 3, 4 to 7, and so on; the last one has no end.
CONTEXT_SPANS = 21
#: k of the agreement of the k best tokens.
TOP_K = 5
TEACHER = "teacher"


@dataclass(frozen=True)
class EvaluatedModel:
    """A model in evaluation mode that reads the sequences of a job, and its LM head.

    All that measures a finished model reads it through this class, so that each document counts as
    if it were alone.
    """

    model: PreTrainedModel
    lm_head: LMHead

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        vocabulary: int,
        data: DataConfig,
        teaches: bool = False,
        monitor: Monitor = SILENT,
    ) -> EvaluatedModel:
        """Move ``model`` to the device of the run, and let it read sequences packed as in ``data``.

        A model that ``teaches`` is what its records are: a distribution over ``vocabulary`` tokens.
        Any other is one over all rows of its LM head. Raises ``ModelError`` if it cannot read them.
        """
        device = pick_device()
        # A teacher whose layers are spread (teacher.parallel) has its LM head there already.
        if find_device(model).type != device.type:
            nn.Module.to(model, device)
        require_context(model, data.sequence_length)
        require_causal(model, data.sequence_length)
        if data.packing:
            isolate_documents(model, monitor=monitor)
        find = find_lm_head if teaches else find_student_head
        return cls(model.eval(), find(model, vocabulary))

    def compute_hidden_states(self, batch: Batch) -> Tensor:
        """Hidden states (N, D) of the positions that have a target."""
        hidden_BLD = compute_hidden_states(self.model, batch.tokens_BL, batch.packed)
        return hidden_BLD.flatten(0, 1)[batch.rows_N]


@dataclass(frozen=True)
class ComparisonSums:
    """Sums over N positions, float64. For the teacher itself, all that compares with it is trivial.

    ``kl_C`` and ``count_C`` are by the number of the document's tokens that the model sees, in
    spans that double. ``losses`` holds the terms of ``ce`` by blocks.
    """

    ce: Tensor
    kl: Tensor
    variation: Tensor
    agreed: Tensor
    shared: Tensor
    kl_C: Tensor
    count_C: Tensor
    calibration: Calibration
    losses: BlockLosses = field(default_factory=BlockLosses.none)

    def __add__(self, other: ComparisonSums) -> ComparisonSums:
        names = [each.name for each in fields(self)]
        return ComparisonSums(*(getattr(self, name) + getattr(other, name) for name in names))


def compare_with_records(
    model: PreTrainedModel,
    config: JobConfig,
    source: Source,
    vocabulary: int,
    monitor: Monitor = SILENT,
) -> dict[str, float | None]:
    """Evaluate ``model`` by the held-out records, as ``kd.training.evaluate`` does, in float32.

    So the figures do not depend on the precision of the training.
    """
    measured = EvaluatedModel.of(model, vocabulary, config.data, monitor=monitor)
    device = pick_device()
    with float32_products():
        return evaluate_student(
            model,
            measured.lm_head,
            source,
            TargetDecoder.of(source, device),
            config.require_train().batch_size,
            Precision.choose("fp32", device),
            device,
            choose_evaluation_temperature(config.loss),
        )


@torch.no_grad()
def compare_models(
    models: Mapping[str, EvaluatedModel], source: Source, batch_size: int
) -> dict[str, ComparisonSums]:
    """The sums of every model; that of the name ``TEACHER`` is what the others are compared with.

    Without held-out text there are none. Without a teacher only cross-entropy and calibration have
    a meaning: each student is compared with itself.
    """
    totals: dict[str, ComparisonSums] = {}
    # TF32 would blur the small differences between models that this measures.
    with float32_products():
        for batch in read_validation_batches(source, batch_size):
            for name, sums in _sum_batch(models, batch).items():
                totals[name] = totals[name] + sums if name in totals else sums
    return totals


def _sum_batch(models: Mapping[str, EvaluatedModel], batch: Batch) -> dict[str, ComparisonSums]:
    """The sums of every model over a batch."""
    totals: dict[str, ComparisonSums] = {}
    parts: dict[str, list[Tensor]] = {name: [] for name in models}
    first = next(iter(models.values()))
    batch = batch.to(find_device(first.model))
    states = {name: model.compute_hidden_states(batch) for name, model in models.items()}
    # Tokens of its document that a model sees at each target position, itself included. Packed
    # sequences count positions anew in each document.
    if batch.positions_BL is not None:
        context_N = batch.positions_BL.reshape(-1)[batch.rows_N] + 1
    else:
        context_N = batch.rows_N % batch.tokens_BL.shape[1] + 1
    size = max(CHUNK_ELEMENTS // first.lm_head.vocabulary, 1)
    for start in range(0, len(batch), size):
        rows = slice(start, start + size)
        logprobs = {
            name: model.lm_head.compute_logits(states[name][rows]).log_softmax(1)
            for name, model in models.items()
        }
        gold_N = batch.gold_N[rows]
        for name, q_NV in logprobs.items():
            p_NV = widen_logprobs(logprobs.get(TEACHER, q_NV), q_NV.shape[1])
            sums = measure_chunk(p_NV, q_NV, gold_N, context_N[rows])
            totals[name] = totals[name] + sums if name in totals else sums
            parts[name].append(-q_NV.gather(1, gold_N[:, None])[:, 0].double())
    targets_B = batch.count_targets()
    # Only now, because a block may lie in two chunks.
    return {
        name: replace(sums, losses=BlockLosses.of(torch.cat(parts[name]).cpu().numpy(), targets_B))
        for name, sums in totals.items()
    }


def measure_chunk(p_NV: Tensor, q_NV: Tensor, gold_N: Tensor, context_N: Tensor) -> ComparisonSums:
    """The sums of a student with log-probabilities ``q_NV`` against a teacher with ``p_NV``."""
    kl_N = (p_NV.exp() * (p_NV - q_NV)).sum(1, dtype=torch.float64)
    best_N, place_N = q_NV.max(1)
    # Span i has contexts of 2^i to 2^(i + 1) - 1 tokens.
    ends_C = 2 ** torch.arange(1, CONTEXT_SPANS, device=context_N.device)
    span_N = torch.bucketize(context_N, ends_C, right=True)
    member_CN = nn.functional.one_hot(span_N, CONTEXT_SPANS).double().T
    # Of the k most probable tokens, the share that both have.
    k = min(TOP_K, p_NV.shape[1])
    ours_NK, theirs_NK = q_NV.topk(k, dim=1).indices, p_NV.topk(k, dim=1).indices
    return ComparisonSums(
        ce=-q_NV.gather(1, gold_N[:, None]).sum(dtype=torch.float64),
        kl=kl_N.sum(),
        variation=(p_NV.exp() - q_NV.exp()).abs().sum(dtype=torch.float64) / 2,
        agreed=(place_N == p_NV.argmax(1)).double().sum(),
        shared=(ours_NK[:, :, None] == theirs_NK[:, None, :]).double().sum() / k,
        kl_C=member_CN @ kl_N,
        count_C=member_CN.sum(1),
        calibration=Calibration.of(best_N.exp(), place_N == gold_N),
    )


@dataclass(frozen=True)
class ModelScores:
    """What a report says of a model on the held-out text: means over its positions."""

    loss: float
    tokens: int
    perplexity: float
    perplexity_interval: Interval | None
    bits_per_byte: float | None
    calibration_error: float | None
    reliability: list[dict[str, float]]


@dataclass(frozen=True)
class ComparedScores(ModelScores):
    """What a report says of a model that was compared with its teacher.

    ``kl_by_context`` has the mean KL where the model sees ``first`` to ``last`` tokens of the
    document.
    """

    kl: float
    total_variation: float
    acceptance: float
    agreement: float
    top_k_agreement: float
    kl_by_context: list[dict[str, float]]


def summarise_sums(
    sums: ComparisonSums, text_bytes: int | None, against_teacher: bool
) -> ModelScores:
    """Means over the positions; without a teacher, only those that need none."""
    count = float(sums.count_C.sum())
    loss = float(sums.ce) / count
    perplexity = sums.losses.perplexity
    found = ModelScores(
        loss=loss,
        tokens=int(count),
        perplexity=raise_e(loss),
        perplexity_interval=None if perplexity is None else perplexity.interval,
        bits_per_byte=compute_bits_per_byte(loss, int(count), text_bytes) if text_bytes else None,
        calibration_error=sums.calibration.error,
        reliability=sums.calibration.curve(),
    )
    if not against_teacher:
        return found
    variation = float(sums.variation) / count
    spans = enumerate(zip(sums.count_C.tolist(), sums.kl_C.tolist(), strict=True))
    kl_by_context = [
        {"first": 2**span, "last": 2 ** (span + 1) - 1, "tokens": int(tokens), "kl": kl / tokens}
        for span, (tokens, kl) in spans
        if tokens
    ]
    return ComparedScores(
        **vars(found),
        kl=float(sums.kl) / count,
        total_variation=variation,
        acceptance=1.0 - variation,
        agreement=float(sums.agreed) / count,
        top_k_agreement=float(sums.shared) / count,
        kl_by_context=kl_by_context,
    )
