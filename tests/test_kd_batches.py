"""Batches: an order that is a pure function of seed and step, and tensors that say what the records say."""

import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.records import Records, Sequences
from cache.testing import make_records, make_sequences
from kd.batches import Batch, PlainText, make_batch, step_indices, training_batches, validation_batches
from kd.data import Corpus

VOCABULARY = 300


@dataclass
class Numbered:
    """A source whose sequence n holds only the token n; reading a sequence of ``broken`` fails."""

    train_count: int
    validation_count: int = 0
    broken: int = -1
    has_records: bool = False
    identity: str = "numbered"

    def read(self, indices: np.ndarray) -> tuple[Sequences, None]:
        if self.broken in indices:
            raise OSError(f"sequence {self.broken} cannot be read")
        tokens = np.repeat(np.asarray(indices, np.uint32)[:, None], 4, axis=1)
        starts, targets = np.zeros((2, *tokens.shape), bool)
        starts[:, 0] = True
        targets[:, :-1] = True
        return Sequences(tokens, starts, targets), None


def numbers(batch: Batch) -> list[int]:
    return batch.tokens_BT[:, 0].tolist()


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


@pytest.fixture(params=[0.04, 0.3], ids=["many heads", "few heads"])
def material(request) -> tuple[Sequences, Records]:
    sequences = make_sequences(3, 6, 16, VOCABULARY)
    return sequences, make_records(3, sequences.positions, VOCABULARY, request.param)


def test_targets_are_the_next_tokens_at_their_places(material):
    sequences, records = material
    batch = make_batch(sequences, records)
    flat = sequences.tokens.reshape(-1).astype(np.int64)
    assert batch.tokens_BT.dtype == torch.int64 and batch.tokens_BT.reshape(-1).tolist() == flat.tolist()
    expected = [(b * 16 + t) for b in range(6) for t in range(16) if sequences.target_mask[b, t]]
    assert batch.rows_N.tolist() == expected
    assert batch.targets.gold_N.tolist() == [flat[place + 1] for place in expected]
    assert len(batch.targets) == len(expected) == len(records)


def test_each_record_keeps_its_ids_and_its_weights_sum_to_one(material):
    sequences, records = material
    record = make_batch(sequences, records).targets.record
    assert record.offsets_N1.shape == (len(records) + 1,) and record.offsets_N1[-1] == len(record.ids_E)
    heads, tails = records.head_offsets, records.tail_offsets
    for n in range(len(records)):
        entries = slice(int(record.offsets_N1[n]), int(record.offsets_N1[n + 1]))
        head, tail = slice(heads[n], heads[n + 1]), slice(tails[n], tails[n + 1])
        assert record.ids_E[entries].tolist() == [*records.head_ids[head], *records.tail_ids[tail]]
        p = np.exp(records.head_logprobs[head].astype(np.float64))
        share = (1 - p.sum()) / max(tail.stop - tail.start, 1)
        expected = [*p, *[share] * (tail.stop - tail.start)]
        np.testing.assert_allclose(record.weights_E[entries].numpy(), expected, rtol=1e-6, atol=1e-7)
        if tail.stop > tail.start:
            assert float(record.weights_E[entries].sum(dtype=torch.float64)) == pytest.approx(1, abs=1e-6)
    assert record.entropy_N.tolist() == records.entropy.tolist()


def test_the_best_token_is_the_heaviest_of_the_head_or_unknown(material):
    sequences, records = material
    best = make_batch(sequences, records).best_N.tolist()
    heads = records.head_offsets
    for n, found in enumerate(best):
        ids, logs = records.head_ids[heads[n] : heads[n + 1]], records.head_logprobs[heads[n] : heads[n + 1]]
        assert found == (int(ids[logs.argmax()]) if len(ids) else -1)


def test_records_without_any_head_have_no_best_token():
    sequences = make_sequences(4, 2, 8, VOCABULARY)
    count = sequences.positions
    nothing, no_ids = np.zeros(count, np.uint8), np.zeros(0, np.uint32)
    zeros = np.zeros(count, np.float32)
    tails = np.arange(count, dtype=np.uint32)
    records = Records(nothing, no_ids, np.zeros(0, np.float32), nothing + np.uint8(1), tails, zeros, zeros)
    batch = make_batch(sequences, records)
    assert batch.best_N.tolist() == [-1] * count
    assert batch.targets.record.weights_E.tolist() == [1.0] * count


def test_without_records_there_is_only_the_gold():
    batch = make_batch(make_sequences(3, 6, 16, VOCABULARY), None)
    assert batch.targets.record is None and batch.best_N is None and len(batch.targets) == len(batch.rows_N)


def test_a_batch_without_any_target_is_possible():
    starts = np.ones((2, 4), bool)
    sequences = Sequences(np.ones((2, 4), np.uint32), starts, np.zeros((2, 4), bool))
    for records in (None, make_records(0, 0, VOCABULARY, 0.04)):
        batch = make_batch(sequences, records)
        assert len(batch.targets) == 0 and batch.rows_N.shape == (0,)


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
