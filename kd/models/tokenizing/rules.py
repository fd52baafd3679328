"""The rules by which a tokenizer turns text into its tokens: two with equal tokens may differ.

Rules are compared by their meaning, not by the bytes of a file. Two that differ may still encode
the text of a job alike, so that a sample of it decides.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import SequenceMatcher as _Matcher
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cache.manifest import TokenizerProbe
from cache.records import Sequences
from kd.buckets.inputs import is_stored_name
from kd.config.data import DataConfig
from kd.errors import DataError, ModelError
from kd.text.sources import read_documents

#: Characters of a job's text, and sequences of a cache, on which two tokenizers are compared.
SAMPLE_CHARACTERS = 1 << 20
SAMPLE_SEQUENCES = 64
#: Characters that are encoded at once.
_PIECE = 1 << 12
#: Tokens at both ends of a text that was cut out of another, which may be other ones there.
_EDGE = 8
#: Fields that change no token, are refused, or are compared apart.
_LEFT_OUT = ("trim_offsets", "dropout", "vocab", "merges")
#: The fields with the steps of a sequence of rules.
_STEPS = ("normalizers", "pretokenizers", "processors")


def describe_rules(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[str, str]:
    """Return a hash of each rule by its name; empty for a tokenizer that Python computes.

    Added tokens from ``size``, V, on do not count, as nothing else of these ids does.
    """
    library = getattr(tokenizer, "backend_tokenizer", None)
    if library is None:
        return {}
    content = json.loads(library.to_str())
    model = content["model"]
    rules = {name: content[name] for name in ("normalizer", "pre_tokenizer", "post_processor")}
    # The ids of its tokens are compared apart, but not the scores of a list of them.
    rules["scores"] = model["vocab"] if isinstance(model.get("vocab"), list) else None
    rules |= {"model": model, "merges": model.get("merges")}
    rules["split_special_tokens"] = getattr(tokenizer, "split_special_tokens", False)
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    rules["added_tokens"] = sorted(
        [each["content"], *(each[flag] for flag in flags)]
        for each in content["added_tokens"]
        if each["id"] < size and each["content"] != f"[PAD{each['id']}]"
    )
    return {name: _hash(rule) for name, rule in rules.items()}


def _hash(rule: Any) -> str:
    text = json.dumps(_simplify(rule), sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _simplify(rule: Any) -> Any:
    """Return ``rule`` without what has no meaning: empty values, and sequences of one step."""
    if not isinstance(rule, dict):
        return rule
    kept = {
        name: _simplify(value)
        for name, value in rule.items()
        if name not in _LEFT_OUT and value not in (None, "")
    }
    steps = next((kept[name] for name in _STEPS if name in kept), None)
    if kept.get("type") != "Sequence" or steps is None:
        return kept
    steps = [_simplify(step) for step in steps]
    return steps[0] if len(steps) == 1 else steps or None


def require_steady(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raise ``ModelError`` if ``tokenizer`` of ``folder`` draws tokens at random."""
    library = getattr(tokenizer, "backend_tokenizer", None)
    dropout = getattr(getattr(library, "model", None), "dropout", None)
    sampling = (tokenizer.init_kwargs.get("sp_model_kwargs") or {}).get("enable_sampling")
    if dropout or sampling:
        found = f"BPE dropout {dropout:g}" if dropout else "enable_sampling"
        detail = f"the tokenizer in {folder} has {found}: it encodes one text otherwise each time."
        remedy = "Set model.dropout to null in its tokenizer.json, or remove enable_sampling."
        raise ModelError(detail, remedy)


# ---------------------------------------------------------------------- samples


def sample_texts(config: DataConfig, root: Path | None = None) -> Iterator[str]:
    """Yield pieces of the beginnings of a job's texts, as far as they can be read.

    With ``root``, only of files on this machine, whose paths begin there.
    """
    sources = [*config.train, *config.validation]
    for source in sources:
        if root is not None:
            if not isinstance(source, str) or is_stored_name(source):
                continue
            source = str(root / source)
        # What is wrong with a text is said where it is read for the job.
        with suppress(DataError, OSError, ValueError):
            pieces = (
                text[first : first + _PIECE]
                for _, content in read_documents((source,), "train", config)
                for text in _list_texts(content)
                for first in range(0, len(text), _PIECE)
            )
            yield from islice(pieces, SAMPLE_CHARACTERS // _PIECE // len(sources))


def _list_texts(content: Any) -> Iterable[str]:
    if hasattr(content, "read_chunks"):
        return iter(content.read_chunks())
    if hasattr(content, "messages"):
        said = (each.get("content") for each in content.messages if isinstance(each, dict))
        return [text for text in said if isinstance(text, str)]
    return [content] if isinstance(content, str) else [content.prompt, content.completion]


def decodes_truly(tokenizer: PreTrainedTokenizerBase, probes: Sequence[TokenizerProbe]) -> bool:
    """Whether most of ``probes`` are encoded alike once they were decoded."""
    texts = [tokenizer.decode(list(probe.ids), skip_special_tokens=True) for probe in probes]
    again = [tokenizer(text, verbose=False)["input_ids"] for text in texts]
    same = sum(list(each.ids) == list(ids) for each, ids in zip(probes, again, strict=True))
    return 2 * same >= len(probes)


def decode_probes(
    sequences: Sequences, tokenizer: PreTrainedTokenizerBase
) -> Iterator[TokenizerProbe]:
    """Yield the text between special tokens of ``sequences``, as ``tokenizer`` decodes it.

    If it is the tokenizer that wrote them, it encodes this text to the same ids, but for some at
    the ends.
    """
    cuts = np.array([*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder], np.int64)
    for tokens, starts in zip(sequences.tokens, sequences.document_start, strict=True):
        for part in np.split(tokens, np.flatnonzero(starts | np.isin(tokens, cuts))):
            ids = tuple(part[np.isin(part, cuts).sum() :].tolist())
            if len(ids) > 2 * _EDGE:
                text = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
                yield TokenizerProbe(str(text), ids)


# ---------------------------------------------------------------------- comparison


def find_other_word(
    tokenizer: PreTrainedTokenizerBase, probes: Iterable[TokenizerProbe], cut: bool
) -> tuple[str, int]:
    """Describe the first word of ``probes`` that ``tokenizer`` encodes otherwise; empty if none.

    ``cut``: whether the texts are decoded parts of others, without special tokens. Also returns the
    number of tokens that were compared.
    """
    edge = _EDGE if cut else 0
    tokens = 0
    for probe in probes:
        tokens += len(probe.ids)
        encoded = tokenizer(probe.text, verbose=False, add_special_tokens=not cut)
        got = tuple(map(int, encoded["input_ids"]))
        steps = [] if got == probe.ids else _Matcher(None, probe.ids, got, False).get_opcodes()
        for kind, begin, end, first, last in steps:
            if kind != "equal" and begin >= edge and end <= len(probe.ids) - edge:
                before = tokenizer.decode(list(probe.ids[:begin]), skip_special_tokens=not cut)
                word = _find_word(probe.text, len(before))
                expected = list(probe.ids[begin:end])
                return f"{word!r} becomes {list(got[first:last])}, but expected {expected}", tokens
    return "", tokens


def _find_word(text: str, place: int) -> str:
    """Return the word of ``text`` that goes on at ``place``, or the last one."""
    words = list(re.finditer(r"\S+", text))
    return next((each.group() for each in words if each.end() > place), text[-40:])[:40]
