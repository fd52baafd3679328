"""Build a release into dist/: wheel, source archive, bill of materials, images, SHA256SUMS.

    python .ci/release.py [--images auto|yes|no]

pyproject.toml holds the version. README.md, CHANGELOG.md, docker-compose.yml and the API must agree
with it, the top section of the changelog must be that of the version, and the tree must be clean.
``--images auto`` leaves the images out where no Docker engine answers, and says so; ``yes`` makes
that an error. ``dist/`` is replaced at the end, so that it holds one whole release or the last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ("api", "worker")
#: How each file names the version; every match counts.
MENTIONS = {
    "README.md": r"^This is version (\S+);",
    "CHANGELOG.md": r"\A.*?^## \[?(\d[^]\s]*)",
    ".env.example": r"^POTSTILL_TAG=(\S+)",
    "docker-compose.yml": r"image: potstill-\w+:\$\{POTSTILL_TAG:-([^}]+)\}",
}
#: The first section of the changelog, and its date.
TOP_SECTION = re.compile(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", re.MULTILINE)


class Refused(Exception):
    """The release is not built."""


def read_version(root: Path = ROOT) -> str:
    """The version of the project, from the one place that holds it."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["version"])


def find_versions(root: Path = ROOT) -> dict[str, set[str]]:
    """Each place -> the versions that it names. The API's is what its code answers."""
    found = {"pyproject.toml": {read_version(root)}}
    for name, pattern in MENTIONS.items():
        text = (root / name).read_text(encoding="utf-8")
        found[name] = set(re.findall(pattern, text, re.MULTILINE | re.DOTALL)) or {"no version"}
    program = "from kd.python.version import read_version; print(read_version())"
    found["the API"] = {run([sys.executable, "-c", program], root).strip()}
    return found


def find_problems(root: Path = ROOT) -> list[str]:
    """Everything that keeps this tree from being released."""
    version = read_version(root)
    problems = [
        f"{place} names {', '.join(sorted(found))}, and pyproject.toml {version}"
        for place, found in find_versions(root).items()
        if found != {version}
    ]
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    top = TOP_SECTION.search(changelog)
    if top is None or top[1] != version:
        name = top[1] if top else "missing"
        problems.append(f"the top section of CHANGELOG.md is {name}: give it the name [{version}]")
    elif top[2] is None:
        problems.append(f"the section [{version}] of CHANGELOG.md has no date: add ' - YYYY-MM-DD'")
    changed = run(["git", "status", "--porcelain"], root).splitlines()
    if changed:
        problems.append(f"the tree is not clean: {', '.join(line[3:] for line in changed[:5])}")
    return problems


def run(command: list[str], folder: Path = ROOT, **environment: str) -> str:
    """Run a program and return its output. Raises ``Refused`` with what it said if it fails."""
    env = os.environ | {"PYTHONPATH": str(folder)} | environment
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise Refused(f"{' '.join(command[:4])} failed: {said}")
    return done.stdout


def build_packages(root: Path, folder: Path, version: str) -> None:
    """Build wheel and source archive; the time of the commit makes their bytes repeatable."""
    moment = run(["git", "log", "-1", "--format=%ct"], root).strip()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist"]
    run([*command, "-d", str(folder)], root, SOURCE_DATE_EPOCH=moment)
    with zipfile.ZipFile(folder / f"potstill-{version}-py3-none-any.whl") as wheel:
        wheel_says = wheel.read(f"potstill-{version}.dist-info/METADATA").decode()
    with tarfile.open(folder / f"potstill-{version}.tar.gz") as archive:
        file = archive.extractfile(f"potstill-{version}/PKG-INFO")
        archive_says = "" if file is None else file.read().decode()
    for name, text in (("wheel", wheel_says), ("source archive", archive_says)):
        if f"\nVersion: {version}\n" not in text:
            raise Refused(f"the {name} is not of version {version}")


def write_bill(root: Path, target: Path) -> None:
    """Write the CycloneDX bill of materials of this environment."""
    program = str(Path(sys.executable).with_name("cyclonedx-py"))
    options = ["--pyproject", "pyproject.toml", "--output-reproducible", "--of", "JSON"]
    run([program, "environment", *options, "-o", str(target), sys.executable], root)


def find_missing_engine() -> str | None:
    """Why no image can be built here; None where a Docker engine answers."""
    try:
        done = subprocess.run(
            ["docker", "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        return "docker is not installed"
    except subprocess.TimeoutExpired:
        return "the Docker engine does not answer"
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def build_images(root: Path, folder: Path, version: str) -> None:
    """Build and try the images; images.json has their names and ids."""
    commit = run(["git", "rev-parse", "HEAD"], root).strip()
    built = {}
    for target in IMAGES:
        name = f"potstill-{target}:{version}"
        labels = {"version": version, "revision": commit}
        flags = [f"--label=org.opencontainers.image.{key}={text}" for key, text in labels.items()]
        run(["docker", "build", "--target", target, "--tag", name, *flags, "."], root)
        says = run(["docker", "run", "--rm", "--network=none", name, "kd", "--version"]).strip()
        if says != version:
            raise Refused(f"the image {name} says that it is version {says}")
        built[name] = run(["docker", "image", "inspect", "--format", "{{.Id}}", name]).strip()
    (folder / "images.json").write_text(json.dumps(built, indent=1) + "\n", encoding="utf-8")


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS of all files, as ``sha256sum --check`` reads it."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
    ]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="ascii")


def release(root: Path, images: str) -> Path:
    """Build the release of ``root``; returns its folder. Raises ``Refused``."""
    if problems := find_problems(root):
        raise Refused("; ".join(problems))
    missing = None if images == "no" else find_missing_engine()
    if images == "yes" and missing:
        raise Refused(f"the images cannot be built: {missing}")
    version = read_version(root)
    final, folder = root / "dist", root / "dist" / ".tmp-release"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build_packages(root, folder, version)
    write_bill(root, folder / f"potstill-{version}.cdx.json")
    if images == "no" or missing:
        print(f"without images: {missing or 'IMAGES=no'}")
    else:
        build_images(root, folder, version)
    write_sums(folder)
    for path in final.iterdir():
        if path != folder:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in sorted(folder.iterdir(), key=lambda path: path.name == "SHA256SUMS"):
        path.rename(final / path.name)
    folder.rmdir()
    return final


def main() -> int:
    """Build, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", choices=("auto", "yes", "no"), default="auto")
    options = parser.parse_args()
    try:
        folder = release(ROOT, options.images)
    except Refused as refusal:
        print(f"not released: {refusal}", file=sys.stderr)
        return 1
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size:>12} {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
