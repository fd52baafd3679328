"""Every command and every job file of README.md and docs/: parsed, and run as printed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from bench.__main__ import BENCHES
from bench.support.paths import AUSTEN, ROOT
from bench.support.waiting import wait_until
from kd.client.wire.service import Device
from kd.config.jobfile import load_config, parse_config
from kd.preflight.problems import Folders, find_problems
from services.loops.webhooks import find_webhook_problems
from services.settings import Settings
from tests.support.checkout import Checkout, make_checkout, make_small, pretend_installed
from tests.support.commands import MissingParameter, find_command, parse_kd
from tests.support.documents import (
    DOCUMENTS,
    README,
    Block,
    list_blocks,
    list_command_lines,
    list_inline_commands,
    read_document,
    split_commands,
)

#: The commands that cannot run in a test, by their first words, each with the reason. Everything
#: else that stands in a block of a document runs as printed.
CANNOT_RUN = {
    "make test": "this test is part of it",
    "python3 -m venv": "the tests run in an environment already",
    ".venv/bin/pip install": "it needs an index of packages",
    "kd demo": "`make demo` and test_wheel.py run it",
    "make bench": "it measures for minutes; test_bench.py runs it with --quick",
    "python bench/quality.py": "it trains for hours; bench/test_quality.py runs it on small models",
    "docker compose": "it needs Docker, a registry and, for some services, a GPU",
    "sudo chown": "it needs the rights of root on the host of the containers",
}
#: The demo's fingerprint begins with these digits in the documents; the small demo has another.
PRINTED_FINGERPRINT = "89b9"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
BLOCKS = [block for document in DOCUMENTS for block in list_blocks(document, "bash")]
TERMINAL = next(block for block in BLOCKS if block.text.startswith("kd up"))
README_JOBS = [parse_config(yaml.safe_load(block.text)) for block in list_blocks(README, "yaml")]
#: The jobs of these pages, and parts of jobs. Where the first line of one is a comment with the
#: name of a file, the page's commands find it under that name.
HOW_TO = [document for document in DOCUMENTS if document.parent.name == "how-to"]
HOW_TO_JOBS = [block for document in HOW_TO for block in list_blocks(document, "yaml")]


def starts_with(words: list[str], first: str) -> bool:
    return words[: len(first.split())] == first.split()


def find_reason(words: list[str]) -> str | None:
    """Why a command cannot run here; None if it can."""
    return next((why for first, why in CANNOT_RUN.items() if starts_with(words, first)), None)


def list_all_commands() -> list[list[str]]:
    return [
        words
        for block in BLOCKS
        for line in list_command_lines(block)
        for words in split_commands(line)
    ]


# ---------------------------------------------------------------------- parsed


def require_options(words: list[str]) -> None:
    """Fail unless the program of a command knows its words."""
    parse = {"make": require_target, "docker": require_service, "kd": require_kd}
    if words[0] in parse:
        parse[words[0]](words[1:])
    elif words[:1] == ["python"]:
        require_script(words[1:])


def require_kd(words: list[str]) -> None:
    assert parse_kd(words) is not None


def require_target(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
    variables = re.findall(r"^([A-Z_]+) *[?:]=", makefile, re.MULTILINE)
    given = dict(word.split("=", 1) for word in words if "=" in word)
    assert {word for word in words if "=" not in word} <= set(targets)
    assert given.keys() <= set(variables)
    if "NAME" in given:
        script = BENCHES[given["NAME"]].command.split()[0]
        require_script([script, *shlex.split(given.get("FLAGS", ""))])


def require_service(words: list[str]) -> None:
    """Check a ``docker compose`` command: its verb, its services, and what runs in them."""
    assert words[0] == "compose"
    verb, *rest = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    assert verb in {"build", "logs", "ps", "run", "stop", "up"}
    if verb != "run":
        assert set(rest) <= set(COMPOSE["services"])
        return
    assert rest[0] in COMPOSE["services"]
    if rest[0] == "tools":
        require_kd(words[words.index("tools") + 1 :])


def require_script(words: list[str]) -> None:
    """Check that a script of bench/ names each option of the command in its own help."""
    if words[0] == "-c":
        compile(words[1], "a command", "exec")
        return
    text = (ROOT / words[0]).read_text(encoding="utf-8")
    assert [word for word in words[1:] if word.startswith("--") and f'"{word}"' not in text] == []


def test_every_command_of_a_block_has_options_that_its_program_knows() -> None:
    commands = list_all_commands()
    assert len(commands) > 50
    for words in commands:
        require_options(words)


@pytest.mark.parametrize("block", HOW_TO_JOBS, ids=lambda block: block.name)
def test_a_job_of_a_how_to_page_parses_and_a_part_of_one_does_in_the_job_of_the_readme(
    block: Block,
) -> None:
    """A section of a part replaces that of the README's job. A named file is a whole job."""
    data = yaml.safe_load(block.text)
    if find_file_name(block) is None and "kind" not in data:
        data = yaml.safe_load(list_blocks(README, "yaml")[0].text) | data
    parse_config(data)


def find_file_name(block: Block) -> str | None:
    """The name of the file in the first line of a block, if that is a comment with a name."""
    found = re.match(r"# (\S+\.yaml)\n", block.text)
    return found and found[1]


def test_the_list_of_commands_that_cannot_run_names_only_printed_ones() -> None:
    commands = list_all_commands()
    printed = {first for first in CANNOT_RUN for words in commands if starts_with(words, first)}
    assert printed == set(CANNOT_RUN)


@pytest.mark.parametrize("program", ["kd", "make", "docker"])
def test_every_command_in_the_prose_has_options_that_its_program_knows(program: str) -> None:
    """A verb alone (`kd run`) stands for the command, and options need not name a job file."""
    found = [
        words for _, words in list_inline_commands(program, [*DOCUMENTS, ROOT / "CHANGELOG.md"])
    ]
    assert found
    for words in found:
        if program == "kd" and (alone := find_command(words)) is not None:
            assert alone.help
        else:
            with suppress(MissingParameter):
                require_options([program, *words])


def test_the_job_of_the_readme_asks_for_nothing_that_a_fresh_service_lacks(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, root=ROOT)
    for job in README_JOBS:
        assert find_problems(job, Folders(settings.root, settings.home)) == []
        assert find_webhook_problems(job.webhook, settings) == []
        assert Device(memory_bytes=8 << 30).covers(job.resources.gpus, job.resources.memory)


def test_the_demo_installs_what_it_needs_alone_and_the_readme_says_how_much(
    tmp_path: Path,
) -> None:
    """``make -n`` prints what a folder without an environment would get."""
    printed = make_checkout(tmp_path / "potstill").require("make -n demo")
    assert re.findall(r"-e '\.\[(.+)\]'", printed) == ["local,worker"]
    text = " ".join(read_document(README).split())
    installed = "`pip install --find-links dist 'potstill[local,worker]'`"
    assert f"{installed}, `kd demo` runs in any folder" in text
    size = r"environment then has \d+ packages, takes [\d.]+ GB, and installs in \w+ minutes"
    assert re.search(size, text)
    assert re.search(r"The demo takes \w+ minutes on \w+ CPU cores", text)


@pytest.mark.slow
def test_the_documents_name_the_fingerprint_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    from kd.capture.plan import plan_capture

    monkeypatch.chdir(ROOT)
    plan = plan_capture(load_config(AUSTEN / "job.yaml"))
    assert plan.identity.fingerprint.startswith(PRINTED_FINGERPRINT)


# ---------------------------------------------------------------------- run


@pytest.fixture(scope="module")
def checkout(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """A small checkout in which the first command of the README's block serves."""
    made = make_checkout(tmp_path_factory.mktemp("documents") / "potstill")
    with made.serving(list_command_lines(TERMINAL)[0]):
        yield made


def stand_in(command: str, checkout: Checkout) -> str:
    """The command, with the fingerprint of the small demo, and with the caller's variables."""
    wanted = f"{PRINTED_FINGERPRINT}|\\$FINGERPRINT"
    if not re.search(wanted, command):
        return command
    caches = json.loads(checkout.require("kd cache ls --json"))
    return re.sub(wanted, str(caches[0]["fingerprint"]), command)


def await_action(command: str, checkout: Checkout) -> None:
    """Wait, as a person does, until the newest job allows the action of the command."""
    action = re.search(r"\b(pause|resume)\b", command)
    if action is not None:
        job = checkout.get("/jobs?limit=1")["data"][0]  # type: ignore[index]
        wait_until(lambda: action[1] in checkout.get(f"/jobs/{job['id']}")["actions"])  # type: ignore[operator]


def run_block(block: Block, checkout: Checkout) -> None:
    """Run the commands of a block one after the other, but those of the list above."""
    for job in list_blocks(block.document, "yaml"):
        if (name := find_file_name(job)) is not None:
            (checkout.folder / name).write_text(make_small(job.text))
    for line in list_command_lines(block):
        if line == list_command_lines(TERMINAL)[0] or any(map(find_reason, split_commands(line))):
            continue
        await_action(line, checkout)
        printed = checkout.require(stand_in(line, checkout))
        if line.startswith("curl -X POST") and "JOB" not in checkout.environment:
            checkout.environment["JOB"] = json.loads(printed)["id"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", [each for each in BLOCKS if "make demo" not in each.text],
                         ids=lambda block: block.name)  # fmt: skip
def test_the_commands_of_a_block_run_in_their_order(block: Block, checkout: Checkout) -> None:
    run_block(block, checkout)


def test_no_job_of_the_readme_has_the_name_of_the_example() -> None:
    """`kd run` of both would use one run folder, and refuse the checkpoints of the other."""
    example = load_config(AUSTEN / "job.yaml")
    assert example.name not in {job.name for job in README_JOBS}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_jobs_of_the_readme_run(checkout: Checkout) -> None:
    for number, block in enumerate(list_blocks(README, "yaml")):
        (checkout.folder / "job.yaml").write_text(make_small(block.text))
        for command in ("kd validate job.yaml", "kd run job.yaml", "kd submit job.yaml"):
            assert checkout.require(command), number


@pytest.mark.slow
def test_the_job_that_made_the_teacher_runs(checkout: Checkout) -> None:
    (line,) = re.findall(r"^# .*: (kd run .*)$", (AUSTEN / "teacher.yaml").read_text(), re.M)
    assert "student" in checkout.require(line)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_server_binary")
@pytest.mark.parametrize("command", ["make demo", "make demo DEMO_FLAGS=--baseline"])
def test_the_demo_runs_by_make(command: str, tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "potstill")
    pretend_installed(checkout)
    done = checkout.require(command)
    assert done.count("status: succeeded") == 1 + ("baseline" in command)
