"""Students against a whole teacher: every number against plain definitions in float64."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from cache.perplexity import BlockLosses
from cache.records import Sequences
from kd.config.data import DataConfig
from kd.config.jobfile import parse_config
from kd.errors import ModelError
from kd.evaluation.teacher_comparison import (
    TEACHER,
    ComparisonSums,
    EvaluatedModel,
    compare_models,
    measure_chunk,
    summarise_sums,
)
from kd.loss.targets import widen_logprobs
from kd.models.attention import kernels
from kd.models.loading import load_model
from kd.progress import Monitor
from kd.text.batches import PlainText, make_batch
from kd.text.corpus import Corpus
from kd.text.packing import Document, pack_documents
from kd.training.calibration import BINS
from tests.support.kd.references import assert_same_facts, by_hand, plain_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")

PACKED = DataConfig(train="x", sequence_length=128)


def make_logprobs(seed: int, scale: float = 2.0) -> torch.Tensor:
    torch.manual_seed(seed)
    return (torch.randn(60, 29, dtype=torch.float64) * scale).log_softmax(1)


def compute_reference(
    p_NV: torch.Tensor, q_NV: torch.Tensor, gold_N: torch.Tensor, k: int
) -> dict[str, float]:
    """The plain definitions in float64, with Python sets."""
    p_NV = p_NV.double()
    q_NV = q_NV.double()
    best = [
        (set(p.topk(k).indices.tolist()), set(q.topk(k).indices.tolist()))
        for p, q in zip(p_NV, q_NV, strict=True)
    ]
    return {
        "loss": float(nn.functional.nll_loss(q_NV, gold_N)),
        "kl": float(nn.functional.kl_div(q_NV, p_NV, reduction="batchmean", log_target=True)),
        "total_variation": 1.0 - float(torch.minimum(p_NV.exp(), q_NV.exp()).sum(1).mean()),
        "agreement": float((p_NV.argmax(1) == q_NV.argmax(1)).double().mean()),
        "top_k_agreement": sum(len(ours & theirs) for ours, theirs in best) / k / len(best),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 3, 29])
def test_each_number_is_what_its_definition_says(
    dtype: torch.dtype, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kd.evaluation.teacher_comparison.TOP_K", k)
    p_NV = make_logprobs(0)
    q_NV = (make_logprobs(0) + make_logprobs(1, 0.7)).log_softmax(1)
    gold_N = torch.randint(0, 29, (60,))
    context_N = torch.arange(1, 61)
    sums = measure_chunk(p_NV.to(dtype), q_NV.to(dtype), gold_N, context_N)
    found = asdict(summarise_sums(sums, 100, against_teacher=True))
    expected = compute_reference(p_NV, q_NV, gold_N, k)
    assert {name: found[name] for name in expected} == pytest.approx(
        expected, rel=1e-5 if dtype.itemsize == 4 else 1e-10
    )
    assert found["acceptance"] == pytest.approx(
        float(torch.minimum(p_NV.exp(), q_NV.exp()).sum(1).mean()), rel=1e-5
    )
    assert found["perplexity"] == pytest.approx(np.exp(expected["loss"]), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(
        expected["loss"] / np.log(2) * 60 / 100, rel=1e-5
    )


def test_kl_is_of_the_student_from_the_teacher_and_not_the_other_way_round() -> None:
    p_NV = make_logprobs(0)
    q_NV = make_logprobs(1, 0.5)
    forward, backward = (
        asdict(
            summarise_sums(
                measure_chunk(*pair, torch.zeros(60, dtype=torch.int64), torch.ones(60)), 1, True
            )
        )["kl"]
        for pair in ((p_NV, q_NV), (q_NV, p_NV))
    )
    assert forward == pytest.approx(float((p_NV.exp() * (p_NV - q_NV)).sum(1).mean()))
    assert abs(forward - backward) > 0.1


def test_kl_by_context_is_the_mean_in_spans_of_powers_of_two() -> None:
    p_NV = make_logprobs(0)
    q_NV = make_logprobs(1)
    context_N = torch.tensor([1, 2, 3, 4, 7, 8, 15, 16, 1000, 2**25] * 6)
    sums = measure_chunk(p_NV, q_NV, torch.zeros(60, dtype=torch.int64), context_N)
    kl_N = (p_NV.exp() * (p_NV - q_NV)).sum(1)
    spans: dict[int, list[float]] = {}
    for context, kl in zip(context_N.tolist(), kl_N.tolist(), strict=True):
        spans.setdefault(min(2 ** (context.bit_length() - 1), 2**20), []).append(kl)
    rows = asdict(summarise_sums(sums, 1, True))["kl_by_context"]
    assert [row["first"] for row in rows] == sorted(spans) == [1, 2, 4, 8, 16, 512, 2**20]
    for row in rows:
        assert row["tokens"] == len(spans[row["first"]]) and row["last"] == 2 * row["first"] - 1
        assert row["kl"] == pytest.approx(float(np.mean(spans[row["first"]])))


def test_calibration_is_the_student_s() -> None:
    p_NV = make_logprobs(0)
    q_NV = make_logprobs(1)
    gold_N = torch.arange(60) % 29
    confidence_N, place_N = q_NV.exp().max(1)
    gold_N = gold_N.where(torch.arange(60) % 3 > 0, place_N)
    sums = measure_chunk(p_NV, q_NV, gold_N, torch.ones(60))
    found = summarise_sums(sums, 1, True)
    error, curve = by_hand(confidence_N.tolist(), (place_N == gold_N).tolist(), BINS)
    assert found.calibration_error == pytest.approx(error)
    assert [pytest.approx(point) for point in curve] == found.reliability


def test_sums_add_up_over_parts() -> None:
    p_NV = make_logprobs(0)
    q_NV = make_logprobs(1)
    gold_N = torch.randint(0, 29, (60,))
    context_N = torch.arange(1, 61)
    whole = measure_chunk(p_NV, q_NV, gold_N, context_N)
    cuts = [slice(0, 13), slice(13, 40), slice(40, 60)]
    parts = [measure_chunk(p_NV[at], q_NV[at], gold_N[at], context_N[at]) for at in cuts]
    added: ComparisonSums = parts[0] + parts[1] + parts[2]
    first, second = (asdict(summarise_sums(sums, 50, True)) for sums in (added, whole))
    assert_same_facts(first, second)


# ---------------------------------------------------------------------- real models on packed text


@pytest.fixture(scope="module")
def teacher(tiny_teacher: Path) -> LlamaForCausalLM:
    return load_model(tiny_teacher, torch.float32).eval()


@pytest.fixture(scope="module")
def student(teacher: LlamaForCausalLM) -> LlamaForCausalLM:
    """The teacher with noise on its weights: near it, but not equal."""
    changed = copy.deepcopy(teacher)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += torch.randn_like(parameter) * 0.3 * parameter.abs().mean()
    return changed


@pytest.fixture(scope="module")
def source() -> PlainText:
    rng = np.random.default_rng(0)
    job = {
        "kind": "precompute",
        "teacher": {"model": "t"},
        "data": {"train": "x", "sequence_length": 24},
    }
    config = parse_config(job).data

    def text(tokens: int) -> Sequences:
        lengths = rng.integers(3, 40, tokens // 20)
        return pack_documents(
            [Document(rng.integers(0, 2048, length).astype(np.uint32)) for length in lengths],
            config,
        )

    return PlainText(Corpus(text(100), text(400)))


@pytest.mark.long
@pytest.mark.parametrize("chunk", [3, 5000])
def test_models_on_packed_text_are_what_the_library_makes_of_each_document(
    teacher: LlamaForCausalLM,
    student: LlamaForCausalLM,
    source: PlainText,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kd.evaluation.teacher_comparison.CHUNK_ELEMENTS", chunk * 2048)
    teaching = EvaluatedModel.of(teacher, 2048, PACKED, teaches=True)
    reader = EvaluatedModel.of(student, 2048, PACKED)
    sums = compare_models({"student": reader, "itself": teaching, TEACHER: teaching}, source, 3)
    held_out, _ = source.read(
        np.arange(source.train_count, source.train_count + source.validation_count)
    )
    assert make_batch(held_out, None).positions_BL is not None, "documents that begin within a row"
    p_NV, gold_N, context_N = plain_logprobs(teacher, held_out)
    q_NV, _, _ = plain_logprobs(student, held_out, 2112)
    p_NV = widen_logprobs(p_NV, 2112)
    chunk = measure_chunk(p_NV, q_NV, gold_N, context_N)
    expected = asdict(summarise_sums(chunk, 1000, True))
    assert expected["kl"] > 0.05 and len(expected["kl_by_context"]) >= 4
    ce_N = -q_NV.gather(1, gold_N[:, None])[:, 0].numpy()
    interval = BlockLosses.of(ce_N, held_out.target_mask.sum(axis=1)).perplexity
    assert interval is not None and interval.interval is not None
    expected["perplexity_interval"] = asdict(interval.interval)
    assert_same_facts(asdict(summarise_sums(sums["student"], 1000, True)), expected, rel=1e-4)

    itself = asdict(summarise_sums(sums["itself"], 1000, True))
    assert (itself["kl"], itself["total_variation"], itself["agreement"]) == (0.0, 0.0, 1.0)
    own = asdict(summarise_sums(sums[TEACHER], 1000, False))
    assert own["loss"] == itself["loss"] and "kl" not in own
    assert own["loss"] == pytest.approx(float(nn.functional.nll_loss(p_NV, gold_N)), rel=1e-5)


def test_where_every_row_is_one_document_context_is_the_place_in_the_row(
    teacher: LlamaForCausalLM,
) -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 2048, (3, 24)).astype(np.uint32)
    start = np.zeros((3, 24), bool)
    target = np.ones((3, 24), bool)
    start[:, 0] = True
    target[:, -1] = False
    rows = Sequences(tokens, start, target)
    assert make_batch(rows, None).positions_BL is None
    reader = EvaluatedModel.of(teacher, 2048, PACKED)
    sums = compare_models({"student": reader, TEACHER: reader}, PlainText(Corpus(rows, rows)), 2)
    found = asdict(summarise_sums(sums["student"], None, True))
    spans = [(row["first"], row["tokens"]) for row in found["kl_by_context"]]
    assert spans == [(1, 3), (2, 6), (4, 12), (8, 24), (16, 24)]


def test_without_a_teacher_there_is_nothing_to_agree_with(
    student: LlamaForCausalLM, source: PlainText
) -> None:
    sums = compare_models({"student": EvaluatedModel.of(student, 2048, PACKED)}, source, 4)
    assert set(asdict(summarise_sums(sums["student"], None, False))) == {
        "loss", "tokens", "perplexity", "perplexity_interval", "bits_per_byte",
        "calibration_error", "reliability",
    }  # fmt: skip
    nothing = PlainText(
        Corpus(source.corpus.validation, source.corpus.validation.select(slice(0, 0)))
    )
    assert compare_models({"student": EvaluatedModel.of(student, 2048, PACKED)}, nothing, 4) == {}


def test_a_kernel_that_fails_in_an_evaluation_is_told(
    teacher: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "choose_kernel", lambda traits: "flex")
    monkeypatch.setattr(kernels, "flex_attention_forward", None)
    told: list[str] = []
    monitor = Monitor(lambda event: told.append(event.data["message"]))
    EvaluatedModel.of(copy.deepcopy(teacher), 2048, PACKED, monitor=monitor)
    (message,) = told
    assert "flex attention failed" in message


def test_a_model_that_cannot_read_the_sequences_is_refused(teacher: LlamaForCausalLM) -> None:
    with pytest.raises(ModelError, match="context of 512 tokens"):
        EvaluatedModel.of(teacher, 2048, DataConfig(train="x", sequence_length=513))
