"""Rules for every line: secrets are compared in constant time, no check is off, loads are pinned.

tests/test_architecture.py bans whole modules and calls: pickle, eval, shells, remote code.
"""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS
from tests.support.each import for_each
from tests.support.house.syntax import nodes_of, tree_of

PACKAGES = ("cache", "kd", "services")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
BIN = Path(sys.executable).parent

#: Files that handle secrets. Elsewhere a token is a piece of text, and a digest that of a file.
HANDLES_SECRETS = [path for path in SOURCES if path.is_relative_to(ROOT / "services")] + [
    ROOT / "kd/capture/remote.py"
]
SECRET_WORDS = {
    "secret",
    "password",
    "passwd",
    "token",
    "apikey",
    "signature",
    "hmac",
    "digest",
    "credential",
    "bearer",
}
SECRET_NAMES = {"api_key", "shown", "credentials", "authorization", "sha256"}

#: Settings that switch a check off.
SWITCHED_OFF = {
    ("verify", False), ("verify_ssl", False), ("check_hostname", False),
    ("trust_remote_code", True), ("follow_redirects", True), ("allow_redirects", True),
    ("allow_credentials", True), ("allow_pickle", True), ("weights_only", False), ("shell", True),
}  # fmt: skip
WEAK_CALLS = {
    "ssl._create_unverified_context", "tempfile.mktemp", "hashlib.md5", "hashlib.sha1",
    "uuid.uuid1", "urllib.request.urlopen", "torch.load", "yaml.load", "yaml.unsafe_load",
    "yaml.full_load", "pickle.loads", "pickle.load", "os.popen", "os.system",
    "xml.etree.ElementTree.parse",
}  # fmt: skip
PINNED_BY = {"revision", "data_files", "state_dict"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def names_secret(node: ast.expr) -> bool:
    """Whether an expression is named like a secret: by its last name, or by a word of that name."""
    inner = node.func if isinstance(node, ast.Call) else node
    name = (
        inner.attr
        if isinstance(inner, ast.Attribute)
        else inner.id
        if isinstance(inner, ast.Name)
        else ""
    )
    if isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Constant):
        name = str(inner.slice.value)
    if name in ("hexdigest", "digest"):
        return True
    words = name.lower().split("_")
    return name.lower() in SECRET_NAMES or bool(
        {*words} & SECRET_WORDS and words[-1] not in ("count", "length", "file")
    )


def find_leaking_comparisons(tree: ast.AST) -> list[str]:
    """Comparisons of a secret by == or != with anything but a constant.

    The time of such a comparison shows how much of a guess is right.
    """
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in nodes_of(tree)
        if isinstance(node, ast.Compare)
        and any(isinstance(operator, ast.Eq | ast.NotEq) for operator in node.ops)
        and any(map(names_secret, (node.left, *node.comparators)))
        and not any(isinstance(side, ast.Constant) for side in (node.left, *node.comparators))
    ]


def find_disabled_checks(tree: ast.AST) -> list[str]:
    """Arguments, entries and attributes that turn a check off, and calls that check nothing."""
    found = [
        f"{line}: {name}={value}"
        for line, name, value in settings_in(tree)
        if (name, value) in SWITCHED_OFF
    ]
    calls = (node for node in nodes_of(tree) if isinstance(node, ast.Call))
    return found + [
        f"{call.lineno}: {ast.unparse(call.func)}"
        for call in calls
        if ast.unparse(call.func) in WEAK_CALLS
    ]


def settings_in(tree: ast.AST) -> Iterator[tuple[int, str, object]]:
    """Every named constant: an argument, an entry of a mapping, an attribute or a variable."""
    for node in nodes_of(tree):
        if isinstance(node, ast.keyword) and node.arg and isinstance(node.value, ast.Constant):
            yield node.value.lineno, node.arg, node.value.value
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                    yield key.lineno, str(key.value), value.value
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                yield node.lineno, ast.unparse(target).rpartition(".")[2], node.value.value


def name_callee(call: ast.Call) -> str:
    """The name of what a call calls; of ``partial(f, ...)`` that of ``f``."""
    name = ast.unparse(call.func).rpartition(".")[2]
    return ast.unparse(call.args[0]).rpartition(".")[2] if name == "partial" and call.args else name


def find_unpinned_loads(tree: ast.AST) -> list[str]:
    """Loads that might take the newest version from the hub: no folder, and no revision."""
    return [
        f"{call.lineno}: {ast.unparse(call)[:80]}"
        for call in nodes_of(tree)
        if isinstance(call, ast.Call)
        and name_callee(call) in ("from_pretrained", "load_dataset", "snapshot_download")
        and not PINNED_BY & {keyword.arg for keyword in call.keywords}
        and not (
            call.args and re.search(r"(^|_|\.|\()(folder|path|dir)\b", ast.unparse(call.args[0]))
        )
    ]


@for_each(HANDLES_SECRETS, name_of)
def test_secrets_are_compared_in_constant_time(path: Path) -> None:
    assert find_leaking_comparisons(tree_of(path)) == []


@for_each(SOURCES, name_of)
def test_no_check_is_switched_off(path: Path) -> None:
    assert find_disabled_checks(tree_of(path)) == []


@for_each(SOURCES, name_of)
def test_nothing_is_loaded_without_a_pinned_revision(path: Path) -> None:
    assert find_unpinned_loads(tree_of(path)) == []


@pytest.mark.parametrize(
    "code",
    [
        "key.sha256 == other",
        "if request.headers['token'] != expected: pass",
        "settings.api_key == shown",
        "hashlib.sha256(x).hexdigest() == expected",
        "webhook_signature == computed",
        "a < b == password",
    ],
)
def test_a_comparison_that_leaks_is_found(code: str) -> None:
    assert find_leaking_comparisons(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "hmac.compare_digest(token, expected)",
        "token is None",
        "mode == 'token'",
        "bytes_per_tokens == 3 * x",
        "password == ''",
        "key_file == other_file",
    ],
)
def test_other_comparisons_are_not_found(code: str) -> None:
    assert find_leaking_comparisons(ast.parse(code)) == []


@pytest.mark.parametrize(
    "code",
    [
        "httpx.get(url, verify=False)",
        "f(**{'trust_remote_code': True})",
        "context.check_hostname = False",
        "trust_remote_code = True",
        "Client(follow_redirects=True)",
        "torch.load(path, weights_only=True)",
        "hashlib.md5(data)",
        "ssl._create_unverified_context()",
    ],
)
def test_a_check_that_is_switched_off_is_found(code: str) -> None:
    assert find_disabled_checks(ast.parse(code))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("AutoModel.from_pretrained(name)", 1),
        ("AutoModel.from_pretrained(folder)", 0),
        ("AutoModel.from_pretrained(name, revision=revision)", 0),
        ("partial(snapshot_download, name)", 1),
        ("partial(snapshot_download, name, revision=revision)", 0),
        ("load_dataset('org/set')", 1),
        ("load_dataset('parquet', data_files=path)", 0),
    ],
)
def test_a_load_that_is_not_pinned_is_found(code: str, found: int) -> None:
    assert len(find_unpinned_loads(ast.parse(code))) == found


# What other tools find

#: The rules of bandit that are left out, and why.
SKIPPED_RULES = {
    "B101": "assert states an invariant here; nothing is decided by one (ruff S101)",
    "B105": "tokens are pieces of text here; ruff's S105 is the same rule, with exceptions",
    "B311": "random serves back-off and seeds; keys come from the module secrets",
    "B404": "subprocesses start without a shell, from lists (B602, B604 to B607 are on)",
    "B603": "the same",
    "B615": "test_nothing_is_loaded_without_a_pinned_revision is stricter and allows folders",
}


@pytest.mark.long
def test_bandit_finds_nothing() -> None:
    command = [BIN / "bandit", "-q", "-r", *PACKAGES, "-s", ",".join(SKIPPED_RULES), "-f", "json"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    report = json.loads(done.stdout)
    assert report["errors"] == [] and report["metrics"]["_totals"]["loc"] > 10_000
    assert [
        f"{each['filename']}:{each['line_number']} {each['test_id']}" for each in report["results"]
    ] == []


def test_bandit_would_find_something(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import pickle\npickle.loads(b'')\n")
    command = [
        BIN / "bandit",
        "-q",
        "-s",
        ",".join(SKIPPED_RULES),
        "-f",
        "json",
        tmp_path / "bad.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert {each["test_id"] for each in json.loads(done.stdout)["results"]} >= {"B301", "B403"}


def test_the_bill_of_materials_names_what_is_installed(tmp_path: Path) -> None:
    """As `make release` writes it: CycloneDX, with every dependency and its version.

    The program's check of its own output against its own schema takes half a minute.
    """
    target = tmp_path / "sbom.json"
    options = [
        "--no-validate",
        "--pyproject",
        "pyproject.toml",
        "--output-reproducible",
        "--of",
        "JSON",
        "-o",
        target,
    ]
    command = [BIN / "cyclonedx-py", "environment", *options, sys.executable]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    bill = json.loads(target.read_text(encoding="utf-8"))
    assert bill["bomFormat"] == "CycloneDX" and bill["metadata"]["component"]["name"] == "potstill"
    versions = {canonicalize_name(each["name"]): each["version"] for each in bill["components"]}
    lines = re.findall(
        r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    pins = {canonicalize_name(name): version for name, version in lines}
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "dependencies"
    ]
    names = [canonicalize_name(Requirement(text).name) for text in needed]
    assert {name: versions.get(name) for name in names} == {name: pins[name] for name in names}


def reachable(host: str) -> bool:
    try:
        socket.create_connection((host, 443), timeout=3).close()
    except OSError:
        return False
    return True


def test_no_pinned_version_has_a_known_hole() -> None:
    """Compares with the database of OSV if KD_AUDIT=1 is set and the database can be reached."""
    if os.environ.get("KD_AUDIT") != "1":
        pytest.skip("asks a service on the internet about every dependency: KD_AUDIT=1 runs it")
    if not reachable("api.osv.dev"):
        pytest.skip("the database of vulnerabilities (api.osv.dev) cannot be reached")
    options = ["--no-deps", "--disable-pip", "-s", "osv", "--progress-spinner", "off"]
    command = [BIN / "pip-audit", *options, "-r", "constraints.txt"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
