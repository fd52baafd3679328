"""The bench of other programs: its table, what it skips, and our program beside a plain loop."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.peers.compare import find_programs
from bench.peers.environments import COMPLETE, Environment, Unavailable, clean
from bench.peers.processes import Usage, read_step_seconds, run_measured
from bench.peers.programs import OURS, PROGRAMS, RUNNERS, Case
from bench.peers.results import STUDENTS, Result, count_lines, evaluate, measure
from bench.peers.setting import QUICK, Setting, prepare
from bench.peers.table import render_better, render_skipped, render_table
from bench.support.paths import AUSTEN
from kd.config.jobfile import parse_config
from kd.pipeline import run_stages

MIB = 2**20


def make_result(step: float, **changes: object) -> Result:
    training = Usage(100 * step, 100 * step, 600 * MIB)
    result = Result(step, Usage(0.0, 0.0, 0), training, 0, 4.0, 0.5, 0.25, 40)
    return replace(result, **changes)  # type: ignore[arg-type]


def make_captured(step: float, capture: float) -> Result:
    return make_result(step, capture=Usage(capture, capture, 900 * MIB), disk=2_500_000)


def read_row(table: str, name: str) -> list[str]:
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_capture_is_spread_over_one_student_and_over_five() -> None:
    result = make_captured(0.1, capture=50)
    assert (result.alone, result.shared) == (60, 10 + 50 / STUDENTS)


def test_a_ratio_is_the_median_of_the_ratios_within_each_seed() -> None:
    """The second seed ran on a slow machine: the ratio of the means would be 2.2."""
    found = {
        OURS: [make_captured(step, 10) for step in (0.1, 1.0, 0.1)],
        "plain loop": [make_result(step) for step in (0.3, 2.0, 0.35)],
    }
    table = render_table(found, OURS)
    assert read_row(table, OURS)[1:7] == ["0.400", "50", "42", "900", "600", "2.5"]
    assert read_row(table, "plain loop")[1] == "0.883 (3.00×)"
    assert read_row(table, "plain loop")[4:7] == ["none", "600 (1.00×)", "none"]


def test_what_another_program_does_better_is_said_with_each_seed() -> None:
    found = {
        OURS: [make_captured(0.1, 10), make_captured(0.1, 10)],
        "TRL": [make_result(0.2, kl=0.4, agreement=0.3), make_result(0.2, kl=0.5)],
    }
    lines = render_better(found, OURS).splitlines()
    assert "- KL: TRL 0.4500 (0.4000, 0.5000); ours 0.5000 (0.5000, 0.5000)." in lines
    assert any(line.startswith("- agreement: TRL 27.50 (30.00, 25.00)") for line in lines)
    assert not any(line.startswith("- step") for line in lines)


def test_where_ours_is_best_nothing_is_better() -> None:
    found = {OURS: [make_result(0.1)], "TRL": [make_result(0.2)]}
    assert render_better(found, OURS) == "- in no figure."


def test_a_program_without_its_checkout_is_skipped_by_its_name(tmp_path: Path) -> None:
    pythons, skipped = find_programs([OURS, "DistillKit"], {"distillkit": None}, tmp_path)
    assert [(each.name, python) for each, python in pythons.items()] == [
        (OURS, Path(sys.executable))
    ]
    assert render_skipped(skipped).startswith("- DistillKit was skipped: it is on no package index")
    assert "--distillkit" in skipped["DistillKit"]


def test_a_program_that_pip_cannot_install_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str]) -> str:
        raise Unavailable(f"{command[-1]} was not found")

    monkeypatch.setattr("bench.peers.environments.run_quietly", fail)
    peer = replace(PROGRAMS[1], name="other", environment=Environment("other", ("x",), "x"))
    monkeypatch.setattr("bench.peers.compare.PROGRAMS", (peer,))
    pythons, skipped = find_programs(None, {}, tmp_path)
    assert not pythons and list(skipped) == ["other"]
    assert not (tmp_path / "other" / COMPLETE).exists()


def test_names_of_programs_are_those_of_the_page() -> None:
    assert [each.name for each in PROGRAMS] == [
        OURS, "TRL", "DistillKit", "DistillKit tail", "plain loop", "axolotl"
    ]  # fmt: skip


def test_lines_are_counted_without_blanks_comments_and_docstring(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('"""What it does.\n\nAnd how.\n"""\n\nimport json\n\n# a comment\nprint(1)\n')
    settings = tmp_path / "job.yaml"
    settings.write_text("# a comment\nkind: distill\n\nname: peers\n")
    assert (count_lines(script), count_lines(settings)) == (2, 2)


def test_the_clock_sees_each_step_of_an_optimiser_and_the_memory_is_that_of_the_process(
    tmp_path: Path,
) -> None:
    script = tmp_path / "steps.py"
    script.write_text(
        "import sys, torch\n"
        "weight = torch.nn.Parameter(torch.ones(2))\n"
        "held = torch.ones(50 * 2**20 // 4)\n"
        "optimizer = torch.optim.AdamW([weight], fused=True)\n"
        "for _ in range(int(sys.argv[1])):\n"
        "    weight.sum().backward()\n"
        "    optimizer.step()\n"
    )
    times = tmp_path / "times.txt"
    command = [sys.executable, str(RUNNERS / "clock.py"), str(times), str(script), "4"]
    used = run_measured(command, tmp_path, clean(), tmp_path / "log")
    assert len(times.read_text().splitlines()) == 4
    assert 0 <= read_step_seconds(times) < used.core_seconds
    assert used.peak > 50 * MIB


def test_the_memory_of_a_program_is_not_that_of_the_bench(tmp_path: Path) -> None:
    """A fork of the bench is as large as the bench, until it runs the program."""
    held = np.ones(64 * MIB)
    command = [sys.executable, "-c", "import time; time.sleep(1)"]
    assert 0 < run_measured(command, tmp_path, clean(), tmp_path / "log").peak < held.nbytes // 4


def test_a_program_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such teacher')"]
    with pytest.raises(RuntimeError, match="ended with 1:\nno such teacher"):
        run_measured(command, tmp_path, clean(), tmp_path / "log")


def test_every_program_reads_the_rows_that_ours_packs(tmp_path: Path) -> None:
    setting = Setting("quick", QUICK, tmp_path / "quick")
    prepare(setting, AUSTEN / "teacher", None, seeds=1)
    rows = np.load(setting.rows())
    order = np.load(setting.order(0))
    assert rows.shape == (QUICK.rows, QUICK.length)
    passes = order.reshape(-1, QUICK.rows)
    assert len(passes) == 2 and (np.sort(passes) == np.arange(QUICK.rows)).all()
    described = setting.describe(0, tmp_path / "out")
    assert Path(described["student"], "config.json").is_file()


@pytest.mark.long
def test_with_exact_records_ours_learns_what_a_plain_loop_learns(tmp_path: Path) -> None:
    """Then rows, order, optimiser and schedule are the same: the students differ by rounding."""
    setting = Setting("quick", QUICK, tmp_path / "quick")
    prepare(setting, AUSTEN / "teacher", None, seeds=1)
    (plain,) = (each for each in PROGRAMS if each.name == "plain loop")
    case = Case(setting, 0, tmp_path / "plain", Path(sys.executable))
    theirs = measure(plain, case, tmp_path / "result.json")
    assert Result.read(tmp_path / "result.json") == theirs
    job = setting.make_job(0, {"model": str(setting.student(0))})
    run = tmp_path / "run"
    run_stages(parse_config({**job, "cache": {"profile": "hidden"}}), tmp_path / "home", run)
    loss, kl, _ = evaluate(run / "student", setting)
    assert (loss, kl) == pytest.approx((theirs.loss, theirs.kl), abs=1e-5)


@pytest.mark.long
def test_a_second_call_prints_the_same_page_from_what_was_measured(
    print_page, tmp_path: Path
) -> None:
    command = ["--quick", "--seeds", "1", "--only", f"{OURS},plain loop", "--work", str(tmp_path)]
    text = print_page("bench/peers/compare.py", *command)
    ours, plain = (read_row(text, name) for name in (OURS, "plain loop"))
    assert abs(float(ours[8]) - float(plain[8])) < 0.02  # the records are samples
    assert re.fullmatch(r"[\d.]+ \([\d.]+×\)", plain[1])
    again = print_page("bench/peers/compare.py", *command)
    assert again == text


@pytest.mark.parametrize("script", sorted(RUNNERS.glob("*.py")), ids=lambda path: path.name)
def test_the_scripts_of_other_programs_use_nothing_of_ours(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert not re.search(r"^\s*(import|from) (kd|cache|services|bench)\b", text, re.MULTILINE)
