"""Several hosts in network namespaces, under a few of the faults of ``make test-hosts``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from bench.support.hosts import run_faults

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
