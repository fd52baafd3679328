"""Batches: their order is a pure function of seed and step, and their tensors equal the records."""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.support.small.caches import (
    make_cache,
    make_codec,
    make_identity,
    make_records,
    make_sequences,
)
from cache.codec import Codec
from cache.reading.file_reads import DiskReads
from cache.records import Records, Sequences
from cache.rounding import ENTROPY_STEP, UNKNOWN_ENTROPY
from cache.store import Cache, open_cache
from kd.config.data import DataConfig
from kd.config.train import TrainConfig
from kd.errors import ConfigError
from kd.text.batches import Batch, PlainText, make_batch
from kd.text.corpus import Corpus
from kd.text.packing import Document, measure_text_lengths, pack_documents
from kd.text.steps import reading
from kd.text.steps.order import (
    compute_mean_entropies,
    list_step_epochs,
    list_step_indices,
    order_by_difficulty,
    order_by_length,
    shuffle_epoch,
)
from kd.text.steps.pinned import cut_pieces
from kd.text.steps.reading import (
    TimedIterator,
    count_loader_threads,
    count_pinned_bytes,
    cut_padding,
    read_training_batches,
    read_validation_batches,
)

VOCABULARY = 300


@dataclass
class Numbered:
    """A source whose sequence n holds token n and the draw; reading ``broken`` fails."""

    train_count: int
    validation_count: int = 0
    broken: int = -1
    identity: str = "numbered"
    codec: None = None

    def teacher_head(self) -> dict[str, np.ndarray]:
        raise LookupError("there is no teacher")

    def tail_mean(self) -> None:
        return None

    def projection(self) -> None:
        return None

    def read(self, indices: np.ndarray, draws: np.ndarray | int = 0) -> tuple[Sequences, None]:
        if self.broken in indices:
            raise OSError(f"sequence {self.broken} cannot be read")
        tokens = np.repeat(np.asarray(indices, np.uint32)[:, None], 4, axis=1)
        tokens[:, 1] = draws
        starts, targets = np.zeros((2, *tokens.shape), bool)
        starts[:, 0] = True
        targets[:, :-1] = True
        return Sequences(tokens, starts, targets), None


def options(batch_size: int, accumulation: int, seed: int, **changes) -> TrainConfig:
    sizes = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation, "seed": seed}
    return TrainConfig(**sizes, max_steps=1, **changes)


def numbers(batch: Batch) -> list[int]:
    return batch.tokens_BL[:, 0].tolist()


def draws(batch: Batch) -> list[int]:
    return batch.tokens_BL[:, 1].tolist()


# ---------------------------------------------------------------------- order


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 40), batch=st.integers(1, 17), seed=st.integers(0, 2**32 - 1))
def test_every_epoch_visits_each_sequence_once(count, batch, seed):
    epochs = 3
    steps = -(-epochs * count // batch)
    stream = np.concatenate([list_step_indices(count, batch, seed, step) for step in range(steps)])
    for epoch in range(epochs):
        assert sorted(stream[epoch * count : (epoch + 1) * count].tolist()) == list(range(count))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 2**32 - 1), st.integers(0, 50))
def test_the_order_is_a_function_of_seed_and_step_alone(count, batch, seed, step):
    asked_first = list_step_indices(count, batch, seed, step)
    for other in (0, step + 1, 999):
        list_step_indices(count, batch, seed + 1, other)
    assert np.array_equal(asked_first, list_step_indices(count, batch, seed, step))


def test_the_batch_size_cuts_one_and_the_same_stream():
    def stream(batch):
        return np.concatenate(
            [list_step_indices(24, batch, 7, step) for step in range(48 // batch)]
        )

    assert np.array_equal(stream(2), stream(8)) and np.array_equal(stream(2), stream(48))


def test_epochs_and_seeds_shuffle_differently():
    orders = [
        tuple(list_step_indices(64, 64, seed, epoch)) for seed in range(4) for epoch in range(4)
    ]
    assert len(set(orders)) == len(orders)
    firsts = np.array([list_step_indices(10, 10, seed, 0)[0] for seed in range(400)])
    assert (
        np.bincount(firsts, minlength=10).min() > 15
    )  # 40 expected; 15 is four standard deviations away


def test_micro_batches_of_a_step_are_the_step_cut_up():
    (micro,) = read_training_batches(Numbered(20), options(3, 4, 5), range(2, 3))
    assert len(micro) == 4
    assert [number for batch in micro for number in numbers(batch)] == list_step_indices(
        20, 12, 5, 2
    ).tolist()


def test_every_epoch_reads_a_draw_of_its_own():
    """This also holds if an epoch ends within a step or a micro-batch."""
    steps = list(read_training_batches(Numbered(7), options(3, 2, 5), range(7)))
    read = [
        pair
        for step in steps
        for batch in step
        for pair in zip(numbers(batch), draws(batch), strict=True)
    ]
    assert [draw for _, draw in read] == [epoch for epoch in range(6) for _ in range(7)]
    assert all({n for n, draw in read if draw == epoch} == set(range(7)) for epoch in range(6))
    assert list_step_epochs(7, 6, 1).tolist() == [0, 1, 1, 1, 1, 1]


def test_held_out_sequences_are_always_read_from_the_first_draw():
    assert all(set(draws(batch)) == {0} for batch in read_validation_batches(Numbered(5, 7), 3))


@pytest.mark.parametrize("resume_at", [0, 1, 4, 9, 10])
def test_a_resumed_iteration_equals_the_uninterrupted_one(resume_at):
    source = Numbered(7)
    whole = [
        list(map(numbers, step))
        for step in read_training_batches(source, options(2, 2, 3), range(10))
    ]
    rest = [
        list(map(numbers, step))
        for step in read_training_batches(source, options(2, 2, 3), range(resume_at, 10))
    ]
    assert len(whole) == 10 and rest == whole[resume_at:]


def test_an_error_in_the_reading_thread_surfaces_at_its_step():
    broken = int(list_step_indices(20, 4, 0, 3)[1])
    batches = read_training_batches(Numbered(20, broken=broken), options(4, 1, 0), range(5))
    for _ in range(3):
        next(batches)
    with pytest.raises(OSError, match=f"sequence {broken} cannot be read"):
        next(batches)


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_leaving_early_ends_the_reading_thread():
    batches = read_training_batches(
        Numbered(20), options(4, 1, 0, dataloader_num_workers=1), range(100)
    )
    next(batches)
    assert reading_threads()
    batches.close()
    assert not reading_threads()


@pytest.mark.parametrize(
    "wanted, gpu, threads", [(None, False, 0), (None, True, 1), (0, True, 0), (3, False, 3)]
)
def test_without_a_number_a_thread_reads_ahead_of_a_gpu_alone(wanted, gpu, threads, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert count_loader_threads(options(1, 1, 0, dataloader_num_workers=wanted)) == threads


@pytest.mark.parametrize("wanted", [None, 0])
def test_beside_a_cpu_a_step_is_read_when_it_is_asked_for(wanted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    read: list[int] = []
    batches = read_training_batches(
        Watched(64, before=read.append), options(1, 1, 3, dataloader_num_workers=wanted), range(30)
    )
    assert not read
    found = [numbers(next(batches)[0]) for _ in range(3)]
    assert read == [index for (index,) in found] and not reading_threads()
    assert found == [list_step_indices(64, 1, 3, step).tolist() for step in range(3)]


def test_held_out_sequences_come_in_order_and_once():
    found = [numbers(batch) for batch in read_validation_batches(Numbered(5, 7), 3)]
    assert found == [[5, 6, 7], [8, 9, 10], [11]]
    assert list(read_validation_batches(Numbered(5, 0), 3)) == []


def test_plain_text_reads_both_splits_by_number():
    train = make_sequences(1, 5, 8, VOCABULARY)
    validation = make_sequences(2, 3, 8, VOCABULARY)
    source = PlainText(Corpus(train, validation))
    assert (source.train_count, source.validation_count, source.codec) == (5, 3, None)
    assert np.array_equal(source.read(np.array([4, 0]))[0].tokens, train.tokens[[4, 0]])
    assert np.array_equal(source.read(np.array([7, 5]))[0].tokens, validation.tokens[[2, 0]])
    assert source.fingerprint != PlainText(Corpus(validation, train)).fingerprint


# ---------------------------------------------------------------------- reading ahead


@dataclass
class Watched(Numbered):
    """A source that calls ``before`` with the first index of each read, in the reading thread."""

    before: Callable[[int], None] = lambda index: None

    def read(self, indices: np.ndarray, draws: np.ndarray | int = 0) -> tuple[Sequences, None]:
        self.before(int(indices[0]))
        return super().read(indices, draws)


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.005)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_so_many_threads_read_at_once(workers):
    """The barrier opens only when all threads have reached it."""
    together = threading.Barrier(workers)
    source = Watched(20, before=lambda _: together.wait(30))
    batches = read_training_batches(
        source, options(2, 1, 3, dataloader_num_workers=workers), range(2 * workers)
    )
    assert len(list(batches)) == 2 * workers and not reading_threads()


def test_the_threads_live_through_all_epochs():
    seen: set[int] = set()
    source = Watched(20, before=lambda _: seen.add(threading.get_ident()))
    batches = read_training_batches(source, options(4, 1, 3, dataloader_num_workers=2), range(50))
    assert len(list(batches)) == 50, "ten epochs"
    assert 1 <= len(seen) <= 2


@pytest.mark.parametrize("workers, factor", [(1, 1), (1, 4), (3, 1), (2, 3)])
def test_so_many_steps_are_read_ahead_and_no_more(workers, factor, monkeypatch):
    monkeypatch.setattr(reading, "STEPS_AHEAD", factor)
    read: list[int] = []
    job = options(1, 1, 3, dataloader_num_workers=workers)
    batches = read_training_batches(Watched(64, before=read.append), job, range(30))
    for step in range(1, 9):
        next(batches)
        wait_until(lambda step=step: len(read) == step + workers * factor)
        time.sleep(0.01)
        assert len(read) == step + workers * factor
    batches.close()
    # The host's memory has to have room for them, and for those of the step.
    kept = count_pinned_bytes(CachedLike(None, None, sequence_bytes=64), job)
    assert kept == (1 + workers * factor) * 64
    larger = job.model_copy(update={"batch_size": 2, "gradient_accumulation_steps": 3})
    assert count_pinned_bytes(CachedLike(None, None, sequence_bytes=64), larger) == 6 * kept


def test_the_order_is_kept_whichever_thread_is_first():
    source = Watched(64, before=lambda index: time.sleep(index % 5 / 1000))
    threads = {"dataloader_num_workers": 6}
    found = [
        numbers(batch)
        for (batch,) in read_training_batches(source, options(2, 1, 3, **threads), range(60))
    ]
    assert found == [list_step_indices(64, 2, 3, step).tolist() for step in range(60)]


def test_an_error_among_many_threads_surfaces_at_its_step_and_ends_them():
    broken = int(list_step_indices(20, 4, 0, 3)[1])
    threads = {"dataloader_num_workers": 4}
    batches = read_training_batches(
        Numbered(20, broken=broken), options(4, 1, 0, **threads), range(5)
    )
    assert len(list(itertools.islice(batches, 3))) == 3
    with pytest.raises(OSError, match=f"sequence {broken} cannot be read"):
        next(batches)
    assert not reading_threads()


def test_leaving_early_does_not_read_what_was_ahead(monkeypatch):
    monkeypatch.setattr(reading, "STEPS_AHEAD", 64)
    read: list[int] = []
    source = Watched(64, before=lambda index: (read.append(index), time.sleep(0.02)))
    batches = read_training_batches(source, options(1, 1, 0, dataloader_num_workers=1), range(64))
    next(batches)
    batches.close()
    assert len(read) <= 4 and not reading_threads()


def test_the_wait_for_data_is_counted_and_nothing_else():
    def slow():
        for item in range(5):
            time.sleep(0.02)
            yield item

    began = time.perf_counter()
    starved = TimedIterator(slow())
    assert list(starved) == list(range(5))
    assert 5 * 0.02 <= starved.seconds <= time.perf_counter() - began
    assert 0.02 <= starved.last <= starved.seconds - 4 * 0.02
    fed = TimedIterator(iter(range(5)))
    began = time.perf_counter()
    for _ in fed:
        time.sleep(0.02)  # a step
    assert 0 < fed.last <= fed.seconds <= time.perf_counter() - began - 5 * 0.02


def test_a_starved_consumer_waits_for_a_slow_source_and_a_slow_one_does_not():
    """With real threads: the consumer does not wait for batches that were read while it worked."""
    source = Watched(64, before=lambda _: time.sleep(0.02))
    starved = TimedIterator(
        read_training_batches(source, options(1, 1, 0, dataloader_num_workers=1), range(10))
    )
    assert len(list(starved)) == 10 and starved.seconds > 0.8 * 10 * 0.02
    fed = TimedIterator(
        read_training_batches(source, options(1, 1, 0, dataloader_num_workers=1), range(10))
    )
    waits = []
    for _ in fed:
        waits.append(fed.last)
        time.sleep(0.06)
    assert sum(waits[1:]) < 0.5 * starved.seconds and sum(waits) == pytest.approx(fed.seconds)


def test_batches_are_pinned_where_there_is_a_gpu(material):
    source = CachedLike(*material)
    (batch,), *_ = read_training_batches(source, options(2, 1, 0), range(1))
    columns = [each for each in batch.teacher.values() if not each.is_meta]
    pieces = itertools.chain.from_iterable(batch.pieces.values())
    tensors = [batch.tokens_BL, batch.rows_N, batch.gold_N, *columns, *pieces]
    assert all(
        tensor.is_pinned() == torch.cuda.is_available() for tensor in tensors if tensor.numel()
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_and_moved_a_batch_is_what_it_was(material):
    batch = make_batch(*material)
    moved = batch.pin().to(torch.device("cuda"))
    for field in ("tokens_BL", "positions_BL", "rows_N", "gold_N"):
        assert torch.equal(getattr(moved, field).cpu(), getattr(batch, field))
    assert all(
        torch.equal(moved.teacher[name].cpu(), column) for name, column in batch.teacher.items()
    )


def test_pieces_waste_little_pinned_memory() -> None:
    """torch rounds each piece up to a power of two."""
    for size in (1, 2, 3, 2**16 - 1, 2**16, 2**16 + 1, 100_003, 2**26 + 2**23, 2**31 - 1):
        pieces = cut_pieces(size)
        assert sum(pieces) == size
        assert len(pieces) <= 4
        pinned = sum(1 << (each - 1).bit_length() for each in pieces)
        assert pinned <= size * 16 / 15 + 1


# ---------------------------------------------------------------------- other orders


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    count=st.integers(1, 40),
    batch=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_batches_of_like_length_visit_each_sequence_once_an_epoch(data, count, batch, seed):
    lengths = np.array(data.draw(st.lists(st.integers(0, 12), min_size=count, max_size=count)))
    arrange = partial(order_by_length, lengths, batch)
    epochs = 4
    steps = -(-epochs * count // batch)
    stream = np.concatenate(
        [list_step_indices(count, batch, seed, step, arrange) for step in range(steps)]
    )
    for epoch in range(epochs):
        assert sorted(stream[epoch * count : (epoch + 1) * count].tolist()) == list(range(count))


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    count=st.integers(2, 40),
    batch=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_batches_of_like_length_do_not_overlap_in_length(data, count, batch, seed):
    """Within an epoch the ranges of lengths of two batches do not overlap."""
    lengths = np.array(data.draw(st.lists(st.integers(0, 100), min_size=count, max_size=count)))
    arrange = partial(order_by_length, lengths, batch)
    epochs = 3
    steps = -(-epochs * count // batch)
    batches = [list_step_indices(count, batch, seed, step, arrange) for step in range(steps)]
    whole: dict[int, list[np.ndarray]] = {}
    for step, indices in enumerate(batches):
        epoch = np.unique(list_step_epochs(count, batch, step))
        if len(epoch) == 1:
            whole.setdefault(int(epoch[0]), []).append(lengths[indices])
        else:  # a batch of two epochs holds the longest sequences of both
            assert lengths[indices].min() >= np.sort(lengths)[max(count - 2 * (batch - 1), 0)]
    for found in whole.values():
        found.sort(key=lambda each: (each.min(), each.max()))
        assert all(one.max() <= other.min() for one, other in itertools.pairwise(found))


def test_batches_of_like_length_come_in_any_order_and_another_each_epoch():
    lengths = np.arange(400)
    orders = [
        tuple(order_by_length(lengths, 4, 400, seed, epoch).tolist())
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len(set(orders)) == 9
    firsts = np.array(orders[0]).reshape(-1, 4).min(axis=1)
    assert abs(np.corrcoef(firsts, np.arange(100))[0, 1]) < 0.4
    same = np.zeros(
        64, np.int64
    )  # of sequences all of a length, the batches differ from epoch to epoch
    batches = [
        {frozenset(row) for row in order_by_length(same, 4, 64, 0, epoch).reshape(-1, 4).tolist()}
        for epoch in (0, 1)
    ]
    assert len(batches[0] & batches[1]) < 4


def unpacked(count: int = 40) -> PlainText:
    """Make padded text: documents of 2 to 60 tokens in sequences of 64."""
    rng = np.random.default_rng(3)
    documents = [
        Document(rng.integers(1, VOCABULARY, length).astype(np.uint32))
        for length in rng.integers(2, 61, count)
    ]
    config = DataConfig(train="unused", sequence_length=64, packing=False)
    return PlainText(
        Corpus(pack_documents(documents, config), pack_documents(documents[:2], config))
    )


def test_in_order_of_length_batches_are_as_wide_as_their_text():
    source = unpacked()
    lengths = measure_text_lengths(source.corpus.train)
    steps = list(read_training_batches(source, options(4, 2, 5, order="length"), range(5)))
    widths = [batch.tokens_BL.shape[1] for step in steps for batch in step]
    shortest = sorted(lengths.tolist())[3::4]  # the longest of each four, sorted
    assert sorted(widths) == [-(-length // 8) * 8 for length in shortest]
    shuffled_widths = {
        batch.tokens_BL.shape[1]
        for step in read_training_batches(source, options(4, 2, 5), range(5))
        for batch in step
    }
    assert shuffled_widths == {64}


def test_what_is_cut_off_a_batch_is_padding_alone(material):
    sequences, records = material
    wide = pad(sequences, 24)
    whole = make_batch(wide, records)
    cut = make_batch(cut_padding(wide), records)
    assert cut.tokens_BL.shape == (6, 16) and whole.tokens_BL.shape == (6, 24)
    assert torch.equal(cut.gold_N, whole.gold_N) and torch.equal(
        cut.tokens_BL, whole.tokens_BL[:, :16]
    )
    assert torch.equal(cut.rows_N // 16, whole.rows_N // 24) and torch.equal(
        cut.rows_N % 16, whole.rows_N % 24
    )
    assert torch.equal(cut.positions_BL, whole.positions_BL[:, :16])
    assert all(torch.equal(cut.teacher[name], whole.teacher[name]) for name in whole.teacher)
    nothing = sequences_of([[1, 1, 1]], [[0, 0, 0]])
    assert len(make_batch(cut_padding(nothing), None)) == 0


def pad(sequences: Sequences, length: int) -> Sequences:
    columns = ((0, 0), (0, length - sequences.length))
    start = np.pad(sequences.document_start, columns)
    start[:, sequences.length] = True
    return Sequences(
        np.pad(sequences.tokens, columns), start, np.pad(sequences.target_mask, columns)
    )


@dataclass
class CachedLike:
    """A source of given sequences and records that counts its reads."""

    sequences: Sequences
    records: Records
    reads: int = 0
    validation_count: int = 0
    shard_sequences: int = 2
    sequence_bytes: int = 64
    disk_reads: DiskReads | None = None
    fingerprint: str = "given"

    @property
    def train_count(self) -> int:
        return len(self.sequences)

    def read(self, indices: np.ndarray, draws: np.ndarray | int = 0) -> tuple[Sequences, Records]:
        self.reads += 1
        ends = np.concatenate([[0], self.sequences.target_mask.sum(axis=1).cumsum()])
        parts = [self.records.slice(int(ends[index]), int(ends[index + 1])) for index in indices]
        return self.sequences.select(indices), Records.concatenate(parts)


@pytest.fixture(scope="module", params=["threshold", "tempered", "topk", "dense", "hidden"])
def sealed(request, tmp_path_factory) -> Cache:
    """A real cache of 21 training sequences over shards of four."""
    identity = make_identity(
        train_sequences=21, validation_sequences=3, codec=make_codec(request.param)
    )
    return open_cache(make_cache(tmp_path_factory.mktemp("caches"), identity))


def entropies_one_by_one(source) -> np.ndarray:
    return np.array(
        [
            source.read(np.array([n]))[1]["entropy"].mean() * ENTROPY_STEP
            for n in range(source.train_count)
        ]
    )


@pytest.mark.parametrize("block", [1, 8, 100])
def test_mean_entropies_are_those_of_each_sequence_read_alone(sealed, block):
    np.testing.assert_allclose(
        compute_mean_entropies(sealed, block), entropies_one_by_one(sealed), rtol=1e-12
    )


def indices_of(source, batches: list[list[Batch]]) -> list[int]:
    """List the training sequences that the batches of a run hold."""
    whole = source.read(np.arange(source.train_count))[0].tokens.astype(np.int64)
    known = {row.tobytes(): number for number, row in enumerate(whole)}
    assert len(known) == len(whole)
    return [
        known[row.tobytes()]
        for step in batches
        for batch in step
        for row in batch.tokens_BL.numpy()
    ]


def test_a_curriculum_goes_from_sure_to_unsure_and_then_shuffles(sealed):
    chosen = options(2, 3, 7, order="curriculum")
    found = indices_of(
        sealed, list(read_training_batches(sealed, chosen, range(7)))
    )  # 42 = two epochs
    assert found[:21] == np.argsort(entropies_one_by_one(sealed), kind="stable").tolist()
    assert found[21:] == shuffle_epoch(21, 7, 1).tolist() != found[:21]
    for start in (1, 3, 4, 6):
        rest = indices_of(sealed, list(read_training_batches(sealed, chosen, range(start, 7))))
        assert rest == found[6 * start :]


def test_a_curriculum_whose_first_epoch_is_over_reads_nothing_before_its_first_step(material):
    source = CachedLike(*material)
    read_training_batches(source, options(2, 3, 7, order="curriculum"), range(1, 4))
    for order in ("curriculum", "length"):
        assert list(read_training_batches(source, options(2, 3, 7, order=order), range(0))) == []
    assert source.reads == 0
    read_training_batches(source, options(2, 3, 7, order="curriculum"), range(4))
    assert source.reads == 3


def test_sequences_without_a_target_come_first_in_a_curriculum():
    sequences = sequences_of([[1, 0, 0], [1, 1, 1], [1, 0, 0]], [[1, 1, 0], [0, 0, 0], [1, 1, 0]])
    records = make_records(0, 4, CODECS["threshold"])
    means = compute_mean_entropies(CachedLike(sequences, records))
    assert means[1] == 0 and (means[[0, 2]] > 0).all()
    assert order_by_difficulty(means, 3, 0, 0)[0] == 1


@pytest.mark.parametrize("unknown", ["all", "of one sequence", "no records"])
def test_a_curriculum_without_entropies_is_refused_before_the_first_step(unknown):
    sequences = make_sequences(3, 6, 16, VOCABULARY)
    records = make_records(3, sequences.positions, CODECS["threshold"])
    rows = np.nonzero(sequences.target_mask)[0]
    records.columns["entropy"][(rows == 4) | (unknown == "all")] = UNKNOWN_ENTROPY
    source = (
        CachedLike(sequences, records)
        if unknown != "no records"
        else PlainText(Corpus(sequences, sequences))
    )
    with pytest.raises(
        ConfigError, match=r"train\.order: a curriculum needs the teacher's entropy"
    ):
        read_training_batches(source, options(2, 1, 0, order="curriculum"), range(1))


def test_entropies_that_are_unknown_do_not_count_in_a_mean():
    sequences = make_sequences(3, 6, 16, VOCABULARY)
    records = make_records(3, sequences.positions, CODECS["threshold"])
    rows = np.nonzero(sequences.target_mask)[0]
    codes = records["entropy"].astype(float)
    records.columns["entropy"][::3] = UNKNOWN_ENTROPY
    kept = np.arange(len(codes)) % 3 != 0
    expected = [codes[kept & (rows == row)].mean() * ENTROPY_STEP for row in range(6)]
    np.testing.assert_allclose(
        compute_mean_entropies(CachedLike(sequences, records)), expected, rtol=1e-12
    )


@pytest.mark.parametrize("order", ["shuffled", "windows", "length", "curriculum"])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_order_resumes_as_it_would_have_gone_on(order, workers, material):
    """The results are equal to the last bit, for any number of threads."""
    source = CachedLike(*material)
    chosen = options(2, 2, 9, order=order, dataloader_num_workers=workers)
    whole = list(read_training_batches(source, chosen, range(8)))
    for start in (1, 2, 5):
        rest = list(read_training_batches(source, options(2, 2, 9, order=order), range(start, 8)))
        for found, expected in zip(rest, whole[start:], strict=True):
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one.tokens_BL, other.tokens_BL) and torch.equal(
                    one.gold_N, other.gold_N
                )
                assert all(
                    torch.equal(one.teacher[name], other.teacher[name]) for name in one.teacher
                )


# ---------------------------------------------------------------------- content


CODECS = {
    "threshold": Codec("threshold", VOCABULARY, threshold=0.04, always_keep=(5,)),
    "wide ids": Codec("threshold", 70_000, threshold=0.04),
    "tempered": Codec("tempered", VOCABULARY, threshold=0.04, temperatures=(0.5, 2.0)),
    "topk": Codec("topk", VOCABULARY, k=4),
    "dense": Codec("dense", VOCABULARY, bits=16),
    "hidden": Codec("hidden", VOCABULARY, bits=8),
}


@pytest.fixture(params=CODECS.values(), ids=CODECS)
def material(request) -> tuple[Sequences, Records]:
    sequences = make_sequences(3, 6, 16, VOCABULARY)
    return sequences, make_records(3, sequences.positions, request.param)


def test_targets_are_the_next_tokens_at_their_places(material):
    sequences, records = material
    batch = make_batch(sequences, records)
    flat = sequences.tokens.reshape(-1).astype(np.int64)
    assert (
        batch.tokens_BL.dtype == torch.int64
        and batch.tokens_BL.reshape(-1).tolist() == flat.tolist()
    )
    expected = [(b * 16 + t) for b in range(6) for t in range(16) if sequences.target_mask[b, t]]
    assert batch.rows_N.tolist() == expected
    assert batch.gold_N.tolist() == [flat[place + 1] for place in expected]
    assert len(batch) == len(expected) == len(records)


def test_records_travel_as_they_are_stored(material):
    """The tensors share the memory of the stored columns, which are decoded on the device."""
    sequences, records = material
    teacher = make_batch(sequences, records).teacher
    assert set(teacher) == set(records.columns)
    for name, column in records.columns.items():
        found = teacher[name].numpy()
        assert (
            found.dtype == column.dtype
            and found.shape == column.shape
            and np.shares_memory(found, column)
        ), name


def test_without_records_there_is_only_the_gold():
    batch = make_batch(make_sequences(3, 6, 16, VOCABULARY), None)
    assert batch.teacher is None and len(batch) == len(batch.rows_N) == len(batch.gold_N)


def test_a_batch_without_any_target_is_possible():
    starts = np.ones((2, 4), bool)
    sequences = Sequences(np.ones((2, 4), np.uint32), starts, np.zeros((2, 4), bool))
    for records in (None, make_records(0, 4, CODECS["threshold"]).slice(0, 0)):
        batch = make_batch(sequences, records)
        assert len(batch) == 0 and batch.rows_N.shape == (0,)


# ---------------------------------------------------------------------- positions


def sequences_of(starts: list[list[int]], targets: list[list[int]]) -> Sequences:
    start = np.array(starts, bool)
    target = np.array(targets, bool)
    return Sequences(np.ones(start.shape, np.uint32), start, target)


def test_positions_restart_at_every_document():
    batch = make_batch(
        sequences_of([[1, 0, 1, 0, 0], [1, 0, 0, 0, 0]], [[1, 0, 1, 1, 0], [1, 1, 1, 1, 0]]), None
    )
    assert batch.positions_BL.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    random = make_sequences(5, 20, 32, VOCABULARY)
    positions = make_batch(random, None).positions_BL.numpy()
    assert np.array_equal(positions == 0, random.document_start)
    assert (np.diff(positions)[~random.document_start[:, 1:]] == 1).all()


@pytest.mark.parametrize(
    "starts, targets",
    [
        ([[1, 0, 0, 0]], [[1, 1, 1, 0]]),
        (
            [[1, 0, 1, 0]],
            [[1, 0, 0, 0]],
        ),  # then padding, a document of its own that predicts nothing
        ([[1, 0, 0, 1]], [[1, 1, 0, 0]]),  # then one last token of the next document
    ],
    ids=["full", "padded", "lone token"],
)
def test_rows_with_one_document_that_matters_need_no_positions(starts, targets):
    assert make_batch(sequences_of(starts, targets), None).positions_BL is None


def test_one_row_with_two_documents_gives_positions_to_all():
    starts = [[1, 0, 0, 0], [1, 0, 1, 0]]
    targets = [[1, 1, 1, 0], [1, 0, 1, 0]]
    assert make_batch(sequences_of(starts, targets), None).positions_BL.tolist() == [
        [0, 1, 2, 3],
        [0, 1, 0, 1],
    ]


def test_a_document_whose_first_tokens_are_context_is_apart_too():
    """The prompt of a chat is such a context. Other rows of the batch change nothing."""
    starts = [[1, 0, 0, 1, 0, 0]]
    targets = [[0, 1, 0, 0, 1, 0]]
    alone = make_batch(sequences_of(starts, targets), None).positions_BL
    assert alone is not None and alone.tolist() == [[0, 1, 2, 0, 1, 2]]
    beside = make_batch(
        sequences_of([*starts, [1, 0, 1, 0, 0, 0]], [*targets, [1, 0, 1, 1, 1, 0]]), None
    ).positions_BL
    assert beside is not None and beside[:1].tolist() == alone.tolist()


def test_no_positions_means_the_same_hidden_states():
    """Positions may be left out, because a causal mask hides later documents."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = LlamaModel(shape).eval()
    tokens = torch.randint(0, 32, (1, 6))
    with torch.no_grad():
        plain = model(input_ids=tokens).last_hidden_state
        packed = model(
            input_ids=tokens, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1]])
        ).last_hidden_state
    torch.testing.assert_close(plain[:, :4], packed[:, :4])
