"""Tokenizers that differ from the example's where no probe text shows it, and of other kinds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from bench.support.paths import AUSTEN
from kd.models.tokenizers import PROBE_TEXTS


def exchange_ids(tokenizer: Any, folder: Path, pairs: list[tuple[str, str]]) -> Path:
    """Save a tokenizer in which the tokens of each pair have exchanged their ids."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    for left, right in pairs:
        vocabulary[left], vocabulary[right] = vocabulary[right], vocabulary[left]
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def list_rare_tokens(tokenizer: Any, count: int, *texts: str) -> list[tuple[str, str]]:
    """List pairs of tokens that occur neither in the probe texts nor in ``texts``."""
    used = {number for text in (*PROBE_TEXTS, *texts) for number in tokenizer(text)["input_ids"]}
    special = set(tokenizer.all_special_ids)
    free = [
        token
        for token, number in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
        if number not in used | special
    ]
    return list(zip(free[: 2 * count : 2], free[1 : 2 * count : 2], strict=True))


# ---------------------------------------------------------------------- kinds

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


def train_kind(kind: str) -> PreTrainedTokenizerFast:
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


def train_fallback(prefixed: bool = True) -> PreTrainedTokenizerFast:
    """Train a tokenizer with SentencePiece's rules: a space is U+2581, and bytes are the rest."""
    made = Tokenizer(models.BPE(byte_fallback=True))
    scheme = "first" if prefixed else "never"
    made.pre_tokenizer = metaspace(scheme)
    marks = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(marks)
    special = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    made.train_from_iterator(NOVEL.split("\n"), trainer)
    content = made.to_str()
    made = Tokenizer.from_str(content.replace('"special":true', '"special":false'))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


def permuted(tiny_teacher: Path, folder: Path) -> Path:
    """The teacher with a tokenizer of equal size that numbers two letters otherwise."""
    path = Path(shutil.copytree(tiny_teacher, folder)) / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["e"], vocabulary["o"] = vocabulary["o"], vocabulary["e"]
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder
