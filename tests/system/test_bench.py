"""The benchmarks run and print their whole tables. Measured times are not judged: they vary."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import speed as bench_speed
from bench import train as bench_train
from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.targets import Targets
from kd.models.lm_head import find_lm_head
from kd.models.precision import Precision, compute_target_hidden_states
from kd.progress import Monitor
from kd.text.batches import PlainText
from kd.training.loop import train
from tests.support.kd.references import dense_terms

HARD = "fused, hard labels alone"
RECORDS = "fused, records, alpha 0.1"
TEMPERED = "fused, tempered records at T = 2, alpha 0.1"
VARIANTS = {
    "capture": [
        "teacher's bare forward",
        "records read",
        "records read, without the mean tail",
        "records read and sealed",
        "tempered records read",
    ],
    "step": ["cross-entropy, all logits", HARD, RECORDS],
    "head": ["cross-entropy, all logits", "torch's linear_cross_entropy", HARD, RECORDS, TEMPERED],
    "loader": ["the student's step on records", "cache to batches"],
}
NUMBER = r"[\d.,]*\d"
NOTES = {
    "capture": f"its records hold the next token, {NUMBER} head and {NUMBER} tail entries a token; "
    rf"tempered ones \d+ nodes; a shard of 256 sequences is sealed in {NUMBER} s, "
    rf"{NUMBER}% of their bare forward's time; of the processor's time the bare forward is "
    rf"{NUMBER} of reading and {NUMBER} of tempered reading, the most speed of a capture whose "
    "forward uses every core; with nothing but the softmaxes of its nodes tempered reading would "
    rf"reach {NUMBER}",
    "loader": f"{NUMBER} entries and {NUMBER} bytes a token, {NUMBER} in a batch; in a second "
    f"one core reads {NUMBER} tokens, {NUMBER} entries, and the first look at a shard of {NUMBER} "
    f"tokens costs -?{NUMBER} ms more",
}
if not hasattr(torch.nn.functional, "linear_cross_entropy"):
    VARIANTS["head"].remove("torch's linear_cross_entropy")


def numbers(cells: list[str]) -> list[float]:
    return [
        float(number) for cell in cells for number in re.findall(r"[\w.]+", cell.replace(",", ""))
    ]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("bench") / "table.md"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-W",
        "error::UserWarning",
        "bench/speed.py",
        "--quick",
        "--out",
        str(out),
    ]
    found = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert found.returncode == 0, found.stderr
    return found.stdout, out


@pytest.mark.slow
def test_every_row_is_there_with_finite_numbers(output: tuple[str, Path]) -> None:
    rows = [
        line.strip("| ").split(" | ") for line in output[0].splitlines() if line.startswith("| ")
    ][1:]
    assert [row[:2] for row in rows] == [
        [task, each] for task, variants in VARIANTS.items() for each in variants
    ]
    for row in rows:
        speed, milliseconds, _, *ratio = numbers(row[2:6])
        assert len(ratio) == 3 and all(math.isfinite(number) for number in numbers(row[2:6])), row
        assert speed > 0 and milliseconds > 0 and ratio[1] <= ratio[0] <= ratio[2], row


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="only Linux shows the peak of a process"
)
def test_extra_memory_is_measured(output: tuple[str, Path]) -> None:
    cells = [
        line.strip("| ").split(" | ")[-1]
        for line in output[0].splitlines()
        if line.startswith("| ")
    ][1:]
    assert all(cell.replace(",", "").isdigit() for cell in cells), cells


@pytest.mark.slow
def test_the_machine_is_named_and_the_file_holds_the_same_text(output: tuple[str, Path]) -> None:
    text, out = output
    assert text.startswith("Machine: ") and f"torch {torch.__version__}" in text
    assert out.read_text(encoding="utf-8") == text


@pytest.mark.slow
def test_facts_that_are_no_ratios_stand_below_the_table(output: tuple[str, Path]) -> None:
    notes = [line for line in output[0].splitlines() if line.startswith("- ")]
    for note, (task, expected) in zip(notes, NOTES.items(), strict=True):
        assert re.fullmatch(rf"- {task}: {expected}\.", note), note


def test_an_unknown_size_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench/speed.py", "--student", "large"])
    with pytest.raises(SystemExit) as ended:
        bench_speed.main()
    assert ended.value.code == 2 and "--student" in capsys.readouterr().err


# ---------------------------------------------------------------------- bench/train.py

#: Steps of a run with --small: two turns of two steps.
STEPS = 4
LEVERS = [
    "train.ema_decay: 0.999",
    "train.optim: muon",
    "train.gradient_checkpointing: full",
    "train.gradient_checkpointing: sqrt",
    "loss.tail_control: False",
    "loss.entropy_weighting: 1.0",
    "loss.temperature: 2.0",
    "loss.temperature: {mode: adversarial}",
    "loss.temperature: {mode: lookahead, interval: 2}",
]
LOOPS = ["from the cache", "cross-entropy alone", "live teacher in the step", "teacher alone"]


def cells(text: str, title: str) -> list[list[str]]:
    """The rows of the table below ``title``, without its heading."""
    (section,) = [part for part in text.split("## ") if part.startswith(title)]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return lines[2:]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("bench-train") / "page.md"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        sys.executable,
        "-W",
        "error::UserWarning",
        "bench/train.py",
        "--small",
        "--out",
        str(out),
    ]
    found = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert found.returncode == 0, found.stderr
    assert out.read_text(encoding="utf-8") == found.stdout
    return found.stdout


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> bench_train.Setting:
    return bench_train.make_example_setting(bench_train.SMALL, tmp_path_factory.mktemp("setting"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "title, expected",
    [
        (
            "Step and head",
            [[task, each] for task in ("step", "head") for each in (VARIANTS["step"][0], RECORDS)],
        ),
        ("The loop", [[task, each] for task in ("example", "wide") for each in LOOPS]),
        (
            "What each lever costs",
            [["example", each] for each in ["none", *LEVERS]]
            + [["wide", each] for each in ("none", "loss.tail_control: False")],
        ),
    ],
)
def test_training_every_row_is_there_with_finite_numbers(
    page: str, title: str, expected: list[list[str]]
) -> None:
    rows = cells(page, title)
    assert [row[:2] for row in rows] == expected
    for row in rows:
        speed, milliseconds, floor, *ratio = numbers(row[2:6])
        assert len(ratio) == 3 and all(math.isfinite(number) for number in numbers(row[2:6])), row
        assert speed > 0 and milliseconds > 0 and floor > 0 and ratio[1] <= ratio[0] <= ratio[2], (
            row
        )


@pytest.mark.slow
def test_training_memory_is_printed_beside_the_time(page: str) -> None:
    notes = re.findall(
        rf"^- (\w+): on records it takes {NUMBER} \({NUMBER}-{NUMBER}\) of the time of plain (.*)",
        page,
        re.M,
    )
    linux = Path("/proc/self/status").exists()
    memory = rf"cross-entropy and {NUMBER} of its extra memory\." if linux else r"cross-entropy\."
    assert [name for name, _ in notes] == ["step", "head"]
    assert all(re.fullmatch(memory, rest) for _, rest in notes), notes


@pytest.mark.slow
def test_the_profile_is_that_of_the_whole_run(page: str) -> None:
    counts = {name: int(count) for name, count, *_ in cells(page, "Where its time goes")}
    each_step = {name: counts[name] for name in ("forward", "head", "backward", "optimizer")}
    assert each_step == dict.fromkeys(each_step, STEPS) and (
        counts["evaluation"],
        counts["checkpoint"],
    ) == (2, 1)
    assert sum(
        float(row[-1].strip("% ")) for row in cells(page, "Where its time goes")
    ) == pytest.approx(100, abs=1)


@pytest.mark.slow
def test_the_floor_is_the_arithmetic_of_both_models(page: str) -> None:
    """By hand: 6 P + 6 (D V + H L D) a token for the student, a third of that for the teacher."""
    (line,) = [
        line for line in page.splitlines() if line.startswith("- example: by its arithmetic")
    ]
    student, teacher, times, *_ = map(float, re.findall(NUMBER, line))
    tokens = 2 * 32
    vocabulary = 2048
    length = 32

    def forward(layers: int, width: int, middle: int) -> float:
        body = layers * (4 * width**2 + 3 * width * middle)
        return 2 * tokens * (body + width * vocabulary + layers * length * width) / 1e9

    by_hand = 3 * forward(2, 128, 384), forward(6, 256, 704)
    assert (student, teacher) == pytest.approx(by_hand, abs=0.006)
    assert times == pytest.approx(1 + by_hand[1] / by_hand[0], abs=0.02)


@pytest.mark.slow
def test_what_the_cache_wins_follows_from_the_table(page: str) -> None:
    for name in ("example", "wide"):
        (line,) = [
            line for line in page.splitlines() if line.startswith(f"- {name}: by its arithmetic")
        ]
        form = "alone takes # times as long .* at least # times .* it is # .* and # ".replace(
            "#", f"({NUMBER})"
        )
        said = re.search(form, line)
        assert said is not None, line
        taken, least, live, hard = (float(number.replace(",", "")) for number in said.groups())
        times = {
            row[1]: float(row[3].replace(",", ""))
            for row in cells(page, "The loop")
            if row[0] == name
        }
        cached, alone, online, teacher = (times[each] for each in LOOPS)
        expected = pytest.approx(
            (teacher / cached, online / cached, alone / cached), rel=0.1, abs=0.01
        )
        assert (taken, live, hard) == expected
        assert least == pytest.approx(1 + taken, abs=0.011)


@pytest.mark.long
def test_a_lever_changes_one_field_of_its_job(setting: bench_train.Setting) -> None:
    found = bench_train.make_lever_jobs(setting)
    assert list(found) == ["none", *LEVERS]
    for name, (profile, config) in found.items():
        ours, plain = (
            flat(each.model_dump(mode="json")) for each in (config, setting.job(profile))
        )
        changed = [key for key in ours if ours[key] != plain[key]]
        assert changed == ([] if name == "none" else [name.partition(":")[0]])


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    """Flatten a job to a mapping of section.field to value."""
    return {
        f"{section}.{field}": value
        for section, fields in tree.items()
        if isinstance(fields, dict)
        for field, value in fields.items()
    }


def test_a_stepped_training_takes_the_requested_steps_and_waits(
    setting: bench_train.Setting,
) -> None:
    training = bench_train.start_stepped_training(
        setting, "stepped", setting.job(), setting.source()
    )
    profile = setting.folder / "stepped" / "profile.json"
    training.take(1)
    assert training.parity_seconds > 0
    training.take(STEPS - 1)
    time.sleep(0.3)
    assert not profile.exists()  # the loop writes it at its end
    training.finish()
    assert {"forward": STEPS}.items() <= {
        phase["name"]: phase["count"] for phase in json.loads(profile.read_text())["phases"]
    }.items()


def test_an_error_of_a_training_ends_its_steps() -> None:
    def breaks(monitor: Monitor) -> None:
        monitor.emit("progress", done=1)
        raise ValueError("no second step")

    training = bench_train.SteppedTraining(breaks)
    training.take(1)
    with pytest.raises(ValueError, match="no second step"):
        training.take(1)


def test_the_live_loop_learns_the_whole_distribution_of_its_teacher(
    setting: bench_train.Setting,
) -> None:
    """Its loss is forward KL to the teacher's own logits, by plain float64 formulas."""
    batch = next(iter(bench_train.iterate_batches(setting)))
    student = setting.student()
    vocabulary = setting.sizes.vocabulary
    precision = Precision("cpu", torch.float32)
    known = bench_train.make_teacher_target(
        setting.teacher, find_lm_head(setting.teacher, vocabulary), batch, precision
    )
    hidden_ND = compute_target_hidden_states(student, batch, precision)
    ours = compute_distillation_loss(
        hidden_ND,
        find_lm_head(student, vocabulary),
        Targets(batch.gold_N, known),
        Objective(bench_train.ALPHA),
    )
    with torch.no_grad():
        logits = [
            model(batch.tokens_BL).logits.flatten(0, 1)[batch.rows_N]
            for model in (student, setting.teacher)
        ]
    dense = dense_terms(*logits, batch.gold_N, 1.0, Objective(bench_train.ALPHA))
    assert ours.total.item() == pytest.approx(dense.total.item(), rel=1e-5)


def test_the_live_loop_trains_on_the_same_batches_as_the_other_loops(
    setting: bench_train.Setting, tmp_path: Path
) -> None:
    """With all weight on the hard labels it ends with the same weights as kd.training.loop."""
    plain = setting.job(loss={"alpha": 1.0})
    student = setting.student()
    other = setting.student()
    train(plain, PlainText(setting.corpus), student, setting.sizes.vocabulary, tmp_path, Monitor())
    for _ in bench_train.distill_live(setting, other, plain):
        pass
    for ours, theirs in zip(student.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
