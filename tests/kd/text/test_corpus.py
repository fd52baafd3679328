"""Text to packed sequences: all formats give the same tokens, and none are lost."""

import gzip
import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from kd.config.data import DatasetSpec
from kd.errors import DataError
from kd.text.chat.chat import Chat
from kd.text.corpus import Corpus, describe_held_out, load_corpus
from kd.text.packing import Document, pack_documents
from kd.text.reading.notes import TextNotes
from kd.text.sources import find_documents, read_documents
from kd.text.text_files import find_files
from tests.support.kd.text import (
    ROWS,
    TEXTS,
    config,
    cut,
    documents,
    encode_documents,
    refusal,
    rows,
    write,
)

# ---------------------------------------------------------------------- reading


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.jsonl.gz", "a.jsonl.zst"])
def test_rows_read_the_same_from_every_format(tmp_path, name):
    assert documents(write(tmp_path, name)) == TEXTS


def test_a_text_file_is_one_document_to_the_last_byte(tmp_path):
    for text in TEXTS:
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        (tmp_path / "a.md").write_bytes(
            b"\xef\xbb\xbf" + text.encode()
        )  # a byte order mark is no text
        (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
        packed = pa.compress(text.encode(), codec="zstd", asbytes=True)
        (tmp_path / "a.txt.zst").write_bytes(packed)
        for name in ("a.txt", "a.md", "a.txt.gz", "a.txt.zst"):
            assert documents(tmp_path / name) == [text]


def test_json_lines_under_the_name_json_and_blank_lines_between(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "one"}\n\n{"text": "two"}', encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(
        '\ufeff{"text": "one"}\r\n\r\n{"text": "two"}\r\n', encoding="utf-8"
    )
    assert documents(tmp_path / "a.json") == documents(tmp_path / "b.jsonl") == ["one", "two"]


def test_the_configured_format_beats_the_suffix(tmp_path):
    write(tmp_path, "a.jsonl").rename(tmp_path / "a.data")
    write(tmp_path, "b.parquet").rename(tmp_path / "b.data")
    assert documents(tmp_path / "a.data", format="jsonl") == TEXTS
    assert documents(tmp_path / "b.data", format="parquet") == TEXTS
    assert documents(tmp_path / "a.data", format="text") == [
        (tmp_path / "a.data").read_text(encoding="utf-8")
    ]


def test_another_column_can_hold_the_text(tmp_path):
    rows = [{"body": text, "text": "wrong"} for text in TEXTS]
    for name in ("a.jsonl", "a.parquet"):
        assert documents(write(tmp_path, name, rows), text_column="body") == TEXTS


def test_folders_and_globs_are_read_in_sorted_order(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    names = ["b.txt", "a.txt", "deep/c.md", "deep/er/d.txt"]
    for name in [*names, "skipped.bin"]:
        (tmp_path / name).write_text(f"text of {name}", encoding="utf-8")
    found = find_files(str(tmp_path))
    assert [path.relative_to(tmp_path).as_posix() for path in found.files] == sorted(names)
    assert found.left_out == {"files without an ending of text": ["skipped.bin"]}
    assert documents(tmp_path) == [f"text of {name}" for name in sorted(names)]
    assert documents(f"{tmp_path}/*.txt") == ["text of a.txt", "text of b.txt"]
    assert documents(f"{tmp_path}/**/*.txt") == [
        "text of a.txt",
        "text of b.txt",
        "text of deep/er/d.txt",
    ]
    assert find_files("a.txt", tmp_path).files == [tmp_path / "a.txt"]


def test_several_sources_follow_each_other(tmp_path):
    sources = [str(write(tmp_path, name)) for name in ("b.parquet", "a.jsonl")]
    expected = [
        (f"{path}: row {row}", text) for path in sources for row, text in enumerate(TEXTS, 1)
    ]
    assert list(read_documents(sources, "train", config())) == expected


def test_a_local_dataset_folder_is_read_with_its_splits(tmp_path, hub_caches):
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder, "train.jsonl")
    (folder / "train.jsonl.json").write_text('{"text": "About the file beside it."}')
    write(folder, "test.jsonl", ROWS[:1])
    assert documents(DatasetSpec(path=str(folder))) == TEXTS
    assert documents(DatasetSpec(path=str(folder), split="train[1:]")) == TEXTS[1:]
    assert documents(DatasetSpec(path=str(folder), split="test")) == TEXTS[:1]
    with pytest.raises(DataError, match="split 'dev'"):
        documents(DatasetSpec(path=str(folder), split="dev"))


CHATS = [
    [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Anne Elliot."}]
] * 2
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_messages_are_rendered_by_the_chat_template(tmp_path, tokenizer, monkeypatch, name):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    path = write(tmp_path, name, [{"messages": chat} for chat in CHATS])
    options = config(
        train=str(path), format="messages", assistant_only_loss=False, validation_fraction=0
    )
    corpus = load_corpus(options, tokenizer)
    rendered = "[user] Who?<|endoftext|>[assistant] Anne Elliot.<|endoftext|>"
    ids = tokenizer(rendered)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 2
    flat = corpus.train.tokens.reshape(-1).tolist()
    assert flat[: 2 * len(ids)] == ids * 2
    assert corpus.train.document_start.reshape(-1)[len(ids)]


# ---------------------------------------------------------------------- errors


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


@pytest.mark.parametrize("bad", [{"text": None}, {"body": "x"}])
def test_a_row_without_text_is_left_out_and_counted_and_too_many_are_refused(tmp_path, bad):
    good = [{"text": f"row {number}"} for number in range(300)]
    path = write(tmp_path, "a.jsonl", [*good[:200], bad, *good[200:], bad, {"text": " "}])
    notes = TextNotes()
    found = list(find_documents([str(path)], "train", config(), notes=notes))
    assert [each.content for each in found] == [*(each["text"] for each in good), " "]
    missing, blank = notes.list_notices()
    assert (missing.count, missing.example) == (2, f"{path}: row 201")
    assert "without text" in missing.what and "white space" in blank.what
    assert "a.jsonl: row 1" in refusal(write(tmp_path, "a.jsonl", [bad] * 5))
    many = refusal(write(tmp_path, "a.jsonl", [*good[:50], *[bad] * 500, *good]))
    assert "a.jsonl: row 51" in many and "Of 150 rows 100 are like that" in many


@pytest.mark.parametrize(
    "value, name",
    [
        (5, "a number"),
        (0.5, "a number"),
        (["a"], "a list"),
        ({"a": 1}, "an object with keys"),
        (True, "true or false"),
    ],
)
def test_a_value_that_is_not_text_is_named(tmp_path, value, name):
    message = refusal(write(tmp_path, "a.jsonl", [*ROWS[:2], {"text": value}]))
    assert f"row 3: 'text' must be a text, but is {name}" in message


@pytest.mark.parametrize(
    "line", ['{"text": "torn', "[1, 2]", "null", '"only a string"', '{"text": "caf\udce9"}']
)
def test_a_broken_line_gives_its_row(tmp_path, line):
    path = write(tmp_path, "a.jsonl")
    path.write_bytes(
        path.read_bytes() + line.encode(errors="surrogateescape") + b"\n" + b'{"text": "ok"}\n'
    )
    assert "a.jsonl: row" in refusal(path)
    assert ("row 4" in refusal(path)) == (
        "\udce9" not in line
    )  # undecodable bytes are met when a buffer is read


def test_plain_text_in_a_format_of_rows_is_told_what_the_format_reads(tmp_path):
    (tmp_path / "novel.txt").write_text("Persuasion\n", encoding="utf-8")
    with pytest.raises(DataError) as refused:
        documents(tmp_path / "novel.txt", format="messages")
    assert "data.format messages reads JSON Lines or Parquet." in refused.value.remedy


def test_an_array_may_have_white_space_before_it(tmp_path):
    (tmp_path / "a.json").write_text("\ufeff\r\n  " + json.dumps(ROWS, indent=1), encoding="utf-8")
    assert documents(tmp_path / "a.json") == TEXTS


def test_a_broken_array_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text"', encoding="utf-8")
    assert "JSONDecodeError" in refusal(tmp_path / "a.json")


def test_a_broken_parquet_file_is_refused(tmp_path):
    whole = write(tmp_path, "a.parquet").read_bytes()
    for damaged in (b"PAR1 nonsense PAR1", whole[: len(whole) // 2], b""):
        (tmp_path / "a.parquet").write_bytes(damaged)
        assert "a.parquet: row 1 cannot be read" in refusal(tmp_path / "a.parquet")


def test_a_parquet_file_without_rows_is_refused_by_name(tmp_path):
    for name, kind in [
        ("text", pa.string()),
        ("messages", pa.list_(pa.struct({"role": pa.string()}))),
    ]:
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
    (tmp_path / "d.txt.zst").write_text("plain", encoding="utf-8")
    packed = pa.compress(b'{"text": "a"}\n' * 99, codec="zstd", asbytes=True)
    (tmp_path / "e.jsonl.zst").write_bytes(packed[:-9])
    for name in ("a.txt.gz", "b.txt.gz", "c.jsonl.gz", "d.txt.zst", "e.jsonl.zst"):
        found = refusal(tmp_path / name)
        assert name in found and "cannot be read" in found and "UTF-8" not in found


def test_a_dataset_that_is_not_there_is_refused(tmp_path, hub_caches):
    assert "there is no folder" in refusal(DatasetSpec(path=str(tmp_path / "none")))


def test_a_chat_without_a_template_and_text_without_a_utf8_form_are_refused(tokenizer):
    for assistant_only_loss in (True, False):
        options = config(format="messages", assistant_only_loss=assistant_only_loss)
        with pytest.raises(DataError, match=r"a: row 1 cannot be tokenized.*chat template"):
            list(encode_documents(rows([Chat(chat) for chat in CHATS]), tokenizer, options))
    with pytest.raises(DataError, match="a: row 2 cannot be tokenized"):
        list(encode_documents(rows(["fine", "half a pair \ud800"]), tokenizer, config()))


@pytest.mark.parametrize("place", [1, 2, 5, 9])
def test_a_text_that_cannot_be_tokenized_is_named_among_those_that_are_read_with_it(
    tokenizer, place
):
    texts = ["fine"] * 9
    texts[place - 1] = "half a pair \ud800"
    encoded = encode_documents(rows(texts), tokenizer, config())
    assert len(list(itertools.islice(encoded, place - 1))) == place - 1
    with pytest.raises(DataError, match=f"a: row {place} cannot be tokenized"):
        list(encoded)


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
    with pytest.raises(
        DataError, match=rf"data.train holds {count} tokens, fewer than one sequence of 64.*lower"
    ):
        load(tmp_path, TEXTS[0], tokenizer, sequence_length=64)
    alone = load(
        tmp_path, TEXTS[0], tokenizer, sequence_length=64, packing=False, validation_fraction=0
    )
    assert alone.train.tokens.shape == (1, 64) and alone.train.positions == count - 1


def test_a_missing_validation_file_is_named_as_such(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"data\.validation: no file matches"):
        load(tmp_path, TEXTS[0] * 9, tokenizer, validation=str(tmp_path / "v.txt"))


# ---------------------------------------------------------------------- tokens


def test_every_document_ends_with_one_end_of_sequence_token(tokenizer):
    end = tokenizer.eos_token_id
    found = list(
        encode_documents(rows([*TEXTS, "", "  ", "done<|endoftext|>"]), tokenizer, config())
    )
    assert len(found) == 4 and all(document.trained is None for document in found)
    for ids, text in zip((document.ids for document in found), [*TEXTS, "done"], strict=True):
        assert ids.dtype == np.uint32 and ids[-1] == end and (ids[:-1] != end).all()
        assert tokenizer.decode(ids[:-1].tolist()) == text


# ---------------------------------------------------------------------- chats

CHATML = (
    "{% for m in messages %}<|endoftext|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|endoftext|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|endoftext|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{%- generation -%}{{ m['content'] }}<|endoftext|>{{ '\n' }}{% endgeneration %}"
    "{%- else %}{{ m['content'] }}<|endoftext|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|endoftext|>assistant\n{% endif %}"
)
FORGETFUL = CHATML.replace(
    "{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'][:3] }}"
)

TALKS = [
    [("user", "Who is the heroine?"), ("assistant", "Anne Elliot.")],
    [("system", "Be brief."), ("user", "“Straße” — naïve 🙂?"), ("assistant", "日本 🙂"),
     ("user", "And?"), ("assistant", "\n\n  No more.  "), ("user", "Thank you; nothing else.")],
    [("user", "x"), ("tool", "{'y': 1}"), ("assistant", "One."), ("assistant", "Two.")],
]  # fmt: skip


def chat(talk: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in talk]


def by_hand(talk: list[tuple[str, str]], tokenizer) -> tuple[list[int], list[bool]]:
    """Encode a chat in CHATML in the most obvious way; return ids and which are the assistant's."""
    text = ""
    spoken = []
    for role, content in talk:
        for part, is_spoken in [
            (f"<|endoftext|>{role}\n", False),
            (f"{content}<|endoftext|>\n", role == "assistant"),
        ]:
            text += part
            spoken += [is_spoken] * len(part.encode())
    ids = tokenizer(text)["input_ids"]
    place = 0
    trained = []
    for token in tokenizer.convert_ids_to_tokens(
        ids
    ):  # a character of a byte-level token stands for a byte
        trained.append(any(spoken[place : place + len(token)]))
        place += len(token)
    assert place == len(spoken)
    return ids, trained


def chats(talks, tokenizer, **changes) -> list[Document]:
    return list(
        encode_documents(
            rows([Chat(chat(talk)) for talk in talks]),
            tokenizer,
            config(format="messages", **changes),
        )
    )


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "markers"])
def test_of_a_chat_exactly_the_assistants_tokens_are_trained(tokenizer, monkeypatch, template):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    for document, talk in zip(chats(TALKS, tokenizer), TALKS, strict=True):
        ids, trained = by_hand(talk, tokenizer)
        assert document.ids.tolist() == ids
        assert document.trained.tolist() == trained and any(trained) and not all(trained)


def test_markers_decide_where_there_are_any(tokenizer, monkeypatch):
    """Markers can exclude the end of a message, and need no prompt that begins the whole chat."""
    only_content = MARKED.replace(
        "<|endoftext|>{{ '\n' }}{% endgeneration %}", "{% endgeneration %}<|endoftext|>\n"
    )
    forgetful = only_content.replace(
        "{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'][:3] }}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", forgetful)
    talk = [
        ("user", "Who?"),
        ("assistant", "Anne Elliot."),
        ("user", "And?"),
        ("assistant", "No one."),
    ]
    learned = [
        tokenizer.decode(each.ids[each.trained].tolist()) for each in chats([talk], tokenizer)
    ]
    assert learned == ["Anne Elliot.", "No one."]


@pytest.mark.parametrize(
    "template", [CHATML, MARKED, FORGETFUL], ids=["prefixes", "markers", "forgetful"]
)
def test_the_whole_chat_is_learned_on_request(tokenizer, monkeypatch, template):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    for document, talk in zip(
        chats(TALKS, tokenizer, assistant_only_loss=False), TALKS, strict=True
    ):
        assert document.ids.tolist() == tokenizer.apply_chat_template(chat(talk), return_dict=False)
        assert document.trained is None


@pytest.mark.parametrize(
    "template, talk, detail",
    [
        (CHATML, [("user", "Who?"), ("system", "?")], "has no token of the assistant to learn"),
        (MARKED, [("user", "Who?")], "has no token of the assistant to learn"),
        (MARKED.replace("<|endoftext|>{{ '\n' }}{% endgen", "{% endgen"),
         [("user", "Who?"), ("assistant", "")],
         "has no token of the assistant to learn"),
        ("{{ add_generation_prompt }}" + CHATML, TALKS[0] * 2,
         "message 4 cannot be told from its context"),
        (CHATML, [("assistant", "Hello."), ("user", "Who?")],
         "begins with a message of the assistant"),
    ],
)  # fmt: skip
def test_a_chat_whose_answers_cannot_be_found_is_refused_by_its_row(
    tokenizer, monkeypatch, template, talk, detail
):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(DataError) as caught:
        list(
            encode_documents(
                rows(["not this one", Chat(chat(talk))])[1:], tokenizer, config(format="messages")
            )
        )
    assert str(caught.value).startswith("a: row 2") and detail in str(caught.value)
    assert "data.assistant_only_loss: false" in caught.value.remedy


def test_a_file_of_chats_becomes_targets_on_the_answers_alone(tmp_path, tokenizer, monkeypatch):
    """The prompt's last token predicts the answer's first; a cut begins a new piece."""
    path = write(tmp_path, "a.parquet", [{"messages": chat(talk)} for talk in TALKS])
    for template, length in itertools.product((CHATML, MARKED), (8, 11, 400)):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        options = config(
            train=str(path),
            format="messages",
            sequence_length=length,
            packing=length < 400,
            validation_fraction=0,
        )
        sequences = load_corpus(options, tokenizer).train
        expected = []
        offset = 0
        for ids, trained in (by_hand(talk, tokenizer) for talk in TALKS):
            parts = cut(list(zip(ids, trained, strict=True)), offset, length)
            expected += [pair[0] for part in parts for pair in part[1:] if pair[1]]
            offset = offset + len(ids) if options.packing else 0
        assert sequences.find_gold_ids().tolist() == expected
        assert sequences.target_mask.any(axis=1).all()
    whole = load_corpus(options.model_copy(update={"assistant_only_loss": False}), tokenizer).train
    assert np.array_equal(whole.tokens, sequences.tokens) and whole.positions > sequences.positions
    assert Corpus(whole, whole).compute_sha256() != Corpus(sequences, sequences).compute_sha256()


# ---------------------------------------------------------------------- hold-out


def test_held_out_sequences_are_the_last_and_none_is_in_both(tiny_text, tokenizer):
    def load_with(**changes):
        return load_corpus(config(train=str(tiny_text), sequence_length=32, **changes), tokenizer)

    whole = load_with(validation_fraction=0)
    assert len(whole.validation) == 0
    for fraction, expected in [
        (0.1, round(0.1 * len(whole.train))),
        (None, max(1, round(0.02 * len(whole.train)))),
    ]:
        split = load_with(validation_fraction=fraction)
        assert len(split.validation) == expected
        joined = np.concatenate([split.train.tokens, split.validation.tokens])
        assert np.array_equal(joined, whole.train.tokens)
        assert split.compute_sha256() != whole.compute_sha256()
    first = load_with(max_train_samples=5, max_eval_samples=1)
    assert np.array_equal(first.train.tokens, whole.train.tokens[:5]) and len(first.validation) == 1


@pytest.mark.parametrize(
    "changes, kept, words",
    [
        ({}, 3, "3 sequences: the last 0.02 of data.train"),
        ({"validation_fraction": 0.5}, 82, "82 sequences: the last 0.5 of data.train"),
        ({"validation_fraction": 0.5, "max_train_samples": 1}, 64, "2,048 tokens"),
        ({"validation_fraction": 0.5, "max_train_samples": 70}, 70, "no more than are trained on"),
        ({"validation_fraction": 0.5, "max_train_samples": 1, "max_eval_samples": 72}, 72,
         "the first 72 sequences of the last 0.5 of data.train: data.max_eval_samples"),
        ({"max_train_samples": 1}, 3, "3 sequences: the last 0.02"),
        ({"validation_fraction": 0}, 0, "no sequence is held out"),
    ],
)  # fmt: skip
def test_no_more_is_held_out_than_a_few_training_sequences_need(
    tiny_text, tokenizer, changes, kept, words
):
    options = config(train=str(tiny_text), sequence_length=32, **changes)
    found = load_corpus(options, tokenizer)
    assert len(found.validation) == kept
    assert words in describe_held_out(kept, len(found.train), options)
    limited = load_corpus(options.model_copy(update={"max_eval_samples": kept or None}), tokenizer)
    assert limited.compute_sha256() == found.compute_sha256()


def test_validation_files_are_packed_like_training_files(tmp_path, tiny_text, tokenizer):
    both = config(train=str(tiny_text), validation=str(tiny_text), sequence_length=32)
    corpus = load_corpus(both, tokenizer)
    assert np.array_equal(corpus.train.tokens, corpus.validation.tokens)


def test_too_few_sequences_to_hold_one_out_is_refused(tmp_path, tokenizer):
    with pytest.raises(
        DataError, match=r"1 sequence\(s\), too few to hold 1 out.*validation_fraction"
    ):
        load(tmp_path, "It was a dark", tokenizer, packing=False)


def test_the_hash_sees_every_token_boundary_and_split(tokenizer, tiny_text):
    corpus = load_corpus(config(train=str(tiny_text), sequence_length=32), tokenizer)
    tokens, starts, targets = (
        getattr(corpus.train, name).copy() for name in corpus.train.__dataclass_fields__
    )
    tokens[0, 0] ^= 1
    starts[0, 5] = True
    targets[0, 4] = starts[0, 5] = False
    variants = [
        Corpus(
            type(corpus.train)(tokens, corpus.train.document_start, corpus.train.target_mask),
            corpus.validation,
        ),
        Corpus(
            type(corpus.train)(corpus.train.tokens, corpus.train.document_start, targets),
            corpus.validation,
        ),
        Corpus(corpus.validation, corpus.train),
    ]
    hashes = {each.compute_sha256() for each in [corpus, *variants]}
    assert len(hashes) == 4
    again = load_corpus(config(train=str(tiny_text), sequence_length=32), tokenizer)
    assert again.compute_sha256() == corpus.compute_sha256()


@pytest.mark.parametrize("trained", [None, np.arange(8) >= 4], ids=["plain text", "chats"])
def test_a_corpus_is_named_by_its_tokens_boundaries_and_targets_alone(trained: np.ndarray | None):
    """The hash of packed chats is computed like that of plain text."""
    document = Document(np.arange(1, 9, dtype=np.uint32), trained)
    sequences = pack_documents([document, document], config(sequence_length=16))
    nothing = sequences.select(slice(0))
    digest = hashlib.sha256()
    for part in (sequences, nothing):
        digest.update(np.asarray(part.tokens.shape, np.int64).tobytes())
        for array in (part.tokens.astype("<u4"), part.document_start, part.target_mask):
            digest.update(array.tobytes())
    assert Corpus(sequences, nothing).compute_sha256() == digest.hexdigest()
