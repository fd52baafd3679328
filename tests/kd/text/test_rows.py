"""Rows of the usual data sets: each format is read with its mask, and what is no text is named."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest

from kd.config.data import DatasetSpec
from kd.errors import DataError
from kd.text.chat.chat import Chat, Completion
from kd.text.corpus import load_corpus
from kd.text.sources import read_documents
from tests.support.kd.text import config, documents, encode_documents, refusal, rows, write

QUESTION = {"role": "user", "content": "Who is the heroine?"}
ANSWER = {"role": "assistant", "content": "Anne Elliot."}
SYSTEM = {"role": "system", "content": "Be brief."}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": QUESTION["content"]},
        {"from": "gpt", "value": ANSWER["content"]},
    ]
}
ALPACA = {"instruction": QUESTION["content"], "input": "", "output": ANSWER["content"]}
PARTS = {
    "messages": [
        QUESTION | {"content": [{"type": "text", "text": "Who is "}, {"text": "the heroine?"}]},
        ANSWER | {"content": [{"type": "text", "text": "Anne Elliot."}]},
    ]
}
PAIR = {"prompt": "Q: Who? A:", "completion": " Anne Elliot."}
CHAT_PAIR = {"prompt": [QUESTION], "completion": [ANSWER]}
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}{% else %}"
    "{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def learned(content: object, tokenizer, **changes) -> str:
    """Return the text of the tokens that a document of one row learns."""
    (document,) = encode_documents(rows([content]), tokenizer, config(**changes))
    return tokenizer.decode(document.ids[document.targets].tolist())


# ---------------------------------------------------------------------- formats


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "json"])
@pytest.mark.parametrize(
    "format, row",
    [
        ("messages", {"messages": [QUESTION, ANSWER]}),
        ("messages", PARTS),
        ("sharegpt", SHAREGPT),
        ("alpaca", ALPACA),
        ("alpaca", ALPACA | {"input": None}),
    ],
)
def test_every_format_gives_the_same_chat(tmp_path, format, row, suffix):
    path = write(tmp_path, f"a.{suffix}", [row] * 2)
    chats = documents(path, format=format)
    assert [chat.messages for chat in chats] == [[QUESTION, ANSWER]] * 2


def test_what_a_format_may_have_besides_is_read(tmp_path):
    tool = {"type": "function", "function": {"name": "look_up"}}
    row = SHAREGPT | {"system": "Be brief.", "tools": [tool]}
    row["conversations"] = [*row["conversations"], {"from": "observation", "value": "Yes."}]
    (chat,) = documents(write(tmp_path, "a.jsonl", [row]), format="sharegpt")
    assert chat.messages == [SYSTEM, QUESTION, ANSWER, {"role": "tool", "content": "Yes."}]
    assert chat.tools == [tool]
    row = ALPACA | {"input": "Persuasion", "system": "Be brief."}
    (chat,) = documents(write(tmp_path, "b.jsonl", [row]), format="alpaca")
    question = "Who is the heroine?\n\nPersuasion"
    assert chat.messages == [SYSTEM, {"role": "user", "content": question}, ANSWER]


def test_a_call_of_tools_needs_no_content(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look_up"}]}
    path = write(tmp_path, "a.jsonl", [{"messages": [QUESTION, call, ANSWER]}])
    assert documents(path, format="messages")[0].messages[1] == make_call("look_up")


def make_call(name: str, **arguments: str) -> dict:
    """Return a message that calls a tool."""
    function = {"name": name, "arguments": arguments}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def test_a_key_of_a_message_that_is_null_is_as_one_that_is_missing(tmp_path):
    null = [each | {"tool_calls": None, "name": None} for each in (QUESTION, ANSWER)]
    path = write(tmp_path, "a.jsonl", [{"messages": null}])
    assert documents(path, format="messages")[0].messages == [QUESTION, ANSWER]


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_a_table_gives_each_call_its_own_arguments_and_each_tool_its_own_parameters(tmp_path, kind):
    """In a table every object of a column has the fields of all, and null where it has none."""
    calls = [make_call("weather", city="Bath"), make_call("look_up", word="rain")]
    tools = [
        {"function": {"name": "weather", "parameters": {"city": {"type": "string"}}}},
        {"function": {"name": "look_up", "parameters": {"word": {"type": "string"}}}},
    ]
    found = [{"messages": [QUESTION, call, ANSWER], "tools": tools} for call in calls]
    if kind == "saved":
        path = tmp_path / "saved"
        datasets.Dataset.from_list(found).save_to_disk(path)
    else:
        path = write(tmp_path, "a.parquet", found)
    chats = documents(path, format="messages")
    assert [chat.messages for chat in chats] == [[QUESTION, call, ANSWER] for call in calls]
    assert [chat.tools for chat in chats] == [tools, tools]


def test_only_the_completion_is_learned(tmp_path, tokenizer, monkeypatch):
    path = write(tmp_path, "a.parquet", [PAIR])
    (pair,) = documents(path, format="prompt_completion")
    assert pair == Completion(**PAIR)
    options = {"format": "prompt_completion"}
    assert learned(pair, tokenizer, **options) == " Anne Elliot.<|endoftext|>"
    everything = "Q: Who? A: Anne Elliot.<|endoftext|>"
    assert learned(pair, tokenizer, assistant_only_loss=False, **options) == everything
    corpus = load_corpus(
        config(
            train=str(path), validation_fraction=0, sequence_length=64, packing=False, **options
        ),
        tokenizer,
    )
    ids = tokenizer(everything)["input_ids"]
    assert corpus.train.tokens[0, : len(ids)].tolist() == ids
    assert tokenizer.decode(corpus.train.find_gold_ids().tolist()) == " Anne Elliot.<|endoftext|>"


@pytest.mark.parametrize("template", [TEMPLATE, UNMARKED], ids=["markers", "prefixes"])
def test_of_a_chat_in_two_parts_only_the_second_is_learned(
    tmp_path, tokenizer, monkeypatch, template
):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    earlier = [QUESTION, ANSWER | {"content": "Who knows?"}, QUESTION]
    row = CHAT_PAIR | {"prompt": earlier}
    (chat,) = documents(write(tmp_path, "a.jsonl", [row]), format="prompt_completion")
    assert learned(chat, tokenizer, format="prompt_completion") == "Anne Elliot.<|endoftext|>"
    whole = Chat(chat.messages)
    both = "Who knows?<|endoftext|>Anne Elliot.<|endoftext|>"
    assert learned(whole, tokenizer, format="messages") == both


def test_an_empty_completion_is_refused(tokenizer):
    with pytest.raises(DataError, match="a: row 1: 'completion' is empty"):
        list(encode_documents(rows([Completion("Who?", " ")]), tokenizer, config()))


# ---------------------------------------------------------------------- what is no text

IMAGE = [{"type": "text", "text": "What is this?"}, {"type": "image", "image": "a.png"}]


@pytest.mark.parametrize(
    "format, row, detail",
    [
        ("auto", {"text": 5}, "'text' must be a text, but is a number"),
        ("auto", {"text": "half \ud800 pair"}, r"character 6 of 'text' is '\ud800', half"),
        ("messages", {"messages": [QUESTION | {"content": IMAGE}]},
         "part 2 of 'content' in message 1 of 'messages' is of type 'image': only text"),
        ("messages", {"messages": [QUESTION, ANSWER | {"weight": 0.5}]},
         "'weight' in message 2 of 'messages' is 0.5, but must be 0 or 1"),
        ("messages", {"messages": [QUESTION, {"role": "assistant", "content": None}]},
         "'content' in message 2 of 'messages' is null"),
        ("messages", {"messages": [QUESTION | {"content": 5}]},
         "'content' in message 1 of 'messages' must be a text, but is a number"),
        ("messages", {"messages": [{"content": "Who?"}]}, "'role' in message 1 of 'messages'"),
        ("messages", {"messages": ["Who?"]}, "message 1 of 'messages' must be an object with keys"),
        ("messages", {"messages": [QUESTION | {"content": "\udc00"}]},
         r"character 1 of 'content' in message 1 of 'messages' is '\udc00', half"),
        ("sharegpt", {"conversations": [{"from": "robot", "value": "Hello."}]},
         "turn 1 of 'conversations' is from 'robot', which is not known"),
        ("sharegpt", {"conversations": [{"from": "human", "value": None}]},
         "'value' in turn 1 of 'conversations' is null"),
        ("alpaca", ALPACA | {"output": 3}, "'output' must be a text, but is a number"),
        ("prompt_completion", PAIR | {"completion": [ANSWER]}, "'completion' must be a text"),
        ("prompt_completion", CHAT_PAIR | {"completion": "x"}, "'completion' must be a list"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_named_by_file_row_and_column(tmp_path, format, row, detail):
    good = {"auto": {"text": "a"}, "messages": {"messages": [QUESTION]}, "sharegpt": SHAREGPT}
    first = good | {"alpaca": ALPACA, "prompt_completion": PAIR}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (first[format], row)))
    message = refusal(path, format=format)
    assert f"{path}: row 2: {detail}" in message


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_file_is_closed_when_a_row_is_refused(tmp_path, name):
    chats = [[QUESTION], [{"role": "user"}], [ANSWER]]
    path = write(tmp_path, name, [{"messages": each} for each in chats])
    with pytest.raises(DataError) as caught:
        documents(path, format="messages")
    assert caught.tb  # holds the frames that read
    assert path not in {each.resolve() for each in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize(
    "row, format, remedy",
    [
        ({"messages": [QUESTION]}, "auto", "Set data.format: messages."),
        (SHAREGPT, "auto", "Set data.format: sharegpt."),
        (SHAREGPT, "messages", "Set data.format: sharegpt."),
        (ALPACA, "auto", "Set data.format: alpaca."),
        (PAIR, "auto", "Set data.format: prompt_completion."),
        ({"body": "x"}, "auto", "Set data.text_column."),
        ({"chat": []}, "messages", "reads the columns messages: rename them. A chat is a list of"),
        ({"messages": "Who?"}, "messages", "A chat is a list of {role, content}."),
        ({"question": "?"}, "alpaca", "reads the columns instruction and output: rename them."),
    ],
)
def test_a_row_of_another_format_is_told_which(tmp_path, row, format, remedy):
    with pytest.raises(DataError) as caught:
        documents(write(tmp_path, "a.jsonl", [row]), format=format)
    assert remedy in caught.value.remedy


# ---------------------------------------------------------------------- saved datasets


@pytest.fixture
def saved(tmp_path):
    """Save a dataset whose rows were shuffled, so that an indices file gives their order."""
    rows = datasets.Dataset.from_dict({"text": [f"Text {number}." for number in range(9)]})
    rows.select([8, 2, 5]).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "two")
    return tmp_path


def test_folders_of_save_to_disk_are_read_by_name_or_as_datasets(saved):
    expected = ["Text 8.", "Text 2.", "Text 5."]
    assert documents(saved / "one") == documents(DatasetSpec(path=str(saved / "one"))) == expected
    assert documents(DatasetSpec(path=str(saved / "one"), split="train[1:]")) == expected[1:]
    assert len(documents(saved / "two")) == 9
    assert documents(DatasetSpec(path=str(saved / "two"), split="test")) == ["Text 1."]
    both = DatasetSpec(path=str(saved / "two"), split="test+train[:2]")
    assert documents(both) == ["Text 1.", "Text 0.", "Text 1."]
    with pytest.raises(DataError, match="split 'dev'") as caught:
        documents(DatasetSpec(path=str(saved / "two"), split="dev"))
    assert "login" not in caught.value.remedy


def test_a_saved_dataset_with_an_indices_file_keeps_its_order(saved):
    """Older versions of the library kept the order of rows in a file of its own."""
    folder = saved / "one"
    table = datasets.Dataset.from_dict({"indices": np.array([2, 0], np.uint64)})
    table.save_to_disk(saved / "order")
    (source,) = (saved / "order").glob("*.arrow")
    source.rename(folder / "indices.arrow")
    state = json.loads((folder / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    assert documents(folder) == ["Text 5.", "Text 8."]


@pytest.mark.parametrize("name", ["/nowhere/set", "./set", "data/deep/set", "there/set"])
def test_a_missing_folder_gets_no_advice_to_log_in(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError, match="there is no folder") as caught:
        list(read_documents((DatasetSpec(path=name),), "train", config()))
    assert "login" not in str(caught.value) + caught.value.remedy
