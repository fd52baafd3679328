"""The table of the benches: what ``make bench`` lists and runs."""

from __future__ import annotations

import pytest

from bench import __main__ as table
from bench.support.paths import ROOT


def test_every_bench_of_the_table_has_its_script() -> None:
    scripts = [each.command.split()[0] for each in table.BENCHES.values()]
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
    assert len(scripts) == len(set(scripts))


def test_the_list_has_what_each_bench_shows_and_how_long_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert table.main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    for name, each in table.BENCHES.items():
        (line,) = [line for line in printed if line.split()[:1] == [name]]
        assert each.takes in line and line.endswith(each.shows)


@pytest.mark.long
def test_a_bench_gets_the_flags_and_its_exit_status_is_handed_on() -> None:
    assert table.main(["roofline", "--help"]) == 0
    assert table.main(["roofline", "--no-such-flag"]) == 2


def test_a_name_that_no_bench_has_is_refused_with_the_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert table.main(["fast"]) == 2
    found = capsys.readouterr().err
    assert "There is no bench 'fast'." in found and "reader" in found
