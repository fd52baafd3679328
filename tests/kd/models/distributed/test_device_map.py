"""A teacher whose layers lie in the host's memory and on the disk is the teacher on one device."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kd.config.data import DataConfig
from kd.config.teacher import TeacherConfig
from kd.evaluation.teacher_comparison import EvaluatedModel
from kd.models.attention.isolation import isolate_documents
from kd.models.distributed.device_map import Places
from kd.models.layers import compute_hidden_states, find_device
from kd.models.lm_head import find_lm_head
from kd.models.loading import load_teacher
from kd.models.teacher_files import TeacherFiles
from kd.text.packed_rows import PackedRows
from tests.support.kd.zoo import DECODERS, PACKS, VOCABULARY, ZOO, build, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def load(folder: Path, **changes: Any) -> PreTrainedModel:
    return load_teacher(TeacherFiles(TeacherConfig(model=str(folder), **changes), folder), CPU)


def load_both(name: str, folder: Path, kept: float) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model on one device, and with the share ``kept`` of its bytes in memory."""
    build(name).save_pretrained(folder)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    spread = load(folder, parallel="device_map", host_memory=int(kept * stored))
    return load(folder), spread


@pytest.mark.long
@pytest.mark.parametrize("name", [*ZOO, *DECODERS])
def test_a_teacher_on_the_disk_computes_the_same_numbers(name: str, tmp_path: Path) -> None:
    plain, spread = load_both(name, tmp_path, kept=0.6)
    assert any(each.device.type == "meta" for each in spread.parameters())
    tokens_BL = some_tokens()
    states = [compute_hidden_states(each, tokens_BL) for each in (plain, spread)]
    assert torch.equal(*states)
    heads = [find_lm_head(each, VOCABULARY) for each in (plain, spread)]
    assert torch.equal(*(head.compute_logits(states[0][0]) for head in heads))


@pytest.mark.parametrize("name", ["llama tied", "gpt2", "gemma2 soft cap", "qwen2"])
@pytest.mark.parametrize("kept", [0.0, 0.3])
def test_documents_of_packed_rows_stay_apart_on_the_disk(
    name: str, kept: float, tmp_path: Path
) -> None:
    assert name in PACKS
    plain, spread = load_both(name, tmp_path, kept)
    isolate_documents(plain)
    isolate_documents(spread)
    assert plain.config._attn_implementation == spread.config._attn_implementation
    packed = PackedRows.of(torch.tensor([[*range(5), *range(7)]] * 2))
    states = [compute_hidden_states(each, some_tokens(), packed) for each in (plain, spread)]
    assert torch.equal(*states)


def test_nothing_but_the_lm_head_is_in_memory_where_none_is_allowed(tmp_path: Path) -> None:
    _, spread = load_both("llama untied", tmp_path, kept=0.0)
    held = {name for name, each in spread.named_parameters() if each.device.type != "meta"}
    assert held == {"lm_head.weight"}
    assert find_device(spread) == CPU


def test_what_a_job_does_not_limit_has_what_is_free() -> None:
    free = Places.of().most_bytes
    assert free["cpu"] > 2**20
    limited = Places.of(host_memory=0).most_bytes
    assert limited.keys() == free.keys()
    assert limited["cpu"] == 0


def test_the_folder_of_converted_weights_is_deleted_with_the_teacher(tmp_path: Path) -> None:
    """The experts of the file become one matrix, so they cannot be read from the file each time."""
    build("qwen3 moe").save_pretrained(tmp_path)
    places = Places.of(host_memory=0)
    folder = Path(places.folder)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **places.list_arguments())
    assert list(folder.iterdir())
    places.settle(model, CPU)
    compute_hidden_states(model, some_tokens())
    del model, places
    gc.collect()
    assert not folder.exists()


def test_a_teacher_that_is_spread_is_measured_where_it_lies(tmp_path: Path) -> None:
    plain, spread = load_both("gemma2 low cap", tmp_path, kept=0.0)
    models = [
        EvaluatedModel.of(each, VOCABULARY, DataConfig(train="x", sequence_length=64))
        for each in (plain, spread)
    ]
    assert models[0].lm_head.softcap == models[1].lm_head.softcap == 2.0
    assert models[1].model is spread
