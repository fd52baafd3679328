"""The wheel: what is in it, the demo of an installed one, and `kd up` without a worker's packages.

An environment of its own gets the wheel, and links to the packages that pip would install with it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS, wait_until
from cache.errors import HELP_PAGE
from kd.config.jobfile import load_config
from kd.preflight.named_paths import list_relative_paths
from services.process.extras import find_missing_packages
from services.terminal.commands.demo import EXAMPLE
from tests.support.checkout import TEXT, make_small
from tests.support.documents import DOCUMENTS, list_all_blocks

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
INCLUDED = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]


def test_the_wheel_carries_all_that_the_demo_s_job_names_and_the_help() -> None:
    assert {f"services/{source}" for source in INCLUDED} == set(INCLUDED.values())
    assert all((ROOT / source).exists() for source in INCLUDED)
    named = [each.name for each in list_relative_paths(load_config(ROOT / EXAMPLE), ROOT)]
    assert len(named) == 4
    assert {*named, str(EXAMPLE), HELP_PAGE} == set(INCLUDED)


def test_the_documents_name_no_file_of_the_example_that_kd_example_does_not_write() -> None:
    blocks = [block for page in DOCUMENTS for block in list_all_blocks(page)]
    named = {
        name for block in blocks for name in re.findall(r"examples/austen/[\w./-]+", block.text)
    }
    assert {str(EXAMPLE), "examples/austen/teacher"} < named
    assert named <= {source for source in INCLUDED if source.startswith("examples/")}


def test_the_missing_packages_of_an_extra_are_named() -> None:
    assert find_missing_packages("worker") == []
    assert find_missing_packages("nothing") == []
    (harness,) = PROJECT["project"]["optional-dependencies"]["eval"]
    installed = importlib.util.find_spec("lm_eval") is not None
    assert find_missing_packages("eval") == ([] if installed else [Requirement(harness).name])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("hatchling") is None:
        if os.environ.get("CI"):
            pytest.fail("hatchling is not installed")
        pytest.skip("hatchling is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def list_distributions(name: str, extras: frozenset[str], found: set[str]) -> set[str]:
    """The names of an installed distribution and of all that it requires with these extras."""
    for requirement in map(Requirement, importlib.metadata.requires(name) or []):
        marker = requirement.marker
        wanted = marker is None or any(marker.evaluate({"extra": each}) for each in ("", *extras))
        if wanted and requirement.name not in found:
            found.add(requirement.name)
            list_distributions(requirement.name, frozenset(requirement.extras), found)
    return found


def make_environment(folder: Path, wheel: Path, *extras: str) -> Path:
    """Install the wheel with these extras into a new environment; return its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for name in list_distributions("potstill", frozenset(extras), set()) - {"potstill"}:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    python = str(folder / "bin" / "python")
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-index",
        "--no-deps",
    ]
    subprocess.run([*install, "-q", str(wheel)], check=True, capture_output=True)
    return folder / "bin"


def make_plain_environment() -> dict[str, str]:
    """The variables of this process without those that would lead to this checkout."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KD_")}
    plain.pop("PYTHONPATH", None)
    return plain | {"NO_COLOR": "1"}


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment that has a job store, and not the packages of a worker."""
    return make_environment(tmp_path_factory.mktemp("bare") / "env", wheel, "local")


@pytest.fixture
def up(bare: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [str(bare / "kd"), "up", "--port", "0"],
        cwd=tmp_path,
        env=make_plain_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.terminate()
    process.communicate(timeout=PATIENCE_SECONDS)


@pytest.mark.slow
@pytest.mark.usefixtures("_server_binary")
def test_up_without_a_worker_s_packages_says_so_once(
    up: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert up.stdout is not None
    found = re.search(r"http://\S+", up.stdout.readline())
    assert found, up.communicate()
    workers = f"{found.group()}/workers"
    assert httpx.get(workers, trust_env=False).json() == {"data": []}
    logs = tmp_path / "potstill-data" / "logs"
    # A process has its log from its start on, even if it ends at once.
    assert [log.name for log in logs.iterdir() if "worker" in log.name] == []
    assert (logs / "api.log").is_file()
    wait_until(lambda: httpx.get(f"{found.group()}/readyz", trust_env=False).is_success)
    up.terminate()
    said = [
        line
        for line in up.communicate(timeout=PATIENCE_SECONDS)[1].splitlines()
        if "worker" in line
    ]
    assert len(said) == 1
    assert said[0].startswith("No worker runs here: ")
    assert " datasets, " in said[0]
    assert " torch, " in said[0]
    assert said[0].endswith("pip install 'potstill[worker]' installs what a worker needs.")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["demo", "worker"])
def test_what_needs_a_worker_s_packages_says_so(command: str, bare: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(bare / "kd"), command],
        cwd=tmp_path,
        env=make_plain_environment() | {"KD_REDIS_URL": "redis://127.0.0.1:9"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "pip install 'potstill[worker]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("_server_binary")
@pytest.mark.timeout(900)
def test_the_demo_of_a_wheel_runs_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    # As the tutorial names it: everything of the package then lies below a hidden folder.
    programs = make_environment(tmp_path / ".venv", wheel, "local", "worker")
    (example,) = programs.parent.glob("lib/python3*/site-packages/services/examples/austen")
    job = example / "job.yaml"
    job.write_text(make_small(job.read_text(encoding="utf-8")), encoding="utf-8")
    for text in (example / "text").iterdir():
        text.write_text(text.read_text(encoding="utf-8")[:TEXT], encoding="utf-8")
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        [str(programs / "kd"), "demo"],
        cwd=empty,
        env=make_plain_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "status: succeeded" in done.stdout
    assert [path.name for path in empty.iterdir()] == ["potstill-data"]
