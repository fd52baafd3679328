"""Find where a text can be cut so that its pieces have the token ids of the whole.

A fast tokenizer works in steps: it takes out added tokens, normalizes, cuts the text into words
(the pre-tokenizer), and gives each word to a model (BPE, Unigram or WordPiece). Ids after a cut do
not change if no step connects the two sides. There are two places where this can be shown:

    space    between a character that is not white space and a single space. The space begins the
             second piece.
    line     between a single line feed and a letter. The line feed ends the first piece.

Why no step connects the sides:

    added tokens     One that holds both white space and other characters could span a cut; a
                     tokenizer that has one is not cut. One that takes the white space around it
                     must not touch the cut: its characters there are barred.
    normalizer       Only normalizers are accepted that look at one character or at a run of
                     combining characters. Every cut is tried too: the text on both sides must be
                     normalized alike together and apart.
    pre-tokenizer    The first that cuts at white space decides. A regex is accepted if every one of
                     its alternatives is listed below: a match of it has no space but as its first
                     character, or is white space only, and no alternative looks over a cut. Steps
                     before it must not touch white space; steps after it see one word at a time.
    model            Words are independent. A BPE model without words, such as Gemma's, merges over
                     a cut only if a token of the vocabulary has the two characters next to each
                     other; a cut is made where there is no such token.

Everything else is not cut: ``find_cut_points`` says why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerBase

#: A step of a normalizer or pre-tokenizer, as the library writes it as JSON.
Step = dict[str, Any]
#: Characters on each side of a cut that are normalized to try it.
CONTEXT = 32
#: What SentencePiece writes for a space.
MARK = "\u2581"

#: Alternatives of a regex that match no space but as the first character, or white space only.
#: They look ahead only from white space, and never behind.
_WORDS = frozenset(
    [
        "'s", "'t", "'re", "'ve", "'m", "'ll", "'d",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"'(?i:[sdmt]|ll|ve|re)",
        r" ?\p{L}+", r" ?\p{N}+", r"\p{L}+", r"\p{N}", r"\p{N}{1,3}", r"\p{N}+",
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?+\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
        *(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]" + many + suffix
            for many in (r"*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+", r"+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*")
            for suffix in ("", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?")
        ),
        r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+",
    ]
)  # fmt: skip
#: Regexes without white space: a step that applies them before words are cut changes no cut.
_WITHIN_WORDS = frozenset(
    [r"\p{N}", r"\p{N}{1,3}", r"\p{N}+", r"\d", r"\d+", "[0-9]", "[0-9]+", "[0-9][0-9][0-9]",
     "[一-龥\u3040-ゟ゠-ヿ]+", r"[一-龥぀-ゟ゠-ヿ]+", r"[\r\n]"]
)  # fmt: skip
#: Normalizers that look at one character, or at a character and the marks that combine with it.
_LOCAL_NORMALIZERS = frozenset(
    ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Precompiled",
     "Nmt"]
)  # fmt: skip
#: Pre-tokenizers that drop white space and cut there.
_DROP_SPACE = frozenset(["BertPreTokenizer", "Whitespace", "WhitespaceSplit"])
#: Characters between two of which a cut may lie; each is tried before it is used.
_PLACES = re.compile(r"(?<=\S)(?=[ \n]\S)|(?<=\S\n)(?=[^\W\d_])")


class NoCutError(Exception):
    """The tokenizer connects any two parts of a text; the message says in which step."""


@dataclass(frozen=True)
class CutPoints:
    """Where texts can be cut for one tokenizer.

    ``lines``: whether also after a line feed. ``drops_space``: whether the space at a cut is left
    out, because the normalizer puts one before each text. ``words_only``: whether white
    space never reaches the model, so that the kind of it does not matter. ``barred_ends`` and
    ``barred_begins``: characters that may not stand before and after a cut.
    """

    backend: Tokenizer
    lines: bool
    drops_space: bool
    words_only: bool
    barred_ends: frozenset[str]
    barred_begins: frozenset[str]
    known_ends: frozenset[str] | None

    def find(self, text: str, start: int) -> int | None:
        """Return the first cut of ``text`` at ``start`` or later, None if there is none.

        The last ``CONTEXT`` characters are not searched: they are needed to try a cut.
        """
        places = _PLACES.finditer(text, max(start, 2), max(len(text) - CONTEXT, 0))
        return next((each.start() for each in places if self._is_cut(text, each.start())), None)

    def _is_cut(self, text: str, place: int) -> bool:
        before = text[max(place - CONTEXT, 0) : place]
        after = text[place : place + CONTEXT]
        if text[place - 1] == "\n":
            return self.lines and self._is_line_cut(before, after)
        return self._is_space_cut(before, after)

    def _is_space_cut(self, before: str, after: str) -> bool:
        end = before[-1]
        if self.drops_space:
            begin = after[1]
            usable = after[0] == " " and begin.isalpha() and begin not in self.barred_begins
            return usable and end in (self.known_ends or ()) and end not in self.barred_ends
        left = _normalize(self.backend, before)
        right = _normalize(self.backend, after)
        if not left or not right or _normalize(self.backend, before + after) != left + right:
            return False
        if {end, left[-1]} & (self.barred_ends | {MARK}):
            return False
        if self.words_only:
            return right[0].isspace()
        if left[-1].isspace() or (self.known_ends is not None and left[-1] not in self.known_ends):
            return False
        return right[0] in (" ", MARK)

    def _is_line_cut(self, before: str, after: str) -> bool:
        left = _normalize(self.backend, before)
        right = _normalize(self.backend, after)
        return (
            _normalize(self.backend, before + after) == left + right
            and left.endswith("\n")
            and not left[-2:-1].isspace()
            and right[:1].isalpha()
            and not {after[0], right[0]} & self.barred_begins
        )


def _normalize(backend: Tokenizer, text: str) -> str:
    normalizer = backend.normalizer
    return str(normalizer.normalize_str(text)) if normalizer is not None else text


def find_cut_points(tokenizer: PreTrainedTokenizerBase) -> CutPoints:
    """Find where texts can be cut for ``tokenizer``; raises ``NoCutError`` if nowhere."""
    if not getattr(tokenizer, "is_fast", False):
        raise NoCutError("it is not one of the library tokenizers")
    backend: Tokenizer = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    normalizers = _list_steps(backend.normalizer, "normalizers")
    steps = _list_steps(backend.pre_tokenizer, "pretokenizers")
    prepends = _check_normalizers(normalizers)
    added = list(backend.get_added_tokens_decoder().values())
    _check_added_tokens(added, backend)
    # Added tokens that take the space after or before them; with a prepended space, all of them.
    ends = _bar(each.content[-1:] for each in added if each.rstrip or prepends)
    begins = _bar(each.content[:1] for each in added if each.lstrip or prepends)
    if backend.model.__class__.__name__ == "BPE" and backend.model.dropout:
        raise NoCutError("its BPE drops merges at random")
    if _has_no_words(steps, normalizers):
        return CutPoints(backend, False, prepends, False, ends, begins, _find_known_ends(backend))
    if prepends:
        raise NoCutError("its normalizer puts a mark before each text")
    lines, words_only = _check_words(steps)
    if words_only and any(token.content.isspace() for token in added):
        raise NoCutError("it has added tokens that are white space")
    return CutPoints(backend, lines, False, words_only, ends, begins, None)


def _list_steps(step: Any, parts: str) -> list[Step]:
    """Return the steps of a normalizer or pre-tokenizer in order, each as its JSON."""
    if step is None:
        return []
    try:
        state = json.loads(step.__getstate__())
    except Exception as error:  # one written in Python has no JSON
        raise NoCutError("a step of it is written in Python") from error
    return _flatten(state, parts)


def _flatten(state: Step, parts: str) -> list[Step]:
    if state["type"] != "Sequence":
        return [state]
    return [step for part in state[parts] for step in _flatten(part, parts)]


# ---------------------------------------------------------------------- added tokens, normalizer


def _check_added_tokens(added: list[AddedToken], backend: Tokenizer) -> None:
    """Raise ``NoCutError`` if an added token could span a cut."""
    for token in added:
        content = token.content
        # One that is compared with normalized text is normalized itself.
        for written in (content, _normalize(backend, content).removeprefix(MARK)):
            spaces = [each.isspace() or each == MARK for each in written]
            if any(spaces) and not all(spaces):
                raise NoCutError(f"its added token {content!r} holds white space")
        if content.isspace() and (token.lstrip or token.rstrip):
            raise NoCutError(f"its added token {content!r} takes the white space around it")


def _bar(characters: Iterable[str]) -> frozenset[str]:
    """Return ``characters`` in both cases, as a normalizer may change them before they compare."""
    return frozenset(
        case for each in characters for case in (each, *each.lower(), *each.upper()) if case
    )


def _check_normalizers(steps: list[Step]) -> bool:
    """Return whether the normalizer puts a mark before each text; refuse one that is not known."""
    for step in steps:
        kind = step["type"]
        if kind == "Strip" and not step["strip_left"]:
            continue  # no text ends in white space at a cut before a space
        if kind == "Prepend" and step["prepend"] == MARK:
            continue
        if kind == "Replace" and _is_local_pattern(step["pattern"]):
            continue
        if kind not in _LOCAL_NORMALIZERS:
            raise NoCutError(f"its normalizer {kind} may look at the whole text")
    prepends = any(step["type"] == "Prepend" for step in steps)
    if prepends and not all(
        step["type"] == "Prepend" or step.get("pattern") == {"String": " "} for step in steps
    ):
        raise NoCutError("its normalizer puts a mark before each text, and changes the text")
    return prepends


def _is_local_pattern(pattern: dict[str, str]) -> bool:
    """Return whether a replaced pattern cannot reach over a cut: a space, or no white space."""
    text = pattern.get("String")
    if text is None:
        return pattern.get("Regex") in (" {2,}", r" {2,}", r"\s+")
    return text == " " or not any(map(str.isspace, text))


# ---------------------------------------------------------------------- pre-tokenizer


def _has_no_words(steps: list[Step], normalizers: Iterable[Step]) -> bool:
    """Return whether the pre-tokenizer gives the model a whole text as one word."""
    marked = any(
        step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == MARK
        for step in normalizers
    )
    if len(steps) != 1:
        return not steps
    (step,) = steps
    if step["type"] == "Metaspace":
        return not step["split"] and step["replacement"] == MARK
    # Gemma splits at spaces, of which its normalizer has left none.
    return marked and step["type"] == "Split" and step["pattern"] == {"String": " "}


def _check_words(steps: list[Step]) -> tuple[bool, bool]:
    """Return whether lines can be cut, and whether white space is dropped.

    Raises ``NoCutError`` unless a step cuts words at white space, after steps that change nothing
    there.
    """
    for number, step in enumerate(steps):
        kind = step["type"]
        later = steps[number + 1 :]
        if kind in _DROP_SPACE:
            return False, True
        if kind == "Metaspace" and step["split"] and step["replacement"] == MARK:
            return False, False
        if kind == "ByteLevel" and step["use_regex"]:
            return not step["add_prefix_space"] and _is_plain(later), False
        if kind == "Split" and _cuts_words(step):
            return _is_plain(later), False
        if not _leaves_space(step):
            written = str(next(iter(step.get("pattern", {}).values()), step))[:60]
            raise NoCutError(f"its pre-tokenizer {kind} may connect words: {written}")
    raise NoCutError("its pre-tokenizer does not cut words at spaces")


def _is_plain(steps: list[Step]) -> bool:
    """Return whether no step depends on where in a text its word stands."""
    return all(step["type"] in ("ByteLevel", "Digits", "Punctuation", "Split") for step in steps)


def _leaves_space(step: Step) -> bool:
    """Return whether a step cuts at no white space and depends on none."""
    if step["type"] == "Digits":
        return True
    if step["type"] == "Punctuation":
        return step["behavior"] in ("Isolated", "Contiguous")
    regex = step.get("pattern", {}).get("Regex")
    return (
        step["type"] == "Split"
        and regex in _WITHIN_WORDS
        and step["behavior"] == "Isolated"
        and not step["invert"]
    )


def _cuts_words(step: Step) -> bool:
    """Return whether all alternatives of a regex are known, and one takes any white space."""
    alternatives = split_alternatives(step["pattern"].get("Regex", ""))
    isolates = (step["behavior"], step["invert"]) in (("Isolated", False), ("Removed", True))
    return isolates and r"\s+" in alternatives and set(alternatives) <= _WORDS


def split_alternatives(regex: str) -> list[str]:
    """Split ``regex`` at each | outside of groups and classes; line ends are written as escapes."""
    written = regex.replace("\r", r"\r").replace("\n", r"\n")
    found = [""]
    depth = 0
    in_class = False
    for part in re.findall(r"\\.|.", written):
        if part == "|" and depth == 0 and not in_class:
            found.append("")
            continue
        found[-1] += part
        if in_class:
            in_class = part != "]"
        else:
            in_class = part == "["
            depth += (part == "(") - (part == ")")
    return found


# ---------------------------------------------------------------------- model


def _find_known_ends(backend: Tokenizer) -> frozenset[str]:
    """Return the characters that no token of a BPE model has before a space.

    They are tokens themselves, so that no run of unknown characters spans a cut.
    """
    model = backend.model
    if model.__class__.__name__ != "BPE":
        raise NoCutError(f"its {model.__class__.__name__} model reads a text as one word")
    affixes = (model.continuing_subword_prefix, model.end_of_word_suffix)
    if model.ignore_merges or any(affixes):
        raise NoCutError("its BPE model treats the ends of a text in its own way")
    vocabulary = backend.get_vocab(with_added_tokens=False)
    joined = {
        character
        for token in vocabulary
        for character, following in pairwise(token)
        if following == MARK
    }
    single = {token for token in vocabulary if len(token) == 1}
    if MARK not in single:
        raise NoCutError("its BPE model has no token for a space")
    return frozenset(single - joined - {MARK})
