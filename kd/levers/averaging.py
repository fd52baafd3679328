"""Averages of the weights over time: they generalise better than the last weights, and are what is evaluated and saved.

Two kinds: an exponential moving average that is kept beside the weights, and that of a schedule-free optimiser, which
trains at one point and is evaluated at another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Averager(nn.Module):
    """The exponential moving average w̄ <- d w̄ + (1 - d) w of a student's trained parameters; tied ones once.

    In update n the decay is d = min(decay, (1 + n) / (10 + n)): else the average of a short run would be of weights
    that were hardly trained (as TensorFlow's ``ExponentialMovingAverage`` does with ``num_updates``). All state is in
    buffers, so that ``state_dict`` holds it; the student itself is not part of this module.
    """

    updates: Tensor

    def __init__(self, student: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self._followed = {name: p for name, p in student.named_parameters() if p.requires_grad}
        for name, parameter in self._followed.items():
            average = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            self.register_buffer(_buffer_name(name), average)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self) -> None:
        """Follow the student's weights by one step; to be called after each step of the optimiser."""
        self.updates += 1
        count = int(self.updates)
        decay = min(self.decay, (1 + count) / (10 + count))
        get_ema_multi_avg_fn(decay)(self._averages(), [p.detach() for p in self._followed.values()], count)

    @torch.no_grad()
    def fill_student(self) -> None:
        """Put the average into the student."""
        for average, parameter in zip(self._averages(), self._followed.values(), strict=True):
            parameter.copy_(average)

    def _averages(self) -> list[Tensor]:
        return [self.get_buffer(_buffer_name(name)) for name in self._followed]


def _buffer_name(name: str) -> str:
    return name.replace(".", "/")  # a buffer's name must not hold a dot


def serve(student: nn.Module, optimizer: Optimizer, ema: Averager | None) -> None:
    """Leave in ``student`` the weights that are evaluated and saved: the average, or schedule-free's, or its own.

    Training cannot go on from there; ``serving`` comes back.
    """
    if ema is not None:
        ema.fill_student()
    elif _is_schedule_free(optimizer):
        optimizer.eval()  # type: ignore[attr-defined]


@contextmanager
@torch.no_grad()
def serving(student: nn.Module, optimizer: Optimizer, ema: Averager | None) -> Iterator[None]:
    """Inside the block ``student`` holds the weights that are evaluated and saved; after it its own, bit for bit."""
    if ema is None and not _is_schedule_free(optimizer):
        yield
        return
    trained = {p: p.detach().clone() for p in student.parameters() if p.requires_grad}
    serve(student, optimizer, ema)
    try:
        yield
    finally:
        for parameter, value in trained.items():
            parameter.copy_(value)
        for group in optimizer.param_groups:  # schedule-free's own way back rounds
            if "train_mode" in group:
                group["train_mode"] = True


def _is_schedule_free(optimizer: Optimizer) -> bool:
    return "train_mode" in optimizer.param_groups[0]
