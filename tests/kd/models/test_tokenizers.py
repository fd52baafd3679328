"""Tokenizers: loaded, hashed, and told apart by how they encode probe texts."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from kd.errors import ModelError, TokenizerMismatch
from kd.models.tokenizers import (
    PROBE_TEXTS,
    KnownTokenizer,
    encode_probes,
    get_vocabulary_size,
    hash_tokenizer,
    load_tokenizer,
    make_token_map,
    require_same_tokenizer,
)
from kd.models.tokenizing.token_map import TokenMap
from tests.support.kd.tokenizers import exchange_ids, list_rare_tokens

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def permuted(tokenizer, tmp_path) -> Any:
    """Return a tokenizer of the same size and with the same tokens, two of which have exchanged
    their ids.
    """
    return load_tokenizer(exchange_ids(tokenizer, tmp_path / "permuted", [("e", "o")]))


def know(tokenizer) -> KnownTokenizer:
    return KnownTokenizer.of(tokenizer, get_vocabulary_size(tokenizer), "the cache's")


def test_another_numbering_of_the_same_tokens_is_refused_naming_a_word(tokenizer, permuted):
    require_same_tokenizer(tokenizer, know(tokenizer))
    assert get_vocabulary_size(permuted) == get_vocabulary_size(tokenizer) == 2048
    with pytest.raises(TokenizerMismatch) as caught:
        require_same_tokenizer(permuted, know(tokenizer))
    word, found, expected = re.search(
        r"text alike: '(\w+)' becomes \[(\d+)\], but expected \[(\d+)\]", caught.value.detail
    ).groups()
    assert word in PROBE_TEXTS[0] and caught.value.remedy
    ids, others = (each(PROBE_TEXTS[0])["input_ids"] for each in (tokenizer, permuted))
    first = next(place for place in range(len(ids)) if ids[place] != others[place])
    assert (int(expected), int(found)) == (ids[first], others[first])


def test_ids_that_no_probe_reaches_are_compared_and_the_first_five_are_named(tokenizer, tmp_path):
    pairs = list_rare_tokens(tokenizer, 8)
    rare = load_tokenizer(exchange_ids(tokenizer, tmp_path, pairs))
    assert encode_probes(rare, PROBE_TEXTS) == encode_probes(tokenizer, PROBE_TEXTS)
    with pytest.raises(TokenizerMismatch) as caught:
        require_same_tokenizer(rare, know(tokenizer))
    ids = sorted(tokenizer.convert_tokens_to_ids([token for pair in pairs for token in pair]))
    tokens, others = (each.convert_ids_to_tokens(ids) for each in (tokenizer, rare))
    assert "16 id(s) with other tokens" in caught.value.detail
    for place, number in enumerate(ids):
        line = f"id {number}: expected {tokens[place]!r}, got {others[place]!r}"
        assert (line in caught.value.detail) == (place < 5)


def test_without_a_map_tokenizers_are_compared_by_their_hash(tokenizer, tmp_path):
    unmapped = replace(know(tokenizer), token_map=None)
    require_same_tokenizer(tokenizer, unmapped)
    rare = load_tokenizer(exchange_ids(tokenizer, tmp_path, list_rare_tokens(tokenizer, 1)))
    with pytest.raises(TokenizerMismatch, match=r"sha256 .* before caches kept their tokens"):
        require_same_tokenizer(rare, unmapped)


def test_tokens_beyond_the_vocabulary_and_names_of_padding_rows_are_no_difference(
    tokenizer, tmp_path
):
    tokenizer.save_pretrained(tmp_path)
    wider = load_tokenizer(tmp_path)
    wider.add_tokens(["[PAD2048]", "<think>"])
    require_same_tokenizer(wider, know(tokenizer))
    assert get_vocabulary_size(wider) == 2050
    assert 2048 not in make_token_map(wider, 2049).tokens
    with pytest.raises(TokenizerMismatch, match=r"1 id\(s\) with .* '<think>', got no token"):
        require_same_tokenizer(tokenizer, know(wider))


def test_the_tokenizers_hash_is_of_its_content(tokenizer, permuted, tmp_path):
    tokenizer.save_pretrained(tmp_path / "copy")
    original = hash_tokenizer(tokenizer)
    assert hash_tokenizer(load_tokenizer(tmp_path / "copy")) == original
    assert hash_tokenizer(permuted) != original
    path = tmp_path / "copy" / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["merges"] = content["model"]["merges"][:100]  # the same tokens, other merges
    path.write_text(json.dumps(content), encoding="utf-8")
    assert hash_tokenizer(load_tokenizer(tmp_path / "copy")) != original


def test_probes_reach_every_kind_of_text(tokenizer):
    for each in encode_probes(tokenizer, PROBE_TEXTS):
        assert tokenizer.decode(list(each.ids)) == each.text and len(each.ids) > 3


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


# ---------------------------------------------------------------------- the map of ids

TOKENS = {
    "a": 0,
    "b": 1,
    "": 3,
    "né\n": 4,
    "日本": 5,
    "\ud800": 6,
    "same": 7,
    "both": 7,
    "z": 9,
}


def test_a_map_is_the_same_after_reading_its_arrays():
    token_map = TokenMap.of(TOKENS, 9)
    assert 2 not in token_map.tokens and 9 not in token_map.tokens
    assert token_map.tokens[7] == ("both", "same")
    assert TokenMap.from_arrays(token_map.to_arrays()) == token_map
    assert TokenMap.from_arrays(TokenMap({}).to_arrays()) == TokenMap({})


def test_every_id_with_another_token_is_named_in_order():
    ours = TokenMap.of(TOKENS, 10)
    changed = {**TOKENS, "a": 1, "b": 0, "new": 2}
    del changed["z"]
    found = ours.find_differences(TokenMap.of(changed, 10))
    assert [str(each) for each in found] == [
        "id 0: expected 'a', got 'b'",
        "id 1: expected 'b', got 'a'",
        "id 2: expected no token, got 'new'",
        "id 9: expected 'z', got no token",
    ]
    assert ours.find_differences(TokenMap.of({**TOKENS, "beyond": 10}, 10)) == []
