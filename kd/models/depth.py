"""Take some of the layers of a model: its configuration, its tensors, and a check of the result.

A model class builds each layer from its number and from fields of the configuration that hold
something for each layer. Both change when layers are taken out. The rules here know the usual
fields, and the check compares what the class built with the teacher's layers, so that a field
without a rule is an error and never another model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kd.errors import ModelError
from kd.models.folder import ConfigFields
from kd.models.layers import find_decoder_layers, find_list_name

#: Fields that list the numbers of layers. Other lists hold one value for each layer.
_NUMBERS = ("mlp_only_layers", "moe_layers", "full_attn_idxs")
#: Parts of the names of fields that hold one value for each layer. Other lists may have the length
#: by chance.
_PER_LAYER = ("layer", "pattern", "intermediate_size")
#: Attributes of modules that may differ: the number of the layer, which is new.
_OWN = ("layer_idx", "layer_number", "layer_id")


def cut_fields(config: PreTrainedConfig, picked: tuple[int, ...]) -> ConfigFields:
    """Return the fields of ``config`` for a model that has only the layers ``picked``."""
    fields: ConfigFields = config.to_dict()
    layers = config.num_hidden_layers
    count = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    cut: ConfigFields = {count: len(picked)}
    for name, value in fields.items():
        if not isinstance(value, list):
            continue
        if name in _NUMBERS:
            cut[name] = [new for new, old in enumerate(picked) if old in value]
        elif len(value) == layers and any(part in name for part in _PER_LAYER):
            cut[name] = [value[layer] for layer in picked]
    if own := fields.get("per_layer_config"):
        own = {int(layer): values for layer, values in own.items()}
        cut["per_layer_config"] = {
            str(new): own[old] for new, old in enumerate(picked) if old in own
        }
    return fields | cut | _cut_counts(fields, layers, picked)


def _cut_counts(fields: ConfigFields, layers: int, picked: tuple[int, ...]) -> ConfigFields:
    """Cut the fields that describe the first, the last or every n-th layer by one number."""
    cut: ConfigFields = {}
    if (step := fields.get("decoder_sparse_step")) is not None:
        # Every step-th layer is a mixture of experts. The rest may lie anywhere afterwards.
        dense = set(fields.get("mlp_only_layers") or ())
        dense |= {layer for layer in range(layers) if (layer + 1) % step}
        cut["decoder_sparse_step"] = 1
        cut["mlp_only_layers"] = [new for new, old in enumerate(picked) if old in dense]
    if (first := fields.get("first_k_dense_replace")) is not None:
        cut["first_k_dense_replace"] = sum(layer < first for layer in picked)
    if shared := fields.get("num_kv_shared_layers"):
        cut["num_kv_shared_layers"] = sum(layer >= layers - shared for layer in picked)
    return cut


def pick_tensors(
    teacher: PreTrainedModel,
    tensors: dict[str, Tensor],
    student: PreTrainedModel,
    picked: tuple[int, ...],
) -> dict[str, Tensor]:
    """Return the student's tensors, by the student's names, out of the teacher's ``tensors``."""
    prefix = find_list_name(student)
    layers = len(find_decoder_layers(teacher))
    found = {}
    for name, own in student.state_dict().items():
        theirs = name
        if name.startswith(f"{prefix}."):
            # model.layers.1.… of the student is the second of the picked layers.
            number, _, rest = name.removeprefix(f"{prefix}.").partition(".")
            theirs = f"{prefix}.{picked[int(number)]}.{rest}"
        tensor = tensors[theirs]
        if tensor.shape != own.shape:
            # Outside of the layers: it has a part for each of them, as in Gemma 3n and 4.
            axis = _find_packed_axis(tensor.shape, own.shape, layers, len(picked))
            assert axis is not None, "require_same_layers refuses other shapes"
            parts = tensor.unflatten(axis, (layers, -1)).movedim(axis, 0)
            tensor = parts[list(picked)].movedim(0, axis).flatten(axis, axis + 1)
        found[name] = tensor
    return found


def _find_packed_axis(shape: Any, own: Any, layers: int, count: int) -> int | None:
    """Return the axis in which one tensor holds a part for each layer; None if there is none."""
    axes = [axis for axis, (size, less) in enumerate(zip(shape, own, strict=False)) if size != less]
    if len(shape) != len(own) or len(axes) != 1 or shape[axes[0]] * count != own[axes[0]] * layers:
        return None
    return axes[0]


# ---------------------------------------------------------------------- is it the same layer?


def require_layers(teacher: PreTrainedModel) -> None:
    """Raise ``ModelError`` if ``teacher`` has no list of decoder layers."""
    if not find_decoder_layers(teacher):
        raise ModelError(
            f"student.from_teacher cannot cut a student out of a {type(teacher).__name__}: "
            "its layers are not in one list.",
            "Give student.model or student.init instead.",
        )


def require_same_layers(
    teacher: PreTrainedModel, student: PreTrainedModel, picked: tuple[int, ...]
) -> None:
    """Raise ``ModelError`` if a layer of ``student`` is not built like the teacher's layer.

    Compares modules, their plain attributes and the shapes of their tensors, so it needs no
    weights.
    """
    mine = find_decoder_layers(student)
    theirs = find_decoder_layers(teacher)
    for new, old in enumerate(picked):
        difference = _find_difference(mine[new], theirs[old]) if new < len(mine) else "its number"
        if difference is not None:
            raise _make_refusal(teacher, picked, f"layer {old} would differ in {difference}")
    difference = _find_outer_difference(teacher, student, len(picked))
    if difference is not None:
        raise _make_refusal(teacher, picked, f"{difference} would have another shape")


def _make_refusal(teacher: PreTrainedModel, picked: tuple[int, ...], why: str) -> ModelError:
    shown = ", ".join(map(str, picked))
    return ModelError(
        f"student.from_teacher: a {type(teacher).__name__} cannot have the layers {shown} of the "
        f"teacher alone: {why}.",
        "Choose others with student.from_teacher.layers and pick, "
        "or give student.model or student.init instead.",
    )


def _find_difference(mine: nn.Module, theirs: nn.Module) -> str | None:
    modules = dict(mine.named_modules())
    others = dict(theirs.named_modules())
    if modules.keys() != others.keys():
        return min(modules.keys() ^ others.keys())
    for name, module in modules.items():
        own = _describe_module(module)
        other = _describe_module(others[name])
        wrong = [key for key in {**own, **other} if own.get(key) != other.get(key)]
        if wrong:
            return f"{name}.{wrong[0]}".lstrip(".")
    return None


def _describe_module(module: nn.Module) -> dict[str, object]:
    """Return the class of ``module``, its plain attributes and the shapes of its tensors."""
    plain = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None)
        and name not in (*_OWN, "training")
        and not name.startswith("_")
    }
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return {"class": type(module)} | plain | {name: each.shape for name, each in tensors}


def _find_outer_difference(
    teacher: PreTrainedModel, student: PreTrainedModel, count: int
) -> str | None:
    """Return the name of a tensor outside of the layers that cannot be taken over."""
    layers = len(find_decoder_layers(teacher))
    prefix = find_list_name(student)
    theirs = {name: tensor.shape for name, tensor in teacher.state_dict().items()}
    for name, tensor in student.state_dict().items():
        shape = theirs.get(name, ())
        if name.startswith(f"{prefix}.") or tensor.shape == shape:
            continue
        if _find_packed_axis(shape, tensor.shape, layers, count) is None:
            return name
    return None
