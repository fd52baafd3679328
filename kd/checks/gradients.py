"""Check that every trained parameter learns: its gradient must exist, be finite, and not be 0.

Of the embedding, each row whose token occurs is checked: a row that never learns would be hidden by
all the others.

Shapes: N positions that have a target, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kd.checks.verdict import Verdict, format_names
from kd.parallel.group import ALONE, Group
from kd.parallel.sharded_files import make_whole


def check_gradients(
    student: PreTrainedModel,
    scaled: bool = False,
    group: Group = ALONE,
    tokens_N: Tensor | None = None,
) -> Verdict:
    """Check the gradients after a backward pass, which had its targets at ``tokens_N``.

    ``facts`` names the missing, zero and non-finite ones. ``scaled`` means that a loss scaler is at
    work: it skips a step whose gradients are not finite, so they are no fault here. Where ``group``
    are stages, all of them are checked together.
    """
    found = _find_faults(student, scaled)
    if tokens_N is not None:
        found["zero"] += _find_silent_rows(student, tokens_N)
    if group.staged:
        stages = group.gather(found)
        # A tied weight is on two of them.
        found = {key: sorted({name for each in stages for name in each[key]}) for key in found}
    trained = found.pop("trained")
    facts = {"parameters": len(trained), **found}
    kinds = (
        ("no gradient reaches", found["missing"]),
        ("the gradient is 0 in", found["zero"]),
        ("the gradient is not finite in", found["not_finite"]),
    )
    wrong = [f"{what} {format_names(names)}" for what, names in kinds if names]
    if not wrong:
        message = f"All {len(trained)} trained parameters have a gradient."
        return Verdict("gradients", True, message, facts=facts)
    message = f"After the first backward pass {'; '.join(wrong)}."
    remedy = "A parameter that the loss does not reach is not trained: freeze it, or use it."
    return Verdict("gradients", False, message, remedy, facts)


def _find_faults(student: nn.Module, scaled: bool) -> dict[str, list[str]]:
    """The names of the trained parameters, and of those whose gradient has each kind of fault."""
    trained = {name: each for name, each in student.named_parameters() if each.requires_grad}
    missing = [name for name, each in trained.items() if each.grad is None]
    present = {name: each.grad for name, each in trained.items() if each.grad is not None}
    # A NaN makes the largest magnitude NaN, so this one number shows zeros and faults alike.
    sizes = [
        make_whole(torch.linalg.vector_norm(gradient.detach().float(), math.inf))
        for gradient in present.values()
    ]
    # One transfer for all of them: each transfer waits for the device.
    largest = dict(zip(present, torch.stack(sizes).tolist() if sizes else [], strict=True))
    silent = [name for name, size in largest.items() if size == 0.0]
    zero = [name for name in silent if not _is_unmoved_adapter(name, trained)]
    wild = [] if scaled else [name for name, size in largest.items() if not math.isfinite(size)]
    return {"trained": list(trained), "missing": missing, "zero": zero, "not_finite": wild}


def _find_silent_rows(student: PreTrainedModel, tokens_N: Tensor) -> list[str]:
    """The rows of the input embedding that get no gradient though their tokens occur, as a name.

    Every token that has a target changes what is predicted there.
    """
    weight: nn.Parameter = student.get_input_embeddings().weight  # type: ignore[assignment]
    name = next((name for name, each in student.named_parameters() if each is weight), None)
    # A stage of a pipeline may have no embedding.
    if name is None or weight.grad is None:
        return []
    size_V = make_whole(torch.linalg.vector_norm(weight.grad.float(), math.inf, dim=1)).cpu()
    silent = [token for token in tokens_N.unique().tolist() if size_V[token] == 0.0]
    # Where nothing has a gradient, the whole parameter is named.
    shown = format_names([str(token) for token in silent])
    return [f"{name} (the rows of tokens {shown})"] if silent and size_V.any() else []


def compute_gradient_norms(
    groups: Iterable[tuple[str, Sequence[nn.Parameter]]],
) -> dict[str, float]:
    """The norm of the gradient in each of ``groups``, 0 where there is none.

    A parameter may be in several of them. Call it before clipping.
    """
    groups = list(groups)
    trained = dict.fromkeys(each for _, group in groups for each in group)
    present = [each for each in trained if each.grad is not None]
    norms = [make_whole(torch.linalg.vector_norm(each.grad.float())) for each in present]  # type: ignore[union-attr]
    # One transfer for all of them: each transfer waits for the device.
    found = dict(zip(present, torch.stack(norms).tolist() if norms else [], strict=True))
    return {
        name: math.hypot(*(found.get(each, 0.0) for each in parameters))
        for name, parameters in groups
    }


def _is_unmoved_adapter(name: str, trained: dict[str, nn.Parameter]) -> bool:
    """Whether a gradient of 0 is right here.

    An adapter's B begins at 0, and its A learns nothing before B has moved.
    """
    partner = trained.get(name.replace("lora_A", "lora_B"))
    return "lora_A" in name and partner is not None and not make_whole(partner.detach()).any()
