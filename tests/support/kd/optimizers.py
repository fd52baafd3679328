"""The size of a real optimiser's state, to compare estimates with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kd.config.train import TrainConfig
from kd.optim.optimizers import make_optimizer


def measure_optimizer_bytes(student: PreTrainedModel, options: TrainConfig) -> int:
    """Return the bytes of the optimiser's state after one step, without the step counters."""
    optimizer = make_optimizer(student, [], options, torch.device("cpu"))
    student(input_ids=torch.arange(8)[None], use_cache=False).logits.square().mean().backward()
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [part for each in values if torch.is_tensor(each) for part in list_plain(each)]
    return sum(each.numel() * each.element_size() for each in tensors if each.numel() > 1)


def list_plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the numbers of ``tensor``: itself, if it is no subclass."""
    parts = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    yield from (getattr(tensor, name) for name in parts)
    if not parts:
        yield tensor
