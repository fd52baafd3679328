"""A model folder as its files describe it: no torch, and the same values as transformers loads."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from bench.support.waiting import PATIENCE_SECONDS
from kd.errors import ModelError
from kd.models.folder import ModelFolder
from kd.models.layers import require_context


def write_config(folder: Path, content: str) -> ModelFolder:
    (folder / "config.json").write_text(content, encoding="utf-8")
    return ModelFolder(folder)


def test_importing_the_module_imports_no_torch() -> None:
    program = (
        "import sys, kd.models.folder; print(sorted({'torch', 'transformers'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_folder_says_what_transformers_loads(tiny_teacher: Path) -> None:
    folder = ModelFolder(tiny_teacher)
    loaded = AutoModelForCausalLM.from_pretrained(tiny_teacher)
    assert folder.context == loaded.config.max_position_embeddings
    assert folder.hidden_width == loaded.config.hidden_size
    assert folder.vocabulary_size == loaded.config.vocab_size
    assert folder.tokenizer_file == tiny_teacher / "tokenizer.json"
    assert [file.name for file in folder.weight_files] == ["model.safetensors"]
    assert folder.gguf_files == []
    shapes = folder.read_parameter_shapes().values()
    assert sum(map(math.prod, shapes)) == loaded.num_parameters()


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32", None])
def test_the_dtype_is_the_one_that_transformers_reads(
    tmp_path: Path, field: str, stored: str | None
) -> None:
    folder = write_config(tmp_path, json.dumps({"model_type": "llama", field: stored}))
    dtype = AutoConfig.from_pretrained(tmp_path).dtype
    assert dtype == (None if folder.dtype is None else getattr(torch, folder.dtype))


def test_sizes_of_the_language_model_come_before_those_of_the_whole(tmp_path: Path) -> None:
    text = {"hidden_size": 32, "vocab_size": 100, "max_position_embeddings": 64}
    folder = write_config(tmp_path, json.dumps({"hidden_size": 8, "text_config": text}))
    assert (folder.hidden_width, folder.vocabulary_size, folder.context) == (32, 100, 64)


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("num_hidden_layers", 4096), ("n_routed_experts", 4096), ("num_attention_heads", 4096),
        ("hidden_size", 65536), ("n_embd", 65536), ("head_dim", 65536),
        ("intermediate_size", 1 << 20), ("n_inner", 1 << 20), ("vocab_size", 1 << 22),
    ],
)  # fmt: skip
def test_a_size_that_no_model_has_is_refused(tmp_path: Path, field: str, most: int) -> None:
    for inner in (False, True):
        for size in (most, most + 1, 10**12):
            shape = {field: size}
            content = {"text_config": shape} if inner else shape
            folder = write_config(tmp_path, json.dumps({"model_type": "llama"} | content))
            if size == most:
                folder.require_decoder()
                continue
            with pytest.raises(ModelError) as caught:
                folder.require_decoder()
            assert f"has {field} {size}, and no model has more than {most}" in str(caught.value)
            assert "download the model again" in str(caught.value)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}
SCALED = {
    "linear": ("LlamaConfig", {"rope_type": "linear", "factor": 2.0}, 128),
    "dynamic": ("Qwen2Config", {"rope_type": "dynamic", "factor": 2.5}, 160),
    "yarn": ("Qwen3Config", YARN, 192),
    "yarn, in the context already": ("Qwen3Config", YARN | {"factor": 1.25}, 64),
    "llama3": (
        "LlamaConfig",
        YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        64,
    ),
    "longrope": (
        "Phi3Config",
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        64,
    ),
    "gemma 3": ("Gemma3TextConfig", {"rope_type": "linear", "factor": 8.0}, 64),
}


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_the_context_is_what_scaled_positions_make_it(tmp_path: Path, kind: str, form: str) -> None:
    """As a folder says it in the form of either version of transformers, and as a model has it."""
    config_class, rope, expected = SCALED[kind]
    shape = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
        "max_position_embeddings": 64, "original_max_position_embeddings": 32,
    }  # fmt: skip
    if kind != "longrope":
        del shape["original_max_position_embeddings"]
    config = getattr(transformers, config_class)(**shape, rope_scaling=dict(rope))
    stored = {"model_type": config.model_type, **shape, "rope_theta": 1e4, form: rope}
    assert write_config(tmp_path, json.dumps(stored)).context == expected
    model = AutoModelForCausalLM.from_config(config)
    require_context(model, expected)
    with pytest.raises(ModelError, match=f"has a context of {expected} tokens"):
        require_context(model, expected + 1)


def test_an_empty_folder_says_nothing(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path)
    assert not folder.has_config and folder.tokenizer_file is None
    assert (folder.context, folder.hidden_width, folder.vocabulary_size, folder.dtype) == (
        None,
    ) * 4
    assert folder.weight_files == []
    assert folder.read_parameter_shapes() == {}


@pytest.mark.parametrize("content", ["[", "[]", '{"text_config": "x"}', "\x00"])
def test_a_broken_configuration_is_refused_by_its_path(tmp_path: Path, content: str) -> None:
    folder = write_config(tmp_path, content)
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        assert folder.context


def test_a_model_is_found_below_the_root_and_in_the_cache_of_the_hub(
    tmp_path: Path, tiny_teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ModelFolder.find(tiny_teacher.name, tiny_teacher.parent)
    assert found == ModelFolder(tiny_teacher)
    assert ModelFolder.find("nobody/nothing", tmp_path) is None
    assert ModelFolder.find("no hub id//", tmp_path) is None
    from huggingface_hub import constants

    # The layout of the hub's cache: a folder for each model, and in it one for each snapshot.
    model = tmp_path / "hub" / "models--someone--something"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    (snapshot / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert ModelFolder.find("someone/something", tmp_path) == ModelFolder(snapshot)
