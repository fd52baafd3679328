"""The saved chat template is the one that was learned, and the model card's own code works."""

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kd.config.jobfile import parse_config
from kd.files import read_json
from kd.pipeline import run_stages
from kd.progress import Monitor
from tests.support.kd.tiny import make_tiny_job

pytestmark = pytest.mark.usefixtures("one_thread")

LEARNED = (
    "{% for m in messages %}[{{ m['role'] }} says] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant says] {% endif %}"
)
OTHER = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
ASKED = [{"role": "user", "content": "Who is Anne?"}]


def copy_model(model: Path, folder: Path, template: str | None) -> Path:
    shutil.copytree(model, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def job(tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A job on chats; the student has the teacher's tokenizer with a template of its own."""
    place = tmp_path_factory.mktemp("models")
    answer = {"role": "assistant", "content": "She is the daughter of Sir Walter."}
    rows = place / "chats.jsonl"
    rows.write_text(json.dumps({"messages": [*ASKED, answer]}) + "\n")
    rows.write_text(rows.read_text() * 12)
    teacher = copy_model(tiny_teacher, place / "teacher", LEARNED)
    made = make_tiny_job(
        teacher, rows, train={"max_steps": 1}, data={"format": "messages", "sequence_length": 64}
    )
    student = str(copy_model(tiny_teacher, place / "student", OTHER))
    made["plain"] = str(copy_model(tiny_teacher, place / "plain", None))
    return made | {"student": {"model": student}}


def run(job: dict[str, Any], home: Path) -> Path:
    run_dir = home / "runs" / "x"
    plan = {name: value for name, value in job.items() if name != "plain"}
    run_stages(parse_config(plan), home, run_dir, Monitor())
    return run_dir


@pytest.mark.long
def test_the_template_that_was_learned_is_saved_and_said(
    job: dict[str, Any], tmp_path: Path
) -> None:
    run_dir = run(job, tmp_path)
    saved = AutoTokenizer.from_pretrained(run_dir / "student")
    own = AutoTokenizer.from_pretrained(job["teacher"]["model"])
    assert saved.chat_template == LEARNED
    assert saved.apply_chat_template(ASKED) == own.apply_chat_template(ASKED)
    [notice] = [each for each in read_json(run_dir / "notices.json") if "template" in each["what"]]
    assert job["student"]["model"] in notice["example"]
    # The same text, from the sealed cache and without a teacher.
    sealed = {name: job[name] for name in ("name", "train", "evaluation")}
    sealed |= {"kind": "train", "student": {"model": job["plain"]}}
    sealed |= {"cache": {"fingerprint": read_json(run_dir / "cache.json")["fingerprint"]}}
    shutil.copytree(tmp_path / "caches", tmp_path / "again" / "caches")
    again = run(sealed, tmp_path / "again")
    assert AutoTokenizer.from_pretrained(again / "student").chat_template == LEARNED


@pytest.mark.long
def test_the_code_on_the_model_card_runs(
    job: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(job | {"student": {"model": job["plain"]}}, tmp_path) / "student"
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    program = tmp_path / "card.py"
    program.write_text(code.replace("path/to/this/folder", str(folder)))
    runpy.run_path(str(program))
    assert "user says" in capsys.readouterr().out


@pytest.mark.long
def test_a_template_that_nothing_was_rendered_with_replaces_none(
    job: dict[str, Any], tiny_text: Path, tmp_path: Path
) -> None:
    plain = job | {"data": {**job["data"], "format": "auto", "train": str(tiny_text)}}
    folder = run(plain, tmp_path) / "student"
    assert AutoTokenizer.from_pretrained(folder).chat_template == OTHER
