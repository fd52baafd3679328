"""Averages of the weights over time, which generalise better than the last weights.

Where a job asks for an average, it is evaluated and saved in place of the weights. There are two
kinds: an exponential moving average beside the weights, and the average of a schedule-free
optimiser, which computes gradients at one point and is evaluated at another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Averager(nn.Module):
    """The exponential moving average w̄ <- d w̄ + (1 - d) w of a student's trained parameters.

    In update n the decay is d = min(decay, (1 + n) / (10 + n)), as in TensorFlow's
    ``ExponentialMovingAverage`` with ``num_updates``: without it, the first weights would dominate
    the average of a short run. Tied parameters have one average. All state is in buffers, so that
    ``state_dict`` holds it; the student is not part of this module.
    """

    updates: Tensor

    def __init__(self, student: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self._followed = {name: p for name, p in student.named_parameters() if p.requires_grad}
        for name, parameter in self._followed.items():
            # A half-precision average would lose the small changes of each step.
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            average = parameter.detach().to(dtype, copy=True)
            self.register_buffer(_make_buffer_name(name), average)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self) -> None:
        """Add the student's weights to the average; call it after each step of the optimiser."""
        self.updates += 1
        count = int(self.updates)
        decay = min(self.decay, (1 + count) / (10 + count))
        averages = self._list_averages()
        # Weights in bfloat16 are widened here; others are not copied.
        weights = [
            parameter.detach().to(average.dtype)
            for average, parameter in zip(averages, self._followed.values(), strict=True)
        ]
        get_ema_multi_avg_fn(decay)(averages, weights, count)

    @torch.no_grad()
    def fill_student(self) -> None:
        """Put the average into the student."""
        for average, parameter in zip(self._list_averages(), self._followed.values(), strict=True):
            parameter.copy_(average)

    def _list_averages(self) -> list[Tensor]:
        return [self.get_buffer(_make_buffer_name(name)) for name in self._followed]


def _make_buffer_name(name: str) -> str:
    # torch refuses a dot in a buffer's name.
    return name.replace(".", "/")


def use_served_weights(student: nn.Module, optimizer: Optimizer, ema: Averager | None) -> None:
    """Put into ``student`` the weights that are evaluated and saved.

    They are the moving average, or the average of a schedule-free optimiser, or the student's own
    weights. Training cannot continue from an average: use ``serving`` to get the trained weights
    back.
    """
    if ema is not None:
        ema.fill_student()
    elif "train_mode" in optimizer.param_groups[0]:  # schedule-free
        optimizer.eval()  # type: ignore[attr-defined]


@contextmanager
@torch.no_grad()
def serving(student: nn.Module, optimizer: Optimizer, ema: Averager | None) -> Iterator[None]:
    """Let ``student`` hold the weights that are evaluated and saved for the length of the block.

    After it the student holds the trained weights again, bit for bit.
    """
    if ema is None and "train_mode" not in optimizer.param_groups[0]:
        yield
        return
    trained = {p: p.detach().clone() for p in student.parameters() if p.requires_grad}
    use_served_weights(student, optimizer, ema)
    try:
        yield
    finally:
        for parameter, value in trained.items():
            parameter.copy_(value)
        # Not by schedule-free's own ``train()``, which would compute the trained weights with
        # rounding errors.
        for group in optimizer.param_groups:
            if "train_mode" in group:
                group["train_mode"] = True
