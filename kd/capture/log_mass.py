"""Sums of probabilities in logarithms, and the mass that entries may leave out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Nats by which rounding may lower the last of the top entries. Tokens outside them are no more
#: probable than the last, so more missing mass than this allows means that an answer is wrong.
RESIDUAL_SLACK = 3.0
#: The same tolerance for entries on a fitted curve, which may lie far from the teacher's own
#: values.
FITTED_SLACK = 20.0


def log_sum_exp(logprobs: NDArray[Any]) -> NDArray[Any]:
    """Return log Σ exp over the last axis; -inf where the axis is empty or all entries are -inf."""
    top = logprobs.max(axis=-1, initial=-np.inf)
    base = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(logprobs - base[..., None]).sum(axis=-1)) + base


def log1mexp(values: NDArray[Any]) -> NDArray[Any]:
    """Return log(1 - exp(x)) for x < 0, without cancellation at either end (Mächler, 2012)."""
    near = values > -np.log(2.0)
    # np.where computes both branches: each gets a harmless argument where the other one is chosen.
    return np.where(
        near,
        np.log(-np.expm1(np.where(near, values, -1.0))),
        np.log1p(-np.exp(np.minimum(values, -0.1))),
    )
