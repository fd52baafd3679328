"""A kind of jobs whose stages repeat: the table alone says so, and the service carries it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.support.waiting import wait_until
from kd.config.kinds import CAPTURE, KINDS, TRAIN, Kind, list_stage_names
from kd.files import read_json
from tests.support.services.rounds import PROGRAM
from tests.support.services.runs import MakeParts


def test_a_stage_that_repeats_is_told_by_its_turn() -> None:
    kind = Kind("rounds", (CAPTURE, TRAIN, TRAIN, CAPTURE, TRAIN), "")
    turns = [(stage.name, turn) for stage, turn in kind.list_turns()]
    assert turns == [
        ("precompute", 0), ("train", 0), ("train", 1), ("precompute", 1), ("train", 2),
    ]  # fmt: skip
    following = [kind.find_next(*each) for each in turns]
    assert [each and (each[0].name, each[1]) for each in following] == [*turns[1:], None]
    captures = [kind.find_capture(*each) for each in turns]
    assert [each and each[1] for each in captures] == [None, 0, 0, 0, 1]
    assert kind.last_file == "report.json" and kind.captures and kind.trains_one


def test_the_stages_of_today_have_no_second_turn() -> None:
    turns = {turn for kind in KINDS.values() for _, turn in kind.list_turns()}
    assert turns == {0}
    assert list_stage_names() == ["precompute", "train", "search"]
    assert list_stage_names("worker") == ["precompute", "train"]


@pytest.mark.long
def test_two_rounds_run_through_api_and_worker(
    new_parts: MakeParts, tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """Two captures and two trainings; the second student goes on from the first."""
    other = tmp_path / "other.txt"
    other.write_text(tiny_text.read_text()[::-1])
    parts = new_parts(
        child_module=PROGRAM,
        forked=False,
        lease_seconds=15.0,
        silence_seconds=120.0,
        data_roots=[tiny_teacher, tiny_text.parent, tmp_path],
    )
    parts.start(PROGRAM, "api")
    wait_until(lambda: parts.answers("/healthz"))
    parts.start(PROGRAM, "worker")
    job = {
        "kind": "rounds",
        "name": "twice",
        "teacher": {"model": str(tiny_teacher), "batch_size": 4},
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {
            "train": [str(tiny_text), str(other)],
            "sequence_length": 32,
            "max_train_samples": 8,
        },
        "cache": {"shard_sequences": 8},
        "train": {"max_steps": 2, "batch_size": 4},
    }
    posted = parts.http.post("/jobs", json=job)
    assert posted.status_code == 202, posted.text
    place = f"/jobs/{posted.json()['id']}"

    def show() -> dict[str, Any]:
        found: dict[str, Any] = parts.http.get(place).json()
        return found

    ended = ("succeeded", "failed", "cancelled")
    done = wait_until(lambda: shown if (shown := show())["status"] in ended else None, 240)
    assert done["error"] is None and done["status"] == "succeeded"

    claimed = [
        data["stage"]
        for kind, data in parts.events(posted.json()["id"])
        if kind == "status" and data["status"] == "running"
    ]
    assert claimed == ["precompute", "train", "precompute", "train"]
    runs = [parts.settings.run_dir(done["id"]) / f"round-{turn}" for turn in (0, 1)]
    caches = [read_json(run / "cache.json")["fingerprint"] for run in runs]
    assert len(set(caches)) == 2, "each round has text of its own"
    first, second = (read_json(run / "config.json") for run in runs)
    assert first["student"]["model"] is None
    assert second["student"]["model"] == str(runs[0] / "student")
    assert all((run / "report.json").is_file() for run in runs)
