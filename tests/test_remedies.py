"""Every error and every problem of a field says what to do about it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

import pytest

from bench.support.paths import ROOT
from cache.errors import PotstillError
from services.api.answers.problems import ApiProblem
from tests.support.each import for_each
from tests.support.house.syntax import nodes_of, tree_of

FILES = [
    path.relative_to(ROOT).as_posix()
    for package in ("cache", "kd", "services")
    for path in sorted((ROOT / package).rglob("*.py"))
]

#: The number of the argument that is the remedy, by the class that has it.
PROBLEMS = {"Problem": 2, "ApiProblem": 2}
#: Classes whose remedy is another argument, and one that makes its own of its problems'.
OTHERS = {"Refused": 2, "ConfigError": None}
#: Errors without words, which only lend their code.
NAMELESS = {"PotstillError('')"}


@functools.cache
def list_error_classes() -> dict[str, int | None]:
    """Return the number of the remedy among the arguments of each class of an error."""
    errors = {
        node.name: [getattr(base, "id", "") for base in node.bases]
        for file in FILES
        for node in nodes_of(tree_of(ROOT / file))
        if isinstance(node, ast.ClassDef)
    }
    found: dict[str, int | None] = {"PotstillError": 1}
    while more := {
        name: 1
        for name, bases in errors.items()
        if name not in found and any(base in found for base in bases)
    }:
        found |= more
    return found | PROBLEMS | OTHERS


def without_remedy(tree: ast.AST) -> Iterator[str]:
    """Yield the calls in ``tree`` that make an error whose remedy is missing, or may be empty."""
    for node in nodes_of(tree):
        if not isinstance(node, ast.Call):
            continue
        place = list_error_classes().get(ast.unparse(node.func).rpartition(".")[2])
        if place is None or any(isinstance(each, ast.Starred) for each in node.args):
            continue
        if ast.unparse(node) in NAMELESS:
            continue
        # A call with ** builds an error again from its JSON.
        given = {each.arg: each.value for each in node.keywords}
        remedy = node.args[place] if len(node.args) > place else given.get("remedy")
        if None not in given and (remedy is None or may_be_empty(remedy)):
            yield f"{node.lineno}: {ast.unparse(node)}"


def may_be_empty(remedy: ast.expr) -> bool:
    """Whether an expression is, or in one branch is, the empty text."""
    if isinstance(remedy, ast.IfExp):
        return may_be_empty(remedy.body) or may_be_empty(remedy.orelse)
    return isinstance(remedy, ast.Constant) and not remedy.value


@for_each(FILES)
def test_every_error_has_a_remedy(file: str) -> None:
    assert list(without_remedy(tree_of(ROOT / file))) == []


@pytest.mark.parametrize(
    "code",
    [
        "raise ModelError('It is broken.')",
        "yield Problem('/train', 'it is wrong.')",
        "yield Problem('/train', 'it is wrong.', '')",
        "yield Problem('/train', 'it is wrong.', 'Mend it.' if known else '')",
        "raise ApiProblem(404, 'There is nothing.', slug='nothing')",
        "raise errors.CacheCorrupt(f'{name} differs.')",
    ],
)
def test_an_error_without_a_remedy_is_found(code: str) -> None:
    tree = ast.parse(f"def f():\n    {code}")
    assert len(list(without_remedy(tree))) == 1


def test_the_remedy_is_the_argument_that_is_looked_at() -> None:
    assert {"ModelError", "StoreUnfit", "KeysError"} <= list_error_classes().keys()
    assert PotstillError("what", "to do").remedy == "to do"
    assert ApiProblem(404, "what", "to do").remedy == "to do"
