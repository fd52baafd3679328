"""Find where a NaN or an infinity comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kd.checks.backward_pass import is_finite, locate_in_backward
from kd.models.layers import compute_hidden_states, evaluating, removing
from kd.models.precision import Precision
from kd.text.batches import Batch


@torch.no_grad()
def locate_nonfinite(
    student: PreTrainedModel,
    batches: Sequence[Batch],
    precision: Precision | None = None,
    compute_loss: Callable[[Batch], Tensor] | None = None,
) -> str:
    """Name the first module whose output is not finite on one of ``batches``, in a sentence.

    Where all outputs are finite, it names the first weight that is not. Where these are finite too,
    it runs ``compute_loss`` of each batch backward, and names the operation that makes the first
    gradient that is not finite, or says that it is not known. The forward passes are in evaluation
    mode, the backward passes in the student's own mode; its mode, weights and gradients and the
    random state are kept. Batches are on its device.
    """
    with evaluating(student):  # dropout would draw from the random state
        modules = (_find_nonfinite_module(student, batch, precision) for batch in batches)
        module = next(filter(None, modules), None)
    if module is not None:
        return module
    for name, parameter in student.named_parameters():
        if not is_finite(parameter):
            return f"The weight {name} is not finite."
    if compute_loss is not None:
        devices = [student.device] if student.device.type == "cuda" else []
        with torch.enable_grad(), torch.random.fork_rng(devices):
            for batch in batches:
                found = locate_in_backward(student, partial(compute_loss, batch))
                if found is not None:
                    return found
    return (
        "All modules and weights are finite. Which operation made the number that is not finite is "
        "not known."
    )


def _find_nonfinite_module(
    student: PreTrainedModel, batch: Batch, precision: Precision | None
) -> str | None:
    found: list[str] = []

    # An inner module ends before the module that contains it, so the innermost is reported.
    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and not all(map(is_finite, _iterate_tensors(output))):
            sound_inputs = all(map(is_finite, _iterate_tensors(inputs)))
            found.append(_describe_module(name, module, sound_inputs))

    handles = [
        module.register_forward_hook(partial(look, name))
        for name, module in student.named_modules()
    ]
    autocast = nullcontext() if precision is None else precision.autocast()
    # Compiled code runs no hooks, hence the eager stance.
    with removing(handles), torch.compiler.set_stance("force_eager"), autocast:
        compute_hidden_states(student, batch.tokens_BL, batch.packed)
    return found[0] if found else None


def _describe_module(name: str, module: nn.Module, sound_inputs: bool) -> str:
    own = module.named_parameters(recurse=False)
    weights = [key for key, tensor in own if not is_finite(tensor)]
    where = f"{name or 'the model'} ({type(module).__name__})"
    if weights:
        return (
            f"The first output that is not finite is that of {where}: "
            f"its {weights[0]} is not finite."
        )
    sound = "its inputs and its own weights are finite"
    cause = sound if sound_inputs else "one of its inputs is not"
    return f"The first output that is not finite is that of {where}; {cause}."


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors among a module's inputs or outputs."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    items = list(value.values()) if isinstance(value, dict) else value
    for item in items if isinstance(items, list | tuple) else ():
        yield from _iterate_tensors(item)
