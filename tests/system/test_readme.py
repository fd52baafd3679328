"""README.md and docs/ against the repository: job files, addresses, paths, settings.

Their commands are run by test_readme_commands.py.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.support.paths import ROOT
from kd.config.job import JobConfig
from kd.config.jobfile import load_config, parse_config
from services.reference import PAGES, render_page
from services.settings import Settings
from tests.support.documents import (
    DOCUMENTS,
    README,
    list_blocks,
    list_command_lines,
    read_document,
    split_commands,
)
from tests.support.each import for_each

README_TEXT = read_document(README)


def blocks(language: str) -> list[str]:
    return [block.text for block in list_blocks(README, language)]


def commands_named(*names: str) -> list[list[str]]:
    lines = [line for block in list_blocks(README, "bash") for line in list_command_lines(block)]
    commands = [words for line in lines for words in split_commands(line)]
    return [words for words in commands if Path(words[0]).name in names]


def identifier(words: Any) -> str:
    return " ".join(words) if isinstance(words, list) else str(words)


def test_the_readme_begins_with_the_name() -> None:
    assert README_TEXT.startswith("# Potstill\n")


def test_nothing_is_claimed_of_systems_on_which_no_test_runs() -> None:
    """The tests run on Linux, on a CPU and on NVIDIA's GPUs."""
    # The name of the system has a capital; ``windows`` is an order of the training data.
    others = re.compile(r"(?i:\b(macos|os x|mps|rocm|tpu)\b)|\bWindows\b")
    claims = [
        (document.name, line)
        for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]
        for line in read_document(document).splitlines()
        if others.search(line)
    ]
    assert claims == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    systems = [each for each in project["classifiers"] if each.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]


# Commands


def test_the_two_commands_are_there() -> None:
    targets = [word for command in commands_named("make") for word in command[1:]]
    assert {"demo", "test"} <= set(targets)


@pytest.mark.parametrize("command", commands_named("cp", "cat"), ids=identifier)
def test_copied_files_exist(command: list[str]) -> None:
    assert (ROOT / command[1]).exists()


# The API


@functools.cache
def routes() -> list[tuple[str, re.Pattern[str]]]:
    from services.api.app import create_app
    from services.settings import Settings

    paths = create_app(Settings(redis_url="redis://127.0.0.1:1/0")).openapi()["paths"]
    return [
        (method.upper(), re.compile(re.sub(r"\{\w+\}", "[^/]+", path)))
        for path in paths
        for method in paths[path]
    ]


def after(command: list[str], *options: str) -> list[str]:
    """The words that directly follow one of ``options``."""
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


@pytest.mark.parametrize(
    "body", [body for command in commands_named("curl") for body in body_of(command)]
)
def test_curl_bodies_are_jobs(body: str) -> None:
    if body.startswith("@"):
        assert body == "@-" or (ROOT / body[1:]).exists()
    else:
        parse_config(json.loads(body))


def test_the_documents_show_every_route() -> None:
    from services.api.app import create_app
    from services.settings import Settings

    paths = create_app(Settings(redis_url="redis://127.0.0.1:1/0")).openapi()["paths"]
    text = README_TEXT + (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    nameless = re.sub(r"\{\w+\}|\$\w+", "{}", text)
    assert [path for path in paths if re.sub(r"\{\w+\}", "{}", path) not in nameless] == []


# Job files


def test_the_readme_shows_a_job() -> None:
    assert [parse_config(yaml.safe_load(block)) for block in blocks("yaml")]


@pytest.mark.parametrize(
    "path",
    sorted(
        path
        for path in (ROOT / "examples").rglob("*.yaml")
        if "kind" in path.read_text(encoding="utf-8") and "deploy" not in path.parts
    ),
    ids=lambda path: path.name,
)
def test_example_jobs_parse(path: Path) -> None:
    load_config(path)


# Settings


@pytest.mark.parametrize("page", PAGES)
def test_a_reference_page_matches_the_descriptions(page: str) -> None:
    written = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert written == render_page(page), f"docs/{page} is out of date: run `make docs`"


def test_every_setting_of_the_operator_has_its_variable_on_the_page() -> None:
    written = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `KD_([A-Z_]+)` \|", written, re.MULTILINE))
    assert {name.lower() for name in named} == set(Settings.model_fields) - {"child_module"}


def field_names(schema: dict[str, Any]) -> Iterator[str]:
    for part in [schema, *schema["$defs"].values()]:
        yield from part.get("properties", {})


@for_each(sorted(set(field_names(JobConfig.model_json_schema()))))
def test_configuration_lists_every_field(name: str) -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert f"| `{name}` |" in written


def settings_in_the_prose() -> list[tuple[str, str]]:
    """Section and field of each ``section.field`` in backticks; file names are left out."""
    found = re.findall(r"`([a-z]+)\.([a-z_0-9]+)`", README_TEXT)
    return sorted(
        {(section, field) for section, field in found if section in JobConfig.model_fields}
    )


@pytest.mark.parametrize(("section", "field"), settings_in_the_prose())
def test_settings_in_the_prose_exist(section: str, field: str) -> None:
    assert field in JobConfig.model_json_schema()["$defs"][f"{section.title()}Config"]["properties"]


# The list of levers


def fields(*sections: str) -> set[str]:
    roots = {name: field.annotation for name, field in JobConfig.model_fields.items()}
    found = set()
    for section in sections:
        kind = next(
            each
            for each in getattr(roots[section], "__args__", [roots[section]])
            if each is not type(None)
        )
        found |= {f"{section}.{name}" for name in kind.model_fields}
    return found


def test_every_lever_is_listed_in_the_configuration() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    listed = page.partition("## Levers")[2].partition("\n## ")[0]
    levers = [
        f"{section}.{name}"
        for section, names in re.findall(r"^- \[`(\w+)`\]\(#[\w-]+\): (.+)$", listed, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    ]
    wanted = fields("loss", "train", "checks", "evaluation", "search") | {
        "student.from_teacher",
        "student.lora",
        "teacher.parallel",
        "teacher.quantization",
    }
    assert len(levers) == len(set(levers))
    assert wanted - set(levers) == set()
