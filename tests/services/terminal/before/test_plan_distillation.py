"""``kd plan --tokens``: the tables of docs/scale.md, the JSON, a job file, and what is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.support.paths import ROOT
from kd.planning.distillation import sources
from services.store.jobs.leases import BEAT_SECONDS
from services.terminal.commands.before.distillation import format_amount
from tests.support.commands import kd
from tests.support.documents import list_blocks

PAGE = ROOT / "docs/scale.md"
COMMANDS = [
    line
    for block in list_blocks(PAGE, "bash")
    for line in block.text.splitlines()
    if line.startswith("kd plan --tokens")
]
SIZES = ("plan", "--tokens", "1e9", "--devices", "8xh100")
MODELS = ("--teacher", "8B", "--student", "1B")


@pytest.fixture
def job_file(tiny_teacher: Path, tmp_path: Path) -> Path:
    """A job whose text is not on this machine."""
    job = {
        "kind": "distill",
        "teacher": {"model": str(tiny_teacher)},
        "student": {"init": {"layers": 4, "hidden_size": 32}},
        "data": {"train": "nowhere/*.txt", "sequence_length": 64},
        "train": {"max_steps": 100, "batch_size": 8},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_the_page_has_a_small_plan_and_a_large_one() -> None:
    tokens = [shlex.split(command)[3] for command in COMMANDS]
    assert tokens == ["1e9", "1e12"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_has_what_the_command_prints(command: str) -> None:
    done = kd(*shlex.split(command)[1:], KD_DEVICE_PRICES="")
    assert done.returncode == 0, done.stderr
    printed = [block.text for block in list_blocks(PAGE, "text")]
    assert done.stdout in printed


def test_a_plan_is_one_json_object_with_the_price_that_is_given(tmp_path: Path) -> None:
    done = kd(*SIZES, *MODELS, "--price", "2.5", "--json", KD_DEVICE_PRICES="t4=0.2")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["tokens"] == 10**9 and found["devices"] == "8 x h100"
    for stage in found["stages"]:
        assert stage["cost"] == pytest.approx(2.5 * stage["device_hours"], rel=1e-4)
    costs = {each["device"] for each in found["kinds"] if each["cost"] is not None}
    assert costs == {"h100", "t4"}


def test_a_job_file_tells_the_rest_and_its_text_need_not_exist(job_file: Path) -> None:
    asked = (*SIZES[:1], job_file, *SIZES[1:])
    found = json.loads(kd(*asked, "--json").stdout)
    assert (
        found["teacher"]["vocabulary"] == 2112 and found["student"]["name"] == "the job's student"
    )
    assert found["records"] == "threshold 0.04"
    assert found["storage"][0]["source"] == "tokens / 64 (data.sequence_length)"
    other = kd(*asked, "--profile", "hidden", "--teacher", "8B", "--within", "2", "--json")
    changed = json.loads(other.stdout)
    assert changed["records"] == "hidden int16" and changed["teacher"]["name"] == "8B"
    assert "workers for a capture in 2 h" in [each["name"] for each in changed["needs"]]


def test_what_does_not_fit_is_said_with_the_exit_code_of_a_failure() -> None:
    done = kd("plan", "--tokens", "1e9", "--devices", "t4", "--teacher", "70B")
    assert done.returncode == 1, done.stderr
    assert "The teacher does not fit on 1 x t4" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--tokens", "many", "--devices", "h100", *MODELS), "'many' is not a number"),
        (("--tokens", "-5", "--devices", "h100", *MODELS), "must be at least 1"),
        (("--tokens", "1e9", "--devices", "8xh1000", *MODELS), "'h1000', which is not known"),
        (("--tokens", "1e9", "--devices", "cpu", *MODELS), "a plan by --tokens is for GPUs"),
        (("--tokens", "1e9", *MODELS), "--tokens needs --devices"),
        (("--tokens", "1e9", "--devices", "h100"), "needs a teacher"),
        (("--tokens", "1e9", "--devices", "h100", "--teacher", "docs"), "holds no config.json"),
        (("--tokens", "1e9", "--devices", "h100", "--teacher", "none/such"), "nor a config.json"),
        (("--tokens", "1e9", "--devices", "h100", *MODELS, "--profile", "all"), "cache.profile"),
        (("--tokens", "1e9", "--devices", "h100", *MODELS, "--runs", "."), "without --tokens"),
        (("--devices", "h100", "--teacher", "8B"), "--teacher is for a plan by --tokens"),
        ((), "Give a job file, or --tokens"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: tuple[str, ...], why: str) -> None:
    done = kd("plan", *arguments)
    assert done.returncode == 2, done.stderr
    assert why in " ".join(done.stderr.split())


def test_the_beats_of_a_plan_are_those_of_a_worker() -> None:
    assert sources.BEAT_SECONDS == BEAT_SECONDS


def test_amounts_have_decimal_prefixes() -> None:
    assert format_amount(23_600_000_000_000, "bytes") == "23.6 TB"
    assert format_amount(999.6e6, "bytes/s") == "1 GB/s"
    assert format_amount(12, "bytes") == "12 B"
    assert format_amount(1234567, "") == "1,234,567"
    assert format_amount(416.4, "a second") == "416 a second"
