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
