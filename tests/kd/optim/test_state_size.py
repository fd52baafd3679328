"""Bytes of an optimiser's state by hand, for shapes that the small students do not have."""

from __future__ import annotations

import pytest
import torch
from transformers.optimization import Adafactor

from kd.optim.state_size import ParameterShape, count_optimizer_bytes


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 5), (4, 2, 3, 5)])
def test_adafactor_keeps_a_row_and_a_column_of_each_matrix(shape: tuple[int, ...]) -> None:
    parameter = torch.nn.Parameter(torch.ones(shape))
    optimizer = Adafactor([parameter])
    parameter.square().sum().backward()
    optimizer.step()
    values = [each for each in optimizer.state[parameter].values() if torch.is_tensor(each)]
    kept = sum(4 * each.numel() for each in values if each.ndim)
    assert count_optimizer_bytes("adafactor", [ParameterShape(shape, False)]) == kept


def test_muon_keeps_half_of_adamw_for_the_matrices_of_layers() -> None:
    matrix = ParameterShape((3, 5), is_layer_matrix=True)
    vector = ParameterShape((5,), is_layer_matrix=False)
    assert count_optimizer_bytes("muon", [matrix, vector]) == 4 * 15 + 8 * 5
    assert count_optimizer_bytes("adamw", [matrix, vector]) == 8 * 20
    assert count_optimizer_bytes("lion", [matrix, vector]) == 4 * 20


@pytest.mark.parametrize(
    ("shape", "is_layer_matrix", "in_eight_bits"),
    [
        ((64, 64), True, True),
        ((64, 63), True, False),
        ((65, 64), True, False),
        ((4, 32, 32), False, True),
        ((64, 64), False, False),
        ((8192,), False, False),
    ],
)
def test_large_matrices_of_layers_and_stacks_of_them_have_a_state_of_eight_bits(
    shape: tuple[int, ...], is_layer_matrix: bool, in_eight_bits: bool
) -> None:
    """torchao keeps a state in full if it has under 4,096 numbers, or no whole blocks of 256."""
    parameter = ParameterShape(shape, is_layer_matrix)
    numbers = parameter.size
    codes_scales_and_table = 2 * (numbers + 4 * (numbers // 256) + 1024)
    expected = codes_scales_and_table if in_eight_bits else 8 * numbers
    assert count_optimizer_bytes("adamw_8bit", [parameter]) == expected
