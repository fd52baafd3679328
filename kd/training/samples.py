"""Samples: how a model continues a prompt when it always chooses the most probable token.

``EvaluationSamples`` are those of a student in training; the others are of finished models.

Shapes: P prompts of one length, L tokens of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from cache.records import Sequences
from kd.config.evaluation import EvaluationConfig
from kd.models.layers import compute_hidden_states, find_device, find_model_context
from kd.models.lm_head import LMHead
from kd.models.precision import Precision
from kd.models.tokenizers import list_end_ids
from kd.models.tokenizing.aligned_cache import AlignedCache
from kd.text.batches import Source, list_held_out
from kd.text.text_bytes import count_held_out_bytes

#: Tokens of a prompt that is the beginning of a held-out text.
PROMPT_TOKENS = 32
#: The most tokens that may be dropped before them, as the end of a word.
WORD_TOKENS = 16
#: The most tokens of a chat before the answer that a model continues.
CHAT_TOKENS = 256
#: Tokens by which a student in training continues a prompt.
TRAINING_TOKENS = 32


@dataclass(frozen=True)
class Prompt:
    """A text to continue, and its tokens (at least one)."""

    text: str
    ids: tuple[int, ...]

    @classmethod
    def of(cls, text: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
        """Encode ``text``; an empty one begins as a document does."""
        ids = tuple(tokenizer(text, verbose=False)["input_ids"])
        begins = (tokenizer.bos_token_id, tokenizer.eos_token_id, 0)
        return cls(text, ids or (next(int(each) for each in begins if each is not None),))


@dataclass(frozen=True)
class Continuation:
    """The text that a model wrote, with special tokens shown, and the number of its tokens."""

    text: str
    tokens: int


def choose_prompts(source: Source, tokenizer: PreTrainedTokenizerBase, count: int) -> list[Prompt]:
    """Take ``count`` prompts from all parts of the held-out text, or else of the training text.

    A prompt is the beginning of a sequence, or of a chat up to the answer.
    """
    places = list_held_out(source) or range(source.train_count)
    numbers = np.linspace(0, len(places) - 1, min(count, len(places))).round().astype(np.int64)
    if not len(numbers):
        return []
    sequences, _ = source.read(places.start + np.unique(numbers))
    ids = [_cut_prompt(sequences, row, tokenizer) for row in range(len(sequences))]
    return [Prompt(str(tokenizer.decode(list(each))), each) for each in ids if each]


def _cut_prompt(
    sequences: Sequences, row: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Cut the prompt out of a sequence; empty where the sequence has no target."""
    tokens_L, start_L = sequences.tokens[row], sequences.document_start[row]
    targets = np.flatnonzero(sequences.target_mask[row])
    if not len(targets):
        return ()
    starts = np.flatnonzero(start_L)
    # A row may begin within an answer: then the next chat that begins in it is taken.
    chats = starts[~sequences.target_mask[row][starts]]
    later = targets[targets >= chats[0]] if len(chats) else targets
    last = int(later[0] if len(later) else targets[0])
    begin = int(starts[starts <= last][-1]) if (starts <= last).any() else 0
    # In plain text the first token already has a target; in a chat the answer has the first one.
    if last > begin:
        return tuple(tokens_L[max(begin, last + 1 - CHAT_TOKENS) : last + 1].tolist())
    ids = tuple(tokens_L[begin : begin + PROMPT_TOKENS + WORD_TOKENS].tolist())
    begin = _find_word(ids, tokenizer)
    return ids[begin : begin + PROMPT_TOKENS]


def _find_word(ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many of ``ids`` end a word: a long text is cut between any tokens."""
    texts = [
        str(tokenizer.decode(list(ids[:count]))) for count in range(min(len(ids), WORD_TOKENS))
    ]
    if len(texts) < 2 or not texts[1][:1].islower():
        return 0
    for count, (text, longer) in enumerate(itertools.pairwise(texts)):
        added = longer[len(text) :]
        if added.strip() and (text[-1:].isspace() or added[:1].isspace()):
            return count
    return 0


@torch.no_grad()
def continue_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    count: int,
) -> list[Continuation]:
    """Continue each prompt by at most ``count`` tokens; prompts of one length are one batch.

    There are fewer where the model ends its text or its context is full. A prompt that leaves no
    room in the context is cut at its start.
    """
    context = find_model_context(model) or 2**31
    ids = [prompt.ids[-(context - 1) :] for prompt in prompts]
    ends = list_end_ids(model.generation_config, tokenizer)
    end = ends[0] if ends else None
    found: dict[int, Continuation] = {}
    for length in sorted({len(each) for each in ids}):
        places = [place for place, each in enumerate(ids) if len(each) == length]
        ids_PL = torch.tensor([ids[place] for place in places]).to(find_device(model))
        rules = GenerationConfig(
            max_new_tokens=min(count, context - length),
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=end if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        )
        # The library would take from the model's own rules whatever these omit.
        generate: Any = model.generate  # nn.Module's own __getattr__ types it as a Tensor
        own = model.generation_config
        model.generation_config = rules
        try:
            mask_PL = torch.ones_like(ids_PL)
            written_PL = generate(ids_PL, attention_mask=mask_PL, generation_config=rules)
        finally:
            model.generation_config = own
        for place, row in zip(places, written_PL[:, length:].tolist(), strict=True):
            found[place] = _read_row(row, tokenizer, ends)
    return [found[place] for place in range(len(prompts))]


def _read_row(row: list[int], tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> Continuation:
    """Decode what a model wrote, up to the first of ``ends``; what follows in a row is padding."""
    stop = next((place for place, each in enumerate(row) if each in ends), len(row))
    kept = row[: stop + 1]
    # An id without a name, of a padded row of the LM head, becomes <id>.
    runs = itertools.groupby(kept, lambda each: tokenizer.convert_ids_to_tokens(each) is None)
    texts = (
        "".join(f"<{each}>" for each in run) if nameless else str(tokenizer.decode(list(run)))
        for nameless, run in runs
    )
    return Continuation("".join(texts), len(kept))


# ---------------------------------------------------------------------- during training


@dataclass(frozen=True)
class EvaluationSamples:
    """The prompts that a student continues at each evaluation of its training."""

    prompts: tuple[Prompt, ...]
    tokenizer: PreTrainedTokenizerBase
    #: Bytes of the held-out text, if the student has other tokens than its teacher; else 0.
    text_bytes: int = 0

    @classmethod
    def of(
        cls, options: EvaluationConfig, source: Source, tokenizer: PreTrainedTokenizerBase
    ) -> EvaluationSamples:
        """Take the first ``options.samples`` prompts of the job, or else of the held-out text."""
        count = options.samples
        asked = [Prompt.of(text, tokenizer) for text in options.prompts[:count]]
        size = count_held_out_bytes(source, tokenizer) if isinstance(source, AlignedCache) else 0
        return cls(tuple(asked or choose_prompts(source, tokenizer, count)), tokenizer, size)

    @torch.no_grad()
    def write(
        self, student: PreTrainedModel, lm_head: LMHead, precision: Precision, device: torch.device
    ) -> list[dict[str, str]]:
        """Let ``student`` continue each prompt; return the texts, with the keys prompt and text.

        The student runs as in an evaluation, without a cache of keys and values, so that whatever
        was changed in its layers for the training holds. Every pass has the same shape: causal
        models see nothing of the tokens that are not written yet.
        """
        head = lm_head.refresh(student)
        context = find_model_context(student) or 2**31
        ends = list_end_ids(student.generation_config, self.tokenizer)
        texts = []
        for prompt in self.prompts:
            ids = prompt.ids[-(context - 1) :][-CHAT_TOKENS:]
            length = min(len(ids) + TRAINING_TOKENS, context)
            row_1L = torch.zeros((1, length), dtype=torch.long, device=device)
            row_1L[0, : len(ids)] = torch.tensor(ids)
            for place in range(len(ids), length):
                with precision.autocast():
                    hidden_1LD = compute_hidden_states(student, row_1L)
                last_1D = hidden_1LD[0, place - 1 : place].to(precision.dtype)
                row_1L[0, place] = head.compute_logits(last_1D).argmax(1)[0]
            found = _read_row(row_1L[0, len(ids) :].tolist(), self.tokenizer, ends)
            texts.append({"prompt": prompt.text, "text": found.text})
        return texts
