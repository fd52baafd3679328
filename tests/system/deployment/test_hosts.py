"""Several hosts in network namespaces, under a few of the faults of ``make test-hosts``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from bench.support.hosts import run_faults, run_gang

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
    assert found.difference < 1e-4
