"""Models and text in memory -> files whose names depend on their content alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from kd.config.data import DataConfig
from kd.errors import ConfigError
from kd.python.inputs import ModelSaver, describe_data, describe_text
from kd.text.sources import read_documents

TEXTS = ["One text.", "Another text,\nof two lines."]
CHAT = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]


def read(data: Any, home: Path) -> list[Any]:
    """What a run reads from ``data``."""
    section = describe_data(data, None, home)
    config = DataConfig.model_validate(section)
    return [document for _, document in read_documents(config.train, "train", config)]


def test_texts_in_a_list_are_documents(tmp_path: Path) -> None:
    rows = [{"text": text} for text in TEXTS]
    for data in (TEXTS, tuple(TEXTS), iter(TEXTS), rows, Dataset.from_list(rows)):
        assert read(data, tmp_path) == TEXTS
    (file,) = (tmp_path / "data").iterdir()  # all of these have the same content
    assert [json.loads(line)["text"] for line in file.read_text().splitlines()] == TEXTS


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": CHAT}, "messages"),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, "sharegpt"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"instruction": "a", "output": "b"}, "alpaca"),
        ({"instruction": "a", "output": "b", "text": "c"}, None),
        ({"body": "a"}, None),
    ],
)
def test_the_columns_show_the_format(
    tmp_path: Path, row: dict[str, Any], expected: str | None
) -> None:
    assert describe_data([row], None, tmp_path).get("format") == expected
    assert describe_data(Dataset.from_list([row]), None, tmp_path).get("format") == expected
    chosen = {"train": [row], "format": "jsonl"}
    assert describe_data(chosen, None, tmp_path)["format"] == "jsonl"


def test_paths_stay_as_they_are(tmp_path: Path) -> None:
    assert describe_text("a/*.txt", "", tmp_path).sources == "a/*.txt"
    assert describe_text(Path("a.txt"), "", tmp_path).sources == "a.txt"
    assert describe_text(["a.txt", "b.jsonl.gz"], "", tmp_path).sources == ["a.txt", "b.jsonl.gz"]
    mixed = [Path("folder"), {"path": "org/set", "split": "train"}]
    assert describe_text(mixed, "", tmp_path).sources == ["folder", mixed[1]]
    assert describe_text({"path": "org/set"}, "", tmp_path).sources == {"path": "org/set"}
    assert not (tmp_path / "data").exists()


def test_the_section_may_hold_text_too(tmp_path: Path) -> None:
    found = describe_data({"train": TEXTS, "sequence_length": 64}, Path("held.txt"), tmp_path)
    assert found["validation"] == "held.txt"
    assert found["sequence_length"] == 64
    assert found["train"].startswith(str(tmp_path / "data"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (["a.txt", "a text"], "some strings of the list name files"),
        ([{"text": "a"}, "b"], "cannot hold these together: dict, str"),
        ([], "the list is empty"),
        (3, "text cannot be of type int"),
        ("two\nlines", "a single string is a path"),
        (DatasetDict({"train": Dataset.from_list([{"text": "a"}])}), "it holds the splits train"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        describe_data(data, None, tmp_path)
    (problem,) = caught.value.problems
    assert problem.pointer == "/data/train" and problem.remedy


def test_two_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rows of two formats: messages, prompt_completion"):
        describe_data([{"messages": CHAT}], [{"prompt": "a", "completion": "b"}], tmp_path)


def test_a_loaded_model_becomes_a_folder_named_by_its_content(
    tmp_path: Path, tiny_teacher: Path, tokenizer: Any
) -> None:
    from transformers import AutoModelForCausalLM

    from kd.models.folder import compute_fingerprint

    model = AutoModelForCausalLM.from_pretrained(tiny_teacher)
    alone = ModelSaver(tmp_path, tokenizer).describe(model, "teacher")
    pair = ModelSaver(tmp_path).describe({"model": (model, tokenizer), "batch_size": 2}, "teacher")
    assert pair == {**alone, "batch_size": 2}
    assert [path.name for path in (tmp_path / "models").iterdir()] == [Path(alone["model"]).name]
    assert compute_fingerprint(Path(alone["model"])) == compute_fingerprint(tiny_teacher)

    model.lm_head.weight.data[0] += 1
    changed = ModelSaver(tmp_path, tokenizer).describe(model, "teacher")
    assert changed != alone


def test_a_loaded_model_is_saved_as_a_student_is(
    tmp_path: Path, tiny_teacher: Path, tokenizer: Any
) -> None:
    """Plain ``save_pretrained`` refuses such settings, and leaves out the names of version 4."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(tiny_teacher)
    settings = GenerationConfig(do_sample=False, temperature=0.5, eos_token_id=[3, 5])
    model.generation_config = settings
    found = Path(ModelSaver(tmp_path, tokenizer).describe(model, "student")["model"])
    assert model.generation_config is settings, "the model of the caller stays as it is"
    assert GenerationConfig.from_pretrained(found).eos_token_id == [3, 5]
    written = json.loads((found / "config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"]


def test_names_and_sections_stay_as_they_are(tmp_path: Path) -> None:
    saver = ModelSaver(tmp_path)
    assert saver.describe("org/name", "teacher") == {"model": "org/name"}
    assert saver.describe(tmp_path, "teacher") == {"model": str(tmp_path)}
    new = {"init": {"layers": 1, "hidden_size": 16}}
    assert saver.describe(new, "student") == new


def test_a_model_without_a_tokenizer_and_what_is_no_model_are_refused(
    tmp_path: Path, tiny_teacher: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_teacher)
    with pytest.raises(ConfigError, match=r"teacher\.model: a loaded model needs its tokenizer"):
        ModelSaver(tmp_path).describe(model, "teacher")
    with pytest.raises(ConfigError, match=r"student\.model: a model cannot be of type int"):
        ModelSaver(tmp_path).describe(3, "student")
    assert not (tmp_path / "models").exists()
