"""Where a NaN or an infinity comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kd.batches import Batch
from kd.models import hidden_states
from kd.precision import Precision


@torch.no_grad()
def locate_nonfinite(student: PreTrainedModel, batches: Iterable[Batch], precision: Precision | None = None) -> str:
    """A sentence that names the first module whose output on one of the ``batches`` is not finite.

    Where all are finite: the first weight that is not, else the first gradient that is not. Runs the student in
    evaluation mode; its mode, weights, gradients and the random state stay as they are. Batches are on its device.
    """
    training = student.training
    student.eval()
    try:
        module = next(filter(None, (_first_module(student, batch, precision) for batch in batches)), None)
    finally:
        student.train(training)
    return module or _first_tensor(student) or "All modules, weights and gradients are finite: the loss itself is not."


def _first_module(student: PreTrainedModel, batch: Batch, precision: Precision | None) -> str | None:
    found: list[str] = []
    with _watching(student, found), torch.compiler.set_stance("force_eager"):
        if precision is None:
            hidden_states(student, batch.tokens_BT, batch.positions_BT)
        else:
            with precision.autocast():
                hidden_states(student, batch.tokens_BT, batch.positions_BT)
    return found[0] if found else None


@contextmanager
def _watching(student: nn.Module, found: list[str]) -> Iterator[None]:
    """Hooks on every module; an inner one ends, and speaks, before the one that holds it."""

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and not all(map(_finite, _tensors(output))):
            found.append(_sentence(name, module, all(map(_finite, _tensors(inputs)))))

    handles = [
        module.register_forward_hook(lambda module, inputs, output, name=name: look(name, module, inputs, output))
        for name, module in student.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sentence(name: str, module: nn.Module, sound_inputs: bool) -> str:
    weights = [key for key, tensor in module.named_parameters(recurse=False) if not _finite(tensor)]
    where = f"{name or 'the model'} ({type(module).__name__})"
    if weights:
        return f"The first output that is not finite is that of {where}: its {weights[0]} is not finite."
    given = "its inputs and its own weights are finite" if sound_inputs else "one of its inputs is not"
    return f"The first output that is not finite is that of {where}; {given}."


def _first_tensor(student: nn.Module) -> str | None:
    for name, parameter in student.named_parameters():
        if not _finite(parameter):
            return f"The weight {name} is not finite."
    for name, parameter in student.named_parameters():
        if parameter.grad is not None and not _finite(parameter.grad):
            return f"All modules and weights are finite; the first gradient that is not is that of {name}."
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what a module takes or gives."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
