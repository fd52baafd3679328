"""The teacher's prompt of an answer, which must have the same tokens after it as the student's.

Shapes: N tokens of one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kd.errors import DataError
from kd.text.chat_tokens import EncodedChat
from kd.text.teacher_side.sequences import TeacherPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def match_prompts(
    texts: Sequence[EncodedChat],
    theirs: Sequence[EncodedChat],
    where: str,
    tokenizer: PreTrainedTokenizerBase,
) -> list[TeacherPrompt]:
    """Return what the teacher reads before the first learned token of each text of a row.

    ``theirs`` are the texts as the teacher reads them. Raises ``DataError`` unless all tokens from
    the first learned one on are the same in both.
    """
    if len(texts) != len(theirs):
        raise DataError(
            f"{where}: the chat template makes {len(texts)} texts of it, and {len(theirs)} of what "
            "the teacher reads.",
            "Use a template that renders answers alike whatever comes before them, or remove it.",
        )
    return [_match(text, read, where, tokenizer) for text, read in zip(texts, theirs, strict=True)]


def _match(
    text: EncodedChat, theirs: EncodedChat, where: str, tokenizer: PreTrainedTokenizerBase
) -> TeacherPrompt:
    (first, ids, trained), (begin, read, learned) = map(_cut_prompt, (text, theirs))
    if not (np.array_equal(ids, read) and np.array_equal(trained, learned)):
        same = np.cumprod(ids[: len(read)] == read[: len(ids)]).sum()
        shown = [repr(tokenizer.decode(each[same : same + 4].tolist())) for each in (ids, read)]
        raise DataError(
            f"{where}: token {same + 1} of the answer is another one after the teacher's prompt: "
            f"the student reads {shown[0]}, the teacher {shown[1]}.",
            "End teacher.context with the same characters as the prompt, such as a line break, or "
            "remove the row.",
        )
    if begin == 0 < first:
        detail = f"{where}: the teacher's prompt is empty, so that nothing predicts the answer."
        raise DataError(detail, "Correct teacher.context or the row.")
    return TeacherPrompt(theirs[0][:begin], first)


def _cut_prompt(text: EncodedChat) -> tuple[int, np.ndarray, np.ndarray]:
    """Return the tokens of a prompt, and the ids after it with which of them are learned."""
    ids, trained = text
    assert trained is not None, "JobConfig refuses a context where whole texts are learned"
    first = int(trained.argmax())
    return first, ids[first:], trained[first:]


def require_room(prompt: TeacherPrompt, tokens: int, length: int, where: str) -> None:
    """Raise ``DataError`` if the teacher needs more than ``length`` tokens for a document.

    ``tokens`` are those of the document that the student reads.
    """
    need = len(prompt.ids) + tokens - prompt.first
    if need > length:
        raise DataError(
            f"{where}: the teacher would read {need:,} tokens, {len(prompt.ids):,} of them before "
            f"the answer, but its sequences have at most {length:,}.",
            "Raise teacher.max_length up to the teacher's window, shorten the context, or remove "
            "the row.",
        )
