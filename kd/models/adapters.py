"""LoRA adapters: small trained corrections of frozen linear layers, W x + (alpha / rank) B A x.

The method is by Hu et al. 2021 (arXiv 2106.09685), the implementation by peft. The student keeps
its class: layers of peft replace its own, so the LM head, the hidden states and the checkpoints
stay where other code expects them. The base and its LM head are frozen; A and B are float32.

The experts of a layer are no linear layers but two tensors (experts, out, in), such as
``mlp.experts.down_proj``. Each expert gets an A and a B of its own. Routers stay frozen.

State-space mixers (Mamba, and hybrids such as Jamba and Falcon-H1) call only their ``in_proj``.
Their kernels read the weights of the other layers, so an adapter there would have no effect.

Importing peft takes a second, so only the functions that need it import it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kd.config.student import LoraConfig
from kd.errors import ModelError

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

#: The name under which peft keeps the adapters of a student.
_NAME = "default"
#: The path of the wrapped model inside a PeftModel; peft's files prefix every name with it.
_PREFIX = "base_model.model."
#: Names of linear layers that peft takes only for the experts, in a mixture of experts. It would
#: leave out the layers of these names in dense MLPs and shared experts.
_TAKEN = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
#: Linear layers of state-space mixers whose weights are read without a call of the layer: by
#: ``mamba_inner_fn`` and ``mamba_split_conv1d_scan_combined``, and dt_proj everywhere.
_READ_BY_MIXERS = ("x_proj", "dt_proj", "out_proj")


def add_adapters(student: PreTrainedModel, config: LoraConfig) -> PreTrainedModel:
    """Add adapters to ``student``, in place, and freeze all its other parameters.

    A is drawn from torch's current random state. B is zero, so the student's logits do not change.
    Raises ``ModelError`` if a target names no linear layer, or if peft would adapt other layers
    than the targets.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    name = type(student).__name__
    layers = find_linear_layers(student)
    experts = find_expert_weights(student)
    _require_called(student, config.targets)
    targets = _choose_targets(name, [*layers, *experts], config.targets)
    wanted = {path for path in [*layers, *experts] if _is_last_of(path, targets)}
    _require_no_dropout(config, wanted & experts, wanted - experts)
    # GPT-2 and models like it store their matrices transposed.
    transposed = any(isinstance(layer, Conv1D) for layer in layers.values())
    plan = PeftConfig(
        r=config.rank,
        # peft annotates alpha as an int, but only divides it by the rank.
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=targets,
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM",
    )
    if experts:
        _aim_at_weights(plan, wanted - experts, wanted & experts)
    try:
        inject_adapter_in_model(plan, student, _NAME)
    except (ValueError, NotImplementedError) as error:
        detail = f"{name} cannot have adapters at {', '.join(targets)}: {error}"
        raise ModelError(detail, "Set student.lora.targets, or train it all.") from error
    # peft does not report layers that it skipped.
    _require_placed(student, wanted)
    # 16 bits would be too coarse for the small steps of an optimiser, whatever dtype the base has.
    for parameter in list_trained_parameters(student):
        parameter.data = parameter.data.float()
    # New layers of peft start in training mode; in a student in evaluation mode they would drop
    # out.
    student.train(student.training)
    return student


def merge_adapters(student: PreTrainedModel) -> PreTrainedModel:
    """Add B A to the weights and remove the adapters, in place.

    The result is a plain model with the same logits, and all its parameters are trainable. Merge
    before rounding the weights to a smaller type: then the sum is rounded once, not its parts too.
    """
    return remove_adapters(student, merge=True)


def remove_adapters(student: PreTrainedModel, merge: bool = False) -> PreTrainedModel:
    """Remove the adapters, in place; ``merge`` adds them to the weights of the base first."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    # Two adapters of the same experts are nested. The inner one comes later, and goes first.
    for name, layer in reversed(list(student.named_modules())):
        if isinstance(layer, BaseTunerLayer):
            if merge:
                layer.merge()
            parent, _, own = name.rpartition(".")
            setattr(student.get_submodule(parent), own, layer.get_base_layer())
    if has_adapters(student):
        del student.peft_config
    return student.requires_grad_(True)


def save_adapters(
    student: PreTrainedModel, folder: Path, base: str | None, revision: str | None = None
) -> None:
    """Write the adapters into ``folder`` in the format of peft.

    ``base`` and ``revision`` name the model that they belong to. ``PeftModel.from_pretrained`` of
    peft loads them.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    written = {name: tensor.contiguous() for name, tensor in _list_adapter_tensors(student).items()}
    save_file(written, folder / "adapter_model.safetensors", {"format": "pt"})
    config: PeftConfig = copy.copy(student.peft_config[_NAME])  # type: ignore[index,assignment]
    config.base_model_name_or_path = base
    config.revision = revision
    config.inference_mode = True
    config.save_pretrained(str(folder))


def load_adapters(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Merge the adapters in ``folder`` into ``base``, in place, and return it.

    Raises ``ModelError`` if they were made for another model.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model
    from safetensors.torch import load_file

    inject_adapter_in_model(PeftConfig.from_pretrained(str(folder)), base, _NAME)
    tensors = load_file(folder / "adapter_model.safetensors")
    mine = _list_adapter_tensors(base)
    if mine.keys() != tensors.keys():
        strange = ", ".join(sorted(mine.keys() ^ tensors.keys())[:3])
        raise ModelError(
            f"the adapters in {folder} are not for {type(base).__name__}: they differ in "
            f"{strange}.",
            "Load the base model that its adapter_config.json names.",
        )
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
    return merge_adapters(base)


# ---------------------------------------------------------------------- layers and parameters


def has_adapters(student: nn.Module) -> bool:
    """Whether ``student`` has adapters."""
    return _NAME in (getattr(student, "peft_config", None) or {})


def list_trained_parameters(student: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that an optimiser updates: those of the adapters, if there are any."""
    return [parameter for parameter in student.parameters() if parameter.requires_grad]


def find_linear_layers(student: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the layers that may have an adapter, by path: every linear layer except the LM head.

    The loss reads the weight of the LM head itself, and state-space mixers read some of theirs:
    neither would see an adapter. Routers that are linear layers return several tensors, so an
    adapter cannot be added to what they return.
    """
    lm_head = student.get_output_embeddings()
    read = _find_read_layers(student)
    return {
        name: module
        for name, module in student.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not lm_head
        and name not in read
        and "Router" not in type(module).__name__
    }


def _find_read_layers(student: PreTrainedModel) -> set[str]:
    """Return the paths of the linear layers whose weights a state-space mixer reads itself."""
    # Only these mixers have both the logarithm of A and D; those of gated delta rules have no D.
    mixers = (
        (path, module)
        for path, module in student.named_modules()
        if hasattr(module, "A_log") and hasattr(module, "D")
    )
    return {
        f"{path}.{name}"
        for path, mixer in mixers
        for name in _READ_BY_MIXERS
        if isinstance(getattr(mixer, name, None), nn.Linear)
    }


def _require_called(student: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Raise ``ModelError`` if one of ``targets`` names layers that a mixer never calls."""
    read = _find_read_layers(student)
    wrong = [each for each in targets if any(_is_last_of(path, [each]) for path in read)]
    if wrong:
        names = sorted(set(map(_name_target, find_linear_layers(student))))
        raise ModelError(
            f"student.lora.targets: adapters at {', '.join(wrong)} of {type(student).__name__} "
            "would have no effect, because its state-space mixers read these weights themselves.",
            f"Leave the field out, or choose from {', '.join(names)}.",
        )


def find_expert_weights(student: PreTrainedModel) -> set[str]:
    """Return the paths of the weights of experts: tensors (experts, out, in) of one layer."""
    config = student.config
    counts = {
        count
        for name in ("num_local_experts", "num_experts", "n_routed_experts")
        if isinstance(count := getattr(config, name, None), int) and count > 1
    }
    return {
        name
        for name, parameter in student.named_parameters()
        if parameter.ndim == 3 and parameter.shape[0] in counts
    }


def _choose_targets(name: str, paths: list[str], targets: tuple[str, ...]) -> list[str]:
    """Return the names of the weights to adapt: ``targets``, or by default all of ``paths``.

    Raises ``ModelError`` if one of ``targets`` matches none.
    """
    known = sorted(set(map(_name_target, paths)))
    missing = [each for each in targets if not any(_is_last_of(path, [each]) for path in paths)]
    if missing or not known:
        raise ModelError(
            f"student.lora.targets: {name} has no linear layer named "
            f"{', '.join(missing) or 'anything'}.",
            f"It has {', '.join(known) or 'none'}; the LM head and the embeddings get no adapter.",
        )
    return sorted(targets) or known


def _name_target(path: str) -> str:
    """Return the name by which ``student.lora.targets`` can ask for a layer: the last of its path.

    One that is only numbered in a list has the list's name before it: layers of the model have the
    same numbers.
    """
    parts = path.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]


def _is_last_of(path: str, targets: list[str]) -> bool:
    """Whether ``path`` ends in one of ``targets``, counted in whole parts between dots."""
    return any(f".{path}".endswith(f".{target}") for target in targets)


def _require_no_dropout(config: LoraConfig, experts: set[str], layers: set[str]) -> None:
    """Raise ``ModelError`` if adapters of experts would need dropout.

    Each A B is added to the weights of its expert before they meet an input.
    """
    if config.dropout and experts:
        names = sorted({*map(_name_target, layers)} - {*_TAKEN})
        raise ModelError(
            f"student.lora.dropout is {config.dropout}, but adapters of experts "
            f"({min(experts)}) can have none.",
            f"Set it to 0, or leave the experts out: set student.lora.targets to "
            f"[{', '.join(names)}].",
        )


def _aim_at_weights(plan: PeftConfig, layers: set[str], experts: set[str]) -> None:
    """Let ``plan`` adapt exactly the linear ``layers`` and the ``experts`` at these paths."""
    # The weight of a linear layer can be adapted without its name being read.
    weights = {path for path in layers if path.rpartition(".")[2] in _TAKEN}
    plan.target_modules = sorted(layers - weights)
    plan.target_parameters = sorted([*experts, *(f"{path}.weight" for path in weights)])


def _require_placed(student: PreTrainedModel, wanted: set[str]) -> None:
    """Raise ``ModelError`` unless peft adapted exactly the weights at the paths ``wanted``."""
    from peft.tuners.lora import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    # The paths of all layers and weights of experts that peft adapted.
    placed = set()
    for path, module in student.named_modules():
        own = path.replace(".base_layer", "")
        if isinstance(module, ParamWrapper) and not isinstance(module.get_base_layer(), nn.Linear):
            placed.add(f"{own}.{module.parameter_name}")
        elif isinstance(module, BaseTunerLayer):
            placed.add(own)
    without = sorted(wanted - placed)
    unasked = sorted(placed - wanted)
    if not (without or unasked):
        return
    found = [f"{path} would get none" for path in without[:1]]
    found += [f"{path} would get one" for path in unasked[:1]]
    names = {*map(_name_target, wanted & placed)} - {*map(_name_target, without)}
    possible = f" to [{', '.join(sorted(names))}]" if names else ""
    raise ModelError(
        f"{type(student).__name__} cannot have adapters at exactly the chosen layers: "
        f"{', and '.join(found)}.",
        f"Set student.lora.targets{possible}, or train it all.",
    )


def _list_adapter_tensors(student: PreTrainedModel) -> dict[str, Tensor]:
    """Return every A and B by its name in peft's files, which leave out ``_NAME``."""
    return {
        _PREFIX + name.replace(f".{_NAME}.", "."): parameter.detach()
        for name, parameter in student.named_parameters()
        if ".lora_" in name
    }
