"""A law of the held-out loss, fitted to finished runs, and what it expects of the job.

    runs vary in size and tokens    L = E + A / N^a + B / D^b
    in tokens alone                 L = E + B / D^b
    in size alone                   L = E + A / N^a

(Hoffmann et al. 2022, arXiv 2203.15556.) With fewer than seven runs both exponents of the first are
one number, so that a run is left over to measure the noise by. The interval is that of a new run:
the covariance of the fit, by the delta method, and the noise beside it, at Student's t.

Needs scipy, which the extra ``worker`` installs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kd.errors import ConfigError, Problem
from kd.planning.finished_runs import FinishedRun

Array = NDArray[np.float64]

#: The fewest runs that a law is fitted to.
LEAST_RUNS = 5
#: Runs from which size and tokens have an exponent each.
_OWN_EXPONENTS = 7
#: Exponents at which the search for the least squares begins, and the largest.
_STARTS = (0.1, 0.3, 0.7)
_LARGEST = 3.0
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class ExpectedLoss:
    """The held-out loss that a fitted law expects, with the 95 % interval of a new run.

    ``low`` and ``high`` are None where the runs do not determine an interval. ``beyond`` says that
    the job has another size or more tokens than any of the runs.
    """

    law: str
    constants: dict[str, float]
    runs: int
    loss: float
    low: float | None
    high: float | None
    beyond: str

    def to_json(self) -> dict[str, Any]:
        """Return the expectation as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class _Form:
    """One form of the law: its text, the names of its constants, and which of N and D it reads.

    ``shared`` says that size and tokens have one exponent.
    """

    text: str
    names: tuple[str, ...]
    by_size: bool
    by_tokens: bool
    shared: bool = False

    @property
    def exponents(self) -> int:
        return 1 if self.shared else self.by_size + self.by_tokens

    def compute(self, inputs_2K: Array, *constants: float) -> Array:
        """The losses at sizes and tokens relative to their geometric means, (K,)."""
        floor, *rest = constants
        factors = rest[: len(rest) - self.exponents]
        exponents = rest[len(factors) :] * (2 if self.shared else 1)
        used = [row for row, wanted in zip(inputs_2K, (self.by_size, self.by_tokens), strict=True)
                if wanted]  # fmt: skip
        loss_K = np.full(inputs_2K.shape[1], floor)
        for row, factor, exponent in zip(used, factors, exponents, strict=True):
            loss_K = loss_K + factor * row ** (-exponent)
        return loss_K


def expect_loss(runs: list[FinishedRun], parameters: int, tokens: int) -> ExpectedLoss:
    """Fit a law to ``runs``, and tell the loss of a student of this size after so many tokens.

    Raises ``ConfigError`` for fewer than five runs, or runs of one size and one length.
    """
    if len(runs) < LEAST_RUNS:
        raise _refuse(f"a law needs {LEAST_RUNS} finished runs, but there are {len(runs)}")
    form = _choose_form(runs)
    points_2K = np.array([[r.parameters for r in runs], [r.tokens for r in runs]], dtype=float)
    losses_K = np.array([run.loss for run in runs])
    scale_2 = np.exp(np.log(points_2K).mean(axis=1, keepdims=True))
    constants, covariance = _fit(form, points_2K / scale_2, losses_K)
    asked_21 = np.array([[float(parameters)], [float(tokens)]]) / scale_2
    loss = float(form.compute(asked_21, *constants)[0])
    residuals_K = losses_K - form.compute(points_2K / scale_2, *constants)
    spread = _compute_spread(form, asked_21, constants, covariance, residuals_K)
    return ExpectedLoss(
        law=form.text,
        constants=_restore_units(form, constants, scale_2[:, 0]),
        runs=len(runs),
        loss=round(loss, 4),
        low=None if spread is None else round(loss - spread, 4),
        high=None if spread is None else round(loss + spread, 4),
        beyond=_describe_beyond(form, points_2K, (parameters, tokens)),
    )


def _choose_form(runs: list[FinishedRun]) -> _Form:
    sizes, lengths = ({getattr(run, name) for run in runs} for name in ("parameters", "tokens"))
    # A power needs three values beside the constant E.
    by_size = len(sizes) > 2
    by_tokens = len(lengths) > 2
    if by_size and by_tokens:
        if len(runs) < _OWN_EXPONENTS:
            return _Form("E + A / N^a + B / D^a", ("E", "A", "B", "a"), True, True, shared=True)
        return _Form("E + A / N^a + B / D^b", ("E", "A", "B", "a", "b"), True, True)
    if by_tokens and len(sizes) == 1:
        return _Form("E + B / D^b", ("E", "B", "b"), False, True)
    if by_size and len(lengths) == 1:
        return _Form("E + A / N^a", ("E", "A", "a"), True, False)
    raise _refuse(
        f"the runs have {len(sizes)} sizes and {len(lengths)} numbers of tokens, and a law needs "
        "three or more of what varies, and one of what does not"
    )


def _refuse(why: str) -> ConfigError:
    remedy = "Give folders of more finished runs, of other sizes or numbers of tokens."
    return ConfigError([Problem("/runs", f"{why}.", remedy)])


def _fit(form: _Form, inputs_2K: Array, losses_K: Array) -> tuple[Array, Array]:
    """The constants with the least squares from several starts, and their covariance."""
    import warnings

    from scipy.optimize import OptimizeWarning, curve_fit

    def take_shape(inputs: Array, *constants: float) -> Array:
        return form.compute(inputs, *constants)

    factors = len(form.names) - 1 - form.exponents
    low = [0.0] * len(form.names)
    high = [*([np.inf] * (1 + factors)), *([_LARGEST] * form.exponents)]
    best: tuple[float, Array, Array] | None = None
    for start in _STARTS:
        begin = [losses_K.min() / 2, *[losses_K.min() / 2 / factors] * factors]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OptimizeWarning)
            constants, covariance = curve_fit(
                take_shape, inputs_2K, losses_K, [*begin, *[start] * form.exponents],
                bounds=(low, high), max_nfev=20_000,
            )  # fmt: skip
        error = float(np.square(losses_K - form.compute(inputs_2K, *constants)).sum())
        if best is None or error < best[0]:
            best = error, constants, covariance
    assert best is not None
    return best[1], best[2]


def _compute_spread(
    form: _Form, asked_21: Array, constants: Array, covariance: Array, residuals_K: Array
) -> float | None:
    """Half of the interval of a new run; None where the fit has no finite covariance."""
    from scipy.stats import t

    freedom = len(residuals_K) - len(constants)
    if freedom < 1 or not np.isfinite(covariance).all():
        return None
    slope = np.array([_differentiate(form, asked_21, constants, i) for i in range(len(constants))])
    variance = slope @ covariance @ slope + np.square(residuals_K).sum() / freedom
    return float(t.ppf((1 + _CONFIDENCE) / 2, freedom) * math.sqrt(max(variance, 0.0)))


def _differentiate(form: _Form, asked_21: Array, constants: Array, place: int) -> float:
    """The derivative of the loss by one constant, by a central difference."""
    step = 1e-5 * max(abs(constants[place]), 1e-3)
    ends = []
    for sign in (1, -1):
        moved = constants.copy()
        moved[place] += sign * step
        ends.append(float(form.compute(asked_21, *moved)[0]))
    return (ends[0] - ends[1]) / (2 * step)


def _restore_units(form: _Form, constants: Array, scale_2: Array) -> dict[str, float]:
    """The constants for sizes in parameters and lengths in tokens."""
    named = dict(zip(form.names, map(float, constants), strict=True))
    for factor, exponent, scale in (("A", "a", scale_2[0]), ("B", "b", scale_2[1])):
        if factor in named:
            named[factor] *= scale ** named.get(exponent, named.get("a", 0.0))
    return {name: float(f"{value:.6g}") for name, value in named.items()}


def _describe_beyond(form: _Form, points_2K: Array, asked: tuple[int, int]) -> str:
    """Say where the job lies outside of the runs; empty where it does not."""
    wanted = (("parameters", form.by_size), ("tokens", form.by_tokens))
    parts = []
    for row, (name, varies), value in zip(points_2K, wanted, asked, strict=True):
        if not row.min() <= value <= row.max():
            parts.append(f"{value:,} {name}, the runs have {row.min():,.0f} to {row.max():,.0f}")
        if not varies and value != row[0]:
            parts.append(f"the law knows nothing of other {name}")
    return "; ".join(parts)
