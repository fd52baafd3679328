"""What README.md and docs/ say, held against the repository: commands, job files, addresses, paths, settings."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kd import reference
from kd.config.job import JobConfig
from kd.jobfile import load_config, parse_config
from services import reference as settings
from services.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else ""
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str, text: str = README) -> list[str]:
    return [body for found, body in FENCE.findall(text) if found == language]


def shell_commands(text: str) -> list[list[str]]:
    """The words of every command in the ``bash`` blocks: continued lines joined, pipes and lists taken apart."""
    commands: list[list[str]] = []
    for block in blocks("bash", text):
        lines = re.sub(r"(^|\s)#\s.*$", "", re.sub(r"\\\n", " ", block), flags=re.MULTILINE)
        lexer = shlex.shlex(lines, posix=True, punctuation_chars=";|&\n")
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
        ends, words = lambda word: set(word) <= set(";|&\n"), list(lexer)
        commands += [list(group) for is_end, group in itertools.groupby(words, ends) if not is_end]
    return [words for command in commands if (words := without_prefix(command))]


def without_prefix(command: list[str]) -> list[str]:
    """A command without a prompt and without the variables that are set for it."""
    while command and (command[0] == "$" or re.match(r"\w+=", command[0])):
        command = command[1:]
    return command


def commands_named(*names: str) -> list[list[str]]:
    return [command for command in shell_commands(README) if Path(command[0]).name in names]


def identifier(words: Any) -> str:
    return " ".join(words) if isinstance(words, list) else str(words)


def test_the_readme_begins_with_the_name() -> None:
    assert README.startswith("# Potstill\n")


# Commands


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_the_two_commands_are_there() -> None:
    targets = [word for command in commands_named("make") for word in command[1:]]
    assert {"demo", "test"} <= set(targets)


@pytest.mark.parametrize("command", commands_named("make"), ids=identifier)
def test_make_targets_exist(command: list[str]) -> None:
    assert {word for word in command[1:] if "=" not in word} <= make_targets()


def kd_help(words: list[str]) -> subprocess.CompletedProcess[str]:
    """``kd`` with these words and ``--help``: a verb or an option that does not exist ends it with status 2."""
    module, function = SCRIPTS["kd"].split(":")
    program = f"import sys; sys.argv[0] = 'kd'; from {module} import {function}; {function}()"
    command = [sys.executable, "-c", program, *words, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", commands_named("kd"), ids=identifier)
def test_kd_verbs_and_options_exist(command: list[str]) -> None:
    done = kd_help([word for word in command[1:] if word != "--help"])
    assert done.returncode == 0, done.stderr


def test_verbs_in_the_prose_exist() -> None:
    """``kd verb`` or ``kd group verb`` in backticks, in any document."""
    text = "".join(path.read_text(encoding="utf-8") for path in [*DOCUMENTS, ROOT / "CHANGELOG.md"])
    verbs = set(re.findall(r"`kd ((?:(?:cache|jobs|keys) )?[a-z]+)[^`]*`", text))
    assert {"cache info", "keys new", "run"} <= verbs
    assert {verb: kd_help(verb.split()).returncode for verb in verbs} == dict.fromkeys(verbs, 0)


@pytest.mark.parametrize("command", [c for c in commands_named("docker") if c[1] == "compose"], ids=identifier)
def test_composed_services_exist(command: list[str]) -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    known = {"docker", "compose", "up", "down", "logs", "ps", "build", "run", "cpu", *services}
    if "run" in command:  # what follows the service is its own command
        command = command[: next(place for place, word in enumerate(command) if word in services) + 1]
    assert {word for word in command if not word.startswith("-")} <= known


@pytest.mark.parametrize("command", commands_named("cp", "cat"), ids=identifier)
def test_copied_files_exist(command: list[str]) -> None:
    assert (ROOT / command[1]).exists()


# The API


def routes() -> list[tuple[str, re.Pattern[str]]]:
    from services.api.app import create_app
    from services.settings import Settings

    paths = create_app(Settings(redis_url="redis://127.0.0.1:1/0")).openapi()["paths"]
    return [(method.upper(), re.compile(re.sub(r"\{\w+\}", "[^/]+", path))) for path in paths for method in paths[path]]


def after(command: list[str], *options: str) -> list[str]:
    """The words that follow any of ``options``."""
    return [word for option, word in itertools.pairwise(command) if option in options]


def body_of(command: list[str]) -> list[str]:
    return after(command, "-d", "--data", "--data-binary", "--json")


def curl_request(command: list[str]) -> tuple[str, str]:
    """Method and path of a ``curl`` command."""
    (url,) = [word for word in command if re.match(r"https?://|(localhost|127\.0\.0\.1)[:/]", word)]
    method = [*after(command, "-X", "--request"), "POST" if body_of(command) else "GET"][0]
    return method, re.sub(r"^(https?://)?[^/]+", "", url).partition("?")[0]


@pytest.mark.parametrize("command", commands_named("curl"), ids=identifier)
def test_curl_addresses_are_routes(command: list[str]) -> None:
    method, path = curl_request(command)
    assert [pattern for verb, pattern in routes() if verb == method and pattern.fullmatch(path)]


@pytest.mark.parametrize("body", [body for command in commands_named("curl") for body in body_of(command)])
def test_curl_bodies_are_jobs(body: str) -> None:
    if body.startswith("@"):
        assert body == "@-" or (ROOT / body[1:]).exists()
    else:
        parse_config(json.loads(body))


def test_the_documents_show_every_route() -> None:
    from services.api.app import create_app
    from services.settings import Settings

    paths = create_app(Settings(redis_url="redis://127.0.0.1:1/0")).openapi()["paths"]
    text = README + (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    nameless = re.sub(r"\{\w+\}|\$\w+", "{}", text)
    assert [path for path in paths if re.sub(r"\{\w+\}", "{}", path) not in nameless] == []


# Job files


def test_the_readme_shows_a_job() -> None:
    jobs = [parse_config(yaml.safe_load(block)) for block in blocks("yaml")]
    assert jobs


@pytest.mark.parametrize(
    "path",
    sorted(path for path in (ROOT / "examples").rglob("*.yaml") if "kind" in path.read_text(encoding="utf-8")),
    ids=lambda path: path.name,
)
def test_example_jobs_parse(path: Path) -> None:
    load_config(path)


# Paths


def file_tree() -> list[Path]:
    """The paths in the ``text`` block under the heading "File tree"; a folder's name ends with a slash.

    A line is box characters or spaces, a name, and perhaps a remark; how far in the name begins is its depth.
    """
    section = re.split(r"^#+ File tree\s*$", README, flags=re.MULTILINE)[-1]
    lines = next(iter(blocks("text", section)), "").splitlines()
    open_folders: list[tuple[int, Path]] = []
    paths = []
    for line in filter(str.strip, lines):
        depth = len(line) - len(line.lstrip(" │├└─"))
        name = line[depth:].split()[0]
        open_folders = [folder for folder in open_folders if folder[0] < depth]
        parent = open_folders[-1][1] if open_folders else ROOT
        path = ROOT if name == "potstill/" else parent / name
        paths.append(path)
        if name.endswith("/"):
            open_folders.append((depth, path))
    return paths


def test_the_file_tree_is_that_of_the_repository() -> None:
    paths = file_tree()
    assert [str(path) for path in paths if not list(path.parent.glob(path.name))] == []
    assert {ROOT / name for name in ("cache", "kd", "services", "tests", "examples", "docs")} <= set(paths)


def links() -> list[Any]:
    found = []
    for document in filter(Path.exists, DOCUMENTS):
        text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", document.read_text(encoding="utf-8")))
        targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:|#", target)]
        found += [pytest.param(document, target, id=f"{document.name}: {target}") for target in targets]
    return found


@pytest.mark.parametrize(("document", "target"), links())
def test_links_lead_somewhere(document: Path, target: str) -> None:
    assert (document.parent / target.partition("#")[0]).exists()


# Settings


@pytest.mark.parametrize(("page", "render"), [("configuration.md", reference.render), ("settings.md", settings.render)])
def test_a_page_of_settings_is_what_the_descriptions_say(page: str, render: Callable[[], str]) -> None:
    written = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert written == render(), f"docs/{page} is out of date: run `make docs`"


def test_every_setting_of_the_operator_is_told_by_its_variable() -> None:
    written = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `KD_([A-Z_]+)` \|", written, re.MULTILINE))
    assert {name.lower() for name in told} == set(Settings.model_fields) - {"child_module"}


def field_names(schema: dict[str, Any]) -> Iterator[str]:
    for part in [schema, *schema["$defs"].values()]:
        yield from part.get("properties", {})


@pytest.mark.parametrize("name", sorted(set(field_names(JobConfig.model_json_schema()))))
def test_configuration_lists_every_field(name: str) -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert f"| `{name}` |" in written


def settings_in_the_prose() -> list[tuple[str, str]]:
    """Section and field of each ``section.field`` in backticks; file names such as ``job.yaml`` are none."""
    found = re.findall(r"`([a-z]+)\.([a-z_0-9]+)`", README)
    return sorted({(section, field) for section, field in found if section in JobConfig.model_fields})


@pytest.mark.parametrize(("section", "field"), settings_in_the_prose())
def test_settings_in_the_prose_exist(section: str, field: str) -> None:
    assert field in JobConfig.model_json_schema()["$defs"][f"{section.title()}Config"]["properties"]


# The table of levers


def levers() -> set[str]:
    """The fields that the table names, dotted; a name without a section has that of the one before it."""
    rows = README.partition("## Levers")[2].partition("\n## ")[0]
    found = set()
    for row in re.findall(r"^\|[^|]*\| *(`[^|]*) *\|", rows, re.MULTILINE):
        section = ""
        for name in re.findall(r"`([^`]+)`", row):
            if name.startswith("kd "):
                continue
            section, name = name.rpartition(".")[::2] if "." in name else (section, name)
            found.add(f"{section}.{name}")
    return found


def fields(*sections: str) -> set[str]:
    roots = {name: field.annotation for name, field in JobConfig.model_fields.items()}
    found = set()
    for section in sections:
        kind = next(each for each in getattr(roots[section], "__args__", [roots[section]]) if each is not type(None))
        found |= {f"{section}.{name}" for name in kind.model_fields}
    return found


def test_every_lever_has_its_line_in_the_readme() -> None:
    wanted = fields("loss", "train", "checks", "evaluation", "search") | {"student.from_teacher", "student.lora"}
    assert wanted - levers() == set()


def test_every_lever_of_the_readme_is_a_field() -> None:
    known = fields("loss", "train", "checks", "evaluation", "search", "student", "data")
    assert {name.replace("data.train[].weight", "data.train") for name in levers()} - known - {
        "data.train[].weight"
    } == set()
