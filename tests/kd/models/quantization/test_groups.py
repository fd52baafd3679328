"""Groups of int4: which size each layer gets, how caches tell, and what stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kd.capture.plan import plan_capture
from kd.capture.teacher import warn_of_plain_layers
from kd.config.jobfile import parse_config
from kd.config.teacher import TeacherConfig
from kd.models.loading import ReadingPlan, choose_quantization, read_model
from kd.models.quantization.groups import (
    INT4_GROUPS,
    choose_int4_group,
    read_quantization,
    read_smallest_group,
)
from kd.models.quantization.rounding import (
    find_rounded_layers,
    make_quantization_config,
    read_widths,
)
from kd.models.teacher_files import TeacherFiles
from kd.progress import Event, Monitor
from tests.support.kd.quantizers import needs_torchao
from tests.support.kd.students import make_llama, save_teacher

pytestmark = pytest.mark.usefixtures("one_thread")


def make_hollow(width: int, inner: int = 256) -> PreTrainedModel:
    with torch.device("meta"):
        return make_llama(width=width, intermediate_size=inner)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU that computes with int4, as far as a check of its generation sees."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("width", "group"), [(128, 128), (4096, 128), (576, 64), (192, 64), (96, 32), (100, None)]
)
def test_a_row_has_the_largest_group_that_divides_it(width: int, group: int | None) -> None:
    assert choose_int4_group(width) == group


@pytest.mark.parametrize(
    ("width", "inner", "name"),
    [
        (128, 256, "int4"),
        (128, 100, "int4"),  # what was rounded before there were smaller groups, and nothing else
        (100, 100, "int4"),
        (576, 1536, "int4-group-64"),
        (576, 96, "int4-group-32"),
    ],
)
def test_the_name_tells_the_smallest_group(
    tmp_path: Path, tokenizer: Any, width: int, inner: int, name: str
) -> None:
    make_llama(width=width, intermediate_size=inner).save_pretrained(tmp_path)
    config = TeacherConfig(model=str(tmp_path), quantization="int4")
    assert choose_quantization(TeacherFiles(config, tmp_path)) == name
    assert read_quantization(name) == "int4"
    eight = config.model_copy(update={"quantization": "int8"})
    assert choose_quantization(TeacherFiles(eight, tmp_path)) == "int8"
    assert choose_quantization(TeacherFiles(TeacherConfig(model=str(tmp_path)), tmp_path)) == ""


@pytest.mark.parametrize(("width", "name"), [(128, "int4"), (96, "int4-group-32")])
def test_a_cache_tells_whether_groups_are_smaller_than_128(
    tmp_path: Path, tokenizer: Any, width: int, name: str
) -> None:
    """The name "int4" is that of earlier caches, in which narrower layers were not rounded."""
    save_teacher(tmp_path, tokenizer, width)
    (tmp_path / "a.txt").write_text("It was a dark night. " * 400, encoding="utf-8")
    job = {
        "kind": "precompute",
        "teacher": {"model": str(tmp_path), "quantization": "int4"},
        "data": {"train": str(tmp_path / "a.txt"), "sequence_length": 64},
    }
    assert plan_capture(parse_config(job)).identity.teacher.quantization == name


@needs_torchao
@pytest.mark.parametrize(
    ("width", "inner", "name"),
    [
        (128, 256, "int4"),
        (576, 1536, "int4-group-64"),
        (96, 128, "int4-group-32"),
        (100, 96, "int4-group-32"),
        (576, 1536, "int4"),
    ],
)
def test_torchao_rounds_each_layer_in_the_groups_of_the_name(
    ampere: torch.device, width: int, inner: int, name: str
) -> None:
    """On weights without memory, which torchao packs as those of a GPU."""
    from torchao.quantization import quantize_

    model = make_hollow(width, inner).bfloat16()
    head = model.get_output_embeddings()
    asked = make_quantization_config(name, read_widths(model), ampere).quant_type
    quantize_(model, asked, filter_fn=None)
    found = {}
    for path, layer in find_rounded_layers(model).items():
        weight: Any = layer.weight.data
        found[path] = None if type(weight) is Tensor else weight.block_size[-1]
        assert type(weight).__name__ in ("Tensor", "Int4TilePackedTo4dTensor")
    smallest = read_smallest_group(name)
    assert found == {
        path: choose_int4_group(width, smallest) for path, width in read_widths(model).items()
    }
    assert type(head.weight.data) is Tensor


@needs_torchao
def test_transformers_reads_a_model_whose_layers_are_named_one_by_one(
    ampere: torch.device, tmp_path: Path
) -> None:
    """With int8 in place of int4, which only a GPU packs: the way through the files is the same."""
    from torchao.quantization import Int8WeightOnlyConfig

    plain = make_llama(width=100, intermediate_size=96)
    plain.save_pretrained(tmp_path)
    rounding = make_quantization_config("int4-group-32", read_widths(plain), ampere)
    groups = rounding.quant_type.fqn_to_config
    for path in groups:
        groups[path] = Int8WeightOnlyConfig()
    model = read_model(tmp_path, ReadingPlan(torch.float32, rounding=rounding))
    named = dict(plain.named_parameters())
    for name, weight in model.named_parameters():
        rounded = type(weight.data) is not Tensor
        assert rounded == name.endswith("down_proj.weight"), name
        assert rounded or torch.equal(weight, named[name])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int4-group-32", "12 of 14 linear layers .* (100)"),
        ("int4", "14 of 14 linear layers .* (96, 100)"),
        ("int8", None),
        ("", None),
    ],
)
def test_a_warning_counts_the_layers_that_no_group_fits(name: str, message: str | None) -> None:
    events: list[Event] = []
    warn_of_plain_layers(make_hollow(100, 96), name, Monitor(listen=events.append))
    if message is None:
        assert not events
        return
    (event,) = events
    start, _, end = message.partition(" .* ")
    assert event.type == "warning"
    assert event.data["message"].startswith(start) and end in event.data["message"]


def test_no_warning_where_every_layer_is_rounded() -> None:
    events: list[Event] = []
    warn_of_plain_layers(make_hollow(576, 1536), "int4-group-64", Monitor(listen=events.append))
    assert not events


def test_the_groups_are_those_of_torch_s_kernels() -> None:
    """Torch refuses other sizes by name on a CPU, and takes the same ones on a GPU."""
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        torch.zeros(16, 1024, dtype=torch.int32), 8
    )
    hidden_ND = torch.zeros(4, 1024, dtype=torch.bfloat16)

    def multiply(group: int) -> Tensor:
        scales = torch.zeros(1024 // group, 16, 2, dtype=torch.bfloat16)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(hidden_ND, packed, group, scales)

    assert all(multiply(group).shape == (4, 16) for group in INT4_GROUPS)
    with pytest.raises(RuntimeError, match="expect qGroupSize to be 32, 64, 128 or 256"):
        multiply(16)
