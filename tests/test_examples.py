"""The property tests draw the same examples in every run, and judge no speed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS

PROPERTY = """
from pathlib import Path
from hypothesis import given, strategies as st

@given(st.integers())
def test_something(value: int) -> None:
    with Path("drawn").open("a") as file:
        file.write(f"{value}\\n")
"""


def draw_examples(folder: Path, *flags: str) -> str:
    """The examples that a run of pytest with the conftest of this folder draws."""
    (folder / "test_property.py").write_text(PROPERTY)
    (folder / "drawn").unlink(missing_ok=True)
    # Without the plugins that other tests need: to import them takes seconds.
    plugins = ["-p", "_hypothesis_pytestplugin", "-p", "tests.conftest"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *flags]
    done = subprocess.run(
        [*command, "--rootdir", os.fspath(folder), "-c", "/dev/null", "test_property.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.fspath(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "drawn").read_text()


def test_examples_are_the_same_in_every_run_unless_new_ones_are_asked_for(tmp_path: Path) -> None:
    assert draw_examples(tmp_path) == draw_examples(tmp_path)
    new = "--hypothesis-profile=new"
    assert draw_examples(tmp_path, new) != draw_examples(tmp_path, new)


def test_no_example_fails_because_the_machine_is_slow() -> None:
    for name in ("same", "new"):
        profile = settings.get_profile(name)
        assert profile.deadline is None
        assert HealthCheck.too_slow in profile.suppress_health_check
