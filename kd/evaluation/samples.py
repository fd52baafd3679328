"""What a model writes when it goes on from a text, always choosing the most probable token.

Shapes: T tokens of the prompt, with a batch of one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from kd.config.evaluation import EvaluationConfig
from kd.models import vocabulary_size


def write_samples(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: EvaluationConfig
) -> list[dict[str, str]]:
    """Each of the prompts, and how the model goes on, with special tokens shown."""
    return [{"prompt": prompt, "text": continuation(model, tokenizer, prompt, options)} for prompt in options.prompts]


@torch.no_grad()
def continuation(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, options: EvaluationConfig
) -> str:
    """At most ``max_new_tokens`` tokens, fewer where the model ends its text or its context is full.

    Of a prompt that leaves no room in the context, the end is kept.
    """
    context = getattr(model.config, "max_position_embeddings", None) or 2**31
    ids_1T = _prompt_ids(tokenizer, prompt, context).to(model.device)
    length = ids_1T.shape[1]
    rules = _greedy(model, tokenizer, min(options.max_new_tokens, context - length))
    written_1T = _generate(model, ids_1T, rules)
    return str(tokenizer.decode(written_1T[0, length:].tolist()))


def _greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int) -> GenerationConfig:
    """The rules for ``count`` tokens; rows of a padded head are no tokens."""
    width, end = model.get_output_embeddings().weight.shape[0], tokenizer.eos_token_id
    return GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end,
        suppress_tokens=list(range(vocabulary_size(tokenizer), width)) or None,
    )


def _generate(model: PreTrainedModel, ids_1T: Tensor, rules: GenerationConfig) -> Tensor:
    """What the library writes by ``rules`` alone: what they leave open it would take from the model's own."""
    generate: Any = model.generate  # nn.Module's own __getattr__ types it as a Tensor
    own, model.generation_config = model.generation_config, rules
    try:
        written_1T: Tensor = generate(ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=rules)
    finally:
        model.generation_config = own
    return written_1T


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, context: int) -> Tensor:
    """The prompt's tokens (1, T), the last ones that leave room for one more; never none."""
    ids = tokenizer(prompt, verbose=False)["input_ids"][-(context - 1) :]
    if not ids:
        ids = [next(token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id, 0) if token is not None)]
    return torch.tensor([ids])
