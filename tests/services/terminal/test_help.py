"""The options of all commands, and what a pipe gets of help and usage errors."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.support.paths import ROOT
from kd.progress import Event
from services.terminal import catalogue, exit_codes
from services.terminal.commands import jobs
from services.terminal.display import Display
from tests.support.commands import kd, load_commands, parse_kd

#: Options that act at once, so that their negative would mean nothing.
ACTIONS = {"version", "install_completion", "show_completion", "verbose"}
#: The exit code of a program that Ctrl-C ended.
INTERRUPTED = 130


def walk(words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with its words, the groups too."""
    command = load_commands()
    for word in words:
        command = command.commands[word]
    yield words, command
    for name in getattr(command, "commands", {}):
        yield from walk((*words, name))


def test_h_shows_the_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words, command in walk():
        with pytest.raises((SystemExit, Exception)) as ended:
            parse_kd([*words, "-h"])
        assert getattr(ended.value, "exit_code", None) == 0, words
        assert (command.help or "").partition("\n")[0] in capsys.readouterr().out


def test_every_switch_can_be_switched_off() -> None:
    switches = [
        (words, option)
        for words, command in walk()
        for option in command.params
        if getattr(option, "is_flag", False) and option.name not in ACTIONS
    ]
    assert len(switches) > 20
    assert [
        (words, option.opts)
        for words, option in switches
        if not any(name.startswith("--no-") for name in option.secondary_opts)
    ] == []


@pytest.mark.parametrize("words", [["nonsense"], ["jobs", "ls", "--frobnicate-all-the-jobs"]])
def test_a_pipe_gets_an_error_on_one_line(words: list[str]) -> None:
    done = kd(*words, COLUMNS="50")
    assert done.returncode == exit_codes.INVALID
    assert done.stderr.splitlines()[-1].startswith("Error: No such ")
    assert words[-1] in done.stderr.splitlines()[-1]


def test_a_pipe_gets_whole_sentences_of_help() -> None:
    lines = kd("jobs", "-h", COLUMNS="50").stdout.splitlines()
    wanted = "Stop a job for now; a running job saves its state first, and then frees its worker."
    assert [line for line in lines if wanted in line]


def test_a_terminal_gets_frames() -> None:
    program = (
        "import os, pty, sys\n"
        "command = [sys.executable, '-m', 'services.terminal.cli', '-h']\n"
        "pty.spawn(command)\n"
    )
    command = [sys.executable, "-c", program]
    shown = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL
    ).stdout
    assert "╭" in shown and "First steps" in shown and "Run a service" in shown


def test_the_guide_lists_every_exit_code() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = guide.partition("## Exit codes\n")[2].partition("\n## ")[0]
    listed = set(map(int, re.findall(r"^\| (\d+) \|", section, re.MULTILINE)))
    used = {value for name, value in vars(exit_codes).items() if name.isupper()}
    used |= {INTERRUPTED, *jobs.EXIT_OF_STATUS.values()}
    assert listed == used | {0}


def test_every_command_has_a_group_and_an_example_that_can_be_typed() -> None:
    commands = dict(catalogue.walk(load_commands()))
    assert set(catalogue.CATALOGUE) == set(commands)
    for path, line in catalogue.CATALOGUE.items():
        words = shlex.split(line.example)
        assert words[0] == "kd"
        assert words[1 : len(path.split()) + 1] == path.split()
        parse_kd(words[1:])
        assert commands[path].epilog == f"Example: {line.example}"


def test_every_command_has_json() -> None:
    for path, command in catalogue.walk(load_commands()):
        assert any("--json" in option.opts for option in command.params), path


@pytest.mark.long
def test_commands_that_write_a_file_tell_where_as_json(tmp_path: Path) -> None:
    options = ["--teacher=a", "--student=b", "--train=c"]
    made = kd("init", "job.yaml", *options, "--json", folder=tmp_path)
    assert json.loads(made.stdout) == {"file": "job.yaml"}
    told = json.loads(kd("example", "--json", folder=tmp_path).stdout)
    assert (tmp_path / told["job"]).is_file()


@pytest.mark.long
def test_explain_as_json() -> None:
    codes = json.loads(kd("explain", "--json").stdout)
    entry = json.loads(kd("explain", codes[0].replace("_", "-"), "--json").stdout)
    assert entry["code"] == codes[0]
    assert entry["entry"].startswith(f"### `{codes[0]}`")


@pytest.mark.long
def test_quiet_drops_hints_and_keeps_results_and_errors(tmp_path: Path) -> None:
    options = ["--teacher=a", "--student=b", "--train=c"]
    done = kd("init", "job.yaml", *options, "-q", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "wrote job.yaml\n"
    again = kd("init", "job.yaml", *options, "--quiet", folder=tmp_path)
    assert again.returncode == 1
    assert again.stderr.startswith("error: ")


def test_a_quiet_display_still_warns(capsys: pytest.CaptureFixture[str]) -> None:
    text = io.StringIO()
    with Display(Console(file=text, quiet=True)) as display:
        display.show(Event("stage", {"stage": "train", "phase": "training"}))
        display.show(Event("warning", {"message": "the text is short"}))
    assert text.getvalue() == ""
    assert "warning: the text is short" in capsys.readouterr().err
