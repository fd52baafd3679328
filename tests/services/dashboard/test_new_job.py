"""The page of a new job in a browser: the form, the YAML beside it, and what the server says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Page, expect

from bench.support.harness import Parts, make_config
from bench.support.paths import ROOT
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config, parse_yaml
from kd.config.templates.filling import list_templates
from tests.support.commands import KD
from tests.support.services.api import inputs, serving, valid, with_keys
from tests.support.services.pages import find_violations, require_fit, take_picture

pytestmark = pytest.mark.long


@pytest.fixture
def page(new_tab: Callable[..., AbstractContextManager[Page]]) -> Iterator[Page]:
    with new_tab(viewport={"width": 1440, "height": 900}) as tab:
        yield tab


def open_form(page: Page, api: Parts, address: str = "new") -> None:
    page.goto(f"{api.settings.server}/{address}")
    expect(page.locator(".columns")).to_be_visible()


def read_yaml(page: Page) -> str:
    return page.get_by_role("textbox", name="The job, as YAML").input_value()


def write_yaml(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="The job, as YAML").fill(text)


def field(page: Page, pointer: str) -> Any:
    """The input of a field, by its pointer; the parts around it are opened."""
    reveal(page, pointer)
    own = f'[data-path="{pointer}"]'
    return page.locator(f"{own} > .entry, {own} > .body > .line > .entry")


def kind(page: Page, pointer: str) -> Any:
    """The choice of a field's kind."""
    reveal(page, pointer)
    return page.locator(f'select[data-kind="{pointer}"]')


def reveal(page: Page, pointer: str) -> None:
    page.evaluate(
        """(pointer) => {
            let outer = document.querySelector(`[data-path="${CSS.escape(pointer)}"]`);
            for (; outer; outer = outer.parentElement) {
                if (outer.tagName === "DETAILS") outer.open = true;
            }
        }""",
        pointer,
    )


def problem_at(page: Page, pointer: str) -> Any:
    return page.locator(f'[data-path="{pointer}"] > .problem')


# ---------------------------------------------------------------------- from a template to a job


def test_a_template_becomes_a_job_and_a_mistake_stands_at_its_field(page: Page, api: Parts) -> None:
    folder = inputs(api.settings.home / "inputs")
    open_form(page, api)
    options = page.locator("#template option").all_text_contents()[1:]
    assert [each.partition(":")[0] for each in options][: len(list_templates())] == list_templates()
    page.select_option("#template", "lora")
    assert yaml.safe_load(read_yaml(page))["teacher"] == {"model": ""}

    field(page, "/teacher/model").fill(folder)
    expect(problem_at(page, "/student/model")).to_contain_text("is empty; give a value.")
    page.locator(".problems").get_by_role("button", name="student.model").click()
    expect(field(page, "/student/model")).to_be_focused()
    field(page, "/student/model").fill(folder)
    field(page, "/data/train/0").fill(f"{folder}/text.txt")
    field(page, "/name").fill("made-by-form")
    field(page, "/train/batch_size").fill("0")
    expect(problem_at(page, "/train/batch_size")).to_contain_text("greater than or equal to 1")
    expect(field(page, "/train/batch_size")).to_have_attribute("aria-invalid", "true")
    # A rule for several fields stands at the field that its text names.
    field(page, "/train/batch_size").fill("")
    field(page, "/train/epochs").fill("2")
    expect(problem_at(page, "/train/max_steps")).to_contain_text("exactly one")
    expect(problem_at(page, "/train/batch_size")).to_have_text("")
    field(page, "/train/max_steps").fill("")
    expect(page.get_by_text("This job would be accepted.")).to_be_visible()
    expect(page.locator(".verdict dt", has_text="Steps")).to_be_visible()

    text = read_yaml(page)
    assert text.startswith("# Adapters of a trained student"), "comments stay"
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("made-by-form")
    made = api.http.get(f"/jobs/{page.url.rpartition('/')[2]}").json()["config"]
    assert made == parse_config(parse_yaml(text)).model_dump(mode="json")
    assert made["train"]["epochs"] == 2 and made["train"]["max_steps"] is None
    assert made["student"]["lora"]["rank"] == 16


def test_typing_yaml_fills_the_form_and_an_unreadable_text_stops_it(page: Page, api: Parts) -> None:
    open_form(page, api)
    body = valid("typed", str(api.settings.home / "inputs"))
    write_yaml(page, json.dumps(body | {"seed": 1, "labels": {"team": "a"}}))
    expect(field(page, "/name")).to_have_value("typed")
    expect(field(page, "/labels/team")).to_have_value("a")
    expect(page.locator(".problems")).to_contain_text("seed line 1 unknown key 'seed'")
    write_yaml(page, "name: [")
    expect(page.locator("#yaml-problem")).to_contain_text("Line 1")
    expect(field(page, "/name")).to_be_disabled()
    expect(page.get_by_role("button", name="Create")).to_be_disabled()
    write_yaml(page, "name: back\n")
    expect(field(page, "/name")).to_have_value("back")
    expect(field(page, "/name")).to_be_enabled()
    expect(field(page, "/labels/team")).to_have_count(0)


def test_a_change_keeps_comments_and_fields_that_the_form_does_not_know(
    page: Page, api: Parts
) -> None:
    open_form(page, api)
    text = (
        "# mine\nname: a   # the name\nlater: {kept: [1, 2]}\ntrain:\n"
        "    learning_rate: 3.0e-4     # slow\n    # how long\n    max_steps: 5\n"
    )
    write_yaml(page, text)
    field(page, "/train/learning_rate").fill("1e-7")
    field(page, "/train/batch_size").fill("4")
    field(page, "/cache/threshold").fill("0.1")
    field(page, "/loss/alpha").fill("1")
    kind(page, "/loss/temperature").select_option(label="learned temperature")
    field(page, "/loss/temperature/max").fill("3")
    kept = "# mine\nname: a # the name\nlater: {kept: [1, 2]}\ntrain:\n"
    assert read_yaml(page) == (
        f"{kept}  learning_rate: 1.0e-7 # slow\n  # how long\n  max_steps: 5\n  batch_size: 4\n"
        "cache:\n  threshold: 0.1\n"
        "loss:\n  alpha: 1\n  temperature:\n    mode: adversarial\n    max: 3\n"
    )
    kind(page, "/loss/temperature").select_option(label="number")
    field(page, "/loss/alpha").fill("")
    field(page, "/cache/threshold").fill("")
    field(page, "/train/batch_size").fill("")
    field(page, "/train/learning_rate").fill("0.0003")
    assert read_yaml(page) == (
        f"{kept}  learning_rate: 0.0003 # slow\n  # how long\n  max_steps: 5\n"
        "cache: {}\nloss: {}\n"
    )


def test_a_job_like_another_is_shown_without_its_defaults(page: Page, api: Parts) -> None:
    old = api.jobs.create(make_config("old"))
    open_form(page, api, f"new?from={old.id}")
    expect(field(page, "/name")).to_have_value("old")
    given = parse_yaml(read_yaml(page))
    assert "checks" not in given and "seed" not in given["train"]
    assert parse_config(given) == make_config("old")


# ---------------------------------------------------------------------- all fields


def list_fields(schema: dict[str, Any], definitions: dict[str, Any], at: str) -> Iterator[str]:
    """Yield the pointer of every field below a section, for every kind of its values.

    ``*`` stands for the keys of a map and the places of a list.
    """
    for name, each in schema["properties"].items():
        yield from list_values(each, definitions, f"{at}/{name}")


def list_values(schema: dict[str, Any], definitions: dict[str, Any], at: str) -> Iterator[str]:
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        for option in options:
            yield from list_values(option, definitions, at)
        return
    if schema.get("type") == "null":
        return
    yield at
    if "$ref" in schema:
        yield from list_fields(definitions[schema["$ref"].rpartition("/")[2]], definitions, at)
    elif schema.get("type") == "array":
        yield from list_values(schema["items"], definitions, f"{at}/*")
    elif schema.get("type") == "object":
        values = schema.get("additionalProperties") or next(
            iter(schema["patternProperties"].values())
        )
        yield from list_values(values, definitions, f"{at}/*")


#: Chooses every kind of every field, gives each list and map one member, and collects the fields
#: that have an input at some time.
COLLECT = """
() => {
    const seen = new Set();
    const done = new Set();
    const general = (pointer) => pointer.replace(/\\/(\\d+|any)(?=\\/|$)/g, "/*");
    const collect = () => {
        for (const each of document.querySelectorAll("[data-path]")) {
            const inputs = each.querySelectorAll("input, select, button");
            if (inputs.length) seen.add(general(each.dataset.path));
        }
    };
    const step = () => {
        for (const button of document.querySelectorAll(".parts button")) {
            const group = button.closest("[data-path]").dataset.path;
            if (!button.textContent.startsWith("Add to") || done.has(`add ${group}`)) continue;
            done.add(`add ${group}`);
            const name = button.parentElement.querySelector('input[placeholder="name"]');
            if (name) name.value = "any";
            button.click();
            return true;
        }
        for (const select of document.querySelectorAll("select[data-kind]")) {
            for (const option of select.options) {
                const known = `${select.dataset.kind} ${option.text}`;
                if (option.value === "" || done.has(known)) continue;
                done.add(known);
                if (option.value === select.value) continue;
                select.value = option.value;
                select.dispatchEvent(new Event("change"));
                return true;
            }
        }
        return false;
    };
    collect();
    while (step()) collect();
    return [...seen];
}
"""


def test_every_field_of_the_schema_has_an_input(page: Page, api: Parts) -> None:
    schema = JobConfig.model_json_schema()
    wanted = set(list_fields(schema, schema["$defs"], ""))
    assert {"/loss/temperature/mode", "/data/train/*/split", "/search/space/*/choices/*"} <= wanted
    open_form(page, api)
    write_yaml(page, "{}")
    expect(field(page, "/name")).to_have_value("")
    found = set(page.evaluate(COLLECT))
    assert sorted(wanted - found) == []
    assert sorted(found - wanted) == []


# ---------------------------------------------------------------------- the text


SCALARS = """
a: [1e-4, 1.0e-4, 1.0e+4, 1_000, 0x1F, 010, 0b11, 1:30, -5, +5, .5, 5., yes, No, on, OFF, y, n,
  true, ~, null, Null, '1', "a\\tb", plain text, 1.2.3, 0o7, ., "", 1e5, 12e03, 1.5e3, -1.5E-3,
  2026-01-01]
"""


def test_the_browser_reads_yaml_as_the_service_does(page: Page, api: Parts) -> None:
    open_form(page, api)
    texts = [
        SCALARS,
        "a: &x {b: 1, c: [1, 2]}\nd:\n  <<: *x\n  b: 2\ne: *x\n",
        "a: |\n  two\n  lines\nb: >-\n  folded\n  text\nc:\n- 1\n- {d: e}\n",
        *[template["text"] for template in api.http.get("/templates").json()["data"]],
        (ROOT / "examples" / "austen" / "job.yaml").read_text(encoding="utf-8"),
    ]
    for text in texts:
        wanted = json.loads(json.dumps(parse_yaml(text), default=str))
        assert page.evaluate(READ, text) == {"data": wanted}, text
        # What the library writes, the service reads as the same job.
        changed = page.evaluate(CHANGE, [text, ["added"], "2026-01-01"])
        written = json.loads(json.dumps(parse_yaml(changed), default=str))
        assert written == wanted | {"added": "2026-01-01"}, changed
    twice = page.evaluate(READ, "a: 1\na: 2\n")
    assert twice["problem"]["line"] == 2


READ = """async (text) => {
    const { read } = await import("/dashboard/form/yaml.js");
    return read(text);
}"""
CHANGE = """async ([text, path, value]) => {
    const { change } = await import("/dashboard/form/yaml.js");
    return change(text, path, value ?? undefined);
}"""

CHANGES = [
    ("a: 1   # one\nb: 2\n", ["a"], 3, "a: 3 # one\nb: 2\n"),
    ("a: 1 # one\nb: 2\n", ["a"], None, "b: 2\n"),
    ("a: {x: 1, z: 2} # c\n", ["a", "x"], None, "a: {z: 2} # c\n"),
    ("a: {x: 1} # c\n", ["a", "z"], "t: u", 'a: {x: 1, z: "t: u"} # c\n'),
    ("a:\n  - x # 1\n  - z\n", ["a", 1], "u", "a:\n  - x # 1\n  - u\n"),
    ("a:\n  - x # 1\n  - z\n", ["a", 2], "u", "a:\n  - x # 1\n  - z\n  - u\n"),
    ("a:\n  - x # 1\n  - z\n", ["a", 0], None, "a:\n  - z\n"),
    ("a: x # c\n", ["a", 1], "z", "a:\n  - x # c\n  - z\n"),
    ("a: {p: x}\n", ["a", 0, "s"], "z", "a:\n  - {p: x, s: z}\n"),
    ("a:\n", ["a", "b"], True, "a:\n  b: true\n"),
    ("a: {}\n", ["a", "b"], True, "a:\n  b: true\n"),
    ("# c\n", ["a", 0, "b"], "yes", '# c\n\na:\n  - b: "yes"\n'),
    ("a: 3.0e-4\nb: 0.10\n", ["c"], "1e-4", 'a: 3.0e-4\nb: 0.10\nc: "1e-4"\n'),
    ("a: &k 1\nb: *k\n", ["a"], None, "b: 1\n"),
    ("a: &k {x: 1} # d\nb: *k\n", ["b", "x"], 2, "a: {x: 1} # d\nb:\n  x: 2\n"),
    ("a: 1\n\n# last\n", ["b"], 1e-7, "a: 1\nb: 1.0e-7\n\n# last\n"),
]


@pytest.mark.parametrize(("before", "path", "value", "after"), CHANGES)
def test_a_change_keeps_the_comments_and_the_other_fields(
    page: Page, api: Parts, before: str, path: list[Any], value: Any, after: str
) -> None:
    page.goto(f"{api.settings.server}/new")
    assert page.evaluate(CHANGE, [before, path, value]) == after


# ---------------------------------------------------------------------- the same job, three ways


def test_the_job_as_curl_as_a_command_and_as_python(page: Page, api: Parts, tmp_path: Path) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_form(page, api)
    body = valid("three-ways", str(api.settings.home / "inputs"), labels={"it's": "a"})
    body["labels"] = {"a": "b"}
    write_yaml(page, f"# it's mine\n{yaml.safe_dump(body)}")
    expect(page.get_by_text("This job would be accepted.")).to_be_visible()
    page.get_by_text("The same job as").click()
    wanted = parse_config(body).model_dump(mode="json")
    (tmp_path / "kd").write_text(f'#!/bin/sh\nexec {" ".join(KD)} "$@"\n')
    (tmp_path / "kd").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    programs = {"curl": ["bash", "-c"], "CLI": ["bash", "-c"], "Python": [sys.executable, "-c"]}
    for name, program in programs.items():
        page.get_by_label("Client").select_option(name)
        page.get_by_role("button", name="Copy").click()
        expect(page.get_by_text("Copied.", exact=True)).to_be_visible()
        text = page.evaluate("navigator.clipboard.readText()")
        assert text == page.locator(".commands pre").text_content()
        text = text.replace("kd submit", "kd submit --detach") if name == "CLI" else text
        done = subprocess.run(
            [*program, text], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        newest = api.http.get("/jobs?limit=1").json()["data"][0]
        assert newest["name"] == "three-ways" and newest["config"] == wanted
        api.http.post(f"/jobs/{newest['id']}/cancel")
        assert api.http.delete(f"/jobs/{newest['id']}").status_code == 204


@pytest.mark.usefixtures("_server_binary")
def test_no_key_stands_in_the_commands(page: Page, tmp_path: Path) -> None:
    file, keys = with_keys(tmp_path, ann="write")
    with serving(tmp_path / "home", api_keys_file=file) as parts:
        page.goto(f"{parts.settings.server}/new")
        question = page.get_by_role("dialog")
        question.locator("input").fill(keys["ann"])
        question.get_by_role("button").click()
        expect(page.locator(".columns")).to_be_visible()
        page.get_by_text("The same job as").click()
        expect(page.locator(".commands pre")).to_contain_text("Bearer $KD_API_KEY")
        assert keys["ann"] not in page.content()


# ---------------------------------------------------------------------- its looks


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_with_all_kinds_of_fields_has_no_fault(
    new_tab: Callable[..., AbstractContextManager[Page]], api: Parts, width: int, scheme: Any
) -> None:
    with new_tab(viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        open_form(page, api)
        page.evaluate(COLLECT)
        field(page, "/train/max_steps").fill("many")
        expect(problem_at(page, "/train/max_steps")).not_to_have_text("")
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        assert find_violations(page) == []
        require_fit(page)
        take_picture(page, f"new all {width} {scheme}")
