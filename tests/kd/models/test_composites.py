"""Models that read images too: their language model is used alone, with the same logits."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kd.addresses import ModelSource
from kd.config.student import StudentConfig
from kd.config.teacher import TeacherConfig
from kd.errors import ModelError
from kd.evaluation.side_by_side import count_stored_parameters
from kd.models.attention.isolation import isolate_documents
from kd.models.folder import ModelFolder
from kd.models.layers import find_decoder_layers, require_context
from kd.models.lm_head import find_lm_head
from kd.models.loading import build_student, load_model, load_teacher, require_trainable_student
from kd.models.saving import save_student
from kd.models.teacher_files import TeacherFiles
from tests.support.kd.zoo import ROWS, VOCABULARY, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = {
    "vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOWS = {
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
IMAGES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN_IMAGES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24}
ROTARY = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
}
LLAMA4_IMAGES = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
LLAMA4_TEXT = {
    "intermediate_size_mlp": 40, "num_local_experts": 4, "interleave_moe_layer_step": 2,
    "attention_chunk_size": 16,
}  # fmt: skip
GEMMA4_TEXT = {
    "global_head_dim": 12, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "vocab_size_per_layer_input": ROWS, "hidden_size_per_layer_input": 4,
}  # fmt: skip
GEMMA4_IMAGES = {"num_key_value_heads": 2, "head_dim": 8}
DEEP = {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}

#: The class of the whole model, its configuration, and the class of its language model.
WHOLES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": TEXT | WINDOWS,
            "vision_config": IMAGES | {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4, "image_token_index": 95,
        },
        "Gemma3ForCausalLM",
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": TEXT | WINDOWS | GEMMA4_TEXT,
            "vision_config": IMAGES | GEMMA4_IMAGES, "audio_config": None,
        },
        "Gemma4ForCausalLM",
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {"text_config": TEXT | LLAMA4_TEXT, "vision_config": IMAGES | LLAMA4_IMAGES},
        "Llama4ForCausalLM",
    ),
    "qwen2-vl": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": TEXT | ROTARY,
            "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
        },
        "Qwen2ForCausalLM",
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": TEXT | ROTARY, "vision_config": QWEN_IMAGES | {"out_hidden_size": 32}},
        "Qwen2ForCausalLM",
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        {"text_config": TEXT | ROTARY, "vision_config": QWEN_IMAGES | DEEP},
        "Qwen3ForCausalLM",
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": TEXT | {"model_type": "mistral"},
            "vision_config": IMAGES | {"model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": False,
        },
        "MistralForCausalLM",
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": IMAGES | {"model_type": "clip_vision_model"},
        },
        "LlamaForCausalLM",
    ),
}  # fmt: skip


def build_whole(name: str) -> PreTrainedModel:
    class_name, fields, _ = WHOLES[name]
    made = getattr(transformers, class_name)
    torch.manual_seed(0)
    whole: PreTrainedModel = made(made.config_class(**fields)).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return whole


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor]]:
    """The folder of each whole model, and its own logits of a text."""
    found = {}
    for name in WHOLES:
        folder = tmp_path_factory.mktemp("whole") / name
        whole = build_whole(name)
        whole.save_pretrained(folder)
        found[name] = folder, logits_of(whole)
    return found


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> Tensor:
    return model.eval()(input_ids=some_tokens(), use_cache=False).logits


@pytest.mark.parametrize("name", WHOLES)
def test_the_language_model_inside_is_teacher_and_student(
    name: str, wholes: dict[str, tuple[Path, Tensor]], tokenizer: Any, tmp_path: Path
) -> None:
    folder, expected = wholes[name]
    teacher = load_teacher(
        TeacherFiles(TeacherConfig(model=str(folder)), folder), torch.device("cpu")
    )
    assert type(teacher).__name__ == WHOLES[name][2]
    torch.testing.assert_close(logits_of(teacher), expected, rtol=1e-5, atol=1e-5)
    find_lm_head(teacher, VOCABULARY)
    isolate_documents(teacher)
    assert len(find_decoder_layers(teacher)) == 3 and teacher.config.hidden_size == 32
    plan = StudentConfig(model=str(folder))
    require_trainable_student(plan, tokenizer, 64)
    student = build_student(plan, tokenizer, 64)
    save_student(student, tokenizer, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(teacher)
    assert torch.equal(logits_of(again), logits_of(student))
    assert "text_config" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("name", ["gemma3", "llama4", "qwen2-vl"])
def test_a_student_is_cut_out_of_the_language_model_inside(
    name: str, wholes: dict[str, tuple[Path, Tensor]], tokenizer: Any, tmp_path: Path
) -> None:
    teacher = ModelSource(str(wholes[name][0]))
    plan = StudentConfig.model_validate({"from_teacher": {"layers": 2, "pick": "last"}})
    require_trainable_student(plan, tokenizer, 64, teacher)
    student = build_student(plan, tokenizer, 64, teacher)
    save_student(student, tokenizer, tmp_path)
    assert torch.equal(logits_of(load_model(tmp_path, torch.float32)), logits_of(student))


def test_the_folder_and_the_context_check_see_the_language_model(
    wholes: dict[str, tuple[Path, Tensor]],
) -> None:
    for folder, _ in wholes.values():
        found = ModelFolder(folder)
        assert (found.context, found.hidden_width, found.vocabulary_size) == (64, 32, ROWS)
        model = load_model(folder, torch.float32)
        with pytest.raises(ModelError, match="context of 64 tokens"):
            require_context(model, 65)
        sizes = [math.prod(shape) for shape in found.read_text_shapes().values()]
        stored = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
        assert sum(sizes) == sum(stored.values()) == count_stored_parameters(folder)


def rename(folder: Path, out: Path, prefix: str, drop: str = "\0") -> Path:
    """Write the tensors as the first checkpoints of the family named them."""
    from safetensors.torch import load_file, save_file

    tensors = {
        name.replace("model.language_model.", prefix + "model.").replace(
            "lm_head.", prefix + "lm_head."
        ): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if drop not in name
    }
    out.mkdir()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    return out


@pytest.mark.parametrize(
    ("name", "prefix"), [("mistral3", "language_model."), ("gemma3", "language_model."),
                         ("qwen2-vl", "")],
)  # fmt: skip
def test_older_names_of_the_tensors_are_read(
    name: str, prefix: str, wholes: dict[str, tuple[Path, Tensor]], tmp_path: Path
) -> None:
    folder, expected = wholes[name]
    older = rename(folder, tmp_path / "older", prefix)
    torch.testing.assert_close(
        logits_of(load_model(older, torch.float32)), expected, rtol=1e-5, atol=1e-5
    )


def test_a_missing_tensor_is_named_and_not_made_up(
    wholes: dict[str, tuple[Path, Tensor]], tmp_path: Path
) -> None:
    lacking = rename(wholes["gemma3"][0], tmp_path / "x", "language_model.", "1.mlp.up_proj")
    with pytest.raises(ModelError, match=r"Gemma3ForCausalLM: model\.layers\.1\.mlp\.up_proj"):
        load_model(lacking, torch.float32)


ENCODERS = {
    "t5": ("T5ForConditionalGeneration", {
        "vocab_size": ROWS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2,
        "decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", {
        "vocab_size": ROWS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24}),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_decoders_are_refused_by_name(name: str, tokenizer: Any, tmp_path: Path) -> None:
    class_name, fields = ENCODERS[name]
    made = getattr(transformers, class_name)
    made(made.config_class(**fields)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"encoder and a decoder \({class_name}"):
        load_model(tmp_path, torch.float32)
    with pytest.raises(ModelError, match=rf"encoder and a decoder \({class_name}"):
        require_trainable_student(StudentConfig(model=str(tmp_path)), tokenizer, 32)


def test_a_language_model_that_cannot_stand_alone_is_refused_by_name(tmp_path: Path) -> None:
    transformers.Qwen3VLMoeConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"qwen3_vl_moe in .* cannot be used without the rest"):
        load_model(tmp_path, torch.float32)
