"""Every figure of a report is that of plain transformers on each document alone, over the zoo."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from cache.store import Cache, open_cache
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.evaluation.in_depth import STUDENT, measure_models
from kd.evaluation.report import make_report
from kd.evaluation.teacher_comparison import TEACHER
from kd.experiments.child import measure_student
from kd.loss.targets import widen_logprobs
from kd.models.loading import load_model
from kd.models.saving import load_saved_student
from kd.models.tokenizers import load_tokenizer
from kd.progress import SILENT
from kd.stages.capture import run_precompute
from kd.training.saved.state import TrainingProgress
from tests.support.kd.references import by_hand, plain_logprobs
from tests.support.packed_zoo import OURS, THEIRS, make_plain

pytestmark = pytest.mark.usefixtures("one_thread")

#: Families whose layers keep documents apart only if they are asked to, and two others.
FAMILIES = ["gpt_oss", "opt", "biogpt", "afmoe", "bert-generation", "llama", "gemma3_text"]
#: Rows of the students' LM heads: 64 more than the tokenizer has tokens.
ROWS = 2112
#: Families that the library itself cannot read again as it has saved them at the zoo's sizes.
UNREAD = ["deepseek_v2", "minicpm3"]


@pytest.fixture(scope="module")
def measured(
    tiny_teacher: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[JobConfig, Path, Cache]:
    """A job with the whole distributions of its teacher, on packed documents of many lengths."""
    home = tmp_path_factory.mktemp("home")
    rows = [f'{{"text": "{"Anne had a very good " * count}"}}' for count in (1, 2, 3, 4, 6)]
    (home / "rows.jsonl").write_text("\n".join(rows * 12), encoding="utf-8")
    data = {"train": str(home / "rows.jsonl"), "sequence_length": 48, "validation_fraction": 0.4}
    config = parse_config(
        {
            "teacher": {"model": str(tiny_teacher)},
            "student": {"init": {"layers": 1, "hidden_size": 16}},
            "data": data,
            "cache": {"profile": "dense", "dtype": "float32"},
            "train": {"max_steps": 1, "batch_size": 4},
            "evaluation": {"continuations": 0},
        }
    )
    cached = run_precompute(config, home, home / "run", SILENT).cache
    return config, home, open_cache(home / "caches" / cached["fingerprint"])


def save(kind: str, folder: Path) -> PreTrainedModel:
    """Save a random student, and return it as plain transformers reads it."""
    sizes: dict[str, Any] = {"is_decoder": True} if kind == "bert-generation" else {}
    if kind.startswith("gemma4"):  # each of its layers has embeddings too
        sizes["vocab_size_per_layer_input"] = ROWS
    make_plain(kind, vocab_size=ROWS, **sizes).save_pretrained(folder)
    plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    )
    return plain.eval()


@pytest.mark.parametrize(
    "kind",
    [
        *FAMILIES,
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in (*OURS, *THEIRS)
            if kind not in FAMILIES + UNREAD
        ),
    ],
)
def test_a_report_has_the_figures_of_plain_transformers_on_documents_alone(
    kind: str,
    measured: tuple[JobConfig, Path, Cache],
    tiny_teacher: Path,
    tmp_path: Path,
) -> None:
    config, home, source = measured
    plain = save(kind, tmp_path)
    teacher = load_model(tiny_teacher, torch.float32).eval()
    tokenizer = load_tokenizer(tiny_teacher)
    numbers = np.arange(source.train_count, source.train_count + source.validation_count)
    held_out, _ = source.read(numbers)
    assert held_out.document_start[:, 1:].any(), "documents share rows"
    # The student's rows beyond the tokens are in its softmax; the teacher's p is 0 there.
    q_NV, gold_N, _ = plain_logprobs(plain, held_out, ROWS)
    p_NV, _, _ = plain_logprobs(teacher, held_out)
    p_NV = widen_logprobs(p_NV, ROWS)
    loss = float(nn.functional.nll_loss(q_NV, gold_N))
    place_N = q_NV.argmax(1)
    kl = float((p_NV.exp() * (p_NV - q_NV)).sum(1).mean())
    agreement = float((place_N == p_NV.argmax(1)).double().mean())
    error, _ = by_hand(q_NV.exp().amax(1).tolist(), (place_N == gold_N).tolist(), 15)

    report = make_report(config, source, load_saved_student(tmp_path), TrainingProgress(), 2048)
    found = {name: report[name] for name in ("student_perplexity", "validation_kl")}
    found |= {name: report[name] for name in ("validation_agreement", "student_calibration_error")}
    assert found == pytest.approx(
        {
            "student_perplexity": math.exp(loss),
            "validation_kl": kl,
            "validation_agreement": agreement,
            "student_calibration_error": error,
        },
        rel=1e-4,
    )

    students = {STUDENT: load_saved_student(tmp_path)}
    deep = measure_models(config, source, students, teacher, tokenizer)["models"]
    assert {name: deep[STUDENT][name] for name in ("loss", "kl", "agreement")} == pytest.approx(
        {"loss": loss, "kl": kl, "agreement": agreement}, rel=1e-4
    )
    variation = float((p_NV.exp() - q_NV.exp()).abs().sum(1).mean()) / 2
    assert deep[STUDENT]["total_variation"] == pytest.approx(variation, rel=1e-4)
    own = float(nn.functional.nll_loss(p_NV, gold_N))
    assert deep[TEACHER]["loss"] == pytest.approx(own, rel=1e-4)

    ablated = measure_student(config, home, home / "run", tmp_path, SILENT)
    assert ablated["validation_loss"] == pytest.approx(loss, rel=1e-4)
