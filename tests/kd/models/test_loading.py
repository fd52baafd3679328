"""Teachers and students are loaded or built: frozen, from folders, from GGUF, or fresh."""

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from bench.support.waiting import PATIENCE_SECONDS
from kd.addresses import ModelSource
from kd.config.student import StudentConfig, StudentInit
from kd.config.teacher import TeacherConfig
from kd.errors import ModelError
from kd.memory.step_memory import read_peak_memory, read_resident_memory, reset_peak_memory
from kd.models.folder import compute_fingerprint, require_allowed_remote_code
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import find_lm_head
from kd.models.loading import (
    ReadingPlan,
    build_student,
    load_model,
    load_teacher,
    read_model,
    require_trainable_student,
)
from kd.models.saving import save_student
from kd.models.teacher_files import TeacherFiles
from kd.models.tokenizers import (
    get_vocabulary_size,
    load_tokenizer,
)
from tests.support.caches import flip
from tests.support.kd.zoo import (
    LLAMA,
    write_gguf,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------------- loading


def test_the_teacher_is_frozen_in_evaluation_mode_and_in_its_precision(tiny_teacher):
    cpu = torch.device("cpu")
    for dtype, expected in [("auto", torch.float32), ("bfloat16", torch.bfloat16)]:
        teacher = load_teacher(
            TeacherFiles(TeacherConfig(model=str(tiny_teacher), dtype=dtype), tiny_teacher), cpu
        )
        assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
        assert {p.dtype for p in teacher.parameters()} == {expected}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_model_is_read_as_transformers_reads_it(tokenizer, tmp_path, tied, dtype):
    save_student(fresh(tokenizer, tie_word_embeddings=tied), tokenizer, tmp_path)
    ours = load_model(tmp_path, dtype)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == dtype and torch.equal(tensor, theirs[name]), name
    embedding = ours.get_input_embeddings().weight
    assert (ours.get_output_embeddings().weight is embedding) == tied


@pytest.fixture(scope="module")
def large_model(tmp_path_factory) -> Path:
    """A model of 32 MiB in bfloat16, most of it the embedding."""
    folder = tmp_path_factory.mktemp("large")
    shape = LlamaConfig(**LLAMA | {"vocab_size": 2**18})
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
    return folder


def measure_reading(folder: Path, how: ReadingPlan) -> tuple[PreTrainedModel, int]:
    """Read a model: return it, and the most bytes of this process that this took meanwhile."""
    before = read_resident_memory()
    reset_peak_memory(torch.device("cpu"))
    model = read_model(folder, how)
    return model, read_peak_memory(torch.device("cpu")) - before


def test_the_host_holds_one_copy_of_a_model_that_it_reads(large_model):
    """Reading maps the file, which is half of the converted weights here."""
    model, taken = measure_reading(large_model, ReadingPlan(torch.float32))
    size = sum(4 * each.numel() for each in model.parameters())
    assert size > 2**26 and taken < 1.75 * size


def test_the_host_holds_no_copy_of_a_model_for_another_device(large_model):
    meta = torch.device("meta")
    model, taken = measure_reading(large_model, ReadingPlan(torch.float32, meta))
    tensors = [*model.parameters(), *model.buffers()]
    assert {each.device for each in tensors} == {meta}
    assert {each.dtype for each in tensors} == {torch.float32}
    assert taken < 2**24


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gets_each_weight_once(large_model):
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = read_model(large_model, ReadingPlan(torch.float32, torch.device("cuda")))
    taken = torch.cuda.memory_allocated() - before
    theirs = load_model(large_model, torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.is_cuda and torch.equal(tensor.cpu(), theirs[name]), name
    assert taken < 1.1 * sum(4 * each.numel() for each in theirs.values())


def test_a_pickle_is_never_read(copied_teacher):
    (copied_teacher / "model.safetensors").rename(copied_teacher / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor its index"):
        load_model(copied_teacher, torch.float32)


def test_damaged_weights_and_models_of_another_kind_are_refused(copied_teacher):
    weights = (copied_teacher / "model.safetensors").read_bytes()
    (copied_teacher / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: SafetensorError"):
        load_model(copied_teacher, torch.float32)
    (copied_teacher / "model.safetensors").write_bytes(weights)
    (copied_teacher / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    with pytest.raises(ModelError, match="causal language model"):
        load_model(copied_teacher, torch.float32)


def test_code_that_comes_with_a_model_needs_the_operators_consent(monkeypatch):
    source = ModelSource("x", trust_remote_code=True)
    monkeypatch.delenv("KD_TRUST_REMOTE_CODE", raising=False)
    with pytest.raises(ModelError, match="does not allow"):
        require_allowed_remote_code(source)
    monkeypatch.setenv("KD_TRUST_REMOTE_CODE", "1")
    assert require_allowed_remote_code(source)
    assert not require_allowed_remote_code(ModelSource("x"))


# ---------------------------------------------------------------------- students


def fresh(tokenizer: Any, seed: int = 0, context: int = 64, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    init = StudentInit(**{"layers": 1, "hidden_size": 32} | changes)
    return build_student(StudentConfig(init=init), tokenizer, context)


def test_a_fresh_student_is_a_llama_of_the_shape_asked_for(tokenizer):
    student = fresh(
        tokenizer,
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
    )
    layer = student.model.layers[0]
    assert student.get_output_embeddings().weight.shape == (2048, 48)
    assert layer.self_attn.k_proj.weight.shape == (24, 48) and layer.mlp.up_proj.weight.shape == (
        40,
        48,
    )
    assert student.get_output_embeddings().weight is student.get_input_embeddings().weight
    assert (
        student.config.eos_token_id == tokenizer.eos_token_id
        and student.config.max_position_embeddings == 2048
    )
    untied = fresh(tokenizer, tie_word_embeddings=False, context=4096)
    assert untied.get_output_embeddings().weight is not untied.get_input_embeddings().weight
    assert untied.config.max_position_embeddings == 4096


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_a_fresh_student_stops_where_its_teacher_does(tokenizer, tiny_teacher, tmp_path, file):
    """The teacher's list is in either of its files; its other settings are in one of them."""
    teacher = shutil.copytree(tiny_teacher, tmp_path / "teacher")
    settings = {"eos_token_id": [7, 0], "temperature": 0.9, "do_sample": True}
    (teacher / "generation_config.json").unlink(missing_ok=True)
    known = json.loads((teacher / file).read_text()) if file == "config.json" else {}
    (teacher / file).write_text(json.dumps(known | settings))
    plan = StudentConfig(init=StudentInit(layers=1, hidden_size=32))
    student = build_student(plan, tokenizer, 64, ModelSource(str(teacher)))
    save_student(student, tokenizer, tmp_path / "student")
    saved = GenerationConfig.from_pretrained(tmp_path / "student")
    assert saved.eos_token_id == [7, 0]
    assert saved.temperature == (0.9 if file == "generation_config.json" else None)
    assert json.loads((tmp_path / "student" / "config.json").read_text())["eos_token_id"] == [7, 0]


def test_settings_that_the_library_would_not_save_lose_no_student(tokenizer, tmp_path):
    student = fresh(tokenizer)
    student.generation_config = GenerationConfig(
        do_sample=False, temperature=0.9, eos_token_id=[7, 0]
    )
    save_student(student, tokenizer, tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [7, 0]


def test_a_fresh_student_is_a_function_of_the_seed(tokenizer):
    one, same, other = (fresh(tokenizer, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_student_may_start_from_a_folder(tiny_teacher, tokenizer):
    student = build_student(StudentConfig(model=str(tiny_teacher)), tokenizer, 64)
    original = load_model(tiny_teacher, torch.float32)
    assert all(
        torch.equal(a, b) for a, b in zip(student.parameters(), original.parameters(), strict=True)
    )
    assert all(parameter.requires_grad for parameter in student.parameters())


LOAD = """
import socket, sys
socket.socket.connect = None  # a call would fail: there is no network here
import numpy as np, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer("Sir Walter Elliot, of Kellynch Hall", return_tensors="pt")["input_ids"]
torch.set_num_threads(1)
with torch.no_grad():
    logits = model(ids).logits
    written = model.generate(ids, max_new_tokens=5, do_sample=False)
special = {"pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id}
np.savez(out, ids=ids, logits=logits, written=written, **special)
assert not [name for name in sys.modules if name.split(".")[0] in ("kd", "cache", "services")]
"""


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.long
def test_a_saved_student_loads_offline_in_a_fresh_process_and_computes_the_same(
    tokenizer, tmp_path, tied
):
    student = fresh(tokenizer, tie_word_embeddings=tied).eval()
    save_student(student, tokenizer, tmp_path / "student")
    assert {path.name for path in (tmp_path / "student").iterdir()} >= {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HF_"))
    }
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-c", LOAD),
            *(str(tmp_path / "student"), str(tmp_path / "found.npz")),
        ],
        capture_output=True, text=True, cwd=tmp_path, env=clean | {"HF_HUB_OFFLINE": "1"},
        timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "found.npz")
    ids = tokenizer("Sir Walter Elliot, of Kellynch Hall", return_tensors="pt")["input_ids"]
    assert np.array_equal(found["ids"], ids)
    with torch.no_grad():
        assert np.array_equal(found["logits"], student(ids).logits)
    assert len(ids[0]) < len(found["written"][0]) <= len(ids[0]) + 5
    assert found["eos"] == tokenizer.eos_token_id


# ---------------------------------------------------------------------- GGUF


@pytest.mark.parametrize(
    "dtype, tolerance", [(np.float32, 1e-6), (np.float16, 2e-3)], ids=["F32", "F16"]
)
def test_a_gguf_teacher_computes_what_its_original_computes(tokenizer, tmp_path, dtype, tolerance):
    torch.manual_seed(0)
    shape = LlamaConfig(
        **LLAMA | {"vocab_size": 2048, "num_hidden_layers": 1}, tie_word_embeddings=False
    )
    original = LlamaForCausalLM(shape).eval()
    write_gguf(original, tokenizer, tmp_path / "tiny.gguf", dtype)
    config = TeacherConfig(model=str(tmp_path), gguf_file="tiny.gguf")
    teacher = load_teacher(TeacherFiles(config, tmp_path), torch.device("cpu"))
    loaded = load_tokenizer(tmp_path, "tiny.gguf")
    text = "Sir Walter Elliot, of Kellynch Hall, in Somersetshire, was a man who"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert get_vocabulary_size(loaded) == 2048 and loaded.eos_token_id == tokenizer.eos_token_id
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    head = find_lm_head(teacher, 2048)
    with torch.no_grad():
        ours = head.compute_logits(compute_hidden_states(teacher, ids)[0])
        torch.testing.assert_close(ours, original(ids).logits[0], rtol=tolerance, atol=tolerance)
    before = compute_fingerprint(tmp_path, "tiny.gguf")
    flip(tmp_path / "tiny.gguf", -8)
    assert compute_fingerprint(tmp_path, "tiny.gguf") != before


def test_a_student_cut_out_of_a_gguf_teacher_is_a_model_like_any_other(tokenizer, tmp_path):
    """transformers marks models that it unpacked from GGUF, and refuses to save a model with the
    mark.
    """
    torch.manual_seed(0)
    shape = LlamaConfig(
        **LLAMA | {"vocab_size": 2048, "num_hidden_layers": 2}, tie_word_embeddings=False
    )
    write_gguf(LlamaForCausalLM(shape), tokenizer, tmp_path / "tiny.gguf", np.float32)
    teacher = ModelSource(str(tmp_path), gguf_file="tiny.gguf")
    config = StudentConfig.model_validate({"from_teacher": {"layers": 1}})
    build_student(config, tokenizer, 32, teacher).save_pretrained(tmp_path / "student")
    written = json.loads((tmp_path / "student" / "config.json").read_text())
    assert "quantization_config" not in written
    (tmp_path / "student" / "config.json").write_text(
        json.dumps(
            written | {"quantization_config": {"quant_method": "gguf", "gguf_file": "tiny.gguf"}}
        )
    )  # as an earlier version left it
    load_model(tmp_path / "student", torch.float32).save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


@pytest.mark.parametrize(
    "student, message",
    [
        (
            {"from_teacher": {"layers": 200}},
            "student.from_teacher.layers is 200, but the teacher .* has only",
        ),
        ({"from_teacher": {"layers": 1, "hidden_size": 9}}, "has this shape"),
        (
            {"from_teacher": {"layers": 1}, "lora": {"targets": ["foo"]}},
            "no linear layer named foo",
        ),
        ({"model": "TEACHER", "lora": {"targets": ["foo"]}}, "no linear layer named foo"),
    ],
)
def test_a_shape_that_cannot_be_is_known_without_weights(
    tiny_teacher, tokenizer, tmp_path, student, message
):
    shutil.copytree(tiny_teacher, tmp_path / "t")
    (tmp_path / "t" / "model.safetensors").write_bytes(b"not to be read")
    raw = json.loads(json.dumps(student).replace("TEACHER", str(tmp_path / "t")))
    teacher = ModelSource(str(tmp_path / "t"))
    with pytest.raises(ModelError, match=message):
        require_trainable_student(StudentConfig.model_validate(raw), tokenizer, 32, teacher)
    for sound in (
        {"init": {"layers": 1, "hidden_size": 16}},
        {"from_teacher": {"layers": 1}, "lora": {}},
    ):
        require_trainable_student(StudentConfig.model_validate(sound), tokenizer, 32, teacher)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path, torch.float32, "x.gguf")
