"""The bench of the token store prints both tables. Times are not judged: they vary."""

import pytest

from bench.text.tokens import WAYS


@pytest.mark.long
def test_every_way_has_its_rates_and_the_store_its_bytes(print_page):
    text = print_page("bench/text/tokens.py", "--tokens", "1e5", "--rounds", "2")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:5]] == list(WAYS)
    assert all(float(cell.replace(",", "")) > 0 for row in rows[1:5] for cell in row[1:])
    assert rows[1][3] == "1.00"
    sizes = {row[0]: float(row[2]) for row in rows[6:]}
    assert sizes["all sequences in memory would take"] == 6
    # Two bytes a token, two bits, and what the seals and the manifest take.
    assert 2.25 <= sizes["the store on the disk"] < 2.3


@pytest.mark.alone
@pytest.mark.long
def test_a_part_of_a_text_is_captured_extended_verified_and_trained_on(print_page):
    text = print_page("bench/text/in_part.py", "--tokens", "1.4e6", "--sequences", "1024")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == ["capture", "extend", "verify", "train"]
    assert all(0 < float(row[3].replace(",", "")) < 1_500 for row in rows[1:])
