"""What ranks find out of each other before they work together."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from bench.support.ranks import run_ranks
from kd.errors import TrainingError
from kd.parallel.group import Group, join_group, require_alike, require_same_time


def tell_of_others(group: Group, *software: str) -> str:
    try:
        require_alike(group, software[group.rank])
    except TrainingError as error:
        return f"{error.detail} {error.remedy}"
    return "alike"


def test_ranks_of_other_software_or_devices_do_not_work_together() -> None:
    one, other = "Potstill 1.0, torch 2.13.0 on GPUs", "Potstill 1.0, torch 2.13.0 on CPUs"
    assert run_ranks(2, tell_of_others, one, one) == ["alike", "alike"]
    said = f"Rank 1 has {other}, and rank 0 {one}. Give all hosts the same software"
    assert all(each.startswith(said) for each in run_ranks(2, tell_of_others, one, other))


def compare_clocks(group: Group, ahead: float) -> str:
    now = time.time() + ahead * group.rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kd.parallel.group.time.time", lambda: now)
        try:
            require_same_time(group)
        except TrainingError as error:
            return error.detail
    return "alike"


def test_hosts_whose_clocks_differ_do_not_work_together() -> None:
    assert run_ranks(2, compare_clocks, 1.0) == ["alike", "alike"]
    assert (
        run_ranks(2, compare_clocks, 3600.0) == ["The clocks of the hosts differ by 3,600 s."] * 2
    )


def test_gpus_do_not_train_together_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(TrainingError, match="was built without NCCL"):
        join_group()


def test_devices_are_counted_with_their_hosts() -> None:
    assert Group(0, 2, 2).devices == "2 devices"
    assert Group(3, 4, 2).devices == "4 devices of 2 hosts"
