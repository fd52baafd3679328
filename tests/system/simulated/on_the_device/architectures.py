"""Packed rows of many architectures on the simulated GPU: hidden states and a backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kd.models.attention import kernels
from kd.models.attention.interface import uses_packed_attention
from kd.models.attention.isolation import isolate_documents
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import find_lm_head
from kd.progress import Monitor
from kd.text.packed_rows import PackedRows
from tests.support.kd.students import make_llama
from tests.support.kd.zoo import ROWS
from tests.support.packed_zoo import OURS, POSITIONS_BL, SIZES, THEIRS, TOKENS_BL, make_packed

# Libraries warn on a GPU of what they do not on a CPU.
pytestmark = pytest.mark.filterwarnings("default")

#: Grouped products of a GPU take rows of 16 bytes.
WIDE_EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
#: Every test runs these.
FEW = ["gemma3_text", "gpt_oss", "jetmoe", "llama", "mistral"]
#: In half precision a router may choose another expert.
ROUTED = {
    "afmoe", "aria_text", "axk1", "cohere2_moe", "deepseek_v2", "deepseek_v3", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe",
    "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe", "jetmoe", "laguna", "llama4_text",
    "longcat_flash", "mellum", "mimo_v2_flash", "minimax_m2", "mixtral", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_moe", "solar_open",
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention is compiled by Triton, which has no simulated GPU."""
    monkeypatch.setattr(kernels, "_finds", lambda package: False)


@pytest.mark.parametrize(
    "kind",
    [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.long) for kind in OURS + THEIRS],
)
def test_packed_rows_are_computed_on_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in WIDE_EXPERTS.items():
        monkeypatch.setitem(SIZES, name, size)
    model = make_packed(kind)
    with torch.no_grad():
        expected = compute_hidden_states(model, TOKENS_BL, PackedRows.of(POSITIONS_BL))
    newer = torch.cuda.get_device_capability() >= (8, 0)
    dtype = torch.bfloat16 if newer else torch.float32
    with torch.no_grad():
        rounded = compute_hidden_states(model.to(dtype), TOKENS_BL, PackedRows.of(POSITIONS_BL))
    model.to("cuda")
    packed = PackedRows.of(POSITIONS_BL).map(lambda each: each.to("cuda"))
    found = compute_hidden_states(model, TOKENS_BL.to("cuda"), packed)
    find_lm_head(model, ROWS).compute_logits(found).float().logsumexp(-1).sum().backward()
    assert all(
        each.grad is not None and each.grad.device.type == "cuda"
        for name, each in model.named_parameters()
        if "embed_tokens" in name
    )
    if not (newer and kind in ROUTED):
        error = float((found.detach().cpu().float() - expected).abs().max())
        # Gemma 4 of this size rounds by more than a twentieth on a CPU, too.
        rounding = float((rounded.float() - expected).abs().max()) if newer else 0.0
        assert error <= max((0.05 if newer else 1e-4) * float(expected.abs().max()), 1.5 * rounding)


def test_a_student_is_isolated_with_the_kernel_that_it_trains_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights are float32 then, for which a GPU with Triton would compile flex attention."""
    monkeypatch.setattr(kernels, "_finds", lambda package: package == "triton")
    used = set()
    run = kernels.run_varlen

    def note(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        used.add(q.dtype)
        return run(q, *rest)

    monkeypatch.setattr(kernels, "run_varlen", note)
    model = make_llama(ROWS).to("cuda")
    told: list[str] = []
    monitor = Monitor(lambda event: told.append(event.data["message"]))
    isolate_documents(model, torch.bfloat16, monitor)
    newer = torch.cuda.get_device_capability() >= (8, 0)
    assert (told, uses_packed_attention(model)) == ([], True)
    assert used == ({torch.bfloat16} if newer else set())


def test_the_kernel_of_packed_rows_is_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()
    choose = kernels.choose_kernel

    def note(traits: kernels.AttentionTraits) -> kernels.Kernel:
        used.add(choose(traits))
        return choose(traits)

    monkeypatch.setattr(kernels, "choose_kernel", note)
    newer = torch.cuda.get_device_capability() >= (8, 0)
    model = make_packed("llama").to("cuda", torch.bfloat16)
    packed = PackedRows.of(POSITIONS_BL).map(lambda each: each.to("cuda"))
    used.clear()
    compute_hidden_states(model, TOKENS_BL.to("cuda"), packed)
    assert used == {"varlen" if newer else "spans"}
