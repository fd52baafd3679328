"""Arbitrary distributions, samples of them, and properties that each sample must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from cache.codec import Codec
from cache.profiles.sampled import Sample
from cache.records import Records
from cache.rounding import RecordPositions
from kd.capture.sampling import Randomness, Sampler
from kd.loss.decoder import TargetDecoder
from kd.loss.sparse_targets import SparseTarget
from kd.loss.targets import Columns

KNOTS = 5
#: The temperatures that a tempered codec of the tests serves.
SPAN = (0.5, 2.0)
TEMPERATURES = (0.5, 0.77, 1.0, 1.6, 2.0)
CPU = torch.device("cpu")


def make_codec(profile: str, vocabulary: int, threshold: float = 0.04, **options: Any) -> Codec:
    options |= {"temperatures": SPAN} if profile == "tempered" else {}
    return Codec(profile, vocabulary, threshold=threshold, **options)


def sample(
    codec: Codec, logits_NV: Tensor, gold_N: Tensor | None = None, sequence: int = 0
) -> Sample:
    gold_N = torch.zeros(len(logits_NV), dtype=torch.int64) if gold_N is None else gold_N
    chance = Randomness.of(codec, sequence, np.arange(len(logits_NV)), CPU)
    return Sampler(codec, KNOTS if codec.profile == "tempered" else 0).sample(
        logits_NV, gold_N, chance
    )


def encode(codec: Codec, found: Sample, sequence: int = 0) -> Records:
    count = len(found.entropy)
    return codec.encode(found, RecordPositions(np.full(count, sequence), np.arange(count)))


def columns_of(records: Records, draw: int = 0) -> Columns:
    """Return the columns as a batch has them: tensors, with the tails of one draw."""
    columns = {name: torch.from_numpy(column) for name, column in records.columns.items()}
    return columns | {
        name: columns[name][:, draw] for name in {"tail_ids", "tail_logprobs"} & columns.keys()
    }


def dense(target: SparseTarget, vocabulary: int) -> np.ndarray:
    """Return the weights of a target as a distribution, (N, V)."""
    rows = np.repeat(np.arange(len(target.candidate_count_N)), target.offsets_N1.diff().numpy())
    weights = np.zeros((len(target.candidate_count_N), vocabulary))
    np.add.at(weights, (rows, target.ids_E.numpy()), target.weights_E.numpy())
    return weights


def decoded(
    codec: Codec, records: Records, gold_N: Tensor, temperature: float = 1.0, draw: int = 0
) -> np.ndarray:
    target = TargetDecoder(codec).decode(gold_N, columns_of(records, draw), temperature).teacher
    assert isinstance(target, SparseTarget)
    return dense(target, codec.vocabulary_size)


def require_the_last_token(case: Case) -> None:
    """Require that the sampler can keep the last token of the vocabulary, as any other."""
    case.logits_NV[1, -1] = 5e3  # the last token gets the whole mass of the second row
    found = sample(case.codec, case.logits_NV, case.gold_N)
    last = case.codec.vocabulary_size - 1
    assert last in found.head_ids or last in (int(case.gold_N[1]), *case.codec.always_keep)
    assert (found.head_count + found.tail_count).max() <= 1 / case.codec.threshold + 1
    rows = np.repeat(np.arange(2), found.tail_count)
    assert (case.size_NV[rows[:, None], found.tail_ids] > 0).all()
    records = encode(case.codec, found)
    for temperature in (0.5, 1.0, 2.0) if case.codec.profile == "tempered" else (1.0,):
        weights = decoded(case.codec, records, case.gold_N, temperature)
        np.testing.assert_allclose(weights[1].sum(), 1.0, atol=1e-6)


def require_sound_weights(case: Case) -> None:
    """Check each temperature that the profile serves, and each draw.

    Those of profile threshold sum to 1. Those of profile tempered do so in the mean over draws.
    """
    records = encode(case.codec, sample(case.codec, case.logits_NV, case.gold_N))
    for temperature in TEMPERATURES if case.codec.profile == "tempered" else (1.0,):
        for draw in range(case.codec.draws):
            weights = decoded(case.codec, records, case.gold_N, temperature, draw)
            assert np.isfinite(weights).all()
            if case.codec.profile == "threshold":
                np.testing.assert_allclose(weights.sum(1), 1.0, atol=1e-6)
            else:
                assert weights.min() >= 0.0


def require_what_the_scheme_says(case: Case) -> None:
    """Require exact heads, the right number of tail entries, and no token twice."""
    codec = case.codec
    found = sample(codec, case.logits_NV, case.gold_N)
    size = case.size_NV
    known = case.known_NV
    p = case.p_NV
    threshold = codec.threshold
    rows = len(size)
    ids = np.concatenate(
        [case.gold_N.numpy()[:, None], np.tile(codec.always_keep, (rows, 1)).astype(int)], 1
    )
    with np.errstate(divide="ignore"):
        logp = np.log(p)
    exact = np.maximum(np.take_along_axis(logp, ids, 1), -300)
    np.testing.assert_allclose(np.maximum(found.known_logprobs, -300), exact, rtol=1e-6, atol=2e-4)
    np.testing.assert_allclose(found.entropy, -(p * np.maximum(logp, -1e4)).sum(1), atol=2e-3)

    head_rows = np.repeat(np.arange(rows), found.head_count)
    head = np.zeros(size.shape, bool)
    head[head_rows, found.head_ids] = True
    edge = np.abs(size / threshold - 1) < 1e-4  # float32 may round it to either side
    assert not (head & known).any()
    assert ((head == (size > threshold)) | edge | known).all()
    np.testing.assert_allclose(found.head_logprobs, logp[head_rows, found.head_ids], atol=2e-4)

    rest = np.where(known | head, 0, size).sum(1)
    count = np.where(rest > 1e-38, np.maximum(np.floor(rest / threshold), 1), 0)
    near = (np.abs(rest / threshold - np.round(rest / threshold)) < 1e-3) | (rest < 1e-30)
    assert ((found.tail_count == count) | near & (np.abs(found.tail_count - count) <= 1)).all()
    assert (found.head_count + found.tail_count).max() <= 1 / threshold + 1
    assert found.tail_ids.shape == (found.tail_count.sum(), codec.draws)
    for row, draw_ids in enumerate(np.split(found.tail_ids, np.cumsum(found.tail_count)[:-1])):
        for tail in draw_ids.T:
            assert len(set(tail)) == len(tail), "no token twice"
            assert not (known | head)[row, tail].any(), "an entry is an entry once"
            assert (size[row, tail] > 0).all(), "a token that cannot come is never drawn"


KINDS = ("normal", "ties", "masked", "one-hot", "uniform", "cauchy", "two", "huge")


def make_logits(kind: str, rows: int, vocabulary: int, spread: float, seed: int) -> Tensor:
    """Return logits (N, V) of one of the KINDS; ``rows`` is N."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * spread
    if kind == "ties":
        logits = logits.round()
    elif kind == "masked":
        logits[:, 1:][torch.rand(rows, vocabulary - 1, generator=generator) < 0.7] = -torch.inf
    elif kind == "one-hot":
        logits[:, seed % vocabulary] += 500.0
    elif kind == "uniform":
        logits = torch.full((rows, vocabulary), -3.0)
    elif kind == "cauchy":
        logits = (
            torch.distributions.Cauchy(0.0, 1.0).icdf(
                torch.rand(rows, vocabulary, generator=generator)
            )
            * spread
        )
        logits.clamp_(-1e3, 1e3)
    elif kind == "two":
        logits[:] = -torch.inf
        logits[:, [0, vocabulary - 1]] = torch.tensor([500.0, 499.0])
    elif kind == "huge":
        logits += 800.0
    return logits


@dataclass(frozen=True)
class Case:
    """A codec, a teacher's logits and the gold tokens."""

    codec: Codec
    logits_NV: Tensor
    gold_N: Tensor

    @property
    def p_NV(self) -> np.ndarray:
        return torch.softmax(self.logits_NV.double(), 1).numpy()

    @property
    def size_NV(self) -> np.ndarray:
        """The weights in proportion to which tokens are drawn: the mean over the proposal betas."""
        betas = self.codec.proposal_betas if self.codec.profile == "tempered" else (1.0,)
        return np.mean(
            [torch.softmax(self.logits_NV.double() * beta, 1).numpy() for beta in betas], axis=0
        )

    @property
    def known_NV(self) -> np.ndarray:
        known = np.zeros(self.logits_NV.shape, bool)
        known[np.arange(len(known)), self.gold_N.numpy()] = True
        known[:, list(self.codec.always_keep)] = True
        return known


@st.composite
def cases(
    draw: Any,
    vocabularies: tuple[int, ...] = (2, 3, 63, 64, 65, 300, 2048),
    rows: int = 5,
    profiles: tuple[str, ...] = ("threshold", "tempered"),
) -> Case:
    vocabulary = draw(st.sampled_from(vocabularies))
    seed = draw(st.integers(0, 10_000))
    kept = tuple(draw(st.lists(st.integers(0, vocabulary - 1), max_size=3, unique=True)))
    codec = make_codec(
        draw(st.sampled_from(profiles)),
        vocabulary,
        draw(st.sampled_from([0.001, 1 / 255, 0.0155, 0.04, 0.125, 0.5])),
        always_keep=kept,
        draws=draw(st.integers(1, 3)),
        seed=seed,
    )
    logits = make_logits(
        draw(st.sampled_from(KINDS)),
        rows,
        vocabulary,
        draw(st.sampled_from([0.3, 2.0, 8.0, 40.0])),
        seed,
    )
    gold = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(seed))
    if kept:
        gold[0] = kept[0]
    return Case(codec, logits, gold)
