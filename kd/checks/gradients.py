"""Whether every trained parameter learns: its gradient must exist, be finite, and not be 0."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kd.checks.verdict import Verdict
from kd.levers.optimizers import layer_groups

#: Names that a message lists; the facts hold all of them.
SHOWN = 5


def gradients(student: nn.Module, scaled: bool = False) -> Verdict:
    """Look at the gradients after a backward pass; ``facts`` names the missing, zero and non-finite ones.

    With ``scaled``, gradients that are not finite are the loss scaler's business, which skips the step.
    """
    trained = {name: parameter for name, parameter in student.named_parameters() if parameter.requires_grad}
    missing = [name for name, parameter in trained.items() if parameter.grad is None]
    present = {name: parameter.grad for name, parameter in trained.items() if parameter.grad is not None}
    largest = dict(zip(present, _largest(present.values()), strict=True))
    zero = [name for name, size in largest.items() if size == 0.0 and not _waits(name, trained)]
    wild = [] if scaled else [name for name, size in largest.items() if not math.isfinite(size)]
    facts = {"parameters": len(trained), "missing": missing, "zero": zero, "not_finite": wild}
    kinds = (("no gradient reaches", missing), ("the gradient is 0 in", zero), ("the gradient is not finite in", wild))
    wrong = [f"{what} {_named(names)}" for what, names in kinds if names]
    if not wrong:
        return Verdict("gradients", True, f"All {len(trained)} trained parameters have a gradient.", facts=facts)
    message = f"After the first backward pass {'; '.join(wrong)}."
    return Verdict(
        "gradients", False, message, "What the loss does not reach is not trained: freeze it, or use it.", facts
    )


def layer_norms(student: PreTrainedModel) -> dict[str, float]:
    """The norm of the gradient in each group of layers; 0 where there is none. Call it before clipping."""
    groups = layer_groups(student)
    norms = torch.stack([_norm(parameters) for _, parameters in groups]).tolist() if groups else []
    return {name: norm for (name, _), norm in zip(groups, norms, strict=True)}


def _largest(tensors: Iterable[Tensor]) -> list[float]:
    """The largest magnitude of each, NaN where it holds one; the device is asked once."""
    sizes = [torch.linalg.vector_norm(tensor.detach().float(), math.inf) for tensor in tensors]
    return torch.stack(sizes).tolist() if sizes else []


def _norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    parameters = list(parameters)
    norms = [torch.linalg.vector_norm(each.grad.float()) for each in parameters if each.grad is not None]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else parameters[0].new_zeros(()).float()


def _waits(name: str, trained: dict[str, nn.Parameter]) -> bool:
    """Whether a gradient of 0 is right: an adapter's A learns nothing before its B, which begins at 0, has moved."""
    partner = trained.get(name.replace("lora_A", "lora_B"))
    return "lora_A" in name and partner is not None and not bool(partner.detach().any())


def _named(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
