"""The padding token's row of an embedding starts and learns like the others, however it came."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig, PreTrainedModel

from kd.addresses import ModelSource
from kd.config.student import StudentConfig
from kd.models.loading import build_hollow_student, build_student, load_model
from kd.models.saving import load_saved_student, save_student
from tests.support.kd.students import make_llama

Build = Callable[[Path, Any], PreTrainedModel]
INIT = {"layers": 1, "hidden_size": 16, "tie_word_embeddings": False}


def build_fresh(folder: Path, tokenizer: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return build_student(StudentConfig(init=INIT), tokenizer, 64)


def save_folder(folder: Path, tokenizer: Any) -> Path:
    end = tokenizer.eos_token_id
    make_llama(2048, pad_token_id=end, eos_token_id=end).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def build_from_folder(folder: Path, tokenizer: Any) -> PreTrainedModel:
    return build_student(StudentConfig(model=str(save_folder(folder, tokenizer))), tokenizer, 64)


def build_from_teacher(folder: Path, tokenizer: Any) -> PreTrainedModel:
    teacher = ModelSource(str(save_folder(folder, tokenizer)))
    return build_student(StudentConfig(from_teacher={"layers": 1}), tokenizer, 64, teacher)


def build_hollow(folder: Path, tokenizer: Any) -> PreTrainedModel:
    student = build_hollow_student(StudentConfig(init=INIT), tokenizer, 64)
    torch.manual_seed(0)
    student.to_empty(device="cpu")
    for parameter in student.parameters():
        nn.init.normal_(parameter, std=0.1)
    for buffer in student.buffers():
        buffer.zero_()  # memory that held anything, NaN among it
    return student


def build_saved(folder: Path, tokenizer: Any) -> PreTrainedModel:
    save_student(build_fresh(folder, tokenizer), tokenizer, folder / "saved")
    return load_saved_student(folder / "saved")


@pytest.mark.parametrize(
    "build", [build_fresh, build_from_folder, build_from_teacher, build_hollow, build_saved]
)
def test_its_gradient_is_the_dense_one(build: Build, tmp_path: Path, tokenizer: Any) -> None:
    student = build(tmp_path, tokenizer)
    pad = student.config.pad_token_id
    assert pad == tokenizer.pad_token_id == tokenizer.eos_token_id
    ids_BL = torch.tensor([[5, pad, 9, pad, 11], [pad, 7, 8, 9, 5]])
    embedding = student.get_input_embeddings()

    def compute_gradient(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        logits_BLV = student(**inputs, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits_BLV.flatten(0, 1), ids_BL[:, 1:].flatten())
        return torch.autograd.grad(loss, embedding.weight)[0]

    student.double()
    one_hot_BLV = F.one_hot(ids_BL, len(embedding.weight)).double()
    dense_VD = compute_gradient({"inputs_embeds": one_hot_BLV @ embedding.weight})
    found_VD = compute_gradient({"input_ids": ids_BL})
    assert dense_VD[pad].any()
    torch.testing.assert_close(found_VD, dense_VD, rtol=1e-9, atol=1e-12)


def test_a_fresh_one_is_drawn_like_the_others(tmp_path: Path, tokenizer: Any) -> None:
    student = build_fresh(tmp_path, tokenizer)
    weight = student.get_input_embeddings().weight.detach()
    sizes_V = weight.norm(dim=1)
    assert 0.5 < float(sizes_V[tokenizer.pad_token_id] / sizes_V.median()) < 2.0
    assert student.generation_config.pad_token_id == tokenizer.pad_token_id
    torch.manual_seed(0)
    zeroed = type(student)(student.config)
    others = torch.arange(len(weight)) != tokenizer.pad_token_id
    assert torch.equal(zeroed.get_input_embeddings().weight[others], weight[others])


def test_it_begins_a_document_where_it_is_the_first_token_too(
    tmp_path: Path, tokenizer: Any
) -> None:
    student = build_fresh(tmp_path, tokenizer).eval()
    with torch.no_grad():
        logits_V = student(torch.tensor([[tokenizer.pad_token_id]])).logits[0, 0]
    assert logits_V.std() > 0.001, "zeros would make every token equally likely"


def test_embeddings_of_layers_learn_it_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = Gemma3nTextConfig(
        vocab_size=40, vocab_size_per_layer_input=40, hidden_size=16, intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        hidden_size_per_layer_input=4, laurel_rank=4, num_kv_shared_layers=0, pad_token_id=3,
        layer_types=["full_attention"] * 2, activation_sparsity_pattern=[0.0, 0.0],
    )  # fmt: skip
    Gemma3nForCausalLM(shape).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32)
    found = [each.padding_idx for each in model.modules() if isinstance(each, nn.Embedding)]
    assert len(found) >= 2 and set(found) == {None} and model.config.pad_token_id == 3
