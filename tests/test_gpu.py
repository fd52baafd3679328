"""What a GPU does differently, against the CPU or float64. A bare GPU machine needs no installed distribution for it:

PYTHONPATH=. python -m pytest --noconftest tests/test_gpu.py
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cache.records import Records
from cache.store import verify
from kd import losses
from kd.config import JobConfig
from kd.errors import Interrupted
from kd.jobfile import parse_config
from kd.losses import RecordTargets, Targets, distillation_loss
from kd.models import Head, load_tokenizer
from kd.pipeline import distill
from kd.progress import Event, Monitor
from kd.sampling import draws, sample_records
from tests.test_kd_losses import dense_loss, random_record, relative

pytestmark = [
    pytest.mark.gpu,
    # The one tool whose lack is no failure in CI either: a machine without a GPU cannot be given one.
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")
AUSTEN = Path(__file__).resolve().parent.parent / "examples" / "austen"
THRESHOLD = 0.04


@pytest.fixture(autouse=True)
def full_float32() -> Iterator[None]:
    """Products in float32 are float32: a run that allowed TF32 leaves it allowed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


# ---------------------------------------------------------------------- records


def sample(logits_NV: torch.Tensor, device: torch.device) -> Records:
    uniform_N, order_V = map(torch.from_numpy, draws(0, 3, np.arange(len(logits_NV)), logits_NV.shape[1]))
    gold_N = torch.arange(len(logits_NV))
    inputs = (each.to(device) for each in (logits_NV, gold_N, uniform_N, order_V))
    return sample_records(*inputs, THRESHOLD)


def random_logits(dtype: torch.dtype) -> torch.Tensor:
    """Rows from flat to peaked, none with a probability so near the threshold that rounding could decide."""
    generator = torch.Generator().manual_seed(0)
    spread_N = torch.linspace(0.5, 8.0, 200, dtype=torch.float64)
    logits_NV = (torch.randn(200, 5000, generator=generator, dtype=torch.float64) * spread_N[:, None]).to(dtype)
    clear_N = (torch.softmax(logits_NV.double(), -1) - THRESHOLD).abs().amin(-1) > 1e-5
    assert clear_N.sum() > 150
    return logits_NV[clear_N]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_records_of_given_logits_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    logits_NV = random_logits(dtype)
    found, expected = sample(logits_NV, GPU), sample(logits_NV, torch.device("cpu"))
    assert np.array_equal(found.head_count, expected.head_count)
    if dtype == torch.bfloat16:  # coarse logits tie, and rounding then orders the tied
        assert all(set(a) == set(b) for a, b in zip(heads(found), heads(expected), strict=True))
    else:
        assert np.array_equal(found.head_ids, expected.head_ids)
    np.testing.assert_allclose(found.head_logprobs, expected.head_logprobs, atol=1e-5)
    np.testing.assert_allclose(found.gold_logprob, expected.gold_logprob, rtol=1e-5)
    np.testing.assert_allclose(found.entropy, expected.entropy, atol=1e-4)
    same_N = [np.array_equal(a, b) for a, b in zip(tails(found), tails(expected), strict=True)]
    if dtype == torch.float64:
        assert all(same_N)
    else:  # a point of the systematic sample may fall between what the two sums round to
        assert np.mean(same_N) > 0.9


def heads(records: Records) -> list[np.ndarray]:
    return np.split(records.head_ids, records.head_offsets[1:-1])


def tails(records: Records) -> list[np.ndarray]:
    return np.split(records.tail_ids, records.tail_offsets[1:-1])


# ---------------------------------------------------------------------- the fused head


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("bias", "softcap"), [(False, None), (True, 5.0)], ids=["plain", "bias+softcap"])
def test_fused_head_equals_the_dense_float64_reference(
    monkeypatch: pytest.MonkeyPatch,
    alpha: float,
    dtype: torch.dtype,
    tolerance: float,
    bias: bool,
    softcap: float | None,
) -> None:
    positions, vocabulary, width = 97, 1000, 64
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 20 * vocabulary)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(positions, width, generator=generator).to(dtype)
    weight = (torch.randn(vocabulary + 8, width, generator=generator) / 4).to(dtype).float()  # a float32 master copy
    offset = torch.randn(vocabulary + 8, generator=generator) if bias else None
    record = random_record(generator, positions, vocabulary)
    gold = torch.randint(0, vocabulary, (positions,), generator=generator)

    there = [None if each is None else each.to(GPU).requires_grad_() for each in (x, weight, offset)]
    parts = (record.offsets_N1, record.ids_E, record.weights_E, record.entropy_N)
    targets = Targets(gold.to(GPU), RecordTargets(*(part.to(GPU) for part in parts)))
    terms = distillation_loss(there[0], Head(there[1], there[2], 1.0, softcap, vocabulary), targets, alpha)
    (terms.total / 7).backward()

    wide = [None if each is None else each.detach().double().requires_grad_() for each in (x, weight, offset)]
    head = Head(weight, offset, 1.0, softcap, vocabulary)
    expected = dense_loss(*wide, head, Targets(gold, record), alpha)
    (expected / 7).backward()
    assert terms.total.item() == pytest.approx(expected.item(), rel=tolerance)
    for ours, reference in zip(there, wide, strict=True):
        if ours is not None:
            assert relative(ours.grad.cpu(), reference.grad) < tolerance
    assert not there[1].grad[vocabulary:].any(), "padding must not be trained"


# ---------------------------------------------------------------------- a whole job


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = load_tokenizer(AUSTEN / "teacher")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=2112,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("teacher")
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_job(teacher: Path, folder: Path, **train_options: Any) -> JobConfig:
    text = folder / "persuasion.txt"
    text.write_text((AUSTEN / "text" / "persuasion.txt").read_text(encoding="utf-8")[:24_000], encoding="utf-8")
    options = {"max_steps": 8, "batch_size": 8, "save_steps": 2, "eval_steps": 4, "logging_steps": 1}
    return parse_config(
        {
            "kind": "distill",
            "teacher": {"model": str(teacher), "dtype": "bfloat16", "batch_size": 4},
            "student": {"init": {"layers": 2, "hidden_size": 32}},
            "data": {"train": str(text), "sequence_length": 64},
            "cache": {"shard_sequences": 16},
            "train": options | {"learning_rate": 3e-3, "precision": "bf16"} | train_options,
        }
    )


class Listener:
    """Notes the steps of training, and asks to stop once ``stop_after`` of them are done."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.steps: list[int] = []
        self.stop_after = stop_after

    @property
    def monitor(self) -> Monitor:
        return Monitor(self.listen, lambda: self.stop_after is not None and self.stop_after in self.steps)

    def listen(self, event: Event) -> None:
        if event.type == "progress" and event.data["unit"] == "steps":
            self.steps.append(event.data["done"])


def test_a_job_in_bf16_stops_resumes_and_ends_as_if_it_had_not_stopped(teacher: Path, tmp_path: Path) -> None:
    job, again = make_job(teacher, tmp_path), Listener()
    with pytest.raises(Interrupted):
        distill(job, tmp_path, tmp_path / "runs" / "cut", Listener(stop_after=3).monitor)
    cut = distill(job, tmp_path, tmp_path / "runs" / "cut", again.monitor)
    whole = distill(job, tmp_path, tmp_path / "runs" / "whole")

    assert again.steps == [4, 5, 6, 7, 8]
    (folder,) = (path for path in (tmp_path / "caches").iterdir() if path.is_dir())
    assert verify(folder) == []
    student = AutoModelForCausalLM.from_pretrained(cut["artifacts"]["student"])
    assert student.dtype == torch.bfloat16 and all(p.isfinite().all() for p in student.parameters())
    reports = [run["report"] for run in (cut, whole)]
    ends = [report["student_perplexity"] for report in reports]
    assert ends[0] == pytest.approx(ends[1], rel=1e-2), "a GPU's sums have no fixed order: near, not equal"
    assert ends[1] < 0.95 * reports[1]["student_perplexity_before"]


# ---------------------------------------------------------------------- float16


def scale_of(run_dir: Path) -> float:
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return float(json.loads((newest / "state.json").read_text())["scaler"]["scale"])


def test_fp16_skips_the_steps_whose_gradients_overflow(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an absurd loss scale on: every step that overflows halves the scale and leaves the weights as they are."""
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**60)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    runs = tmp_path / "runs"
    results = {}
    for name, steps in (("skipped", 4), ("trained", 70)):
        job = make_job(teacher, tmp_path, precision="fp16", max_steps=steps, save_steps=100, eval_steps=100)
        results[name] = distill(job, tmp_path, runs / name)["report"]
    assert scale_of(runs / "skipped") == 2.0**56
    before, after = ("student_perplexity_before", "student_perplexity")
    skipped, trained = results["skipped"], results["trained"]
    assert skipped[after] == pytest.approx(skipped[before], rel=1e-2), "only rounded to float16"
    assert 1.0 <= scale_of(runs / "trained") < 2.0**56
    assert trained[after] < 0.8 * trained[before]
