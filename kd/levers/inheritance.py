"""A student cut out of its teacher: some of its layers, and where asked a narrower stream and narrower MLPs.

    layers      every weight copied; nothing else changes, so that all the layers give the teacher's own logits
    MLP         the channels that write the most: root mean square activation times the norm of their column
    stream      x becomes y = Qᵀ x, Q (D, d) the directions in which it has the most energy

Rotating a stream that is read through RMSNorm changes nothing (SliceGPT, Ashkboos et al. 2024), so projecting it loses
no more than what lies outside of Q. With g the gain of the norm that a matrix reads through:

    reads   W (m, D)  ->  W diag(g) Q      and the norm's own gain becomes one number, sqrt(D share / d), for
                                           x / rms(x) = sqrt(D) x / |x| and |y|² = share |x|²  (epsilon aside)
    writes  W (D, m)  ->  Qᵀ W

An embedding that is also the LM head is split in two then, for it would have to be both E Q and E diag(g) Q. Heads keep
their number and their width: attention is the teacher's, only what it reads and writes is narrower. What is strong is
measured while the teacher reads a text of its own making; weights alone are a bad guide, for they do not show the few
directions and channels that real models use at every token.

Shapes: D and d the teacher's and the student's width, m rows of any matrix, F channels of an MLP, B T text.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kd.config.student import StudentFromTeacher
from kd.errors import ModelError

#: Decoders of RMSNorm, attention, RMSNorm and gated MLP on one stream, which all read and write by linear layers.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")

_NORM_OF = {
    "q_proj": "input_layernorm",
    "k_proj": "input_layernorm",
    "v_proj": "input_layernorm",
    "gate_proj": "post_attention_layernorm",
    "up_proj": "post_attention_layernorm",
}
_WRITERS = {"o_proj", "down_proj"}

Tensors = dict[str, Tensor]


@torch.no_grad()
def student_of(teacher: PreTrainedModel, plan: StudentFromTeacher) -> PreTrainedModel:
    """The student that ``plan`` cuts out of ``teacher``, in float32 on the CPU: a function of the two and no more.

    Raises ``ModelError`` for a teacher of another kind, and for a student that is larger than it in any way.
    """
    student = hollow_student_of(teacher, plan)
    picked = picked_layers(teacher.config.num_hidden_layers, plan)
    tensors = {name: parameter.detach() for name, parameter in teacher.named_parameters()}
    stream, mlp = student.config.hidden_size, student.config.intermediate_size
    if mlp < teacher.config.intermediate_size:
        tensors = _narrow_mlps(tensors, _channels(teacher, mlp))
    if stream < teacher.config.hidden_size:
        tensors = _narrow_stream(tensors, _energy(teacher), stream)
    for name, parameter in student.named_parameters():
        parameter.copy_(tensors[_name_in_teacher(name, picked)])
    return student


def hollow_student_of(teacher: PreTrainedModel, plan: StudentFromTeacher) -> PreTrainedModel:
    """What ``student_of`` makes, without weights, of a ``teacher`` that need have none; raises what it does."""
    _require_smaller(teacher, plan)
    return _empty(teacher, plan, picked_layers(teacher.config.num_hidden_layers, plan))


def picked_layers(layers: int, plan: StudentFromTeacher) -> tuple[int, ...]:
    """Which of the teacher's ``layers`` become the student's, in order."""
    count, gaps = plan.layers, max(plan.layers - 1, 1)
    first = -(-count // 2)
    return {
        "spread": tuple((2 * index * (layers - 1) + gaps) // (2 * gaps) for index in range(count)),
        "first": tuple(range(count)),
        "last": tuple(range(layers - count, layers)),
        "ends": (*range(first), *range(layers - count + first, layers)),
    }[plan.pick]


# ---------------------------------------------------------------------- the student's shape


def _require_smaller(teacher: PreTrainedModel, plan: StudentFromTeacher) -> None:
    config, name = teacher.config, type(teacher).__name__
    if config.model_type not in LLAMA_LIKE:
        raise ModelError(
            f"student.from_teacher cannot cut up a {name}: it knows models of the types {', '.join(LLAMA_LIKE)}.",
            "Give student.model or student.init instead.",
        )
    sizes = {"layers": "num_hidden_layers", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size"}
    for field, own in sizes.items():
        wanted, there = getattr(plan, field), getattr(config, own)
        if wanted is not None and wanted > there:
            raise ModelError(
                f"student.from_teacher.{field} is {wanted}, but the teacher ({name}) has only {there}.",
                f"Set it to {there} or less.",
            )


def _empty(teacher: PreTrainedModel, plan: StudentFromTeacher, picked: tuple[int, ...]) -> PreTrainedModel:
    """A model of the teacher's class in the student's shape; its weights mean nothing yet."""
    config: PreTrainedConfig = teacher.config
    width = plan.hidden_size or config.hidden_size
    shape = config.to_dict() | {
        "num_hidden_layers": len(picked),
        "hidden_size": width,
        "intermediate_size": plan.intermediate_size or config.intermediate_size,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "tie_word_embeddings": config.tie_word_embeddings and width == config.hidden_size,
        "dtype": "float32",
    }
    if shape.get("layer_types") is not None:
        shape["layer_types"] = [config.layer_types[layer] for layer in picked]
    try:
        made: Any = type(teacher)
        student: PreTrainedModel = made(type(config).from_dict(shape))
    except (ValueError, StrictDataclassError) as error:
        heads = config.num_attention_heads
        raise ModelError(
            f"student.from_teacher: no {type(teacher).__name__} has this shape: {str(error).strip().splitlines()[-1]}",
            f"Set student.from_teacher.hidden_size to a multiple of the teacher's {heads} attention heads.",
        ) from error
    student.generation_config = copy.deepcopy(teacher.generation_config)
    return student


def _name_in_teacher(name: str, picked: tuple[int, ...]) -> str:
    """``model.layers.1.…`` is the second of the picked layers."""
    parts = name.split(".")
    if "layers" in parts:
        place = parts.index("layers") + 1
        parts[place] = str(picked[int(parts[place])])
    return ".".join(parts)


# ---------------------------------------------------------------------- what is strong


def own_text(teacher: PreTrainedModel, sequences: int = 8, length: int = 128) -> Tensor:
    """Token ids (B, T) that ``teacher`` writes, sampled at temperature 1 from a random state of its own."""
    chance, config = torch.Generator().manual_seed(0), teacher.config
    starts = [config.bos_token_id, config.eos_token_id]  # the latter may be a list
    start = next((int(np.ravel(token)[0]) for token in starts if token is not None), 0)
    text_BT, past = torch.full((sequences, 1), start), None
    while text_BT.shape[1] < min(length, config.max_position_embeddings):
        found: Any = teacher(input_ids=text_BT[:, -1:], past_key_values=past, use_cache=True)
        next_B1 = torch.multinomial(found.logits[:, -1].softmax(-1), 1, generator=chance)
        text_BT, past = torch.cat([text_BT, next_B1], dim=1), found.past_key_values
    return text_BT


def _channels(teacher: PreTrainedModel, width: int) -> list[Tensor]:
    """For each layer the ``width`` channels of its MLP that write the most into the stream, in ascending order."""
    layers: Any = teacher.base_model.layers
    writers = [layer.mlp.down_proj for layer in layers]
    energies = _measured(teacher, writers, lambda a_NF: a_NF.square().mean(0))
    strengths = [
        energy_F * writer.weight.double().square().sum(0) for energy_F, writer in zip(energies, writers, strict=True)
    ]
    return [strength_F.topk(width).indices.sort().values for strength_F in strengths]


def _energy(teacher: PreTrainedModel) -> Tensor:
    """Second moment (D, D) of the stream as its readers see it, at unit size, averaged over all of them; trace 1."""
    inner: Any = teacher.base_model
    norms = [norm for layer in inner.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    moments = _measured(teacher, [*norms, inner.norm], _direction_moment)
    return torch.stack(moments).mean(0)


def _direction_moment(x_ND: Tensor) -> Tensor:
    unit_ND = nn.functional.normalize(x_ND)
    return unit_ND.T @ unit_ND / len(unit_ND)


def _measured(model: PreTrainedModel, layers: list[nn.Module], measure: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """``measure`` of each layer's inputs (N, width), in float64, while ``model`` reads what it wrote."""
    found: dict[nn.Module, Tensor] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found[layer] = measure(inputs[0].flatten(0, 1).double())

    text_BT = own_text(model)
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        model.base_model(input_ids=text_BT, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [found[layer] for layer in layers]


# ---------------------------------------------------------------------- narrower


def _narrow_mlps(tensors: Tensors, kept: list[Tensor]) -> Tensors:
    narrowed = dict(tensors)
    for name, tensor in tensors.items():
        *_, place, block, layer, kind = ["", "", "", "", *name.split(".")]
        if block != "mlp":
            continue
        channels = kept[int(place)]
        if layer != "down_proj":
            narrowed[name] = tensor[channels]
        elif kind == "weight":
            narrowed[name] = tensor[:, channels]
    return narrowed


def _narrow_stream(tensors: Tensors, energy_DD: Tensor, width: int) -> Tensors:
    """Every tensor of the teacher, read and written in the ``width`` strongest directions of its stream."""
    tensors = {"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}
    energies_D, basis_DD = torch.linalg.eigh(energy_DD)
    basis_Dd, share = basis_DD[:, -width:].flip(-1), float(energies_D[-width:].sum() / energies_D.sum())
    scale = math.sqrt(len(energies_D) * share / width)
    return {name: _projected(name, tensors, basis_Dd, scale).float() for name in tensors}


def _projected(name: str, tensors: Tensors, basis_Dd: Tensor, scale: float) -> Tensor:
    tensor = tensors[name].double()
    prefix, layer, kind = ".".join(name.split(".")[:-3]), *name.split(".")[-2:]
    if layer in _WRITERS:
        return basis_Dd.T @ tensor
    if layer == "embed_tokens":
        return tensor @ basis_Dd
    if layer == "lm_head":
        return tensor * tensors["model.norm.weight"].double() @ basis_Dd
    if layer in _NORM_OF and kind == "weight":
        return tensor * tensors[f"{prefix}.{_NORM_OF[layer]}.weight"].double() @ basis_Dd
    if layer in {"norm", *_NORM_OF.values()}:
        return torch.full((basis_Dd.shape[1],), scale)
    return tensor  # the biases of readers, and the norms of queries and keys, which are as wide as a head
