"""Ranks that share a teacher go on after a pass that all broke off, and end after any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from kd.errors import Interrupted, ModelError
from kd.models.layers import mark_shared_modules, stopping_forward
from kd.parallel.launch import RankOrder, run_in_ranks
from kd.parallel.rank_failures import RankError
from kd.progress import SILENT, Monitor
from tests.support.kd.zoo import build

pytestmark = pytest.mark.usefixtures("one_thread")


def read(ranks: list[int], folder: Path) -> list[str]:
    """Read three times with two processes; the second pass breaks off in ``ranks``."""
    build("llama tied").save_pretrained(folder)
    order = RankOrder("read", {"folder": str(folder), "ranks": ranks}, "", str(folder / "run"))
    found = run_in_ranks(order, 2, SILENT, "tests.support.kd.sharing.broken_pass")["readings"]
    assert isinstance(found, list)
    return found


@pytest.mark.long
def test_a_pass_that_all_ranks_broke_off_is_followed_by_a_good_one(tmp_path: Path) -> None:
    assert read([0, 1], tmp_path) == ["equal", "broken off", "equal"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_pass_that_one_rank_broke_off_ends_all(rank: int, tmp_path: Path) -> None:
    # Rank 0 says it in our words; the error of another one is that of its group.
    with pytest.raises((ModelError, RankError), match=r"broken off in one|RuntimeError"):
        read([rank], tmp_path)


def test_a_stop_waits_for_the_end_of_a_shared_pass() -> None:
    trunk = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) == 2

    mark_shared_modules(trunk)
    with torch.no_grad(), stopping_forward(Monitor(should_stop=should_stop), "in a test"):
        trunk(torch.zeros(1, 2))
        assert len(asked) == 1, "before the pass alone"
        with pytest.raises(Interrupted, match="in a test"):
            trunk(torch.zeros(1, 2))
