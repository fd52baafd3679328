"""What the teacher reads in place of the student's text: the same answers after another prompt."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.records import Sequences
from kd.config.data import DataConfig
from kd.config.teacher import TeacherConfig
from kd.errors import DataError
from kd.progress import Monitor
from kd.text.corpus import Corpus, load_corpus, open_corpus
from kd.text.packing import Document
from kd.text.stored import writing
from kd.text.teacher_side.context import TeacherContext
from kd.text.teacher_side.sequences import TeacherPrompt, find_teacher_side

PAIRS = [
    {"prompt": "Who wrote Emma?", "completion": " Miss Austen wrote it.", "fact": "1815"},
    {
        "prompt": "And Persuasion, of which the heroine is Anne?",
        "completion": " She too.",
        "fact": "No",
    },
    {"prompt": "Where?", "completion": " In a small house at Chawton, in Hampshire.", "fact": 7},
]
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def make_context(data: DataConfig, **fields: Any) -> TeacherContext | None:
    teacher = TeacherConfig(model="t", **fields)
    if not teacher.has_context:
        return None
    return TeacherContext(teacher.system, teacher.context, teacher.count_read(data.sequence_length))


def load(
    source: str | list[Any],
    tokenizer: Any,
    context: dict[str, Any] | None,
    texts: Path | None = None,
    monitor: Monitor | None = None,
    **data: Any,
) -> Corpus:
    """Load a text whose teacher has ``context``: into memory, or from a store below ``texts``."""
    known = {"format": "prompt_completion", "sequence_length": 48, "packing": False}
    config = DataConfig(train=source, validation_fraction=0, **known | data)
    given = None if context is None else make_context(config, **context)
    options = (monitor or Monitor(), len(tokenizer), given)
    if texts is None:
        return load_corpus(config, tokenizer, *options)
    return open_corpus(config, tokenizer, texts, *options)


def list_pairs(sequences: Sequences) -> list[tuple[list[int], list[int]]]:
    """Return of each target what is read up to it, and the token that it predicts."""
    return [
        (sequences.tokens[row, : place + 1].tolist(), int(sequences.tokens[row, place + 1]))
        for row, place in zip(*np.nonzero(sequences.target_mask), strict=True)
    ]


def read_all(corpus: Corpus) -> tuple[Sequences, Sequences]:
    found = corpus.train.select(slice(None))
    return found, find_teacher_side(found)


@pytest.fixture(scope="module")
def chat_tokenizer(tokenizer: Any) -> Any:
    talking = copy.deepcopy(tokenizer)
    talking.chat_template = TEMPLATE
    return talking


# ---------------------------------------------------------------------- the two sides


@pytest.mark.parametrize("stored", [False, True])
def test_the_teacher_reads_its_own_prompt_and_the_same_answer(
    tmp_path: Path, tokenizer: Any, stored: bool
) -> None:
    rows = write_rows(tmp_path, PAIRS)
    context = {"context": "{prompt} A hint {{of many}}: {fact}. Answer it."}
    monitor = Monitor()
    corpus = load(rows, tokenizer, context, tmp_path / "texts" if stored else None, monitor)
    student, theirs = read_all(corpus)
    plain, same = read_all(load(rows, tokenizer, None))
    assert all(map(np.array_equal, student.arrays, plain.arrays))
    assert same is plain and theirs is not student
    assert corpus.train.positions == plain.positions == theirs.positions
    seen = list_pairs(theirs)
    for number, row in enumerate(PAIRS):
        prompt = f"{row['prompt']} A hint {{of many}}: {row['fact']}. Answer it."
        whole = tokenizer(prompt + row["completion"])["input_ids"]
        answer = [pair for pair in seen if pair[0][: len(whole)] == whole[: len(pair[0])]]
        assert len(answer) == student.target_mask[number].sum()
        assert [gold for _, gold in answer] == student.find_gold_ids()[
            sum(student.target_mask[:number].sum(1)) :
        ][: len(answer)].tolist()
    assert not [each for each in monitor.notices if "fact" in each.what]  # it is read


def test_an_empty_context_is_none_and_the_prompt_alone_is_the_students_text(
    tmp_path: Path, tokenizer: Any
) -> None:
    rows = write_rows(tmp_path, PAIRS)
    assert not TeacherConfig(model="t", context="").has_context
    plain = load(rows, tokenizer, {"context": "", "system": ""})
    assert plain.compute_context_sha256() == ""
    same = load(rows, tokenizer, {"context": "{prompt}"})
    student, theirs = read_all(same)
    assert list_pairs(student) == list_pairs(theirs)
    assert same.compute_sha256() == plain.compute_sha256() != same.compute_context_sha256()


def test_every_input_of_the_teachers_side_has_a_digest_of_its_own(
    tmp_path: Path, tokenizer: Any
) -> None:
    rows = write_rows(tmp_path, PAIRS)
    other = write_rows(tmp_path, [{**PAIRS[0], "fact": "1816"}, *PAIRS[1:]], "other.jsonl")
    loaded = [
        load(source, tokenizer, context, tmp_path / "texts")
        for source, context in (
            (rows, {"context": "{prompt} {fact}"}),
            (rows, {"context": "{prompt} {fact}."}),
            (rows, {"context": "{prompt} {fact}", "max_length": 64}),
            (other, {"context": "{prompt} {fact}"}),
        )
    ]
    assert len({each.compute_context_sha256() for each in loaded}) == len(loaded)
    assert len({each.compute_sha256() for each in loaded}) == 1
    assert len(list((tmp_path / "texts").glob("*/manifest.json"))) == len(loaded)


def test_a_chat_gets_the_system_message_and_the_context_of_its_first_answer(
    tmp_path: Path, chat_tokenizer: Any
) -> None:
    said = ["Who wrote Emma?", "Miss Austen.", "And Persuasion?", "She too."]
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    asked = [{"role": "system", "content": "Be brief."}, *messages]
    rows = write_rows(
        tmp_path, [{"messages": messages, "fact": "1815"}, {"messages": asked, "fact": "1"}]
    )
    context = {"system": "You know books.", "context": "{prompt} ({fact})"}
    data = {"format": "messages", "sequence_length": 128}
    student, theirs = read_all(load(rows, chat_tokenizer, context, **data))
    for number, fact in enumerate(("1815", "1")):
        shown = chat_tokenizer.decode(theirs.tokens[number].tolist())
        lines = shown.replace("<|endoftext|>", "").splitlines()
        assert lines == [
            "[system] You know books.",
            f"[user] Who wrote Emma? ({fact})",
            *("[assistant] Miss Austen.", "[user] And Persuasion?", "[assistant] She too."),
        ]
    own = chat_tokenizer.decode(student.tokens[1].tolist()).replace("<|endoftext|>", "")
    assert own.startswith("[system] Be brief.\n[user] Who wrote Emma?\n")
    golds = [each.find_gold_ids().tolist() for each in (student, theirs)]
    assert golds[0] == golds[1]
    learned = chat_tokenizer.decode(golds[0])
    assert "Miss Austen." in learned and "She too." in learned and "Persuasion" not in learned


def test_each_sequence_of_a_text_comes_after_the_context(tmp_path: Path, tokenizer: Any) -> None:
    novel = "It is a truth universally acknowledged, that a single man must be in want. " * 9
    rows = write_rows(
        tmp_path, [{"text": novel, "by": "Austen"}, {"text": "Short.", "by": "N. N."}]
    )
    context = {"context": "By {by}:\n", "max_length": 40}
    student, theirs = read_all(load(rows, tokenizer, context, format="jsonl", sequence_length=24))
    assert len(student) > 4
    before = tokenizer("By Austen:\n", add_special_tokens=False)["input_ids"]
    for row in range(len(student) - 1):
        own = student.tokens[row]
        start = len(theirs.tokens[row]) - 40
        assert theirs.tokens[row, start : start + len(before)].tolist() == before
        targets = np.flatnonzero(student.target_mask[row])
        shift = np.flatnonzero(theirs.target_mask[row]) - targets
        assert len(set(shift.tolist())) == 1 and shift[0] == len(before)
        last = int(targets[-1]) + 2
        assert theirs.tokens[row, len(before) : len(before) + last].tolist() == own[:last].tolist()


def test_an_answer_that_goes_on_in_the_next_sequence_is_read_whole_by_the_teacher(
    tmp_path: Path, tokenizer: Any
) -> None:
    answer = " " + " ".join(f"word{number}" for number in range(12))
    rows = write_rows(tmp_path, [{"prompt": "Count.", "completion": answer}])
    context = {"context": "Count up to twelve.", "max_length": 128}
    student, theirs = read_all(load(rows, tokenizer, context, sequence_length=8))
    assert len(student) > 2
    whole = tokenizer("Count up to twelve." + answer)["input_ids"]
    for row in range(len(theirs)):
        end = int(np.flatnonzero(theirs.target_mask[row])[-1]) + 2
        expected = whole[:end] if end <= len(whole) else [*whole, tokenizer.eos_token_id]
        assert theirs.tokens[row, :end].tolist() == expected
    assert student.find_gold_ids().tolist() == theirs.find_gold_ids().tolist()


def test_a_prompt_moves_on_as_its_document_is_cut() -> None:
    ids = np.arange(10, 20, dtype=np.uint32)
    document = Document(ids, ids >= 14, prompt=TeacherPrompt(np.array([1, 2], np.uint32), 4))
    for place in range(len(ids)):
        _, rest = document.split(place)
        assert rest.prompt is not None
        read = [*rest.prompt.ids.tolist(), *rest.ids[rest.prompt.first :].tolist()]
        assert read == [1, 2, *ids[4:].tolist()]


@pytest.mark.parametrize("kind", ["prompts", "texts"])
def test_an_interrupted_reading_goes_on_with_the_same_bytes(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Every shard is a place from which the reading may go on."""
    if kind == "prompts":
        source = write_rows(tmp_path, PAIRS * 30)
        context = {"context": "{prompt} {fact}", "max_length": 64}
        data: dict[str, Any] = {"sequence_length": 8}
    else:
        source = write_rows(tmp_path, [{"text": "It was a dark night. " * 40, "by": "X"}] * 6)
        context = {"context": "{by}", "max_length": 64}
        data = {"sequence_length": 16, "format": "jsonl"}
    whole = load(source, tokenizer, context, **data)
    monkeypatch.setattr("kd.text.stored.shard_files.SHARD_TOKENS", 500)
    written = writing.write_json
    left = [0]

    def write_json(path: Path, value: Any) -> None:
        written(path, value)
        left[0] -= path.name == "progress.json"
        if not left[0]:
            raise InterruptedError

    monkeypatch.setattr(writing, "write_json", write_json)
    stored = None
    attempts = 0
    while stored is None:
        left[0] = 3
        attempts += 1
        with contextlib.suppress(InterruptedError):
            stored = load(source, tokenizer, context, tmp_path / "texts", **data)
    assert attempts > 2
    assert stored.compute_context_sha256() == whole.compute_context_sha256()


def test_shares_of_a_mixture_are_those_of_the_students_tokens(
    tmp_path: Path, tokenizer: Any
) -> None:
    sources = []
    for name, fact in (("a", "x" * 60), ("b", "y")):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name, [{**row, "fact": fact} for row in PAIRS] * 4)
        sources.append({"path": str(tmp_path / name), "weight": 2.0})
    theirs = {"context": "{prompt} {fact}", "max_length": 128}
    orders = [
        load(sources, tokenizer, context).train.select(slice(None)).tokens.tolist()
        for context in (None, theirs)
    ]
    assert orders[0] == orders[1]


# ---------------------------------------------------------------------- rows that are refused


@pytest.mark.parametrize(
    ("row", "context", "message"),
    [
        ({}, {"context": "{answer}"}, r"has no 'answer', .* columns: completion, fact, prompt\."),
        ({"fact": None}, {"context": "{fact}"}, "has null in 'fact'"),
        ({"fact": ["a"]}, {"context": "{prompt} {fact}"}, "'fact', .* must be a text"),
        ({}, {"system": "Be brief."}, "teacher.system needs a chat"),
        ({}, {"context": "{prompt}" * 20}, r"would read \d+ tokens, .* at most 96"),
        ({}, {"context": "{prompt}", "max_length": 8}, r"at most 8\."),
        ({"completion": "Austen"}, {"context": "{prompt} Miss"}, "token 1 of the answer"),
    ],
)
def test_a_row_that_the_teacher_cannot_read_is_named(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], context: dict[str, Any], message: str
) -> None:
    prompt = {"prompt": "Miss Jan", "completion": "e Austen", "fact": "1"}
    if "completion" in row:
        row = {"prompt": "Who? Mi", "completion": "ss Austen", "fact": "1"}
    rows = write_rows(tmp_path, [PAIRS[0] | {"fact": "1"}, prompt | row])
    with pytest.raises(DataError, match=message) as caught:
        load(rows, tokenizer, context)
    assert "rows.jsonl: row " in caught.value.detail and caught.value.remedy


def test_an_id_that_the_teacher_does_not_know_is_refused_in_its_prompt(
    tmp_path: Path, tokenizer: Any
) -> None:
    rows = write_rows(tmp_path, [{"prompt": "?", "completion": "!", "fact": " universally"}])
    config = DataConfig(
        train=rows, validation_fraction=0, format="prompt_completion", packing=False
    )
    size = 1 + max(tokenizer("?!")["input_ids"])
    for context, message in (("{prompt}{prompt}", ""), ("{fact}{prompt}", "has the id")):
        theirs = make_context(config, context=context)
        with pytest.raises(DataError, match=message) if message else contextlib.nullcontext():
            load_corpus(config, tokenizer, Monitor(), size, theirs)


def test_a_text_file_has_no_columns_for_a_context(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text("It was a dark night. " * 9, encoding="utf-8")
    source = str(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a\.txt: row 1 has no 'title', .* it is a plain text"):
        load(source, tokenizer, {"context": "{title}"}, format="auto")
    student, theirs = read_all(load(source, tokenizer, {"context": "By a friend: "}, format="auto"))
    assert (
        theirs.length == 96 and student.find_gold_ids().tolist() == theirs.find_gold_ids().tolist()
    )


def test_a_chat_without_a_question_has_nothing_that_a_context_replaces(
    tmp_path: Path, chat_tokenizer: Any
) -> None:
    messages = [{"role": "system", "content": "Go."}, {"role": "assistant", "content": "Here."}]
    rows = write_rows(tmp_path, [{"messages": messages}])
    with pytest.raises(DataError, match="row 1: no message of the user comes before the first"):
        load(rows, chat_tokenizer, {"context": "{prompt}"}, format="messages")
