"""Hidden states -> records -> disk -> targets, for every profile and arbitrary numbers, with the
same bits for any division into parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.support.small.caches import PROVENANCE, make_codec, make_identity
from cache.checking.verify import verify_cache
from cache.manifest import CacheIdentity, DataIdentity
from cache.profiles.table import PROFILES
from cache.profiles.threshold import KNOWN_STEPS
from cache.records import Records, Sequences
from cache.rounding import ENTROPY_STEP, KNOWN_STEP, TOP_STEP, make_cosine_basis
from cache.store import Cache, open_cache
from cache.writing.writer import open_writer
from kd.capture import recording, sampling
from kd.capture.recording import Recorder, SequenceStates
from kd.errors import ModelError
from kd.loss.decoder import TargetDecoder
from kd.loss.sparse_targets import SparseTarget
from kd.loss.whole_targets import HiddenTarget, TopTarget, decode_lm_head
from kd.models.lm_head import LMHead
from kd.text.batches import make_batch
from tests.support.caches import in_one_order, picked
from tests.support.kd.samples import make_recorder

CPU = torch.device("cpu")
KNOTS = 4
KEPT = (1, 6)

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Case:
    """The sequences of one shard, with the teacher's hidden states (S, L, D) for each."""

    identity: CacheIdentity
    sequences: Sequences
    hidden_SLD: Tensor
    head: LMHead

    @property
    def recorder(self) -> Recorder:
        return make_recorder(
            self.head, self.identity.record_codec(), self.hidden_SLD.shape[2], KNOTS
        )

    def parts(self, number: int) -> tuple[Tensor, Tensor, np.ndarray]:
        """Return hidden states, gold tokens and places of the targets of a sequence."""
        positions = np.flatnonzero(self.sequences.target_mask[number])
        gold = torch.from_numpy(self.sequences.tokens[number][positions + 1].astype(np.int64))
        return self.hidden_SLD[number, torch.from_numpy(positions)], gold, positions

    def records(self) -> Records:
        recorder = self.recorder
        each = [self.parts(number) for number in range(len(self.sequences))]
        return Records.concatenate(
            recorder.record(hidden, gold, number, places)
            for number, (hidden, gold, places) in enumerate(each)
        )

    def written(self, root: Path) -> Cache:
        with open_writer(root, self.identity) as writer:
            if self.identity.codec.profile == "hidden":
                writer.write_lm_head(self.recorder.make_lm_head_arrays())
            if (tables := self.recorder.tables) is not None:
                writer.write_tables(tables)
            writer.write_shard(0, self.sequences, self.records())
            writer.finish(PROVENANCE)
        assert verify_cache(writer.folder) == []
        return open_cache(writer.folder, self.identity)

    @property
    def logits_NV(self) -> Tensor:
        """Return the logits of all positions with a target."""
        return self.head.compute_logits(
            self.hidden_SLD[torch.from_numpy(self.sequences.target_mask)]
        )


def make_case(
    profile: str, vocabulary: int = 300, seed: int = 0, spread: float = 1.0, **options: Any
) -> Case:
    """Make three sequences of twelve tokens with gaps in their masks; one may have no target at
    all.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    mask = rng.random((3, 12)) < rng.choice([0.0, 0.5, 1.0], 3)[:, None]
    mask[:, -1] = False
    mask[1, 0] = True
    starts = np.zeros((3, 12), bool)
    starts[:, 0] = True
    tokens = rng.integers(0, vocabulary, (3, 12)).astype(np.uint32)
    tokens[1, 1] = KEPT[0]  # gold is an always_keep token
    sampled: dict[str, Any] = {"always_keep": KEPT} if PROFILES[profile].sampled else {}
    if "draws" in PROFILES[profile].options:
        sampled["draws"] = 2
    codec = make_codec(profile, **{"shard_sequences": 3, "seed": seed} | sampled | options)
    identity = make_identity(vocabulary, 12, 3, 0, codec)
    hidden = torch.randn(3, 12, 7, generator=generator) * spread
    weight = torch.randn(vocabulary + 5, 7, generator=generator)  # padded, as models' heads are
    bias = torch.randn(vocabulary + 5, generator=generator) if seed % 2 else None
    head = LMHead(weight, bias, 1.0 + seed % 3, 30.0 if seed % 4 == 3 else None, vocabulary)
    return Case(identity, Sequences(tokens, starts, mask), hidden, head)


def require_equal(left: Records, right: Records, draw: int = 0) -> None:
    mine = in_one_order(picked(left, draw))
    theirs = in_one_order(picked(right, draw))
    assert mine.keys() == theirs.keys()
    for name, column in mine.items():
        assert column.dtype == theirs[name].dtype
        assert np.array_equal(column, theirs[name]), name


def require_one(target: Any, positions: int) -> None:
    """Require that the weights of every position sum to 1, where each draw must do so."""
    if isinstance(target, SparseTarget) and not target.normalized:
        assert torch.isfinite(target.weights_E).all() and (target.weights_E >= 0.0).all()
        return
    if isinstance(target, SparseTarget):
        rows = torch.repeat_interleave(torch.arange(positions), target.offsets_N1.diff())
        total = torch.zeros(positions, dtype=torch.float64).index_add_(0, rows, target.weights_E)
    elif isinstance(target, TopTarget):
        total = target.p_NK.sum(1) + target.rest_N
    else:
        total = target.take_chunk(slice(0, positions)).p_NV.sum(1).double()
    torch.testing.assert_close(total, torch.ones(positions, dtype=torch.float64), atol=1e-6, rtol=0)


# ---------------------------------------------------------------------- through the disk


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(
    profile=st.sampled_from(list(PROFILES)),
    vocabulary=st.sampled_from([8, 63, 64, 65, 300]),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.0, 0.3, 1.0, 8.0, 60.0]),
)
def test_what_is_recorded_comes_back_from_the_disk_and_sums_to_one(
    profile: str, vocabulary: int, seed: int, spread: float
) -> None:
    case = make_case(profile, vocabulary, seed, spread)
    whole = case.records()
    with TemporaryDirectory() as folder:
        store = case.written(Path(folder))
        head = (
            decode_lm_head(store.teacher_head(), vocabulary, CPU) if profile == "hidden" else None
        )
        for draw in range(store.codec.draws):
            sequences, records = store.read([0, 1, 2], draw)
            require_equal(records, whole, draw)
            batch = make_batch(sequences, records)
            for temperature in (
                (0.5, 0.9, 1.0, 2.0) if PROFILES[profile].any_temperature else (1.0,)
            ):
                decoder = TargetDecoder(store.codec, head)
                require_one(
                    decoder.decode(batch.gold_N, batch.teacher, temperature).teacher, len(records)
                )


@pytest.mark.parametrize("profile", [profile for profile in PROFILES if profile != "dense"])
def test_a_vocabulary_of_262144_comes_back_from_the_disk(profile: str, tmp_path: Path) -> None:
    case = make_case(profile, 262_144, 4, 2.0)
    for draw in range(case.identity.codec.draws):
        require_equal(case.written(tmp_path).read([0, 1, 2], draw)[1], case.records(), draw)


@pytest.mark.parametrize(
    ("threshold", "most", "dtype"), [(0.004, 255, np.uint8), (0.001, 1023, np.uint16)]
)
@pytest.mark.parametrize("profile", ["threshold", "tempered"])
def test_the_smallest_thresholds_count_all_their_entries(
    profile: str, threshold: float, most: int, dtype: type[np.generic], tmp_path: Path
) -> None:
    """All of a flat distribution is tail, the largest that there can be.

    A steeper one has a head too.
    """
    for spread in (0.0, 0.7):
        case = make_case(profile, 2048, 8, spread, threshold=threshold, draws=1)
        store = case.written(tmp_path / str(spread))
        sequences, records = store.read([0, 1, 2])
        require_equal(records, case.records())
        counts = records["head_count"].astype(int) + records["tail_count"]
        assert records["head_count"].dtype == records["tail_count"].dtype == dtype
        assert counts.max() <= most
        assert counts.min() > 0.99 / threshold if spread == 0.0 else records["head_count"].min() > 0
        batch = make_batch(sequences, records)
        require_one(
            TargetDecoder(store.codec).decode(batch.gold_N, batch.teacher).teacher, len(records)
        )


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_gold_probabilities_and_entropies_are_the_teachers(profile: str, seed: int) -> None:
    options = {"entropies": True} if profile == "threshold" else {}
    case = make_case(profile, 300, seed, 3.0, **options)
    logp = torch.log_softmax(case.logits_NV.double(), 1).numpy()
    records = case.records()
    gold = case.sequences.find_gold_ids().astype(int)
    ids = np.stack(
        [gold, *(np.full_like(gold, kept) for kept in case.identity.codec.always_keep)], 1
    )
    exact = np.take_along_axis(logp, ids, 1)
    step = KNOWN_STEPS * KNOWN_STEP if profile == "threshold" else KNOWN_STEP
    assert np.abs(records["known"] * -KNOWN_STEP - exact).max() <= step + 1e-4
    assert (
        np.abs(records["entropy"] * ENTROPY_STEP + (np.exp(logp) * logp).sum(1)).max()
        <= ENTROPY_STEP + 1e-4
    )


def test_where_each_position_has_the_entropy_of_its_sequence_the_mean_is_the_teachers() -> None:
    case = make_case("threshold", 300, 3, 3.0)
    found = case.records()["entropy"] * ENTROPY_STEP
    logp = torch.log_softmax(case.logits_NV.double(), 1).numpy()
    exact = -(np.exp(logp) * logp).sum(1)
    starts = np.cumsum(case.sequences.target_mask.sum(1))[:-1]
    assert len(found) == len(exact) == 6
    for ours, theirs in zip(np.split(found, starts), np.split(exact, starts), strict=True):
        assert len(ours) == 0 or abs(ours.sum() - theirs.sum()) <= ENTROPY_STEP / 2 + 1e-3
        assert len(ours) == 0 or np.ptp(ours) <= ENTROPY_STEP


def test_topk_is_the_best_in_order_and_the_rest_exactly() -> None:
    case = make_case("topk", 300, 5, 3.0)
    records = case.records()
    logp = torch.log_softmax(case.logits_NV.double(), 1)
    top = logp.topk(5, 1)
    least = -65_534 * TOP_STEP  # -32 nats: what lies lower is said to lie there
    assert records["top_ids"].tolist() == top.indices.tolist()
    assert (
        np.abs(records["top_logprobs"] * -TOP_STEP - top.values.clamp(min=least).numpy()).max()
        <= TOP_STEP / 2 + 1e-5
    )
    rest = logp.scatter(1, top.indices, -torch.inf).logsumexp(1).clamp(min=least)
    assert np.abs(records["residual"] * -TOP_STEP - rest.numpy()).max() <= TOP_STEP / 2 + 1e-5


@pytest.mark.parametrize("bits", [16, 32])
def test_dense_is_all_log_probabilities(bits: int) -> None:
    case = make_case("dense", 300, 6, 2.0, bits=bits)
    exact = torch.log_softmax(case.logits_NV.double(), 1).numpy()
    np.testing.assert_allclose(
        case.records()["logprobs"], exact, rtol=2.0**-11 if bits == 16 else 1e-6, atol=1e-5
    )


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_hidden_states_give_the_teachers_logits_through_the_head_that_lies_beside_them(
    bits: int, seed: int, tmp_path: Path
) -> None:
    """With and without bias, scale and soft cap.

    Rounding h or its cosines changes a logit by at most |w| half steps.
    """
    case = make_case("hidden", 300, seed, 1.0, bits=bits)
    store = case.written(tmp_path)
    sequences, records = store.read([0, 1, 2])
    head = decode_lm_head(store.teacher_head(), 300, CPU)
    assert torch.equal(head.compute_logits(torch.eye(7)), case.head.compute_logits(torch.eye(7)))
    batch = make_batch(sequences, records)
    target = TargetDecoder(store.codec, head).decode(batch.gold_N, batch.teacher).teacher
    assert isinstance(target, HiddenTarget)
    exact = torch.log_softmax(case.logits_NV.double(), 1)
    error = (target.take_chunk(slice(None)).p_NV.double().log() - exact).abs().max(1).values
    h = case.hidden_SLD[torch.from_numpy(case.sequences.target_mask)]
    weight = case.head.weight
    if bits == 8:
        h, weight = (
            each @ torch.from_numpy(make_cosine_basis(7)).float().T for each in (h, weight)
        )
    step = h.abs().max(1).values / (254 if bits == 8 else 65_534)
    assert (error <= 2 * step * weight.abs().sum(1).max() * case.head.scale + 1e-4).all()


def test_a_head_in_bfloat16_is_kept_in_bfloat16(tmp_path: Path) -> None:
    case = make_case("hidden", 300, 0)
    narrow = LMHead(case.head.weight.bfloat16(), None, 1.0, None, 300)
    arrays = Recorder(narrow, case.identity.record_codec()).make_lm_head_arrays()
    assert arrays["weight"].dtype == np.uint16
    assert torch.equal(decode_lm_head(arrays, 300, CPU).weight, narrow.weight[:300].float())


@pytest.mark.parametrize("profile", ["threshold", "topk", "dense"])
def test_records_of_a_teacher_in_bfloat16_hold_logits_that_are_not_rounded(profile: str) -> None:
    """Rounded to bfloat16, logits of this size would be wrong by a tenth of a nat."""
    case = make_case(profile, 3000, 0, spread=3.0)
    head = replace(case.head, weight=case.head.weight.bfloat16(), bias=None)
    narrow = replace(case, head=head, hidden_SLD=case.hidden_SLD.bfloat16())
    wide_head = replace(head, weight=head.weight.float())
    wide = replace(case, head=wide_head, hidden_SLD=narrow.hidden_SLD.float())
    assert narrow.logits_NV.abs().max() > 16.0
    found = narrow.records()
    for name, column in wide.records().columns.items():
        assert np.array_equal(found[name], column), name


# ---------------------------------------------------------------------- the same bits


class Exact(LMHead):
    """An LM head whose logits do not depend on the number of rows: it looks up the first hidden
    number. A matrix product of another shape rounds differently, which is not tested here.
    """

    def project(self, hidden_ND: Tensor, room_NV: Tensor | None = None) -> Tensor:
        assert room_NV is not None
        found_NV = self.weight.T[hidden_ND[:, 0].long() % self.weight.shape[1], : self.vocabulary]
        return room_NV.copy_(found_NV)


@pytest.mark.long
@pytest.mark.parametrize("vocabulary", [300, 40_001])
@pytest.mark.parametrize("profile", PROFILES)
def test_records_are_the_same_bits_however_they_are_cut(
    profile: str, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of logits, rows of a pass, threads, orders of sequences, and parts of a sequence may
    vary.
    """
    # The mean entropy of a sequence is not that of a part of it.
    options = {"entropies": True} if profile == "threshold" else {}
    case = make_case(profile, vocabulary, 2, **options)
    weight = torch.randn(vocabulary, 20, generator=torch.Generator().manual_seed(1)) * 3
    head = Exact(weight, None, 1.0, None, vocabulary)
    codec = case.identity.record_codec()
    rng = np.random.default_rng(0)
    states = [torch.from_numpy(rng.integers(0, 20, (count, 1))).float() for count in (41, 8, 1)]
    gold = [torch.from_numpy(rng.integers(0, vocabulary, len(each))) for each in states]

    def read(order: tuple[int, ...]) -> list[Records]:
        recorder = make_recorder(head, codec, 1, KNOTS)
        found = {
            n: recorder.record(states[n], gold[n], n + 70, np.arange(len(gold[n]))) for n in order
        }
        return [found[n] for n in sorted(found)]

    whole = read((0, 1, 2))
    for chunk, rows, threads, order in [
        (1, 1, 1, (2, 1, 0)),
        (1, 2**20, 4, (0, 2, 1)),
        (7 * vocabulary, vocabulary, 2, (1, 0, 2)),
        (2**24, 3 * vocabulary, 4, (2, 0, 1)),
    ]:
        monkeypatch.setitem(recording.LOGIT_ELEMENTS, "cpu", chunk)
        monkeypatch.setitem(sampling.PASS_ELEMENTS, "cpu", rows)
        torch.set_num_threads(threads)
        for mine, theirs in zip(read(order), whole, strict=True):
            for name, column in theirs.columns.items():
                assert np.array_equal(mine[name], column), (name, chunk, rows, threads)
    torch.set_num_threads(1)
    part = make_recorder(head, codec, 1, KNOTS).record(
        states[0][5:9], gold[0][5:9], 70, np.arange(5, 9)
    )
    for name, column in whole[0].slice(5, 9).columns.items():
        assert np.array_equal(part[name], column), name


@pytest.mark.parametrize("seed", [2, 3, 5], ids=["plain", "soft cap", "bias"])
@pytest.mark.parametrize(
    ("profile", "options"),
    [*((profile, {}) for profile in PROFILES), ("threshold", {"threshold": 0.003})],
)
def test_a_chunk_that_spans_sequences_gives_the_records_of_each_alone(
    profile: str, options: dict[str, float], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the sequences has no target, and one is cut into two chunks."""
    case = make_case(profile, 300, seed, 2.0, **options)
    recorder = case.recorder
    parts = [case.parts(number % 3) for number in range(6)]
    empty = (torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), np.zeros(0, np.int64))
    rows = [
        SequenceStates(number, *part) for number, part in enumerate([*parts[:2], empty, *parts[2:]])
    ]
    for positions in (1, 9, 1000):
        monkeypatch.setitem(recording.LOGIT_ELEMENTS, "cpu", positions * 300)
        delivery = recorder.read(rows)
        alone = [
            recorder.record(row.hidden_ND, row.gold_N, row.number, row.positions_N) for row in rows
        ]
        require_equal(delivery.encode(), Records.concatenate(alone))
        assert (delivery.sequences, delivery.positions) == (7, sum(map(len, alone)))
        assert delivery.nbytes > 0


def test_a_cache_is_the_same_bytes_in_whatever_order_its_shards_are_captured(
    tmp_path: Path,
) -> None:
    """The capture is interrupted after any shard and resumed from the last shard backwards; the
    bytes stay the same.
    """
    case = make_case("tempered", 300, 5)
    data = DataIdentity("c" * 64, 12, True, 3, 0)
    identity = CacheIdentity(
        case.identity.teacher,
        case.identity.tokenizer,
        data,
        make_codec("tempered", shard_sequences=1),
    )
    recorder = Recorder(case.head, identity.record_codec(), KNOTS)
    contents = []
    for order in ((0, 1, 2), (2, 0, 1)):
        root = tmp_path / str(order)
        for index in order:
            with open_writer(root, identity) as writer:
                assert index in writer.find_missing_shards()
                hidden, gold, places = case.parts(index)
                records = recorder.record(hidden, gold, index, places)
                writer.write_shard(index, case.sequences.select(slice(index, index + 1)), records)
        with open_writer(root, identity) as writer:
            writer.finish(PROVENANCE)
        files = sorted(
            path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"
        )
        contents.append([(str(path.relative_to(root)), path.read_bytes()) for path in files])
    assert contents[0] == contents[1]


@pytest.mark.parametrize("profile", PROFILES)
def test_positions_outside_the_mask_store_no_record(profile: str) -> None:
    case = make_case(profile)
    assert 0 < len(case.records()) == case.sequences.positions < case.sequences.tokens.size


@pytest.mark.parametrize("profile", PROFILES)
def test_a_sequence_without_a_target_has_no_records_of_the_same_kind(profile: str) -> None:
    case = make_case(profile)
    none = case.recorder.record(
        torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), 5, np.zeros(0, np.int64)
    )
    assert len(none) == 0
    require_equal(Records.concatenate([none, case.records()]), case.records())


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_hidden_states_are_refused(profile: str, value: float) -> None:
    case = make_case(profile)
    case.hidden_SLD[1, 0, 2] = value
    with pytest.raises(ModelError, match="NaN or infinite"):
        case.records()
