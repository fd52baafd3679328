"""Samples: the most probable token each time, until the text ends or its room does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from kd import models
from kd.config.evaluation import EvaluationConfig
from kd.evaluation.samples import continuation, write_samples
from tests.conftest import AUSTEN

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> Any:
    """The example's teacher, which writes words."""
    return models.load(AUSTEN / "teacher", torch.float32).eval()


@torch.no_grad()
def by_hand(model: Any, ids: list[int], count: int, end: int) -> list[int]:
    written: list[int] = []
    while len(written) < count and end not in written:
        written.append(int(model(torch.tensor([ids + written])).logits[0, -1, :2048].argmax()))
    return written


@pytest.mark.parametrize("prompt", ["She was", "Captain Wentworth"])
def test_a_sample_is_the_most_probable_token_each_time(model: Any, tokenizer: Any, prompt: str) -> None:
    ids = by_hand(model, tokenizer(prompt)["input_ids"], 12, tokenizer.eos_token_id)
    found = continuation(model, tokenizer, prompt, EvaluationConfig(max_new_tokens=12))
    assert found == tokenizer.decode(ids) and found


def test_what_a_model_says_of_its_own_sampling_changes_nothing(model: Any, tokenizer: Any) -> None:
    options, other = EvaluationConfig(max_new_tokens=30), copy.deepcopy(model)
    own = GenerationConfig(do_sample=True, temperature=2.0, top_k=5, repetition_penalty=1.9, max_length=7)
    other.generation_config = own
    assert continuation(other, tokenizer, "She was", options) == continuation(model, tokenizer, "She was", options)
    assert other.generation_config is own


def test_a_row_of_padding_is_never_written(tiny_teacher: Path, tokenizer: Any) -> None:
    """A head of 2,112 rows for 2,048 tokens, those beyond them the loudest."""
    model, options = models.load(tiny_teacher, torch.float32).eval(), EvaluationConfig(max_new_tokens=5)
    before = continuation(model, tokenizer, "She was", options)
    loud = torch.nn.Linear(32, 2112)
    with torch.no_grad():
        loud.weight.copy_(model.lm_head.weight)
        loud.bias.zero_()
        loud.bias[2048:] = 1000.0
    model.lm_head = loud
    assert continuation(model, tokenizer, "She was", options) == before != ""


def test_each_prompt_has_its_sample(model: Any, tokenizer: Any) -> None:
    options = EvaluationConfig(prompts=("She was", "He had"), max_new_tokens=3)
    found = write_samples(model, tokenizer, options)
    assert [sample["prompt"] for sample in found] == ["She was", "He had"]
    assert [sample["text"] for sample in found] == [
        continuation(model, tokenizer, prompt, options) for prompt in options.prompts
    ]


def test_a_sample_ends_where_the_model_ends_its_text(model: Any, tokenizer: Any) -> None:
    """A tokenizer whose end of text is the second token that this model writes."""
    options = EvaluationConfig(max_new_tokens=12)
    ids = by_hand(model, tokenizer("She was")["input_ids"], 12, tokenizer.eos_token_id)
    assert ids[1] not in (ids[0], tokenizer.eos_token_id)
    ending = copy.deepcopy(tokenizer)
    ending.eos_token = tokenizer.convert_ids_to_tokens(ids[1])
    assert continuation(model, ending, "She was", options) == tokenizer.decode(ids[:2])


def test_no_prompt_and_a_prompt_beyond_the_context_are_answered(tiny_teacher: Path, tokenizer: Any) -> None:
    model = models.load(tiny_teacher, torch.float32).eval()
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    options = EvaluationConfig(max_new_tokens=4)
    assert continuation(model, tokenizer, "", options) == tokenizer.decode(
        by_hand(model, [first], 4, tokenizer.eos_token_id)
    )
    long = "It is a truth universally acknowledged. " * 200
    ids = tokenizer(long)["input_ids"]
    assert len(ids) > 512, "more than the model has positions"
    found = continuation(model, tokenizer, long, options)
    assert found == tokenizer.decode(by_hand(model, ids[-511:], 1, tokenizer.eos_token_id))
