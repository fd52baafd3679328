"""A rank whose second forward pass of a shared teacher breaks off inside its last layer.

The order's configuration has the ``folder`` of a teacher and the ``ranks`` in which it breaks off.
Rank 0 reads the same rows three times, and reports what became of each reading.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kd.config.teacher import TeacherConfig
from kd.models.distributed import channel, following
from kd.models.distributed.leading import leading
from kd.models.layers import compute_hidden_states, find_decoder_layers
from kd.models.loading import load_part, load_teacher
from kd.models.teacher_files import TeacherFiles
from kd.parallel.group import join_group
from kd.parallel.launch import RankOrder
from kd.progress import Monitor
from kd.rank import run_rank
from tests.support.kd.zoo import some_tokens

CPU = torch.device("cpu")


def work(order: RankOrder, _: Monitor) -> dict[str, Any]:
    """Read, or follow rank 0."""
    channel.GRACE = timedelta(seconds=4)
    group = join_group()
    breaks = group.rank in order.config["ranks"]
    if group.leads:
        return {"readings": read(Path(order.config["folder"]), breaks)}

    def load(*place: Any, **role: Any) -> Any:
        model = load_part(*place, **role)
        return break_second_pass(model) if breaks else model

    following.load_part = load
    following.follow()
    return {}


@torch.no_grad()
def read(folder: Path, breaks: bool) -> list[str]:
    """Read three times, and say what came of it."""
    with leading():
        model = load_teacher(
            TeacherFiles(TeacherConfig(model=str(folder), parallel="tensor"), folder), CPU
        )
        if breaks:
            break_second_pass(model)
        readings = [attempt(model) for _ in range(3)]
        return [each if isinstance(each, str) else describe(readings, each) for each in readings]


def describe(readings: list[Any], states: Tensor) -> str:
    """Say whether the states are those of the first reading."""
    return "equal" if torch.equal(states, readings[0]) else "other"


def attempt(model: Any) -> Tensor | str:
    """Return the hidden states, or the name of the test's own error."""
    try:
        return compute_hidden_states(model, some_tokens())
    except NotImplementedError:
        return "broken off"


def break_second_pass(model: Any) -> Any:
    """Let the second pass from now on raise in the last layer."""
    passes = iter([False, True, False])

    def fail(*_: Any) -> None:
        if next(passes):
            raise NotImplementedError("for this test")

    find_decoder_layers(model)[-1].register_forward_pre_hook(fail)
    return model


if __name__ == "__main__":
    run_rank(work)
