"""An ablation with real runs: what they share, what a stop leaves, and what fails alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import Interrupted
from kd.experiments.ablation import ablate, read_curves
from kd.experiments.axes import make_short_job, parse_axis
from kd.experiments.child import measure_student
from kd.experiments.plan import AblationPlan, make_plan_of_axes
from kd.files import read_json
from kd.progress import SILENT, Event, Monitor
from kd.stages.source import select_cache_inputs
from kd.tracking.metrics import read_metrics


def make_base(teacher: Path, text: Path) -> JobConfig:
    job = {
        "name": "tiny",
        "teacher": {"model": str(teacher), "batch_size": 4},
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {
            "train": str(text), "sequence_length": 32, "max_train_samples": 8,
            "validation_fraction": 0.2, "max_eval_samples": 3,
        },
        "train": {"max_steps": 4, "batch_size": 4, "learning_rate": 0.01},
    }  # fmt: skip
    return make_short_job(parse_config(job))


def plan_axes(base: JobConfig, *texts: str) -> AblationPlan:
    return make_plan_of_axes(base, [parse_axis(text, base) for text in texts], lambda job: [])


def run_labels(events: list[Event]) -> list[str]:
    phases = [event.data.get("phase") or "" for event in events if event.type == "stage"]
    return [phase.partition(": ")[2] for phase in phases if phase.startswith("run ")]


def list_runs(report: dict[str, Any]) -> list[dict[str, Any]]:
    return list(report["runs"].values())


@pytest.mark.long
def test_a_stopped_ablation_goes_on_and_a_failing_run_leaves_the_others(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    home, folder = tmp_path / "home", tmp_path / "ablation"
    missing = tmp_path / "no-model"
    missing.mkdir()
    base = make_base(tiny_teacher, tiny_text)
    plan = plan_axes(base, f"student={{model: {missing}}}", "train.learning_rate=0.001,-1")
    seen: list[Event] = []

    def should_stop() -> bool:
        steps = [event.data["done"] for event in seen if event.data.get("unit") == "steps"]
        return len(run_labels(seen)) == 3 and steps[-1] in (1, 2, 3)

    with pytest.raises(Interrupted):
        ablate(plan, home, folder, Monitor(seen.append, should_stop))
    first, broken, last = list_runs(read_json(folder / "report.json"))
    assert [each["state"] for each in (first, broken, last)] == ["finished", "failed", "waiting"]
    assert "no-model" in broken["error"]
    assert len(list((home / "caches").glob("*/manifest.json"))) == 1, "all share one cache"
    trained = (folder / first["folder"] / "metrics.jsonl").stat().st_mtime_ns

    again: list[Event] = []
    report = ablate(plan, home, folder, Monitor(again.append))
    assert read_json(folder / "report.json") == json.loads(json.dumps(report.to_json()))
    first, broken, last = list_runs(report.to_json())
    assert [each["state"] for each in (first, broken, last)] == ["finished", "failed", "finished"]
    assert [label.split()[0] for label in run_labels(again)] == ["student", "train.learning_rate"]
    assert (folder / first["folder"] / "metrics.jsonl").stat().st_mtime_ns == trained
    lines = read_metrics(folder / last["folder"] / "metrics.jsonl")
    assert [line["step"] for line in lines if line["type"] == "metrics"] == [1, 2, 3, 4]
    assert not (folder / last["folder"] / "checkpoints").exists()
    assert first["tokens"] == last["tokens"] and first["held_out_loss"] != last["held_out_loss"]
    assert all(
        first[name] is not None
        for name in ("held_out_kl", "train_seconds", "tokens_per_second", "peak_memory_bytes")
    )
    own = read_json(folder / first["folder"] / "report.json")
    assert first["held_out_kl"] == pytest.approx(own["validation_kl"], rel=1e-5)
    _check_page((folder / "index.html").read_text(encoding="utf-8"), str(missing))
    assert run_labels_of_third(plan, home, folder) == ["student {model: " + str(missing) + "}"]


def run_labels_of_third(plan: AblationPlan, home: Path, folder: Path) -> list[str]:
    """The runs of one more call: only what failed is tried again."""
    seen: list[Event] = []
    ablate(plan, home, folder, Monitor(seen.append))
    return run_labels(seen)


def _check_page(page: str, missing: str) -> None:
    """The page needs no other file, has a plot for each curve, and names what went wrong."""
    assert "<script" not in page and "<link" not in page and "<img" not in page
    addresses = set(re.findall(r'https?://[^"\s<]+', page))
    assert all(each.startswith("http://www.w3.org/") for each in addresses)
    # The overview, and three curves for each of two axes.
    assert page.count("<svg") == 7
    assert page.count("refused: train.learning_rate: Input should be greater than 0") == 1
    assert "failed: " in page and missing in page
    assert not re.search(r"#0[1-4]0[1-4]0\d", page), "a stand-in of a colour is left"


@pytest.mark.long
def test_students_of_other_records_are_measured_on_those_of_the_job(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    from kd.pipeline import run_stages

    base = make_base(tiny_teacher, tiny_text)
    run_stages(base, tmp_path, tmp_path / "base")
    other = plan_axes(base, "threshold=0.2").jobs
    job = list(other.values())[1]
    assert job.config.cache.threshold == 0.2
    run_stages(job.config, tmp_path, tmp_path / "other")
    reports = [read_json(tmp_path / name / "report.json") for name in ("base", "other")]
    assert reports[0]["fingerprint"] != reports[1]["fingerprint"]
    student = tmp_path / "other" / "student"
    found = measure_student(base, tmp_path, tmp_path / "base", student, SILENT)
    assert found["validation_perplexity"] == pytest.approx(
        reports[1]["student_perplexity"], rel=1e-5
    )
    own = measure_student(job.config, tmp_path, tmp_path / "other", student, SILENT)
    assert own["validation_kl"] == pytest.approx(reports[1]["validation_kl"], rel=1e-5)
    assert found["validation_kl"] != pytest.approx(own["validation_kl"], rel=1e-4)


def test_settings_that_weigh_positions_have_records_of_their_own() -> None:
    base = make_base(Path("teacher"), Path("text.txt"))
    plan = plan_axes(base, "loss.entropy_weighting=1,2", "loss.alpha=0.5")
    itself, one, two, other = (select_cache_inputs(job.config) for job in plan.jobs.values())
    assert itself == other and one == two != itself


def test_curves_are_by_tokens_and_thinned_with_their_last_point(tmp_path: Path) -> None:
    lines = [{"type": "evaluation", "step": 0, "validation_perplexity": 9.0}]
    lines += [
        {"type": "metrics", "step": step, "tokens": 10 * step, "loss": 1.0 / step}
        for step in range(1, 1001)
    ]
    lines += [{"type": "evaluation", "step": 1000, "validation_perplexity": 2.0}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = read_curves(path)
    assert curves["perplexity"] == [(0.0, 9.0), (10_000.0, 2.0)] and curves["kl"] == []
    assert len(curves["loss"]) <= 201 and curves["loss"][-1] == (10_000.0, 1e-3)
