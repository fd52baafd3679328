"""Texts in pieces: the ids are those of the whole text, for every kind of tokenizer."""

import itertools
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from bench.support.paths import AUSTEN
from kd.text.cut_points import CONTEXT, NoCutError, find_cut_points, split_alternatives
from kd.text.stored.places import BEGINNING
from kd.text.text_encoder import Piece, TextEncoder, cut_text
from tests.support.kd.tokenizers import (
    KINDS,
    MARKS,
    NOVEL,
    isolated,
    metaspace,
    train_kind,
)

#: The marks of many scripts, white space of many kinds, and what tokenizers treat in its own way.
ALPHABET = [
    *"aAbeéßİ1², .!'-/(\"", "'s", " ", " ", "  ", "\n", "\n\n", "\r", "\t", "\u00a0", "\u2028",
    "\u200b", "\u3000", "\u2581", "\u0301", "\u0d4e", "ﷺ", "字", "。", "か\u3099", "ㅎ", "각", "🙂",
    "👩\u200d🚀", "🇫🇷", "\ufffd", "\x1c", "<end>", "<mask>", "<Soft>", "the", " and",
    "and ", "Mr. ",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(ALPHABET), min_size=40, max_size=160).map("".join)


@pytest.fixture(scope="module")
def trained() -> Callable[[str], PreTrainedTokenizerFast]:
    made: dict[str, PreTrainedTokenizerFast] = {}

    def make(kind: str) -> PreTrainedTokenizerFast:
        if kind not in made:
            made[kind] = train_kind(kind)
        return made[kind]

    return make


def in_chunks(text: str, size: int) -> Iterator[str]:
    return (text[start : start + size] for start in range(0, len(text), size))


def encode_pieces(text: str, size: int, tokenizer: PreTrainedTokenizerBase) -> tuple[list, int]:
    """Encode ``text`` in pieces of at least ``size`` characters; return the ids and the pieces."""
    pieces = list(cut_text(in_chunks(text, 3 * size + 7), find_cut_points(tokenizer), size))
    ids = tokenizer(pieces, add_special_tokens=False)["input_ids"]
    return list(itertools.chain(*ids)), len(pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_ids_of_the_whole(trained, kind):
    tokenizer = trained(kind)

    @settings(max_examples=60, deadline=None)
    @given(TEXTS, st.integers(1, 20))
    def check(text: str, size: int) -> None:
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encode_pieces(text, size, tokenizer)[0] == whole

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_prose_is_cut_often(trained, kind):
    ids, pieces = encode_pieces(NOVEL, 200, trained(kind))
    assert ids == trained(kind)(NOVEL, add_special_tokens=False)["input_ids"]
    assert pieces > len(NOVEL) / 300


@pytest.mark.parametrize("kind", ["GPT-2", "Llama 3", "GPT-4o", "T5", "BERT"])
def test_text_without_spaces_is_cut_at_its_lines(trained, kind):
    text = "第一章。\n字字字字「字」字字。\n" * 50
    ids, pieces = encode_pieces(text, 20, trained(kind))
    assert ids == trained(kind)(text, add_special_tokens=False)["input_ids"]
    assert pieces > 20


def encode(encoder: TextEncoder, text: str, chunk: int) -> list[int]:
    """Return all ids of ``text``, which comes in chunks of so many characters."""
    batches = encoder.encode(in_chunks(text, chunk))
    return [int(each) for parts in batches for part in parts for each in part.ids]


def add_end(text: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids that ``tokenizer`` gives a text of words, and the end token."""
    ids = tokenizer(text)["input_ids"] if text.strip() else []
    end = tokenizer.eos_token_id
    return ids + [end] * bool(ids and end is not None and ids[-1] != end)


def test_the_examples_own_tokenizer_gives_a_novel_the_same_ids():
    tokenizer = AutoTokenizer.from_pretrained(AUSTEN / "teacher")
    assert encode(TextEncoder(tokenizer), NOVEL, 1000) == add_end(NOVEL, tokenizer)


@pytest.mark.parametrize("kind", ["GPT-2", "T5", "BERT", "Llama 2"])
@pytest.mark.parametrize("text", [NOVEL, "A word.", " \n ", "", "\n\n word"])
def test_special_tokens_stand_once_at_the_ends(trained, kind, text):
    encoder = TextEncoder(trained(kind))
    assert encoder.why_whole is None
    assert encode(encoder, text, 999) == add_end(text, trained(kind))


@pytest.mark.parametrize("kind", ["GPT-2", "T5", "BERT", "Llama 2"])
def test_short_texts_have_the_ids_that_each_has_alone(trained, kind):
    texts = ["A word.", "", NOVEL[:900], " \n ", "\n\n word", "two  spaces "]
    encoder = TextEncoder(trained(kind))
    for text, ids in zip(texts, encoder.encode_short(texts), strict=True):
        piece = (Piece(text, begins=True, ends=True), ids)
        parts = encoder.finish([piece], "a", BEGINNING)
        assert [int(each) for part in parts for each in part.ids] == add_end(text, trained(kind))


def test_what_others_asked_of_the_tokenizer_changes_no_ids(trained):
    tokenizer = trained("BERT")
    encoder = TextEncoder(tokenizer)
    expected = encode(encoder, NOVEL, len(NOVEL))
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer([NOVEL, "A word."], padding=True, truncation=True, max_length=5)
    assert encode(encoder, NOVEL, len(NOVEL)) == expected


# ---------------------------------------------------------------------- what is not cut


def with_steps(**steps) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with the given parts of a ``Tokenizer``, and added tokens."""
    model = steps.pop("model", models.BPE({"a": 0, "b": 1, "\u2581": 2, "b\u2581": 3}, []))
    tokenizer = Tokenizer(model)
    tokenizer.add_tokens(steps.pop("added", []))
    for name, step in steps.items():
        setattr(tokenizer, name, step)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


WORDS = {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)}


@pytest.mark.parametrize(
    "steps, reason",
    [
        ({"added": ["New York"], **WORDS}, "'New York' holds white space"),
        ({"added": [AddedToken("New\u2581York")], "normalizer": MARKS}, "holds white space"),
        ({"added": [AddedToken("\n", rstrip=True)], **WORDS}, "takes the white space around it"),
        ({"pre_tokenizer": isolated(r"\s?\p{L}+|\s+")}, "may connect words"),
        ({"pre_tokenizer": isolated(r"\p{L}+ \p{L}+|\s+")}, "may connect words"),
        ({"pre_tokenizer": isolated(r"(?<=a ) ?\p{L}+|\s+")}, "may connect words"),
        ({"pre_tokenizer": pre_tokenizers.UnicodeScripts()}, "UnicodeScripts may connect words"),
        ({"pre_tokenizer": pre_tokenizers.Digits()}, "does not cut words at spaces"),
        ({"normalizer": normalizers.Replace(Regex("a.*b"), "c"), **WORDS}, "Replace may look"),
        ({"normalizer": normalizers.Strip(), **WORDS}, "Strip may look"),
        ({"normalizer": normalizers.Prepend("x"), **WORDS}, "Prepend may look"),
        ({"model": models.BPE({"a": 0}, [])}, "no token for a space"),
        ({"model": models.BPE({"a": 0, "\u2581": 1}, [], ignore_merges=True)}, "in its own way"),
        ({"model": models.BPE({"a": 0}, [], dropout=0.1), **WORDS}, "at random"),
        ({"model": models.Unigram([("a", -1.0)]), "pre_tokenizer": metaspace(split=False)},
         "Unigram model reads a text as one word"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_may_connect_words_is_not_cut(steps, reason):
    with pytest.raises(NoCutError, match=reason):
        find_cut_points(with_steps(**steps))


def test_no_cut_lies_where_a_token_of_the_vocabulary_may_span_it():
    """The only token with a character before a space begins with b."""
    cut_points = find_cut_points(with_steps(normalizer=MARKS))
    assert cut_points.find("aaa b " * 20, 3) == 3
    assert cut_points.find("aab a" + "aab a" * 20, 3) is None


def test_no_cut_lies_beside_an_added_token_that_takes_the_space():
    cut_points = find_cut_points(with_steps(added=[AddedToken("stop", rstrip=True)], **WORDS))
    assert cut_points.find("full stop and" + "." * CONTEXT, 5) is None
    assert cut_points.find("full hall and" + "." * CONTEXT, 5) == 9


def test_alternatives_are_told_from_bars_in_classes_and_groups():
    assert split_alternatives(r"[a|b]|(?:c|d)|\||e[\]|]") == ["[a|b]", "(?:c|d)", r"\|", r"e[\]|]"]
    assert split_alternatives("[\r\n]") == [r"[\r\n]"]
