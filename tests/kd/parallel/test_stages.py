"""The stages of a pipeline: errors and gradients that torch's schedules hand over."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.support.ranks import run_ranks
from kd.parallel.cutting import compute_bubble, cut_layers
from kd.parallel.group import Group
from kd.parallel.stages import StageLoss, keep_owned

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class LinearStage:
    """A linear layer: as a whole student, or as one of its stages."""

    student: nn.Module
    tied: tuple[nn.Parameter, ...] = ()
    width: int = 4
    given_dtype: torch.dtype = torch.float32
    sent_dtype: torch.dtype = torch.float32

    def receiving(self, hidden_BLD: Tensor | None) -> AbstractContextManager[None]:
        return nullcontext()

    def pass_on(self, batch: Any) -> Tensor:
        raise NotImplementedError


def make_loss(group: Group) -> tuple[nn.Linear, StageLoss, Any]:
    layer = nn.Linear(4, 4)
    loss = StageLoss(LinearStage(layer), group, torch.device("cpu"))
    batch = SimpleNamespace(tokens_BL=torch.zeros(2, 3), to=lambda device: batch)
    batch.drop_records = lambda: batch
    return layer, loss, batch


def fail_in_stage(group: Group) -> str:
    _, loss, batch = make_loss(group)

    def run_out(batch: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory is left")

    try:
        loss.run_step([batch], run_out)
    except torch.OutOfMemoryError as error:
        return str(error)
    return "no error"


@pytest.mark.long
def test_the_error_of_a_stage_is_not_hidden_by_that_of_the_schedule() -> None:
    assert run_ranks(1, fail_in_stage) == ["no memory is left"]


def clip(group: Group) -> list[float]:
    """The norm of gradients of 3 and 4 on two ranks, and what clipping to 1 leaves of them.

    Both have a tied weight too, whose gradient is 12.
    """
    layer, loss, _ = make_loss(group)
    own = nn.Parameter(torch.zeros(1))
    tied = nn.Parameter(torch.zeros(1))
    loss = StageLoss(LinearStage(layer, (tied,)), group, torch.device("cpu"))
    own.grad = torch.tensor([3.0 + group.rank])
    tied.grad = torch.tensor([12.0])
    norm = loss.clip_([own, tied, nn.Parameter(torch.zeros(1))], 1.0)
    return [float(norm), float(own.grad), float(tied.grad)]


def test_gradients_are_clipped_by_the_norm_over_all_stages_with_a_tied_weight_once() -> None:
    for rank, found in enumerate(run_ranks(2, clip)):
        assert found == pytest.approx([13.0, (3.0 + rank) / 13, 12 / 13], rel=1e-6)


def test_groups_of_an_optimiser_stay_where_a_stage_has_nothing_of_them() -> None:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    groups = [{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups, fused=True)
    keep_owned(optimizer, frozenset([second]))
    assert [(group["lr"], len(group["params"])) for group in optimizer.param_groups] == [
        (1.0, 0),
        (0.1, 1),
    ]
    second.grad = torch.ones(2)
    optimizer.step()
    assert set(optimizer.state) == {second}


def test_layers_are_dealt_evenly_and_the_bubble_is_that_of_a_pipeline() -> None:
    assert cut_layers(10, 4) == [3, 3, 2, 2]
    with pytest.raises(ValueError, match="3 layers cannot be cut into 4 stages"):
        cut_layers(3, 4)
    assert compute_bubble(4, 12) == pytest.approx(3 / 15)
