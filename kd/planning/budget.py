"""The FLOP of a training, and the size of a student that its tokens suit. Imports no torch.

    C = 6 N D          Kaplan et al. 2020 (arXiv 2001.08361): N parameters, D tokens
    D = 20 N           the least loss at a given C, Hoffmann et al. 2022 (arXiv 2203.15556)

Both are laws of models that are trained from random weights on text. A student that starts from
trained weights, or learns from a teacher, needs fewer tokens: then they are no more than a scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Tokens for each parameter at the least loss (Hoffmann et al. 2022, table 3).
CHINCHILLA_RATIO = 20


@dataclass(frozen=True)
class ComputeBudget:
    """C = 6 N D of a training, and the sizes that Chinchilla would choose.

    ``suited_parameters`` are those that the job's tokens suit, ``suited_tokens`` those that the
    student's size asks for, and ``best_parameters`` the size that has the least loss at C.
    """

    parameters: int
    tokens: int
    flops: float
    tokens_per_parameter: float
    suited_parameters: int
    suited_tokens: int
    best_parameters: int

    @classmethod
    def of(cls, parameters: int, tokens: int) -> ComputeBudget:
        """Count the budget of a student that reads ``tokens``, repeated ones too."""
        flops = 6.0 * parameters * tokens
        return cls(
            parameters=parameters,
            tokens=tokens,
            flops=flops,
            tokens_per_parameter=round(tokens / max(parameters, 1), 3),
            suited_parameters=round(tokens / CHINCHILLA_RATIO),
            suited_tokens=CHINCHILLA_RATIO * parameters,
            best_parameters=round(math.sqrt(flops / (6 * CHINCHILLA_RATIO))),
        )
