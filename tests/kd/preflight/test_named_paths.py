"""The names of a job that are paths, made absolute."""

from __future__ import annotations

from pathlib import Path

from kd.config.jobfile import parse_config
from kd.preflight.named_paths import list_relative_paths, make_paths_absolute

JOB = {
    "kind": "search",
    "teacher": {"model": "models/teacher"},
    "student": {"model": "a/b/c"},
    "data": {
        "train": ["text/*.txt", "/else/where.txt", {"path": "rows"}, {"path": "owner/rows"}],
        "validation": "https://example.org/text.txt",
    },
    "train": {"max_steps": 1},
    "evaluation": {"tasks": ["arc_easy", "own.yaml"]},
    "search": {
        "space": {"student.model": {"choices": ["models/teacher", "owner/model"]}},
        "trials": 1,
    },
}


def test_names_of_files_are_told_from_those_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "models" / "teacher").mkdir(parents=True)
    (tmp_path / "rows").mkdir()
    config = parse_config(JOB)
    assert [each.name for each in list_relative_paths(config, tmp_path)] == [
        "models/teacher", "a/b/c", "models/teacher", "text/*.txt", "rows", "own.yaml"
    ]  # fmt: skip
    body = make_paths_absolute(config, tmp_path)
    teacher = str(tmp_path / "models" / "teacher")
    assert body["teacher"]["model"] == teacher
    assert body["student"]["model"] == str(tmp_path / "a/b/c")
    sources = body["data"]["train"]
    assert sources[:2] == [str(tmp_path / "text/*.txt"), "/else/where.txt"]
    assert [each["path"] for each in sources[2:]] == [str(tmp_path / "rows"), "owner/rows"]
    assert body["data"]["validation"] == ["https://example.org/text.txt"]
    assert body["evaluation"]["tasks"] == ["arc_easy", str(tmp_path / "own.yaml")]
    assert body["search"]["space"]["student.model"]["choices"] == [teacher, "owner/model"]
    assert list_relative_paths(parse_config(body), tmp_path) == []
