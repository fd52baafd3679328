"""The benchmarks run and print their whole tables. What they measure is not judged: a time is no test."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kd.batches import PlainText
from kd.dense_loss import dense_terms
from kd.losses import Objective, distillation_loss
from kd.models import head_of
from kd.precision import Precision, target_hidden_states
from kd.progress import Monitor
from kd.targets import Targets
from kd.train import train

ROOT = Path(__file__).resolve().parent.parent
HARD, RECORDS = "fused, hard labels alone", "fused, records, alpha 0.1"
TEMPERED = "fused, tempered records at T = 2, alpha 0.1"
VARIANTS = {
    "capture": ["teacher's bare forward", "records read", "records read and sealed", "tempered records read"],
    "step": ["cross-entropy, all logits", HARD, RECORDS],
    "head": ["cross-entropy, all logits", "torch's linear_cross_entropy", HARD, RECORDS, TEMPERED],
    "loader": ["the student's step on records", "cache to batches"],
}
NUMBER = r"[\d.,]*\d"
NOTES = {
    "capture": f"its records hold the next token, {NUMBER} head and {NUMBER} tail entries a token; tempered ones "
    rf"\d+ nodes; a shard of 256 sequences is sealed in {NUMBER} s, {NUMBER}% of their bare forward's time",
    "loader": f"{NUMBER} entries and {NUMBER} bytes a token, {NUMBER} in a batch; in a second one core reads {NUMBER} "
    f"tokens, {NUMBER} entries, and the first look at a shard of {NUMBER} tokens costs -?{NUMBER} ms more",
}
if not hasattr(torch.nn.functional, "linear_cross_entropy"):
    VARIANTS["head"].remove("torch's linear_cross_entropy")


def numbers(cells: list[str]) -> list[float]:
    return [float(number) for cell in cells for number in re.findall(r"[\w.]+", cell.replace(",", ""))]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("bench") / "table.md"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "bench/speed.py", "--quick", "--out", str(out)]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    return found.stdout, out


def test_every_row_is_there_with_finite_numbers(output: tuple[str, Path]) -> None:
    rows = [line.strip("| ").split(" | ") for line in output[0].splitlines() if line.startswith("| ")][1:]
    assert [row[:2] for row in rows] == [[task, each] for task, variants in VARIANTS.items() for each in variants]
    for row in rows:
        speed, milliseconds, _, *ratio = numbers(row[2:6])
        assert len(ratio) == 3 and all(math.isfinite(number) for number in numbers(row[2:6])), row
        assert speed > 0 and milliseconds > 0 and ratio[1] <= ratio[0] <= ratio[2], row


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells a process's peak")
def test_memory_is_measured(output: tuple[str, Path]) -> None:
    cells = [line.strip("| ").split(" | ")[-1] for line in output[0].splitlines() if line.startswith("| ")][1:]
    assert all(cell.replace(",", "").isdigit() for cell in cells), cells


def test_the_machine_is_named_and_the_file_holds_the_same_text(output: tuple[str, Path]) -> None:
    text, out = output
    assert text.startswith("Machine: ") and f"torch {torch.__version__}" in text
    assert out.read_text(encoding="utf-8") == text


def test_what_is_no_ratio_stands_below(output: tuple[str, Path]) -> None:
    notes = [line for line in output[0].splitlines() if line.startswith("- ")]
    for note, (task, expected) in zip(notes, NOTES.items(), strict=True):
        assert re.fullmatch(rf"- {task}: {expected}\.", note), note


def test_an_unknown_size_is_refused() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "bench/speed.py", "--student", "large"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 2 and "--student" in found.stderr


# ---------------------------------------------------------------------- bench/train.py

STEPS = 4  # of a --small run: two turns of two
LEVERS = [
    "train.ema_decay: 0.999",
    "train.optim: muon",
    "train.gradient_checkpointing: full",
    "train.gradient_checkpointing: sqrt",
    "loss.z_loss: 0.0001",
    "loss.entropy_weighting: 1.0",
    "loss.temperature: 2.0",
    "loss.temperature: {mode: adversarial}",
    "loss.temperature: {mode: lookahead, interval: 2}",
]
LOOPS = ["from the cache", "cross-entropy alone", "live teacher in the step", "teacher alone"]


def cells(text: str, title: str) -> list[list[str]]:
    """The rows of the table below ``title``, without its head."""
    (section,) = [part for part in text.split("## ") if part.startswith(title)]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return lines[2:]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("bench-train") / "page.md"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "bench/train.py", "--small", "--out", str(out)]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    assert out.read_text(encoding="utf-8") == found.stdout
    return found.stdout


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """bench/train.py as a module."""
    folder = ROOT / "bench"
    sys.path.insert(0, str(folder))
    try:
        specification = importlib.util.spec_from_file_location("bench_train", folder / "train.py")
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules["bench_train"] = module
        specification.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


@pytest.fixture(scope="module")
def setting(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bench.example(bench.SMALL, tmp_path_factory.mktemp("setting"))


@pytest.mark.parametrize(
    "title, expected",
    [
        ("Step and head", [[task, each] for task in ("step", "head") for each in (VARIANTS["step"][0], RECORDS)]),
        ("The loop", [[task, each] for task in ("example", "wide") for each in LOOPS]),
        ("What each lever costs", [["example", each] for each in ["none", *LEVERS]]),
    ],
)
def test_training_every_row_is_there_with_finite_numbers(page: str, title: str, expected: list[list[str]]) -> None:
    rows = cells(page, title)
    assert [row[:2] for row in rows] == expected
    for row in rows:
        speed, milliseconds, floor, *ratio = numbers(row[2:6])
        assert len(ratio) == 3 and all(math.isfinite(number) for number in numbers(row[2:6])), row
        assert speed > 0 and milliseconds > 0 and floor > 0 and ratio[1] <= ratio[0] <= ratio[2], row


def test_training_memory_is_told_beside_the_time(page: str) -> None:
    notes = re.findall(
        rf"^- (\w+): on records it takes {NUMBER} \({NUMBER}-{NUMBER}\) of the time of plain (.*)", page, re.M
    )
    linux = Path("/proc/self/status").exists()
    memory = rf"cross-entropy and {NUMBER} of its extra memory\." if linux else r"cross-entropy\."
    assert [name for name, _ in notes] == ["step", "head"]
    assert all(re.fullmatch(memory, rest) for _, rest in notes), notes


def test_the_profile_is_that_of_the_whole_run(page: str) -> None:
    counts = {name: int(count) for name, count, *_ in cells(page, "Where its time goes")}
    each_step = {name: counts[name] for name in ("forward", "head", "backward", "optimizer")}
    assert each_step == dict.fromkeys(each_step, STEPS) and (counts["evaluation"], counts["checkpoint"]) == (2, 1)
    assert sum(float(row[-1].strip("% ")) for row in cells(page, "Where its time goes")) == pytest.approx(100, abs=1)


def test_the_floor_is_the_arithmetic_of_both_models(page: str) -> None:
    """6 P + 6 (D V + L T D) a token for the student and a third of it for the teacher, by hand."""
    (line,) = [line for line in page.splitlines() if line.startswith("- example: by its arithmetic")]
    student, teacher, times, *_ = map(float, re.findall(NUMBER, line))
    tokens, vocabulary, length = 2 * 32, 2048, 32

    def forward(layers: int, width: int, middle: int) -> float:
        body = layers * (4 * width**2 + 3 * width * middle)
        return 2 * tokens * (body + width * vocabulary + layers * length * width) / 1e9

    by_hand = 3 * forward(2, 128, 384), forward(6, 256, 704)
    assert (student, teacher) == pytest.approx(by_hand, abs=0.006)
    assert times == pytest.approx(1 + by_hand[1] / by_hand[0], abs=0.02)


def test_what_the_cache_wins_follows_from_the_table(page: str) -> None:
    for name in ("example", "wide"):
        (line,) = [line for line in page.splitlines() if line.startswith(f"- {name}: by its arithmetic")]
        form = "alone takes # times as long .* at least # times .* it is # .* and # ".replace("#", f"({NUMBER})")
        said = re.search(form, line)
        assert said is not None, line
        taken, least, live, hard = (float(number.replace(",", "")) for number in said.groups())
        times = {row[1]: float(row[3].replace(",", "")) for row in cells(page, "The loop") if row[0] == name}
        cached, alone, online, teacher = (times[each] for each in LOOPS)
        told = pytest.approx((teacher / cached, online / cached, alone / cached), rel=0.1, abs=0.01)
        assert (taken, live, hard) == told  # of one round
        assert least == pytest.approx(1 + taken, abs=0.011)


def test_a_lever_is_all_that_its_job_changes(bench: ModuleType, setting: Any) -> None:
    found = bench.levers_of(setting)
    assert list(found) == ["none", *LEVERS]
    for name, (profile, config) in found.items():
        ours, plain = (flat(each.model_dump(mode="json")) for each in (config, setting.job(profile)))
        changed = [key for key in ours if ours[key] != plain[key]]
        assert changed == ([] if name == "none" else [name.partition(":")[0]])


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    """section.field -> value."""
    return {
        f"{section}.{field}": value
        for section, fields in tree.items()
        if isinstance(fields, dict)
        for field, value in fields.items()
    }


def test_a_training_takes_the_steps_it_is_told_to_and_stands_still(bench: ModuleType, setting: Any) -> None:
    walk = bench.walk(setting, "walk", setting.job(), setting.source())
    profile = setting.folder / "walk" / "profile.json"
    walk.take(1)
    assert walk.parity_seconds > 0
    walk.take(STEPS - 1)
    time.sleep(0.3)
    assert not profile.exists()  # it is written at the end
    walk.finish()
    assert {"forward": STEPS}.items() <= {
        phase["name"]: phase["count"] for phase in json.loads(profile.read_text())["phases"]
    }.items()


def test_what_ends_a_training_ends_its_walk(bench: ModuleType) -> None:
    def breaks(monitor: Monitor) -> None:
        monitor.emit("progress", done=1)
        raise ValueError("no second step")

    walk = bench.Walk(breaks)
    walk.take(1)
    with pytest.raises(ValueError, match="no second step"):
        walk.take(1)


def test_the_live_loop_learns_all_of_what_its_teacher_says(bench: ModuleType, setting: Any) -> None:
    """Its loss is forward KL to the teacher's own logits, by the plain float64 formulas."""
    batch, student, vocabulary = next(iter(bench.batches(setting))), setting.student(), setting.sizes.vocabulary
    precision = Precision("cpu", torch.float32)
    known = bench.known(setting.teacher, head_of(setting.teacher, vocabulary), batch, precision)
    hidden_ND = target_hidden_states(student, batch, precision)
    ours = distillation_loss(
        hidden_ND, head_of(student, vocabulary), Targets(batch.gold_N, known), Objective(bench.ALPHA)
    )
    with torch.no_grad():
        logits = [model(batch.tokens_BT).logits.flatten(0, 1)[batch.rows_N] for model in (student, setting.teacher)]
    dense = dense_terms(*logits, batch.gold_N, 1.0, Objective(bench.ALPHA))
    assert ours.total.item() == pytest.approx(dense.total.item(), rel=1e-5)


def test_the_live_loop_trains_on_the_batches_of_the_others(bench: ModuleType, setting: Any, tmp_path: Path) -> None:
    """With all of the weight on the hard labels it comes to the same weights as kd.train."""
    plain = setting.job(loss={"alpha": 1.0})
    student, other = setting.student(), setting.student()
    train(plain, PlainText(setting.corpus), student, setting.sizes.vocabulary, tmp_path, Monitor())
    for _ in bench.live(setting, other, plain):
        pass
    for ours, theirs in zip(student.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
