"""The kernel for each device and model, and what the kernels of a GPU are told."""

import itertools
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
)

from kd.models.attention import kernels
from kd.models.attention.blocks import Scoring
from kd.models.attention.documents import DocumentMask
from kd.models.attention.isolation import isolate_documents
from kd.models.attention.kernels import (
    AttentionTraits,
    attend,
    choose_kernel,
    describe,
    get_window,
    shares_keys,
)
from kd.models.layers import compute_hidden_states
from kd.text.packed_rows import PackedRows

H100 = AttentionTraits(
    capability=(9, 0),
    dtype=torch.bfloat16,
    width=128,
    value_width=128,
    causal=False,
    regular=True,
    softcap=False,
    sinks=False,
    dropout=False,
    flash=False,
    flex=True,
)
RTX = replace(H100, capability=(8, 9))
T4 = replace(H100, capability=(7, 5), dtype=torch.float16)
CPU = replace(H100, capability=None, dtype=torch.float32, flex=False)
NARROW_VALUES = {"width": 192, "value_width": 128}
#: Flash kernels do not train such heads on GPUs with little shared memory, the second with dropout.
WIDE = {"width": 208, "value_width": 208}
WIDEST = {"width": 256, "value_width": 256}

CHOICES = [
    (H100, {}, "varlen"),
    (H100, {"dtype": torch.float32}, "flex"),
    (H100, {"width": 512, "value_width": 512}, "flex"),
    (H100, {"width": 100, "value_width": 100}, "flex"),
    (H100, {"softcap": True}, "flex"),
    (H100, {"sinks": True}, "flex"),
    (H100, {"regular": False}, "flex"),
    (H100, {"dropout": True}, "spans"),
    (H100, {"flex": False, "sinks": True}, "spans"),
    (H100, NARROW_VALUES, "spans"),
    (H100, {"causal": True}, "plain"),
    (H100, {"causal": True, "softcap": True}, "flex"),
    (H100, {"causal": True, "dropout": True}, "plain"),
    (H100, {"flash": True}, "varlen"),
    (H100, {"flash": True, "softcap": True}, "flash"),
    (H100, {"flash": True, "dropout": True}, "flash"),
    (H100, {"flash": True, "sinks": True}, "flex"),
    (H100, WIDE, "varlen"),
    (RTX, {}, "varlen"),
    (RTX, WIDE, "flex"),
    (RTX, WIDEST, "varlen"),
    (RTX, WIDEST | {"flash": True, "softcap": True, "dropout": True}, "spans"),
    (replace(RTX, capability=(12, 0)), WIDE, "flex"),
    (replace(RTX, capability=(10, 0)), WIDE, "varlen"),
    (T4, {}, "spans"),
    (T4, {"causal": True}, "plain"),
    (CPU, {}, "spans"),
    (CPU, {"softcap": True}, "spans"),
    (CPU, {"causal": True}, "plain"),
    (CPU, {"causal": True, "sinks": True}, "spans"),
    (CPU, {"causal": True, "dropout": True}, "spans"),
    (CPU, {"causal": True} | NARROW_VALUES, "spans"),
]


@pytest.mark.parametrize(("machine", "changes", "kernel"), CHOICES)
def test_the_kernel_fits_the_device_and_the_model(
    machine: AttentionTraits, changes: dict[str, object], kernel: str
) -> None:
    assert choose_kernel(replace(machine, **changes)) == kernel  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("machine", "changes", "shared"),
    [
        (H100, {}, True),
        (H100, {"dtype": torch.float32}, False),
        (H100, NARROW_VALUES, False),
        (H100, {"width": 512, "value_width": 512}, False),
        (H100, WIDE, True),
        (RTX, WIDE, False),
        (RTX, WIDEST, True),
        (RTX, WIDEST | {"dropout": True}, False),
        (T4, {}, False),
        (CPU, {}, True),
    ],
)
def test_keys_are_copied_for_each_query_head_where_a_kernel_needs_it(
    machine: AttentionTraits, changes: dict[str, object], shared: bool
) -> None:
    assert shares_keys(replace(machine, **changes)) == shared  # type: ignore[arg-type]


def test_copied_keys_give_the_same_output(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs()
    expected = attend(torch.nn.Module(), *inputs, WINDOWS, Scoring(0.25, 2.0), torch.ones(4))
    monkeypatch.setattr(kernels, "shares_keys", lambda traits: False)
    copied = attend(torch.nn.Module(), *inputs, WINDOWS, Scoring(0.25, 2.0), torch.ones(4))
    torch.testing.assert_close(copied, expected, rtol=1e-12, atol=1e-12)


def make_mask(first_keys: list[list[int]]) -> DocumentMask:
    """Return the mask of rows whose queries have these first keys."""
    mask = DocumentMask.of(torch.tensor(first_keys))
    assert mask is not None
    return mask


#: Two rows of two documents, without and with a window of 3 keys.
FULL = make_mask([[0] * 5 + [5] * 7, [0] * 8 + [8] * 4])
WINDOWS = make_mask([[0, 0, 0, 1, 2, 5, 5, 5, 6, 7, 8, 9], [0, 0, 0, 1, 2, 3, 4, 5, 8, 8, 8, 9]])


def test_a_window_counts_the_keys_before_a_query() -> None:
    assert get_window(FULL) == (-1, 0)
    assert get_window(WINDOWS) == (2, 0)


def make_inputs(device: str = "cpu", dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return q of four heads, and k and v of two."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, 12, 16, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_()
        for heads in (4, 2, 2)
    ]


def attend_densely(q: Tensor, k: Tensor, v: Tensor, mask: DocumentMask) -> Tensor:
    """Compute the attention with a mask (B, 1, L, L)."""
    place_L = torch.arange(q.shape[2], device=q.device)
    first_BL = mask.first_BL
    reads_BLL = (place_L <= place_L[:, None]) & (place_L >= first_BL[:, :, None])
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=reads_BLL[:, None], enable_gqa=True
    ).transpose(1, 2)


@pytest.mark.parametrize("mask", [FULL, WINDOWS], ids=["full", "windows"])
def test_spans_have_the_values_and_gradients_of_a_mask(mask: DocumentMask) -> None:
    inputs = make_inputs()
    ours = attend(torch.nn.Module(), *inputs, mask, Scoring(16**-0.5), None)
    theirs = attend_densely(*inputs, mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for mine, expected in zip(
        torch.autograd.grad(ours.square().sum(), inputs),
        torch.autograd.grad(theirs.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-11)


def test_a_document_is_the_same_to_the_bit_whatever_is_beside_it() -> None:
    q, k, v = (each.detach() for each in make_inputs(dtype=torch.float32))
    scoring = Scoring(16**-0.5)
    packed = attend(torch.nn.Module(), q, k, v, FULL, scoring, None)
    alone = make_mask([[0] * 7])
    parts = (each[:1, :, 5:].contiguous() for each in (q, k, v))
    assert torch.equal(packed[0, 5:], attend(torch.nn.Module(), *parts, alone, scoring, None)[0])


def test_autocast_decides_the_precision() -> None:
    inputs = make_inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for scoring in (Scoring(0.25), Scoring(0.25, softcap=2.0)):
            found = attend(torch.nn.Module(), *inputs, FULL, scoring, None)
            assert found.dtype == torch.bfloat16


@pytest.mark.usefixtures("cudnn_attention")
def test_torch_plans_no_kernel_for_the_length_of_each_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[bool] = []
    real = functional.scaled_dot_product_attention

    def note(*tensors: Tensor, **options: Any) -> Tensor:
        plans.append(torch.backends.cuda.cudnn_sdp_enabled())
        return real(*tensors, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", note)
    attend(torch.nn.Module(), *make_inputs(), FULL, Scoring(16**-0.5), None)
    spans = len(plans)
    assert spans > 1 and not any(plans)
    # Rows without documents have one length.
    whole = make_mask([[0] * FULL.first_BL.shape[1]] * len(FULL.first_BL))
    attend(torch.nn.Module(), *make_inputs(), whole, Scoring(16**-0.5), None)
    assert plans[spans:] == [True]


def test_a_device_without_a_gpu_uses_no_kernel_of_one() -> None:
    q, _, v = make_inputs(dtype=torch.bfloat16)
    traits = describe(q, v, FULL, Scoring(0.25), torch.zeros(4))
    assert traits == replace(CPU, dtype=torch.bfloat16, width=16, value_width=16, sinks=True)


def attend_by_bounds(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, bounds: list[int], scale: float, window: int
) -> Tensor:
    """Compute what a kernel for rows of variable length computes, one document after the other."""
    found = []
    for start, stop in itertools.pairwise(bounds):
        place_l = torch.arange(stop - start)
        distance_ll = place_l[:, None] - place_l
        reads_ll = (distance_ll >= 0) & ((window < 0) | (distance_ll <= window))
        parts = (each[start:stop].transpose(0, 1)[None] for each in (q_THD, k_TKD, v_TKD))
        output_1Hld = torch.nn.functional.scaled_dot_product_attention(
            *parts, attn_mask=reads_ll, scale=scale, enable_gqa=True
        )
        found.append(output_1Hld[0].transpose(0, 1))
    return torch.cat(found)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, _: Tensor, most: int, __: int, **options: Any
) -> Tensor:
    """Stand for torch's kernel, which a CPU lacks."""
    assert most == int(bounds.diff().max())
    assert options.get("enable_gqa", True)
    left, right = options["window_size"]
    assert right == 0
    return attend_by_bounds(q, k, v, bounds.tolist(), options["scale"], left)


def flash(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, _: Tensor, most: int, __: int, **options: Any
) -> Tensor:
    """Stand for the kernel of flash-attn, which needs a GPU."""
    assert most == int(bounds.diff().max())
    assert options["causal"]
    assert (options["softcap"], options["dropout_p"]) == (0.0, 0.0)
    left, _right = options["window_size"]
    return attend_by_bounds(q, k, v, bounds.tolist(), options["softmax_scale"], left)


@pytest.mark.parametrize("mask", [FULL, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("kernel", ["varlen", "flash"])
def test_kernels_for_rows_of_variable_length_are_told_the_documents(
    mask: DocumentMask, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "choose_kernel", lambda traits: kernel)
    monkeypatch.setattr(kernels, "varlen_attn", varlen)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash))
    inputs = make_inputs()
    ours = attend(torch.nn.Module(), *inputs, mask, Scoring(16**-0.5), None)
    torch.testing.assert_close(ours, attend_densely(*inputs, mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("asks", [True, False], ids=["torch 2.12", "torch 2.11"])
def test_torch_is_told_of_shared_keys_where_it_asks(
    asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {}

    def run(*tensors: Any, **options: Any) -> Tensor:
        told.update(options)
        return varlen(*tensors, **options)

    monkeypatch.setattr(kernels, "choose_kernel", lambda traits: "varlen")
    monkeypatch.setattr(kernels, "varlen_attn", run)
    monkeypatch.setattr(kernels, "_ASKS_FOR_GROUPS", asks)
    attend(torch.nn.Module(), *make_inputs(), FULL, Scoring(16**-0.5), None)
    assert told.get("enable_gqa") == (True if asks else None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own use, while it compiles
@pytest.mark.long
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_flex_attention_is_told_the_documents(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has its forward pass."""
    inputs = [each.detach() for each in make_inputs(dtype=torch.float32)]
    scoring = Scoring(16**-0.5, softcap)
    expected = attend(torch.nn.Module(), *inputs, WINDOWS, scoring, None)
    monkeypatch.setattr(kernels, "choose_kernel", lambda traits: "flex")
    ours = attend(torch.nn.Module().eval(), *inputs, WINDOWS, scoring, None)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mask", [FULL, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_each_kernel_of_a_gpu_computes_what_spans_compute(
    mask: DocumentMask, softcap: float | None, sinks: bool
) -> None:
    inputs = make_inputs("cuda", torch.bfloat16)
    moved = DocumentMask(mask.first_BL.cuda(), mask.spans)
    sink_H = torch.linspace(-1, 1, 4, dtype=torch.bfloat16) if sinks else None
    scoring = Scoring(0.25, softcap)
    on_gpu = None if sink_H is None else sink_H.cuda()
    ours = attend(torch.nn.Module(), *inputs, moved, scoring, on_gpu)
    exact = [each.detach().double().cpu().requires_grad_() for each in inputs]
    sink_exact = None if sink_H is None else sink_H.double()
    expected = attend(torch.nn.Module(), *exact, mask, scoring, sink_exact)
    torch.testing.assert_close(ours.double().cpu(), expected, rtol=2e-2, atol=2e-2)
    for mine, theirs in zip(
        torch.autograd.grad(ours.double().square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), exact),
        strict=True,
    ):
        torch.testing.assert_close(mine.double().cpu(), theirs, rtol=5e-2, atol=5e-2)


def make_small_model(name: str) -> PreTrainedModel:
    """A random model; on a GPU its packed rows take varlen, or flex attention for soft caps."""
    sizes = {
        "vocab_size": 101,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    configs = {
        "llama": LlamaConfig(**sizes),
        "windows": MistralConfig(**sizes, sliding_window=24),
        "soft caps": Gemma2Config(**sizes, head_dim=32, sliding_window=24),
    }
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(configs[name])


def measure_packed_difference(model: PreTrainedModel) -> float:
    """How far hidden states of packed documents are from those of each alone, of the largest."""
    isolate_documents(model)
    lengths = (70, 7, 51)
    device = model.device
    tokens_1L = torch.randint(1, 101, (1, sum(lengths)), device=device)
    positions_1L = torch.cat([torch.arange(each) for each in lengths])[None]
    with torch.no_grad():
        packed = PackedRows.of(positions_1L).map(lambda each: each.to(device))
        packed_1LD = compute_hidden_states(model, tokens_1L, packed)
        documents = tokens_1L.split(lengths, 1)
        alone_1LD = torch.cat([compute_hidden_states(model, each) for each in documents], 1)
    return float((packed_1LD - alone_1LD).abs().max() / alone_1LD.abs().max())


MODELS = pytest.mark.parametrize("name", ["llama", "windows", "soft caps"])


@MODELS
def test_packed_rows_of_a_model_are_their_documents_alone(name: str) -> None:
    assert measure_packed_difference(make_small_model(name).eval()) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)], ids=["fp32", "bf16"]
)
@MODELS
def test_packed_rows_of_a_model_are_their_documents_alone_on_a_gpu(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    model = make_small_model(name).to("cuda", dtype).eval()
    assert measure_packed_difference(model) < tolerance
