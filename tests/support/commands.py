"""The command line as a user runs it, in a separate process; and its words, parsed here."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer
from typer._click.exceptions import MissingParameter

from bench.support.paths import ROOT
from bench.support.warm import MODELS, find_packages, get_warm_python
from services.terminal.cli import app

__all__ = ["KD", "MissingParameter", "find_command", "kd", "load_commands", "parse_kd"]

MODULE = "services.terminal.cli"
KD = [sys.executable, "-m", MODULE]
#: Longer than any command takes on a busy machine. It bounds a failure and measures nothing.
PATIENCE_SECONDS = 240
_ANYWHERE = {"PYTHONPATH": find_packages()}


def kd(
    *arguments: object, answer: str | None = None, folder: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``kd`` with these arguments and these extra environment variables.

    The text of ``answer`` is its standard input, and ``folder`` the one in which it is typed.
    """
    words = [str(each) for each in arguments]
    env = os.environ | _ANYWHERE | {"NO_COLOR": "1"} | environment
    warm = get_warm_python(MODELS)
    if warm.suits(env):
        return warm.run(MODULE, words, answer or "", folder, env, PATIENCE_SECONDS)
    return subprocess.run(
        [*KD, *words],
        input=answer,
        capture_output=True,
        text=True,
        cwd=folder,
        env=env,
        timeout=PATIENCE_SECONDS,
    )


@functools.cache
def load_commands() -> Any:
    return typer.main.get_command(app)


def parse_kd(words: list[str]) -> dict[str, Any]:
    """Return the parameters of ``kd WORDS``; raise click's ``UsageError`` where it would refuse."""
    command = load_commands()
    context = command.make_context("kd", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return dict(context.params)


def find_command(words: list[str]) -> Any:
    """Return the command of these words (``jobs ls``); None if there is none."""
    command = load_commands()
    for word in words:
        command = getattr(command, "commands", {}).get(word)
    return command
