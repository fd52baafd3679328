"""Plain implementations of reports, scores, losses and records, to compare the fast ones with."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cache.codec import Codec
from cache.profiles.sampled import Sample
from cache.records import Sequences
from cache.rounding import RecordPositions
from kd.loss.dense import compute_dense_loss_from_logits
from kd.loss.fused import LossTerms
from kd.loss.objective import Objective
from kd.loss.targets import Targets, detach_number
from kd.loss.whole_targets import DenseTarget

#: Positions and vocabulary of the records, and the width of the teacher's hidden states.
N = 40
V = 211
WIDTH = 8
KNOTS = 5
KEPT = (3, 77)


def assert_same_facts(found: Any, expected: Any, rel: float = 1e-9) -> None:
    """Compare nested dictionaries and lists; numbers may differ by ``rel``."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same_facts(found[key], expected[key], rel)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_same_facts(*pair, rel)
    elif expected is None:
        assert found is None
    else:
        assert found == pytest.approx(expected, rel=rel, abs=1e-12)


def plain_logprobs(
    model: PreTrainedModel, sequences: Sequences, rows: int = 2048
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run transformers alone on one piece of a document at a time; of the LM head, take ``rows``.

    Returns log-probabilities (N, V) in float64, next tokens (N,) and lengths of the context (N,).
    """
    found = []
    golds = []
    contexts = []
    for row in range(len(sequences)):
        starts = [*sequences.document_start[row].nonzero()[0].tolist(), sequences.length]
        for start, stop in itertools.pairwise(starts):
            if sequences.target_mask[row, start]:
                ids = torch.from_numpy(sequences.tokens[row, start:stop].astype("int64"))[None]
                with torch.no_grad():
                    found.append(model(ids).logits[0, :-1, :rows].double().log_softmax(1))
                golds.append(ids[0, 1:])
                contexts.append(torch.arange(1, stop - start))
    return torch.cat(found), torch.cat(golds), torch.cat(contexts)


def by_hand(
    confidence: list[float], right: list[bool], bins: int
) -> tuple[float, list[dict[str, float]]]:
    """Return ECE and the reliability diagram by their definition: bin b is (b / B, (b + 1) / B]."""
    error = 0.0
    curve = []
    for number in range(bins):
        low = number / bins
        high = (number + 1) / bins
        inside = [
            place
            for place, each in enumerate(confidence)
            if low < each <= high or (each == 0.0 and number == 0)
        ]
        if inside:
            mean = math.fsum(confidence[place] for place in inside) / len(inside)
            accuracy = sum(right[place] for place in inside) / len(inside)
            error += len(inside) / len(confidence) * abs(accuracy - mean)
            curve.append(
                {"share": len(inside) / len(confidence), "confidence": mean, "accuracy": accuracy}
            )
    return error, curve


# ---------------------------------------------------------------------- losses


def dense_terms(
    logits_NV: Tensor,
    teacher_NV: Tensor,
    gold_N: Tensor,
    temperature: float | Tensor,
    objective: Objective,
    entropy_N: Tensor | None = None,
) -> LossTerms:
    """The plain loss for the logits of a student and of a teacher; differentiable in both and in T.

    ``entropy_N`` is the teacher's entropy at T = 1; by default that of ``teacher_NV``.
    """
    logp_NV = torch.log_softmax(teacher_NV.double(), 1)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(1) if entropy_N is None else entropy_N
    teacher = DenseTarget(teacher_NV, detach_number(temperature))
    targets = Targets(gold_N, teacher, temperature, entropy_N)
    return compute_dense_loss_from_logits(logits_NV.double(), targets, objective)


# ---------------------------------------------------------------------- records


def make_codec(profile: str, **options: Any) -> Codec:
    own: dict[str, dict[str, Any]] = {
        "threshold": {"threshold": 0.04, "always_keep": KEPT},
        "tempered": {"threshold": 0.04, "always_keep": KEPT, "temperatures": (0.5, 2.0)},
        "topk": {"k": 12},
        "dense": {"bits": 32},
        "hidden": {"bits": 8},
    }
    return Codec(profile, **{"vocabulary_size": V, **own[profile], **options})


def make_logits(positions: int = N, vocabulary: int = V, seed: int = 0) -> Tensor:
    """Rows from flat to peaked."""
    generator = torch.Generator().manual_seed(seed)
    spread_N1 = torch.linspace(0.3, 6.0, positions)[:, None]
    return torch.randn(positions, vocabulary, generator=generator) * spread_N1


def make_gold(positions: int = N, vocabulary: int = V) -> Tensor:
    """Random tokens; some are always_keep ids, which must not count twice."""
    gold_N = torch.randint(0, vocabulary, (positions,), generator=torch.Generator().manual_seed(9))
    gold_N[1::7] = KEPT[0]
    gold_N[2::7] = KEPT[1] % vocabulary
    return gold_N


def make_columns(codec: Codec, logits_NV: Tensor, gold_N: Tensor) -> dict[str, Tensor]:
    """The columns that a capture makes of the logits, as a batch carries them."""
    positions = np.arange(len(gold_N))
    places = RecordPositions(np.zeros_like(positions), positions)
    logp_NV = torch.log_softmax(logits_NV.double(), 1)
    entropy = -(logp_NV.exp() * logp_NV).sum(1).numpy()
    known = logp_NV.gather(1, gold_N[:, None]).numpy()
    if codec.profile == "topk":
        top = logp_NV.topk(codec.k, 1)
        outside = logp_NV.scatter(1, top.indices, -torch.inf).logsumexp(1)
        own = {"ids": top.indices, "logprobs": top.values, "residual": outside}
    elif codec.profile == "dense":
        own = {"logprobs": logp_NV}
    elif codec.profile == "hidden":
        hidden_ND = torch.randn(len(gold_N), WIDTH, generator=torch.Generator().manual_seed(2))
        own = {"states": hidden_ND}
    else:
        own = {}
    if own:
        floats = {name: column.numpy() for name, column in own.items()}
        reading = codec.rules.reading(known_logprobs=known, entropy=entropy, **floats)
    else:
        reading = make_sample(codec, logp_NV.numpy(), gold_N.numpy())
    records = codec.encode(reading, places)
    columns = {name: torch.from_numpy(column) for name, column in records.columns.items()}
    for name in {"tail_ids", "tail_logprobs"} & columns.keys():
        columns[name] = columns[name][:, 0]  # a batch holds one draw
    return columns


def make_sample(codec: Codec, logp_NV: np.ndarray, gold_N: np.ndarray) -> Sample:
    """A sampled record; known ids, head and partition as the format defines them.

    The tail is drawn by systematic sampling, one position at a time.
    """
    rng = np.random.default_rng(1)
    known_NA = np.stack([gold_N, *(np.full_like(gold_N, i) for i in codec.always_keep)], 1)
    betas = codec.proposal_betas if codec.profile == "tempered" else (1.0,)
    size_NV = np.mean(
        [torch.softmax(torch.from_numpy(logp_NV) * beta, 1).numpy() for beta in betas], axis=0
    )
    free_NV = np.ones(logp_NV.shape, bool)
    np.put_along_axis(free_NV, known_NA, False, 1)
    head_NV = free_NV & (size_NV > codec.threshold)
    tail_NV = np.where(free_NV & ~head_NV, size_NV, 0.0)
    rest_N = tail_NV.sum(1)
    count_N = np.where(rest_N > 0, np.maximum(rest_N // codec.threshold, 1), 0).astype(int)
    drawn = [draw_in_proportion(rng, row, m) for m, row in zip(count_N, tail_NV, strict=True)]
    tail_ids_M1 = np.concatenate([np.sort(ids) for ids in drawn]).astype(int)[:, None]
    rows_M1 = np.repeat(np.arange(len(gold_N)), count_N)[:, None]
    tempered = {}
    if codec.profile == "tempered":
        tail_logp_NV = torch.from_numpy(np.where(tail_NV > 0, logp_NV, -1e4))
        scaled = [tail_logp_NV * beta for beta in codec.nodes(KNOTS)]
        knots = [(z.logsumexp(1), (z.softmax(1) * tail_logp_NV).sum(1)) for z in scaled]
        partition_NJ2 = torch.stack([torch.stack(pair, 1) for pair in knots], 1).numpy()
        tempered = {"tail_logprobs": logp_NV[rows_M1, tail_ids_M1], "partition": partition_NJ2}
    return Sample(
        known_logprobs=np.take_along_axis(logp_NV, known_NA, 1),
        entropy=-(np.exp(logp_NV) * logp_NV).sum(1),
        head_count=head_NV.sum(1),
        head_ids=np.nonzero(head_NV)[1],
        head_logprobs=logp_NV[head_NV],
        tail_count=count_N,
        tail_ids=tail_ids_M1,
        **tempered,
    )


def draw_in_proportion(rng: np.random.Generator, size_V: np.ndarray, count: int) -> np.ndarray:
    """Different tokens; each comes with the chance ``count`` size / sum(size)."""
    order = rng.permutation(len(size_V))
    running = size_V[order].cumsum()
    points = (rng.random() + np.arange(count)) * running[-1] / max(count, 1)
    return order[np.searchsorted(running, points, side="right")]
