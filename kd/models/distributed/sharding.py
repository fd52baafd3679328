"""A teacher of which every process holds a part: ``teacher.parallel`` tensor and fsdp.

The engines are transformers' tensor parallelism, which cuts matrices as the model's ``tp_plan``
says, and torch's FSDP2, which cuts every layer and gathers the one that runs. Each process reads
its part from the files.

Shapes: B sequences, L positions of a sequence.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kd.errors import ConfigError
from kd.models.distributed.whole_head import put_head_whole
from kd.models.layers import find_decoder_layers, find_trunk, mark_shared_modules, read_layer_sizes

#: The layers of an attention whose rows are those of its heads, one head after the other.
_HEAD_LAYERS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "qkv_proj")
#: The least share of the layers' weights that a ``tp_plan`` must cut to be of use. The plans of
#: some models cut nothing but the LM head.
LEAST_SHARE = 0.5
#: What FSDP2 does with the gathered weights of a module after its forward pass.
_FREE = "free_full_weight"
_KEEP = "keep_full_weight"


def make_places(parallel: str, hollow: PreTrainedModel, size: int) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` by which ``size`` processes share the model.

    ``hollow`` is the model without its weights.
    """
    # Only such teachers need it, and older versions of transformers do not have it.
    from transformers.distributed.configuration_utils import DistributedConfig

    if parallel == "tensor":
        return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}
    return {"distributed_config": DistributedConfig(fsdp_size=size, fsdp_plan=_plan_layers(hollow))}


def _plan_layers(hollow: PreTrainedModel) -> dict[str, str]:
    """Name the modules that FSDP2 shards, and what happens to their gathered weights.

    Layers are freed. What else the trunk has, such as an embedding that is the LM head too, stays
    gathered after the first pass. The LM head and the last norm are no group, as they are by
    default: the trunk runs without the head.
    """
    names = {module: name for name, module in hollow.named_modules()}
    layer = names[find_decoder_layers(hollow)[0]]
    head = names[hollow.get_output_embeddings()]
    plan = {name: _FREE for name in hollow.fsdp_plan if name in names.values()}
    plan |= {f"{layer.rpartition('.')[0]}.*": _FREE, find_trunk(hollow)[0]: _KEEP}
    tied = hollow.get_output_embeddings().weight is hollow.get_input_embeddings().weight
    return plan | {head: _KEEP if tied else _FREE}


@torch.no_grad()
def settle_part(model: PreTrainedModel, device: torch.device, leads: bool) -> None:
    """Make ``model``, this process's part, ready to run; all processes call it together.

    The process that leads gets the whole LM head on ``device``.
    """
    head = model.get_output_embeddings()
    weight_VD = _gather(head.weight)
    bias_V = None if head.bias is None else _gather(head.bias)
    # FSDP2 takes the module that runs first for the whole model. That must be the model, although
    # later passes begin at its body.
    model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
    if leads:
        put_head_whole(model, weight_VD, bias_V, device)
    mark_shared_modules(find_trunk(model)[1])


def _gather(parameter: Tensor) -> Tensor:
    """Return the whole of a parameter; all processes call it together."""
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach()


# ---------------------------------------------------------------------- what cannot be shared


def require_shareable(parallel: str, hollow: PreTrainedModel, size: int) -> None:
    """Raise ``ConfigError`` if ``size`` processes cannot share the model as the job asks."""
    if problem := _find_problem(parallel, hollow, size):
        raise ConfigError.of_field("/teacher/parallel", *problem)


def _find_problem(parallel: str, hollow: PreTrainedModel, size: int) -> tuple[str, str] | None:
    name = type(hollow).__name__
    if not _has_engine():
        what = f"{parallel} needs a transformers that shards models as it reads them."
        return what, "Install the version in constraints.txt; or set it to device_map."
    if not find_decoder_layers(hollow):
        return (f"{name} has no list of layers to share.", "Set it to device_map.")
    if parallel == "fsdp":
        return None
    if (share := _compute_cut_share(hollow)) < LEAST_SHARE:
        detail = f"the tp_plan that transformers has for {name} cuts {share:.0%} of its layers."
        return detail, "Set it to fsdp or device_map."
    return _find_uneven_heads(hollow, size)


def _compute_cut_share(hollow: PreTrainedModel) -> float:
    """Compute the share of the layers' weights that the model's ``tp_plan`` names."""
    names = {module: name for name, module in hollow.named_modules()}
    sizes = {
        f"{names[layer]}.{name}": parameter.numel()
        for layer in find_decoder_layers(hollow)
        for name, parameter in layer.named_parameters()
    }
    # A rule names a module or a parameter, with a star in the place of each number.
    rules = {name: re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in sizes}
    cut = (
        sizes[name]
        for name, rule in rules.items()
        if rule in hollow.tp_plan or rule.rpartition(".")[0] in hollow.tp_plan
    )
    return sum(cut) / sum(sizes.values())


def _has_engine() -> bool:
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError:
        return False
    return "fsdp_size" in DistributedConfig.__dataclass_fields__


def _find_uneven_heads(hollow: PreTrainedModel, size: int) -> tuple[str, str] | None:
    """Find heads of an attention that ``size`` processes cannot share equally."""
    shape = hollow.config.get_text_config()
    cut = {name.rpartition(".")[2] for name, style in hollow.tp_plan.items() if style == "colwise"}
    if not cut.intersection(_HEAD_LAYERS):
        return None
    for field in ("num_attention_heads", "num_key_value_heads"):
        uneven = [heads for heads in read_layer_sizes(shape, field) if heads % size]
        for heads in uneven:
            detail = f"tensor cuts the heads into {size} equal parts, but {field} is {heads}."
            return detail, f"Set resources.gpus to a divisor of {heads}, or parallel to fsdp."
    return None
