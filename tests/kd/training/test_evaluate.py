"""Evaluation during a run: every mean against float64 on the logits of the library itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from cache.store import Cache, open_cache
from kd.capture.capturing import capture_cache
from kd.capture.plan import plan_capture
from kd.config.jobfile import parse_config
from kd.config.loss import LossConfig
from kd.loss.decoder import TargetDecoder
from kd.loss.targets import Targets
from kd.models.lm_head import LMHead, find_lm_head
from kd.models.loading import load_model
from kd.models.precision import Precision
from kd.progress import SILENT
from kd.training.evaluate import choose_evaluation_temperature, evaluate_student, score_positions
from tests.support.kd.references import by_hand, plain_logprobs
from tests.support.kd.students import make_llama

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tiny_teacher: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    home = tmp_path_factory.mktemp("home")
    job = {
        "kind": "precompute",
        "teacher": {"model": str(tiny_teacher)},
        "data": {
            "train": str(tiny_text),
            "sequence_length": 32,
            "max_train_samples": 2,
            "max_eval_samples": 5,
        },
        "cache": {"profile": "dense", "dtype": "float32"},
    }
    job["data"]["validation_fraction"] = 0.1
    planned = plan_capture(parse_config(job))
    capture_cache(planned, home / "caches", SILENT)
    return open_cache(home / "caches" / planned.identity.fingerprint)


@pytest.fixture(scope="module")
def student() -> LlamaForCausalLM:
    return make_llama(2112, layers=1, seed=5, initializer_range=0.5)


def run(
    student: LlamaForCausalLM, source: Cache, temperature: float, **options: Any
) -> dict[str, Any]:
    student.train()  # evaluate switches dropout off by itself
    precision = Precision.choose("fp32", CPU)
    decoder = TargetDecoder.of(source, CPU)
    return evaluate_student(
        student,
        find_lm_head(student, 2048),
        source,
        decoder,
        2,
        precision,
        CPU,
        temperature,
        **options,
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_every_mean_is_that_of_the_models(
    source: Cache, student: LlamaForCausalLM, tiny_teacher: Path, temperature: float
) -> None:
    sequences, _ = source.read(
        np.arange(source.train_count, source.train_count + source.validation_count)
    )
    q_NV, gold_N, _ = plain_logprobs(student, sequences)
    p_NV, _, _ = plain_logprobs(load_model(tiny_teacher, torch.float32).eval(), sequences)
    found = run(student, source, temperature)
    ends = [found.pop(f"validation_perplexity_{end}") for end in ("low", "high")]
    assert ends[0] < found["validation_perplexity"] < ends[1], "the text is short"

    loss = float(nn.functional.nll_loss(q_NV, gold_N))
    tempered = [(each / temperature).log_softmax(1) for each in (q_NV, p_NV)]
    confidence_N, place_N = q_NV.exp().max(1)
    error, _ = by_hand(confidence_N.tolist(), (place_N == gold_N).tolist(), 15)
    assert found == pytest.approx(
        {
            "validation_loss": loss,
            "validation_perplexity": math.exp(loss),
            "validation_tokens": len(gold_N),
            "validation_kl": float(
                nn.functional.kl_div(*tempered, reduction="batchmean", log_target=True)
            ),
            "validation_agreement": float((place_N == p_NV.argmax(1)).double().mean()),
            "validation_calibration_error": error,
        },
        rel=1e-4,
    )


@pytest.mark.parametrize(
    ("temperature", "at"),
    [
        (2.0, 2.0),
        ({"schedule": "linear", "start": 4.0, "end": 1.5}, 1.5),
        ({"mode": "adversarial", "min": 0.5, "max": 2.0, "init": 1.2}, 1.2),
    ],
)
def test_all_evaluations_of_a_job_are_made_at_one_temperature(temperature: Any, at: float) -> None:
    assert choose_evaluation_temperature(LossConfig(temperature=temperature)) == at


class CountsCasts(TorchDispatchMode):
    """Counts the tensors of a shape that are cast."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.casts = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cast = operation is torch.ops.aten._to_copy.default
        self.casts += cast and args[0].shape == self.shape
        return operation(*args, **(kwargs or {}))


def test_an_evaluation_casts_the_lm_head_once_and_not_for_every_chunk() -> None:
    """The weights of a vocabulary are gigabytes."""
    torch.manual_seed(0)
    head = LMHead(torch.randn(50, 8), None, 1.0, None, 50)
    hidden_ND = torch.randn(12, 8).bfloat16()
    targets = Targets(torch.randint(50, (12,)), None)
    with CountsCasts((50, 8)) as counter:
        score_positions(hidden_ND, head, targets, chunk_size=3)
    assert counter.casts == 1
