"""No tensor is made up or dropped unsaid, and a model is tied as its tensors are."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kd.addresses import ModelSource
from kd.config.jobfile import parse_config
from kd.config.student import StudentConfig
from kd.config.teacher import TeacherConfig
from kd.errors import ConfigError, ModelError
from kd.models.adapters import merge_adapters
from kd.models.folder import ModelFolder, compute_fingerprint
from kd.models.loading import (
    ReadingPlan,
    build_hollow_student,
    build_student,
    check_stored_model,
    load_hollow,
    load_model,
    load_teacher,
    require_trainable_student,
)
from kd.models.saving import load_saved_student, save_student
from kd.models.teacher_files import TeacherFiles
from kd.models.tokenizers import load_tokenizer
from kd.preflight.problems import Folders, Machine, find_problems
from kd.preflight.stored_models import note_models
from kd.progress import Monitor, Notice
from tests.support.kd.zoo import LLAMA, build, some_tokens, write_gguf

pytestmark = pytest.mark.usefixtures("one_thread")

Tensors = dict[str, Tensor]
CPU = torch.device("cpu")
LAYERS = 2


@pytest.fixture
def rewrite(copied_teacher: Path) -> Callable[[Callable[[Tensors], Tensors]], Path]:
    """Change the tensors of a copy of the tiny teacher; it is tied, and has two layers."""

    def rewrite(change: Callable[[Tensors], Tensors]) -> Path:
        file = copied_teacher / "model.safetensors"
        save_file(change(load_file(file)), file, {"format": "pt"})
        return copied_teacher

    return rewrite


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: each for name, each in tensors.items() if part not in name}


def behind(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + name: each for name, each in tensors.items()}


def with_head(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0).contiguous()}


def set_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")


# ---------------------------------------------------------------------- missing tensors


#: How a tensor is missing: a change of the tensors, one of the configuration, and what is said.
DAMAGES: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any], str]] = {
    "compiled": (behind("_orig_mod."), {}, r"they hold _orig_mod\.model\."),
    "parallel": (behind("module."), {}, r"they hold module\.model\."),
    "peft": (behind("base_model.model."), {}, r"they hold base_model\.model\.model\."),
    "embedding": (without("embed_tokens"), {}, r"Llama\w+: lm_head\.weight, model\.embed_tokens"),
    "norm": (without("model.norm"), {}, r": model\.norm\.weight\."),
    "projection": (without("1.mlp.up_proj"), {}, r": model\.layers\.1\.mlp\.up_proj\.weight\."),
    "head": (dict, {"tie_word_embeddings": False}, r": lm_head\.weight\."),
    "layers": (dict, {"num_hidden_layers": 3}, r"model\.layers\.2\..* and \d+ others\."),
    "shape": (dict, {"intermediate_size": 40}, r"mlp\.\w+_proj\.weight: .*, expected \("),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_missing_tensors_are_refused_before_and_while_they_are_read(
    rewrite: Any, tokenizer: Any, damage: str
) -> None:
    change, fields, words = DAMAGES[damage]
    folder = rewrite(change)
    set_config(folder, **fields)
    teacher = TeacherConfig(model=str(folder))
    own = StudentConfig(model=str(folder), lora={"rank": 2})
    cut = StudentConfig(from_teacher={"layers": 1})
    for read in (
        lambda: check_stored_model(folder),
        lambda: load_teacher(TeacherFiles(teacher, folder), CPU),
        lambda: load_teacher(
            TeacherFiles(TeacherConfig(model="x", parallel="device_map"), folder), CPU
        ),
        lambda: build_student(own, tokenizer, 32),
        lambda: build_student(cut, tokenizer, 32, teacher.files),
        lambda: load_saved_student(folder),
    ):
        with pytest.raises(ModelError, match=words):
            read()


def as_gptq(tensors: Tensors) -> Tensors:
    """Name the tensors as GPTQ does; the numbers do not matter."""
    changed = dict(tensors)
    for name in tensors:
        if "_proj" in name:
            del changed[name]
            module = name.removesuffix(".weight")
            for end in ("qweight", "qzeros", "scales"):
                changed[f"{module}.{end}"] = torch.ones(4, 8, dtype=torch.int32)
    return changed


@pytest.mark.parametrize("damage", ["compiled", "embedding", "norm", "layers"])
def test_of_a_quantised_model_the_embedding_and_the_norms_are_compared_before(
    rewrite: Any, damage: str
) -> None:
    marked = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    folder = rewrite(as_gptq)
    set_config(folder, **marked)
    assert check_stored_model(folder) == []
    change, fields, _ = DAMAGES[damage]
    rewrite(change)
    set_config(folder, **fields)
    with pytest.raises(ModelError, match="do not hold all tensors"):
        check_stored_model(folder)


def test_an_index_that_lists_half_of_the_tensors_is_refused(rewrite: Any) -> None:
    folder = rewrite(without("layers.1"))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    save_file({"model.layers.1.mlp.up_proj.weight": torch.ones(2)}, folder / "other.safetensors")
    index = folder / "model.safetensors.index.json"
    named = {"model.norm.weight": "model-00001-of-00002.safetensors"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": named}), encoding="utf-8")
    for read in (check_stored_model, lambda path: load_model(path, torch.float32)):
        with pytest.raises(ModelError, match=r"do not hold all tensors.*model\.layers\.1\."):
            read(folder)
    named["model.layers.1.mlp.up_proj.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps({"metadata": {}, "weight_map": named}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors cannot be read"):
        check_stored_model(folder)
    index.write_text("[]", encoding="utf-8")
    with pytest.raises(ModelError, match=r"index\.json cannot be read"):
        check_stored_model(folder)


def test_a_tensor_that_a_gguf_file_lacks_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA | {"vocab_size": 2048}))
    write_gguf(model, tokenizer, tmp_path / "x.gguf", np.float32, left_out="blk.1.ffn_up")
    with pytest.raises(ModelError, match=r": model\.layers\.1\.mlp\.up_proj\.weight\."):
        load_model(tmp_path, torch.float32, "x.gguf")


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "opt", "mamba", "deepseek"])
def test_what_a_model_can_do_without_is_not_missing(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    assert [each for each in check_stored_model(tmp_path) if "MTP" not in each.what] == []


def test_a_head_that_no_configuration_ties_is_missing_in_a_model_of_images(tmp_path: Path) -> None:
    text = LLAMA | {"model_type": "llama", "tie_word_embeddings": False}
    images = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "image_size": 28,
        "num_attention_heads": 2, "patch_size": 14, "model_type": "clip_vision_model",
    }  # fmt: skip
    shape = transformers.LlavaConfig(
        text_config=text, vision_config=images, tie_word_embeddings=False
    )
    transformers.LlavaForConditionalGeneration(shape).save_pretrained(tmp_path)
    assert check_stored_model(tmp_path) == []  # those of images are not worth a word
    file = tmp_path / "model.safetensors"
    save_file(without("lm_head")(load_file(file)), file, {"format": "pt"})
    for read in (check_stored_model, lambda path: load_model(path, torch.float32)):
        with pytest.raises(ModelError, match=r": lm_head\.weight\."):
            read(tmp_path)


# ---------------------------------------------------------------------- what is named


def make_job(folder: Path, **changes: Any) -> Any:
    job = {
        "teacher": {"model": str(folder)},
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {"train": str(folder / "text.txt")},
        "train": {"max_steps": 1},
    }
    (folder / "text.txt").write_text("It was a dark night. " * 200, encoding="utf-8")
    return parse_config(job | changes)


def test_tensors_without_a_use_are_named_once(rewrite: Any, tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.q_proj.bias", "model.layers.7.mlp.up_proj.weight"}
    folder = rewrite(lambda tensors: tensors | {name: torch.ones(4) for name in extra})
    notices: list[Notice] = []
    folders = Folders(tmp_path, tmp_path, opened=True, note=notices.append)
    config = make_job(folder)
    assert find_problems(config, folders) == []
    sent: list[Any] = []
    monitor = Monitor(listen=sent.append)
    for stage in ("precompute", "train", "precompute"):
        note_models(config, stage, monitor)
    assert [*monitor.notices] == notices and len(sent) == 1
    assert (notices[0].count, notices[0].example) == (2, min(extra))


def test_a_job_names_the_model_that_lacks_tensors(rewrite: Any, tmp_path: Path) -> None:
    folder = rewrite(without("1.mlp.up_proj"))
    config = make_job(folder, student={"model": str(folder)})
    found = find_problems(config, Folders(tmp_path, tmp_path, opened=True))
    assert [each.pointer for each in found] == ["/teacher/model", "/student/model"]
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj"):
        note_models(config, "precompute", Monitor())
    # The teacher of a sealed cache is not read again.
    assert note_models(make_job(folder), "train", Monitor()) is None


def test_a_gguf_file_without_its_package_is_known_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    config = make_job(tmp_path, teacher={"model": str(tmp_path), "gguf_file": "x.gguf"})
    assert find_problems(config, machine=Machine()) == []
    monkeypatch.setattr("kd.preflight.teacher_checks.find_spec", lambda name: None)
    found = find_problems(config, machine=Machine())
    assert [each.pointer for each in found] == ["/teacher/gguf_file"]
    assert "potstill[gguf]" in found[0].remedy


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4665\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "x.gguf"])
def test_a_pointer_of_git_lfs_is_named(copied_teacher: Path, name: str) -> None:
    (copied_teacher / name).write_text(POINTER, encoding="utf-8")
    gguf_file = name if name.endswith("gguf") else None
    config = make_job(
        copied_teacher, teacher={"model": str(copied_teacher), "gguf_file": gguf_file}
    )
    found = find_problems(config, Folders(Path(), copied_teacher))
    assert any(f"{name} is a pointer of Git LFS" in each.detail for each in found), found
    assert any("git lfs pull" in each.remedy for each in found)
    if gguf_file is None:
        read: Any = load_tokenizer if name == "tokenizer.json" else check_stored_model
        with pytest.raises(ModelError, match=f"{name} is a pointer of Git LFS"):
            read(copied_teacher)


# ---------------------------------------------------------------------- a head of its own


@torch.no_grad()
def compute_kl(student: PreTrainedModel, teacher: PreTrainedModel) -> float:
    p, q = (model.eval()(some_tokens()).logits.log_softmax(-1) for model in (teacher, student))
    return float(functional.kl_div(q, p, log_target=True, reduction="batchmean"))


def count(model: PreTrainedModel) -> int:
    return sum(each.numel() for each in model.parameters())


@pytest.mark.long
def test_a_head_of_its_own_stays_one_where_the_configuration_ties_it(
    rewrite: Any, tokenizer: Any, tmp_path: Path
) -> None:
    folder = rewrite(with_head)
    before = compute_fingerprint(folder)
    teacher = load_model(folder, torch.float32)
    head, embedding = teacher.get_output_embeddings().weight, teacher.get_input_embeddings().weight
    assert torch.equal(head, embedding.flip(0)) and not teacher.config.tie_word_embeddings
    (notice,) = check_stored_model(folder)
    assert "LM heads" in notice.what and "tie_word_embeddings" in notice.example

    named = ModelSource(str(folder))
    for plan in (
        StudentConfig(from_teacher={"layers": LAYERS}),
        StudentConfig(from_teacher={"layers": LAYERS}, lora={"rank": 2, "merge": False}),
        StudentConfig(model=str(folder), lora={"rank": 2}),
    ):
        student = build_student(plan, tokenizer, 32, named)
        assert compute_kl(student, teacher) == 0
        shape = build_hollow_student(plan, tokenizer, 32, named)
        assert count(student) == count(shape) >= count(teacher)
        saved = tmp_path / f"saved{plan.from_teacher is None}{plan.lora is None}"
        save_student(student, tokenizer, saved, plan)
        held = saved if (saved / "config.json").is_file() else saved / "base"
        assert ModelFolder(held).config["tie_word_embeddings"] is False
        assert "lm_head.weight" in ModelFolder(held).read_parameter_shapes()
        assert check_stored_model(held) == []
        assert compute_kl(load_saved_student(saved), teacher) == 0
    with torch.device("meta"):
        assert count(load_hollow(folder, ReadingPlan(torch.float32))) == count(teacher)
    assert count(require_trainable_student(plan, tokenizer, 32, named)) == count(shape)
    assert compute_fingerprint(folder) == before


@pytest.mark.parametrize("name", ["gpt2", "gemma2 soft cap", "cohere2 scale", "falcon-h1"])
def test_heads_of_their_own_are_found_under_each_name(name: str, tmp_path: Path) -> None:
    model = build(name, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    own = {"lm_head.weight": model.get_output_embeddings().weight.detach()}
    for change, notices in ((lambda x: x.clone(), 0), (lambda x: x.flip(0).contiguous(), 1)):
        save_file(load_file(file) | {key: change(x) for key, x in own.items()}, file)
        assert len(check_stored_model(tmp_path)) == notices
        loaded = load_model(tmp_path, torch.float32)
        assert loaded.config.tie_word_embeddings == (not notices)
        with torch.device("meta"):
            assert count(load_hollow(tmp_path, ReadingPlan(torch.float32))) == count(loaded)


# ---------------------------------------------------------------------- layers for later tokens


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("deepseek", "num_nextn_predict_layers"),
        ("mixtral", "num_mtp_modules"),
        ("qwen3", "mtp_num_hidden_layers"),
    ],
)
def test_layers_for_later_tokens_are_not_counted_in_what_is_saved(
    name: str, field: str, tokenizer: Any, tmp_path: Path
) -> None:
    build(name).save_pretrained(tmp_path / "own")
    set_config(tmp_path / "own", **{field: 1})
    (notice,) = check_stored_model(tmp_path / "own")
    assert notice.example == f"{field}: 1"
    teacher = ModelSource(str(tmp_path / "own"))
    for plan in (
        StudentConfig(model=str(tmp_path / "own")),
        StudentConfig(from_teacher={"layers": 1}),
        StudentConfig(model=str(tmp_path / "own"), lora={"rank": 2, "targets": ["o_proj"]}),
    ):
        student = build_student(plan, tokenizer, 32, teacher)
        if plan.lora is not None:
            merge_adapters(student)
            plan = StudentConfig(model=str(tmp_path / "own"))
        save_student(student, tokenizer, tmp_path / "saved", plan)
        assert ModelFolder(tmp_path / "saved").config[field] == 0
        assert check_stored_model(tmp_path / "saved") == []
        shutil.rmtree(tmp_path / "saved")
