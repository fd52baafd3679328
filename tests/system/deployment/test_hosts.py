"""Several hosts in network namespaces, under a few of the faults of ``make test-hosts``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from bench.support.hosts import WORKERS, inside_network, run_faults, run_gang
from bench.support.ranks import run_ranks
from tests.support.kd.shared_training import (
    capture_profiles,
    change,
    curve,
    evaluations,
    make_shared_job,
    train_alone,
    train_student,
)

pytestmark = [
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux"
        or os.geteuid() != 0
        or not (shutil.which("ip") and shutil.which("tc")),
        reason="network namespaces need root on Linux, and the commands ip and tc",
    ),
]


@pytest.mark.usefixtures("_server_binary")
def test_faults_between_hosts_change_no_job(tmp_path: Path) -> None:
    said: list[str] = []
    struck, found = run_faults(tmp_path / "hosts", 8, 7, said.append)
    assert found == [], said
    assert struck["jobs"] >= 4


@pytest.mark.usefixtures("_server_binary")
def test_a_training_goes_on_after_one_of_its_hosts_is_cut_off(tmp_path: Path) -> None:
    said: list[str] = []
    found = run_gang(tmp_path / "hosts", 30, "ddp", said.append)
    assert found.attempts == 2, said
    assert found.loss < 1e-4
    assert found.student < 1e-6


@pytest.mark.parametrize("hosts", [2, 3])
def test_hosts_follow_one_process_to_nine_digits_in_float64(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path, hosts: int
) -> None:
    """Of one, two and three hosts a step has 12 sequences; a host has two ranks."""
    options = {"max_steps": 100, "eval_steps": 50, "save_steps": 100, "batch_size": 1}
    job = make_shared_job(tiny_teacher, tiny_text, gradient_accumulation_steps=12, **options)
    (cache,) = capture_profiles(job, tmp_path, "threshold").values()
    one = train_alone(job, cache, str(tmp_path / "one"), dtype="float64")
    assert len(curve(one)) == 100
    with inside_network() as net:
        names = [net.names[host] for host in WORKERS[:hosts]]
        for strategy in ("ddp", "fsdp", "hsdp"):
            shared = change(job, train={"strategy": strategy})
            given = (shared, cache, str(tmp_path / strategy), "float64")
            many, *_ = run_ranks(2 * hosts, train_student, *given, hosts=names)
            assert curve(many) == pytest.approx(curve(one), rel=1e-9)
            for other, own in zip(evaluations(many), evaluations(one), strict=True):
                assert other == pytest.approx(own, rel=1e-9)
