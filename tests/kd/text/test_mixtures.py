"""Streams and mixtures of texts."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kd.config.data import DataConfig, DatasetSpec
from kd.errors import DataError
from kd.models.teacher_files import TeacherFiles
from kd.progress import Event, Monitor
from kd.text.corpus import Corpus, load_corpus
from kd.text.mixtures import TextReader
from kd.text.packing import Block, Document, join_blocks, measure_text_lengths, pack_documents
from kd.text.stored.places import BEGINNING
from tests.support.kd.text import config, refusal, write

# ---------------------------------------------------------------------- streams


CARD = "---\nconfigs:\n- config_name: default\n  data_files: train-*.jsonl\n---\n# Text\n"


def dataset(folder: Path, texts: list[str], files: int = 1) -> DatasetSpec:
    """Write a dataset into its own folder, with its rows in ``files`` files.

    Its card lists them, so that the library ``datasets`` reads it.
    """
    folder.mkdir()
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    for number, part in enumerate(np.array_split(np.array(texts, dtype=object), files)):
        write(folder, f"train-{number:05}.jsonl", [{"text": text} for text in part])
    return DatasetSpec(path=str(folder))


@pytest.fixture
def paragraphs(tiny_text) -> list[str]:
    return [part for part in tiny_text.read_text(encoding="utf-8").split("\n\n") if part.strip()]


def test_a_stream_gives_the_first_sequences_and_reads_no_further(
    tmp_path, tokenizer, paragraphs, hub_caches
):
    spec = dataset(tmp_path / "set", paragraphs * 8, files=2)
    whole = load_corpus(config(train=spec, sequence_length=16, validation_fraction=0), tokenizer)
    second = tmp_path / "set" / "train-00001.jsonl"
    second.write_text("not json\n", encoding="utf-8")
    options = config(train=spec, sequence_length=16, validation_fraction=0, max_train_samples=30)
    with pytest.raises(DataError, match="cannot be loaded: DatasetGenerationError"):
        load_corpus(options, tokenizer)
    streamed = load_corpus(options.model_copy(update={"streaming": True}), tokenizer)
    assert np.array_equal(streamed.train.tokens, whole.train.tokens[:30])
    assert np.array_equal(streamed.train.document_start, whole.train.document_start[:30])


def test_text_is_one_cache_whether_streamed_or_not(tmp_path, tokenizer, paragraphs, hub_caches):
    spec = dataset(tmp_path / "set", paragraphs, files=3)
    options = config(train=spec, sequence_length=32, validation_fraction=0, max_train_samples=40)
    hashes = {
        load_corpus(options.model_copy(update=each), tokenizer).compute_sha256()
        for each in STREAMED_OR_NOT
    }
    assert len(hashes) == 1


STREAMED_OR_NOT = ({"streaming": True}, {"streaming": False})


@pytest.mark.parametrize("fraction", [None, 0.1, 0.5])
def test_of_a_stream_what_is_held_out_comes_after_what_is_kept(
    tmp_path, tokenizer, paragraphs, hub_caches, fraction
):
    spec = dataset(tmp_path / "set", paragraphs)
    options = config(train=spec, sequence_length=16, validation_fraction=0)
    whole = load_corpus(options, tokenizer).train.tokens
    kept = {"validation_fraction": fraction, "max_train_samples": 60, "streaming": True}
    split = load_corpus(options.model_copy(update=kept), tokenizer)
    held = len(split.validation)
    assert len(split.train) == 60 and held == max(1, round((60 + held) * (fraction or 0.02)))
    assert np.array_equal(
        np.concatenate([split.train.tokens, split.validation.tokens]), whole[: 60 + held]
    )


def test_a_stream_that_ends_early_gives_what_it_has(tmp_path, tokenizer, paragraphs, hub_caches):
    spec = dataset(tmp_path / "set", paragraphs)
    options = config(train=spec, sequence_length=16)
    whole = load_corpus(options, tokenizer)
    ended = load_corpus(
        options.model_copy(update={"streaming": True, "max_train_samples": 10**6}), tokenizer
    )
    assert ended.compute_sha256() == whole.compute_sha256()


def test_a_held_out_stream_ends_where_it_is_told(
    tmp_path, tokenizer, tiny_text, paragraphs, hub_caches
):
    spec = dataset(tmp_path / "set", paragraphs)
    counts = {"max_train_samples": 9, "max_eval_samples": 7}
    options = config(
        train=str(tiny_text), validation=spec, sequence_length=16, streaming=True, **counts
    )
    corpus = load_corpus(options, tokenizer)
    assert (len(corpus.train), len(corpus.validation)) == (9, 7)


def test_a_slice_of_a_stream_is_refused(tmp_path, paragraphs, hub_caches):
    spec = dataset(tmp_path / "set", paragraphs).model_copy(update={"split": "train[:10%]"})
    assert "a stream cannot be sliced, but its split is 'train[:10%]'" in refusal(
        spec, streaming=True, max_train_samples=1
    )


# ---------------------------------------------------------------------- mixtures


def sequences_of(token: int, count: int, length: int = 16, real: int | None = None):
    """Make ``count`` sequences with ``real`` tokens ``token`` each; the rest is padding."""
    documents = [Document(np.full(real or length, token, np.uint32)) for _ in range(count)]
    return pack_documents(documents, config(sequence_length=length, packing=False))


def shares(sequences, texts: int) -> np.ndarray:
    """Return each text's share of the tokens; a sequence's first token shows its text."""
    lengths = measure_text_lengths(sequences)
    given = np.array(
        [lengths[sequences.tokens[:, 0] == number + 1].sum() for number in range(texts)]
    )
    return given / given.sum()


def mix(texts, weights, wanted=None):
    """Mix ``texts``; return the sequences, and the number of the text that ended the mixture."""
    packers = [lambda _, text=text: iter([Block(text, BEGINNING)]) for text in texts]
    reader = TextReader(packers, weights)
    return join_blocks(reader.read_all(wanted)), reader.ended


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.floats(0.2, 5), min_size=2, max_size=4),
    real=st.lists(st.integers(2, 16), min_size=4, max_size=4),
)
def test_shares_are_never_off_by_more_than_a_sequence_of_each_text(weights, real):
    texts = [sequences_of(number + 1, 200, real=real[number]) for number in range(len(weights))]
    mixed, ended = mix(texts, weights, 60)
    assert ended is None and len(mixed) == 60
    for count in range(1, 61):
        given = (
            shares(mixed.select(slice(count)), len(weights))
            * measure_text_lengths(mixed)[:count].sum()
        )
        ahead = given / np.array(weights)  # tokens for each unit of weight
        assert (
            ahead.max() - ahead.min()
            <= max(np.array(real[: len(weights)]) / np.array(weights)) + 1e-9
        )


def test_a_mixture_ends_with_the_first_text_that_does():
    texts = [sequences_of(1, 100), sequences_of(2, 10), sequences_of(3, 100)]
    mixed, ended = mix(texts, [2.0, 1.0, 1.0])
    assert ended == 1
    assert np.bincount(mixed.tokens[:, 0])[1:].tolist() == [21, 10, 10]
    assert mixed.tokens[:8, 0].tolist() == [1, 2, 3, 1, 1, 2, 3, 1]


def load_with_warnings(corpus_options: DataConfig, tokenizer) -> tuple[Corpus, list[str]]:
    """Load the corpus; return it and the warnings."""
    events: list[Event] = []
    corpus = load_corpus(corpus_options, tokenizer, Monitor(events.append))
    return corpus, [event.data["message"] for event in events if event.type == "warning"]


def kind_of(text: str) -> int:
    """Return which of three texts this is from: capitals, small letters or digits."""
    return int(
        np.argmax([sum(map(test, text)) for test in (str.isupper, str.islower, str.isdigit)])
    )


@pytest.mark.parametrize("packing", [True, False])
def test_shares_of_a_real_mixture_are_within_two_percent(
    tmp_path, tokenizer, paragraphs, hub_caches, packing
):
    texts = ["\n\n".join(paragraphs[:20]).upper(), *(each.upper() for each in paragraphs[20:])]
    first = dataset(tmp_path / "a", texts).model_copy(update={"weight": 3.0})
    second = dataset(tmp_path / "b", [each.lower() for each in paragraphs]).model_copy(
        update={"weight": 0.5}
    )
    figures = ["".join(str(ord(letter) % 10) for letter in each) for each in paragraphs[:40]]
    file = write(tmp_path, "c.jsonl", [{"text": text} for text in figures])  # a file weighs 1
    options = config(
        train=(first, second, str(file)),
        sequence_length=32,
        packing=packing,
        validation_fraction=0.1,
    )
    corpus, warnings = load_with_warnings(options, tokenizer)
    assert len(warnings) == 1 and "has no more text: the mixture ends with it" in warnings[0]
    for part in (corpus.train, corpus.train.select(slice(len(corpus.train) // 2))):
        kinds = [
            kind_of(tokenizer.decode(row.tolist(), skip_special_tokens=True)) for row in part.tokens
        ]
        tokens = np.bincount(kinds, measure_text_lengths(part))
        assert len(part) > 100
        np.testing.assert_allclose(tokens / tokens.sum(), np.array([3, 0.5, 1]) / 4.5, atol=0.02)


def test_every_source_of_a_mixture_keeps_its_own_order(tmp_path, tokenizer, paragraphs, hub_caches):
    half = len(paragraphs) // 2
    first = dataset(tmp_path / "a", paragraphs[:half]).model_copy(update={"weight": 2.0})
    second = dataset(tmp_path / "b", paragraphs[half:])
    options = config(train=(first, second), sequence_length=32, validation_fraction=0)
    mixed = [row.tobytes() for row in load_corpus(options, tokenizer).train.tokens]
    for source in (first, second):
        alone = load_corpus(options.model_copy(update={"train": (source,)}), tokenizer).train.tokens
        own = [row.tobytes() for row in alone]
        found = [row for row in mixed if row in own]
        assert found == own[: len(found)] and len(found) > 20


def test_without_a_weight_all_text_is_read_one_source_after_the_other(
    tmp_path, tokenizer, paragraphs, hub_caches
):
    half = len(paragraphs) // 2
    both = (dataset(tmp_path / "a", paragraphs[:half]), dataset(tmp_path / "b", paragraphs[half:]))
    options = config(train=both, sequence_length=32, validation_fraction=0)
    corpus, warnings = load_with_warnings(options, tokenizer)
    whole = load_corpus(
        options.model_copy(update={"train": (dataset(tmp_path / "c", paragraphs),)}), tokenizer
    )
    assert warnings == [] and corpus.compute_sha256() == whole.compute_sha256()


def test_streams_are_mixed_in_equal_shares_without_a_weight(
    tmp_path, tokenizer, paragraphs, hub_caches
):
    half = len(paragraphs) // 2
    both = (dataset(tmp_path / "a", paragraphs[:half]), dataset(tmp_path / "b", paragraphs[half:]))
    options = config(
        train=both, sequence_length=32, validation_fraction=0, max_train_samples=20, streaming=True
    )
    corpus, warnings = load_with_warnings(options, tokenizer)
    alone = [
        load_corpus(options.model_copy(update={"train": (each,)}), tokenizer).train.tokens
        for each in both
    ]
    assert warnings == []
    assert np.array_equal(corpus.train.tokens[0::2], alone[0][:10])
    assert np.array_equal(corpus.train.tokens[1::2], alone[1][:10])


def test_weights_name_the_data_of_a_cache(
    tmp_path, tokenizer, tiny_teacher, paragraphs, hub_caches
):
    """Other weights give other sequences and so another cache; equal weights give the same."""
    from kd.capture.plan import make_capture_plan
    from kd.config.jobfile import parse_config

    half = len(paragraphs) // 2
    first = dataset(tmp_path / "a", paragraphs[:half])
    second = dataset(tmp_path / "b", paragraphs[half:])

    def fingerprint(weight: float, **changes) -> str:
        train = [first.model_dump(), second.model_dump() | {"weight": weight}]
        data = {"train": train, "sequence_length": 32, "max_train_samples": 30} | changes
        job = parse_config(
            {"kind": "precompute", "teacher": {"model": str(tiny_teacher)}, "data": data}
        )
        return make_capture_plan(
            job,
            TeacherFiles(job.teacher, tiny_teacher),
            tokenizer,
            load_corpus(job.data, tokenizer),
        ).identity.fingerprint

    found = [
        fingerprint(1),
        fingerprint(2),
        fingerprint(3),
        fingerprint(2, streaming=True),
        fingerprint(2),
    ]
    assert len(set(found[:3])) == 3 and found[4] == found[1]
    assert found[3] != found[1], "a stream is held out from where it is cut, not from its end"
    same = {fingerprint(2, streaming=each, validation_fraction=0) for each in (True, False)}
    assert len(same) == 1


@pytest.mark.parametrize(
    "texts, detail",
    [
        (["", " "], r"data\.train\.1 holds no text"),
        (["Anne Elliot."], r"data\.train\.1 holds \d+ tokens, fewer than one"),
    ],
)
def test_a_source_of_a_mixture_without_text_enough_is_named(
    tmp_path, tokenizer, paragraphs, hub_caches, texts, detail
):
    first = dataset(tmp_path / "a", paragraphs).model_copy(update={"weight": 2.0})
    options = config(train=(first, dataset(tmp_path / "b", texts)), sequence_length=32)
    with pytest.raises(DataError, match=detail):
        load_corpus(options, tokenizer)
