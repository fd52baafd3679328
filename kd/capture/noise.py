"""The teacher's own noise: how far its log-probabilities move when it reads in another batch.

A matrix product of another shape adds its terms in another order, so that a teacher in bfloat16
that captures eight sequences at once differs from the same teacher that reads one alone. A cache
is judged by bounds that allow for this noise.

Shapes: N sampled positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cache.records import Sequences
from kd.errors import is_out_of_memory

#: Nats of noise that every teacher of a precision is allowed, however small its measured noise is:
#: the capture may have run on another device, or with other versions.
ALLOWED_NOISE = {"float32": 5e-3, "float16": 2e-2, "bfloat16": 1e-1}
#: The bounds allow for this times the measured noise. The measured noise is a root mean square
#: over few positions, and the capture had a noise of its own.
SAFETY = 2.0
#: The largest measured noise, in nats, at which a comparison still says something.
LARGEST_NOISE = 0.5


def choose_allowed_noise(dtype: str, measured: float) -> float:
    """Return the nats by which log-probabilities of an honest cache may differ only by noise."""
    return max(ALLOWED_NOISE[dtype], SAFETY * min(measured, LARGEST_NOISE))


def read_together(read: Callable[[Sequences], Tensor], sequences: Sequences) -> Tensor | None:
    """Read ``sequences`` in one forward pass, or as many of them at once as memory allows.

    ``read`` returns one row per target. Returns the rows of all; None where the memory holds only
    one sequence at a time, as the capture then did, so that there is no second size of a batch.
    """
    size = len(sequences)
    while size > 1:
        try:
            starts = range(0, len(sequences), size)
            return torch.cat([read(sequences.select(slice(at, at + size))) for at in starts])
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        size //= 2
    return None


def measure_squared_noise(
    logp_NV: Tensor, again_NV: Tensor, gold_N: Tensor, temperatures: Sequence[float]
) -> Tensor:
    """Return the squared noise at each position, in nats squared, (N, 2 temperatures).

    For each temperature T, a column has the mean of (T delta log p_T)^2 under p_T, and another has
    its value at the next token. ``logp_NV`` and ``again_NV`` are two readings.
    """
    columns = []
    for temperature in temperatures:
        one_NV = (logp_NV / temperature).log_softmax(1)
        squared_NV = ((again_NV / temperature).log_softmax(1) - one_NV).mul_(temperature).square_()
        columns.append((one_NV.exp() * squared_NV).sum(1))
        columns.append(squared_NV.gather(1, gold_N[:, None])[:, 0])
    return torch.stack(columns, 1)


def summarise_noise(squared: Sequence[Tensor]) -> float:
    """Return the noise in nats: the largest root mean square over positions; 0 where none is.

    ``squared`` holds outputs of ``measure_squared_noise``.
    """
    if not squared:
        return 0.0
    return math.sqrt(float(torch.cat(list(squared)).mean(0).max()))
