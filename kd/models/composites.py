"""The language model inside a model that also reads images or sound.

Such a model has a configuration of its own, with that of its language model inside, and its tensors
have longer names. Potstill reads and trains only text, so it loads only the language model: the
other tensors are not read, and a saved student is a plain causal language model.

    config.json     {"model_type": "gemma3", "text_config": {...}}     ->  Gemma3TextConfig
    tensors         language_model.model.layers.0.mlp.up_proj.weight   ->  model.layers.0.mlp...
"""

from __future__ import annotations

import re
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kd.errors import ModelError
from kd.models.folder import ModelFolder
from kd.models.layers import find_body

#: Language models that have no class of their own, and the plain model that computes the same from
#: text: they differ in the positions of images only, where a token has three of them.
_TWINS: dict[str, type[PreTrainedConfig]] = {
    "qwen2_vl_text": transformers.Qwen2Config,
    "qwen2_5_vl_text": transformers.Qwen2Config,
    "qwen3_vl_text": transformers.Qwen3Config,
}
#: Fields of a rotary embedding that say how the three positions share its width; ``type`` is the
#: older name of ``rope_type``, which every configuration has once it is read.
_IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved", "type")


def find_text_config(config: PreTrainedConfig, folder: ModelFolder) -> PreTrainedConfig | None:
    """Return the configuration of the language model inside; None for a plain language model.

    Raises ``ModelError`` if the language model cannot stand alone.
    """
    text: PreTrainedConfig = config.get_text_config()
    # A model that comes with its own code is loaded by that code.
    if text is config or "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return None
    if (twin := _TWINS.get(text.model_type)) is not None:
        fields = {name: value for name, value in text.to_dict().items() if name != "model_type"}
        rope = fields.get("rope_parameters") or {}
        rope = {name: value for name, value in rope.items() if name not in _IMAGE_POSITIONS}
        text = twin.from_dict(fields | {"rope_parameters": rope})
    if type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"the language model of the {config.model_type} in {folder.path} "
            f"({text.model_type}) cannot be used without the rest of it.",
            "Use a causal language model.",
        )
    # Both have a field for it, with other defaults. An LM head in the files still decides.
    said = (text.tie_word_embeddings, getattr(config, "tie_word_embeddings", False))
    text.tie_word_embeddings = any(said)
    return text


def map_names(hollow: PreTrainedModel, folder: ModelFolder) -> dict[str, str]:
    """Map patterns of names in the files to names of the language model, as transformers asks.

    The embedding shows where the names of the language model begin: no other part has it.
    """
    shapes = folder.read_parameter_shapes()
    embedding: Any = hollow.get_input_embeddings().weight
    inside = _name_of(find_body(hollow), embedding)
    whole = _name_of(hollow, embedding)
    starts = {
        name.removesuffix(inside)
        for name, shape in shapes.items()
        if f".{name}".endswith(f".{inside}") and shape == tuple(embedding.shape)
    }
    if len(starts) != 1:
        return {}  # the embedding is missing, and will be named
    end = "lm_head.weight"
    heads = {name.removesuffix(end) for name in shapes if f".{name}".endswith(f".{end}")}
    (start,) = starts
    found = {f"^{re.escape(start)}": whole.removesuffix(inside)}
    # The LM head comes first, because its name may begin like those of the rest.
    return {f"^{re.escape(head)}lm_head\\.": "lm_head." for head in heads if head} | found


def _name_of(module: nn.Module, wanted: nn.Parameter) -> str:
    return next(name for name, parameter in module.named_parameters() if parameter is wanted)
