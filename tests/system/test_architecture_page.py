"""docs/architecture.md against the tree: its rooms, its paths and the names that it mentions."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from bench.support.paths import ROOT
from tests.support.each import for_each
from tests.support.house.rooms import PAGE, read_rooms
from tests.support.house.syntax import tree_of

PACKAGES = ("cache", "kd", "services")
TOP_FOLDERS = (*PACKAGES, "bench", "tests", "docs", "examples")

#: A path below one of our folders. A diagram may break a path at the end of a line, after a slash.
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(TOP_FOLDERS)})/[\w./-]*")
#: The full name of a module, or of something in it.
FULL_NAME = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)*)`")


def find_module(name: str) -> tuple[Path | None, list[str]]:
    """The file of the longest part of ``name`` that is a module, and the words after that part."""
    words = name.split(".")
    for end in range(len(words), 0, -1):
        base = ROOT.joinpath(*words[:end])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path, words[end:]
    return None, words


def list_names(statements: list[ast.stmt]) -> dict[str, ast.stmt]:
    """The names that ``statements`` define, with the statement of each."""
    names: dict[str, ast.stmt] = {}
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[statement.name] = statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names[statement.target.id] = statement
        elif isinstance(statement, ast.Assign):
            targets = [each for each in statement.targets if isinstance(each, ast.Name)]
            names |= {target.id: statement for target in targets}
    return names


def exists(name: str) -> bool:
    """Whether ``name`` is a module, or a function, class, constant, method or field in one."""
    path, words = find_module(name)
    if path is None:
        return False
    statements = tree_of(path).body
    for word in words:
        found = list_names(statements).get(word)
        if found is None:
            return False
        statements = found.body if isinstance(found, ast.ClassDef) else []
    return True


def list_folders() -> list[str]:
    """Every folder of the packages that holds code, with a slash at its end."""
    files = [
        path
        for package in PACKAGES
        for suffix in ("py", "lua", "js")
        for path in (ROOT / package).rglob(f"*.{suffix}")
        if "vendor" not in path.parts
    ]
    return sorted({f"{path.parent.relative_to(ROOT).as_posix()}/" for path in files})


def test_the_rooms_are_numbered_and_every_row_starts_in_its_own_room() -> None:
    rooms = read_rooms()
    assert [room.number for room in rooms] == list(range(1, len(rooms) + 1))
    strays = [room.name for room in rooms if not room.start.replace("/", ".").startswith(room.name)]
    assert strays == []


@for_each(list_folders())
def test_every_folder_of_code_is_on_the_map(folder: str) -> None:
    room = folder.strip("/").replace("/", ".")
    assert f"`{folder}`" in PAGE or f"| `{room}` |" in PAGE or folder in ("kd/", "services/")


@for_each(sorted(set(PATH.findall(PAGE))))
def test_every_path_on_the_map_exists(path: str) -> None:
    assert (ROOT / path.rstrip(".")).exists()


@for_each(sorted(set(FULL_NAME.findall(PAGE))))
def test_every_name_on_the_map_exists(name: str) -> None:
    assert exists(name)


@pytest.mark.parametrize(
    "name",
    [
        "kd.pipeline.run_everything",
        "kd.no_room",
        "cache.store.Cache.write",
        "kd.errors.Problem.x.y",
    ],
)
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert not exists(name)


@pytest.mark.parametrize(
    "name", ["kd.pipeline", "cache.store.Cache.read", "kd.config.train.Optimizer"]
)
def test_modules_methods_and_types_are_found(name: str) -> None:
    assert exists(name)
