"""A chunk of the student's logits on a GPU, which kernels reduce and turn into its gradient.

The kernels (``kd.kernels.triton_rows``) do the work that touches every logit. PyTorch gathers the
gold token and the dozen entries of each position before, and sets their gradients after, in full
precision. So neither the order of threads nor atomics change a bit of the result.

Shapes: N positions of a chunk, V vocabulary, D hidden width, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd.kernels.padded_rows import make_rows
from kd.loss.sparse_targets import SparseTarget
from kd.models.lm_head import LMHead

if TYPE_CHECKING:
    from kd.kernels.triton_rows import RowSums


@dataclass(frozen=True)
class StudentRows:
    """The sums of N rows of logits s that the loss needs, at T = 1 and at the divergence's T.

    ``z_NV`` is x Wᵀ until ``turn_into_gradient_``, and the gradient with respect to x Wᵀ
    afterwards.
    """

    z_NV: Tensor
    lm_head: LMHead
    temperature: float
    rows: RowSums
    gold_N: Tensor
    gold_s_N: Tensor
    target: SparseTarget | None
    s_E: Tensor | None

    @classmethod
    def of(
        cls,
        hidden_ND: Tensor,
        lm_head: LMHead,
        gold_N: Tensor,
        target: SparseTarget | None,
        temperature: float,
        smoothing: bool,
        slope: bool,
    ) -> StudentRows:
        """Make the logits and reduce them.

        ``smoothing`` requests ``mean_nll_N``, ``slope`` requests ``negentropy_N``.
        """
        # Imported here because not every build of torch includes triton.
        from kd.kernels.triton_rows import reduce_rows

        z_NV = make_rows(hidden_ND, len(hidden_ND), lm_head.vocabulary, hidden_ND.dtype)
        lm_head.multiply(hidden_ND, z_NV)
        gold_z_N = z_NV[torch.arange(len(gold_N), device=gold_N.device), gold_N]
        gold_s_N = _transform_logits(gold_z_N, gold_N, lm_head)
        # Gathered now, because the gradient will overwrite the logits.
        s_E = None
        if target is not None:
            s_E = _transform_logits(z_NV[target.rows_E, target.ids_E], target.ids_E, lm_head)
        rows = reduce_rows(z_NV, lm_head, temperature, total=smoothing, mean=slope)
        return cls(z_NV, lm_head, temperature, rows, gold_N, gold_s_N, target, s_E)

    @property
    def nll_N(self) -> Tensor:
        """-log q of the gold token."""
        return self.rows.lse_N - self.gold_s_N

    @property
    def mean_nll_N(self) -> Tensor | None:
        """The mean of -log q over the vocabulary; None if not requested."""
        if self.rows.total_N is None:
            return None
        return self.rows.lse_N - self.rows.total_N / self.lm_head.vocabulary

    @property
    def negentropy_N(self) -> Tensor | None:
        """E_q[log q] at the temperature; None if not requested."""
        if self.rows.mean_N is None:
            return None
        return self.rows.mean_N / self.temperature - self.rows.soft_lse_N

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

    def turn_into_gradient_(
        self, hard: float | Tensor, soft: float | Tensor, gold: float, flat: float
    ) -> Tensor:
        """The gradient of the loss for x Wᵀ, written over the logits.

        It is hard * softmax(s) + soft * (W softmax(s / T) - p) - gold * e_gold - flat / V, times
        ds/dz, with W the sum of p. ``hard`` and ``soft`` are numbers or (N, 1).
        """
        from kd.kernels.triton_rows import write_gradient_

        hard_N, soft_N = self._make_column(hard), self._make_column(soft)
        total_N = None if self.target is None else self.target.total_N
        softmax_N = soft_N if total_N is None else soft_N * total_N.float()
        flat = flat / self.lm_head.vocabulary
        write_gradient_(
            self.z_NV, self.lm_head, self.temperature, self.rows, hard_N, softmax_N, flat
        )

        def compute_dense(s_E: Tensor, rows_E: Tensor) -> Tensor:
            """Return d loss / ds of some tokens, as the kernel computes it for all of them."""
            hard_E = hard_N[rows_E] * (s_E - self.rows.lse_N[rows_E]).exp()
            tempered_E = s_E / self.temperature - self.rows.soft_lse_N[rows_E]
            return hard_E + softmax_N[rows_E] * tempered_E.exp() - flat

        everywhere_N = torch.arange(len(self.gold_N), device=self.gold_N.device)
        gold_N = compute_dense(self.gold_s_N, everywhere_N) - gold
        if self.target is not None and self.s_E is not None:
            rows_E = self.target.rows_E
            weights_E = self.target.weights_E
            # An entry that is the gold token must get the gold token's number: both are written to
            # one place, in any order. An entry of weight 0 changes nothing, and is sent there too.
            is_gold_E = (self.target.ids_E == self.gold_N[rows_E]) | (weights_E == 0.0)
            gold_N = gold_N - soft_N * self.target.sum_N(weights_E.where(is_gold_E, 0.0)).float()
            value_E = compute_dense(self.s_E, rows_E) - soft_N[rows_E] * weights_E.float()
            value_E = value_E.where(~is_gold_E, gold_N[rows_E]) * self._compute_slope(self.s_E)
            ids_E = self.target.ids_E.where(~is_gold_E, self.gold_N[rows_E])
            self.z_NV[rows_E, ids_E] = value_E.to(self.z_NV.dtype)
        gold_N = gold_N * self._compute_slope(self.gold_s_N)
        self.z_NV[everywhere_N, self.gold_N] = gold_N.to(self.z_NV.dtype)
        return self.z_NV

    def _make_column(self, factor: float | Tensor) -> Tensor:
        """``factor`` as (N,) in float32, from (N, 1) or from a number.

        A number is filled in on the device, because a copy to the device would wait for it.
        """
        if isinstance(factor, Tensor):
            return factor[:, 0].float()
        return self.z_NV.new_full((len(self.z_NV),), factor, dtype=torch.float32)

    def _compute_slope(self, s_E: Tensor) -> Tensor:
        """ds/dz of ``LMHead.transform``."""
        cap = self.lm_head.softcap
        return self.lm_head.scale * (1.0 - (s_E / cap).square() if cap else torch.ones_like(s_E))


def _transform_logits(z_E: Tensor, ids_E: Tensor, lm_head: LMHead) -> Tensor:
    """s of some tokens in float32, from their x Wᵀ."""
    z_E = z_E.float()
    return lm_head.transform_logits(z_E if lm_head.bias is None else z_E + lm_head.bias[ids_E])
