"""Load tokenizers, hash them, and compare two: all their ids, and how they encode text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from cache.manifest import TokenizerProbe
from cache.records import Sequences
from cache.store import Cache
from kd.addresses import ModelSource
from kd.errors import ModelError, TokenizerMismatch, format_first_line
from kd.models.folder import TOKENIZER_REMEDY, ModelFolder, require_allowed_remote_code
from kd.models.tokenizing.rules import (
    SAMPLE_SEQUENCES,
    decode_probes,
    decodes_truly,
    describe_rules,
    find_other_word,
    require_steady,
)
from kd.models.tokenizing.token_map import TokenMap, describe_differences
from kd.progress import Notice, ignore_notice

#: The dtype of the teacher of a cache that another tool's records made.
IMPORTED = "imported"
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
    """Load the tokenizer in ``folder``; raises ``ModelError``, also for one that is random."""
    ModelFolder(folder).require_own_files(gguf_file, trust_remote_code)
    # For some families transformers would make an empty tokenizer.
    if gguf_file is None and not ModelFolder(folder).has_tokenizer:
        raise ModelError(f"{folder} holds no tokenizer.", TOKENIZER_REMEDY)
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, **extra
        )
    except Exception as error:
        detail = f"the tokenizer in {folder} cannot be loaded: {format_first_line(error)}"
        raise ModelError(detail, "It needs a tokenizer.json.") from error
    require_steady(tokenizer, folder)
    return tokenizer


def load_source_tokenizer(source: ModelSource, folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``source``, whose files are in ``folder``; raises ``ModelError``."""
    return load_tokenizer(folder, source.gguf_file, require_allowed_remote_code(source))


def get_vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return one more than the largest token id.

    The LM head of a model may have more rows than that, or fewer (``kd.models.vocabulary``).
    """
    return max(tokenizer.get_vocab().values()) + 1


def get_special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of the special tokens bos, eos and pad, as far as the tokenizer has them."""
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return {name: int(value) for name, value in special.items() if value is not None}


def list_end_ids(
    settings: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """List the tokens at which a text ends: those of a model's ``settings``, and the tokenizer's.

    Ids that the tokenizer does not have are left out.
    """
    known = settings.eos_token_id if settings is not None else None
    ids = [*(known if isinstance(known, list) else [known]), tokenizer.eos_token_id]
    size = get_vocabulary_size(tokenizer)
    return [each for each in dict.fromkeys(ids) if each is not None and each < size]


def take_chat_template(
    tokenizer: PreTrainedTokenizerBase, learned: PreTrainedTokenizerBase
) -> None:
    """Give ``tokenizer`` the chat template of another, and the special tokens that it writes."""
    tokenizer.chat_template = learned.chat_template
    for name, token in learned.special_tokens_map.items():
        if name in str(learned.chat_template) and token in tokenizer.get_vocab():
            setattr(tokenizer, name, token)


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the map from tokens to ids, and of the encoded probe texts."""
    ids = [each.ids for each in encode_probes(tokenizer, PROBE_TEXTS)]
    content = [sorted(tokenizer.get_vocab().items()), ids]
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
    """Return the tokens of the ids below ``size``, V, and the rules of ``tokenizer``.

    Tokens such as [PAD32001] are none: llama.cpp names the padding rows of a GGUF file so.
    """
    vocabulary = tokenizer.get_vocab()
    named = {token: number for token, number in vocabulary.items() if token != f"[PAD{number}]"}
    return TokenMap.of(named, size, describe_rules(tokenizer, size))


@dataclass(frozen=True)
class KnownTokenizer:
    """The known facts of a tokenizer that another one must equal.

    ``name`` is its name in errors, ``size`` V; ``token_map`` is None in older caches, which are
    known by ``sha256`` (``hash_tokenizer``) alone. A text that shows its rules is encoded by
    ``tokenizer``, or it was: then ``written`` reads some sequences.
    """

    name: str
    size: int
    probes: tuple[TokenizerProbe, ...]
    sha256: str
    token_map: TokenMap | None
    tokenizer: PreTrainedTokenizerBase | None = None
    written: Callable[[], Sequences] | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, size: int, name: str) -> KnownTokenizer:
        """Describe a tokenizer that is loaded."""
        probes = encode_probes(tokenizer, PROBE_TEXTS)
        token_map = make_token_map(tokenizer, size)
        return cls(name, size, probes, hash_tokenizer(tokenizer), token_map, tokenizer)

    @classmethod
    def of_cache(cls, store: Cache) -> KnownTokenizer:
        """Read what a cache holds of its tokenizer."""
        known = store.identity.tokenizer
        probes = store.manifest.provenance.probes
        token_map = TokenMap.of_cache(store)
        # A server's own tokens need not be those that its tokenizer makes of their text.
        drawn = store.identity.teacher.dtype == IMPORTED and not (token_map and token_map.rules)
        written = None if drawn else partial(_read_some, store)
        size = known.vocabulary_size
        return cls("the cache's", size, probes, known.sha256, token_map, written=written)


def _read_some(store: Cache) -> Sequences:
    """Read sequences from all over a cache, or of the first shard of one in a bucket."""
    count = min(len(store), store.identity.codec.shard_sequences if store.mirror else len(store))
    return store.read(np.linspace(0, count - 1, min(count, SAMPLE_SEQUENCES)).astype(int))[0]


def require_same_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    known: KnownTokenizer,
    whose: str = "The student's",
    texts: Iterable[str] = (),
    note: Callable[[Notice], None] = ignore_notice,
) -> None:
    """Raise ``TokenizerMismatch`` if ``tokenizer`` has other tokens or encodes text otherwise.

    Vocabularies of equal size do not prove equality: they may number their tokens differently, and
    where only rare tokens are, no probe text shows it. Ids from V on are not compared. Where the
    rules differ or are not known, ``texts`` of the job decide, or those that a cache holds.
    ``note`` receives what differs without an effect on them.
    """
    found = _describe_other_ids(tokenizer, known)
    word, _ = find_other_word(tokenizer, known.probes, cut=False)
    if word:
        found.append(f"It does not encode text alike: {word}.")
    if not found:
        found = _describe_other_rules(tokenizer, known, whose, texts, note)
    if found:
        raise TokenizerMismatch(
            f"{whose} tokenizer is not {known.name}. {' '.join(found)}",
            "Use a student with the teacher's tokenizer, student.init for a fresh one, or "
            "loss.tokenizers: projected (or alm), which learns from another tokenizer. Where only"
            " the names of unused ids differ, copy the teacher's tokenizer files.",
        )


def _describe_other_rules(
    tokenizer: PreTrainedTokenizerBase,
    known: KnownTokenizer,
    whose: str,
    texts: Iterable[str],
    note: Callable[[Notice], None],
) -> list[str]:
    theirs = known.token_map.rules if known.token_map is not None else {}
    ours = describe_rules(tokenizer, known.size)
    names = [name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]]
    if theirs and ours and not names:
        return []
    probes: Iterable[TokenizerProbe] = ()
    if known.tokenizer is not None:
        probes = (encode_probes(known.tokenizer, [text])[0] for text in texts)
    elif known.written is not None and decodes_truly(tokenizer, known.probes):
        probes = decode_probes(known.written(), tokenizer)
    rules = ", ".join(sorted(names)) or "not known"
    word, tokens = find_other_word(tokenizer, probes, known.tokenizer is None)
    if word:
        return [f"It has the same tokens, but other rules ({rules}): {word}."]
    if names:
        what = f"rules of {whose.lower()} tokenizer that are not those of {known.name}"
        tried = f"without an effect on {tokens:,} tokens of text" if tokens else "not tried on text"
        remedy = "Copy the teacher's tokenizer files into the student's folder."
        note(Notice(f"{what}, {tried}", len(names), rules, remedy))
    return []


def _describe_other_ids(tokenizer: PreTrainedTokenizerBase, known: KnownTokenizer) -> list[str]:
    if known.token_map is not None:
        others = known.token_map.find_differences(make_token_map(tokenizer, known.size))
        return [describe_differences(others)] if others else []
    if (found := hash_tokenizer(tokenizer)) == known.sha256:
        return []
    what = f"Expected sha256 {known.sha256[:12]}, got {found[:12]}"
    why = "it was captured before caches kept their tokens, so the ids that differ are not known"
    return [f"{what}; {why}."]
