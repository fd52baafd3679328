"""A control variate that takes most of the noise of sampled tails out of the LM head's gradient.

The gradient of the LM head's weight is sum_n (q_n - w_n) x_n, with x the student's hidden states
and w the teacher's target, whose tail is a sample. Its noise is sum_n (p_n - w_n) x_n. Hidden
states have a large common part m: three quarters of their square in the students that were
measured. Along m the noise is (P - s) m, where s_V sums the sampled weights of the tails, and P_V
the probabilities that they stand for. P is not known, but its mean over the text is: b for each
position, which the cache holds (``cache.records.TailSums``). So the loss gets the term

    sum_v c_v (s_v - N b_v) (W m)_v        N positions; m a constant, c the share of the cache

Its mean is 0: over the draws s becomes P, and over the batches of an epoch P becomes N b. For that
m must not depend on the batch, so it is the average of the steps before. The term does not
change hidden states; its gradient is c (s - N b) mᵀ for the weight and c (s - N b) for the bias.

Where batches come in the order of their entropy, P is far from N b in each of them, and the term
would draw all of them to the same tail. So it needs batches that are a random part of the text.

c minimises the variance that is left (Lavenberg and Welch, "A perspective on the use of control
variables to increase the efficiency of Monte Carlo simulations", Management Science 1981).

Shapes: N positions, V vocabulary, D hidden width, M tail entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kd.loss.sparse_targets import SparseTarget
from kd.parallel.group import ALONE, Group

#: Weight of the newest step in the average hidden state.
_NEWEST = 0.1


@dataclass(frozen=True)
class HeadCorrection:
    """The term of one micro-batch: sum_v ``excess_V`` (W ``direction_D`` + bias)_v."""

    excess_V: Tensor
    direction_D: Tensor


class TailControl(nn.Module):
    """The control variate of a run. A checkpoint holds its average hidden state.

    Before the first step there is no average: the first step is not corrected. ``applies`` tells
    whether the batches of the present step are a random part of the text.
    """

    mean_V: Tensor
    share_V: Tensor
    direction_D: Tensor
    steps: Tensor

    def __init__(
        self, arrays: dict[str, NDArray[Any]], width: int, dtype: torch.dtype = torch.float32
    ) -> None:
        """``arrays`` are the cache's mean tail; ``dtype`` is that of the average hidden state."""
        super().__init__()
        for name, key in (("mean_V", "mean"), ("share_V", "share")):
            self.register_buffer(name, torch.from_numpy(arrays[key]), persistent=False)
        self.register_buffer("direction_D", torch.zeros(width, dtype=dtype))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.applies = True
        # Of the present step: the sum of the hidden states, and their number.
        self._sum_D = torch.zeros(width)
        self._positions = 0

    def correct(self, teacher: SparseTarget) -> HeadCorrection:
        """Return the term of the positions of ``teacher``, decoded from profile threshold."""
        drawn_V = torch.zeros_like(self.mean_V, dtype=torch.float64)
        places_M = teacher.tail_places_M
        assert places_M is not None, "a whole target, not a chunk of one"
        drawn_V.index_add_(0, teacher.ids_E[places_M], teacher.weights_E[places_M])
        positions = len(teacher.entropy_N)
        excess_V = self.share_V * (drawn_V - positions * self.mean_V.double())
        return HeadCorrection(excess_V.float(), self.direction_D)

    def observe(self, hidden_ND: Tensor) -> None:
        """Remember hidden states of the present step, for the steps after it."""
        # In float64, so that the order of the micro-batches and ranks changes nothing.
        sum_D = hidden_ND.detach().sum(0, dtype=torch.float64)
        self._sum_D = self._sum_D + sum_D if self._positions else sum_D
        self._positions += len(hidden_ND)

    def forget(self) -> None:
        """Forget the hidden states of the present step."""
        self._positions = 0

    def step(self, group: Group = ALONE) -> None:
        """Move the average by the hidden states of the present step, which was taken.

        They are those of all ranks.
        """
        positions = group.add(self._positions)
        if positions:
            sum_D = (
                self._sum_D
                if self._positions
                else torch.zeros_like(self.direction_D, dtype=torch.float64)
            )
            newest_D = torch.empty_like(self.direction_D)
            torch.div(group.add_(sum_D), positions, out=newest_D)
            # On the device, so that the host does not wait: the first step is the whole average.
            self.direction_D.lerp_(newest_D, (self.steps == 0).float().clamp(min=_NEWEST))
            self.steps += 1
        self.forget()
