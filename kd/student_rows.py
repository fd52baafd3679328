"""A chunk of the student's logits on a GPU: one buffer, which kernels reduce to numbers and turn into its gradient.

The kernels (``kd.row_kernels``) do what touches every logit. A position's gold token and its dozen entries are gathered
before and set after, in PyTorch and at full precision, so that neither order nor atomics decide a bit of the result.

Shapes: n positions of a chunk, V vocabulary, D hidden width, E entries.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd.models import Head
from kd.targets import SparseTarget

if TYPE_CHECKING:
    from kd.row_kernels import Rows

ALIGNMENT = 64  # elements; a row that starts at a multiple of 128 bytes is read and written in whole lines


def kernels_run(hidden_ND: Tensor) -> bool:
    """Whether the kernels are there for the device and the dtype of these hidden states."""
    return hidden_ND.is_cuda and hidden_ND.dtype != torch.float64 and _kernels_compile(hidden_ND.device)


@functools.cache
def _kernels_compile(device: torch.device) -> bool:
    """Try them on a few rows: a driver or a compiler that is missing costs speed, and not the job."""
    if importlib.util.find_spec("triton") is None:
        return False
    from kd.row_kernels import reduce_rows

    logits_NV = torch.arange(12.0, device=device).view(2, 6)
    try:
        found_N = reduce_rows(logits_NV).lse_N
        torch.testing.assert_close(found_N, logits_NV.logsumexp(1))
    except Exception as error:  # whatever a compiler can fail with
        warnings.warn(f"the loss runs without its kernels, which fail on {device}: {error}", stacklevel=2)
        return False
    return True


@dataclass(frozen=True)
class StudentRows:
    """What the loss needs of n rows of logits s, at T = 1 and at the temperature of the divergence.

    ``z_NV`` is x Wᵀ until ``gradient_``, and the gradient with respect to it afterwards.
    """

    z_NV: Tensor
    head: Head
    temperature: float
    rows: Rows
    gold_N: Tensor
    gold_s_N: Tensor
    target: SparseTarget | None
    s_E: Tensor | None

    @classmethod
    def of(
        cls,
        hidden_ND: Tensor,
        head: Head,
        gold_N: Tensor,
        target: SparseTarget | None,
        temperature: float,
        smoothing: bool,
        slope: bool,
    ) -> StudentRows:
        """Make the logits and reduce them. ``smoothing``: ``mean_nll_N`` is wanted; ``slope``: ``negentropy_N`` is."""
        from kd.row_kernels import reduce_rows

        width = -(-head.vocabulary // ALIGNMENT) * ALIGNMENT
        z_NV = hidden_ND.new_empty(len(hidden_ND), width)[:, : head.vocabulary]
        head.product(hidden_ND, z_NV)
        gold_s_N = _logits(z_NV[torch.arange(len(gold_N), device=gold_N.device), gold_N], gold_N, head)
        s_E = None if target is None else _logits(z_NV[target.rows_E, target.ids_E], target.ids_E, head)
        rows = reduce_rows(z_NV, head, temperature, total=smoothing, mean=slope)
        return cls(z_NV, head, temperature, rows, gold_N, gold_s_N, target, s_E)

    @property
    def lse_N(self) -> Tensor:
        """LSE(s)."""
        return self.rows.lse_N

    @property
    def nll_N(self) -> Tensor:
        """-log q of the gold token."""
        return self.rows.lse_N - self.gold_s_N

    @property
    def mean_nll_N(self) -> Tensor | None:
        """The mean of -log q over the vocabulary."""
        return None if self.rows.total_N is None else self.rows.lse_N - self.rows.total_N / self.head.vocabulary

    @property
    def negentropy_N(self) -> Tensor | None:
        """E_q[log q] at the temperature."""
        return None if self.rows.mean_N is None else self.rows.mean_N / self.temperature - self.rows.soft_lse_N

    @property
    def logq_E(self) -> Tensor:
        """log q of the entries at the temperature."""
        assert self.target is not None and self.s_E is not None
        return self.s_E / self.temperature - self.target.spread(self.rows.soft_lse_N)

    @property
    def expected_N(self) -> Tensor:
        """E_p[log q] at the temperature, float64."""
        assert self.target is not None
        return self.target.sum_N(self.target.weights_E * self.logq_E)

    def gradient_(self, hard: float | Tensor, soft: float | Tensor, gold: float, flat: float) -> Tensor:
        """hard * softmax(s) + soft * (softmax(s / T) - p) - gold * e_gold - flat / V, through the head's transform.

        ``hard`` and ``soft`` are numbers or (n, 1). Written over the logits, which are gone.
        """
        from kd.row_kernels import write_gradient_

        factors = _Factors(self._column(hard), self._column(soft), gold, flat / self.head.vocabulary)
        write_gradient_(self.z_NV, self.head, self.temperature, self.rows, factors.hard_N, factors.soft_N, factors.flat)
        everywhere_N = torch.arange(len(self.gold_N), device=self.gold_N.device)
        gold_N = self._dense(factors, self.gold_s_N, everywhere_N) - gold
        if self.target is not None and self.s_E is not None:
            rows_E, weights_E = self.target.rows_E, self.target.weights_E
            # The gold token gets the same number as an entry of it. One without a weight is such a one, or nothing.
            is_gold_E = (self.target.ids_E == self.gold_N[rows_E]) | (weights_E == 0.0)
            gold_N = gold_N - factors.soft_N * self.target.sum_N(weights_E.where(is_gold_E, 0.0)).float()
            value_E = self._dense(factors, self.s_E, rows_E) - factors.soft_N[rows_E] * weights_E.float()
            value_E = value_E.where(~is_gold_E, gold_N[rows_E]) * self._slope(self.s_E)
            ids_E = self.target.ids_E.where(~is_gold_E, self.gold_N[rows_E])
            self.z_NV[rows_E, ids_E] = value_E.to(self.z_NV.dtype)
        self.z_NV[everywhere_N, self.gold_N] = (gold_N * self._slope(self.gold_s_N)).to(self.z_NV.dtype)
        return self.z_NV

    def _column(self, factor: float | Tensor) -> Tensor:
        """(n,) in float32 of (n, 1), or of a number, which is filled in on the device: to copy it there would wait."""
        if isinstance(factor, Tensor):
            return factor[:, 0].float()
        return self.z_NV.new_full((len(self.z_NV),), factor, dtype=torch.float32)

    def _dense(self, factors: _Factors, s_E: Tensor, rows_E: Tensor) -> Tensor:
        """What the kernel writes for some tokens, before the head's transform."""
        hard_E = factors.hard_N[rows_E] * (s_E - self.rows.lse_N[rows_E]).exp()
        soft_E = factors.soft_N[rows_E] * (s_E / self.temperature - self.rows.soft_lse_N[rows_E]).exp()
        return hard_E + soft_E - factors.flat

    def _slope(self, s_E: Tensor) -> Tensor:
        """ds/dz of ``Head.transform``."""
        cap = self.head.softcap
        return self.head.scale * (1.0 - (s_E / cap).square() if cap else torch.ones_like(s_E))


@dataclass(frozen=True)
class _Factors:
    """Of the two softmaxes, (n,), of the gold token and of every token."""

    hard_N: Tensor
    soft_N: Tensor
    gold: float
    flat: float


def _logits(z_E: Tensor, ids_E: Tensor, head: Head) -> Tensor:
    """s of some tokens, in float32, from x Wᵀ."""
    z_E = z_E.float()
    return head.transform(z_E if head.bias is None else z_E + head.bias[ids_E])
