"""One whole run whose teacher knows nothing: its report, its card and its events say so.

The report also has what both models cost on this device, and how both continue the same texts.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from kd.config.jobfile import parse_config
from kd.config.teacher import TeacherConfig
from kd.evaluation import side_by_side
from kd.evaluation.in_depth import (
    BASELINE,
    STUDENT,
    EvaluationContext,
    evaluate_in_depth,
    find_reason_without,
)
from kd.evaluation.model_card import write_provenance
from kd.evaluation.pages import format_closing_sections
from kd.evaluation.side_by_side import ModelCost
from kd.evaluation.teacher_comparison import TEACHER
from kd.files import read_json, write_json
from kd.models.folder import ADAPTER_FOLDER, ModelFolder
from kd.models.loading import load_model
from kd.models.saving import save_student
from kd.models.tokenizers import load_tokenizer
from kd.pipeline import run_stages
from kd.progress import SILENT, Event, Monitor
from kd.stages.source import open_source

pytestmark = pytest.mark.usefixtures("one_thread")
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def done(job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The run; the teacher's card names a licence, and the student learns from it alone."""
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("home")
    events: list[Event] = []
    config = parse_config(
        job
        | {
            "loss": {"alpha": 0.0},
            "train": job["train"] | {"max_steps": 12, "learning_rate": 3e-2},
            "evaluation": {"baseline": True, "max_new_tokens": 6},
        }
    )
    result = run_stages(config, home, home / "run", Monitor(events.append))
    return SimpleNamespace(
        config=config, run=home / "run", report=result.report, events=events, home=home
    )


@pytest.mark.long
def test_a_teacher_that_makes_the_student_worse_is_in_the_first_line(done: Any) -> None:
    report = done.report
    models = report["evaluation"]["models"]
    assert models[STUDENT]["perplexity"] > models[BASELINE]["perplexity"]
    said = (
        f"Warning: The student is worse with the teacher than without it: held-out perplexity "
        f"{models[STUDENT]['perplexity']:,.2f} with it, {models[BASELINE]['perplexity']:,.2f} "
        "without, 124 tokens; "
    )
    page = (done.run / "report.md").read_text(encoding="utf-8").splitlines()
    assert page[:2] == ["# tiny", ""] and page[2].startswith(f"> {said}")
    assert "try another teacher, more weight on the text (loss.alpha), or text" in page[2]
    card = (done.run / "student" / "README.md").read_text(encoding="utf-8")
    assert card.split("---\n\n", 1)[1].splitlines()[2] == page[2]
    warnings = [event.data["message"] for event in done.events if event.type == "warning"]
    assert warnings[-1] == page[2].removeprefix("> Warning: ")
    assert read_json(done.run / "report.json")["verdict"]["ok"] is False
    assert report["quality_kept"] is None, "the teacher is worse than a unigram"


def test_few_held_out_tokens_are_counted_and_have_an_interval(done: Any) -> None:
    page = (done.run / "report.md").read_text(encoding="utf-8")
    assert "| held-out text | perplexity | 95 % interval | of tokens |" in page
    for name, found in done.report["evaluation"]["models"].items():
        ends = found["perplexity_interval"]
        assert ends["low"] < found["perplexity"] < ends["high"]
        row = f"| {found['perplexity']:,.2f} | {ends['low']:,.2f} to {ends['high']:,.2f} | 124 |"
        assert f"| {name} {row}" in page


def test_teacher_and_student_are_measured_on_this_device(done: Any, job: dict[str, Any]) -> None:
    found = done.report["evaluation"]
    teacher = ModelFolder(Path(job["teacher"]["model"]))
    for name, folder in ((STUDENT, done.run / "student"), (TEACHER, teacher.path)):
        cost = found["costs"][name]
        files = sum(file.stat().st_size for file in ModelFolder(folder).weight_files)
        model = load_model(folder, torch.float32)
        assert cost["disk_bytes"] == files
        assert cost["parameters"] == model.num_parameters()
        buffers = sum(each.nbytes for each in model.buffers())
        assert cost["memory_bytes"] == 4 * model.num_parameters() + buffers
        assert cost["working_bytes"] is None, "only a GPU tells it"
        assert cost["read_tokens_per_second"] > 0 and cost["write_tokens_per_second"] > 0
    ratio = found["costs"][TEACHER]["disk_bytes"] / found["costs"][STUDENT]["disk_bytes"]
    assert found["student_is"]["times_smaller_on_disk"] == pytest.approx(ratio, abs=1e-3)
    page = (done.run / "report.md").read_text(encoding="utf-8")
    assert "## On this device" in page and f"files {ratio:.1f} times smaller" in page


def test_a_student_whose_files_are_larger_is_not_called_smaller() -> None:
    """As one in float32 is beside a teacher in a GGUF file."""
    cost = asdict(ModelCost(parameters=100, disk_bytes=100))
    ratios = {"times_fewer_parameters": 3.5, "times_smaller_on_disk": 0.625}
    found = {"costs": {TEACHER: cost}, "student_is": ratios}
    lines = format_closing_sections({"evaluation": found})
    said = "the student has 3.5 times fewer parameters, files 1.6 times as large."
    assert said in "\n".join(lines)


def test_both_continue_the_same_five_texts(done: Any) -> None:
    samples = done.report["evaluation"]["samples"]
    assert list(samples) == [STUDENT, TEACHER]
    prompts = [[each["prompt"] for each in texts] for texts in samples.values()]
    # Four sequences are held out, so that there are four texts.
    assert prompts[0] == prompts[1] and len(set(prompts[0])) == 4
    assert samples[STUDENT] != samples[TEACHER]
    page = (done.run / "report.md").read_text(encoding="utf-8")
    for name in (STUDENT, TEACHER):
        assert page.count(f"\nThe {name} continues:\n\n```text\n") == 4


# ---------------------------------------------------------------------- the card


def run_code(folder: Path, program: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the card's code on its own folder, and return what it printed."""
    (code,) = CODE.findall((folder / "README.md").read_text(encoding="utf-8"))
    assert code.count("path/to/this/folder") == 1
    program.write_text(code.replace("path/to/this/folder", str(folder)), encoding="utf-8")
    runpy.run_path(str(program))
    return capsys.readouterr().out


def test_the_card_s_code_generates_text(
    done: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = done.report["evaluation"]["samples"][STUDENT][0]["prompt"]
    written = run_code(done.run / "student", tmp_path / "use.py", capsys)
    assert written.startswith(" ".join(prompt.split())[:20]) and len(written) > len(prompt) / 2


def read_facts(folder: Path) -> dict[str, Any]:
    facts = yaml.safe_load((folder / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert isinstance(facts, dict)
    return facts


def test_a_fresh_student_has_no_base_and_an_unknown_licence_must_be_checked(done: Any) -> None:
    facts = read_facts(done.run / "student")
    assert facts["license"] == "unknown" and not {"base_model", "base_model_relation"} & {*facts}
    assert facts["library_name"] == "transformers"
    card = (done.run / "student" / "README.md").read_text(encoding="utf-8")
    assert "- Start: random weights." in card and "Licence: unknown. Check the" in card
    assert "## Limitations" in card and "124 held-out tokens" in card


def test_facts_come_from_the_teacher_s_card_and_the_job(
    done: Any, job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kd.models.folder.ModelFolder.find",
        lambda model, root, revision=None: ModelFolder(tmp_path),
    )
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en, de]\n---\n# x\n")
    data = job["data"] | {"train": [{"path": "owner/text"}, {"path": "owner/text", "name": "b"}]}
    cases = (
        ({"model": "owner/start"}, "owner/start", "finetune"),
        ({"from_teacher": {"layers": 1}}, "owner/teacher", "finetune"),
    )
    for student, base, relation in cases:
        config = parse_config(
            job | {"teacher": {"model": "owner/teacher"}, "data": data, "student": student}
        )
        folder = tmp_path / base.partition("/")[2]
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        write_provenance(folder, config, done.report)
        facts = read_facts(folder)
        assert (facts["base_model"], facts["base_model_relation"]) == (base, relation)
        assert (facts["license"], facts["language"]) == ("apache-2.0", ["en", "de"])
        assert facts["datasets"] == ["owner/text"]


def test_the_card_says_which_layers_were_kept_and_names_no_folder_of_this_machine(
    done: Any, job: dict[str, Any], tmp_path: Path
) -> None:
    teacher = Path(job["teacher"]["model"])
    total = json.loads((teacher / "config.json").read_text())["num_hidden_layers"]
    student = {"from_teacher": {"layers": 1, "pick": "last", "intermediate_size": 8}}
    (tmp_path / "config.json").write_text("{}")
    write_provenance(tmp_path, parse_config(job | {"student": student}), done.report)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    kept = f"1 of the {total} layers of `{teacher.name}` (numbers {total - 1})"
    assert f"- Start: {kept}, intermediate_size cut to 8." in card
    assert str(teacher.parent) not in card and str(Path(job["data"]["train"]).parent) not in card
    gguf = {"teacher": {"model": str(teacher), "gguf_file": "big-q4.gguf"}}
    write_provenance(tmp_path, parse_config(job | gguf), done.report)
    assert f"- Teacher: the file `big-q4.gguf` of `{teacher.name}`." in (
        tmp_path / "README.md"
    ).read_text(encoding="utf-8")


def test_the_card_takes_licence_and_languages_from_a_gguf_file_and_from_the_base_model(
    done: Any, job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for name, front in {
        "base": "license: mit\nlanguage: fr",
        "tuned": "base_model: base",
        "elsewhere": f"base_model: {tmp_path}/base",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text(f"---\n{front}\n---\n")
    writer = gguf.GGUFWriter(tmp_path / "tuned" / "tiny.gguf", "llama")
    writer.add_license("gemma")
    writer.add_languages(["en", "de"])
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    elsewhere = parse_config(job | {"teacher": {"model": str(tmp_path / "elsewhere")}})
    write_provenance(tmp_path, elsewhere, done.report)
    assert read_facts(tmp_path)["license"] == "unknown", "a card opens no folder by its path"
    for more, licence, language in (
        ({}, "mit", "fr"),
        ({"gguf_file": "tiny.gguf"}, "gemma", ["en", "de"]),
    ):
        teacher = {"model": str(tmp_path / "tuned"), **more}
        write_provenance(tmp_path, parse_config(job | {"teacher": teacher}), done.report)
        facts = read_facts(tmp_path)
        assert (facts["license"], facts["language"]) == (licence, language)
        card = (tmp_path / "README.md").read_text(encoding="utf-8")
        assert f"- Licence: {licence}, the licence of" in card and "no card names them" not in card


def test_an_adapter_without_its_base_says_what_it_adapts(
    done: Any, job: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / ADAPTER_FOLDER).mkdir()
    settings = {"base_model_name_or_path": "owner/start"}
    write_json(tmp_path / ADAPTER_FOLDER / "adapter_config.json", settings)
    student = {"model": "owner/start", "lora": {"rank": 2, "merge": False}}
    write_provenance(tmp_path, parse_config(job | {"student": student}), done.report)
    facts = read_facts(tmp_path)
    assert (facts["base_model"], facts["base_model_relation"]) == ("owner/start", "adapter")
    assert facts["library_name"] == "peft"
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert 'AutoModelForCausalLM.from_pretrained("owner/start")' in card


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads it
@pytest.mark.parametrize("chats", [False, True])
def test_the_code_for_an_adapter_with_its_base_and_for_chats_generates_text(
    done: Any, tmp_path: Path, chats: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    from kd.models.loading import build_student

    job = done.config.model_dump(mode="json")
    job["student"] = {"from_teacher": {"layers": 1}, "lora": {"rank": 2, "merge": False}}
    job["data"] |= {"format": "messages"} if chats else {}
    config = parse_config(job)
    tokenizer = load_tokenizer(done.run / "student")
    if chats:
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    student = build_student(config.student, tokenizer, 32, config.teacher_files)
    save_student(student, tokenizer, tmp_path, config.student)
    write_provenance(tmp_path, config, done.report)
    assert "PeftModel" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert ("Hello! Who are you?" in run_code(tmp_path, tmp_path / "use.py", capsys)) == chats


# ---------------------------------------------------------------------- without the teacher


def test_it_says_why_a_teacher_is_not_loaded(
    tiny_teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    local = TeacherConfig(model=str(tiny_teacher))
    assert find_reason_without(local, cpu) is None
    assert find_reason_without(TeacherConfig(model="no/such"), cpu) == (
        "its folder is not on this machine"
    )
    server = TeacherConfig(
        model="m", backend="http", url="http://127.0.0.1:1/v1", tokenizer=str(tiny_teacher)
    )
    assert find_reason_without(server, cpu) == "it runs on a server"
    assert find_reason_without(local, cpu, limit=1 << 40) is None
    reason = find_reason_without(local, cpu, limit=1 << 20)
    assert reason is not None and reason.endswith("of memory, and 0 bytes is free")
    monkeypatch.setattr(side_by_side, "measure_free_memory", lambda device: 4096)
    reason = find_reason_without(local, cpu)
    assert reason is not None and re.fullmatch(
        r"it needs about \S+ \w+ of memory, and 4 KiB is free", reason
    )


def test_a_quantized_teacher_that_cannot_be_built_is_left_out(done: Any, tmp_path: Path) -> None:
    """The finished student is reported all the same."""
    folder = tmp_path / "teacher"
    shutil.copytree(done.config.teacher.model, folder)
    settings = read_json(folder / "config.json")
    write_json(folder / "config.json", settings | {"model_type": "unheard_of"})
    changes = {"model": str(folder), "quantization": "int8"}
    config = done.config.model_copy(
        update={
            "teacher": done.config.teacher.model_copy(update=changes),
            "evaluation": done.config.evaluation.model_copy(update={"baseline": False}),
        }
    )
    _, source = open_source(done.config, done.home, done.run, SILENT)
    student = load_model(done.run / "student", torch.float32)
    run = EvaluationContext(tmp_path, load_tokenizer(done.run / "student"), SILENT, done.run)
    found = evaluate_in_depth(config, source, student, run, with_start=False)["evaluation"]
    assert found["models"].keys() == {STUDENT}
    assert "unheard_of" in found["without_teacher"]


@pytest.mark.long
def test_a_student_that_cannot_generate_is_reported_all_the_same(done: Any, tmp_path: Path) -> None:
    """Only a job that asks for prompts fails: the finished student is not given up for samples."""
    _, source = open_source(done.config, done.home, done.run, SILENT)
    student = load_model(done.run / "student", torch.float32)
    student.generate = None
    events: list[Event] = []
    run = EvaluationContext(
        tmp_path, load_tokenizer(done.run / "student"), Monitor(events.append), done.run
    )
    quiet = {"baseline": False, "prompts": ()}
    for prompts in ((), ("She was",)):
        wanted = done.config.evaluation.model_copy(update=quiet | {"prompts": prompts})
        config = done.config.model_copy(update={"evaluation": wanted})
        if prompts:
            with pytest.raises(TypeError):
                evaluate_in_depth(config, source, student, run, with_start=False)
            continue
        found = evaluate_in_depth(config, source, student, run, with_start=False)["evaluation"]
        assert found["models"].keys() == {STUDENT} and "samples" not in found
        (message,) = (event.data["message"] for event in events if event.type == "warning")
        assert "could not be compared side by side: TypeError" in message
