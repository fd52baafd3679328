"""The public functions with tiny models: the same caches and students as of a job in YAML."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM

import kd
from kd.config.jobfile import parse_config
from kd.errors import ConfigError
from kd.pipeline import run_stages
from kd.progress import Monitor
from kd.python.running import run_in_process, stop_on_signals

pytestmark = pytest.mark.usefixtures("one_thread")

STUDENT = {"init": {"layers": 1, "hidden_size": 16}}
DATA = {
    "validation_fraction": 0.1,
    "sequence_length": 32,
    "max_train_samples": 12,
    "max_eval_samples": 3,
}
SETTINGS: dict[str, Any] = {
    "train": {"max_steps": 2, "batch_size": 4, "eval_steps": 1, "logging_steps": 1},
    "cache": {"shard_sequences": 8},
    "evaluation": {"continuations": 0},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def result(home: Path, tiny_teacher: Path, tiny_text: Path) -> kd.DistillationResult:
    data = {"train": tiny_text, **DATA}
    return kd.distill(tiny_teacher, STUDENT, data, home=home, progress=False, **SETTINGS)


@pytest.mark.long
def test_a_call_equals_a_job_in_yaml(
    result: kd.DistillationResult, tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    job = parse_config(
        {
            "teacher": {"model": str(tiny_teacher)},
            "student": STUDENT,
            "data": {"train": str(tiny_text), **DATA},
            **SETTINGS,
        }
    )
    plain = run_stages(job, tmp_path, tmp_path / "run")
    assert plain.cache["fingerprint"] == result.fingerprint
    assert plain.cache["bytes_per_token"] == result.bytes_per_token
    assert plain.report["student_perplexity"] == result.perplexity
    weights = (tmp_path / "run" / "student" / "model.safetensors").read_bytes()
    assert (result.folder / "model.safetensors").read_bytes() == weights


def test_a_result_says_what_was_measured(result: kd.DistillationResult) -> None:
    text = str(result)
    for part in (f"{result.perplexity:,.2f}", f"{result.teacher_perplexity:,.2f}", "bytes per"):
        assert part in text
    assert result.report["student_perplexity"] == result.perplexity
    assert result.report_page.is_file() and result.run.parent.name == "runs"
    assert {line["step"] for line in result.metrics} >= {1, 2}


def test_a_result_loads_its_student(result: kd.DistillationResult) -> None:
    model, tokenizer = result.load()
    again = AutoModelForCausalLM.from_pretrained(result.folder)
    ids = torch.tensor([tokenizer("Anne Elliot")["input_ids"]])
    assert torch.equal(model(ids).logits, again(ids).logits)


def test_a_plot_is_a_figure_with_the_teacher_as_a_line(result: kd.DistillationResult) -> None:
    figure = result.plot()
    assert isinstance(figure, Figure)
    losses, perplexities = figure.axes
    assert "loss" in {line.get_label() for line in losses.lines}
    lines = {line.get_label(): list(line.get_ydata()) for line in perplexities.lines}
    assert set(lines["teacher"]) == {result.teacher_perplexity}
    assert lines["student"][-1] == pytest.approx(result.perplexity, rel=1e-4)
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_html_is_escaped(result: kd.DistillationResult) -> None:
    from dataclasses import replace

    wrong = replace(result, warnings=("<script>alert('x')</script> & more",))
    page = wrong._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page and "&amp; more" in page


def test_texts_in_memory_and_a_loaded_teacher_give_the_cache_of_their_files(
    result: kd.DistillationResult, home: Path, tiny_teacher: Path, tiny_text: Path, tokenizer: Any
) -> None:
    from datasets import Dataset

    teacher = AutoModelForCausalLM.from_pretrained(tiny_teacher)
    text = tiny_text.read_text(encoding="utf-8")
    rows = Dataset.from_list([{"text": text}])
    for train in ([text], rows):
        sealed = kd.build_cache(
            teacher,
            {"train": train, **DATA},
            tokenizer=tokenizer,
            home=home,
            progress=False,
            cache=SETTINGS["cache"],
        )
        assert sealed.fingerprint == result.fingerprint
        assert sealed.reused


@pytest.mark.long
def test_a_student_learns_from_a_sealed_cache(
    result: kd.DistillationResult, home: Path, tmp_path: Path
) -> None:
    settings = {key: value for key, value in SETTINGS.items() if key != "cache"}
    for sealed in (result.cached, result.cached.folder):
        student = kd.train_student(
            sealed,
            STUDENT,
            teacher=None if sealed is result.cached else result.job.teacher.model,  # type: ignore[union-attr]
            home=home,
            out=tmp_path / "out",
            progress=False,
            **settings,
        )
        assert student.perplexity == result.perplexity
        assert student.run == tmp_path / "out"
    with pytest.raises(ConfigError, match="neither a fingerprint nor the folder of a cache"):
        kd.train_student("somewhere", STUDENT, home=home)


@pytest.mark.long
def test_a_student_is_measured_beside_its_teacher(
    result: kd.DistillationResult, home: Path, tiny_teacher: Path
) -> None:
    text = "Sir Walter Elliot, of Kellynch Hall, was a man who never read. " * 20
    options: dict[str, Any] = {"data": {"sequence_length": 32}, "home": home, "progress": False}
    found = kd.evaluate(
        result, [text], teacher=tiny_teacher, evaluation=SETTINGS["evaluation"], **options
    )
    assert found.model == result.folder and (found.out / "report.md").is_file()
    assert found.kl is not None and found.teacher_perplexity is not None
    assert found.report["evaluation"]["ngrams"] is None  # none are counted on the text itself
    alone = kd.evaluate(result.load(), [text], evaluation=SETTINGS["evaluation"], **options)
    assert (alone.perplexity, alone.tokens) == (pytest.approx(found.perplexity), found.tokens)
    assert alone.kl is None and alone.teacher_perplexity is None


def test_a_job_that_is_wrong_is_refused_before_anything_runs(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'max_step'\. Did you mean max_steps\?"):
        kd.distill(tiny_teacher, STUDENT, tiny_text, home=tmp_path, train={"max_step": 1})
    with pytest.raises(ConfigError, match=r"kind search has no result in Python"):
        kd.run_job(kd.load_job(SEARCHING), home=tmp_path)
    assert not (tmp_path / "runs").exists()


SEARCHING = {
    "kind": "search",
    "teacher": {"model": "x"},
    "student": STUDENT,
    "data": {"train": "a.txt"},
    "train": {"max_steps": 1},
    "search": {"space": {"train.learning_rate": {"min": 0.001, "max": 0.01}}},
}


def test_progress_and_warnings_are_shown_or_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(monitor: Monitor) -> str:
        monitor.emit("stage", stage="train", phase="training")
        monitor.emit("progress", done=1, total=2, unit="steps")
        monitor.emit("metrics", step=1, loss=1.5, train_perplexity=4.5)
        monitor.emit("evaluation", step=1, validation_perplexity=20.5)
        monitor.emit("evaluation", step=2, validation_perplexity=None)  # not finite, in ranks
        monitor.emit("warning", message="Look out.")
        monitor.emit("progress", done=2, total=2, unit="steps")
        return "done"

    assert run_in_process(run, tmp_path, progress=False) == ("done", ("Look out.",))
    assert capsys.readouterr() == ("", "")
    assert run_in_process(run, tmp_path) == ("done", ("Look out.",))
    # The output of a test is no terminal: no bar is drawn there, and lines tell how far the run is.
    lines = ["train: training", "step 1: held-out perplexity 20.5", "warning: Look out."]
    assert capsys.readouterr() == ("", "\n".join([*lines, "train: 2 of 2 steps", ""]))


def test_a_notebook_has_a_bar_for_each_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # the module's name alone counts

    def run(monitor: Monitor) -> None:
        monitor.emit("stage", stage="precompute", phase="capturing")
        monitor.emit("progress", done=3, total=3, unit="shards")
        monitor.emit("stage", stage="train", phase="training")
        monitor.emit("metrics", step=1, loss=1.5, train_perplexity=4.5)
        monitor.emit("progress", done=1, total=2, unit="steps")

    run_in_process(run, tmp_path)
    shown = capsys.readouterr().err
    assert "precompute: capturing: 100%" in shown and "3/3" in shown
    assert "train: training:  50%" in shown and "loss=1.5, train ppl=4.5" in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_saves_and_stops(tmp_path: Path, number: signal.Signals) -> None:
    def run(monitor: Monitor) -> None:
        signal.raise_signal(number)
        monitor.check("after the step")

    def own(*_: object) -> None:
        """Whatever was there before; below nohup it would be to ignore the signal."""

    before = signal.signal(number, own)
    try:
        with pytest.raises(KeyboardInterrupt, match="Stopped on request after the step"):
            run_in_process(run, tmp_path, progress=False)
        assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)


def test_a_terminal_that_closes_asks_once_and_an_ignored_signal_stays_ignored() -> None:
    with stop_on_signals(lambda _: None) as stop:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop.is_set()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals(lambda _: None) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_stops_at_once() -> None:
    with stop_on_signals(lambda _: None) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_another_thread_leaves_the_signals_alone() -> None:
    found = []

    def use() -> None:
        with stop_on_signals(lambda _: None) as stop:
            found.append((stop.is_set(), signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found == [(False, before)]
