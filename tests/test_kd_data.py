"""Text to packed sequences: every format reads the same, nothing is lost, nothing crosses a boundary."""

import gzip
import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kd.chats import Chat
from kd.config.data import DataConfig, DatasetSpec
from kd.data import (
    Corpus,
    Document,
    encode,
    find_files,
    load_corpus,
    mix,
    pack,
    packed,
    position_ids,
    read_documents,
    text_lengths,
)
from kd.errors import DataError
from kd.progress import Event, Monitor

TEXTS = ["It was a dark night.", "“Straße” — naïve?\n\nYes.\u2028So.", "Third document, the last.\n"]
ROWS = [{"text": text, "number": number} for number, text in enumerate(TEXTS)]


def config(**changes) -> DataConfig:
    return DataConfig(**{"train": "unused", "sequence_length": 8} | changes)


def documents(source: str | Path | DatasetSpec, **changes) -> list:
    source = str(source) if isinstance(source, Path) else source
    return [content for _, content in read_documents((source,), "train", config(**changes))]


def write(folder: Path, name: str, rows=ROWS) -> Path:
    """``rows`` in the format that ``name`` says."""
    path = folder / name
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"
    if name.endswith(".parquet"):
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(json.dumps(rows) if name.endswith(".json") else lines, encoding="utf-8")
    return path


def rows(contents: list) -> list[tuple[str, object]]:
    """``contents`` as they are read from a file a."""
    return [(f"a: row {number}", content) for number, content in enumerate(contents, 1)]


@pytest.fixture
def hub_caches(tmp_path, monkeypatch):
    """What ``datasets`` copies goes away with the test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets cache")


# ---------------------------------------------------------------------- reading


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.jsonl.gz"])
def test_rows_read_the_same_from_every_format(tmp_path, name):
    assert documents(write(tmp_path, name)) == TEXTS


def test_a_text_file_is_one_document_to_the_last_byte(tmp_path):
    for text in TEXTS:
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbf" + text.encode())  # a byte order mark is no text
        (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
        for name in ("a.txt", "a.md", "a.txt.gz"):
            assert documents(tmp_path / name) == [text]


def test_json_lines_under_the_name_json_and_blank_lines_between(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "one"}\n\n{"text": "two"}', encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('\ufeff{"text": "one"}\r\n\r\n{"text": "two"}\r\n', encoding="utf-8")
    assert documents(tmp_path / "a.json") == documents(tmp_path / "b.jsonl") == ["one", "two"]


def test_the_configured_format_beats_the_suffix(tmp_path):
    write(tmp_path, "a.jsonl").rename(tmp_path / "a.data")
    write(tmp_path, "b.parquet").rename(tmp_path / "b.data")
    assert documents(tmp_path / "a.data", format="jsonl") == TEXTS
    assert documents(tmp_path / "b.data", format="parquet") == TEXTS
    assert documents(tmp_path / "a.data", format="text") == [(tmp_path / "a.data").read_text(encoding="utf-8")]


def test_another_column_can_hold_the_text(tmp_path):
    rows = [{"body": text, "text": "wrong"} for text in TEXTS]
    for name in ("a.jsonl", "a.parquet"):
        assert documents(write(tmp_path, name, rows), text_column="body") == TEXTS


def test_folders_and_globs_are_read_in_sorted_order(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    names = ["b.txt", "a.txt", "deep/c.md", "deep/er/d.txt"]
    for name in [*names, "skipped.bin"]:
        (tmp_path / name).write_text(f"text of {name}", encoding="utf-8")
    assert [path.relative_to(tmp_path).as_posix() for path in find_files(str(tmp_path))] == sorted(names)
    assert documents(tmp_path) == [f"text of {name}" for name in sorted(names)]
    assert documents(f"{tmp_path}/*.txt") == ["text of a.txt", "text of b.txt"]
    assert documents(f"{tmp_path}/**/*.txt") == ["text of a.txt", "text of b.txt", "text of deep/er/d.txt"]
    assert find_files("a.txt", tmp_path) == [tmp_path / "a.txt"]


def test_several_sources_follow_each_other(tmp_path):
    sources = [str(write(tmp_path, name)) for name in ("b.parquet", "a.jsonl")]
    expected = [(f"{path}: row {row}", text) for path in sources for row, text in enumerate(TEXTS, 1)]
    assert list(read_documents(sources, "train", config())) == expected


def test_a_local_dataset_folder_is_read_through_datasets(tmp_path, hub_caches):
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder, "train.jsonl")
    write(folder, "test.jsonl", ROWS[:1])
    assert documents(DatasetSpec(path=str(folder))) == TEXTS
    assert documents(DatasetSpec(path=str(folder), split="train[1:]")) == TEXTS[1:]
    assert documents(DatasetSpec(path=str(folder), split="test")) == TEXTS[:1]
    with pytest.raises(DataError, match="split 'dev'"):
        documents(DatasetSpec(path=str(folder), split="dev"))


CHATS = [[{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Anne Elliot."}]] * 2
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_messages_are_rendered_by_the_chat_template(tmp_path, tokenizer, monkeypatch, name):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    path = write(tmp_path, name, [{"messages": chat} for chat in CHATS])
    options = config(train=str(path), format="messages", assistant_only_loss=False, validation_fraction=0)
    corpus = load_corpus(options, tokenizer)
    rendered = "[user] Who?<|endoftext|>[assistant] Anne Elliot.<|endoftext|>"
    ids = tokenizer(rendered)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 2
    flat = corpus.train.tokens.reshape(-1).tolist()
    assert flat[: 2 * len(ids)] == ids * 2
    assert corpus.train.document_start.reshape(-1)[len(ids)]


# ---------------------------------------------------------------------- errors


def refusal(path: Path | str, **changes) -> str:
    with pytest.raises(DataError) as caught:
        documents(path, **changes)
    assert caught.value.remedy
    return str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    assert "nowhere.txt" in refusal(tmp_path / "nowhere.txt")
    assert "*.nothing" in refusal(f"{tmp_path}/*.nothing")
    assert refusal(tmp_path)  # a folder without text


def test_an_unknown_suffix_asks_for_the_format(tmp_path):
    (tmp_path / "a.csv").write_text("a,b", encoding="utf-8")
    assert "'.csv'" in refusal(tmp_path / "a.csv") and "data.format" in refusal(tmp_path / "a.csv")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_wrong_column_names_the_columns_there_are(tmp_path, name):
    message = refusal(write(tmp_path, name), text_column="body")
    assert name in message and "row 1 has no 'body'; its columns: number, text." in message
    assert "row 1 has no 'messages'" in refusal(tmp_path / name, format="messages")


def test_a_row_without_a_value_is_named(tmp_path):
    assert "row 2 has no 'text'" in refusal(write(tmp_path, "a.jsonl", [*ROWS[:1], {"text": None}]))


SHAREGPT = {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Anne Elliot."}]}


@pytest.mark.parametrize(
    "row, changes, remedies",
    [
        ({"messages": CHATS[0]}, {}, ["Set data.format: messages."]),
        ({"messages": CHATS[0]}, {"text_column": "messages"}, ["Set data.format: messages."]),
        (SHAREGPT, {}, ["Set data.format: messages.", "list of {role, content} under messages: rename the column"]),
        (SHAREGPT, {"text_column": "conversations"}, ["Set data.format: messages.", "rename the column"]),
        (SHAREGPT, {"format": "messages"}, ["list of {role, content} under messages: rename the column"]),
        ({"messages": "Who?"}, {"format": "messages"}, ["list of {role, content} under messages"]),
    ],
)
def test_a_chat_that_is_not_where_it_is_looked_for_is_told_where_to_go(tmp_path, row, changes, remedies):
    with pytest.raises(DataError) as caught:
        documents(write(tmp_path, "a.jsonl", [row]), **changes)
    assert [each for each in remedies if each not in caught.value.remedy] == []
    assert "text_column" not in caught.value.remedy


@pytest.mark.parametrize("value", [5, ["a"], {"a": 1}, True])
def test_a_value_that_is_not_text_is_named(tmp_path, value):
    message = refusal(write(tmp_path, "a.jsonl", [*ROWS[:2], {"text": value}]))
    assert f"row 3: 'text' must be a str, but is a {type(value).__name__}" in message


@pytest.mark.parametrize("line", ['{"text": "torn', "[1, 2]", "null", '"only a string"', '{"text": "caf\udce9"}'])
def test_a_broken_line_gives_its_row(tmp_path, line):
    path = write(tmp_path, "a.jsonl")
    path.write_bytes(path.read_bytes() + line.encode(errors="surrogateescape") + b"\n" + b'{"text": "ok"}\n')
    assert "a.jsonl: row" in refusal(path)
    assert ("row 4" in refusal(path)) == ("\udce9" not in line)  # undecodable bytes are met when a buffer is read


def test_a_broken_array_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text"', encoding="utf-8")
    assert "JSONDecodeError" in refusal(tmp_path / "a.json")


def test_a_broken_parquet_file_is_refused(tmp_path):
    whole = write(tmp_path, "a.parquet").read_bytes()
    for damaged in (b"PAR1 nonsense PAR1", whole[: len(whole) // 2], b""):
        (tmp_path / "a.parquet").write_bytes(damaged)
        assert "a.parquet: row 1 cannot be read" in refusal(tmp_path / "a.parquet")


def test_a_parquet_file_without_rows_is_refused_by_name(tmp_path):
    for name, kind in [("text", pa.string()), ("messages", pa.list_(pa.struct({"role": pa.string()})))]:
        parquet.write_table(pa.table({name: pa.array([], kind)}), tmp_path / "a.parquet")
        assert "a.parquet holds no rows. Remove it" in refusal(tmp_path / "a.parquet")
    write(tmp_path, "b.parquet")
    assert "a.parquet holds no rows" in refusal(tmp_path)


def test_an_empty_row_group_is_no_end(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    with parquet.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 1), table.slice(0, 0), table.slice(1)):
            writer.write_table(part)
    assert parquet.ParquetFile(tmp_path / "a.parquet").metadata.num_row_groups == 4
    assert documents(tmp_path / "a.parquet") == TEXTS


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes("café".encode("latin-1"))
    assert "not UTF-8" in refusal(tmp_path / "a.txt")


def test_a_gz_file_that_is_not_gzip_or_torn_is_refused(tmp_path):
    (tmp_path / "a.txt.gz").write_text("plain", encoding="utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-9])
    for name in ("a.txt.gz", "b.txt.gz", "c.jsonl.gz"):
        assert name in refusal(tmp_path / name)


def test_a_dataset_that_is_not_there_is_refused(tmp_path, hub_caches):
    assert "cannot be loaded" in refusal(DatasetSpec(path=str(tmp_path / "none")))


def test_a_chat_without_a_template_and_text_without_a_utf8_form_are_refused(tokenizer):
    for assistant_only_loss in (True, False):
        options = config(format="messages", assistant_only_loss=assistant_only_loss)
        with pytest.raises(DataError, match=r"a: row 1 cannot be tokenized.*chat template"):
            list(encode(rows([Chat(chat) for chat in CHATS]), tokenizer, options))
    with pytest.raises(DataError, match="a: row 2 cannot be tokenized"):
        list(encode(rows(["fine", "half a pair \ud800"]), tokenizer, config()))


def load(tmp_path: Path, text: str, tokenizer, **changes) -> Corpus:
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    return load_corpus(config(train=str(path), **changes), tokenizer)


@pytest.mark.parametrize("text", ["", " \n\t\n", "x"])
def test_text_with_nothing_to_predict_is_refused(tmp_path, tokenizer, text):
    with pytest.raises(DataError, match=r"data.train holds (no text|\d+ tokens)"):
        load(tmp_path, text, tokenizer)


def test_text_shorter_than_one_sequence_is_refused_where_it_is_packed(tmp_path, tokenizer):
    count = len(tokenizer(TEXTS[0])["input_ids"]) + 1
    with pytest.raises(DataError, match=rf"data.train holds {count} tokens, fewer than one sequence of 64.*lower"):
        load(tmp_path, TEXTS[0], tokenizer, sequence_length=64)
    alone = load(tmp_path, TEXTS[0], tokenizer, sequence_length=64, packing=False, validation_fraction=0)
    assert alone.train.tokens.shape == (1, 64) and alone.train.positions == count - 1


def test_a_missing_validation_file_is_named_as_such(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"data\.validation: no file matches"):
        load(tmp_path, TEXTS[0] * 9, tokenizer, validation=str(tmp_path / "v.txt"))


# ---------------------------------------------------------------------- tokens


def test_every_document_ends_with_one_end_of_sequence_token(tokenizer):
    end = tokenizer.eos_token_id
    found = list(encode(rows([*TEXTS, "", "  ", "done<|endoftext|>"]), tokenizer, config()))
    assert len(found) == 4 and all(document.trained is None for document in found)
    for ids, text in zip((document.ids for document in found), [*TEXTS, "done"], strict=True):
        assert ids.dtype == np.uint32 and ids[-1] == end and (ids[:-1] != end).all()
        assert tokenizer.decode(ids[:-1].tolist()) == text


# ---------------------------------------------------------------------- chats

CHATML = (
    "{% for m in messages %}<|endoftext|>{{ m['role'] }}\n{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|endoftext|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|endoftext|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{%- generation -%}{{ m['content'] }}<|endoftext|>{{ '\n' }}{% endgeneration %}"
    "{%- else %}{{ m['content'] }}<|endoftext|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|endoftext|>assistant\n{% endif %}"
)
FORGETFUL = CHATML.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'][:3] }}")

TALKS = [
    [("user", "Who is the heroine?"), ("assistant", "Anne Elliot.")],
    [("system", "Be brief."), ("user", "“Straße” — naïve 🙂?"), ("assistant", "日本 🙂"), ("user", "And?"),
     ("assistant", "\n\n  No more.  "), ("user", "Thank you; nothing else.")],
    [("user", "x"), ("tool", "{'y': 1}"), ("assistant", "One."), ("assistant", "Two.")],
]  # fmt: skip


def chat(talk: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in talk]


def by_hand(talk: list[tuple[str, str]], tokenizer) -> tuple[list[int], list[bool]]:
    """The ids of a talk in CHATML and which of them hold a byte of the assistant's: written to be obvious."""
    text, said = "", []
    for role, content in talk:
        for part, is_said in [(f"<|endoftext|>{role}\n", False), (f"{content}<|endoftext|>\n", role == "assistant")]:
            text += part
            said += [is_said] * len(part.encode())
    ids, place, trained = tokenizer(text)["input_ids"], 0, []
    for token in tokenizer.convert_ids_to_tokens(ids):  # a character of a byte-level token stands for a byte
        trained.append(any(said[place : place + len(token)]))
        place += len(token)
    assert place == len(said)
    return ids, trained


def chats(talks, tokenizer, **changes) -> list[Document]:
    return list(encode(rows([Chat(chat(talk)) for talk in talks]), tokenizer, config(format="messages", **changes)))


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "markers"])
def test_of_a_chat_exactly_the_assistants_tokens_are_trained(tokenizer, monkeypatch, template):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    for document, talk in zip(chats(TALKS, tokenizer), TALKS, strict=True):
        ids, trained = by_hand(talk, tokenizer)
        assert document.ids.tolist() == ids
        assert document.trained.tolist() == trained and any(trained) and not all(trained)


def test_markers_decide_where_there_are_any(tokenizer, monkeypatch):
    """These leave out the end of a message, and a template that rewrites earlier turns has no need of a prefix."""
    only_content = MARKED.replace("<|endoftext|>{{ '\n' }}{% endgeneration %}", "{% endgeneration %}<|endoftext|>\n")
    forgetful = only_content.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'][:3] }}")
    monkeypatch.setattr(tokenizer, "chat_template", forgetful)
    talk = [("user", "Who?"), ("assistant", "Anne Elliot."), ("user", "And?"), ("assistant", "No one.")]
    (document,) = chats([talk], tokenizer)
    assert tokenizer.decode(document.ids[document.trained].tolist()) == "AnnNo one."


@pytest.mark.parametrize("template", [CHATML, MARKED, FORGETFUL], ids=["prefixes", "markers", "forgetful"])
def test_the_whole_chat_is_learned_on_request(tokenizer, monkeypatch, template):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    for document, talk in zip(chats(TALKS, tokenizer, assistant_only_loss=False), TALKS, strict=True):
        assert document.ids.tolist() == tokenizer.apply_chat_template(chat(talk), return_dict=False)
        assert document.trained is None


@pytest.mark.parametrize(
    "template, talk, detail",
    [
        (CHATML, [("user", "Who?"), ("system", "?")], "has no token of the assistant's to learn"),
        (MARKED, [("user", "Who?")], "has no token of the assistant's to learn"),
        (MARKED.replace("<|endoftext|>{{ '\n' }}{% endgen", "{% endgen"), [("user", "Who?"), ("assistant", "")],
         "has no token of the assistant's to learn"),
        (FORGETFUL, TALKS[1], "message 3 cannot be told from its context"),
        (CHATML + "!", TALKS[0] * 2, "message 2 cannot be told from its context"),
        (CHATML, [("assistant", "Hello."), ("user", "Who?")], "begins with the assistant's message"),
    ],
)  # fmt: skip
def test_a_chat_whose_answers_cannot_be_found_is_refused_by_its_row(tokenizer, monkeypatch, template, talk, detail):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(DataError) as caught:
        list(encode(rows(["not this one", Chat(chat(talk))])[1:], tokenizer, config(format="messages")))
    assert str(caught.value).startswith("a: row 2") and detail in str(caught.value)
    assert "data.assistant_only_loss: false" in caught.value.remedy


def test_a_file_of_chats_becomes_targets_on_the_answers_alone(tmp_path, tokenizer, monkeypatch):
    """The first token of an answer is predicted from the last of its prompt; what packing cuts begins a piece."""
    path = write(tmp_path, "a.parquet", [{"messages": chat(talk)} for talk in TALKS])
    for template, length in itertools.product((CHATML, MARKED), (8, 11, 400)):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        options = config(
            train=str(path), format="messages", sequence_length=length, packing=length < 400, validation_fraction=0
        )
        sequences = load_corpus(options, tokenizer).train
        expected, offset = [], 0
        for ids, trained in (by_hand(talk, tokenizer) for talk in TALKS):
            parts = cut(list(zip(ids, trained, strict=True)), offset, length)
            expected += [pair[0] for part in parts for pair in part[1:] if pair[1]]
            offset = offset + len(ids) if options.packing else 0
        assert sequences.gold_ids().tolist() == expected
        assert sequences.target_mask.any(axis=1).all()
    whole = load_corpus(options.model_copy(update={"assistant_only_loss": False}), tokenizer).train
    assert np.array_equal(whole.tokens, sequences.tokens) and whole.positions > sequences.positions
    assert Corpus(whole, whole).sha256() != Corpus(sequences, sequences).sha256()


# ---------------------------------------------------------------------- packing

some_documents = st.lists(st.lists(st.integers(1, 2**31), min_size=2, max_size=30), min_size=1, max_size=12)


def packed_lists(lists: list[list[int]], length: int, packing: bool):
    documents = [Document(np.asarray(ids, np.uint32)) for ids in lists]
    return pack(documents, config(sequence_length=length, packing=packing), pad_id=0)


def pieces(sequences) -> list[list[int]]:
    """Every document or piece of one, padding included, in order."""
    bounds = [*np.flatnonzero(sequences.document_start.reshape(-1)).tolist(), sequences.tokens.size]
    flat = sequences.tokens.reshape(-1).tolist()
    return [flat[start:stop] for start, stop in itertools.pairwise(bounds)]


def cut(ids: list, offset: int, length: int) -> list[list]:
    """``ids`` laid from place ``offset`` on and cut wherever a sequence ends: written to be obvious, not quick."""
    found: list[list] = []
    for place, token in enumerate(ids, offset):
        if place == offset or place % length == 0:
            found.append([])
        found[-1].append(token)
    return found


@settings(max_examples=150, deadline=None)
@given(lists=some_documents, length=st.integers(8, 20))
def test_packing_loses_nothing_and_cuts_only_at_boundaries(lists, length):
    total = sum(map(len, lists))
    if total < length:
        with pytest.raises(DataError, match="fewer than one sequence"):
            packed_lists(lists, length, True)
        return
    sequences = packed_lists(lists, length, True)
    expected, offset = [], 0
    for ids in lists:
        expected += cut(ids, offset, length)
        offset += len(ids)
    padding = -total % length
    assert pieces(sequences) == expected + [[0] * padding] * bool(padding)
    assert sequences.tokens.shape == (-(-total // length), length)


@settings(max_examples=150, deadline=None)
@given(lists=some_documents, length=st.integers(8, 20))
def test_without_packing_each_document_begins_a_sequence(lists, length):
    sequences = packed_lists(lists, length, False)
    expected = []
    for ids in lists:
        expected += cut(ids, 0, length)
        expected += [[0] * (-len(ids) % length)] * bool(-len(ids) % length)
    assert pieces(sequences) == expected
    assert len(sequences) == sum(-(-len(ids) // length) for ids in lists)


@settings(max_examples=150, deadline=None)
@given(lists=some_documents, length=st.integers(8, 20), packing=st.booleans())
def test_a_target_stands_exactly_where_the_next_token_is_in_the_same_piece_of_text(lists, length, packing):
    if packing and sum(map(len, lists)) < length:
        return
    sequences = packed_lists(lists, length, packing)
    for row in range(len(sequences)):
        for t in range(length):
            inside = t + 1 < length and not sequences.document_start[row, t + 1]
            is_text = sequences.tokens[row, t] != 0  # ids begin at 1: 0 is padding only
            assert sequences.target_mask[row, t] == (inside and is_text)
    gold = sequences.gold_ids()
    assert (gold != 0).all()
    texts = [piece for piece in pieces(sequences) if piece[0] != 0]
    assert gold.tolist() == [token for piece in texts for token in piece[1:]]


@settings(max_examples=150, deadline=None)
@given(
    talks=st.lists(
        st.lists(st.tuples(st.integers(1, 2**31), st.booleans()), min_size=2, max_size=30), min_size=1, max_size=12
    ),
    length=st.integers(8, 20),
    packing=st.booleans(),
)
def test_a_masked_document_has_targets_where_the_next_token_is_trained(talks, length, packing):
    """Sequences without any are left out, with what they hold."""
    if packing and sum(map(len, talks)) < length:
        return
    expected, offset = {}, 0  # number of the sequence: (tokens, tokens to be predicted)
    for talk in talks:
        for part in cut(talk, offset, length):
            tokens, gold = expected.setdefault(offset // length, ([], []))
            tokens += [token for token, _ in part]
            gold += [token for token, trained in part[1:] if trained]
            offset += len(part)
        offset += 0 if packing else -offset % length
    kept = [each for each in expected.values() if each[1]]
    documents = [Document(*map(np.asarray, zip(*talk, strict=True))) for talk in talks]
    documents = [Document(each.ids.astype(np.uint32), each.trained) for each in documents]
    if not kept:
        with pytest.raises(DataError, match="nothing predicts it"):
            pack(documents, config(sequence_length=length, packing=packing))
        return
    sequences = pack(documents, config(sequence_length=length, packing=packing))
    assert len(sequences) == len(kept)
    for row, (tokens, gold) in enumerate(kept):
        assert sequences.tokens[row].tolist() == tokens + [0] * (length - len(tokens))
        assert sequences.select([row]).gold_ids().tolist() == gold


@settings(max_examples=100, deadline=None)
@given(lists=some_documents, length=st.integers(8, 20), packing=st.booleans())
def test_positions_count_from_the_start_of_each_piece(lists, length, packing):
    if packing and sum(map(len, lists)) < length:
        return
    sequences = packed_lists(lists, length, packing)
    positions = position_ids(sequences.document_start).reshape(-1).tolist()
    assert positions == [place for piece in pieces(sequences) for place in range(len(piece))]


@settings(max_examples=100, deadline=None)
@given(
    talks=st.lists(
        st.lists(st.tuples(st.integers(1, 2**31), st.booleans()), min_size=2, max_size=40), min_size=1, max_size=12
    ),
    masked=st.booleans(),
    length=st.integers(8, 12),
    packing=st.booleans(),
    block=st.integers(1, 3),
)
def test_blocks_hold_what_is_packed_at_once(talks, masked, length, packing, block):
    columns = [map(np.asarray, zip(*talk, strict=True)) for talk in talks]
    documents = [Document(ids.astype(np.uint32), trained if masked else None) for ids, trained in columns]
    options, found = config(sequence_length=length, packing=packing), []
    for size in (block, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kd.data.BLOCK_SEQUENCES", size)
            try:
                blocks = list(packed(documents, options))
            except DataError as error:
                found.append(str(error))
                continue
        joined = type(blocks[0]).concatenate(blocks)
        found.append([getattr(joined, name).tolist() for name in joined.__dataclass_fields__])
    assert found[0] == found[1]


def test_a_block_takes_no_more_documents_than_fill_it():
    read = itertools.count()
    endless = (Document(np.full(20, next(read) + 1, np.uint32)) for _ in itertools.repeat(0))
    blocks = packed(endless, config(sequence_length=10))
    for end in (32, 64, 96):  # 64 sequences of 10 tokens a block
        assert len(next(blocks)) == 64
        assert next(read) - end in (0, 1, 2)  # each question counts too


@settings(max_examples=100, deadline=None)
@given(lists=some_documents, length=st.integers(8, 20))
def test_the_length_of_a_sequence_ends_with_the_last_token_that_is_predicted(lists, length):
    sequences = packed_lists(lists, length, False)
    expected = [len(part) if len(part) > 1 else 0 for ids in lists for part in cut(ids, 0, length)]
    assert text_lengths(sequences).tolist() == expected


# ---------------------------------------------------------------------- streams


def dataset(folder: Path, texts: list[str], files: int = 1) -> DatasetSpec:
    """A dataset in a folder of its own, its rows in so many files."""
    folder.mkdir()
    for number, part in enumerate(np.array_split(np.array(texts, dtype=object), files)):
        write(folder, f"train-{number:05}.jsonl", [{"text": text} for text in part])
    return DatasetSpec(path=str(folder))


@pytest.fixture
def paragraphs(tiny_text) -> list[str]:
    return [part for part in tiny_text.read_text(encoding="utf-8").split("\n\n") if part.strip()]


def test_a_stream_gives_the_first_sequences_and_reads_no_further(tmp_path, tokenizer, paragraphs, hub_caches):
    spec = dataset(tmp_path / "set", paragraphs * 8, files=2)
    whole = load_corpus(config(train=spec, sequence_length=16, validation_fraction=0), tokenizer)
    second = tmp_path / "set" / "train-00001.jsonl"
    second.write_text("not json\n", encoding="utf-8")
    options = config(train=spec, sequence_length=16, validation_fraction=0, max_train_samples=30)
    with pytest.raises(DataError, match="cannot be loaded: DatasetGenerationError"):
        load_corpus(options, tokenizer)
    streamed = load_corpus(options.model_copy(update={"streaming": True}), tokenizer)
    assert np.array_equal(streamed.train.tokens, whole.train.tokens[:30])
    assert np.array_equal(streamed.train.document_start, whole.train.document_start[:30])


def test_text_is_one_cache_whether_streamed_or_not(tmp_path, tokenizer, paragraphs, hub_caches):
    spec = dataset(tmp_path / "set", paragraphs, files=3)
    options = config(train=spec, sequence_length=32, validation_fraction=0, max_train_samples=40)
    hashes = {load_corpus(options.model_copy(update=each), tokenizer).sha256() for each in STREAMED_OR_NOT}
    assert len(hashes) == 1


STREAMED_OR_NOT = ({"streaming": True}, {"streaming": False})


@pytest.mark.parametrize("fraction", [None, 0.1, 0.5])
def test_of_a_stream_what_is_held_out_comes_after_what_is_kept(tmp_path, tokenizer, paragraphs, hub_caches, fraction):
    spec = dataset(tmp_path / "set", paragraphs)
    options = config(train=spec, sequence_length=16, validation_fraction=0)
    whole = load_corpus(options, tokenizer).train.tokens
    kept = {"validation_fraction": fraction, "max_train_samples": 60, "streaming": True}
    split = load_corpus(options.model_copy(update=kept), tokenizer)
    held = len(split.validation)
    assert len(split.train) == 60 and held == max(1, round((60 + held) * (fraction or 0.02)))
    assert np.array_equal(np.concatenate([split.train.tokens, split.validation.tokens]), whole[: 60 + held])


def test_a_stream_that_ends_early_gives_what_it_has(tmp_path, tokenizer, paragraphs, hub_caches):
    spec = dataset(tmp_path / "set", paragraphs)
    options = config(train=spec, sequence_length=16)
    whole = load_corpus(options, tokenizer)
    ended = load_corpus(options.model_copy(update={"streaming": True, "max_train_samples": 10**6}), tokenizer)
    assert ended.sha256() == whole.sha256()


def test_a_held_out_stream_ends_where_it_is_told(tmp_path, tokenizer, tiny_text, paragraphs, hub_caches):
    spec = dataset(tmp_path / "set", paragraphs)
    counts = {"max_train_samples": 9, "max_eval_samples": 7}
    options = config(train=str(tiny_text), validation=spec, sequence_length=16, streaming=True, **counts)
    corpus = load_corpus(options, tokenizer)
    assert (len(corpus.train), len(corpus.validation)) == (9, 7)


def test_a_slice_of_a_stream_is_refused(tmp_path, paragraphs, hub_caches):
    spec = dataset(tmp_path / "set", paragraphs).model_copy(update={"split": "train[:10%]"})
    assert "a stream cannot be sliced, but its split is 'train[:10%]'" in refusal(
        spec, streaming=True, max_train_samples=1
    )


# ---------------------------------------------------------------------- mixtures


def sequences_of(token: int, count: int, length: int = 16, real: int | None = None):
    """``count`` sequences of ``real`` tokens each, the rest padding; every token is ``token``."""
    documents = [Document(np.full(real or length, token, np.uint32)) for _ in range(count)]
    return pack(documents, config(sequence_length=length, packing=False))


def shares(sequences, texts: int) -> np.ndarray:
    """The share of each text in the tokens, by the first of each sequence."""
    lengths = text_lengths(sequences)
    given = np.array([lengths[sequences.tokens[:, 0] == number + 1].sum() for number in range(texts)])
    return given / given.sum()


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.floats(0.2, 5), min_size=2, max_size=4),
    real=st.lists(st.integers(2, 16), min_size=4, max_size=4),
)
def test_shares_are_never_off_by_more_than_a_sequence_of_each_text(weights, real):
    texts = [sequences_of(number + 1, 200, real=real[number]) for number in range(len(weights))]
    mixed, ended = mix([iter([text]) for text in texts], weights, 60)
    assert ended is None and len(mixed) == 60
    for count in range(1, 61):
        given = shares(mixed.select(slice(count)), len(weights)) * text_lengths(mixed)[:count].sum()
        ahead = given / np.array(weights)  # tokens for each unit of weight
        assert ahead.max() - ahead.min() <= max(np.array(real[: len(weights)]) / np.array(weights)) + 1e-9


def test_a_mixture_ends_with_the_first_text_that_does():
    texts = [sequences_of(1, 100), sequences_of(2, 10), sequences_of(3, 100)]
    mixed, ended = mix([iter([text]) for text in texts], [2.0, 1.0, 1.0])
    assert ended == 1
    assert np.bincount(mixed.tokens[:, 0])[1:].tolist() == [21, 10, 10]
    assert mixed.tokens[:8, 0].tolist() == [1, 2, 3, 1, 1, 2, 3, 1]


def told(corpus_options: DataConfig, tokenizer) -> tuple[Corpus, list[str]]:
    """The corpus, and the warnings that came with it."""
    events: list[Event] = []
    corpus = load_corpus(corpus_options, tokenizer, Monitor(events.append))
    return corpus, [event.data["message"] for event in events if event.type == "warning"]


def kind_of(text: str) -> int:
    """Which of three kinds of text this is a piece of: capitals, small letters, figures."""
    return int(np.argmax([sum(map(test, text)) for test in (str.isupper, str.islower, str.isdigit)]))


@pytest.mark.parametrize("packing", [True, False])
def test_shares_of_a_real_mixture_are_within_two_percent(tmp_path, tokenizer, paragraphs, hub_caches, packing):
    texts = ["\n\n".join(paragraphs[:20]).upper(), *(each.upper() for each in paragraphs[20:])]
    first = dataset(tmp_path / "a", texts).model_copy(update={"weight": 3.0})
    second = dataset(tmp_path / "b", [each.lower() for each in paragraphs]).model_copy(update={"weight": 0.5})
    figures = ["".join(str(ord(letter) % 10) for letter in each) for each in paragraphs[:40]]
    file = write(tmp_path, "c.jsonl", [{"text": text} for text in figures])  # a file weighs 1
    options = config(train=(first, second, str(file)), sequence_length=32, packing=packing, validation_fraction=0.1)
    corpus, warnings = told(options, tokenizer)
    assert len(warnings) == 1 and "has no more text: the mixture ends with it" in warnings[0]
    for part in (corpus.train, corpus.train.select(slice(len(corpus.train) // 2))):
        kinds = [kind_of(tokenizer.decode(row.tolist(), skip_special_tokens=True)) for row in part.tokens]
        tokens = np.bincount(kinds, text_lengths(part))
        assert len(part) > 100
        np.testing.assert_allclose(tokens / tokens.sum(), np.array([3, 0.5, 1]) / 4.5, atol=0.02)


def test_every_source_of_a_mixture_keeps_its_own_order(tmp_path, tokenizer, paragraphs, hub_caches):
    half = len(paragraphs) // 2
    first = dataset(tmp_path / "a", paragraphs[:half]).model_copy(update={"weight": 2.0})
    second = dataset(tmp_path / "b", paragraphs[half:])
    options = config(train=(first, second), sequence_length=32, validation_fraction=0)
    mixed = [row.tobytes() for row in load_corpus(options, tokenizer).train.tokens]
    for source in (first, second):
        alone = load_corpus(options.model_copy(update={"train": (source,)}), tokenizer).train.tokens
        own = [row.tobytes() for row in alone]
        found = [row for row in mixed if row in own]
        assert found == own[: len(found)] and len(found) > 20


def test_without_a_weight_all_text_is_read_one_source_after_the_other(tmp_path, tokenizer, paragraphs, hub_caches):
    half = len(paragraphs) // 2
    both = (dataset(tmp_path / "a", paragraphs[:half]), dataset(tmp_path / "b", paragraphs[half:]))
    options = config(train=both, sequence_length=32, validation_fraction=0)
    corpus, warnings = told(options, tokenizer)
    whole = load_corpus(options.model_copy(update={"train": (dataset(tmp_path / "c", paragraphs),)}), tokenizer)
    assert warnings == [] and corpus.sha256() == whole.sha256()


def test_streams_are_mixed_in_equal_shares_without_a_weight(tmp_path, tokenizer, paragraphs, hub_caches):
    half = len(paragraphs) // 2
    both = (dataset(tmp_path / "a", paragraphs[:half]), dataset(tmp_path / "b", paragraphs[half:]))
    options = config(train=both, sequence_length=32, validation_fraction=0, max_train_samples=20, streaming=True)
    corpus, warnings = told(options, tokenizer)
    alone = [load_corpus(options.model_copy(update={"train": (each,)}), tokenizer).train.tokens for each in both]
    assert warnings == []
    assert np.array_equal(corpus.train.tokens[0::2], alone[0][:10])
    assert np.array_equal(corpus.train.tokens[1::2], alone[1][:10])


def test_weights_name_the_data_of_a_cache(tmp_path, tokenizer, tiny_teacher, paragraphs, hub_caches):
    """Other weights are other sequences, so another cache; the same weights are the same one."""
    from kd.jobfile import parse_config
    from kd.teacher import make_plan

    half = len(paragraphs) // 2
    first, second = dataset(tmp_path / "a", paragraphs[:half]), dataset(tmp_path / "b", paragraphs[half:])

    def fingerprint(weight: float, **changes) -> str:
        train = [first.model_dump(), second.model_dump() | {"weight": weight}]
        data = {"train": train, "sequence_length": 32, "max_train_samples": 30} | changes
        job = parse_config({"kind": "precompute", "teacher": {"model": str(tiny_teacher)}, "data": data})
        return make_plan(job, tokenizer, load_corpus(job.data, tokenizer), tiny_teacher).identity.fingerprint

    found = [fingerprint(1), fingerprint(2), fingerprint(3), fingerprint(2, streaming=True), fingerprint(2)]
    assert len(set(found[:3])) == 3 and found[4] == found[1]
    assert found[3] != found[1], "a stream is held out from where it is cut, not from its end"
    same = {fingerprint(2, streaming=each, validation_fraction=0) for each in (True, False)}
    assert len(same) == 1


@pytest.mark.parametrize(
    "texts, detail",
    [
        (["", " "], r"data\.train\.1 holds no text"),
        (["Anne Elliot."], r"data\.train\.1 holds \d+ tokens, fewer than one"),
    ],
)
def test_a_source_of_a_mixture_without_text_enough_is_named(tmp_path, tokenizer, paragraphs, hub_caches, texts, detail):
    first = dataset(tmp_path / "a", paragraphs).model_copy(update={"weight": 2.0})
    options = config(train=(first, dataset(tmp_path / "b", texts)), sequence_length=32)
    with pytest.raises(DataError, match=detail):
        load_corpus(options, tokenizer)


# ---------------------------------------------------------------------- hold-out


def test_held_out_sequences_are_the_last_and_none_is_in_both(tiny_text, tokenizer):
    def load_with(**changes):
        return load_corpus(config(train=str(tiny_text), sequence_length=32, **changes), tokenizer)

    whole = load_with(validation_fraction=0)
    assert len(whole.validation) == 0
    for fraction, expected in [(0.1, round(0.1 * len(whole.train))), (None, max(1, round(0.02 * len(whole.train))))]:
        split = load_with(validation_fraction=fraction)
        assert len(split.validation) == expected
        joined = np.concatenate([split.train.tokens, split.validation.tokens])
        assert np.array_equal(joined, whole.train.tokens)
        assert split.sha256() != whole.sha256()
    first = load_with(max_train_samples=5, max_eval_samples=1)
    assert np.array_equal(first.train.tokens, whole.train.tokens[:5]) and len(first.validation) == 1


def test_validation_files_are_packed_like_training_files(tmp_path, tiny_text, tokenizer):
    both = config(train=str(tiny_text), validation=str(tiny_text), sequence_length=32)
    corpus = load_corpus(both, tokenizer)
    assert np.array_equal(corpus.train.tokens, corpus.validation.tokens)


def test_too_few_sequences_to_hold_one_out_is_refused(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"1 sequence\(s\), too few to hold 1 out.*validation_fraction"):
        load(tmp_path, "It was a dark", tokenizer, packing=False)


def test_the_hash_sees_every_token_boundary_and_split(tokenizer, tiny_text):
    corpus = load_corpus(config(train=str(tiny_text), sequence_length=32), tokenizer)
    tokens, starts, targets = (getattr(corpus.train, name).copy() for name in corpus.train.__dataclass_fields__)
    tokens[0, 0] ^= 1
    starts[0, 5] = True
    targets[0, 4] = starts[0, 5] = False
    variants = [
        Corpus(type(corpus.train)(tokens, corpus.train.document_start, corpus.train.target_mask), corpus.validation),
        Corpus(type(corpus.train)(corpus.train.tokens, corpus.train.document_start, targets), corpus.validation),
        Corpus(corpus.validation, corpus.train),
    ]
    hashes = {each.sha256() for each in [corpus, *variants]}
    assert len(hashes) == 4
    again = load_corpus(config(train=str(tiny_text), sequence_length=32), tokenizer)
    assert again.sha256() == corpus.sha256()


def test_packed_chats_have_another_name_than_when_attention_joined_them():
    """Caches of that time hold what a teacher said with the chat before in sight; those of plain text are as good."""
    ids = np.arange(1, 33, dtype=np.uint32)
    plain = pack([Document(ids[:20]), Document(ids)], config(sequence_length=16))
    chats = pack([Document(ids[:8], ids[:8] > 4), Document(ids[:8], ids[:8] > 4)], config(sequence_length=16))
    for sequences, same in ((plain, True), (chats, False)):
        digest = hashlib.sha256()
        for part in (sequences, sequences.select(slice(0))):
            digest.update(np.asarray(part.tokens.shape, np.int64).tobytes())
            for array in (part.tokens.astype("<u4"), part.document_start, part.target_mask):
                digest.update(array.tobytes())
        assert (Corpus(sequences, sequences.select(slice(0))).sha256() == digest.hexdigest()) == same
