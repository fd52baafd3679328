"""Tokenizers with the same tokens and other rules are told apart by text, and copies are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from bench.support.paths import AUSTEN
from cache.records import Sequences
from kd.errors import ModelError, TokenizerMismatch
from kd.models.tokenizers import (
    KnownTokenizer,
    hash_tokenizer,
    load_tokenizer,
    require_same_tokenizer,
)
from kd.models.tokenizing.token_map import TokenMap
from kd.progress import Notice
from tests.support.each import for_each
from tests.support.kd.tokenizers import KINDS, train_kind

V = 2048
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": False}
NOVEL = (AUSTEN / "text" / "persuasion.txt").read_text(encoding="utf-8")
TEXT = NOVEL[5000:65000] + " cafe\u0301 is \ufb01ne, contemplating; \u2019tis 10 to 1817. Perhaps"

Content = dict[str, Any]


def normalize(**normalizer: Any) -> Callable[[Content], Any]:
    return lambda content: content.update(normalizer=normalizer)


def change_model(change: Callable[[Content], Any]) -> Callable[[Content], Any]:
    return lambda content: change(content["model"])


#: Rules that no probe text shows, and the word of the text that does.
OTHER_RULES = {
    "NFC": (normalize(type="NFC"), "'cafe\u0301'"),
    "NFKC": (normalize(type="NFKC"), "'cafe\u0301'"),
    "Replace": (normalize(type="Replace", pattern={"String": "\u2019"}, content="'"), "\u2019"),
    "merges cut": (change_model(lambda m: m.update(merges=m["merges"][:-50])), "becomes"),
    "the last merge": (change_model(lambda m: m.update(merges=m["merges"][:-1])), "'Perhaps'"),
}
#: Files that say the same in another way.
COPIES: dict[str, Callable[[Content], Any]] = {
    "settings of the last call": lambda content: content.update(
        truncation={
            "max_length": 5, "direction": "Right", "strategy": "LongestFirst", "stride": 0,
        }
    ),
    "a sequence of one step": lambda content: content.update(
        normalizer={"type": "Sequence", "normalizers": []},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTES]},
    ),
    "merges as text": change_model(
        lambda m: m.update(merges=[" ".join(each) for each in m["merges"]])
    ),
    "defaults left out": change_model(
        lambda m: [m.pop(name) for name in ("dropout", "fuse_unk", "byte_fallback")]
    ),
    "no dropout": change_model(lambda m: m.update(dropout=0.0)),
}  # fmt: skip


def copy_with(change: Callable[[Content], Any], folder: Path) -> Path:
    """Copy the example's tokenizer with a change of its tokenizer.json."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(AUSTEN / "teacher" / name, folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def know(tokenizer: Any) -> KnownTokenizer:
    return KnownTokenizer.of(tokenizer, V, "the teacher's")


def know_written(tokenizer: Any, text: str, with_rules: bool) -> KnownTokenizer:
    """Know a tokenizer as a cache does: by sequences that it has written."""
    known = KnownTokenizer.of(tokenizer, max(tokenizer.get_vocab().values()) + 1, "the cache's")
    ids = np.asarray(tokenizer(text)["input_ids"], np.uint32)
    tokens = ids[: len(ids) // 128 * 128].reshape(-1, 128)
    flags = np.zeros_like(tokens, bool)
    written = Sequences(tokens, flags, flags)
    token_map = known.token_map if with_rules else TokenMap(known.token_map.tokens)
    return replace(known, tokenizer=None, token_map=token_map, written=lambda: written)


@pytest.mark.long
@pytest.mark.parametrize("name", OTHER_RULES)
def test_other_rules_are_refused_by_the_first_word_that_differs(
    tokenizer: Any, tmp_path: Path, name: str
) -> None:
    change, word = OTHER_RULES[name]
    other = load_tokenizer(copy_with(change, tmp_path / "other"))
    assert hash_tokenizer(other) == hash_tokenizer(tokenizer)
    with pytest.raises(TokenizerMismatch, match="the same tokens, but other rules") as caught:
        require_same_tokenizer(other, know(tokenizer), texts=[TEXT])
    said = caught.value.detail
    assert word in said and ("merges" in said) == ("merge" in name)
    # Text without such a word is encoded alike: the rules are named, and the job goes on.
    noted: list[Notice] = []
    require_same_tokenizer(other, know(tokenizer), texts=["Anne was here."], note=noted.append)
    (notice,) = noted
    assert "rules of the student's tokenizer" in notice.what and notice.count == 1


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_is_written_otherwise_is_the_same(
    tokenizer: Any, tmp_path: Path, name: str
) -> None:
    copy = load_tokenizer(copy_with(COPIES[name], tmp_path / "copy"))
    noted: list[Notice] = []
    require_same_tokenizer(copy, know(tokenizer), texts=[TEXT], note=noted.append)
    assert noted == []


@pytest.mark.parametrize("with_rules", [True, False])
@pytest.mark.parametrize("name", ["merges cut", "Replace"])
def test_a_cache_shows_other_rules_by_its_own_tokens(
    tokenizer: Any, tmp_path: Path, name: str, with_rules: bool
) -> None:
    change, _ = OTHER_RULES[name]
    other = load_tokenizer(copy_with(change, tmp_path / "other"))
    known = know_written(tokenizer, TEXT.replace("Anne", "Anne\u2019s"), with_rules)
    with pytest.raises(TokenizerMismatch, match=r"other rules .*becomes"):
        require_same_tokenizer(other, known)
    require_same_tokenizer(tokenizer, known)


def choose_decoder(kind: str) -> decoders.Decoder:
    model, normalizer, _ = KINDS[kind]
    if model in ("bytes", "WordPiece"):
        return decoders.ByteLevel() if model == "bytes" else decoders.WordPiece(cleanup=False)
    if normalizer is None or model == "Unigram":
        return decoders.Metaspace()
    return decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])


@pytest.mark.long
@for_each(KINDS)
def test_every_kind_of_tokenizer_encodes_what_it_has_written_alike(kind: str) -> None:
    tokenizer = train_kind(kind)
    tokenizer.backend_tokenizer.decoder = choose_decoder(kind)
    known = know_written(tokenizer, "Caf\u00e9 na\u00efve. " + NOVEL[5000:45000], with_rules=False)
    try:
        require_same_tokenizer(tokenizer, known)
    except TokenizerMismatch as error:
        raise AssertionError(error.detail) from None


@pytest.mark.parametrize("flag", ["lstrip", "single_word"])
def test_flags_of_added_tokens_are_rules(tokenizer: Any, tmp_path: Path, flag: str) -> None:
    change = {flag: True}
    other = load_tokenizer(copy_with(lambda c: c["added_tokens"][0].update(change), tmp_path / "x"))
    with pytest.raises(TokenizerMismatch, match=r"becomes|does not encode"):
        require_same_tokenizer(other, know(tokenizer), texts=["Anne <|endoftext|>Elliot"])


def test_a_tokenizer_that_drops_merges_at_random_is_refused_by_name(tmp_path: Path) -> None:
    folder = copy_with(change_model(lambda m: m.update(dropout=0.1)), tmp_path / "random")
    with pytest.raises(ModelError, match=r"random has BPE dropout 0\.1") as caught:
        load_tokenizer(folder)
    assert "model.dropout to null" in caught.value.remedy


def test_a_vocabulary_of_scores_is_compared_with_its_scores(tmp_path: Path) -> None:
    original = train_kind("T5")
    content = json.loads(original.backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    place = next(i for i, (token, _) in enumerate(vocabulary) if token == "\u2581the")
    vocabulary[place][1] = -60.0
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    other = PreTrainedTokenizerFast(tokenizer_file=str(path))
    known = KnownTokenizer.of(original, len(vocabulary), "the teacher's")
    with pytest.raises(TokenizerMismatch, match=r"becomes|does not encode"):
        require_same_tokenizer(other, known, texts=[NOVEL[5000:9000]])
