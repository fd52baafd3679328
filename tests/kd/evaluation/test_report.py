"""The report and its page have the teacher, baseline, samples and plots that a job requests."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache.rounding import ENTROPY_STEP, KNOWN_STEP
from cache.store import Cache
from kd.config.evaluation import EvaluationConfig
from kd.config.jobfile import parse_config
from kd.errors import ConfigError, TokenizerMismatch
from kd.evaluation import report as report_module
from kd.evaluation.baseline import build_starting_student
from kd.evaluation.in_depth import (
    BASELINE,
    BEFORE,
    STUDENT,
    EvaluationContext,
    evaluate_in_depth,
)
from kd.evaluation.plots import CONTEXT, CURVES, RELIABILITY
from kd.evaluation.report import make_report, render_report, write_report
from kd.evaluation.teacher_comparison import TEACHER
from kd.evaluation.words import WORDS, explain_words
from kd.files import read_json
from kd.models.tokenizers import get_vocabulary_size
from kd.preflight.problems import require_no_problems
from kd.progress import SILENT, Event, Monitor
from kd.stages.capture import run_precompute
from kd.stages.source import open_source
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.training.loop import train
from kd.training.saved.state import TrainingProgress
from tests.support.kd.references import assert_same_facts

pytestmark = pytest.mark.usefixtures("one_thread")


class Trained:
    """A job that was captured and trained, with all that a report needs."""

    def __init__(self, job: dict[str, Any], home: Path) -> None:
        self.config = parse_config(job)
        self.run_dir = home / "run"
        run_precompute(self.config, home, self.run_dir, SILENT)
        self.tokenizer, self.source = open_source(self.config, home, self.run_dir, SILENT)
        self.student = build_starting_student(self.config, self.tokenizer)
        vocabulary = get_vocabulary_size(self.tokenizer)
        self.progress: TrainingProgress = train(
            self.config, self.source, self.student, vocabulary, self.run_dir, SILENT
        )
        self.events: list[Event] = []

    def report(self, folder: Path, **evaluation: Any) -> dict[str, Any]:
        """The report with this evaluation section, from a copy of the run."""
        shutil.copytree(self.run_dir, folder)
        wanted = self.config.evaluation.model_copy(update=evaluation)
        config = self.config.model_copy(update={"evaluation": wanted})
        run = EvaluationContext(folder, self.tokenizer, Monitor(self.events.append))
        return make_report(
            config,
            self.source,
            self.student,
            self.progress,
            get_vocabulary_size(self.tokenizer),
            run,
        )


@pytest.fixture(scope="module")
def trained(job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    torch.set_num_threads(1)
    return Trained(job, tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_held_out_records_are_read_a_batch_at_a_time(
    batch_size: int, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profile hidden keeps thousands of bytes per token; the report needs four."""
    source = trained.source
    read = Cache.read
    seen = []
    assert isinstance(source, Cache) and source.validation_count == 4
    _, whole = source.read(np.arange(source.train_count, source.train_count + 4))

    def sparing(self: Cache, indices: np.ndarray, draws: int = 0) -> Any:
        assert len(indices) <= batch_size, "more than a batch at once"
        seen.extend(indices.tolist())
        return read(self, indices, draws)

    monkeypatch.setattr(Cache, "read", sparing)
    facts = report_module._measure_teacher(source, batch_size)
    assert seen == list(range(source.train_count, source.train_count + 4))
    gold = whole["known"][:, 0].mean(dtype=np.float64)
    entropy = whole["entropy"].mean(dtype=np.float64)
    assert facts["teacher_perplexity"] == pytest.approx(math.exp(gold * KNOWN_STEP), rel=1e-12)
    assert facts["teacher_entropy"] == pytest.approx(entropy * ENTROPY_STEP, rel=1e-12)


def test_by_default_the_student_s_calibration_and_bits_and_its_pictures(
    trained: Trained, tmp_path: Path
) -> None:
    report = trained.report(tmp_path / "run")
    found = report["evaluation"]
    assert list(found["models"]) == [STUDENT] and not {"samples", "tasks"} & found.keys()
    measured = found["models"][STUDENT]
    assert measured["perplexity"] == pytest.approx(report["student_perplexity"], rel=1e-5)
    assert measured["calibration_error"] == pytest.approx(
        report["student_calibration_error"], rel=1e-5
    )
    assert measured["loss"] * found["tokens"] / math.log(2) / found["bytes"] == pytest.approx(
        measured["bits_per_byte"]
    )
    assert found["tokens"] == trained.source.read([12, 13, 14, 15])[0].positions
    assert report["plots"] == [CURVES, RELIABILITY]
    page = render_report(report)
    assert (
        f"| {report['teacher_perplexity']:,.2f} |" in page
        and f"| {measured['bits_per_byte']:.4f} |" in page
    )
    words = page.partition("\n## Words\n")[2]
    for word in ("nats", "bits per byte", "held out", "KL", "parity", "calibration error"):
        assert f"\n- **{word}**: " in words
    assert f"]({CURVES})" in page and "10% of the weight on the hard labels" in page


@pytest.mark.long
def test_all_that_is_requested_is_measured(trained: Trained, tmp_path: Path) -> None:
    report = trained.report(
        tmp_path / "run", teacher=True, baseline=True, prompts=("She was",), max_new_tokens=4
    )
    found = report["evaluation"]
    assert list(found["models"]) == [BEFORE, STUDENT, BASELINE, TEACHER]
    student, before, baseline, teacher = (
        found["models"][name] for name in (STUDENT, BEFORE, BASELINE, TEACHER)
    )
    first = trained.progress.first_evaluation or {}
    assert before["perplexity"] == pytest.approx(first["validation_perplexity"], rel=1e-5)
    assert student["perplexity"] == pytest.approx(report["student_perplexity"], rel=1e-5)
    assert teacher["perplexity"] == pytest.approx(report["teacher_perplexity"], rel=2e-3)
    assert "kl" not in teacher and teacher["reliability"]
    last = [line for line in lines(tmp_path / "run" / "baseline") if line["type"] == "evaluation"][
        -1
    ]
    assert baseline["perplexity"] == pytest.approx(last["validation_perplexity"], rel=1e-5)
    assert len({before["kl"], student["kl"], baseline["kl"]}) == 3
    assert student["kl"] < before["kl"], "it has learned something"
    assert {name: len(each) for name, each in found["samples"].items()} == {STUDENT: 1, TEACHER: 1}
    assert report["plots"] == [CURVES, RELIABILITY, CONTEXT]

    page = render_report(report)
    for name in (TEACHER, BEFORE, STUDENT, BASELINE):
        assert f"\n| {name} |" in page
    assert (
        page.index(f"| {TEACHER} |") < page.index(f"| {BEFORE} |") < page.index(f"| {BASELINE} |")
    )
    assert f"| {student['kl']:.4f} |" in page and f"| {student['agreement']:.1%} |" in page
    assert f"\n{found['samples'][STUDENT][0]['text'].splitlines()[0]}" in page
    phases = [event.data.get("phase") for event in trained.events if event.type == "stage"]
    assert {"loading the teacher", "measuring on the held-out text"} <= set(phases)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


@pytest.mark.long
def test_it_is_written_in_both_forms_and_the_student_s_card_has_the_pictures(
    trained: Trained, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    report = trained.report(run_dir)
    (run_dir / "student").mkdir()
    write_report(run_dir, report)
    assert read_json(run_dir / "report.json") == report
    assert (run_dir / "report.md").read_text(encoding="utf-8") == render_report(report)
    for name in report["plots"]:
        assert (run_dir / name).read_bytes() == (run_dir / "student" / name).read_bytes()
    again = trained.report(tmp_path / "again")
    assert again == report, "the same run, the same report"


def test_without_a_run_there_is_what_the_records_tell(trained: Trained) -> None:
    config = trained.config
    vocabulary = get_vocabulary_size(trained.tokenizer)
    report = make_report(config, trained.source, trained.student, trained.progress, vocabulary)
    assert "evaluation" not in report and report["validation_kl"] > 0
    assert f"| {STUDENT} | {report['student_perplexity']:,.2f} |" in render_report(report)


# ---------------------------------------------------------------------- the page


BARE: dict[str, Any] = {
    "name": "x",
    "teacher": "t",
    "alpha": 0.1,
    "temperature": 1.0,
    "evaluation_temperature": 1.0,
    "steps": 2,
    "kept_step": 2,
    "tokens": 10,
    "parameters": 5,
}


NGRAMS = {"counted_tokens": 1000, "unigram_loss": 3.0, "bigram_loss": 2.0}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"alpha": {"schedule": "linear", "start": 0.5, "end": 0.1}},
            "50% to 10% of the weight on the hard labels.",
        ),
        ({"temperature": 2.0}, "- Temperature: 2."),
        (
            {"temperature": {"mode": "lookahead"}, "temperature_at_end": 1.3254},
            "- Temperature: learned (lookahead), 1.33 at the end.",
        ),
        (
            {"temperature": {"schedule": "cosine"}, "temperature_at_end": None},
            "- Temperature: by schedule (cosine).",
        ),
        (
            {"validation_kl": 0.5, "evaluation_temperature": 2.0},
            "KL(teacher ‖ student) at temperature 2 is 0.500 nats",
        ),
        ({"evaluation": {"models": {}, "tasks": {"arc": {"acc": 0.25}}}}, "| arc | acc | 0.2500 |"),
        (
            {"quality_kept": 0.745, "evaluation": {"tokens": 2500, "bytes": 9, "ngrams": NGRAMS}},
            "- Quality: the student keeps 74.5% of the teacher's quality, ",
        ),
        (
            {"quality_kept": -0.4, "evaluation": {"tokens": 2500, "bytes": 9, "ngrams": NGRAMS}},
            "none of the teacher's quality, because it predicts worse than a unigram",
        ),
        (
            {"evaluation": {"tokens": 2500, "bytes": 9, "ngrams": NGRAMS}},
            "a bigram has perplexity 7.39 and a unigram 20.09 on 2,500 held-out tokens.",
        ),
        (
            {"student_perplexity": 9.0, "evaluation": {"tokens": 9, "bytes": 9, "ngrams": NGRAMS}},
            "The student predicts worse than that bigram, which only counts pairs: train longer",
        ),
        ({"teacher_quantization": "int8"}, "` with its weights in int8: "),
        (
            {"bytes_per_token": 19.41, "entries_per_token": 13.2, "fingerprint": "89b9"},
            "on disk, everything included, for 13.2 entries per token (`89b9`).",
        ),
        (
            {"bytes_per_token": 553.3, "entries_per_token": 0.0, "fingerprint": "8435"},
            "- Cache: 553.3 bytes per token on disk, everything included (`8435`).",
        ),
    ],
)
def test_the_page_says(changes: dict[str, Any], line: str) -> None:
    assert line in render_report(BARE | changes)
    assert line not in render_report(BARE)


def test_a_roll_back_is_listed_among_the_checks() -> None:
    """Its verdict is ok because the run goes on, but it is no check that passed."""
    verdicts = [
        {"check": "parity", "ok": True, "message": "It agrees.", "step": 0, "remedy": ""},
        {
            "check": "spike",
            "ok": True,
            "message": "Back to step 40 with half the rate.",
            "step": 40,
            "remedy": "",
        },
    ]
    page = render_report(BARE | {"checks": verdicts})
    assert "Step 40, spike: Back to step 40 with half the rate.\n" in page
    assert "- Checks passed: parity." in page


def test_what_to_do_about_an_alarm_is_said_once() -> None:
    alarm = {"check": "clipping", "ok": False, "message": "Clipped.", "remedy": "Lower the rate."}
    page = render_report(BARE | {"checks": [alarm | {"step": step} for step in (3, 9)]})
    assert "- Step 3, clipping: Clipped. Lower the rate.\n- Step 9, clipping: Clipped.\n" in page


def test_the_teacher_is_the_one_whose_records_were_read(trained: Trained, tmp_path: Path) -> None:
    store = trained.source
    assert trained.config.teacher is not None
    other = trained.config.teacher.model_copy(update={"model": "elsewhere/other"})
    sealed = trained.config.cache.model_copy(update={"fingerprint": store.identity.fingerprint})
    config = trained.config.model_copy(update={"teacher": other, "cache": sealed})
    report = make_report(
        config,
        trained.source,
        trained.student,
        trained.progress,
        get_vocabulary_size(trained.tokenizer),
    )
    assert (
        report["teacher"] == store.manifest.provenance.teacher_name == trained.config.teacher.model
    )


def test_a_sample_cannot_break_the_page() -> None:
    samples = {STUDENT: [{"prompt": "# a\n\n```", "text": "| b |\n<i>"}]}
    page = render_report(BARE | {"evaluation": {"models": {}, "samples": samples}})
    assert "\n````text\n# a\n\n```\n````\n" in page and "\n```text\n| b |\n<i>\n```\n" in page


# ---------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        (
            {
                "kind": "train",
                "teacher": None,
                "loss": {"alpha": 1.0},
                "evaluation": {"teacher": True},
            },
            "teacher",
        ),
        (
            {
                "teacher": {
                    "model": "m",
                    "backend": "http",
                    "url": "http://127.0.0.1:1/v1",
                    "tokenizer": "t",
                },
                "cache": {"profile": "topk"},
                "evaluation": {"teacher": True},
            },
            "teacher",
        ),
        (
            {
                "kind": "precompute",
                "student": None,
                "train": None,
                "evaluation": {"baseline": True},
            },
            "baseline",
        ),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused_by_its_field(
    job: dict[str, Any], changes: dict[str, Any], pointer: str
) -> None:
    student = {"init": {"layers": 1, "hidden_size": 16, "tokenizer": job["teacher"]["model"]}}
    asked = EvaluationConfig(**changes["evaluation"])
    config = parse_config({**job, "student": student} | changes | {"evaluation": {}})
    with pytest.raises(ConfigError) as caught:  # reading a whole job refuses it
        require_no_problems(config.model_copy(update={"evaluation": asked}))
    assert [problem.pointer for problem in caught.value.problems] == [f"/evaluation/{pointer}"]
    require_no_problems(parse_config(job))


def test_a_teacher_with_another_tokenizer_is_refused(trained: Trained, tmp_path: Path) -> None:
    assert trained.config.teacher is not None
    stranger = shutil.copytree(trained.config.teacher.model, tmp_path / "stranger")
    content = read_json(stranger / "tokenizer.json")
    (stranger / "tokenizer.json").write_text(
        json.dumps(content | {"normalizer": {"type": "Lowercase"}})
    )
    other = trained.config.teacher.model_copy(update={"model": str(stranger)})
    wanted = trained.config.evaluation.model_copy(update={"teacher": True})
    config = trained.config.model_copy(update={"teacher": other, "evaluation": wanted})
    run = EvaluationContext(tmp_path, trained.tokenizer)
    with pytest.raises(TokenizerMismatch, match="does not encode text alike"):
        evaluate_in_depth(config, trained.source, trained.student, run, with_start=False)


def test_where_nothing_is_held_out_nothing_is_measured(trained: Trained, tmp_path: Path) -> None:
    rows, _ = trained.source.read([0, 1])
    source = PlainText(Corpus(rows, rows.select(slice(0, 0))))
    wanted = trained.config.evaluation.model_copy(update={"teacher": True, "prompts": ("She was",)})
    config = trained.config.model_copy(update={"evaluation": wanted})
    run = EvaluationContext(tmp_path, trained.tokenizer, training_folder=trained.run_dir)
    found = evaluate_in_depth(config, source, trained.student, run, with_start=True)
    assert (found["evaluation"]["models"], found["evaluation"]["tokens"], found["plots"]) == (
        {},
        0,
        [CURVES],
    )
    page = render_report(BARE | found)
    assert "held-out text" not in page and "## Samples" in page


@pytest.mark.long
def test_a_closer_look_twice_sees_the_same(trained: Trained, tmp_path: Path) -> None:
    wanted = trained.config.evaluation.model_copy(update={"teacher": True})
    config = trained.config.model_copy(update={"evaluation": wanted})
    first, second = (
        evaluate_in_depth(
            config,
            trained.source,
            trained.student,
            EvaluationContext(tmp_path, trained.tokenizer),
            with_start=True,
        )
        for _ in range(2)
    )
    assert_same_facts(first["evaluation"], second["evaluation"], rel=0)


def test_samples_are_labelled_fenced_and_never_drawn_at_the_height_of_their_white_space() -> None:
    prompt = " a truth ```` of"
    texts = {STUDENT: "\n \n" * 40 + "it\n\nwas:\n    so", TEACHER: " \t\n"}
    samples = {name: [{"prompt": prompt, "text": text}] for name, text in texts.items()}
    page = render_report(BARE | {"evaluation": {"samples": samples}})
    shown = page.partition("## Samples\n")[2].partition("\n![")[0].strip()
    assert shown == (
        "### Prompt 1\n\n`````text\na truth ```` of\n`````\n\n"
        "The student continues:\n\n```text\n↵×80 ␣×40it\n\nwas:\n    so\n```\n\n"
        "The teacher continues:\n\n```text\n↵×1 ␣×2\n```"
    )


def test_a_word_in_a_sample_is_not_explained() -> None:
    assert explain_words(["```text", "parity", "```", "perplexity"])[3:] == [
        "- **perplexity**: " + WORDS["perplexity"][1]
    ]
    assert explain_words(["```text", "nats", "```"]) == []
    longer = ["`````text", "a ```` of nats", "`````", "KL", "```text", "bigram", "```"]
    assert explain_words(longer)[3:] == ["- **KL**: " + WORDS["KL"][1] + "."]
