"""The plan of a job against the real student, its optimiser's state and its files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from bench.support.harness import Parts
from bench.support.waiting import PATIENCE_SECONDS
from cache.errors import StoreError
from kd.capture.estimate import job as estimate
from kd.capture.estimate.job import measure_capture
from kd.client.wire.plans import MemoryEstimate
from kd.client.wire.service import Device, WorkerState
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import ConfigError
from kd.models.loading import build_student
from kd.models.tokenizers import load_tokenizer
from kd.preflight.validate import find_text_problems
from services.api import kept_answers, planning
from services.api.kept_answers import KeptAnswers
from services.api.plan_child import answer_order
from services.api.planning import plan_job
from services.settings import Settings
from tests.support.kd.optimizers import measure_optimizer_bytes
from tests.support.kd.zoo import build
from tests.support.services.api import UNLIMITED, inputs, problem, valid

INIT = {
    "layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OPTIMIZERS = ["adamw", "adafactor", "muon", "lion", "lars", "schedule_free"]


def make_job(student: dict[str, Any], teacher: Path, optim: str) -> dict[str, Any]:
    train = {"max_steps": 1, "optim": optim}
    if optim == "schedule_free":
        train |= {"lr_scheduler_type": "constant"}
    return {
        "kind": "distill",
        "name": "planned",
        "teacher": {"model": str(teacher)},
        "student": student,
        "data": {"train": "a.txt", "sequence_length": 32},
        "train": train,
    }


def plan_memory(job: dict[str, Any], home: Path) -> MemoryEstimate:
    return plan_job(parse_config(job), Settings(home=home, data_roots=["/"]), []).memory


def require_real_state(found: MemoryEstimate, student: PreTrainedModel, job: Any) -> None:
    """The plan's bytes are the weights, their gradients and what the optimiser really keeps.

    Muon keeps more for embeddings than for the matrices of layers, and a plan tells the least.
    """
    numbers = student.num_parameters()
    options = parse_config(job).require_train()
    real = 2 * 4 * numbers + measure_optimizer_bytes(student, options)
    assert found.student_parameters == numbers and found.student_bytes is not None
    if options.optim == "muon":
        assert 0.75 * real <= found.student_bytes <= real
    else:
        assert found.student_bytes == real


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_the_plan_of_a_fresh_student_counts_the_real_optimiser_s_state(
    optim: str, tied: bool, tiny_teacher: Path, tmp_path: Path
) -> None:
    job = make_job({"init": INIT | {"tie_word_embeddings": tied}}, tiny_teacher, optim)
    config = parse_config(job)
    student = build_student(config.student, load_tokenizer(tiny_teacher), 32, config.teacher_files)
    require_real_state(plan_memory(job, tmp_path), student, job)


@pytest.mark.parametrize("family", ["llama tied", "gpt2"])
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_the_plan_of_a_saved_student_counts_the_real_optimiser_s_state(
    optim: str, family: str, tiny_teacher: Path, tmp_path: Path
) -> None:
    student = build(family)
    student.save_pretrained(tmp_path / "student")
    job = make_job({"model": str(tmp_path / "student")}, tiny_teacher, optim)
    require_real_state(plan_memory(job, tmp_path), student, job)


def test_adapters_and_a_moving_average_change_the_plan(tiny_teacher: Path, tmp_path: Path) -> None:
    build("llama tied").save_pretrained(tmp_path / "student")
    job = make_job({"model": str(tmp_path / "student")}, tiny_teacher, "adamw")
    numbers = plan_memory(job, tmp_path).student_parameters or 0
    averaged = job | {"train": job["train"] | {"ema_decay": 0.9}}
    assert plan_memory(averaged, tmp_path).student_bytes == 5 * 4 * numbers
    adapted = job | {"student": job["student"] | {"lora": {}}}
    assert plan_memory(adapted, tmp_path).student_bytes == 4 * numbers


def test_a_plan_warns_of_models_larger_than_every_worker(
    tiny_teacher: Path, tmp_path: Path
) -> None:
    giant = make_job({"init": INIT | {"layers": 256, "hidden_size": 32768}}, tiny_teacher, "adamw")
    worker = WorkerState(id="w", stages=["train"], device=Device(memory_bytes=64 << 30))

    def list_warnings(job: dict[str, Any]) -> list[str]:
        return plan_job(parse_config(job), Settings(home=tmp_path), [worker]).warnings

    assert any("more than 64 GiB" in warning for warning in list_warnings(giant))
    small = make_job({"init": INIT}, tiny_teacher, "adamw")
    assert not any("64 GiB" in warning for warning in list_warnings(small))


def test_planning_imports_no_torch() -> None:
    code = "import sys, services.api.planning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------------- the process of the plans


def find_child(api: int) -> int:
    """Find the process that makes plans for the API with this process id."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if parent == api and b"services.api.plan_child" in command:
            return int(folder.name)
    raise AssertionError("the API has no such process")


@pytest.fixture
def planner(new_parts: Callable[..., Parts], tmp_path: Path) -> Callable[..., tuple[Parts, int]]:
    """Start an API with these settings that may read ``tmp_path``; return it and its process id."""

    def start(**settings: Any) -> tuple[Parts, int]:
        parts = new_parts(**{**UNLIMITED, "data_roots": (tmp_path,), **settings})
        return parts, parts.start_api().pid

    return start


def test_other_requests_are_answered_while_a_plan_hangs(
    planner: Callable[..., tuple[Parts, int]], tmp_path: Path
) -> None:
    parts, api = planner(plan_seconds=600)
    job = valid("quick", inputs(tmp_path / "inputs"), "distill")
    first = parts.http.post("/jobs/validate", json=job, timeout=PATIENCE_SECONDS)
    assert first.status_code == 200, first.text
    child = find_child(api)
    os.kill(child, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        held = pool.submit(parts.http.post, "/jobs/validate", json=job, timeout=PATIENCE_SECONDS)
        # A new job is checked there too: its patterns and its models are a stranger's.
        created = pool.submit(parts.http.post, "/jobs", json=job, timeout=PATIENCE_SECONDS)
        for _ in range(5):
            assert parts.http.get("/healthz").status_code == 200
            assert parts.http.get("/jobs").status_code == 200
        assert not held.done() and not created.done()
        os.kill(child, signal.SIGCONT)
        assert created.result().status_code == 202, created.result().text
        assert held.result().json()["memory"] == first.json()["memory"]
    assert find_child(api) == child


@pytest.mark.long
def test_a_plan_that_takes_too_long_is_given_up_and_the_next_one_is_made(
    planner: Callable[..., tuple[Parts, int]], tmp_path: Path
) -> None:
    parts, api = planner(plan_seconds=8)
    job = valid("quick", inputs(tmp_path / "inputs"), "distill")
    for path in ("/jobs/validate", "/jobs?dry_run=true"):
        answer = parts.http.post(path, json=job, timeout=PATIENCE_SECONDS)
        assert answer.status_code == 200, answer.text
        child = find_child(api)
        os.kill(child, signal.SIGSTOP)
        answer = parts.http.post(path, json=job, timeout=PATIENCE_SECONDS)
        assert "more than 8 s" in problem(answer, 503, "check-limit").detail
        assert answer.headers["retry-after"]
    answer = parts.http.post("/jobs/validate", json=job, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    assert find_child(api) != child


def test_a_job_is_not_admitted_while_nobody_can_check_it(
    planner: Callable[..., tuple[Parts, int]], tmp_path: Path
) -> None:
    parts, api = planner(plan_seconds=20, quota_bytes=1 << 40)
    job = valid("quick", inputs(tmp_path / "inputs"), "distill")
    assert parts.http.post("/jobs", json=job, timeout=PATIENCE_SECONDS).status_code == 202
    os.kill(find_child(api), signal.SIGSTOP)
    answer = parts.http.post("/jobs", json=job, timeout=PATIENCE_SECONDS)
    assert "more than 20 s" in problem(answer, 503, "check-limit").detail
    assert answer.headers["retry-after"]
    assert len(parts.http.get("/jobs").json()["data"]) == 1


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 200_000, id="deep"),
        pytest.param("{" + " " * (80 << 20) + "}", marks=pytest.mark.long, id="large"),
    ],
)
def test_a_configuration_that_no_model_has_is_a_problem_of_its_job(
    planner: Callable[..., tuple[Parts, int]], tmp_path: Path, text: str
) -> None:
    parts, _ = planner(plan_seconds=PATIENCE_SECONDS)
    folder = inputs(tmp_path / "inputs")
    job = valid("quick", folder, "distill")
    (Path(job["teacher"]["model"]) / "config.json").write_text(text, encoding="utf-8")
    answer = parts.http.post("/jobs", json=job, timeout=PATIENCE_SECONDS)
    assert "config.json cannot be read" in problem(answer, 422).detail + answer.text


def test_a_plan_that_takes_too_much_memory_is_refused(
    planner: Callable[..., tuple[Parts, int]], tmp_path: Path
) -> None:
    parts, _ = planner(plan_memory_bytes=1 << 29, plan_seconds=PATIENCE_SECONDS)
    job = valid("quick", inputs(tmp_path / "inputs"), "distill")
    # Each of these lists takes some 64 bytes once it is parsed.
    many = "[]," * 12_000_000
    (tmp_path / "inputs" / "config.json").write_text(f'{{"many": [{many}[]]}}')
    answer = parts.http.post("/jobs/validate", json=job, timeout=PATIENCE_SECONDS)
    assert "memory" in problem(answer, 503, "check-limit").detail
    (tmp_path / "inputs" / "config.json").write_text("{}")
    answer = parts.http.post("/jobs/validate", json=job, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text


def test_validations_have_a_rate_of_their_own(
    planner: Callable[..., tuple[Parts, int]], tmp_path: Path
) -> None:
    parts, _ = planner(rate_validate=2)
    job = valid("quick", inputs(tmp_path / "inputs"), "distill")
    for path in ("/jobs/validate", "/jobs?dry_run=true"):
        answer = parts.http.post(path, json=job, timeout=PATIENCE_SECONDS)
        assert answer.status_code == 200, answer.text
        assert answer.headers["ratelimit-policy"] == '"validate";q=2;w=60'
    for path in ("/jobs/validate", "/jobs?dry_run=true"):
        answer = parts.http.post(path, json=job, timeout=PATIENCE_SECONDS)
        problem(answer, 429)
        assert int(answer.headers["retry-after"]) > 0
    assert parts.http.post("/jobs", json=job).status_code == 202
    assert parts.http.get("/models").json()["limits"]["validations_a_minute"] == 2


def test_an_answer_is_kept_while_its_files_stay_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    kept = KeptAnswers()

    def ask(question: str = "size") -> str:
        return kept.recall(question, [file], file.read_text)

    file.write_text("one")
    state = file.stat()
    assert ask() == "one"
    file.write_text("two")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert ask() == "two", "size and time of writing are the same, but not that of the change"
    assert ask("another") == "two"
    file_state = file.stat()
    assert kept.recall("size", [file], lambda: "new") == "two"
    assert file.stat() == file_state
    for number in range(kept_answers.MOST_ANSWERS):
        ask(str(number))
    assert kept.recall("size", [file], lambda: "six") == "six", "the oldest answers are dropped"


def test_a_plan_reads_its_text_again_only_when_it_has_changed(
    tiny_teacher: Path, tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    job = make_job({"init": INIT}, tiny_teacher, "adamw") | {"data": {"train": str(file)}}
    settings = Settings(home=tmp_path)
    kept = KeptAnswers()

    def count_tokens() -> int:
        capture = plan_job(parse_config(job), settings, [], kept).capture
        assert capture is not None
        return capture.tokens

    content = b"It is a truth universally acknowledged.\n" * 50
    file.write_bytes(content)
    state = file.stat()
    before = count_tokens()
    file.write_bytes(b"0" * len(content))
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert count_tokens() != before, "size and time of writing are the same"


def test_the_size_of_a_capture_that_was_planned_is_not_measured_again(
    parts: Parts, tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged.\n" * 50)
    job = make_job({"init": INIT}, tiny_teacher, "adamw")
    job["data"] = {"train": str(tmp_path / "text.txt"), "sequence_length": 32}
    settings = Settings(home=tmp_path / "home")
    kept = KeptAnswers()
    capture = plan_job(parse_config(job), settings, [], kept).capture
    assert capture is not None
    monkeypatch.setattr(estimate, "estimate_capture_size", lambda *_: pytest.fail("again"))
    order = {"wish": "size", "config": job, "owner": "me", "team": "us"}
    answer = answer_order(order, settings, parts.jobs, kept)
    assert answer["result"]["bytes"] == capture.bytes, answer


def test_a_source_that_comes_often_is_looked_at_once_and_counted_each_time(tmp_path: Path) -> None:
    text = inputs(tmp_path / "inputs")
    home = tmp_path / "home"

    def make_config(count: int, name: str = "text.txt") -> JobConfig:
        data = {"train": [f"{text}/{name}"] * count, "validation_fraction": 0.0, "packing": True}
        return parse_config(valid("quick", text, "distill") | {"data": data})

    one, many = (
        measure_capture(make_config(count), tmp_path)[0].train_sequences for count in (20, 1000)
    )
    assert many == pytest.approx(50 * one, rel=0.1)
    missing = find_text_problems(make_config(1000, "none.txt"), tmp_path)
    assert [each.pointer for each in missing] == ["/data/train/0"]
    with pytest.raises(ConfigError, match="1000"):
        make_config(1001)
    assert not home.exists()


def test_a_plan_shows_what_is_learned_of_chats_and_refuses_rows(
    tiny_teacher: Path, tmp_path: Path
) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(tiny_teacher, teacher)
    (teacher / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    row = {"messages": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B"}]}
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps(row | {"source": "web"}) + "\n")
    job = make_job({"init": INIT}, teacher, "adamw")
    job["data"] = {"train": str(chats), "format": "messages", "sequence_length": 32}
    settings = Settings(home=tmp_path, data_roots=["/"])
    plan = plan_job(parse_config(job), settings, [])
    (shown,) = plan.learned
    assert [piece.text for piece in shown.pieces if piece.learned] == ["B<|endoftext|>"]
    assert any("the column 'source'" in warning for warning in plan.warnings)
    chats.write_text('{"messages": [{"role": "user"}]}\n')
    with pytest.raises(ConfigError, match="'content' in message 1"):
        plan_job(parse_config(job), settings, [])


def test_a_plan_does_without_the_rows_of_a_bucket_that_does_not_answer(
    tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> list[Path]:
        raise StoreError("The bucket does not answer.", passing=True)

    monkeypatch.setattr(planning, "list_measured_files", refuse)
    job = make_job({"init": INIT}, tiny_teacher, "adamw")
    job["data"] = {"train": "s3://bucket/chats", "format": "messages", "sequence_length": 32}
    plan = plan_job(parse_config(job), Settings(home=tmp_path), [])
    assert (plan.capture, plan.learned) == (None, [])
