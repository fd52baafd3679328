"""A finished model on a job's held-out text: from a run or a folder, with or without teacher."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kd.config.jobfile import parse_config
from kd.errors import ConfigError, DataError, ModelError
from kd.evaluation.baseline import build_starting_student
from kd.evaluation.in_depth import BASELINE, BEFORE, STUDENT
from kd.evaluation.teacher_comparison import TEACHER
from kd.examine import ExaminedModel, examine, render_examination
from kd.files import read_json
from kd.models.loading import load_model
from kd.models.saving import save_student
from kd.progress import SILENT
from kd.stages.capture import run_precompute
from tests.support.kd.references import assert_same_facts

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def job(tiny_teacher: Path, tiny_text: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "teacher": {"model": str(tiny_teacher)},
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {
            "train": str(tiny_text), "validation_fraction": 0.1, "sequence_length": 32,
            "max_train_samples": 8, "max_eval_samples": 3,
        },
        "train": {"max_steps": 2, "batch_size": 4, "learning_rate": 1e-2},
    }  # fmt: skip


@pytest.fixture(scope="module")
def exact_teacher(tiny_teacher: Path, tokenizer: Any, tmp_path_factory: Any) -> Path:
    """The teacher without the rows of its LM head that no token has."""
    folder: Path = tmp_path_factory.mktemp("exact")
    model = load_model(tiny_teacher, torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run_dir(job: dict[str, Any], tokenizer: Any, tmp_path: Path) -> Path:
    """A run as a job leaves it: here, of a student that began elsewhere."""
    config = parse_config(job | {"train": {"max_steps": 1, "seed": 9}})
    run_dir = tmp_path / "home" / "runs" / "mine"
    build_starting_student(config, tokenizer).save_pretrained(run_dir / "student")
    tokenizer.save_pretrained(run_dir / "student")
    (run_dir / "metrics.jsonl").write_text(
        json.dumps({"type": "metrics", "step": 1, "loss": 7.0}) + "\n"
    )
    return run_dir


def look(
    job: dict[str, Any], target: str | Path, home: Path, out: Path, **evaluation: Any
) -> dict[str, Any]:
    config = parse_config(job | {"evaluation": evaluation})
    return examine(config, ExaminedModel.find(str(target), home), home, out, SILENT)


def test_a_run_is_found_by_its_name_and_by_its_folder_and_a_model_by_its_own(
    run_dir: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    assert (
        ExaminedModel.find("mine", home)
        == ExaminedModel.find(str(run_dir), home)
        == ExaminedModel(run_dir / "student", run_dir)
    )
    assert ExaminedModel.find("mine", home).folder(home, "tiny") == run_dir / "evaluation"
    alone = ExaminedModel.find(str(run_dir / "student"), home)
    assert alone == ExaminedModel(run_dir / "student", None)
    assert alone.folder(home, "tiny") == home / "evaluations" / "tiny"
    with pytest.raises(ModelError, match="'nowhere/at/all' does not exist"):
        ExaminedModel.find("nowhere/at/all", home)


def test_a_run_is_found_by_the_beginning_of_its_name_and_the_newest_as_last(
    run_dir: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    found = ExaminedModel(run_dir / "student", run_dir)
    shutil.copytree(run_dir, old := run_dir.parent / "job_01minute")
    for run, seconds in ((old, 100), (run_dir, 200)):
        (run / "config.json").write_text("{}")
        os.utime(run / "config.json", (seconds, seconds))
    (old / "evaluation").mkdir()  # the folder's own time is now
    assert ExaminedModel.find("last", home) == ExaminedModel.find("min", home.resolve()) == found
    for name in ("job_01", "01m", "job_01minute"):
        assert ExaminedModel.find(name, home) == ExaminedModel(old / "student", old)
    run_dir.rename(run_dir.with_name("job_01"))
    assert ExaminedModel.find("job_01", home).run == run_dir.with_name("job_01"), (
        "its whole name is another's beginning"
    )
    with pytest.raises(
        ModelError, match=r"'job_' names 2 runs under .*: job_01, job_01minute\."
    ) as caught:
        ExaminedModel.find("job_", home)
    assert "more of the name" in caught.value.remedy
    shutil.rmtree(old / "student")
    with pytest.raises(ModelError, match=r"the run .*/job_01minute has no student"):
        ExaminedModel.find("01m", home)


def test_without_runs_there_is_no_last_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no run under"):
        ExaminedModel.find("last", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["device_map", "tensor", "fsdp"])
def test_a_spread_teacher_is_measured_in_one_process_and_continues_no_prompts(
    job: dict[str, Any], run_dir: Path, tmp_path: Path, parallel: str
) -> None:
    teacher = job["teacher"] | {"parallel": parallel, "host_memory": 0}
    spread = job | {"teacher": teacher, "resources": {"gpus": 2}}
    plain, found = (
        look(each, run_dir, tmp_path / "home", tmp_path / name)["evaluation"]
        for name, each in (("plain", job), ("spread", spread))
    )
    assert found["models"] == plain["models"] and TEACHER in found["models"]
    assert list(found["samples"]) == [STUDENT] != list(plain["samples"])
    page = (tmp_path / "spread" / "report.md").read_text(encoding="utf-8")
    assert "The teacher was left out: its weights are spread over several devices" in page


@pytest.mark.long
def test_a_run_is_measured_against_teacher_and_start(
    job: dict[str, Any], run_dir: Path, tmp_path: Path
) -> None:
    out = run_dir / "evaluation"
    report = look(job, "mine", tmp_path / "home", out, prompts=["She was"], max_new_tokens=3)
    assert sorted(path.name for path in out.iterdir()) == [
        "curves.png", "kl_by_context.png", "reliability.png", "report.json", "report.md",
        "tokens.json",
    ]  # fmt: skip
    assert read_json(out / "report.json") == report
    assert (out / "report.md").read_text(encoding="utf-8") == render_examination(report)
    measured = report["evaluation"]["models"]
    assert list(measured) == [BEFORE, STUDENT, TEACHER]
    assert measured[STUDENT]["perplexity"] != measured[BEFORE]["perplexity"]
    assert {name: len(texts) for name, texts in report["evaluation"]["samples"].items()} == {
        STUDENT: 1,
        TEACHER: 1,
    }
    page = render_examination(report)
    assert (
        page.startswith(f"# `{run_dir / 'student'}`\n")
        and f"| {measured[STUDENT]['kl']:.4f} |" in page
    )
    assert (
        f"Measured on {report['evaluation']['tokens']} held-out tokens" in page
        and "## Samples" in page
    )


@pytest.mark.long
def test_the_start_is_that_of_the_run_s_own_job(
    job: dict[str, Any], run_dir: Path, tmp_path: Path
) -> None:
    """A search's trials have jobs of their own, and a job file may have been edited since."""
    trial = parse_config(job | {"student": {"init": {"layers": 1, "hidden_size": 8}}})
    expected = look(trial.model_dump(mode="json"), "mine", tmp_path / "home", tmp_path / "expected")
    (run_dir / "config.json").write_text(trial.model_dump_json())
    found = look(job, "mine", tmp_path / "home", tmp_path / "found")
    (run_dir / "config.json").write_text("{}")  # of another version, say: then the job file it is
    others = look(job, "mine", tmp_path / "home", tmp_path / "others")
    start = [
        report["evaluation"]["models"][BEFORE]["perplexity"] for report in (expected, found, others)
    ]
    assert start[0] == start[1] != start[2]


@pytest.mark.long
def test_a_job_that_trains_nothing_can_say_what_to_measure(
    job: dict[str, Any], run_dir: Path, tmp_path: Path
) -> None:
    asked = {name: section for name, section in job.items() if name != "train"} | {
        "kind": "precompute"
    }
    report = look(asked, "mine", tmp_path / "home", tmp_path / "found")
    assert list(report["evaluation"]["models"]) == [STUDENT, TEACHER]


@pytest.mark.long
def test_the_teacher_as_a_model_is_its_own_equal(
    job: dict[str, Any], exact_teacher: Path, tmp_path: Path
) -> None:
    measured = look(job, exact_teacher, tmp_path / "home", tmp_path / "out")["evaluation"]["models"]
    assert list(measured) == [STUDENT, TEACHER], "no start is known of a model that no run made"
    assert (measured[STUDENT]["kl"], measured[STUDENT]["agreement"]) == (0.0, 1.0)
    assert measured[STUDENT]["loss"] == measured[TEACHER]["loss"]
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["texts"], (
        "no cache is captured"
    )


@pytest.mark.long
def test_without_a_teacher_a_model_is_measured_on_the_text_alone(
    job: dict[str, Any], tiny_teacher: Path, tokenizer: Any, tmp_path: Path
) -> None:
    student = {"init": {"layers": 1, "hidden_size": 16, "tokenizer": str(tiny_teacher)}}
    plain = job | {"kind": "train", "teacher": None, "student": student, "loss": {"alpha": 1.0}}
    report = look(plain, tiny_teacher, tmp_path, tmp_path / "out")
    assert report["teacher"] is None and report["evaluation"]["tokens"] == 3 * 31
    measured = report["evaluation"]["models"][STUDENT]
    assert "kl" not in measured and measured["bits_per_byte"] > 0


@pytest.mark.long
def test_a_baseline_is_trained_from_the_cache_in_the_run_s_folder(
    job: dict[str, Any], run_dir: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    run_precompute(parse_config(job), home, run_dir, SILENT)
    report = look(job, "mine", home, tmp_path / "out", baseline=True)
    assert list(report["evaluation"]["models"]) == [BEFORE, STUDENT, BASELINE, TEACHER]
    assert (run_dir / "baseline" / "metrics.jsonl").is_file() and not (
        tmp_path / "out" / "baseline"
    ).exists()
    fingerprint = read_json(run_dir / "cache.json")["fingerprint"]
    named = job | {"kind": "train", "cache": {"fingerprint": fingerprint}, "data": {}}
    again = look(named, "mine", home, tmp_path / "again")
    assert again["evaluation"]["tokens"] == report["evaluation"]["tokens"], (
        "the text of the cache that is named"
    )
    assert again["evaluation"]["models"][STUDENT] == report["evaluation"]["models"][STUDENT]


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft's own look at it
def test_a_run_of_adapters_alone_is_measured_as_it_would_be_merged(
    job: dict[str, Any], exact_teacher: Path, tokenizer: Any, tmp_path: Path
) -> None:
    taught = job | {"student": {"model": str(exact_teacher), "lora": {"rank": 2, "merge": False}}}
    plan = parse_config(taught).student
    assert plan is not None and plan.lora is not None
    for merge in (False, True):
        student = build_starting_student(parse_config(taught), tokenizer)
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.01)
        chosen = plan.model_copy(update={"lora": plan.lora.model_copy(update={"merge": merge})})
        save_student(student, tokenizer, tmp_path / "runs" / str(merge) / "student", chosen)
    alone, merged = (
        look(taught, name, tmp_path, tmp_path / name)["evaluation"]["models"]
        for name in ("False", "True")
    )
    assert not (tmp_path / "runs" / "False" / "student" / "config.json").exists()
    assert_same_facts(alone[STUDENT], merged[STUDENT], rel=1e-4)
    assert alone[BEFORE]["kl"] == 0.0 < alone[STUDENT]["kl"], "adapters begin as nothing"


@pytest.mark.parametrize(
    ("changes", "error", "complaint"),
    [
        ({"data": {"validation_fraction": 0.0}}, DataError, "nothing to measure on"),
        (
            {"data": {"sequence_length": 1024, "max_eval_samples": None}},
            ModelError,
            "context of 512 tokens",
        ),
        ({"evaluation": {"tasks": ["nonesuch"]}}, ConfigError, "lm-eval"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    job: dict[str, Any], changes: dict[str, Any], error: type[Exception], complaint: str,
    tiny_teacher: Path, tmp_path: Path,
) -> None:  # fmt: skip
    wrong = job | {name: {**job.get(name, {}), **values} for name, values in changes.items()}
    with pytest.raises(error, match=complaint):
        look(wrong, tiny_teacher, tmp_path, tmp_path / "out", **changes.get("evaluation", {}))
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_model_loses_what_it_gives_to_rows_without_a_token(
    job: dict[str, Any], tiny_teacher: Path, exact_teacher: Path, tmp_path: Path
) -> None:
    """Its LM head has 64 rows more than tokens, which sampling could take.

    Against itself without them, KL is the mean of -log of what it leaves for tokens.
    """
    exact, padded = (
        look(job, folder, tmp_path, tmp_path / folder.name)["evaluation"]["models"]
        for folder in (exact_teacher, tiny_teacher)
    )
    assert padded[TEACHER]["loss"] == pytest.approx(exact[TEACHER]["loss"], rel=1e-6)
    assert padded[STUDENT]["kl"] > 0.01
    lost = padded[STUDENT]["loss"] - exact[STUDENT]["loss"]
    assert lost == pytest.approx(padded[STUDENT]["kl"], rel=1e-5)
