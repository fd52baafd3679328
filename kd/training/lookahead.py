"""The direction to move T in, so that a step on the loss at T lowers held-out cross-entropy.

A step w - r g(T) / |g(T)| of length r changes the held-out cross-entropy, whose gradient is h, by
-r |h| cos(h, g(T)). So T should make the cosine large. With v = h - (h . g / g . g) g, the part of
h that is orthogonal to g,

    d cos(h, g(T)) / dT = v . (dg / dT) / (|h| |g|)
    v . dg / dT         = d/de [dL/dT at w + e v] at e = 0,

a difference of two slopes in T. Each slope costs a forward pass and no second derivative (as in
DARTS, arXiv 1806.09055, eq. 8). The length of the step is left out on purpose: it belongs to the
learning rate. With it, the derivative would prefer the T with the longest gradient (T^2 KL) or the
shortest (KL of a tempered teacher).

Loss and cross-entropy are computed on the same held-out sequences: then they differ in teacher and
labels, not in the text. For a calibrated teacher E[h] = g(1) for every student, and T goes to 1.
For a teacher that is too sure or too unsure, T goes to the value that corrects it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from kd.errors import TrainingError
from kd.loss.decoder import TargetDecoder
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.temperature import TemperatureControl
from kd.models.lm_head import LMHead
from kd.models.precision import Precision, compute_target_hidden_states
from kd.text.batches import Batch, Source, make_batch

#: Length of the move e v, as a share of the weights' length.
RELATIVE_LENGTH = 1e-3
#: Elements of a product of two tensors that are float64 at once.
DOT_ELEMENTS = 2**24
#: |v| / |h| below which v is rounding error alone.
SMALLEST_REST = 1e-6


def compute_lookahead_gradient(
    parameters: Sequence[Tensor],
    loss: Callable[[], Tensor],
    held_out_loss: Callable[[], Tensor],
    slope_of_loss: Callable[[], float],
) -> float:
    """Compute -d cos(h, g(T)) / d log T, which the caller descends.

    It is 0 without a gradient, and NaN where a gradient is not finite. The gradients of ``loss``
    and ``held_out_loss`` are g and h, each up to a factor. ``slope_of_loss`` returns d loss / d log
    T at the present parameters. They are moved for it, and restored bit for bit.
    """
    g = torch.autograd.grad(loss(), parameters, allow_unused=True, materialize_grads=True)
    h = torch.autograd.grad(held_out_loss(), parameters, allow_unused=True, materialize_grads=True)
    gg = _compute_dot(g, g)
    hh = _compute_dot(h, h)
    gh = _compute_dot(g, h)
    if gg == 0.0 or hh == 0.0 or not math.isfinite(gg + hh):
        return 0.0 * (gg + hh)
    v = [each.sub(other, alpha=gh / gg) for each, other in zip(h, g, strict=True)]
    # Each is as large as the model.
    del g, h
    length = _compute_dot(v, v) ** 0.5
    if length <= SMALLEST_REST * hh**0.5:
        return 0.0
    e = RELATIVE_LENGTH * max(_compute_dot(parameters, parameters) ** 0.5, 1e-6) / length
    kept = [each.detach().clone() for each in parameters]
    try:
        _move_parameters(parameters, kept, v, e)
        ahead = slope_of_loss()
        _move_parameters(parameters, kept, v, -e)
        behind = slope_of_loss()
    finally:
        _move_parameters(parameters, kept, v, 0.0)
    return -(ahead - behind) / (2.0 * e) / (gg * hh) ** 0.5


@torch.no_grad()
def _move_parameters(
    parameters: Sequence[Tensor], kept: Sequence[Tensor], v: Sequence[Tensor], e: float
) -> None:
    """Set parameters = kept + e v, in place."""
    for parameter, origin, way in zip(parameters, kept, v, strict=True):
        parameter.copy_(origin)
        if e:
            parameter.add_(way, alpha=e)


def _compute_dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The sum of all products, in float64, of which no more than ``DOT_ELEMENTS`` exist at once."""
    parts = []
    for pair in zip(a, b, strict=True):
        x_parts, y_parts = (each.detach().flatten().split(DOT_ELEMENTS) for each in pair)
        for x_n, y_n in zip(x_parts, y_parts, strict=True):
            parts.append(x_n.double() @ y_n.double())
    return float(torch.stack(parts).sum())


@dataclass(frozen=True)
class LookAhead:
    """Computes the slope on ``batch_size`` held-out sequences of ``source``, others at each step.

    ``forward`` is called as in a training step. Dropout draws the same numbers in every pass, and
    the state of torch's generators does not change. Raises ``TrainingError`` where nothing is held
    out.
    """

    forward: nn.Module
    lm_head: LMHead
    source: Source
    decoder: TargetDecoder
    batch_size: int
    precision: Precision
    device: torch.device

    def __post_init__(self) -> None:
        if self.source.validation_count == 0:
            raise TrainingError(
                "loss.temperature follows the loss on held-out text, but nothing is held out.",
                "Set data.validation_fraction or data.validation, or another "
                "loss.temperature.mode.",
            )

    def compute_slope(
        self, temperature: TemperatureControl, step: int, objective: Objective
    ) -> float | None:
        """``StepStatistics.lookahead_slope`` of ``step``; None where it does not look ahead."""
        if not temperature.is_lookahead_step(step):
            return None
        # Only the divergence of the objective depends on T, so g leaves the hard labels out. They
        # alone make h.
        teacher = objective.with_alpha(0.0)
        gold = Objective(alpha=1.0)
        batch = self._read_batch(step).to(self.device)
        value = temperature.evaluate(step)
        return compute_lookahead_gradient(
            [parameter for parameter in self.forward.parameters() if parameter.requires_grad],
            lambda: self._loss(batch, teacher, value),
            lambda: self._loss(batch, gold, 1.0),
            lambda: self._slope(batch, teacher, value),
        )

    def _read_batch(self, step: int) -> Batch:
        """The held-out sequences of ``step``; each pass over them reads another draw."""
        count = self.source.validation_count
        first = self.source.train_count
        slots = np.arange(step * self.batch_size, (step + 1) * self.batch_size)[:count]
        return make_batch(*self.source.read(first + slots % count, slots // count))

    def _loss(self, batch: Batch, objective: Objective, temperature: float | Tensor) -> Tensor:
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            hidden_ND = compute_target_hidden_states(self.forward, batch, self.precision)
        lm_head = self.lm_head
        if not torch.is_grad_enabled():
            # The slope needs a graph to T alone, and none through the student.
            bias = None if lm_head.bias is None else lm_head.bias.detach()
            lm_head = replace(lm_head, weight=lm_head.weight.detach(), bias=bias)
        # Targets too: the weights of sampled records depend on T.
        with torch.enable_grad():
            targets = self.decoder.decode(batch.gold_N, batch.teacher, temperature)
            return compute_distillation_loss(hidden_ND, lm_head, targets, objective).total

    @torch.no_grad()
    def _slope(self, batch: Batch, objective: Objective, temperature: float) -> float:
        """d loss / d log T, without a graph through the student."""
        leaf = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
        (d_loss,) = torch.autograd.grad(self._loss(batch, objective, leaf), leaf)
        return float(d_loss) * temperature
