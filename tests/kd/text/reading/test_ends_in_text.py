"""Special tokens that are written in plain text: ends of documents, beginnings, and others."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bench.support.paths import AUSTEN
from kd.progress import Monitor
from kd.text.corpus import load_corpus, open_corpus
from kd.text.reading.notes import TextNotes
from kd.text.text_encoder import separate_texts
from tests.support.kd.text import config, encode_documents, rows, write

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def stories() -> list[str]:
    novel = (AUSTEN / "text" / "persuasion.txt").read_text(encoding="utf-8")[4000:]
    # Of different lengths, so that ends lie everywhere; some are longer than a piece.
    return [novel[7 * n * n : 7 * n * n + 61 * n].strip() for n in range(1, 40)]


def load(source, tokenizer, texts=None, **changes):
    """Return the corpus and the notices of a text; ``texts`` is where it is stored."""
    monitor = Monitor()
    data = config(train=str(source), validation_fraction=0, sequence_length=64, **changes)
    if texts is None:
        return load_corpus(data, tokenizer, monitor), monitor.notices
    return open_corpus(data, tokenizer, texts, monitor), monitor.notices


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("between", [END, f"\n{END}\n", END + END])
def test_stories_joined_by_the_end_token_are_those_of_rows(
    tmp_path, stories, tokenizer, monkeypatch, packing, between
):
    monkeypatch.setattr("kd.text.text_encoder.PIECE_CHARACTERS", 300)
    monkeypatch.setattr("kd.text.text_encoder.BATCH_CHARACTERS", 700)
    monkeypatch.setattr("kd.text.reading.contents._CHUNK", 97)
    monkeypatch.setattr("kd.text.tokens.BLOCK_SEQUENCES", 2)
    (tmp_path / "joined.txt").write_text(between.join(stories), encoding="utf-8")
    spaces = between.strip(END) if "\n" in between else ""
    alone = [
        (spaces and "\n") * (number > 0) + story + (spaces and "\n") * (number < len(stories) - 1)
        for number, story in enumerate(stories)
    ]
    expected, quiet = load(
        write(tmp_path, "split.jsonl", [{"text": each} for each in alone]),
        tokenizer,
        packing=packing,
    )
    found, notices = load(tmp_path / "joined.txt", tokenizer, packing=packing)
    assert found.compute_sha256() == expected.compute_sha256() and not quiet
    (notice,) = notices
    assert notice.count == (len(stories) - 1) * between.count(END) and END in notice.example
    # A row may hold several documents, too.
    row, _ = load(
        write(tmp_path, "one.jsonl", [{"text": between.join(stories)}]), tokenizer, packing=packing
    )
    assert row.compute_sha256() == expected.compute_sha256()


def test_a_complete_store_tells_what_was_found_in_its_text(tmp_path, stories, tokenizer):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text(END.join(stories), encoding="utf-8")
    (tmp_path / "data" / "README.md").write_text("about")
    first = load(tmp_path / "data", tokenizer, tmp_path / "texts")[1]
    assert {notice.count for notice in first} == {len(stories) - 1, 1}
    assert load(tmp_path / "data", tokenizer, tmp_path / "texts")[1] == first


def test_a_job_may_say_what_ends_a_document(tmp_path, stories, tokenizer):
    (tmp_path / "a.txt").write_text(END.join(stories), encoding="utf-8")
    whole, (notice,) = load(tmp_path / "a.txt", tokenizer, document_separator="")
    starts = whole.train.document_start
    assert starts.sum() <= len(starts) + 1, "a sequence begins a piece, and padding is one"
    assert "special tokens" in notice.what and notice.count == len(stories) - 1
    (tmp_path / "b.txt").write_text("=====".join(stories), encoding="utf-8")
    other, _ = load(tmp_path / "b.txt", tokenizer, document_separator="=====")
    split, _ = load(tmp_path / "a.txt", tokenizer)
    assert other.compute_sha256() == split.compute_sha256()


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize("text", ["", "a", "<>", "a<>b", "<>a<><>b<>", "a<b>c<", "a<<>>b"])
def test_a_separator_is_found_in_chunks_of_any_size(text, chunk):
    chunks = [text[place : place + chunk] for place in range(0, len(text), chunk)]
    texts = separate_texts(chunks, "<>")
    assert ["".join(each) for each in texts] == text.split("<>")


@pytest.fixture(scope="module")
def framed() -> PreTrainedTokenizerFast:
    """A tokenizer that puts <s> before and </s> after every text."""
    words = ["<s>", "</s>", "<unk>", "<mask>", "one", "two"]
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(word, special=True) for word in words[:4]])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("separator", [None, ""])
@pytest.mark.parametrize(
    "text, expected, count",
    [
        ("one two", "<s> one two </s>", 0),
        ("<s>one two", "<s> one two </s>", 0),
        ("one two</s>", "<s> one two </s>", 0),
        ("<s>one two</s>", "<s> one two </s>", 0),
        ("one<s>two", "<s> one <s> two </s>", 1),
        ("one <mask> three", "<s> one <mask> <unk> </s>", 1),
    ],
)
def test_what_the_tokenizer_puts_around_a_text_stands_there_once(
    framed, text, expected, count, separator
):
    notes = TextNotes()
    found = encode_documents(
        iter(rows([text])), framed, config(document_separator=separator), notes=notes
    )
    (document,) = found
    assert framed.convert_ids_to_tokens(document.ids.tolist()) == expected.split()
    special = [each.count for each in notes.list_notices() if "special" in each.what]
    assert sum(special) == count


@pytest.mark.long
def test_each_place_of_a_text_is_counted_once(tmp_path, stories, tokenizer, monkeypatch):
    """Also where its reading is interrupted after each shard."""
    from kd.errors import Interrupted

    monkeypatch.setattr("kd.text.stored.shard_files.SHARD_TOKENS", 64 * 4)
    monkeypatch.setattr("kd.text.packing.BLOCK_SEQUENCES", 2)
    monkeypatch.setattr("kd.text.tokens.BLOCK_SEQUENCES", 2)
    bad = [{"text": story} for story in stories] + [{"text": f"a{END}b <|pad|>"}, {"text": None}]
    path = write(tmp_path, "a.jsonl", bad * 3)
    whole = load(path, tokenizer, tmp_path / "whole")
    data = config(train=str(path), validation_fraction=0, sequence_length=64)
    for stops in range(1, 9):
        left = iter(range(30 * stops))
        monitor = Monitor(should_stop=lambda left=left: next(left, None) is None)
        try:
            corpus = open_corpus(data, tokenizer, tmp_path / "cut", monitor)
            break
        except Interrupted:
            continue
    else:
        corpus = open_corpus(data, tokenizer, tmp_path / "cut", monitor := Monitor())
    assert stops > 2, "it was interrupted"
    assert np.array_equal(corpus.train.select(slice(None)).tokens,
                          whole[0].train.select(slice(None)).tokens)  # fmt: skip
    kept = [next((tmp_path / each).glob("*/manifest.json")) for each in ("whole", "cut")]
    assert json.loads(kept[0].read_text()) == json.loads(kept[1].read_text())
