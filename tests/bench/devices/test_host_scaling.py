"""Training steps between network namespaces: what they send and take, beside the formulas."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable

import pytest

pytestmark = [
    pytest.mark.alone,
    pytest.mark.long,
    pytest.mark.skipif(
        sys.platform != "linux"
        or os.geteuid() != 0
        or not (shutil.which("ip") and shutil.which("tc")),
        reason="network namespaces need root on Linux, and the commands ip and tc",
    ),
]


def test_hosts_send_the_bytes_of_the_formula_and_no_step_is_faster_than_its_links(
    print_page: Callable[..., str],
) -> None:
    text = print_page("bench/devices/hosts.py", "--scaling", "--quick")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    heading, *sent = [row for row in rows if len(row) == 4]
    assert [row[0] for row in sent] == ["ddp", "fsdp", "hsdp"], heading
    for strategy, _, through_gloo, measured in sent:
        # Headers, losses and norms come on top.
        assert 1.0 <= float(measured) / float(through_gloo) < 1.03, strategy
    heading, *paced = [row for row in rows if len(row) == 6]
    assert [row[:2] for row in paced] == [["ddp", "50"], ["fsdp", "50"], ["hsdp", "50"]], heading
    for strategy, _, _, *cells in paced:
        at_most, formula, measured = (float(each.replace(",", "")) for each in cells)
        # The first packets pass the limit in a burst.
        assert measured <= at_most / 0.9, strategy
        assert formula <= at_most, strategy
