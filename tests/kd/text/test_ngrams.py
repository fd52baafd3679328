"""The unigram and the bigram of a text are those of their definition."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench.support.small.caches import make_cache, make_codec, make_identity
from cache.records import Sequences
from cache.store import open_cache
from kd.text import ngrams
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.text.ngrams import NGrams, count_ngrams
from kd.text.stored.packed import iterate

#: The last two tokens never occur.
V = 14


def make_sequences(seed: int, count: int) -> Sequences:
    random = np.random.default_rng(seed)
    tokens = random.geometric(0.3, (count, 20)).clip(max=V - 2).astype(np.uint32) - 1
    start = random.random((count, 20)) < 0.1
    start[:, 0] = True
    mask = random.random((count, 20)) < 0.8
    mask[:, :-1] &= ~start[:, 1:]
    mask[:, -1] = False
    return Sequences(tokens, start, mask)


def list_pairs(sequences: Sequences) -> list[tuple[int, int]]:
    rows = zip(sequences.tokens.tolist(), sequences.target_mask.tolist(), strict=True)
    return [
        (tokens[place], tokens[place + 1])
        for tokens, mask in rows
        for place in range(19)
        if mask[place]
    ]


def test_the_losses_are_witten_and_bell_s() -> None:
    text = make_sequences(0, 6)
    other = make_sequences(1, 30)
    found = NGrams.of([text.select(slice(0, 2)), text.select(slice(2, None))], V)
    assert found is not None
    pairs = list_pairs(text)
    tokens = Counter(gold for _, gold in pairs)
    assert found.tokens == len(pairs) and len(tokens) < V, "some tokens never occur"

    def unigram(token: int) -> float:
        return (tokens[token] + len(tokens) / V) / (len(pairs) + len(tokens))

    def bigram(before: int, token: int) -> float:
        after = Counter(gold for first, gold in pairs if first == before)
        if not after:
            return unigram(token)
        return (after[token] + len(after) * unigram(token)) / (after.total() + len(after))

    for before in range(V):
        assert sum(bigram(before, token) for token in range(V)) == pytest.approx(1.0)
    assert found.score_unigram(other) == pytest.approx(
        [-math.log(unigram(token)) for _, token in list_pairs(other)]
    )
    assert found.score_bigram(other) == pytest.approx(
        [-math.log(bigram(*pair)) for pair in list_pairs(other)]
    )
    source = PlainText(Corpus(text, other))
    means = (found.score_unigram(other).mean(), found.score_bigram(other).mean())
    assert found.measure_held_out(source) == pytest.approx(means)
    assert found.measure_held_out(PlainText(Corpus(text, other.select(slice(0, 0))))) is None


def test_text_without_targets_has_no_counts() -> None:
    text = make_sequences(0, 2)
    silent = Sequences(text.tokens, text.document_start, np.zeros_like(text.target_mask))
    assert NGrams.of([silent], V) is None and NGrams.of([], V) is None


def test_only_the_beginning_of_a_long_text_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "COUNTED_TARGETS", 50)
    text = make_sequences(0, 9)
    found = NGrams.of(iterate(text), V)
    assert found is not None and found.tokens == 50
    assert found.count_P.tolist() == [
        count for _, count in sorted(Counter(list_pairs(text)[:50]).items())
    ]


def test_a_cache_and_its_text_are_counted_alike(tmp_path: Path) -> None:
    """The training sequences only; a shard may hold held-out ones, too."""
    store = open_cache(make_cache(tmp_path, make_identity(codec=make_codec("threshold"))))
    size = store.identity.tokenizer.vocabulary_size
    whole = store.read(range(len(store)))[0]
    train = whole.select(slice(0, store.train_count))
    found, expected = count_ngrams(store, size), NGrams.of([train], size)
    assert found is not None and expected is not None and 0 < found.tokens == train.positions
    assert found.pairs_P.tolist() == expected.pairs_P.tolist()
    assert found.count_P.tolist() == expected.count_P.tolist()
