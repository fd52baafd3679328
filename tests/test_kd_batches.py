"""Batches: an order that is a pure function of seed and step, and tensors that say what the records say."""

import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.codec import Codec
from cache.records import Records, Sequences
from cache.testing import make_records, make_sequences
from kd.batches import Batch, PlainText, make_batch, step_epochs, step_indices, training_batches, validation_batches
from kd.data import Corpus

VOCABULARY = 300


@dataclass
class Numbered:
    """A source whose sequence n is the token n and then the draw it was read from; reading ``broken`` fails."""

    train_count: int
    validation_count: int = 0
    broken: int = -1
    has_records: bool = False
    identity: str = "numbered"
    codec: None = None

    def teacher_head(self) -> dict[str, np.ndarray]:
        raise LookupError("there is no teacher")

    def read(self, indices: np.ndarray, draws: np.ndarray | int = 0) -> tuple[Sequences, None]:
        if self.broken in indices:
            raise OSError(f"sequence {self.broken} cannot be read")
        tokens = np.repeat(np.asarray(indices, np.uint32)[:, None], 4, axis=1)
        tokens[:, 1] = draws
        starts, targets = np.zeros((2, *tokens.shape), bool)
        starts[:, 0] = True
        targets[:, :-1] = True
        return Sequences(tokens, starts, targets), None


def numbers(batch: Batch) -> list[int]:
    return batch.tokens_BT[:, 0].tolist()


def draws(batch: Batch) -> list[int]:
    return batch.tokens_BT[:, 1].tolist()


# ---------------------------------------------------------------------- order


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 40), batch=st.integers(1, 17), seed=st.integers(0, 2**32 - 1))
def test_every_epoch_visits_each_sequence_once(count, batch, seed):
    epochs = 3
    steps = -(-epochs * count // batch)
    stream = np.concatenate([step_indices(count, batch, seed, step) for step in range(steps)])
    for epoch in range(epochs):
        assert sorted(stream[epoch * count : (epoch + 1) * count].tolist()) == list(range(count))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 2**32 - 1), st.integers(0, 50))
def test_the_order_is_a_function_of_seed_and_step_alone(count, batch, seed, step):
    asked_first = step_indices(count, batch, seed, step)
    for other in (0, step + 1, 999):
        step_indices(count, batch, seed + 1, other)
    assert np.array_equal(asked_first, step_indices(count, batch, seed, step))


def test_the_batch_size_cuts_one_and_the_same_stream():
    def stream(batch):
        return np.concatenate([step_indices(24, batch, 7, step) for step in range(48 // batch)])

    assert np.array_equal(stream(2), stream(8)) and np.array_equal(stream(2), stream(48))


def test_epochs_and_seeds_shuffle_differently():
    orders = [tuple(step_indices(64, 64, seed, epoch)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == len(orders)
    firsts = np.array([step_indices(10, 10, seed, 0)[0] for seed in range(400)])
    assert np.bincount(firsts, minlength=10).min() > 15  # 40 expected; 15 is four standard deviations away


def test_micro_batches_of_a_step_are_the_step_cut_up():
    (micro,) = training_batches(Numbered(20), 3, 4, 5, range(2, 3))
    assert len(micro) == 4
    assert [number for batch in micro for number in numbers(batch)] == step_indices(20, 12, 5, 2).tolist()


def test_every_epoch_reads_a_draw_of_its_own():
    """Also where an epoch ends within a step, and within a micro-batch."""
    steps = list(training_batches(Numbered(7), 3, 2, 5, range(7)))
    read = [pair for step in steps for batch in step for pair in zip(numbers(batch), draws(batch), strict=True)]
    assert [draw for _, draw in read] == [epoch for epoch in range(6) for _ in range(7)]
    assert all({n for n, draw in read if draw == epoch} == set(range(7)) for epoch in range(6))
    assert step_epochs(7, 6, 1).tolist() == [0, 1, 1, 1, 1, 1]


def test_held_out_sequences_are_always_read_from_the_first_draw():
    assert all(set(draws(batch)) == {0} for batch in validation_batches(Numbered(5, 7), 3))


@pytest.mark.parametrize("resume_at", [0, 1, 4, 9, 10])
def test_a_resumed_iteration_equals_the_uninterrupted_one(resume_at):
    source = Numbered(7)
    whole = [list(map(numbers, step)) for step in training_batches(source, 2, 2, 3, range(10))]
    rest = [list(map(numbers, step)) for step in training_batches(source, 2, 2, 3, range(resume_at, 10))]
    assert len(whole) == 10 and rest == whole[resume_at:]


def test_an_error_in_the_reading_thread_surfaces_at_its_step():
    broken = int(step_indices(20, 4, 0, 3)[1])
    batches = training_batches(Numbered(20, broken=broken), 4, 1, 0, range(5))
    for _ in range(3):
        next(batches)
    with pytest.raises(OSError, match=f"sequence {broken} cannot be read"):
        next(batches)


def test_leaving_early_ends_the_reading_thread():
    batches = training_batches(Numbered(20), 4, 1, 0, range(100))
    next(batches)
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_held_out_sequences_come_in_order_and_once():
    found = [numbers(batch) for batch in validation_batches(Numbered(5, 7), 3)]
    assert found == [[5, 6, 7], [8, 9, 10], [11]]
    assert list(validation_batches(Numbered(5, 0), 3)) == []


def test_plain_text_reads_both_splits_by_number():
    train, validation = make_sequences(1, 5, 8, VOCABULARY), make_sequences(2, 3, 8, VOCABULARY)
    source = PlainText(Corpus(train, validation))
    assert (source.train_count, source.validation_count, source.has_records) == (5, 3, False)
    assert np.array_equal(source.read(np.array([4, 0]))[0].tokens, train.tokens[[4, 0]])
    assert np.array_equal(source.read(np.array([7, 5]))[0].tokens, validation.tokens[[2, 0]])
    assert source.identity != PlainText(Corpus(validation, train)).identity


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
    assert batch.tokens_BT.dtype == torch.int64 and batch.tokens_BT.reshape(-1).tolist() == flat.tolist()
    expected = [(b * 16 + t) for b in range(6) for t in range(16) if sequences.target_mask[b, t]]
    assert batch.rows_N.tolist() == expected
    assert batch.gold_N.tolist() == [flat[place + 1] for place in expected]
    assert len(batch) == len(expected) == len(records)


def test_records_travel_as_they_are_stored(material):
    """The same numbers in the same few bytes, and not even copied: they are decoded on the device."""
    sequences, records = material
    teacher = make_batch(sequences, records).teacher
    assert set(teacher) == set(records.columns)
    for name, column in records.columns.items():
        found = teacher[name].numpy()
        assert found.dtype == column.dtype and found.shape == column.shape and np.shares_memory(found, column), name


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
    start, target = np.array(starts, bool), np.array(targets, bool)
    return Sequences(np.ones(start.shape, np.uint32), start, target)


def test_positions_restart_at_every_document():
    batch = make_batch(sequences_of([[1, 0, 1, 0, 0], [1, 0, 0, 0, 0]], [[1, 0, 1, 1, 0], [1, 1, 1, 1, 0]]), None)
    assert batch.positions_BT.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    random = make_sequences(5, 20, 32, VOCABULARY)
    positions = make_batch(random, None).positions_BT.numpy()
    assert np.array_equal(positions == 0, random.document_start)
    assert (np.diff(positions)[~random.document_start[:, 1:]] == 1).all()


@pytest.mark.parametrize(
    "starts, targets",
    [
        ([[1, 0, 0, 0]], [[1, 1, 1, 0]]),
        ([[1, 0, 1, 0]], [[1, 0, 0, 0]]),  # then padding, a document of its own that predicts nothing
        ([[1, 0, 0, 1]], [[1, 1, 0, 0]]),  # then one last token of the next document
    ],
    ids=["full", "padded", "lone token"],
)
def test_rows_with_one_document_that_matters_need_no_positions(starts, targets):
    assert make_batch(sequences_of(starts, targets), None).positions_BT is None


def test_one_row_with_two_documents_gives_positions_to_all():
    starts, targets = [[1, 0, 0, 0], [1, 0, 1, 0]], [[1, 1, 1, 0], [1, 0, 1, 0]]
    assert make_batch(sequences_of(starts, targets), None).positions_BT.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]


def test_no_positions_means_the_same_hidden_states():
    """What stands behind leaving them out: later documents cannot reach back through a causal mask."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    shape = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaModel(shape).eval()
    tokens = torch.randint(0, 32, (1, 6))
    with torch.no_grad():
        plain = model(input_ids=tokens).last_hidden_state
        packed = model(input_ids=tokens, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1]])).last_hidden_state
    torch.testing.assert_close(plain[:, :4], packed[:, :4])
