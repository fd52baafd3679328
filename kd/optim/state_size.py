"""Bytes that each optimiser keeps for a parameter, computed from its shape alone. Imports no torch.

Training (``kd.memory.step_memory``) and the API's plan of a job (``services.api.planning``) both
count with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

#: Bytes of one number of an optimiser's state, which is float32.
STATE_NUMBER_BYTES = 4

#: Numbers that an optimiser keeps for each number of a parameter.
_NUMBERS_PER_WEIGHT = {"adamw": 2, "schedule_free": 2, "lion": 1, "lars": 1}


@dataclass(frozen=True)
class ParameterShape:
    """The shape of a trained parameter.

    ``is_layer_matrix`` is True for a matrix of a decoder layer. Biases are no matrices, although
    the biases of all experts of a layer may be one tensor of two axes.
    """

    shape: tuple[int, ...]
    is_layer_matrix: bool

    @property
    def size(self) -> int:
        """The count of its numbers."""
        return math.prod(self.shape)


def count_optimizer_bytes(optim: str, parameters: Iterable[ParameterShape]) -> int:
    """Bytes of the state that ``optim`` keeps for ``parameters``, without its step counters."""
    return STATE_NUMBER_BYTES * sum(_count_numbers(optim, each) for each in parameters)


def _count_numbers(optim: str, parameter: ParameterShape) -> int:
    if optim == "muon":
        # One momentum for the matrices of the layers. AdamW trains embeddings, LM head and vectors.
        return parameter.size * (1 if parameter.is_layer_matrix else 2)
    if optim == "adafactor":
        return _count_factored_numbers(parameter.shape)
    return parameter.size * _NUMBERS_PER_WEIGHT[optim]


def _count_factored_numbers(shape: tuple[int, ...]) -> int:
    """Adafactor keeps a row and a column of each matrix (last two axes), and all of a vector."""
    if len(shape) < 2:
        return math.prod(shape)
    *stack, rows, columns = shape
    return math.prod(stack) * (rows + columns)
