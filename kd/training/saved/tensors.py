"""The state of a training as named tensors and plain numbers, as they are written."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kd.optim.whole_steps import ParameterGroup
from kd.parallel.group import Group
from kd.training.saved.state import TrainState, name_parameters

#: Keys of an optimiser's group that choose its kernels: a run may be resumed on a machine with
#: other kernels.
_IMPLEMENTATION_KEYS = {"params", "fused", "foreach", "capturable"}


def collect_model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter once, tied ones under their first name, and persistent buffers."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    transient = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    kept = {name: each for name, each in model.named_buffers() if name not in transient}
    return tensors | kept


def collect_optimizer_state(state: TrainState) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The tensors and the plain numbers that the optimiser keeps, each as {parameter}.{key}."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    names = name_parameters(state)
    for parameter, values in state.optimizer.state.items():
        for key, value in values.items():
            name = f"{names[parameter]}.{key}"
            if not isinstance(value, Tensor):
                numbers[name] = value
            elif isinstance(value, DTensor) or not hasattr(value, "__tensor_flatten__"):
                tensors[name] = value.detach()
            else:  # a state of 8 bits has several plain tensors
                parts, _ = value.__tensor_flatten__()
                tensors |= {f"{name}/{part}": getattr(value, part) for part in parts}
    return tensors, numbers


def select_group_numbers(group: ParameterGroup) -> ParameterGroup:
    """The fields of an optimiser's group that a checkpoint holds."""
    return {key: value for key, value in group.items() if key not in _IMPLEMENTATION_KEYS}


def collect_extra_tensors(extras: dict[str, nn.Module]) -> dict[str, Tensor]:
    """The tensors of all extras, each as {extra}/{key}."""
    return {
        f"{extra}/{key}": value.detach()
        for extra, module in extras.items()
        for key, value in module.state_dict().items()
    }


def collect_random_tensors(group: Group) -> dict[str, Tensor]:
    """The states of the generators of every rank."""
    own = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    states = group.gather({name: state.tolist() for name, state in own.items()})
    return {
        name_random_state(name, rank): torch.tensor(values, dtype=torch.uint8)
        for rank, each in enumerate(states)
        for name, values in each.items()
    }


def name_random_state(generator: str, rank: int) -> str:
    """The name of the state of a rank's ``generator``: cpu or cuda."""
    return f"{generator}/{rank}" if rank else generator
