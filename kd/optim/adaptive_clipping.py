"""Adaptive gradient clipping (AGC): each row's gradient in proportion to the row itself.

    G_i <- G_i min(1, share max(|W_i|, eps) / |G_i|)

Brock et al. 2021, arXiv 2102.06171, equation 3. As there, the last layer is left alone.

Shapes: a row is the last axis of a matrix, or of each expert's matrix.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from kd.models.layers import find_decoder_layers
from kd.parallel.sharded_files import get_own

#: The least norm of a row that counts: rows begin at 0 in some adapters.
LEAST_NORM = 1e-3


def find_clipped(student: PreTrainedModel) -> list[Parameter]:
    """Return the trained matrices of the decoder layers, those of experts included."""
    return [
        parameter
        for layer in find_decoder_layers(student)
        for name, parameter in layer.named_parameters()
        if parameter.requires_grad and parameter.ndim >= 2 and not name.endswith("bias")
    ]


@torch.no_grad()
def clip_rows(parameters: Iterable[Parameter], share: float) -> None:
    """Clip the gradient of each row to ``share`` of the norm of its weights, in place."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        # Ranks share a matrix by whole rows.
        weight, gradient = get_own(parameter.detach()), get_own(parameter.grad)
        most = share * _compute_norms(weight).clamp_(min=LEAST_NORM)
        gradient.mul_((most / _compute_norms(gradient).clamp_(min=1e-30)).clamp_(max=1.0))


def _compute_norms(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dim=-1, keepdim=True, dtype=torch.float32)
