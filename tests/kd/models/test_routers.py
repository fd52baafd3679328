"""The balance loss of routers is the one of transformers, and training adds it."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic_core import to_json
from torch import Tensor
from transformers import PreTrainedModel

from cache.records import Sequences
from kd.config.fields.removed import restore_removed
from kd.config.loss import LossConfig
from kd.errors import ConfigError
from kd.memory.activation_checkpointing import checkpoint_activations
from kd.models.layers import compute_hidden_states
from kd.models.precision import Precision
from kd.models.routers import RouterBalance, find_router_balance
from kd.progress import SILENT
from kd.text.batches import Batch, PlainText
from kd.text.corpus import Corpus
from kd.training.loop import train
from kd.training.resume.identity import FREE_FIELDS, NEWER_FIELDS, compute_resume_identity
from tests.support.kd.training import make_text_job
from tests.support.kd.zoo import VOCABULARY, build, some_tokens
from tests.support.packed_zoo import make_random

pytestmark = pytest.mark.usefixtures("one_thread")

FULL = Precision("cpu", torch.float32)
KINDS = ["mixtral", "qwen2 moe", "qwen3 moe", "olmoe", "granite moe", "gpt-oss"]


def make_batch(rows: Tensor | None = None) -> Batch:
    """A batch whose positions ``rows`` have a target; by default all of them."""
    tokens_BL = some_tokens(4, 12)
    rows = torch.arange(tokens_BL.numel()) if rows is None else rows
    return Batch(tokens_BL, None, rows, tokens_BL.flatten()[rows], None)


def find(student: PreTrainedModel, weight: float | None = 0.5) -> RouterBalance:
    found = find_router_balance(student, weight)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_loss_that_transformers_adds(kind: str) -> None:
    student = build(kind)
    balance = find(student)
    batch = make_batch()
    hidden_ND, loss = balance.run(student, batch, FULL)
    theirs = student(input_ids=batch.tokens_BL, output_router_logits=True, use_cache=False).aux_loss
    found = loss / (0.5 * len(batch)) + balance.chosen
    torch.testing.assert_close(found, theirs)
    expected = compute_hidden_states(student, batch.tokens_BL).flatten(0, 1)
    assert torch.equal(hidden_ND, expected)
    routers = [each for name, each in student.named_parameters() if "router" in name]
    routers = routers or [p for n, p in student.named_parameters() if ".gate.weight" in n]
    assert routers
    gradients = torch.autograd.grad(loss, routers, allow_unused=True)
    assert any(each is not None and each.abs().max() > 0 for each in gradients)


def test_it_counts_the_positions_with_a_target_alone() -> None:
    student = build("mixtral")
    balance = find(student)
    alone = make_batch(torch.arange(12))
    first = Batch(alone.tokens_BL[:1], None, alone.rows_N, alone.gold_N, None)
    torch.testing.assert_close(
        balance.run(student, alone, FULL)[1], balance.run(student, first, FULL)[1]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_a_target_has_no_balance_to_keep(kind: str) -> None:
    student = build(kind)
    hidden_ND, loss = find(student).run(student, make_batch(torch.arange(0)), FULL)
    assert len(hidden_ND) == 0
    assert loss == 0.0
    # With the loss of no token, 0 with a gradient, it is a loss that can go backward.
    (hidden_ND.sum() + loss).backward()
    assert all(torch.isfinite(p.grad).all() for p in student.parameters() if p.grad is not None)


def test_checkpointed_layers_have_the_same_gradient() -> None:
    found = []
    for how in ("none", "full", "sqrt"):
        student = build("mixtral").train()
        checkpoint_activations(student, how)
        find(student).run(student, make_batch(), FULL)[1].backward()
        found.append({n: p.grad for n, p in student.named_parameters() if p.grad is not None})
    assert found[0]
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient)


def test_the_weight_is_that_of_the_job_or_of_the_student() -> None:
    student = build("mixtral", router_aux_loss_coef=0.25)
    assert find(student, None).weight == 0.25
    assert find(student, 2.0).weight == 2.0
    assert find_router_balance(student, 0.0) is None
    for other in (build("llama tied"), build("llama4"), build("deepseek")):
        assert find_router_balance(other, None) is None
        assert find_router_balance(other, 0.0) is None
        with pytest.raises(ConfigError, match=f"{type(other).__name__} has no balance loss"):
            find_router_balance(other, 0.1)


@torch.no_grad()
def measure_imbalance(student: PreTrainedModel, tokens_BL: Tensor) -> float:
    batch = Batch(tokens_BL, None, torch.arange(tokens_BL.numel()), tokens_BL.flatten(), None)
    return float(find(student.eval(), 1.0).run(student, batch, FULL)[1]) / len(batch)


def test_training_keeps_the_routers_balanced(tmp_path: Path) -> None:
    tokens = some_tokens(32, 16).numpy().astype(np.uint32)
    start = np.zeros_like(tokens, dtype=bool)
    start[:, 0] = True
    mask = np.ones_like(start)
    mask[:, -1] = False
    rows = Sequences(tokens, start, mask)
    source = PlainText(Corpus(rows, rows.select(slice(0, 4))))
    found: dict[float, float] = {}
    for weight in (0.0, 1.0):
        student = build("mixtral")
        options: dict[str, Any] = {"max_steps": 15, "batch_size": 8, "learning_rate": 1e-2}
        job = make_text_job(options, loss={"alpha": 1.0, "router_balance": weight})
        train(job, source, student, VOCABULARY, tmp_path / str(weight), SILENT)
        found[weight] = measure_imbalance(student, torch.from_numpy(tokens.astype(np.int64)))
    assert found[1.0] < 0.5 * found[0.0]


def test_a_job_without_the_field_may_resume_what_was_begun_before_it_existed() -> None:
    plain = make_text_job({"max_steps": 1})
    newer = NEWER_FIELDS.keys() - {"lm_head_floor"}
    sections = plain.model_dump(
        include={"student", "loss"},
        exclude={"loss": {"router_balance", "tail_control", "balance", "tokenizers"}},
    )
    options = restore_removed(plain.require_train().model_dump(mode="json"), "train.")
    for name in (newer | FREE_FIELDS) & options.keys():
        del options[name]
    content = [
        to_json(restore_removed(sections)).decode(),
        to_json(options).decode(),
        "x",
    ]
    before = hashlib.sha256("\n".join(content).encode()).hexdigest()
    assert compute_resume_identity(plain, "x") == before
    other = make_text_job({"max_steps": 1}, loss={"alpha": 1.0, "router_balance": 0.0})
    assert compute_resume_identity(other, "x") != before


def test_a_class_with_routers_has_no_balance_where_its_layers_have_none() -> None:
    """A dense Doge, whose routers would pick pairs of keys, and a Qwen of dense layers."""
    for student in (make_random("doge"), build("qwen3 moe", mlp_only_layers=[0, 1, 2, 3])):
        assert find_router_balance(student, None) is None
        with pytest.raises(ConfigError, match="has no balance loss"):
            find_router_balance(student, 0.5)


def test_its_loss_is_that_of_each_micro_batch() -> None:
    """The product of two means is no mean over tokens, as the field's description says."""
    assert "micro-batch" in str(LossConfig.model_fields["router_balance"].description)
    student = build("mixtral").requires_grad_(False)
    balance = find(student)
    half = make_batch().tokens_BL.shape[0] // 2
    whole = balance.run(student, make_batch(), FULL)[1]
    parts = [
        balance.run(
            student,
            Batch(rows_BL, None, torch.arange(rows_BL.numel()), rows_BL.flatten(), None),
            FULL,
        )[1]
        for rows_BL in make_batch().tokens_BL.split(half)
    ]
    assert abs(float(whole - sum(parts))) > 1e-3 * abs(float(whole))
