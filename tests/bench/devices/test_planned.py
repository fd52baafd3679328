"""The table of 8 to 1,024 devices on the page about scale is what its command prints."""

from __future__ import annotations

import pytest

from bench.devices.planned import print_planned
from bench.support.paths import ROOT

pytestmark = pytest.mark.long


def test_the_page_has_the_table_of_1024_devices_that_the_arithmetic_of_kd_plan_makes() -> None:
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    assert "\n".join(print_planned()) in page
