"""A search with real students: it finds the better rate, and continues after any stop."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache.store import open_cache
from kd.config.job import JobConfig
from kd.config.jobfile import load_config, parse_config
from kd.errors import ConfigError, Interrupted, TrainingError
from kd.progress import SILENT, Event, Monitor, StageResult
from kd.search import study
from kd.search.trials import search_students
from kd.stages.capture import run_precompute
from kd.stages.training import run_train
from kd.tracking.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

RATES = {"train.learning_rate": {"choices": [1e-6, 1e-2]}}
#: No two trials have the same value.
ANY_RATE = {"train.learning_rate": {"min": 1e-6, "max": 1e-2}}


@pytest.fixture(scope="module")
def make_job(tiny_teacher: Path, tiny_text: Path) -> Callable[..., JobConfig]:
    def make(train: dict[str, Any] | None = None, **search: Any) -> JobConfig:
        options = {
            "max_steps": 4,
            "batch_size": 4,
            "eval_steps": 2,
            "save_steps": 1,
            "logging_steps": 1,
            "dropout": 0.1,
        }
        return parse_config(
            {
                "kind": "search",
                "name": "sweep",
                "teacher": {"model": str(tiny_teacher), "batch_size": 4},
                "student": {"init": {"layers": 1, "hidden_size": 16}},
                "data": {
                    "train": str(tiny_text), "validation_fraction": 0.1, "sequence_length": 32,
                    "max_train_samples": 8, "max_eval_samples": 2,
                },
                # With this seed the sample of so few tokens shows which rate is better.
                "cache": {"shard_sequences": 8, "seed": 3},
                "train": options | (train or {}),
                "search": {
                    "space": RATES, "trials": 3, "sampler": "random", **search,
                },
            }
        )  # fmt: skip

    return make


@pytest.fixture(scope="module")
def captured(make_job: Callable[..., JobConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a sealed cache, and a run folder that names it; tests do not change it."""
    home = tmp_path_factory.mktemp("captured")
    run_precompute(make_job(), home, home / "runs" / "sweep", SILENT)
    return home


@pytest.fixture
def home(captured: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(captured, tmp_path / "home"))


def search(
    job: JobConfig, home: Path, monitor: Monitor = SILENT, train: Any = run_train
) -> StageResult:
    return search_students(job, home, home / "runs" / "sweep", monitor, train)


def stop_after(kind: str, count: int, seen: list[Event]) -> Monitor:
    """Make a monitor that asks for a stop from the n-th event of a kind on."""
    return Monitor(seen.append, lambda: sum(event.type == kind for event in seen) >= count)


def trials_of(found: StageResult) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = found.report["trials"]
    return trials


@pytest.mark.long
def test_all_trials_of_weights_by_entropy_share_one_cache(make_job: Any, tmp_path: Path) -> None:
    space = {"loss.entropy_weighting": {"choices": [0.0, 1.0]}}
    job = make_job(train={"max_steps": 2}, space=space, trials=20)
    run_precompute(job, tmp_path, tmp_path / "runs" / "sweep", SILENT)
    trials = trials_of(search(job, tmp_path))
    assert {row["values"]["loss.entropy_weighting"] for row in trials} == {0.0, 1.0}
    assert {row["state"] for row in trials} == {"complete"}
    (manifest,) = (tmp_path / "caches").glob("*/manifest.json")
    assert open_cache(manifest.parent).codec.entropies


@pytest.mark.long
def test_it_finds_the_better_of_two_rates_and_leaves_what_it_names(
    make_job: Any, home: Path
) -> None:
    job = make_job(trials=4)
    events = list[Event]()
    found = search(job, home, Monitor(events.append))
    run_dir = home / "runs" / "sweep"
    trials = trials_of(found)
    assert {row["values"]["train.learning_rate"] for row in trials} == {1e-6, 1e-2}, (
        "both were tried"
    )
    assert found.report["best"]["values"] == {"train.learning_rate": 1e-2}
    assert [row["state"] for row in trials] == ["complete"] * 2, "no point is trained twice"
    page = (run_dir / "report.md").read_text(encoding="utf-8")
    assert "| perplexity of 62 tokens: each trial's report has the interval |" in page
    for row in trials:
        folder = run_dir / "trials" / f"{row['number']:04d}"
        lines = [
            line for line in read_metrics(folder / "metrics.jsonl") if line["type"] == "evaluation"
        ]
        assert row["loss"] == lines[-1]["validation_loss"]
        assert (folder / "student" / "model.safetensors").is_file() and not (
            folder / "checkpoints"
        ).exists()
        assert (
            parse_config(json.loads((folder / "config.json").read_text())).name
            == f"sweep-{row['number']:04d}"
        )
    assert all(Path(path).exists() for path in found.artifacts.values())
    assert found.artifacts["student"].startswith(
        str(run_dir / "trials" / f"{found.report['best']['number']:04d}")
    )
    assert [path.name for path in (home / "caches").iterdir() if path.is_dir()] == [
        json.loads((run_dir / "cache.json").read_text())["fingerprint"]
    ], "all share one cache"
    progress = [
        event.data
        for event in events
        if event.type == "progress" and event.data["unit"] == "trials"
    ]
    assert [each["done"] for each in progress] == [0, 1, 2]
    shown = [event.data for event in events if event.type == "trial"]
    assert [each["state"] for each in shown] == ["running", "complete"] * 2
    assert {event.data["name"] for event in events if event.type == "artifact"} == set(
        found.artifacts
    )


@pytest.mark.long
def test_the_best_job_by_itself_gives_the_student_of_the_best_trial(
    make_job: Any, home: Path
) -> None:
    found = search(
        make_job(trials=2, space={"train.learning_rate": {"min": 1e-3, "max": 1e-2}}), home
    )
    best = load_config(Path(found.artifacts["best.yaml"]))
    run_dir = home / "runs" / best.name
    assert run_precompute(best, home, run_dir, SILENT).cache["reused"]
    run_train(best, home, run_dir, SILENT)
    ours = run_dir / "student"
    theirs = Path(found.artifacts["student"])
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()


class Killed(BaseException):
    """Stands for kill -9: nothing is saved on the way out."""


@pytest.mark.parametrize("death", ["stop", "kill"])
@pytest.mark.parametrize(
    ("kind", "count"), [("metrics", 1), ("metrics", 7), ("evaluation", 3), ("trial", 2)]
)
@pytest.mark.long
def test_stopped_or_killed_it_goes_on_and_repeats_no_trial(
    make_job: Any, home: Path, whole: StageResult, death: str, kind: str, count: int
) -> None:
    seen: list[Event] = []

    def listen(event: Event) -> None:
        seen.append(event)
        if event.type == kind and sum(each.type == kind for each in seen) == count:
            raise Killed

    with pytest.raises(Interrupted if death == "stop" else Killed):
        search(
            make_job(space=ANY_RATE),
            home,
            stop_after(kind, count, seen) if death == "stop" else Monitor(listen),
        )
    done = {
        event.data["number"]
        for event in seen
        if event.type == "trial" and event.data["state"] == "complete"
    }
    events: list[Event] = []
    found = search(make_job(space=ANY_RATE), home, Monitor(events.append))
    assert found.report == whole.report, "the same trials, with the same losses to the last bit"
    again = [
        event.data["number"]
        for event in events
        if event.type == "trial" and event.data["state"] == "running"
    ]
    assert again == sorted({0, 1, 2} - done)
    if kind == "metrics" and count == 7:
        # In the second trial, after a checkpoint: not from its start
        assert next(event.data["step"] for event in events if event.type == "metrics") in (3, 4)


@pytest.fixture(scope="module")
def whole(make_job: Any, captured: Path, tmp_path_factory: pytest.TempPathFactory) -> StageResult:
    """The result of the same search without a stop."""
    home = shutil.copytree(captured, tmp_path_factory.mktemp("whole") / "home")
    return search(make_job(space=ANY_RATE), Path(home))


@pytest.mark.long
def test_a_finished_search_trains_nothing_again_and_more_trials_may_be_asked_for(
    make_job: Any, home: Path
) -> None:
    first = search(make_job(trials=1), home)
    events: list[Event] = []
    assert search(make_job(trials=1), home, Monitor(events.append)).report == first.report
    assert not [event for event in events if event.type in ("trial", "metrics")]
    assert {row["number"] for row in trials_of(search(make_job(trials=2), home))} == {0, 1}


@pytest.mark.long
def test_a_bad_trial_is_stopped_early(
    make_job: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The median pruner needs five trials first; with this seed only the sixth learns badly."""
    monkeypatch.setattr(study, "SEED", 6)
    space = {"train.learning_rate": {"choices": [1e-7, 2e-2]}}
    job = make_job({"eval_steps": 1, "save_steps": 9}, space=space, trials=7)
    trials = trials_of(search(job, home))
    (pruned,) = [row for row in trials if row["state"] == "pruned"]
    assert (pruned["number"], pruned["values"]) == (5, {"train.learning_rate": 1e-7}) and pruned[
        "steps"
    ] < 4
    whole, *twins = (row for row in trials if row is not pruned)
    assert whole["steps"] == 4 and all(row["same_as"] == whole["number"] for row in twins)
    folder = home / "runs" / "sweep" / "trials" / "0005"
    assert max(line["step"] for line in read_metrics(folder / "metrics.jsonl")) == pruned["steps"]
    assert not (folder / "student").exists() and not (folder / "checkpoints").exists()


@pytest.mark.long
def test_values_that_do_not_go_together_fail_their_trial_only(make_job: Any, home: Path) -> None:
    """Each choice is valid alone, but schedule_free with a cosine schedule is refused."""
    space = {
        "train.optim": {"choices": ["adamw", "schedule_free"]},
        "train.lr_scheduler_type": {"choices": ["constant", "cosine"]},
    }
    job = make_job({"max_steps": 2, "lr_scheduler_type": "constant"}, space=space, trials=6)
    trials = trials_of(search(job, home))
    assert {row["state"] for row in trials} == {"complete", "failed"}
    for row in trials:
        contradictory = row["values"] == {
            "train.optim": "schedule_free",
            "train.lr_scheduler_type": "cosine",
        }
        assert (row["state"] == "failed") == contradictory == ("schedule_free needs" in row["why"])


@pytest.mark.long
def test_a_trial_that_diverges_has_failed_and_keeps_the_checkpoint_that_it_names(
    make_job: Any, home: Path
) -> None:
    def diverging(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> StageResult:
        result = run_train(config, home, run_dir, monitor)
        if run_dir.name == "0000":
            raise TrainingError("The loss is nan.", "Lower train.learning_rate.")
        return result

    trials = {
        row["number"]: row for row in trials_of(search(make_job(trials=2), home, train=diverging))
    }
    assert (trials[0]["state"], trials[0]["why"]) == (
        "failed",
        "The loss is nan. Lower train.learning_rate.",
    )
    assert trials[1]["state"] == "complete"
    kept = [
        (home / "runs" / "sweep" / "trials" / f"{number:04d}" / "checkpoints").exists()
        for number in (0, 1)
    ]
    assert kept == [True, False]


def test_an_error_that_is_no_trial_s_own_ends_the_search(make_job: Any, home: Path) -> None:
    def broken(*_: Any) -> StageResult:
        raise OSError("no such disk")

    with pytest.raises(OSError, match="no such disk"):
        search(make_job(), home, train=broken)


def test_a_bad_space_is_refused_before_anything_is_written(make_job: Any, home: Path) -> None:
    job = make_job(space={"train.learning_rat": {"choices": [1.0]}})
    with pytest.raises(ConfigError, match="Did you mean"):
        search(job, home)
    assert not (home / "runs" / "sweep" / "study.jsonl").exists()


def test_without_held_out_loss_there_is_no_best(make_job: Any, home: Path) -> None:
    with pytest.raises(TrainingError, match="no held-out loss"):
        search(make_job(trials=1), home, train=functools.partial(lambda *_: {}))
    assert "no held-out loss" in (home / "runs" / "sweep" / "report.md").read_text()
