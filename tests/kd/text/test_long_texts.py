"""Long texts: read, tokenized and packed in parts, with the sequences of the whole text."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bench.support.paths import AUSTEN, ROOT
from cache.records import Sequences
from kd.errors import DataError, Interrupted
from kd.progress import Event, Monitor
from kd.text import corpus, text_encoder
from kd.text.corpus import load_corpus
from kd.text.packing import BLOCK_SEQUENCES, Document, join_blocks, pack_documents
from tests.support.kd.text import config

NOVEL = (AUSTEN / "text" / "persuasion.txt").read_text(encoding="utf-8")[:60_000]
#: What a long text may take beside its sequences, and what these take for each token.
ROOM_BYTES = 400 * 10**6
TOKEN_BYTES = 6
#: Seconds for a child process: generous, because only a hang should end it.
PATIENCE = 3000
CHILD = """
import sys
from pathlib import Path
import datasets
from transformers import AutoTokenizer
from kd.config.data import DataConfig
from kd.text.corpus import load_corpus

def read(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
before = read("VmRSS:")
corpus = load_corpus(DataConfig(train=sys.argv[2]), tokenizer)
tokens = corpus.train.tokens.size + corpus.validation.tokens.size
print(tokens, read("VmHWM:") - before)
"""


@pytest.fixture(scope="module")
def own():
    """Return the tokenizer of the example."""
    return AutoTokenizer.from_pretrained(AUSTEN / "teacher")


def same(left: Sequences, right: Sequences) -> bool:
    return all(
        np.array_equal(getattr(left, name), getattr(right, name))
        for name in ("tokens", "document_start", "target_mask")
    )


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_long_text_is_packed_as_one_document(tmp_path, own, name, packing):
    path = tmp_path / name
    path.write_text(NOVEL if name == "a.txt" else json.dumps({"text": NOVEL}), encoding="utf-8")
    (tmp_path / "b.txt").write_text("The end.", encoding="utf-8")
    options = config(
        train=[str(path), str(tmp_path / "b.txt")], packing=packing, validation_fraction=0
    )
    whole = [[*own(text)["input_ids"], own.eos_token_id] for text in (NOVEL, "The end.")]
    assert len(whole[0]) > 20 * BLOCK_SEQUENCES * 8
    expected = pack_documents([Document(np.asarray(ids, np.uint32)) for ids in whole], options)
    assert same(load_corpus(options, own).train, expected)
    few = load_corpus(options.model_copy(update={"max_train_samples": 70}), own).train
    assert same(few, expected.select(slice(70)))


def test_blocks_join_to_what_they_hold():
    whole = pack_documents([Document(np.arange(1, 9000, dtype=np.uint32))], config())
    for cuts in ([0, 1125], [0, 1, 2, 500, 500, 1125]):
        blocks = (whole.select(slice(*pair)) for pair in itertools.pairwise(cuts))
        assert same(join_blocks(blocks), whole)


def test_an_unknown_id_is_named_by_its_place_in_the_whole_text(tmp_path, own):
    path = tmp_path / "a.txt"
    path.write_text(NOVEL, encoding="utf-8")
    ids = np.asarray(own(NOVEL)["input_ids"])
    place = int(np.argmax(ids))
    assert place > 64 * 8
    with pytest.raises(DataError, match=rf"a\.txt: row 1, token {place + 1}: "):
        load_corpus(config(train=str(path)), own, size=int(ids[place]))


def test_the_reading_is_reported_and_hears_a_stop(tmp_path, own, monkeypatch):
    monkeypatch.setattr(corpus, "REPORT_SECONDS", -1.0)
    path = tmp_path / "a.txt"
    path.write_text(NOVEL * 20, encoding="utf-8")
    heard: list[Event] = []
    load_corpus(config(train=str(path)), own, Monitor(listen=heard.append))
    shown = [event.data for event in heard if event.type == "progress"]
    shares = [data["fraction"] for data in shown]
    assert shares == sorted(shares) and 0 < shares[0] < 0.5 and shares[-1] == 1
    assert {data["unit"] for data in shown} == {"kB"}
    with pytest.raises(Interrupted, match="while reading the text"):
        load_corpus(config(train=str(path)), own, Monitor(should_stop=lambda: True))


def test_a_tokenizer_that_cannot_be_cut_reads_a_long_text_at_once_and_says_why(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(text_encoder, "LONG_CHARACTERS", 100)
    raw = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("\u2581", -1.0)], unk_id=0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    path = tmp_path / "a.txt"
    path.write_text("a aa " * 30, encoding="utf-8")
    heard: list[Event] = []
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    load_corpus(config(train=str(path)), tokenizer, Monitor(listen=heard.append))
    (warning,) = [event.data["message"] for event in heard if event.type == "warning"]
    assert "a.txt: row 1: 150 characters are tokenized at once" in warning
    assert "Unigram model reads a text as one word" in warning and "Split the text" in warning


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_file_of_50_megabytes_takes_little_memory(tmp_path):
    text = "".join(path.read_text("utf-8") for path in sorted((AUSTEN / "text").glob("*.txt")))
    path = tmp_path / "a.txt"
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < 50 * 10**6:
            file.write(text)
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, str(AUSTEN / "teacher"), str(path)],
        check=True, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT,
    )  # fmt: skip
    tokens, taken = map(int, ended.stdout.split())
    assert tokens > 10**7
    assert taken < ROOM_BYTES + TOKEN_BYTES * tokens
