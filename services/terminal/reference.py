"""The page ``docs/cli.md``, made from the commands of ``kd`` and their options.

``make docs`` writes the file. A test compares it with the page that this module renders.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import typer

from services.terminal.catalogue import walk
from services.terminal.cli import app

INTRODUCTION = """\
# Commands

<!-- Written by `make docs` from services/terminal: edit the help texts there. -->

`--help` after a command prints the same. `--set` and other parameters with `...` may be given more
than once. Commands that talk to a service find it at `KD_SERVER` and send the key `KD_API_KEY`.
Those that read or write caches and runs on this machine use the folder `KD_HOME`
([settings](settings.md)). Every error names its entry in [troubleshooting](troubleshooting.md).
"""
_NAME = "kd"
#: Options that every command has, or that only concern the shell.
_LEFT_OUT = {"help", "install_completion", "show_completion"}
_ENTRY = re.compile(r"(.*?)\s*(?:\[([^\[\]]*)\])?", re.DOTALL)


def render_commands_page() -> str:
    """Render the page as Markdown."""
    contexts = [
        typer.Context(command, info_name=f"{_NAME} {path}")
        for path, command in walk(typer.main.get_command(app))
        if not command.hidden
    ]
    sections = ["\n".join(_describe(each)) for each in contexts]
    table = ["| command | what it does |", "|---|---|", *map(_summarize, contexts)]
    return "\n".join([INTRODUCTION, *table, "", *sections])


def _summarize(context: Any) -> str:
    path = context.command_path
    first = (context.command.help or "").strip().split("\n\n")[0]
    return f"| [`{path}`](#{path.replace(' ', '-')}) | {_escape(_join(first))} |"


def _describe(context: Any) -> Iterator[str]:
    """The lines of one command: its help, its usage, a table of its parameters."""
    command = context.command
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"## {context.command_path}\n"
    yield from (f"{_join(part)}\n" for part in (command.help or "").strip().split("\n\n"))
    yield f"```text\n{context.command_path} {usage}\n```\n"
    rows = [_describe_parameter(each, context) for each in command.params if _is_shown(each)]
    if rows:
        yield "\n".join(["| parameter | meaning | default, bounds |", "|---|---|---|", *rows, ""])


def _is_shown(parameter: Any) -> bool:
    return parameter.name not in _LEFT_OUT and not getattr(parameter, "hidden", False)


def _describe_parameter(parameter: Any, context: Any) -> str:
    name, text = parameter.get_help_record(context)
    name = name.replace(" range>", ">").replace("<list[str]>", "<str> ...")
    meaning, extra = _ENTRY.fullmatch(text).groups()  # type: ignore[union-attr]
    return f"| `{_escape(name)}` | {_escape(_join(meaning))} | {_escape(extra or '')} |"


def _join(text: str) -> str:
    """The text on one line, without the mark by which click keeps line ends."""
    return " ".join(text.replace("\b", "").split())


def _escape(text: str) -> str:
    """The text for a cell of a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(render_commands_page())
