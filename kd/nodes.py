"""How many nodes a tempered cache needs: as few as keep the teacher's temperatures right.

Between nodes the tail's log-partition B(b) is a cubic, whose error is at most h^4 / 384 times the largest fourth
cumulant of the tail: it depends on the teacher, so it is measured on the first sequence before anything is written.

Shapes: N positions, V vocabulary, G nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cache.codec import PARTITION_STEP, Codec, fixed_point
from kd.block_sizes import LOWEST
from kd.errors import ModelError
from kd.models import Head
from kd.sampling import Sampler, partition, tail_logprobs
from kd.targets import hermite

#: Means over positions and temperatures, of |error of the tail's log-mass| and of |error of the head's mass|.
LARGEST_LOG_MASS_ERROR = 2e-3
LARGEST_HEAD_MASS_ERROR = 1e-3
#: A tail below this log-mass (5e-5) is nothing to anyone, and no reason for more nodes: beside a token that is all but
#: certain it goes far below what is stored.
LEAST_LOG_MASS = -10.0
CANDIDATES = (3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
_POSITIONS = 64
_TEMPERATURES = 33


@dataclass(frozen=True)
class NodesFound:
    """The number of nodes, and the mean errors of the tail's log-mass and of the head's mass at it."""

    count: int
    log_mass_error: float
    head_mass_error: float

    def __str__(self) -> str:
        return (
            f"{self.count} temperature nodes: mean error {self.log_mass_error:.1e} of the tail's log-mass and "
            f"{self.head_mass_error:.1e} of the head's mass"
        )


def choose_nodes(hidden_ND: Tensor, gold_N: Tensor, head: Head, codec: Codec) -> NodesFound:
    """The least number of nodes that keeps both mean errors within their bounds over the range of temperatures.

    Raises ``ModelError`` where no number of nodes does.
    """
    every = max(len(gold_N) // _POSITIONS, 1)
    tail_NV, explicit_NV = _split(head.logits(hidden_ND[::every]), gold_N[::every], codec)
    betas = codec.nodes(_TEMPERATURES)
    exact_NG, explicit_NG = partition(tail_NV, betas)[..., 0], partition(explicit_NV, betas)[..., 0]
    for count in CANDIDATES:
        nodes = codec.nodes(count)
        stored = fixed_point(partition(tail_NV, nodes).cpu().numpy(), PARTITION_STEP, np.int16)
        stored_NG2 = torch.from_numpy(stored).to(tail_NV.device).double() * PARTITION_STEP
        got_NG = torch.stack([hermite(stored_NG2, nodes, beta)[0] for beta in betas], 1)
        error = (got_NG.clamp(min=LEAST_LOG_MASS) - exact_NG.clamp(min=LEAST_LOG_MASS)).abs().mean()
        head_error = (torch.sigmoid(explicit_NG - got_NG) - torch.sigmoid(explicit_NG - exact_NG)).abs().mean()
        found = NodesFound(count, float(error), float(head_error))
        if found.log_mass_error <= LARGEST_LOG_MASS_ERROR and found.head_mass_error <= LARGEST_HEAD_MASS_ERROR:
            return found
    raise ModelError(
        f"Temperatures {codec.temperatures[0]:g} to {codec.temperatures[1]:g} cannot be covered: {found}.",
        "Narrow cache.temperatures, or use cache.profile hidden, which is exact at any temperature.",
    )


def _split(logits_NV: Tensor, gold_N: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tail, and of what is not in it; ``LOWEST`` where a token is the other's."""
    sampler = Sampler(codec)
    sizes, _ = sampler.split(logits_NV, sampler.known(gold_N))
    tail_NV = tail_logprobs(logits_NV, sizes, slice(None))
    explicit_NV = torch.log_softmax(logits_NV, -1).masked_fill_(tail_NV > LOWEST, LOWEST)
    return tail_NV, explicit_NV
