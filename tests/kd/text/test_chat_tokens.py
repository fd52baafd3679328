"""Chats: exactly the assistant's tokens are trained; dates are fixed; tools are rendered."""

import datetime
import json
from itertools import groupby

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from kd.config.data import DataConfig
from kd.errors import DataError
from kd.text.chat.calls import read_tools
from kd.text.chat.chat import Chat
from kd.text.chat_tokens import encode_chats
from kd.text.reading.notes import TextNotes
from kd.text.sources import FoundDocument, read_documents
from tests.support.kd.text import encode_chat, encode_documents

UNMARKED = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{{ m['content'] }}<|end|>"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MARKED = UNMARKED.replace(
    "%}{{ m['content'] }}<|end|>{% else",
    "%}{% generation %}{{ m['content'] }}{% endgeneration %}<|end|>{% else",
)
MARKED_WITH_END = MARKED.replace("{% endgeneration %}<|end|>", "<|end|>{% endgeneration %}")
DATED = "{{ strftime_now('%d %b %Y') }}, {{ strftime_now('%A, %B %-d') }}" + UNMARKED
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module", params=[True, False], ids=["trimmed", "untrimmed"])
def bytes_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer with few merges, so that an emoji is several tokens.

    Its offsets include the spaces around a word, or leave them out.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|start|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["More of it, and better. The good ones said more."] * 3, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=request.param)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    )


def talk(*contents: str) -> Chat:
    """Make a chat in which user and assistant take turns."""
    return Chat(
        [
            {"role": ("user", "assistant")[i % 2], "content": content}
            for i, content in enumerate(contents)
        ]
    )


def learned(chat: Chat, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the runs of trained tokens as text."""
    ((ids, trained),) = encode_chat(chat, "row", tokenizer, assistant_only=True)
    assert trained is not None and ids.tolist() == tokenizer.apply_chat_template(
        chat.messages, return_dict=False
    )
    runs = groupby(zip(ids.tolist(), trained.tolist(), strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for is_trained, run in runs if is_trained]


@pytest.mark.parametrize("template", [UNMARKED, MARKED_WITH_END], ids=["prefixes", "markers"])
def test_answers_of_weight_0_are_not_learned(bytes_tokenizer, template):
    bytes_tokenizer.chat_template = template
    chat = talk("Hi", "A mistake", "No", "Better", "Why", "So it is")
    for weights, expected in (
        ((0, 1, None), ["Better<|end|>", "So it is<|end|>"]),
        ((None, 0, 0), ["A mistake<|end|>"]),
    ):
        for message, weight in zip(chat.messages[1::2], weights, strict=True):
            message.pop("weight", None)
            message.update({} if weight is None else {"weight": weight})
        assert learned(chat, bytes_tokenizer) == expected
    # Of a prompt and a completion, the prompt's answers are not learned, whatever they weigh.
    completion = Chat(chat.messages, learned_from=2)
    with pytest.raises(DataError, match="no token of the assistant to learn"):
        learned(completion, bytes_tokenizer)
    chat.messages[5].pop("weight")
    assert learned(completion, bytes_tokenizer) == ["So it is<|end|>"]
    for message in chat.messages:
        message["weight"] = 0
    with pytest.raises(DataError, match="no token of the assistant to learn"):
        encode_chat(chat, "row", bytes_tokenizer, assistant_only=True)
    ((_, trained),) = encode_chat(chat, "row", bytes_tokenizer, assistant_only=False)
    assert trained is None


TALKS = [
    ("Hi", "Good", "More", "Better"),
    ("Hi", " Good", "More", " Better"),
    ("Hi", "Good ", "A secret of the user's", "Better  "),
    ("Hi", "Nice 🙂", "More", "🙂 Straße 日本"),
]


@pytest.mark.parametrize("contents", TALKS)
def test_spaces_and_split_characters_at_the_ends_of_answers_are_learned(bytes_tokenizer, contents):
    """For all of these but the first, transformers' own mask trains user text or loses answers."""
    bytes_tokenizer.chat_template = MARKED
    assert learned(talk(*contents), bytes_tokenizer) == list(contents[1::2])
    bytes_tokenizer.chat_template = MARKED_WITH_END
    assert learned(talk(*contents), bytes_tokenizer) == [
        f"{content}<|end|>" for content in contents[1::2]
    ]
    bytes_tokenizer.chat_template = UNMARKED
    assert learned(talk(*contents), bytes_tokenizer) == [
        f"{content}<|end|>" for content in contents[1::2]
    ]


def test_a_chat_is_the_same_on_any_day(bytes_tokenizer, monkeypatch):
    found = []
    for day in (1, 2):

        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz=None, day=day):
                return cls(2025, 3, day)

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)
        for template in (DATED, DATED.replace(UNMARKED, MARKED)):
            for assistant_only in (True, False):
                bytes_tokenizer.chat_template = template
                ((ids, _),) = encode_chat(
                    talk("Hi", "Good"), "row", bytes_tokenizer, assistant_only
                )
                found.append(bytes_tokenizer.decode(ids.tolist()))
    assert set(found) == {
        "26 Jul 2024, Friday, July 26<|start|>user\nHi<|end|><|start|>assistant\nGood<|end|>"
    }


@pytest.mark.parametrize("template", [UNMARKED, MARKED], ids=["prefixes", "markers"])
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["list", "text"])
def test_the_tools_of_a_row_are_told(bytes_tokenizer, tmp_path, template, tools):
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"messages": talk("Hi", "Good").messages, "tools": tools})
    )
    ((place, chat),) = read_documents(
        [str(tmp_path / "a.jsonl")], "train", DataConfig(train="a", format="messages")
    )
    bytes_tokenizer.chat_template = template
    for assistant_only in (True, False):
        ((ids, trained),) = encode_chat(chat, place, bytes_tokenizer, assistant_only)
        text = bytes_tokenizer.decode(ids.tolist())
        assert text.startswith("<tools>") and "get_weather" in text.partition("</tools>")[0]
    assert trained is None


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_no_tools_are_none(tools):
    assert read_tools(tools, "row") is None


@pytest.mark.parametrize("tools", ["get_weather", [1], {"name": "get_weather"}, "{}x", 3])
def test_tools_that_are_no_schemas_are_refused(tools):
    with pytest.raises(DataError, match="row 1: 'tools' must be a list of JSON schemas"):
        read_tools(tools, "row 1")


def make_documents(count: int) -> list[FoundDocument]:
    """Chats and, here and there, a text."""
    found = []
    for number in range(count):
        chat = talk(
            f"Say {number} words, please.", "More. " * (number % 7 + 1), "And?", " Good! \n"
        )
        found.append(FoundDocument(f"row {number}", f"text {number}" if number % 9 == 8 else chat))
    return found


@pytest.mark.parametrize("template", [UNMARKED, MARKED, DATED], ids=["prefixes", "markers", "day"])
@pytest.mark.parametrize("answers_only", [True, False])
def test_chats_that_are_tokenized_together_are_those_that_are_tokenized_alone(
    bytes_tokenizer, template, answers_only, monkeypatch
):
    monkeypatch.setattr(bytes_tokenizer, "chat_template", template)
    config = DataConfig(train="x", assistant_only_loss=answers_only)
    found = make_documents(60)
    # Padding that another caller has left on must not reach the chats.
    bytes_tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=3)
    together = list(encode_documents(iter(found), bytes_tokenizer, config))
    alone = [
        document
        for each in found
        for document in encode_documents(iter([each]), bytes_tokenizer, config)
    ]
    assert len(together) == len(found)
    for ours, wanted in zip(together, alone, strict=True):
        assert np.array_equal(ours.ids, wanted.ids)
        assert (ours.trained is None) == (wanted.trained is None)
        assert wanted.trained is None or np.array_equal(ours.trained, wanted.trained)
    chats = [each for each in found if isinstance(each.content, Chat)]
    batch = encode_chats(chats, bytes_tokenizer, answers_only, TextNotes())
    assert len(batch) == len(chats)


def test_the_chat_that_is_at_fault_is_named_and_those_before_it_come(bytes_tokenizer, monkeypatch):
    monkeypatch.setattr(bytes_tokenizer, "chat_template", UNMARKED)
    found = make_documents(8)
    found[6] = FoundDocument("row 6", talk("only a question"))
    documents = encode_documents(
        iter(found), bytes_tokenizer, DataConfig(train="x", assistant_only_loss=True)
    )
    assert len([next(documents) for _ in range(6)]) == 6
    with pytest.raises(DataError, match=r"^row 6 has no token of the assistant"):
        next(documents)
