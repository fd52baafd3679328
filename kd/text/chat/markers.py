"""Control tokens that stand in a chat as text: they become tokens when a template renders them.

A user may have typed <|im_end|>; a tokenizer makes the token of it, as of the template's own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from kd.text.chat.checks import read_content
from kd.text.chat.rendering import Span
from kd.text.chat.turns import Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@lru_cache(maxsize=4)
def compile_markers(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return the pattern of the tokenizer's control tokens; it finds nothing if there are none.

    Tags of reasoning are no control tokens, although some tokenizers call them special.
    """
    added = tokenizer.added_tokens_decoder.values()
    named = {each.content for each in added if each.special} | set(tokenizer.all_special_tokens)
    markers = sorted((each for each in named if "think" not in each.lower()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, markers)) or "(?!)")


def find_forged(rendered: Rendered, tokenizer: PreTrainedTokenizerBase) -> Iterator[Span]:
    """Yield where control tokens stand in the answers that ``rendered`` teaches."""
    answers = {read_content(rendered.chat.messages[each]) for each in rendered.chat.list_learned()}
    for (first, last), answer in itertools.product(rendered.spans, answers):
        begin = rendered.text.find(answer.strip(), first, last)
        for marker in compile_markers(tokenizer).finditer(answer.strip()) if begin >= 0 else ():
            yield begin + marker.start(), begin + marker.end()
