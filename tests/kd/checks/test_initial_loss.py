"""Real models, fresh and trained, begin where they must against ln V; a wrong loss is reported."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kd.checks.initial_loss import check_initial_loss
from kd.errors import TrainingError


def compute_fresh_loss(width: int, vocabulary: int, spread: float = 0.02) -> float:
    """The mean cross-entropy of a fresh Llama on random tokens."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 2,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=spread,
    )
    tokens_L = torch.randint(0, vocabulary, (1, 64))
    with torch.no_grad():
        logits_LV = LlamaForCausalLM(shape)(tokens_L).logits[0]
    return float(torch.nn.functional.cross_entropy(logits_LV[:-1], tokens_L[0, 1:]))


@pytest.mark.parametrize(("width", "vocabulary"), [(16, 50), (64, 2048), (512, 8192)])
def test_a_fresh_student_begins_near_guessing(width: int, vocabulary: int) -> None:
    verdict = check_initial_loss(compute_fresh_loss(width, vocabulary), vocabulary, fresh=True)
    assert verdict.ok and verdict.check == "initial_loss" and verdict.remedy == ""
    assert verdict.facts["ln_vocabulary"] == pytest.approx(math.log(vocabulary))


def test_weights_that_begin_too_large_are_reported() -> None:
    verdict = check_initial_loss(compute_fresh_loss(64, 2048, spread=0.5), 2048, fresh=True)
    assert not verdict.ok
    assert "size of the weights" in verdict.remedy


@pytest.mark.parametrize("wrong", [64.0, 1 / 64])
def test_a_sum_in_place_of_a_mean_is_reported(wrong: float) -> None:
    verdict = check_initial_loss(compute_fresh_loss(64, 2048) * wrong, 2048, fresh=True)
    assert not verdict.ok
    assert "mean over tokens" in verdict.remedy
    with pytest.raises(TrainingError, match=r"guessing among 2,048 tokens costs 7\.625"):
        verdict.require()


def test_a_trained_student_must_know_something() -> None:
    assert check_initial_loss(3.5, 2048, fresh=False).ok
    worse = check_initial_loss(9.0, 2048, fresh=False)
    assert not worse.ok and "tokenizer" in worse.remedy


@pytest.mark.parametrize("fresh", [True, False])
def test_nan_is_no_good_beginning(fresh: bool) -> None:
    assert not check_initial_loss(math.nan, 2048, fresh).ok
