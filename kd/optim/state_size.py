"""Bytes of trained weights and of each optimiser's state, only from shapes. Imports no torch.

Training (``kd.memory.step_memory``) and the API's plan of a job (``services.api.planning``) both
count with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kd.config.train import OPTIMIZERS, TrainConfig

#: Bytes of one number of an optimiser's state where it is float32.
STATE_NUMBER_BYTES = 4

#: Bytes of one number of the moving average, which is float32 beside weights in bfloat16 too.
AVERAGE_NUMBER_BYTES = 4
#: Bytes of a trained number, and the same with train.precision bf16_pure.
_TRAINED_NUMBER_BYTES = {False: 4, True: 2}
#: Numbers of a state of 8 bits that share a scale.
BLOCK_NUMBERS = 256
#: Numbers below which torchao, as bitsandbytes, keeps a parameter's state in full.
LEAST_EIGHT_BIT_NUMBERS = 4096
#: Bytes of the table with the values of the codes, which every state of 8 bits has.
_CODE_TABLE_BYTES = 256 * 4


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

    @property
    def has_eight_bit_state(self) -> bool:
        """True if ``adamw_8bit`` keeps its state in 8 bits.

        It does so for matrices of the layers, and for the stacks of them that experts have. The
        rows of embeddings and LM head differ too much in their gradients to share a scale.
        """
        is_weight = self.is_layer_matrix or len(self.shape) > 2
        fits = self.size >= LEAST_EIGHT_BIT_NUMBERS and self.size % BLOCK_NUMBERS == 0
        return is_weight and fits


def count_trained_bytes(numbers: int, options: TrainConfig) -> int:
    """Bytes of ``numbers`` trained weights, or of their gradients."""
    return numbers * _TRAINED_NUMBER_BYTES[options.is_pure_bfloat16]


def count_optimizer_bytes(optim: str, parameters: Iterable[ParameterShape]) -> int:
    """Bytes of the state that ``optim`` keeps for ``parameters``, without its step counters."""
    return sum(_count_bytes(optim, each) for each in parameters)


def count_state_bytes(options: TrainConfig, parameters: Collection[ParameterShape]) -> int:
    """Bytes of the optimiser's state, and of the moving average of the weights."""
    averaged = sum(each.size for each in parameters) if options.ema_decay is not None else 0
    return AVERAGE_NUMBER_BYTES * averaged + count_optimizer_bytes(options.optim, parameters)


def _count_bytes(optim: str, parameter: ParameterShape) -> int:
    if optim == "adamw_8bit" and parameter.has_eight_bit_state:
        scales = STATE_NUMBER_BYTES * parameter.size // BLOCK_NUMBERS
        return 2 * (parameter.size + scales + _CODE_TABLE_BYTES)
    if optim == "muon":
        # One momentum for the matrices of the layers. AdamW trains embeddings, LM head and vectors.
        numbers = parameter.size * (1 if parameter.is_layer_matrix else 2)
    elif optim == "adafactor":
        # A row and a column of each matrix (last two axes), and all of a vector.
        *stack, rows, columns = (0, parameter.size) if len(parameter.shape) < 2 else parameter.shape
        numbers = math.prod(stack) * (rows + columns)
    else:
        numbers = parameter.size * OPTIMIZERS[optim].numbers
    return STATE_NUMBER_BYTES * numbers
