"""The hot path waits for the device as seldom as it can: copies of few numbers are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kd.models.attention.blocks import Scoring, attend_in_blocks
from tests.support.simulated_gpu.streams import WAITS

GPU = torch.device("cuda")


def count_waits(work: Callable[[], Any]) -> int:
    before = WAITS.total()
    work()
    return WAITS.total() - before


def test_the_first_keys_of_a_span_are_copied_once() -> None:
    first_l = np.maximum(np.arange(1024) - 100, 0)
    q, k, v = torch.randn(3, 1, 1, 1024, 4, device=GPU)
    assert count_waits(lambda: attend_in_blocks(q, k[0], v[0], None, first_l, Scoring(0.5))) == 1
