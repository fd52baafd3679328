"""LoRA: small trained corrections of frozen linear layers, W x + (alpha / rank) B A x (Hu et al. 2021, through peft).

The student stays the model that it is: peft's layers take the place of its own, so the head, the hidden states and the
checkpoints are found where they always are. The base and its head are frozen; A and B are float32.

Importing peft takes a second: functions that need it import it.
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

_NAME = "default"
_PREFIX = "base_model.model."  # where a PeftModel holds the model that it wraps


def add_adapters(student: PreTrainedModel, config: LoraConfig) -> PreTrainedModel:
    """Give ``student`` adapters, in place, from torch's current random state; nothing else of it is trained any more.

    B is zero, so that the student's logits do not change. Raises ``ModelError`` where a target names no linear layer,
    or peft gives adapters to other layers than those.
    """
    from peft import inject_adapter_in_model

    name, layers = type(student).__name__, linear_layers(student)
    wanted = _targets(name, layers, config.targets)
    try:
        inject_adapter_in_model(_peft_config(student, config, wanted), student, _NAME)
    except (ValueError, NotImplementedError) as error:
        raise ModelError(
            f"{name} cannot have adapters at {', '.join(wanted)}: {error}", "Set student.lora.targets, or train it all."
        ) from error
    _require_placed(student, {path for path in layers if _last_of(path, wanted)})
    for parameter in trained(student):
        parameter.data = parameter.data.float()
    student.train(student.training)  # peft's own layers begin in training mode, and would drop out
    return student


def merge_adapters(student: PreTrainedModel) -> PreTrainedModel:
    """Add B A to the weights, in place, and take the adapters out: a plain model of the same logits, all of it trained.

    Merge before the weights are rounded to a smaller type: the sum is rounded once, the parts would be twice.
    """
    return _take_out(student, merge=True)


def remove_adapters(student: PreTrainedModel) -> PreTrainedModel:
    """Take the adapters out, in place, and leave the base as it was before them."""
    return _take_out(student, merge=False)


def _take_out(student: PreTrainedModel, merge: bool) -> PreTrainedModel:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(student.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            if merge:
                layer.merge()
            parent, _, own = name.rpartition(".")
            setattr(student.get_submodule(parent), own, layer.get_base_layer())
    if has_adapters(student):
        del student.peft_config
    return student.requires_grad_(True)


def save_adapters(student: PreTrainedModel, folder: Path, base: str | None, revision: str | None = None) -> None:
    """Write the adapters into ``folder`` as peft does; its ``PeftModel.from_pretrained`` puts them on their base."""
    from safetensors.torch import save_file

    tensors = _adapter_tensors(student).items()
    folder.mkdir(parents=True, exist_ok=True)
    written = {_PREFIX + name.replace(f".{_NAME}.", "."): tensor.contiguous() for name, tensor in tensors}
    save_file(written, folder / "adapter_model.safetensors", {"format": "pt"})
    config = copy.copy(_config_of(student))
    config.base_model_name_or_path, config.revision, config.inference_mode = base, revision, True
    config.save_pretrained(str(folder))


def load_adapters(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """``base`` with the adapters in ``folder`` merged into it, in place."""
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model
    from safetensors.torch import load_file

    config = PeftConfig.from_pretrained(str(folder))
    inject_adapter_in_model(config, base, _NAME)
    tensors = load_file(folder / "adapter_model.safetensors")
    mine = {_PREFIX + name.replace(f".{_NAME}.", "."): tensor for name, tensor in _adapter_tensors(base).items()}
    if mine.keys() != tensors.keys():
        strange = ", ".join(sorted(mine.keys() ^ tensors.keys())[:3])
        raise ModelError(f"the adapters in {folder} are not for {type(base).__name__}: they differ in {strange}.")
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
    return merge_adapters(base)


# ---------------------------------------------------------------------- what there is


def has_adapters(student: nn.Module) -> bool:
    """Whether ``student`` has adapters."""
    return _NAME in (getattr(student, "peft_config", None) or {})


def trained(student: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimiser moves: with adapters, theirs."""
    return [parameter for parameter in student.parameters() if parameter.requires_grad]


def linear_layers(student: PreTrainedModel) -> dict[str, nn.Module]:
    """By path, the layers that may have an adapter: all linear ones but the LM head, whose weight the loss reads."""
    head = student.get_output_embeddings()
    return {
        name: module
        for name, module in student.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def _targets(name: str, layers: dict[str, nn.Module], targets: tuple[str, ...]) -> list[str]:
    """The names to adapt, the last parts of paths by default; refused where one of ``targets`` matches none of them."""
    known = sorted({path.rpartition(".")[2] for path in layers})
    missing = [target for target in targets if not any(_last_of(path, [target]) for path in layers)]
    if missing or not known:
        raise ModelError(
            f"student.lora.targets: {name} has no linear layer named {', '.join(missing) or 'anything'}.",
            f"It has {', '.join(known) or 'none'}; the LM head and the embeddings stay as they are.",
        )
    return sorted(targets) or known


def _last_of(path: str, targets: list[str]) -> bool:
    """Whether one of ``targets`` is the last part, or the last parts, of ``path``."""
    return any(f".{path}".endswith(f".{target}") for target in targets)


def _require_placed(student: PreTrainedModel, wanted: set[str]) -> None:
    """Refuse adapters of other layers than those at the paths ``wanted``.

    In a mixture of experts peft takes the names of an MLP's linear layers for the experts' weights, which are in no
    linear layer: they get adapters then, and the layers of these names, in dense MLPs and shared experts, get none.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    placed = {path for path, module in student.named_modules() if isinstance(module, BaseTunerLayer)}
    without, unasked = sorted(wanted - placed), sorted(placed - wanted)
    if not (without or unasked):
        return
    found = [f"{without[0]} would get none"] * bool(without) + [f"{unasked[0]} would get one"] * bool(unasked)
    names = {path.rpartition(".")[2] for path in wanted & placed} - {path.rpartition(".")[2] for path in without}
    possible = f" to [{', '.join(sorted(names))}]" if names else ""
    raise ModelError(
        f"{type(student).__name__} cannot have adapters at the layers that were to get one: {', and '.join(found)}.",
        f"Set student.lora.targets{possible}, or train it all.",
    )


def _peft_config(student: PreTrainedModel, config: LoraConfig, targets: list[str]) -> PeftConfig:
    from peft import LoraConfig as PeftConfig

    # GPT-2 and its like keep their matrices transposed.
    transposed = any(isinstance(layer, Conv1D) for layer in linear_layers(student).values())
    return PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # annotated as int, but only ever divided by the rank
        lora_dropout=config.dropout,
        target_modules=targets,
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM",
    )


def _adapter_tensors(student: PreTrainedModel) -> dict[str, Tensor]:
    """Every A and B by name; in what peft writes, names are without the adapter's own."""
    return {name: parameter.detach() for name, parameter in student.named_parameters() if ".lora_" in name}


def _config_of(student: PreTrainedModel) -> PeftConfig:
    config: PeftConfig = student.peft_config[_NAME]  # type: ignore[index,assignment]
    return config
