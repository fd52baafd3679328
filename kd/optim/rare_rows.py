"""A floor of Adam's second moment in the LM head, so that the rows of rare words move little.

Adam divides the mean gradient m of each weight by √v, the root of its mean square. A row of a rare
word has small gradients, so Adam enlarges them until the row moves as far as all others. Where
records are sampled, most of what it enlarges is noise: the word is drawn seldom, and then with a
large weight. The moves change the logits of all positions. With the floor c,

    v <- max(v, c² mean(v))        mean: over all weights of the LM head

after each step, a weight whose gradients are below c times the root mean square moves in proportion
to them. The mean gradient stays what it is, so nothing is biased.

``docs/benchmarks/quality.md`` has what it does to students.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

#: What torch and schedulefree call the mean square of the gradients, in an optimiser's state.
_MEAN_SQUARE = "exp_avg_sq"


def keep_floor(optimizer: Optimizer, weight: Parameter, floor: float) -> None:
    """Let ``optimizer`` keep the mean square of ``weight``'s gradients above a floor.

    ``floor`` is c above. The floor is applied after each step, for the steps that follow. Does
    nothing if the optimiser has no mean square of each weight (Lion, LARS, Adafactor).
    """

    def raise_to_floor(stepped: Optimizer, *_: Any) -> None:
        mean_square = stepped.state[weight].get(_MEAN_SQUARE) if weight in stepped.state else None
        if mean_square is not None:
            # Both stay on the device: nothing waits for it.
            mean_square.clamp_(min=floor**2 * mean_square.mean())

    optimizer.register_step_post_hook(torch.no_grad()(raise_to_floor))
