"""Which way to move T so that learning from the teacher at T serves held-out text: one step ahead, on its direction.

A step w - r g(T) / |g(T)| of length r changes the held-out cross-entropy, whose gradient is h, by -r |h| cos(h, g(T)).
So T should make the cosine large. With v = h - (h . g / g . g) g, the part of h that g does not reach,

    d cos(h, g(T)) / dT = v . (dg / dT) / (|h| |g|)   and   v . dg/dT = d/de [dL/dT at w + e v]   at e = 0,

a difference of two slopes in T, which cost a forward pass each and never a second derivative (as in DARTS, arXiv
1806.09055, eq. 8). The length of the step is taken out on purpose: it belongs to the learning rate. Without that the
same derivative asks for whatever T makes the longest gradient (T^2 KL) or the shortest (KL of a tempered teacher).

Loss and cross-entropy are taken on the same held-out sequences: what differs between them is then the teacher and the
labels, not the text. A teacher that is as sure as it is right has E[h] = g(1) for every student, and T goes to 1; one
that is too sure or too unsure is put right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from kd.batches import Batch, Source, make_batch
from kd.errors import TrainingError
from kd.levers.temperature import TemperatureControl
from kd.losses import Objective, distillation_loss
from kd.models import Head
from kd.precision import Precision, target_hidden_states
from kd.targets import TargetDecoder

FAR = 1e-3  # length of e v, as a share of the weights' length


def lookahead_gradient(
    parameters: Sequence[Tensor],
    loss: Callable[[], Tensor],
    held_out_loss: Callable[[], Tensor],
    slope_of_loss: Callable[[], float],
) -> float:
    """-d cos(h, g(T)) / d log T, to be descended; 0 where there is no gradient, NaN where it is not finite.

    ``loss`` and ``held_out_loss`` give g and h by autograd, each up to a factor; ``slope_of_loss`` gives
    d loss / d log T at the parameters as they are when it is called. They are moved for it, and put back to the bit.
    """
    g = torch.autograd.grad(loss(), parameters, allow_unused=True, materialize_grads=True)
    h = torch.autograd.grad(held_out_loss(), parameters, allow_unused=True, materialize_grads=True)
    gg, hh, gh = _dot(g, g), _dot(h, h), _dot(g, h)
    if gg == 0.0 or hh == 0.0 or not math.isfinite(gg + hh):
        return 0.0 * (gg + hh)
    v = [each.sub(other, alpha=gh / gg) for each, other in zip(h, g, strict=True)]
    del g, h
    length = _dot(v, v) ** 0.5
    if length <= 1e-6 * hh**0.5:  # what is left is rounding
        return 0.0
    e = FAR * max(_dot(parameters, parameters) ** 0.5, 1e-6) / length
    kept = [each.detach().clone() for each in parameters]
    try:
        _move(parameters, kept, v, e)
        ahead = slope_of_loss()
        _move(parameters, kept, v, -e)
        behind = slope_of_loss()
    finally:
        _move(parameters, kept, v, 0.0)
    return -(ahead - behind) / (2.0 * e) / (gg * hh) ** 0.5


@torch.no_grad()
def _move(parameters: Sequence[Tensor], kept: Sequence[Tensor], v: Sequence[Tensor], e: float) -> None:
    """parameters = kept + e v, in place."""
    for parameter, origin, way in zip(parameters, kept, v, strict=True):
        parameter.copy_(origin)
        if e:
            parameter.add_(way, alpha=e)


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    parts = [(x.detach().double() * y.detach().double()).sum() for x, y in zip(a, b, strict=True)]
    return float(torch.stack(parts).sum())


@dataclass(frozen=True)
class LookAhead:
    """Takes the slope on held-out sequences of ``source``, ``batch_size`` at a time, each in turn.

    ``forward`` is called as in a training step. Dropout draws the same numbers in every pass, and torch's generators
    are left as they were. Raises ``TrainingError`` where nothing is held out.
    """

    forward: nn.Module
    head: Head
    source: Source
    decoder: TargetDecoder
    batch_size: int
    precision: Precision
    device: torch.device

    def __post_init__(self) -> None:
        if self.source.validation_count == 0:
            raise TrainingError(
                "loss.temperature follows the loss on held-out text, but nothing is held out.",
                "Set data.validation_fraction or data.validation, or another loss.temperature.mode.",
            )

    def slope(self, temperature: TemperatureControl, step: int, objective: Objective) -> float | None:
        """``Seen.ahead`` of ``step``; None where this step needs none."""
        if not temperature.looks_ahead(step):
            return None
        # Of the objective only D depends on T: the hard labels are what it is measured by.
        teacher, gold = objective.at(0.0), Objective(alpha=1.0)
        batch, value = self._batch(step).to(self.device), temperature.value(step)
        return lookahead_gradient(
            [parameter for parameter in self.forward.parameters() if parameter.requires_grad],
            lambda: self._loss(batch, teacher, value),
            lambda: self._loss(batch, gold, 1.0),
            lambda: self._slope(batch, teacher, value),
        )

    def _batch(self, step: int) -> Batch:
        """The held-out sequences of ``step``: batches after each other, over again at the end with other draws."""
        count, first = self.source.validation_count, self.source.train_count
        slots = np.arange(step * self.batch_size, (step + 1) * self.batch_size)[:count]
        return make_batch(*self.source.read(first + slots % count, slots // count))

    def _loss(self, batch: Batch, objective: Objective, temperature: float | Tensor) -> Tensor:
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            hidden_ND = target_hidden_states(self.forward, batch, self.precision)
        head = self.head
        if not torch.is_grad_enabled():
            head = replace(head, weight=head.weight.detach(), bias=None if head.bias is None else head.bias.detach())
        with torch.enable_grad():  # the weights of sampled records depend on T, too
            targets = self.decoder.targets(batch.gold_N, batch.teacher, temperature)
            return distillation_loss(hidden_ND, head, targets, objective).total

    @torch.no_grad()
    def _slope(self, batch: Batch, objective: Objective, temperature: float) -> float:
        """d loss / d log T, without a graph through the student."""
        leaf = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
        (d_loss,) = torch.autograd.grad(self._loss(batch, objective, leaf), leaf)
        return float(d_loss) * temperature
