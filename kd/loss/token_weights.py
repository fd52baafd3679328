"""The weight of each token in the divergence, by the teacher's entropy: ``loss.entropy_weighting``.

It is multiplied by the token's weight by its domain, if there are several (``loss.balance``).

    c_n = (1 + H_n)^w / mean of (1 + H)^w

The mean is over all positions of an optimiser step whose entropy is known, so that the step does
not depend on how it is cut into micro-batches and dealt to ranks. A position whose entropy is
unknown weighs 1.

Shapes: N positions that have a target.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kd.loss.objective import Objective
from kd.loss.targets import Columns, Targets, decode_entropies
from kd.parallel.group import Group


def compute_token_weights(targets: Targets, objective: Objective) -> Tensor | None:
    """Compute c, (N,) in float64; None if every weight is 1.

    Raises ``ValueError`` if the targets have no entropies.
    """
    if targets.teacher is None or not len(targets):
        return None
    balance_N = None if targets.weight_N is None else targets.weight_N.double()
    if objective.entropy_weighting == 0.0:
        return balance_N
    if targets.entropy_N is None:
        raise ValueError(
            "entropy_weighting needs the teacher's entropies, which these targets do not have"
        )
    weight_N = (1.0 + targets.entropy_N).pow(objective.entropy_weighting)
    mean = weight_N.nanmean() if objective.mean_weight is None else objective.mean_weight
    weight_N = (weight_N / mean).nan_to_num(nan=1.0)
    return weight_N if balance_N is None else weight_N * balance_N


def measure_mean_weight(
    parts: Iterable[Columns | None], exponent: float, group: Group
) -> float | None:
    """Compute the mean of (1 + H)^w over the records of the micro-batches ``parts`` of all ranks.

    The columns are those of ``kd.text.batches.Batch.teacher``, on the host; w is ``exponent``. None
    if no entropy is known. All ranks call it.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for columns in parts:
        if columns is not None:
            weight_N = (1.0 + decode_entropies(columns["entropy"], torch.nan)).pow(exponent)
            known_N = weight_N[~weight_N.isnan()]
            sums += torch.stack([known_N.sum(), torch.tensor(len(known_N)).double()])
    total, count = group.add_(sums).tolist()
    return total / count if count else None
