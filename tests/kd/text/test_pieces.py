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
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from bench.support.paths import AUSTEN
from kd.text.pieces import TextEncoder, cut_text
from kd.text.seams import CONTEXT, NoSeamError, find_seams, split_alternatives

NOVEL = (AUSTEN / "text" / "persuasion.txt").read_text(encoding="utf-8")[5000:45000]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: The marks of many scripts, white space of many kinds, and what tokenizers treat in its own way.
ALPHABET = [
    *"aAbeéßİ1², .!'-/(\"", "'s", " ", " ", "  ", "\n", "\n\n", "\r", "\t", "\u00a0", "\u2028",
    "\u200b", "\u3000", "\u2581", "\u0301", "\u0d4e", "ﷺ", "字", "。", "か\u3099", "ㅎ", "각", "🙂",
    "👩\u200d🚀", "🇫🇷", "\ufffd", "\x1c", "<end>", "<mask>", "<Soft>", "the", " and",
    "and ", "Mr. ",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(ALPHABET), min_size=40, max_size=160).map("".join)


def isolated(regex: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(regex), "isolated")


def byte_words(*first: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def metaspace(scheme: str = "always", split: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)


MARKS = normalizers.Replace(" ", "\u2581")
#: The steps of well-known tokenizers: model, normalizer, pre-tokenizer.
KINDS = {
    "GPT-2": ("bytes", None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "RoBERTa": ("bytes", normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "SmolLM 2": (
        "bytes",
        None,
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
    "Falcon": (
        "bytes",
        None,
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation("contiguous"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
                pre_tokenizers.Digits(False),
                isolated("[0-9][0-9][0-9]"),
            ]
        ),
    ),
    "Llama 3": ("bytes", None, byte_words(isolated(LLAMA_3))),
    "Qwen": ("bytes", normalizers.NFC(), byte_words(isolated(LLAMA_3.replace("{1,3}", "")))),
    "GPT-4o": ("bytes", None, byte_words(isolated(O200K))),
    "DeepSeek": (
        "bytes",
        None,
        byte_words(isolated(r"\p{N}{1,3}"), isolated("[一-龥\u3040-ゟ゠-ヿ]+"), isolated(DEEPSEEK)),
    ),
    "Gemma": ("BPE", MARKS, pre_tokenizers.Split(" ", "merged_with_previous")),
    "Llama 2": ("BPE", normalizers.Sequence([normalizers.Prepend("\u2581"), MARKS]), None),
    "Mistral": ("BPE", None, metaspace("first", split=False)),
    "T5": ("Unigram", normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()]), metaspace()),
    "ALBERT": (
        "Unigram",
        normalizers.Sequence(
            [
                normalizers.Replace("``", '"'),
                normalizers.NFKD(),
                normalizers.StripAccents(),
                normalizers.Lowercase(),
            ]
        ),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace("first")]),
    ),
    "XLM-R": (
        "Unigram",
        normalizers.Sequence(
            [normalizers.Strip(left=False), normalizers.Replace(Regex(" {2,}"), "\u2581")]
        ),
        metaspace("first"),
    ),
    "BERT": ("WordPiece", normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
    "BERT cased": (
        "WordPiece",
        normalizers.BertNormalizer(clean_text=False, lowercase=False),
        pre_tokenizers.Whitespace(),
    ),
}


def train(kind: str) -> PreTrainedTokenizerFast:
    """Train a tokenizer of ``kind`` on some pages of a novel, with added tokens of three kinds."""
    model, normalizer, words = KINDS[kind]
    options = {"special_tokens": ["<unk>", "<end>"], "vocab_size": 700, "show_progress": False}
    if model == "Unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
    elif model == "WordPiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        trainer = trainers.WordPieceTrainer(**options)
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        alphabet = pre_tokenizers.ByteLevel.alphabet() if model == "bytes" else ["\u2581"]
        trainer = trainers.BpeTrainer(
            initial_alphabet=alphabet, max_token_length=12 if model == "BPE" else None, **options
        )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if words is not None:
        tokenizer.pre_tokenizer = words
    # Without words the trainer would join them: a vocabulary of SentencePiece has none that are.
    pages = NOVEL.split("\n\n") if model != "BPE" else NOVEL.replace(" ", "\n \n").split("\n")
    tokenizer.train_from_iterator(pages, trainer)
    tokenizer.add_tokens([AddedToken("<Soft>", normalized=True)])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    end = tokenizer.token_to_id("<end>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<end> $A <end>", special_tokens=[("<end>", end)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@pytest.fixture(scope="module")
def trained() -> Callable[[str], PreTrainedTokenizerFast]:
    made: dict[str, PreTrainedTokenizerFast] = {}

    def make(kind: str) -> PreTrainedTokenizerFast:
        if kind not in made:
            made[kind] = train(kind)
        return made[kind]

    return make


def in_chunks(text: str, size: int) -> Iterator[str]:
    return (text[start : start + size] for start in range(0, len(text), size))


def encode_pieces(text: str, size: int, tokenizer: PreTrainedTokenizerBase) -> tuple[list, int]:
    """Encode ``text`` in pieces of at least ``size`` characters; return the ids and the pieces."""
    pieces = list(cut_text(in_chunks(text, 3 * size + 7), find_seams(tokenizer), size))
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


def test_the_examples_own_tokenizer_gives_a_novel_the_same_ids():
    tokenizer = AutoTokenizer.from_pretrained(AUSTEN / "teacher")
    parts = TextEncoder(tokenizer).encode(in_chunks(NOVEL, 1000))
    assert list(itertools.chain(*parts)) == tokenizer(NOVEL)["input_ids"]


@pytest.mark.parametrize("kind", ["GPT-2", "T5", "BERT", "Llama 2"])
@pytest.mark.parametrize("text", [NOVEL, "A word.", " \n ", "", "\n\n word"])
def test_special_tokens_stand_once_at_the_ends(trained, kind, text):
    encoder = TextEncoder(trained(kind))
    assert encoder.why_whole is None
    ids = [int(each) for part in encoder.encode(in_chunks(text, 999)) for each in part]
    assert ids == (trained(kind)(text)["input_ids"] if text.strip() else [])


@pytest.mark.parametrize("kind", ["GPT-2", "T5", "BERT", "Llama 2"])
def test_short_texts_have_the_ids_that_each_has_alone(trained, kind):
    texts = ["A word.", "", NOVEL[:900], " \n ", "\n\n word", "two  spaces "]
    found = TextEncoder(trained(kind)).encode_short(texts)
    expected = [trained(kind)(text)["input_ids"] if text.strip() else [] for text in texts]
    assert [ids.tolist() for ids in found] == expected


def test_what_others_asked_of_the_tokenizer_changes_no_ids(trained):
    tokenizer = trained("BERT")
    encoder = TextEncoder(tokenizer)
    expected = [int(each) for part in encoder.encode([NOVEL]) for each in part]
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer([NOVEL, "A word."], padding=True, truncation=True, max_length=5)
    assert [int(each) for part in encoder.encode([NOVEL]) for each in part] == expected


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
    with pytest.raises(NoSeamError, match=reason):
        find_seams(with_steps(**steps))


def test_no_cut_lies_where_a_token_of_the_vocabulary_may_span_it():
    """The only token with a character before a space begins with b."""
    seams = find_seams(with_steps(normalizer=MARKS))
    assert seams.find("aaa b " * 20, 3) == 3
    assert seams.find("aab a" + "aab a" * 20, 3) is None


def test_no_cut_lies_beside_an_added_token_that_takes_the_space():
    seams = find_seams(with_steps(added=[AddedToken("stop", rstrip=True)], **WORDS))
    assert seams.find("full stop and" + "." * CONTEXT, 5) is None
    assert seams.find("full hall and" + "." * CONTEXT, 5) == 9


def test_alternatives_are_told_from_bars_in_classes_and_groups():
    assert split_alternatives(r"[a|b]|(?:c|d)|\||e[\]|]") == ["[a|b]", "(?:c|d)", r"\|", r"e[\]|]"]
    assert split_alternatives("[\r\n]") == [r"[\r\n]"]
