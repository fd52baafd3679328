"""docs/events.md against the code: every type of event, and every field that the code names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from bench.support.paths import ROOT
from tests.support.house.syntax import nodes_of, tree_of

PAGE = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
SOURCES = [path for top in ("kd", "services") for path in (ROOT / top).rglob("*.py")]
#: The types that no client of the API gets: those for the supervisor, and one of the terminal.
INTERNAL = {"alive", "shard", "ranges", "elsewhere", "result", "error", "reason"}


def list_rows(heading: str) -> dict[str, set[str]]:
    """The words in backticks of each row of the first table below a heading, by the first one."""
    part = PAGE.partition(f"\n{heading}\n")[2].partition("\n#")[0]
    rows = [re.findall(r"`([^`]+)`", line) for line in part.splitlines() if line.startswith("| `")]
    return {words[0]: set(words[1:]) for words in rows}


def list_emitted() -> dict[str, set[str]]:
    """The types that the source emits, with the fields that it names."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        for node in nodes_of(tree_of(path)):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            kind = node.args[0]
            if name in ("emit", "write_line", "Event") and isinstance(kind, ast.Constant):
                # The fields of a line of metrics.jsonl have a table of their own.
                named = [] if name == "write_line" else node.keywords
                found[kind.value] |= {word.arg for word in named if word.arg}
    return found


def list_training_fields() -> set[str]:
    (call,) = [
        node
        for path in SOURCES
        for node in nodes_of(tree_of(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "run.log.write_line"
        and ast.unparse(node.args[0]) == "'metrics'"
    ]
    return {word.arg for word in call.keywords if word.arg}


def test_every_type_of_event_has_its_row_with_its_fields() -> None:
    emitted = list_emitted()
    rows = list_rows("## Types")
    # Scripts of the store in Lua emit the status.
    assert set(emitted) | {"status"} == set(rows) | INTERNAL
    for kind, fields in emitted.items():
        if kind not in INTERNAL:
            assert fields <= rows[kind]
        else:
            assert f"`{kind}`" in PAGE


def test_the_fields_of_a_status_are_those_that_the_store_writes() -> None:
    script = (ROOT / "services" / "store" / "jobs.lua").read_text(encoding="utf-8")
    (text,) = re.findall(r"local text = '(\{\"status\".*\})'", script)
    written = set(re.findall(r'"(\w+)":', text))
    assert written <= list_rows("## Types")["status"]


def test_the_fields_of_a_training_step_have_their_rows() -> None:
    rows = list_rows("## metrics.jsonl")
    named = set(rows) | {word for words in rows.values() for word in words}
    assert list_training_fields() <= named
    assert {"temperature", "temperature_gradient", "temperature_margin"} <= named


def test_the_scalars_have_their_rows() -> None:
    written = {
        node.value
        for node in nodes_of(tree_of(ROOT / "kd" / "tracking" / "scalars.py"))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"(throughput|loader|memory)/\w+", node.value)
    }
    rows = list_rows("### Scalars")
    assert len(written) > 8
    assert written <= set(rows) | {word for words in rows.values() for word in words}
