"""Token stores that are damaged, foreign, killed or shared: nothing wrong is ever believed."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench.support.paths import AUSTEN, ROOT
from cache.disk import list_file_sizes
from cache.errors import StorageError
from kd.errors import DataError
from kd.progress import Monitor
from kd.text.corpus import open_corpus
from kd.text.stored.shard_files import INPUTS, MANIFEST, list_stores, locate_seal, locate_shard
from tests.support.kd.text import config

#: Tokenizes the files of a folder into a store below another one; the options are for the tests.
CHILD = """
import resource, sys, time
from pathlib import Path
import datasets
import kd.text.stored.shard_files as shards
import kd.text.stored.writing as writing
from kd.models.tokenizers import load_tokenizer
from kd.text.corpus import open_corpus
from kd.config.data import DataConfig

source, texts, shard_tokens, pause = sys.argv[1:]
shards.SHARD_TOKENS = int(shard_tokens)
write_file = writing.write_file
writing.write_file = lambda *given: (write_file(*given), time.sleep(float(pause)))
tokenizer = load_tokenizer(Path("examples/austen/teacher"))
tokenizer("warm")
print("begun", flush=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = DataConfig(train=source, sequence_length=128)
corpus = open_corpus(data, tokenizer, Path(texts), size=2048)
digest = corpus.compute_sha256()
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(digest, len(corpus.train) + len(corpus.validation), (after - before) * 1024)
"""


def start(source: Path, texts: Path, shard_tokens: int, pause: float = 0.0) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(source), str(texts), str(shard_tokens), str(pause)],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def finish(child: subprocess.Popen) -> tuple[str, int, int]:
    """Wait for a child; return the digest, the sequences, and the bytes that it took."""
    printed, _ = child.communicate(timeout=600)
    assert child.returncode == 0
    digest, sequences, taken = printed.splitlines()[-1].split()
    return digest, int(sequences), int(taken)


def read_files(folder: Path) -> dict[str, bytes]:
    names = [name for name in list_file_sizes(folder) if not name.endswith(".lock")]
    return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture
def novels(tmp_path) -> Path:
    folder = tmp_path / "novels"
    folder.mkdir()
    for number, path in enumerate(sorted((AUSTEN / "text").glob("*.txt"))):
        text = path.read_text(encoding="utf-8")[:120_000]
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.long
def test_ten_kills_change_no_byte(novels, tmp_path):
    expected = finish(start(novels, tmp_path / "whole", 4096))
    choice = random.Random(0)
    shards = [0]
    for _ in range(10):
        child = start(novels, tmp_path / "cut", 4096, pause=0.05)
        assert child.stdout is not None and child.stdout.readline() == "begun\n"
        time.sleep(choice.uniform(0.0, 0.35))
        assert child.poll() is None, "the text is too short for ten kills"
        child.kill()
        child.communicate()
        shards.append(len(list((tmp_path / "cut").glob("*/shards/000/*.json"))))
    assert shards == sorted(shards) and len(set(shards)) > 3, "each attempt went on"
    assert finish(start(novels, tmp_path / "cut", 4096))[:2] == expected[:2]
    assert read_files(tmp_path / "cut") == read_files(tmp_path / "whole")


@pytest.mark.long
def test_two_processes_that_store_one_text_do_not_harm_each_other(novels, tmp_path):
    expected = finish(start(novels, tmp_path / "whole", 4096))
    both = [start(novels, tmp_path / "shared", 4096, pause=0.005) for _ in range(2)]
    assert {finish(child)[:2] for child in both} == {expected[:2]}
    assert read_files(tmp_path / "shared") == read_files(tmp_path / "whole")


@pytest.mark.long
def test_a_text_takes_a_small_part_of_its_tokens_in_memory(tmp_path):
    """Its sequences take 6 bytes a token in memory; the process takes less than half of that."""
    novel = "".join(path.read_text("utf-8") for path in sorted((AUSTEN / "text").glob("*.txt")))
    path = tmp_path / "a.txt"
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < 110 * 10**6:
            file.write(novel)
    _, sequences, taken = finish(start(path, tmp_path / "texts", 1 << 18))
    assert sequences * 128 * 6 > 180 * 10**6
    assert taken < 90 * 10**6


# ---------------------------------------------------------------------- what is refused


@pytest.fixture
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr("kd.text.stored.shard_files.SHARD_TOKENS", 16 * 20)


@pytest.fixture
def source(tmp_path, tiny_text) -> Path:
    return Path(shutil.copy(tiny_text, tmp_path / "a.txt"))


def open_text(source: Path, texts: Path, tokenizer, **changes):
    options = config(**{"train": str(source), "sequence_length": 16} | changes)
    return open_corpus(options, tokenizer, texts, size=2048)


def store_of(texts: Path) -> Path:
    (folder,) = (each for each in texts.iterdir() if each.is_dir())
    return folder


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("locate", "damage", "message"),
    [
        (locate_shard, spoil, "is not what its seal says"),
        (locate_shard, shorten, "bytes, but must have 720"),
        (locate_shard, Path.unlink, r"000001.tokens is missing"),
        (locate_seal, Path.unlink, r"000001.json is missing"),
        (locate_seal, shorten, "000001.json is not JSON"),
    ],
)
def test_a_damaged_shard_is_named(
    source, tmp_path, tokenizer, small_shards, locate, damage, message
):
    open_text(source, tmp_path / "texts", tokenizer)
    damage(locate(store_of(tmp_path / "texts"), 1))
    corpus = open_text(source, tmp_path / "texts", tokenizer)
    corpus.train.select(slice(0, 20))
    with pytest.raises(DataError, match=message) as caught:
        corpus.train.select(slice(20, 21))
    assert str(store_of(tmp_path / "texts")) in str(caught.value)
    assert "Delete that folder and run again" in caught.value.remedy


def test_a_store_of_a_later_version_is_refused(source, tmp_path, tokenizer):
    open_text(source, tmp_path / "texts", tokenizer)
    for name in (MANIFEST, INPUTS):
        path = store_of(tmp_path / "texts") / name
        before = path.read_text()
        path.write_text(json.dumps(json.loads(before) | {"format": 2}))
        with pytest.raises(DataError, match="has version 2, but this program reads 1") as caught:
            open_text(source, tmp_path / "texts", tokenizer)
        assert "Upgrade Potstill" in caught.value.remedy
        path.write_text(before)


def test_a_store_of_another_tokenizer_is_refused(source, tmp_path, tokenizer):
    """Its folder was renamed, or its inputs were edited."""
    open_text(source, tmp_path / "texts", tokenizer)
    own = store_of(tmp_path / "texts")
    path = own / INPUTS
    value = json.loads(path.read_text())
    value["inputs"]["tokenizer"] = "0" * 64
    path.write_text(json.dumps(value))
    with pytest.raises(DataError, match="was made of another tokenizer: expected tokenizer") as it:
        open_text(source, tmp_path / "texts", tokenizer)
    assert "0" * 64 in str(it.value)


def test_another_tokenizer_template_or_text_has_a_store_of_its_own(
    source, tmp_path, tokenizer, monkeypatch
):
    texts = tmp_path / "texts"
    first = open_text(source, texts, tokenizer)
    assert first.train.store.folder == open_text(source, texts, tokenizer).train.store.folder
    monkeypatch.setattr(tokenizer, "chat_template", "another")
    open_text(source, texts, tokenizer)
    source.write_text(source.read_text(encoding="utf-8") + "One line more.", encoding="utf-8")
    changed = open_text(source, texts, tokenizer)
    open_text(source, texts, tokenizer, packing=False)
    assert len(list(list_stores(texts))) == 4
    assert not np.array_equal(
        changed.validation.select([-1]).tokens, first.validation.select([-1]).tokens
    )


def test_text_that_changes_while_it_is_read_is_refused(source, tmp_path, tokenizer, small_shards):
    whole = source.read_text(encoding="utf-8")

    def change() -> bool:
        source.write_text(whole + whole, encoding="utf-8")
        return False

    options = config(train=str(source), sequence_length=16)
    with pytest.raises(DataError, match="The text changed while it was read") as caught:
        open_corpus(options, tokenizer, tmp_path / "texts", Monitor(should_stop=change), 2048)
    assert "Run again" in caught.value.remedy
    assert [path.suffix for path in (tmp_path / "texts").iterdir()] == [".lock"]


def test_a_disk_that_is_too_small_is_refused_before_a_token_is_read(
    source, tmp_path, tokenizer, monkeypatch
):
    monkeypatch.setattr("kd.text.stored.writing.measure_free_bytes", lambda _: 8000)
    with pytest.raises(StorageError, match=r"take about 8\.\d+ KiB more, but only 7\.8") as caught:
        open_text(source, tmp_path / "texts", tokenizer)
    assert "Free space" in caught.value.remedy
    open_text(source, tmp_path / "texts", tokenizer, max_train_samples=9, validation_fraction=0)


def rewrite_in_place(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def put_in_its_place(path: Path, text: str) -> None:
    other = path.with_name("other")
    other.write_text(text, encoding="utf-8")
    shutil.copystat(path, other)
    other.replace(path)


def turn_a_link(path: Path, text: str) -> None:
    version = path.with_name(f"{hash(text)}.version")
    version.write_text(text, encoding="utf-8")
    times = path.stat()
    os.utime(version, ns=(times.st_atime_ns, times.st_mtime_ns))
    path.unlink()
    path.symlink_to(version)


@pytest.mark.parametrize("change", [rewrite_in_place, put_in_its_place, turn_a_link])
def test_a_changed_text_with_its_old_time_and_size_is_read_again(tokenizer, tmp_path, change):
    path = tmp_path / "data" / "a.txt"
    path.parent.mkdir()
    digests = list[str]()
    for word in ("rain", "snow"):
        text = f"It was a dark night, and there was {word}. " * 100
        if word == "rain":
            path.write_text(text, encoding="utf-8")
            times = path.stat()
        else:
            change(path, text)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        data = config(train=str(path.parent), sequence_length=32)
        digests.append(open_corpus(data, tokenizer, tmp_path / "texts").compute_sha256())
    assert digests[0] != digests[1] and path.stat().st_mtime_ns == times.st_mtime_ns


def test_a_young_text_is_hashed_again(tokenizer, tmp_path, monkeypatch):
    """On a disk whose clock ticks slowly two changes may leave the same times."""
    monkeypatch.setattr(
        "kd.text.stored.inputs.describe_file",
        lambda file: [str(file), file.stat().st_size, time.time_ns() // 10**12],
    )
    monkeypatch.setattr("kd.text.stored.inputs._YOUNG_NS", 10**20)
    data = config(train=str(tmp_path / "a.txt"), sequence_length=32)
    digests = set()
    for word in ("rain", "snow", "snow"):
        (tmp_path / "a.txt").write_text(f"There was {word}. " * 200, encoding="utf-8")
        digests.add(open_corpus(data, tokenizer, tmp_path / "texts").compute_sha256())
    assert len(digests) == 2 and len(list(list_stores(tmp_path / "texts"))) == 1
