"""The folder of the finished student: whole, merged, or adapters alone, with its model card."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kd.addresses import ModelSource
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.config.student import StudentConfig
from kd.evaluation.model_card import write_provenance
from kd.models.adapters import has_adapters, list_trained_parameters, merge_adapters
from kd.models.loading import build_student, load_model
from kd.models.saving import load_saved_student, save_student

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS_BL = torch.arange(48).view(3, 16)


@torch.no_grad()
def logits_of(model: nn.Module) -> Tensor:
    return model.eval()(input_ids=TOKENS_BL).logits


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Compare within 1e-5 of the largest logit, because the tiny teacher's logits are large."""
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def job_of(teacher: Path, text: Path, **student: Any) -> JobConfig:
    return parse_config(
        {
            "teacher": {"model": str(teacher)},
            "student": student,
            "data": {"train": str(text)},
            "train": {"max_steps": 1},
        }
    )


def adapted(plan: StudentConfig, tokenizer: Any, teacher: Path) -> PreTrainedModel:
    """Return the student of ``plan`` with adapters that change its logits."""
    torch.manual_seed(0)
    student = build_student(plan, tokenizer, 64, ModelSource(str(teacher)))
    with torch.no_grad():
        for parameter in list_trained_parameters(student):
            parameter.normal_(0.0, 0.1)
    return student.eval()


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_student_without_adapters_is_saved_as_it_is(
    tiny_teacher: Path, tokenizer: Any, tmp_path: Path
) -> None:
    student = load_model(tiny_teacher, torch.float32)
    save_student(student, tokenizer, tmp_path)
    assert torch.equal(logits_of(load_saved_student(tmp_path)), logits_of(student))
    assert not any(name.startswith(("adapter", "base")) for name in names_in(tmp_path))


def test_merged_adapters_make_a_plain_model_beside_which_they_are_kept(
    tiny_teacher: Path, tokenizer: Any, tmp_path: Path
) -> None:
    plan = StudentConfig(model=str(tiny_teacher), lora={"rank": 4})
    student = adapted(plan, tokenizer, tiny_teacher)
    expected = logits_of(student)
    save_student(student, tokenizer, tmp_path, plan)
    assert names_in(tmp_path) >= {
        "model.safetensors",
        "tokenizer.json",
        "adapter/adapter_model.safetensors",
        "adapter/adapter_config.json",
    }
    anywhere = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not has_adapters(anywhere)
    assert_same(logits_of(anywhere), expected)
    assert torch.equal(logits_of(load_saved_student(tmp_path)), logits_of(anywhere))


def test_the_sum_is_rounded_once(tiny_teacher: Path, tokenizer: Any, tmp_path: Path) -> None:
    """W + scale B A is computed in float32 and then rounded to bfloat16; the saved adapters stay
    float32.
    """
    plan = StudentConfig(model=str(tiny_teacher), lora={"rank": 4})
    save_student(adapted(plan, tokenizer, tiny_teacher), tokenizer, tmp_path, plan, torch.bfloat16)
    merged = merge_adapters(adapted(plan, tokenizer, tiny_teacher)).state_dict()
    saved = load_model(tmp_path, torch.bfloat16).state_dict()
    assert all(torch.equal(saved[name], tensor.bfloat16()) for name, tensor in merged.items())
    rounded_first = adapted(plan, tokenizer, tiny_teacher)
    nn.Module.to(rounded_first, torch.bfloat16)
    twice = merge_adapters(rounded_first).state_dict()
    assert not all(torch.equal(saved[name], tensor) for name, tensor in twice.items())
    assert load_model(tmp_path, torch.float32).dtype == torch.float32
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 4 * sum(
        parameter.numel()
        for parameter in list_trained_parameters(adapted(plan, tokenizer, tiny_teacher))
    )


def test_adapters_alone_are_saved_without_the_base_that_has_a_folder(
    tiny_teacher: Path, tokenizer: Any, tmp_path: Path
) -> None:
    plan = StudentConfig(model=str(tiny_teacher), lora={"rank": 4, "merge": False})
    student = adapted(plan, tokenizer, tiny_teacher)
    expected = logits_of(student)
    save_student(student, tokenizer, tmp_path, plan)
    assert "config.json" not in names_in(tmp_path) and "model.safetensors" not in names_in(tmp_path)
    assert (
        AutoTokenizer.from_pretrained(tmp_path)("Sir Walter")["input_ids"]
        == tokenizer("Sir Walter")["input_ids"]
    )
    assert_same(logits_of(load_saved_student(tmp_path)), expected)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft asks for it
def test_a_base_that_lies_nowhere_else_is_saved_beside_them(
    tiny_teacher: Path, tokenizer: Any, tmp_path: Path
) -> None:
    from peft import PeftModel

    plan = StudentConfig(
        from_teacher={"layers": 1, "hidden_size": 16}, lora={"rank": 4, "merge": False}
    )
    student = adapted(plan, tokenizer, tiny_teacher)
    expected = logits_of(student)
    save_student(student, tokenizer, tmp_path, plan)
    assert "base/model.safetensors" in names_in(tmp_path) and "model.safetensors" not in names_in(
        tmp_path
    )
    assert_same(logits_of(load_saved_student(tmp_path)), expected)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert not torch.allclose(logits_of(base), expected, atol=1e-3)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert_same(logits_of(theirs), expected)


REPORT = {
    "name": "x",
    "teacher": None,
    "steps": 1,
    "kept_step": 1,
    "tokens": 8,
    "alpha": 1.0,
    "parameters": 5,
    "temperature": 1.0,
}


@pytest.mark.parametrize(
    ("student", "library", "use"),
    [
        (
            {"lora": {}},
            "transformers",
            "model = AutoModelForCausalLM.from_pretrained(folder)",
        ),
        (
            {"lora": {"merge": False}},
            "peft",
            'PeftModel.from_pretrained(model, f"{folder}/adapter")',
        ),
    ],
)
def test_the_card_says_how_to_load_it(
    student: dict[str, Any],
    library: str,
    use: str,
    tiny_teacher: Path,
    tiny_text: Path,
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    config = job_of(tiny_teacher, tiny_text, model=str(tiny_teacher), **student)
    assert config.student is not None
    save_student(
        adapted(config.student, tokenizer, tiny_teacher), tokenizer, tmp_path, config.student
    )
    write_provenance(tmp_path, config, REPORT)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"library_name: {library}" in card and use in card
    assert tiny_teacher.name in card, "its weights began as those of this model"
    assert str(tiny_teacher.parent) not in card, "the folders of this machine mean nothing"
    assert (f'from_pretrained("path/to/{tiny_teacher.name}")' in card) is (library == "peft")
    code = card.split("```python\n")[1].split("```")[0]
    compile(code, "README.md", "exec")
