"""The token store: the sequences of the packing in memory, however often its writing is cut off."""

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.support.paths import AUSTEN, ROOT
from cache.disk import list_file_sizes
from cache.records import Sequences
from kd.config.data import DataConfig, DatasetSpec
from kd.config.jobfile import load_config
from kd.errors import Interrupted
from kd.progress import Event, Monitor
from kd.text.batches import PlainText
from kd.text.corpus import load_corpus, open_corpus
from kd.text.stored.inputs import describe_inputs
from kd.text.stored.places import BEGINNING, Cursor, Mark, TextPlace
from kd.text.stored.shard_files import Layout, list_stores
from kd.text.stored.view import StoredSequences, TokenStore
from tests.support.kd.text import config, write

FIELDS = ("tokens", "document_start", "target_mask")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Let shards, blocks and batches of pieces be small, so that a short text has many."""
    monkeypatch.setattr("kd.text.stored.shard_files.SHARD_TOKENS", 16 * 20)
    monkeypatch.setattr("kd.text.packing.BLOCK_SEQUENCES", 3)
    monkeypatch.setattr("kd.text.tokens.BLOCK_SEQUENCES", 3)
    monkeypatch.setattr("kd.text.tokens._TEXTS_AT_ONCE", 2)
    monkeypatch.setattr("kd.text.text_encoder.PIECE_CHARACTERS", 40)
    monkeypatch.setattr("kd.text.text_encoder.BATCH_CHARACTERS", 300)
    # Else the clock decides which of two stores still calls its files young.
    monkeypatch.setattr("kd.text.stored.inputs._YOUNG_NS", 10**20)


@pytest.fixture
def paragraphs(tiny_text) -> list[str]:
    return [part for part in tiny_text.read_text(encoding="utf-8").split("\n\n") if part.strip()]


def folder_of(path: Path, texts: list[str]) -> DatasetSpec:
    path.mkdir()
    write(path, "train-00000.jsonl", [{"text": text} for text in texts])
    return DatasetSpec(path=str(path))


def test_a_store_that_the_library_made_of_a_folder_has_other_inputs(tmp_path, tokenizer):
    """Of a text file the library made one row a line, and it counted the rows of all files."""
    spec = folder_of(tmp_path / "set", ["One.", "Two."])
    options = config(train=[spec.model_dump()])
    [found] = describe_inputs(options.train, "train", options, tokenizer, 300, None)["sources"]
    assert len(found["files"]) == 1 and found["weight"] == 1.0
    assert found != {**spec.model_dump(mode="json"), "files": found["files"]}


def plain(folder: Path, texts: list[str]) -> dict:
    """Two files: a long text, and short ones of which some have no or one token."""
    long = folder / "long.txt"
    long.write_text("\n\n".join(texts[:20]), encoding="utf-8")
    rows = ["", *texts[20:30], "a", *texts[30:], " "]
    return {"train": [str(long), str(write(folder, "b.jsonl", [{"text": row} for row in rows]))]}


def unpacked(folder: Path, texts: list[str]) -> dict:
    return {**plain(folder, texts), "packing": False}


def chats(folder: Path, texts: list[str]) -> dict:
    rows = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b[:50]}]}
        for a, b in itertools.pairwise(texts)
    ]
    return {"train": str(write(folder, "c.jsonl", rows)), "format": "messages"}


def completions(folder: Path, texts: list[str]) -> dict:
    rows = [{"prompt": a, "completion": b[:60]} for a, b in itertools.pairwise(texts)]
    return {"train": str(write(folder, "p.jsonl", rows)), "format": "prompt_completion"}


def mixture(folder: Path, texts: list[str]) -> dict:
    heavy = folder_of(folder / "a", [text.upper() for text in texts])
    light = folder_of(folder / "b", texts).model_copy(update={"weight": 0.3})
    return {"train": [heavy, light], "validation_fraction": 0.1}


def stream(folder: Path, texts: list[str]) -> dict:
    spec = folder_of(folder / "s", texts)
    return {"train": spec, "streaming": True, "max_train_samples": 41, "validation_fraction": 0.2}


def streams(folder: Path, texts: list[str]) -> dict:
    specs = [folder_of(folder / name, texts) for name in ("one", "other")]
    return {"train": specs, "streaming": True, "max_train_samples": 61, "validation_fraction": 0}


KINDS = [plain, unpacked, chats, completions, mixture, stream, streams]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def options(request, tmp_path, paragraphs, tokenizer, monkeypatch, hub_caches) -> DataConfig:
    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    return config(sequence_length=16, **request.param(tmp_path, paragraphs))


def same(left, right) -> bool:
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in FIELDS)


def read_files(folder: Path) -> dict[str, bytes]:
    """The bytes of every file but the lock."""
    names = [name for name in list_file_sizes(folder) if not name.endswith(".lock")]
    return {name: (folder / name).read_bytes() for name in names}


def stop_after(calls: int) -> Monitor:
    """Return a monitor that stops the reading at the question after ``calls`` others."""
    asked = itertools.count()
    return Monitor(should_stop=lambda: next(asked) >= calls)


def test_the_store_holds_what_is_packed_in_memory(options, tokenizer, tmp_path):
    heard: list[list[Event]] = [[], []]
    expected = load_corpus(options, tokenizer, Monitor(heard[0].append), size=2048)
    found = open_corpus(options, tokenizer, tmp_path / "texts", Monitor(heard[1].append), 2048)
    assert len(expected.train) > 40
    for name in ("train", "validation"):
        left, right = getattr(found, name), getattr(expected, name)
        assert isinstance(left, StoredSequences)
        assert (len(left), left.length, left.positions) == (len(right), 16, right.positions)
        assert same(left.select(slice(None)), right)
    assert found.compute_sha256() == expected.compute_sha256()
    warnings = [[each.data for each in one if each.type == "warning"] for one in heard]
    assert warnings[0] == warnings[1]


def test_a_text_that_is_stored_is_not_read_again(options, tokenizer, tmp_path, monkeypatch):
    open_corpus(options, tokenizer, tmp_path / "texts", size=2048)
    monkeypatch.setattr("kd.text.corpus.find_documents", None)
    open_corpus(options, tokenizer, tmp_path / "texts", size=2048)


@pytest.mark.long
@pytest.mark.parametrize("patience", [2, 5, 9])
def test_an_interrupted_store_becomes_the_undisturbed_one(
    options, tokenizer, tmp_path, monkeypatch, patience
):
    """Each attempt reads only ``patience`` documents or batches more than the one before."""
    open_corpus(options, tokenizer, tmp_path / "whole", size=2048)
    for attempt in itertools.count(1):
        try:
            open_corpus(options, tokenizer, tmp_path / "cut", stop_after(attempt * patience), 2048)
            break
        except Interrupted:
            continue
    assert attempt > 1
    assert read_files(tmp_path / "cut") == read_files(tmp_path / "whole")


class Counted:
    """A tokenizer, and the pieces of text that its library has read."""

    def __init__(self, inner, pieces: list[str] | None = None) -> None:
        self.inner = inner
        self.pieces: list[str] = [] if pieces is None else pieces

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        return Counted(found, self.pieces) if name == "backend_tokenizer" else found

    def __call__(self, text, **named):
        return self.inner(text, **named)

    def encode_batch_fast(self, texts, **named):
        self.pieces.extend(texts)
        return self.inner.encode_batch_fast(texts, **named)


@pytest.mark.parametrize("share", [0.2, 0.9])  # within the long text, and near the end
def test_text_that_is_sealed_is_not_tokenized_again(
    tokenizer, paragraphs, tmp_path, monkeypatch, share
):
    monkeypatch.setattr("kd.text.tokens._TEXTS_AT_ONCE", 1)
    options = config(sequence_length=16, validation_fraction=0, **plain(tmp_path, paragraphs))
    whole = Counted(tokenizer)
    open_corpus(options, whole, tmp_path / "whole", size=2048)
    first, second = Counted(tokenizer), Counted(tokenizer)
    total = sum(map(len, whole.pieces))
    stop = Monitor(should_stop=lambda: sum(map(len, first.pieces)) > share * total)
    with pytest.raises(Interrupted):
        open_corpus(options, first, tmp_path / "cut", stop, size=2048)
    open_corpus(options, second, tmp_path / "cut", size=2048)
    assert read_files(tmp_path / "cut") == read_files(tmp_path / "whole")
    assert sum(map(len, second.pieces)) < (1 - share + 0.15) * total


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_parts_are_read_by_number_across_shards(stored, data):
    store, whole = stored
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    view = StoredSequences.whole(store).part(start, stop)
    expected = whole.select(slice(start, stop))
    assert (len(view), view.positions) == (len(expected), expected.positions)
    assert same(view.select(slice(None)), expected)
    if len(view):
        numbers = data.draw(st.lists(st.integers(-len(view), len(view) - 1), max_size=30))
        chosen = np.asarray(numbers, np.int64)
        assert same(view.select(chosen), expected.select(chosen))
    with pytest.raises(IndexError):
        view.select(np.array([len(view)]))


@pytest.fixture(scope="module")
def stored(tmp_path_factory, tokenizer, tiny_text):
    """Return a store of many shards, and its sequences."""
    folder = tmp_path_factory.mktemp("stored")
    options = config(sequence_length=12, train=str(tiny_text), validation_fraction=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kd.text.stored.shard_files.SHARD_TOKENS", 12 * 7)
        corpus = open_corpus(options, tokenizer, folder, size=2048)
    return TokenStore(corpus.train.store.folder), load_corpus(options, tokenizer).train


@pytest.mark.parametrize(("size", "dtype"), [(65536, "<u2"), (65537, "<u4"), (None, "<u4")])
@pytest.mark.parametrize("length", [8, 12, 17])
def test_tokens_take_the_bytes_that_their_vocabulary_needs(tmp_path, size, dtype, length):
    rng = np.random.default_rng(length)
    layout = Layout.choose(length, size)
    assert layout.dtype == dtype
    tokens = rng.integers(0, size or 2**32, (5, length)).astype(np.uint32)
    starts = rng.random((5, length)) < 0.3
    mask = ~np.roll(starts, -1, axis=1) & (rng.random((5, length)) < 0.6)
    mask[:, -1] = False
    sequences = Sequences(tokens, starts, mask)
    path = tmp_path / "a"
    path.write_bytes(layout.encode(sequences))
    assert path.stat().st_size == layout.count_bytes(5)
    assert same(layout.map_shard(path, 5).read(slice(None)), sequences)


@given(given=st.lists(st.floats(0, 1e12), max_size=4), numbers=st.integers(0, 2**50))
def test_a_cursor_survives_json(given, numbers):
    marks = (Mark(TextPlace(1, 2, numbers, 4, 5, 6), 7), Mark(BEGINNING, 0))
    cursor = Cursor(marks, tuple(given))
    assert Cursor.from_json(json.loads(json.dumps(cursor.to_json()))) == cursor


def test_training_reads_the_same_sequences_from_a_store_as_from_memory(
    tokenizer, tiny_text, tmp_path
):
    options = config(sequence_length=16, train=str(tiny_text), validation_fraction=0.1)
    stored = PlainText(open_corpus(options, tokenizer, tmp_path, size=2048))
    packed = PlainText(load_corpus(options, tokenizer, size=2048))
    assert stored.fingerprint == packed.fingerprint
    assert stored.shard_sequences == packed.shard_sequences == 20
    order = np.random.default_rng(0).permutation(stored.train_count)
    held_out = stored.train_count + np.arange(stored.validation_count)
    for indices in (order, order[:1], held_out[::-1]):
        assert same(stored.read(indices)[0], packed.read(indices)[0])


def read_by_the_page(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read a store as ``docs/formats.md`` describes it, and compare its digests."""
    manifest = json.loads((folder / "manifest.json").read_text())
    length = manifest["layout"]["sequence_length"]
    size = manifest["layout"]["shard_sequences"]
    tokens, bits, chain = [], [], b""
    for index in range(-(-manifest["sequences"] // size)):
        path = folder / "shards" / f"{index // 1000:03}" / f"{index:06}.tokens"
        seal = json.loads(path.with_suffix(".json").read_text())
        data = path.read_bytes()
        assert seal["size"] == len(data) and seal["sha256"] == hashlib.sha256(data).hexdigest()
        chain = hashlib.sha256(chain + hashlib.sha256(data).digest()).digest()
        flat = np.frombuffer(data, manifest["layout"]["dtype"], seal["sequences"] * length)
        tokens.append(flat.reshape(-1, length))
        rest = np.frombuffer(data, np.uint8, offset=flat.nbytes).reshape(2, seal["sequences"], -1)
        bits.append(np.unpackbits(rest, axis=2)[..., :length].astype(bool))
    starts, mask = np.concatenate(bits, axis=1)
    assert chain.hex() == manifest["sha256"] and mask.sum() == manifest["targets"]
    return np.concatenate(tokens), starts, mask


def test_a_store_is_read_by_the_page_of_its_format(stored):
    store, whole = stored
    for found, name in zip(read_by_the_page(store.folder), FIELDS, strict=True):
        assert np.array_equal(found, getattr(whole, name))
    inputs = json.loads((store.folder / "inputs.json").read_text())["inputs"]
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    assert store.folder.name == digest[:32]


@pytest.mark.long
def test_the_text_of_the_example_keeps_its_digest(tokenizer, tmp_path, monkeypatch):
    """It is part of the fingerprint of the demo's cache, which others may have captured before."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("kd.text.stored.shard_files.SHARD_TOKENS", 100_000)
    data = load_config(AUSTEN / "job.yaml").data
    corpus = open_corpus(data, tokenizer, tmp_path, size=2048)
    assert corpus.compute_sha256() == (
        "50439e7d2039e5af3a43dd358fcb88b84b52c2dbc012ac1f857b498c79bf1c6a"
    )


def test_stores_are_listed_with_their_bytes_and_last_use(tokenizer, tiny_text, tmp_path):
    texts = tmp_path / "texts"
    assert list(list_stores(texts)) == []
    options = config(sequence_length=16, train=str(tiny_text))
    open_corpus(options, tokenizer, texts, size=2048)
    shorter = options.model_copy(update={"sequence_length": 20})
    with pytest.raises(Interrupted):
        open_corpus(shorter, tokenizer, texts, stop_after(3), 2048)
    found = {each.complete: each for each in list_stores(texts)}
    assert set(found) == {True, False}
    assert found[True].size == sum(list_file_sizes(found[True].folder).values())
    before = found[True].used
    open_corpus(options, tokenizer, texts, size=2048)
    assert {each.complete: each.used for each in list_stores(texts)}[True] > before
