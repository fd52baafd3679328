"""Load tokenizers, hash them, and compare two: all their ids, and how they encode a few texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cache.manifest import TokenizerProbe
from cache.store import Cache
from kd.errors import ModelError, TokenizerMismatch, format_first_line
from kd.models.folder import TOKENIZER_REMEDY, ModelFolder
from kd.models.token_map import TokenMap, describe_differences

#: Texts on which tokenizers are compared: they differ in white space, scripts, digits and special
#: tokens. The hash of a tokenizer, and so a cache's fingerprint, depends on them: never change
#: them.
PROBE_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  leading spaces,\ttabs\nand\n\nblank lines ",
    "naïve café, Straße, Ελληνικά, русский, 日本語, العربية, 🙂",
    "def f(x):\n    return x ** 2 + 3.14159e-10  # 1,234,567",
    "<s> </s> <|endoftext|> [INST] <unk>",
)


def load_tokenizer(
    folder: Path, gguf_file: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in ``folder``; raises ``ModelError``."""
    # For some families transformers would make an empty tokenizer.
    if gguf_file is None and not ModelFolder(folder).has_tokenizer:
        raise ModelError(f"{folder} holds no tokenizer.", TOKENIZER_REMEDY)
    extra: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, **extra
        )
    except Exception as error:
        raise ModelError(
            f"the tokenizer in {folder} cannot be loaded: {format_first_line(error)}",
            "It needs a tokenizer.json.",
        ) from error
    return tokenizer


def get_vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return one more than the largest token id.

    The LM head of a model may have more rows than that, or fewer (``kd.models.vocabulary``).
    """
    return max(tokenizer.get_vocab().values()) + 1


def get_special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of the special tokens bos, eos and pad, as far as the tokenizer has them."""
    special = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
    }
    return {name: int(value) for name, value in special.items() if value is not None}


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the map from tokens to ids, and of the encoded probe texts."""
    content = [
        sorted(tokenizer.get_vocab().items()),
        [each.ids for each in encode_probes(tokenizer, PROBE_TEXTS)],
    ]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()


def encode_probes(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]
) -> tuple[TokenizerProbe, ...]:
    """Encode ``texts`` with ``tokenizer``; two tokenizers must encode them alike."""
    return tuple(
        TokenizerProbe(text, tuple(map(int, tokenizer(text, verbose=False)["input_ids"])))
        for text in texts
    )


def make_token_map(tokenizer: PreTrainedTokenizerBase, size: int) -> TokenMap:
    """Return the tokens of the ids below ``size``, V.

    Tokens such as [PAD32001] are none: llama.cpp names the padding rows of a GGUF file so.
    """
    vocabulary = tokenizer.get_vocab()
    named = {token: number for token, number in vocabulary.items() if token != f"[PAD{number}]"}
    return TokenMap.of(named, size)


@dataclass(frozen=True)
class KnownTokenizer:
    """The known facts of a tokenizer that another one must equal.

    ``name`` is its name in errors, ``size`` V; ``token_map`` is None in older caches, which are
    known by ``sha256`` (``hash_tokenizer``) alone.
    """

    name: str
    size: int
    probes: tuple[TokenizerProbe, ...]
    sha256: str
    token_map: TokenMap | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, size: int, name: str) -> KnownTokenizer:
        """Describe a tokenizer that is loaded."""
        probes = encode_probes(tokenizer, PROBE_TEXTS)
        return cls(name, size, probes, hash_tokenizer(tokenizer), make_token_map(tokenizer, size))

    @classmethod
    def of_cache(cls, store: Cache) -> KnownTokenizer:
        """Read what a cache holds of its tokenizer."""
        known = store.identity.tokenizer
        probes = store.manifest.provenance.probes
        return cls(
            "the cache's", known.vocabulary_size, probes, known.sha256, TokenMap.of_cache(store)
        )


def require_same_tokenizer(
    tokenizer: PreTrainedTokenizerBase, known: KnownTokenizer, whose: str = "The student's"
) -> None:
    """Raise ``TokenizerMismatch`` if ``tokenizer`` has other tokens or encodes text otherwise.

    Vocabularies of equal size do not prove equality: they may number their tokens differently, and
    where only rare tokens are, no probe text shows it. Ids from V on are not compared.
    """
    found = [
        *_describe_other_ids(tokenizer, known),
        *_describe_other_probes(tokenizer, known.probes),
    ]
    if found:
        raise TokenizerMismatch(
            f"{whose} tokenizer is not {known.name}. {' '.join(found)}",
            "Use a student with the teacher's tokenizer, or student.init for a fresh one. Where "
            "only the names of unused ids differ, copy the teacher's tokenizer files.",
        )


def _describe_other_ids(tokenizer: PreTrainedTokenizerBase, known: KnownTokenizer) -> list[str]:
    if known.token_map is None:
        return _describe_other_hash(tokenizer, known)
    others = known.token_map.find_differences(make_token_map(tokenizer, known.size))
    return [describe_differences(others)] if others else []


def _describe_other_hash(tokenizer: PreTrainedTokenizerBase, known: KnownTokenizer) -> list[str]:
    if (found := hash_tokenizer(tokenizer)) == known.sha256:
        return []
    what = f"Expected sha256 {known.sha256[:12]}, got {found[:12]}"
    why = "it was captured before caches kept their tokens, so the ids that differ are not known"
    return [f"{what}; {why}."]


def _describe_other_probes(
    tokenizer: PreTrainedTokenizerBase, probes: tuple[TokenizerProbe, ...]
) -> list[str]:
    wrong = [
        f"{expected.text[:40]!r}{_describe_first_difference(expected.ids, found.ids)}"
        for expected, found in zip(
            probes, encode_probes(tokenizer, (each.text for each in probes)), strict=True
        )
        if found != expected
    ]
    return [f"It does not encode text alike: {'; '.join(wrong)}."] if wrong else []


def _describe_first_difference(expected: tuple[int, ...], found: tuple[int, ...]) -> str:
    both = min(len(expected), len(found))
    place = next((place for place in range(both) if expected[place] != found[place]), both)
    shown = (", ".join(map(str, ids[place : place + 4])) or "nothing" for ids in (expected, found))
    return " from token {}: expected {}, got {}".format(place, *shown)
