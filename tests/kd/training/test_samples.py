"""Samples take the most probable token until the text ends or its room does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from bench.support.paths import AUSTEN
from cache.records import Sequences
from kd.config.evaluation import EvaluationConfig
from kd.models.lm_head import find_lm_head, find_student_head
from kd.models.loading import load_model
from kd.models.precision import Precision
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.training.samples import (
    PROMPT_TOKENS,
    TRAINING_TOKENS,
    EvaluationSamples,
    Prompt,
    choose_prompts,
    continue_prompts,
)
from tests.support.kd.students import make_llama

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> Any:
    """The example's teacher, which writes words."""
    return load_model(AUSTEN / "teacher", torch.float32).eval()


def continue_prompt(model: Any, tokenizer: Any, prompt: str, options: EvaluationConfig) -> str:
    prompts = [Prompt.of(prompt, tokenizer)]
    return continue_prompts(model, tokenizer, prompts, options.max_new_tokens)[0].text


@torch.no_grad()
def continue_by_hand(model: Any, ids: list[int], count: int, end: int) -> list[int]:
    written: list[int] = []
    while len(written) < count and end not in written:
        written.append(int(model(torch.tensor([ids + written])).logits[0, -1, :2048].argmax()))
    return written


@pytest.mark.parametrize("prompt", ["She was", "Captain Wentworth"])
def test_a_sample_is_the_most_probable_token_each_time(
    model: Any, tokenizer: Any, prompt: str
) -> None:
    ids = continue_by_hand(model, tokenizer(prompt)["input_ids"], 12, tokenizer.eos_token_id)
    found = continue_prompt(model, tokenizer, prompt, EvaluationConfig(max_new_tokens=12))
    assert found == tokenizer.decode(ids) and found


@pytest.mark.long
@pytest.mark.parametrize("prompt", ["She was", "Captain Wentworth", ""])
def test_a_student_in_training_writes_what_it_would_write_at_the_end(
    model: Any, tokenizer: Any, prompt: str
) -> None:
    samples = EvaluationSamples((Prompt.of(prompt, tokenizer),), tokenizer)
    head = find_lm_head(model, 2048)
    [found] = samples.write(model, head, Precision.choose("fp32", CPU), CPU)
    options = EvaluationConfig(max_new_tokens=TRAINING_TOKENS)
    assert found == {
        "prompt": prompt,
        "text": continue_prompt(model, tokenizer, prompt, options),
    }


def test_a_student_in_training_writes_no_more_than_its_context_holds(tokenizer: Any) -> None:
    student = make_llama(2048, max_position_embeddings=16).eval()
    head = find_lm_head(student, 2048)
    options = EvaluationConfig(max_new_tokens=TRAINING_TOKENS)
    for prompt in ("She was", "She was " * 20):
        samples = EvaluationSamples((Prompt.of(prompt, tokenizer),), tokenizer)
        [found] = samples.write(student, head, Precision.choose("fp32", CPU), CPU)
        assert found["text"] == continue_prompt(student, tokenizer, prompt, options)


def test_what_a_model_says_of_its_own_sampling_changes_nothing(model: Any, tokenizer: Any) -> None:
    options = EvaluationConfig(max_new_tokens=30)
    other = copy.deepcopy(model)
    own = GenerationConfig(
        do_sample=True, temperature=2.0, top_k=5, repetition_penalty=1.9, max_length=7
    )
    other.generation_config = own
    assert continue_prompt(other, tokenizer, "She was", options) == continue_prompt(
        model, tokenizer, "She was", options
    )
    assert other.generation_config is own


def test_an_id_without_a_name_is_shown(tiny_teacher: Path, tokenizer: Any) -> None:
    """An LM head of 2,112 rows for 2,048 tokens; one row of padding has the largest logit."""
    model = load_model(tiny_teacher, torch.float32).eval()
    loud = torch.nn.Linear(32, 2112)
    with torch.no_grad():
        loud.weight.copy_(model.lm_head.weight)
        loud.bias.zero_()
        loud.bias[2060] = 1000.0
    model.lm_head = loud
    options = EvaluationConfig(max_new_tokens=3)
    assert continue_prompt(model, tokenizer, "She was", options) == "<2060><2060><2060>"
    samples = EvaluationSamples((Prompt.of("She was", tokenizer),), tokenizer)
    head = find_student_head(model, 2048)
    found = samples.write(model, head, Precision.choose("fp32", CPU), CPU)
    assert found[0]["text"] == "<2060>" * TRAINING_TOKENS


def test_prompts_of_one_length_are_continued_together_and_each_as_if_alone(
    model: Any, tokenizer: Any
) -> None:
    texts = ("She was", "He had", "Captain Wentworth was a", "")
    prompts = [Prompt.of(text, tokenizer) for text in texts]
    found = continue_prompts(model, tokenizer, prompts, 8)
    alone = [continue_prompts(model, tokenizer, [prompt], 8)[0] for prompt in prompts]
    assert found == alone and [each.tokens for each in found] == [8] * 4
    assert len({len(prompt.ids) for prompt in prompts}) < len(prompts), "two share a batch"


def test_in_a_batch_each_text_ends_where_its_own_end_is(model: Any, tokenizer: Any) -> None:
    prompts = [Prompt.of(text, tokenizer) for text in ("She was", "He had")]
    ids = continue_by_hand(model, list(prompts[0].ids), 8, tokenizer.eos_token_id)
    other = continue_by_hand(model, list(prompts[1].ids), 8, tokenizer.eos_token_id)
    end = next(each for each in ids if each not in other)
    ending = copy.deepcopy(tokenizer)
    ending.eos_token = tokenizer.convert_ids_to_tokens(end)
    first, second = continue_prompts(model, ending, prompts, 8)
    assert first.tokens == ids.index(end) + 1 and first.text == tokenizer.decode(
        ids[: first.tokens]
    )
    assert (second.tokens, second.text) == (8, tokenizer.decode(other))


def make_source(train: int, masks: list[list[bool]]) -> PlainText:
    """A source of sequences of 40 tokens, one document each, with these beginnings of the mask."""
    mask = np.array([[*each, *([True] * (39 - len(each))), False] for each in masks])
    tokens = np.arange(mask.size, dtype=np.uint32).reshape(mask.shape)
    start = np.zeros(mask.shape, bool)
    start[:, 0] = True
    whole = Sequences(tokens, start, mask)
    return PlainText(Corpus(whole.select(slice(0, train)), whole.select(slice(train, None))))


def test_prompts_are_beginnings_of_held_out_text_and_questions_of_chats(tokenizer: Any) -> None:
    chat = [False] * 9
    source = make_source(1, [[], [], chat, []])
    found = choose_prompts(source, tokenizer, 5)
    assert [each.ids for each in found] == [
        tuple(range(40, 72)), tuple(range(80, 90)), tuple(range(120, 152)),
    ]  # fmt: skip
    assert found[0].text == tokenizer.decode(list(range(40, 72)))
    assert [len(choose_prompts(source, tokenizer, count)) for count in (0, 1, 2)] == [0, 1, 2]


def test_a_row_that_begins_within_an_answer_gives_the_question_of_the_next_chat(
    tokenizer: Any,
) -> None:
    tokens = np.arange(40, dtype=np.uint32)[None]
    start = np.zeros((1, 40), bool)
    start[0, 6] = True
    mask = np.ones((1, 40), bool)
    mask[0, [*range(5, 14), 39]] = False
    rows = Sequences(tokens, start, mask)
    source = PlainText(Corpus(rows, rows.select(slice(0, 0))))
    assert [each.ids for each in choose_prompts(source, tokenizer, 1)] == [tuple(range(6, 15))]


def test_unless_the_job_says_otherwise_there_are_five_prompts(tokenizer: Any) -> None:
    source = make_source(1, [[]] * 9)
    assert len(choose_prompts(source, tokenizer, EvaluationConfig().continuations)) == 5


def test_without_held_out_text_prompts_come_from_the_training_text(tokenizer: Any) -> None:
    source = make_source(2, [[], [False] * 39])
    assert [each.ids[0] for each in choose_prompts(source, tokenizer, 5)] == [0], (
        "a sequence without targets makes no prompt"
    )


def test_a_sample_ends_where_the_model_ends_its_text(model: Any, tokenizer: Any) -> None:
    """The tokenizer's end of text is the second token that this model writes."""
    options = EvaluationConfig(max_new_tokens=12)
    ids = continue_by_hand(model, tokenizer("She was")["input_ids"], 12, tokenizer.eos_token_id)
    assert ids[1] not in (ids[0], tokenizer.eos_token_id)
    ending = copy.deepcopy(tokenizer)
    ending.eos_token = tokenizer.convert_ids_to_tokens(ids[1])
    assert continue_prompt(model, ending, "She was", options) == tokenizer.decode(ids[:2])


def test_no_prompt_and_a_prompt_beyond_the_context_are_answered(
    tiny_teacher: Path, tokenizer: Any
) -> None:
    model = load_model(tiny_teacher, torch.float32).eval()
    # Each row of its LM head is a token.
    model.resize_token_embeddings(len(tokenizer))
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    options = EvaluationConfig(max_new_tokens=4)
    assert continue_prompt(model, tokenizer, "", options) == tokenizer.decode(
        continue_by_hand(model, [first], 4, tokenizer.eos_token_id)
    )
    long = "It is a truth universally acknowledged. " * 200
    ids = tokenizer(long)["input_ids"]
    assert len(ids) > 512, "more than the model has positions"
    found = continue_prompt(model, tokenizer, long, options)
    assert found == tokenizer.decode(continue_by_hand(model, ids[-511:], 1, tokenizer.eos_token_id))


def test_a_text_ends_at_every_token_that_the_models_settings_name(
    model: Any, tokenizer: Any
) -> None:
    """In a finished model and in a student that is trained; the tokenizer names another token."""
    prompt = Prompt.of("She was", tokenizer)
    ids = continue_by_hand(model, list(prompt.ids), 8, tokenizer.eos_token_id)
    other = copy.deepcopy(model)
    other.generation_config = GenerationConfig(eos_token_id=[2000, ids[3]])
    [found] = continue_prompts(other, tokenizer, [prompt], 8)
    assert found.tokens == ids.index(ids[3]) + 1
    head = find_lm_head(other, 2048)
    samples = EvaluationSamples((prompt,), tokenizer)
    [written] = samples.write(other, head, Precision.choose("fp32", CPU), CPU)
    assert written["text"] == found.text == tokenizer.decode(ids[: found.tokens])


@pytest.mark.parametrize(
    ("text", "prompt"), [("versally a truth. He was a man", " a truth"), ("He was", "He")]
)
def test_a_prompt_begins_at_a_word(tokenizer: Any, text: str, prompt: str) -> None:
    """It has its whole length all the same, so that all prompts are continued as one batch."""
    ids = np.array([tokenizer(text + " of great sense" * 40)["input_ids"]], dtype=np.uint32)
    start = np.zeros(ids.shape, dtype=bool)
    start[0, 0] = True  # also a piece of a document begins so
    whole = Sequences(ids, start, np.arange(ids.shape[1])[None] < ids.shape[1] - 1)
    source = PlainText(Corpus(whole, whole.select(slice(0, 0))))
    [found] = choose_prompts(source, tokenizer, 1)
    assert found.text.startswith(prompt)
    assert len(found.ids) == PROMPT_TOKENS
