"""docs/troubleshooting.md against the code: every code of an error has an entry, every quoted
message is in the source, and ``kd explain`` prints what the page says.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from fastapi.testclient import TestClient
from typer.testing import CliRunner

from bench.support.paths import ROOT
from cache.errors import HELP_PAGE, CacheCorrupt, PotstillError, locate_help
from kd.client.errors import Refused
from kd.client.wire.jobs import JobError
from kd.client.wire.problems import ProblemDetails
from services.api.answers.problems import TITLES, TITLES_OF_SLUGS
from services.api.app import create_app
from services.settings import Settings
from services.terminal.explanations import find_entry, list_codes
from tests.support.commands import kd
from tests.support.each import for_each
from tests.support.house.syntax import nodes_of, tree_of

PAGE = (ROOT / HELP_PAGE).read_text(encoding="utf-8")
SOURCES = sorted(path for top in ("cache", "kd", "services") for path in (ROOT / top).rglob("*.py"))
#: A problem whose status has no code.
NAMELESS = "error"


def walk_sources() -> Iterator[tuple[Path, ast.AST]]:
    for path in SOURCES:
        for node in nodes_of(tree_of(path)):
            yield path, node


def find_error_classes() -> set[tuple[Path, str]]:
    """The file and the name of every class whose bases lead to ``PotstillError``."""
    classes = [(path, node) for path, node in walk_sources() if isinstance(node, ast.ClassDef)]
    names = {"PotstillError"}
    found: set[tuple[Path, str]] = set()
    while True:
        found = {
            (path, node.name)
            for path, node in classes
            if node.name in names or {ast.unparse(base) for base in node.bases} & names
        }
        if {name for _, name in found} == names:
            return found
        names = {name for _, name in found}


def list_error_types() -> set[str]:
    """The types of all errors."""
    modules = {path: path.relative_to(ROOT).with_suffix("").parts for path in SOURCES}
    return {
        getattr(importlib.import_module(".".join(modules[path])), name).type
        for path, name in find_error_classes()
    }


def list_slugs() -> set[str]:
    """The codes of problem documents: of their titles, and those that a call gives."""
    slugs = {slug for slug, _ in TITLES.values()} | set(TITLES_OF_SLUGS) | {NAMELESS}
    for _, node in walk_sources():
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ApiProblem":
            named = [word.value for word in node.keywords if word.arg == "slug"]
            slugs |= {
                each.value
                for each in (*node.args[3:4], *named)
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            }
    return {slug.replace("-", "_") for slug in slugs}


def list_failure_types() -> set[str]:
    """The types of a job's failure that no class has."""
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (*SOURCES, ROOT / "services" / "store" / "jobs.lua")
        if "services" in path.parts
    )
    # A type, and then its details: events have a type too.
    pattern = r"type\"?\s*[:=]\s*[\"'](\w+)[\"'],\s*\"?detail"
    constants = r"^(?:OUT_OF_MEMORY|DISK_FULL|WORKER_LOST) = \"(\w+)\"$"
    return {*re.findall(pattern, text), *re.findall(constants, text, re.MULTILINE)}


def test_every_code_has_an_entry_and_every_entry_a_code() -> None:
    failures = list_failure_types()
    assert {"deadline_exceeded", "dependency_failed", "unreadable_record", "disk_full"} <= failures
    codes = list_codes()
    assert len(codes) == len(set(codes))
    assert set(codes) == list_error_types() | list_slugs() | failures


def test_the_walk_over_the_source_finds_every_class() -> None:
    list_error_types()
    left, loaded = [PotstillError], set()
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        # Other tests have classes of their own.
        if kind.__module__.partition(".")[0] in ("cache", "kd", "services"):
            loaded.add(kind.__name__)
    assert loaded == {name for _, name in find_error_classes()}
    assert len(loaded) > 25


@functools.cache
def list_texts() -> tuple[str, ...]:
    """The texts in the source; a placeholder is one character that no message contains."""
    texts = set()
    for _, node in walk_sources():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
            texts.add("".join(map(str, parts)))
    for path in (ROOT / "services" / "store").glob("*.lua"):
        texts.update(re.findall(r"'([^'\n]+)'", path.read_text(encoding="utf-8")))
    return tuple(texts)


def list_messages() -> list[str]:
    found = []
    for block in re.findall(r"^- \*\*Messages\*\*:(.*?)^- \*\*", PAGE, re.MULTILINE | re.DOTALL):
        found += [" ".join(message.split()) for message in re.findall(r"`([^`]+)`", block)]
    return found


@for_each(list_messages())
def test_every_quoted_message_is_in_the_source(message: str) -> None:
    parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
    # The text around a placeholder may be joined to it without a space.
    pattern = re.compile(".*".join(parts), re.DOTALL)
    assert parts
    assert any(pattern.search(text) for text in list_texts())


@for_each(list_codes())
def test_every_entry_is_whole(code: str) -> None:
    entry = find_entry(code)
    assert entry is not None
    assert entry.startswith(f"### `{code}`\n")
    assert re.findall(r"^- \*\*(.+?)\*\*:", entry, re.MULTILINE) == [
        "Messages", "Cause", "Remedy", "See it",
    ]  # fmt: skip
    assert "\n## " not in entry


def test_an_error_names_the_place_of_its_entry() -> None:
    error = CacheCorrupt("Bytes differ.")
    assert error.help == locate_help("cache-corrupt") == "docs/troubleshooting.md#cache_corrupt"
    assert f"### `{error.type}`" in PAGE


def test_the_answers_of_the_api_name_the_place() -> None:
    failed = JobError(type="nan_loss", detail="The loss is nan.")
    assert failed.model_dump()["help"] == locate_help("nan_loss")
    app = create_app(Settings(redis_url="redis://127.0.0.1:1/0"))
    answer = TestClient(app, base_url="http://127.0.0.1").get("/nothing").json()
    assert answer["type"] == "urn:potstill:problem:not-found"
    assert answer["help"] == locate_help("not_found")


def test_a_refusal_names_the_entry_of_the_server_s_problem() -> None:
    problem = ProblemDetails(
        type="urn:potstill:problem:not-found",
        title="Not found",
        status=404,
        detail="No.",
        instance="/",
        help=locate_help("not-found"),
    )
    assert Refused(404, "No.", problem=problem).help == locate_help("not_found")
    assert Refused(404, "No.").help == locate_help("refused")


def test_the_terminal_shows_the_place() -> None:
    done = kd("run", "/nowhere/job.yaml")
    shown = done.stderr.splitlines()
    assert shown[0].startswith("error: ")
    place = "docs/troubleshooting.md#invalid_config"
    assert shown[-1] == f"help: {place}, or `kd explain invalid_config`"


def test_kd_explain_prints_an_entry_and_lists_the_codes() -> None:
    from services.terminal.cli import app

    shown = CliRunner().invoke(app, ["explain", "in-use"])
    assert shown.exit_code == 0 and shown.stdout.startswith("### `in_use`")
    listed = CliRunner().invoke(app, ["explain"])
    assert listed.stdout.split() == list_codes()
    unknown = CliRunner().invoke(app, ["explain", "nonsense"])
    assert unknown.exit_code == 2 and "neither a code of an error nor a field" in unknown.stderr


def test_kd_explain_describes_a_field_of_a_job_and_those_of_a_section() -> None:
    from services.terminal.cli import app

    shown = CliRunner().invoke(app, ["explain", "cache.threshold"])
    first, meaning, *_ = shown.stdout.splitlines()
    assert first == "cache.threshold: number ≥ 0.001, ≤ 0.5; default 0.04"
    assert meaning.startswith("    Profiles threshold and tempered:")
    listed = json.loads(CliRunner().invoke(app, ["explain", "cache", "--json"]).stdout)
    assert [each["place"] for each in listed][:2] == ["cache", "cache.profile"]
