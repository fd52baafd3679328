"""Find the operation whose backward pass makes the first gradient that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node

from kd.models.layers import removing


@dataclass
class _Birth:
    """The first operation that got finite gradients and returned others, or the first fault."""

    operation: str = ""
    number: int = -1
    #: Whether a gradient was found that is not finite.
    seen: bool = False


@dataclass
class _Spans:
    """The modules of a forward pass, and the numbers of the operations between start and end.

    Autograd numbers the operations of a thread in the order in which they run.
    """

    ended: list[tuple[str, int, int]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)

    def begin(self, *_: Any) -> None:
        """Note that a module begins: the number of the next operation of this thread."""
        self.begun.append(int(_get_sequence_nr()))

    def end(self, name: str, *_: Any) -> None:
        """Note that the module ``name`` ends."""
        self.ended.append((name, self.begun.pop(), int(_get_sequence_nr())))

    def find_module(self, number: int) -> str:
        """The innermost module that ran the operation ``number``; empty where none did."""
        # An inner module ends before the one that contains it.
        return next((name for name, start, end in self.ended if start <= number < end), "")


def locate_in_backward(student: nn.Module, compute_loss: Callable[[], Tensor]) -> str | None:
    """Name the operation that makes the first NaN or infinity of a backward pass, in a sentence.

    None where loss and gradients are finite. ``compute_loss`` runs the student. The gradients that
    its parameters hold stay as they are.
    """
    spans = _Spans()
    handles = [
        handle
        for name, module in student.named_modules()
        if name
        for handle in (
            module.register_forward_pre_hook(spans.begin),
            module.register_forward_hook(partial(spans.end, name)),
        )
    ]
    # Compiled code runs no hooks, hence the eager stance.
    with removing(handles), torch.compiler.set_stance("force_eager"):
        loss = compute_loss()
    if not is_finite(loss):
        return "All modules and weights are finite: the loss itself is not."
    trained = [each for each in student.parameters() if each.requires_grad]
    birth = _Birth()
    for node in _iterate_nodes(loss):
        node.register_hook(partial(_examine, birth, node))
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    if birth.operation:
        name = spans.find_module(birth.number)
        place = f" in {name} ({type(student.get_submodule(name)).__name__})" if name else ""
        return (
            "All modules, weights and the loss are finite. The first gradient that is not finite "
            f"is made in the backward pass by {birth.operation}{place}, from gradients that are "
            "finite."
        )
    if birth.seen or not all(is_finite(each) for each in gradients if each is not None):
        return (
            "All modules, weights and the loss are finite, but a gradient is not. "
            "Which operation made it is not known."
        )
    return None


def _iterate_nodes(loss: Tensor) -> Iterator[Node]:
    """Each operation that ``loss`` came from, once; not the ends that hold the weights."""
    left = [loss.grad_fn]
    known = set()
    while left:
        node = left.pop()
        if node is None or node in known or hasattr(node, "variable"):
            continue
        known.add(node)
        left += [each for each, _ in node.next_functions]
        yield node


def _examine(birth: _Birth, node: Node, returned: Any, received: Any) -> None:
    """Note ``node`` where it is the first that turns finite gradients into others."""
    if birth.seen or all(is_finite(each) for each in returned if each is not None):
        return
    birth.seen = True
    if all(is_finite(each) for each in received if each is not None):
        birth.operation = node.name().removesuffix("Backward0").removesuffix("Backward")
        birth.number = node._sequence_nr()


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of ``tensor`` are finite."""
    return bool(torch.isfinite(tensor).all())
