"""Cut a student out of its teacher: some of its layers, if asked with narrower stream and MLPs.

    layers      copies of the teacher's layers, of any decoder whose layers are a list; a student
                with all of them has the teacher's logits
    MLP         the channels that write the most: root mean square activation times the norm of
                their column
    stream      x becomes y = Qᵀ x, with Q (D, d) the directions in which x has the most energy

The stream is what the layers read and add to, also called the residual stream. Rotating a stream
that is read through RMSNorm changes nothing (SliceGPT, Ashkboos et al. 2024), so a projection loses
only what lies outside of Q. With g the gain of the norm that a matrix reads through:

    reads   W (m, D)  ->  W diag(g) Q
    writes  W (D, m)  ->  Qᵀ W

The gain of the norm itself becomes one number, sqrt(D share / d), because x / rms(x) = sqrt(D) x /
|x| and |y|² = share |x|² (epsilon aside).

An embedding that is also the LM head is then split in two, because it would have to be both E Q and
E diag(g) Q. Attention heads keep their number and their width; only what they read and write
becomes narrower. Energies are measured while the teacher reads a text that it sampled itself. The
weights alone would be a bad guide: they do not show the few directions and channels that real
models use at every token.

Shapes: D and d width of the teacher's and the student's stream, m rows of any matrix, F channels of
an MLP, B sequences, L positions of a sequence, N positions.
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
from kd.models.depth import cut_fields, pick_tensors, require_layers, require_same_layers
from kd.models.layers import removing

#: Model types that can become narrower: each layer is RMSNorm, attention, RMSNorm and a gated MLP
#: on one stream, and reads and writes the stream only through linear layers.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
#: The sizes that become narrower.
_WIDTHS = ("hidden_size", "intermediate_size")

#: The norm through which each matrix reads the stream.
_NORM_OF = {
    "q_proj": "input_layernorm",
    "k_proj": "input_layernorm",
    "v_proj": "input_layernorm",
    "gate_proj": "post_attention_layernorm",
    "up_proj": "post_attention_layernorm",
}
#: The matrices that write into the stream.
_WRITERS = {"o_proj", "down_proj"}

Tensors = dict[str, Tensor]


@torch.no_grad()
def cut_student(teacher: PreTrainedModel, plan: StudentFromTeacher) -> PreTrainedModel:
    """Return the student that ``plan`` cuts out of ``teacher``, in float32 on the CPU.

    The result depends on nothing else. Raises ``ModelError`` for a student that would be larger
    than its teacher in any size or could not have its layers, and for a narrower one of another
    type than ``LLAMA_LIKE``.
    """
    student = cut_hollow_student(teacher, plan)
    picked = pick_layers(teacher.config.num_hidden_layers, plan)
    tensors = {name: tensor.detach() for name, tensor in teacher.state_dict().items()}
    if _is_narrower(teacher, plan, "intermediate_size"):
        tensors = _narrow_mlps(tensors, _choose_channels(teacher, student.config.intermediate_size))
    if _is_narrower(teacher, plan, "hidden_size"):
        tensors = _narrow_stream(tensors, _measure_energy(teacher), student.config.hidden_size)
    taken = pick_tensors(teacher, tensors, student, picked)
    for name, tensor in student.state_dict().items():
        tensor.copy_(taken[name])
    return student


def cut_hollow_student(teacher: PreTrainedModel, plan: StudentFromTeacher) -> PreTrainedModel:
    """Return a student in the shape that ``plan`` asks for, without the teacher's weights.

    ``teacher`` needs no weights either. Raises the errors of ``cut_student``.
    """
    require_layers(teacher)
    _require_smaller(teacher, plan)
    picked = pick_layers(teacher.config.num_hidden_layers, plan)
    config: PreTrainedConfig = teacher.config
    shape = cut_fields(config, picked) | {"dtype": "float32"}
    if config.model_type in LLAMA_LIKE:
        width = plan.hidden_size or config.hidden_size
        head = config.hidden_size // config.num_attention_heads
        shape |= {
            "hidden_size": width,
            "intermediate_size": plan.intermediate_size or config.intermediate_size,
            "head_dim": getattr(config, "head_dim", None) or head,
            "tie_word_embeddings": config.tie_word_embeddings and width == config.hidden_size,
        }
    try:
        made: Any = type(teacher)
        student: PreTrainedModel = made(type(config).from_dict(shape))
    except (ValueError, StrictDataclassError) as error:
        heads = config.num_attention_heads
        raise ModelError(
            f"student.from_teacher: no {type(teacher).__name__} has this shape: "
            f"{str(error).strip().splitlines()[-1]}",
            f"Set student.from_teacher.hidden_size to a multiple of the teacher's {heads} "
            "attention heads.",
        ) from error
    student.generation_config = copy.deepcopy(teacher.generation_config)
    if not any(_is_narrower(teacher, plan, field) for field in _WIDTHS):
        require_same_layers(teacher, student, picked)
    return student


def pick_layers(layers: int, plan: StudentFromTeacher) -> tuple[int, ...]:
    """Return the indices of those of the teacher's ``layers`` that the student keeps, in order."""
    count = plan.layers
    gaps = max(count - 1, 1)
    first = -(-count // 2)  # "ends" takes half of the layers, rounded up, from the bottom
    return {
        "spread": tuple((2 * index * (layers - 1) + gaps) // (2 * gaps) for index in range(count)),
        "first": tuple(range(count)),
        "last": tuple(range(layers - count, layers)),
        "ends": (*range(first), *range(layers - count + first, layers)),
    }[plan.pick]


# ---------------------------------------------------------------------- the student's shape


def _require_smaller(teacher: PreTrainedModel, plan: StudentFromTeacher) -> None:
    config = teacher.config
    name = type(teacher).__name__
    for field in ("layers", *_WIDTHS):
        wanted = getattr(plan, field)
        size = _get_size(config, field)
        if wanted is not None and size is not None and wanted > size:
            what = f"student.from_teacher.{field} is {wanted}, but the teacher ({name}) has only"
            raise ModelError(f"{what} {size}.", f"Set it to {size} or less.")
        narrows = field in _WIDTHS and _is_narrower(teacher, plan, field)
        if narrows and config.model_type not in LLAMA_LIKE:
            raise ModelError(
                f"student.from_teacher.{field} cannot make a {name} narrower: this is possible "
                f"for models of the types {', '.join(LLAMA_LIKE)} only.",
                "Leave it out: layers can be taken out of any decoder.",
            )


def _get_size(config: PreTrainedConfig, field: str) -> int | None:
    size = getattr(config, "num_hidden_layers" if field == "layers" else field, None)
    return size if isinstance(size, int) else None


def _is_narrower(teacher: PreTrainedModel, plan: StudentFromTeacher, field: str) -> bool:
    wanted = getattr(plan, field)
    return wanted is not None and wanted != _get_size(teacher.config, field)


# ---------------------------------------------------------------------- energies


def sample_text(teacher: PreTrainedModel, sequences: int = 8, length: int = 128) -> Tensor:
    """Let ``teacher`` write a text: token ids (B, L), sampled at temperature 1.

    A fixed seed makes the text, and so the student, the same every time.
    """
    generator = torch.Generator().manual_seed(0)
    config = teacher.config
    starts = [config.bos_token_id, config.eos_token_id]  # the latter may be a list
    start = next((int(np.ravel(token)[0]) for token in starts if token is not None), 0)
    text_BL = torch.full((sequences, 1), start)
    past = None
    while text_BL.shape[1] < min(length, config.max_position_embeddings):
        found: Any = teacher(input_ids=text_BL[:, -1:], past_key_values=past, use_cache=True)
        next_B1 = torch.multinomial(found.logits[:, -1].softmax(-1), 1, generator=generator)
        text_BL = torch.cat([text_BL, next_B1], dim=1)
        past = found.past_key_values
    return text_BL


def _choose_channels(teacher: PreTrainedModel, width: int) -> list[Tensor]:
    """Return the ``width`` MLP channels of each layer that write the most into the stream."""
    layers: Any = teacher.base_model.layers
    writers = [layer.mlp.down_proj for layer in layers]
    energies = _measure_inputs(teacher, writers, lambda a_NF: a_NF.square().mean(0))
    strengths = [
        energy_F * writer.weight.double().square().sum(0)
        for energy_F, writer in zip(energies, writers, strict=True)
    ]
    return [strength_F.topk(width).indices.sort().values for strength_F in strengths]


def _measure_energy(teacher: PreTrainedModel) -> Tensor:
    """Return the second moment (D, D) of the stream, scaled to unit length at each position.

    Its trace is 1. It is measured at the input of every norm, and averaged over the norms.
    """
    inner: Any = teacher.base_model
    norms = [
        norm
        for layer in inner.layers
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ]
    moments = _measure_inputs(teacher, [*norms, inner.norm], _compute_direction_moment)
    return torch.stack(moments).mean(0)


def _compute_direction_moment(x_ND: Tensor) -> Tensor:
    unit_ND = nn.functional.normalize(x_ND)
    return unit_ND.T @ unit_ND / len(unit_ND)


def _measure_inputs(
    model: PreTrainedModel, layers: list[nn.Module], measure: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Apply ``measure`` to the inputs (N, width) of each of ``layers``, in float64.

    Meanwhile ``model`` reads a text that it sampled.
    """
    found: dict[nn.Module, Tensor] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found[layer] = measure(inputs[0].flatten(0, 1).double())

    text_BL = sample_text(model)
    with removing(layer.register_forward_pre_hook(note) for layer in layers):
        model.base_model(input_ids=text_BL, use_cache=False)
    return [found[layer] for layer in layers]


# ---------------------------------------------------------------------- narrower tensors


def _narrow_mlps(tensors: Tensors, kept: list[Tensor]) -> Tensors:
    """Return ``tensors`` with only the channels ``kept`` of each layer's MLP."""
    narrowed = dict(tensors)
    for name, tensor in tensors.items():
        # "layers.3.mlp.up_proj.weight"; empty parts stand before names that have fewer.
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
    """Return the teacher's tensors for a stream of its ``width`` strongest directions."""
    # A tied LM head has no tensor of its own: give it one, because it must be split from the
    # embedding.
    tensors = {"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}
    energies_D, basis_DD = torch.linalg.eigh(energy_DD)
    # eigh sorts eigenvalues in ascending order, so the strongest directions are the last.
    basis_Dd = basis_DD[:, -width:].flip(-1)
    share = float(energies_D[-width:].sum() / energies_D.sum())
    scale = math.sqrt(len(energies_D) * share / width)
    return {name: _project_tensor(name, tensors, basis_Dd, scale).float() for name in tensors}


def _project_tensor(name: str, tensors: Tensors, basis_Dd: Tensor, scale: float) -> Tensor:
    """Project one tensor onto the basis, by the rules at the top of this file."""
    tensor = tensors[name].double()
    parts = name.split(".")
    prefix = ".".join(parts[:-3])
    layer, kind = parts[-2:]
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
    # The biases of readers, and the norms of queries and keys, which are as wide as an attention
    # head.
    return tensor
