"""The file of single tokens agrees with float64 code, is bounded, and changes nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.support.paths import AUSTEN
from kd.config.data import DataConfig
from kd.config.jobfile import parse_config
from kd.evaluation.in_depth import STUDENT
from kd.evaluation.teacher_comparison import TEACHER, EvaluatedModel
from kd.evaluation.tokens import scoring
from kd.evaluation.tokens.scoring import FILE, TOP, decode_each, read_evenly, write_tokens
from kd.files import read_json
from kd.models.loading import load_model
from kd.models.tokenizers import load_tokenizer
from kd.pipeline import run_stages
from kd.progress import SILENT
from kd.stages.source import open_source

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY = 2048


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        "name": "tokens",
        "teacher": {"model": str(AUSTEN / "teacher")},
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {
            "train": str(AUSTEN / "text" / "persuasion.txt"),
            "validation_fraction": 0.1,
            "sequence_length": 32,
            "max_train_samples": 12,
            "max_eval_samples": 6,
        },
        "train": {"max_steps": 2, "batch_size": 4, "warmup_steps": 0},
        "evaluation": {"continuations": 1, "max_new_tokens": 2},
    }


@pytest.fixture(scope="module")
def run(job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("home")
    result = run_stages(parse_config(job), home, home / "run", SILENT)
    assert result.artifacts[FILE] == str(home / "run" / FILE)
    return home / "run"


def open_plain_text(job: dict[str, Any], home: Path) -> tuple[Any, Any]:
    alone = {name: part for name, part in job.items() if name != "teacher"}
    student = {"init": job["student"]["init"] | {"tokenizer": job["teacher"]["model"]}}
    config = parse_config(alone | {"kind": "train", "student": student, "loss": {"alpha": 1.0}})
    return open_source(config, home, home, SILENT)


def read_model(folder: Path) -> EvaluatedModel:
    model = load_model(folder, torch.float32)
    return EvaluatedModel.of(model, VOCABULARY, DataConfig(train="x", sequence_length=32))


@pytest.mark.long
def test_the_columns_agree_with_float64(run: Path) -> None:
    found = read_json(run / FILE)
    assert (found["format"], found["held_out"], found["without_teacher"]) == (1, True, None)
    ids = torch.tensor([each["ids"] for each in found["sequences"]])
    logprobs = {}
    for name, folder in ((TEACHER, AUSTEN / "teacher"), (STUDENT, run / "student")):
        model = load_model(folder, torch.float64).eval()
        with torch.no_grad():
            logits = model(ids).logits[..., :VOCABULARY]
        logprobs[name] = logits.log_softmax(-1)
    flat = {name: [] for name in logprobs}
    gold: list[int] = []
    for row, each in enumerate(found["sequences"]):
        for place in each["scored"]:
            gold.append(each["ids"][place])
            for name in flat:
                flat[name].append(logprobs[name][row, place - 1])
    assert len(gold) == 6 * 31
    for name, rows in flat.items():
        q_NV = torch.stack(rows)
        columns = found["models"][name]
        said_N = q_NV[torch.arange(len(gold)), gold]
        assert np.allclose(columns["entropy"], -(q_NV.exp() * q_NV).sum(1), atol=1e-3)
        assert np.allclose(columns["said"], said_N, atol=1e-3)
        rank_N = (q_NV > said_N[:, None]).sum(1) + 1
        assert np.abs(np.array(columns["rank"]) - rank_N.numpy()).max() <= 1  # ties of rounding
        top = q_NV.topk(TOP, dim=1)
        assert np.allclose(columns["top_logprobs"], top.values, atol=1e-3)
        assert np.mean(np.array(columns["top_ids"]) == top.indices.numpy()) > 0.99
    p_NV, q_NV = (torch.stack(flat[name]) for name in (TEACHER, STUDENT))
    assert np.allclose(found["kl"], (p_NV.exp() * (p_NV - q_NV)).sum(1), atol=1e-3)


def test_each_id_of_the_file_has_a_text(run: Path) -> None:
    found = read_json(run / FILE)
    shown = {each for sequence in found["sequences"] for each in sequence["ids"]}
    for columns in found["models"].values():
        shown |= {each for row in columns["top_ids"] for each in row}
    assert {int(each) for each in found["texts"]} == shown
    first = found["sequences"][0]["ids"]
    text = load_tokenizer(AUSTEN / "teacher").decode(first)
    assert "".join(found["texts"][str(each)] for each in first) == text
    assert (run / FILE).stat().st_size < 500 * 6 * 32


@pytest.mark.long
def test_the_report_is_the_same_without_the_file(
    job: dict[str, Any], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kd.evaluation.in_depth.write_tokens", lambda *_: None)
    result = run_stages(parse_config(job), tmp_path, tmp_path / "run", SILENT)
    assert FILE not in result.artifacts
    ours, theirs = (read_json(each / "report.json") for each in (run, tmp_path / "run"))
    for report in (ours, theirs):
        for name in ("profile", "train_seconds", "train_tokens_per_second"):
            del report[name]
        for name in ("costs", "student_is"):  # speeds
            del report["evaluation"][name]
    assert ours == theirs
    weights = "student/model.safetensors"
    assert (run / weights).read_bytes() == (tmp_path / "run" / weights).read_bytes()


@pytest.mark.long
def test_a_failure_is_a_warning(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("kd.evaluation.in_depth.write_tokens", fail)
    result = run_stages(parse_config(job), tmp_path, tmp_path / "run", SILENT)
    assert FILE not in result.artifacts
    assert result.report["evaluation"]["samples"]


def test_the_text_is_bounded_and_from_all_parts(job: dict[str, Any], tmp_path: Path) -> None:
    _, source = open_plain_text(job, tmp_path)
    numbers, sequences = read_evenly(source, 100)
    assert (numbers, sequences.tokens.shape) == ([0, 2, 5], (3, 32))
    numbers, sequences = read_evenly(source, 20)
    assert (numbers, sequences.tokens.shape) == ([0], (1, 20))
    assert sequences.target_mask.sum() == 19


def test_a_student_alone_has_no_kl(job: dict[str, Any], tmp_path: Path) -> None:
    tokenizer, source = open_plain_text(job, tmp_path)
    student = read_model(AUSTEN / "teacher")
    write_tokens(tmp_path / FILE, {STUDENT: student}, source, tokenizer, "it runs on a server")
    found = read_json(tmp_path / FILE)
    assert (found["kl"], found["without_teacher"]) == (None, "it runs on a server")
    assert [*found["models"]] == [STUDENT]


def test_parts_of_characters_and_unknown_ids_have_a_name(tokenizer: Any) -> None:
    (part,) = (each for each in tokenizer("é")["input_ids"][:1])
    texts = decode_each([part, 1 << 20], tokenizer)
    assert texts[str(1 << 20)] == f"<{1 << 20}>"
    assert "\ufffd" not in texts[str(part)]


def test_a_long_text_takes_several_chunks(
    job: dict[str, Any], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are the same where seven positions are a chunk."""
    tokenizer, source = open_plain_text(job, tmp_path)
    student = read_model(run / "student")
    found = []
    for elements in (scoring.CHUNK_ELEMENTS, 7 * VOCABULARY):
        monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", elements)
        write_tokens(tmp_path / FILE, {STUDENT: student}, source, tokenizer, None)
        found.append(read_json(tmp_path / FILE)["models"][STUDENT])
    assert found[0]["rank"] == found[1]["rank"]
    assert np.allclose(found[0]["entropy"], found[1]["entropy"], atol=2e-4)
