"""One place holds the version, all others agree, and `make release` builds it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from fastapi.testclient import TestClient

from bench.support.paths import ROOT
from kd.python.version import read_version
from services.api.app import create_app
from services.settings import Settings
from tests.support.images import SERVICES

PROGRAM = ".ci/release.py"
#: What a release reads.
PARTS = (
    ".ci", ".env.example", ".gitignore", "CHANGELOG.md", "LICENSE", "Makefile", "README.md",
    "cache", "constraints.txt", "docker-compose.yml", "docs/troubleshooting.md", "examples/austen",
    "kd", "pyproject.toml", "services",
)  # fmt: skip
PLACES = {
    "pyproject.toml", "README.md", "CHANGELOG.md", ".env.example", "docker-compose.yml", "the API",
}  # fmt: skip


def load_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = load_program()


@pytest.mark.long
def test_readme_changelog_images_and_api_name_the_version() -> None:
    assert release.find_versions() == {place: {read_version()} for place in PLACES}
    app = create_app(Settings(redis_url="redis://127.0.0.1:9"))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert client.get("/version").json()["version"] == read_version()
        assert client.get("/openapi.json").json()["info"]["version"] == read_version()


def test_the_images_of_the_composition_have_the_version_as_their_tag() -> None:
    tags = {service["image"] for name, service in SERVICES.items() if name != "redis"}
    default = f"${{POTSTILL_TAG:-{read_version()}}}"
    assert tags == {f"potstill-api:{default}", f"potstill-worker:{default}"}


def test_no_identity_contains_the_version() -> None:
    """A new version must find the caches and the checkpoints of the version before."""
    users = {
        path.relative_to(ROOT).as_posix()
        for room in ("cache", "kd")
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"read_version|importlib.metadata|metadata\.version", path.read_text("utf-8"))
    }
    # Ranks that torchrun has started compare their versions, and make no identity of them.
    assert users == {"kd/python/version.py", "kd/rank.py"}


def git(folder: Path, *words: str) -> None:
    names = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of its own with what a release reads, all committed."""
    folder = tmp_path_factory.mktemp("release") / "potstill"
    leave_out = shutil.ignore_patterns("__pycache__")
    for name in PARTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=leave_out)
        else:
            shutil.copy(ROOT / name, folder / name)
    changelog = folder / "CHANGELOG.md"  # a release is made where nothing is unreleased
    released = re.sub(
        r"## \[Unreleased\].*?(?=## \[)", "", changelog.read_text("utf-8"), flags=re.S
    )
    changelog.write_text(released, encoding="utf-8")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "everything")
    return folder


def run_release(folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, *flags],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.long
def test_a_release_holds_packages_bill_and_sums_that_are_right(
    original: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "potstill"
    shutil.copytree(original, folder)
    (folder / "dist").mkdir()
    (folder / "dist" / "of-the-last-release").touch()
    done = run_release(folder, "--images", "no")
    assert done.returncode == 0, done.stderr
    assert "without images: IMAGES=no" in done.stdout
    version = read_version()
    names = {
        f"potstill-{version}-py3-none-any.whl",
        f"potstill-{version}.tar.gz",
        f"potstill-{version}.cdx.json",
    }
    assert {path.name for path in (folder / "dist").iterdir()} == {*names, "SHA256SUMS"}
    check = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"],
        cwd=folder / "dist",
        capture_output=True,
        text=True,
    )
    assert check.stdout.count(": OK") == len(names), check.stderr
    bill = json.loads((folder / "dist" / f"potstill-{version}.cdx.json").read_text())
    component = bill["metadata"]["component"]
    assert (component["name"], component["version"]) == ("potstill", version)
    with zipfile.ZipFile(folder / "dist" / f"potstill-{version}-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path / "installed")
    says = "from kd.python.version import read_version; print(read_version())"
    installed = subprocess.run(
        [sys.executable, "-P", "-c", says],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert installed.stdout.strip() == version


def replace_in(name: str, before: str, after: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text(encoding="utf-8")
        assert before in text
        (folder / name).write_text(text.replace(before, after, 1), encoding="utf-8")

    return change


VERSION = read_version()
FAULTS = {
    "README.md names 9.9.9": replace_in("README.md", f"version {VERSION};", "version 9.9.9;"),
    "docker-compose.yml names": replace_in("docker-compose.yml", f":-{VERSION}", ":-9.9.9"),
    "CHANGELOG.md names 9.9.9": replace_in("CHANGELOG.md", f"[{VERSION}]", "[9.9.9]"),
    "the top section of CHANGELOG.md is Unreleased": replace_in(
        "CHANGELOG.md", f"## [{VERSION}]", f"## [Unreleased]\n\n## [{VERSION}]"
    ),
    "has no date": lambda folder: (folder / "CHANGELOG.md").write_text(
        re.sub(r"(## \[\S+\]) - \S+", r"\1", (folder / "CHANGELOG.md").read_text("utf-8"), count=1),
        encoding="utf-8",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("complaint", FAULTS)
def test_a_place_that_disagrees_is_named_and_nothing_is_built(
    complaint: str, original: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "potstill"
    shutil.copytree(original, folder)
    FAULTS[complaint](folder)
    git(folder, "commit", "-qam", "a fault")
    done = run_release(folder, "--images", "no")
    assert done.returncode == 1
    assert complaint in done.stderr
    assert not (folder / "dist").exists()


@pytest.mark.long
def test_a_dirty_tree_is_refused(original: Path, tmp_path: Path) -> None:
    folder = tmp_path / "potstill"
    shutil.copytree(original, folder)
    (folder / "more.py").touch()
    done = run_release(folder, "--images", "no")
    assert (done.returncode, "the tree is not clean: more.py" in done.stderr) == (1, True)


def test_images_that_were_asked_for_need_an_engine(original: Path, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "git").symlink_to(shutil.which("git") or "git")
    done = run_release(original, "--images", "yes", PATH=str(programs))
    assert done.returncode == 1
    assert "the images cannot be built: docker is not installed" in done.stderr
