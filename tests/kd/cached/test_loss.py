"""The loss as a module, in value and gradient, against dense float64 code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kd.cached.loss import DistillationLoss, make_training_batch
from kd.cached.opening import open_cache
from kd.loss.decoder import TargetDecoder
from kd.loss.dense import compute_dense_loss
from kd.models.lm_head import LMHead
from tests.support.kd.own_loops import EARLIER, LENGTH, VOCABULARY

WIDTH, ROWS = 12, VOCABULARY + 4
CASES: list[tuple[str, float, dict[str, Any]]] = [
    ("threshold", 1.0, {}),
    ("threshold", 1.0, {"label_smoothing": 0.1, "z_loss": 1e-3}),
    (EARLIER, 1.0, {"entropy_weighting": 1.0}),
    ("tempered", 1.7, {}),
    ("topk", 1.0, {}),
    ("dense", 3.0, {}),
    ("hidden", 2.0, {"divergence": "reverse_kl"}),
]


def make_inputs() -> tuple[Tensor, Tensor]:
    """Random hidden states (B, L, D) and an LM head (V', D) with more rows than tokens."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, LENGTH, WIDTH, generator=generator)
    weight = torch.randn(ROWS, WIDTH, generator=generator) / 2
    return hidden.requires_grad_(), weight.requires_grad_()


@pytest.mark.long
@pytest.mark.parametrize("profile, temperature, options", CASES)
def test_value_and_gradients_are_those_of_dense_float64_code(
    folders: dict[str, Path], profile: str, temperature: float, options: dict[str, Any]
) -> None:
    opened = open_cache(folders[profile])
    loss_fn = DistillationLoss(opened, alpha=0.3, temperature=temperature, **options)
    batch = next(iter(opened.stream(5)))
    hidden, weight = make_inputs()
    loss = loss_fn(hidden, weight, batch)
    loss.backward()

    plain_hidden, plain_weight = (
        each.detach().double().requires_grad_() for each in (hidden, weight)
    )
    made = make_training_batch(batch)
    decoder = TargetDecoder.of(opened.store.open(), torch.device("cpu"))
    targets = decoder.decode(made.gold_N, made.teacher, temperature)
    head = LMHead(plain_weight, None, 1.0, None, ROWS)
    rows_ND = plain_hidden.flatten(0, 1)[made.rows_N]
    expected = compute_dense_loss(rows_ND, head, targets, loss_fn.objective).total / len(made)
    expected.backward()

    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), plain_hidden.grad, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(weight.grad.double(), plain_weight.grad, rtol=1e-4, atol=1e-7)


def test_entries_by_hand_give_the_same_loss(folders: dict[str, Path]) -> None:
    """The loss that a reader of (ids, weights) writes: -sum w log q - H, and cross-entropy."""
    opened, decoded = (
        open_cache(folders["threshold"], form=form) for form in ("records", "entries")
    )
    hidden, weight = make_inputs()
    loss = DistillationLoss(opened, alpha=0.25)(hidden, weight, next(iter(opened.stream(5))))

    batch = next(iter(decoded.stream(5)))
    logq = torch.log_softmax(hidden.double() @ weight.double().T, -1)
    labels = batch["labels"][:, 1:].flatten()
    target = F.pad(batch["labels"][:, 1:] != -100, (0, 1))
    kl = -(batch["teacher_weights"] * logq.gather(-1, batch["teacher_ids"])).sum(-1)
    kl = (kl - batch["teacher_entropy"])[target].mean()
    ce = F.nll_loss(logq[:, :-1].flatten(0, 1), labels, ignore_index=-100)
    torch.testing.assert_close(loss.double(), 0.75 * kl + 0.25 * ce, rtol=1e-5, atol=1e-6)


def test_micro_batches_that_share_a_step_add_up(folders: dict[str, Path]) -> None:
    opened = open_cache(folders["threshold"])
    loss_fn = DistillationLoss(opened, alpha=0.2)
    hidden, weight = make_inputs()
    parts = [opened.collate([opened.train[n] for n in some]) for some in ((0, 1, 2), (3, 4))]
    whole = opened.collate([opened.train[number] for number in range(5)])
    count = len(make_training_batch(whole))
    halves = zip(hidden.split([3, 2]), parts, strict=True)
    total = sum(loss_fn(each, weight, part, num_targets=count) for each, part in halves)
    torch.testing.assert_close(total, loss_fn(hidden, weight, whole))


def test_wrong_inputs_are_refused(folders: dict[str, Path]) -> None:
    opened = open_cache(folders["threshold"])
    hidden, weight = make_inputs()
    batch = next(iter(opened.stream(5)))
    loss_fn = DistillationLoss(opened)
    with pytest.raises(ValueError, match="profile tempered"):
        DistillationLoss(opened, temperature=2.0)
    with pytest.raises(ValueError, match="reverse_kl needs all of p"):
        DistillationLoss(opened, divergence="reverse_kl")
    with pytest.raises(ValueError, match="keeps only the mean of each sequence"):
        DistillationLoss(opened, entropy_weighting=1.0)
    with pytest.raises(ValueError, match="alpha must lie"):
        DistillationLoss(opened, alpha=1.5)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        DistillationLoss(opened, temperature=0.0)
    with pytest.raises(ValueError, match="hidden_states must be"):
        loss_fn(hidden[:2], weight, batch)
    with pytest.raises(ValueError, match="at least 300 rows"):
        loss_fn(hidden, weight[:100], batch)
    with pytest.raises(ValueError, match="must have the form records"):
        loss_fn(hidden, weight, {name: batch[name] for name in batch if name != "records"})
