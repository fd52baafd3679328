"""``import kd``: quick, without torch, every name in its place and on the page."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys

import pytest

import kd
from bench.support.paths import ROOT

SOURCE = ast.parse((ROOT / "kd" / "__init__.py").read_text(encoding="utf-8"))
#: Imports kd, and says which of our modules and which heavy packages came with it.
PROGRAM = """
import json, sys
import kd
names = dir(kd)
ours = sorted(name for name in sys.modules if name.startswith(("kd.", "cache", "services")))
light = "pydantic" not in sys.modules
found = kd.distill, kd.load_job, kd.StudentResult
heavy = sorted({"torch", "transformers", "datasets", "zarr", "matplotlib"} & {*sys.modules})
print(json.dumps([ours, heavy, light, names]))
"""


def test_the_import_loads_no_room_and_a_name_loads_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ours, heavy, light, names = json.loads(done.stdout)
    assert ours == [] and heavy == [] and light
    assert set(kd.__all__) <= set(names)


def test_every_public_name_resolves() -> None:
    assert sorted(kd.__all__) == kd.__all__
    for name in kd.__all__:
        found = getattr(kd, name)
        assert found.__module__.startswith("kd.") and inspect.getdoc(found)
    with pytest.raises(AttributeError, match="module 'kd' has no attribute 'distil'"):
        kd.distil  # type: ignore[attr-defined]  # noqa: B018


def test_the_table_agrees_with_the_imports_for_types_and_with_all() -> None:
    (block,) = [each for each in SOURCE.body if isinstance(each, ast.If)]
    imported = {
        alias.name: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert imported == kd._MODULES
    assert set(kd.__all__) == set(kd._MODULES)


def test_the_page_has_every_public_name() -> None:
    written = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert all(f"### kd.{name}\n" in written for name in kd.__all__)


@pytest.mark.parametrize("package", ["cache", "kd"])
def test_the_packages_say_that_they_have_types(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
