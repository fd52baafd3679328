"""Tokenizers that Python computes: exact spans where a token is a byte, else refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import ByT5Tokenizer, CTRLTokenizer

from kd.errors import DataError
from kd.text.chat.chat import Chat, Completion
from kd.text.chat_tokens import encode_completion
from kd.text.reading.notes import TextNotes
from kd.text.sources import FoundDocument
from tests.support.kd.text import encode_chat

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "answer", ["Yes.", "  \u00c4h, \u65e5\u672c \U0001f642 ", "<extra_id_3> x"]
)
def test_the_bytes_of_an_answer_are_its_tokens(answer: str) -> None:
    tokenizer = ByT5Tokenizer()
    ids, trained = encode_completion(
        FoundDocument("row 1", Completion("Caf\u00e9? ", answer)), tokenizer, False, TextNotes()
    )
    assert trained is not None
    first = len("Caf\u00e9? ".encode())
    # ByT5's added tokens are one token each; everything else is its bytes.
    expected = tokenizer(answer, add_special_tokens=False)["input_ids"]
    assert ids[first:-1].tolist() == expected and ids[-1] == tokenizer.eos_token_id
    np.testing.assert_array_equal(trained, np.arange(len(ids)) >= first)


def test_the_end_of_turn_of_a_chat_is_found_between_white_space() -> None:
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = CHATML
    messages = [
        {"role": "user", "content": "Ist es sch\u00f6n? "},
        {"role": "assistant", "content": "Ja \u00fcberall."},
    ]
    ((ids, trained),) = encode_chat(Chat(messages), "row 1", tokenizer, assistant_only=True)
    assert trained is not None
    learned = tokenizer.decode(ids[trained].tolist())
    assert learned.strip() == "Ja \u00fcberall.</s>"
    assert (ids[trained] == tokenizer.eos_token_id).sum() == 1


def test_a_tokenizer_of_words_is_refused_by_its_name(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "a</w>": 1, "b</w>": 2, "a@@": 3}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version\n")
    tokenizer = CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    with pytest.raises(DataError, match="CTRLTokenizer does not tell which characters"):
        encode_completion(
            FoundDocument("row 1", Completion("aa ", "b")), tokenizer, False, TextNotes()
        )
