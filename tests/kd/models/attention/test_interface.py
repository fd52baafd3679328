"""A model with our attention is saved, copied, compiled, checkpointed and adapted as before."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from kd.config.student import LoraConfig
from kd.memory.activation_checkpointing import checkpoint_activations
from kd.models.adapters import add_adapters
from kd.models.attention import compiled
from kd.models.attention.compiled import _attend_spans
from kd.models.attention.documents import DocumentMask
from kd.models.attention.interface import (
    reading_rows,
    use_own_attention,
    use_packed_attention,
)
from kd.models.attention.isolation import isolate_documents
from kd.models.layers import compute_hidden_states, find_body
from kd.text.packed_rows import PackedRows
from kd.training.compiling import Compilation, _read_counts
from tests.support.kd.zoo import build, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS_BL = some_tokens(2, 20)
POSITIONS_BL = torch.cat([torch.arange(each) for each in (3, 1, 9, 7)]).expand(2, -1)
#: One with torch's attention, one with soft-caps and windows, one with sinks and windows.
KINDS = ("llama tied", "gemma2 windows", "gpt-oss")


def make(kind: str, **changes: Any) -> PreTrainedModel:
    model = build(kind, **changes)
    isolate_documents(model)
    assert model.config._attn_implementation.startswith("potstill")
    return model


def run(model: PreTrainedModel, positions_BL: Tensor = POSITIONS_BL) -> list[Tensor]:
    """Return the packed hidden states and the gradients."""
    hidden_BLD = compute_hidden_states(model, TOKENS_BL, PackedRows.of(positions_BL))
    trained = [each for each in model.parameters() if each.requires_grad]
    gradients = torch.autograd.grad(hidden_BLD.square().sum(), trained, allow_unused=True)
    return [hidden_BLD, *(each for each in gradients if each is not None)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_mask_is_built(kind: str) -> None:
    model = make(kind)
    seen: list[Any] = []
    for module in model.modules():
        if hasattr(module, "o_proj"):
            module.register_forward_pre_hook(
                lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
            )
    compute_hidden_states(model, TOKENS_BL, PackedRows.of(POSITIONS_BL))
    assert seen
    assert all(isinstance(each, DocumentMask) for each in seen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_opens_in_plain_transformers(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    model.save_pretrained(tmp_path)
    assert "potstill" not in (tmp_path / "config.json").read_text()
    assert "potstill" not in json.dumps(model.config.to_dict())
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_computes_the_same(kind: str) -> None:
    model = make(kind)
    for mine, expected in zip(run(copy.deepcopy(model)), run(model), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["full", "sqrt"])
def test_checkpointing_recomputes_within_documents(kind: str, how: Any) -> None:
    """The backward pass comes after the forward pass has forgotten the positions."""
    model = make(kind, attention_dropout=0.2).train()
    torch.manual_seed(3)
    expected = run(model)
    checkpoint_activations(model, how)
    torch.manual_seed(3)
    for mine, theirs in zip(run(model), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch looks at the inputs of a graph that begins behind a break
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_keeps_documents_apart(kind: str) -> None:
    model = make(kind)
    packings = [POSITIONS_BL, torch.arange(5).repeat(4).expand(2, -1)]
    expected = [run(model, each) for each in packings]
    torch._dynamo.reset()
    find_body(model).compile(backend="eager")
    for positions_BL, wanted in zip(packings, expected, strict=True):
        for mine, theirs in zip(run(model, positions_BL), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("llama tied", "aot_eager"),
        ("gemma2 windows", "eager"),
        ("gpt-oss", "eager"),
        ("llama4", "eager"),
    ],
)
def test_documents_break_no_graph_and_two_graphs_serve_all_of_them(kind: str, backend: str) -> None:
    """The second graph is that for any number of documents."""
    model = make(kind)
    packings = [
        torch.cat([torch.arange(each) for each in lengths]).expand(2, -1)
        for lengths in [(3, 1, 9, 7), (5, 5, 5, 5), (8, 6, 6), (9, 11), (2, 4, 8, 2, 4)]
    ]
    expected = [run(model, each) for each in packings]
    torch._dynamo.reset()
    compilation = Compilation(*_read_counts())
    find_body(model).compile(backend=backend)
    for positions_BL, wanted in zip(packings, expected, strict=True):
        for mine, theirs in zip(run(model, positions_BL), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert compilation.report().facts == {"graphs": 2, "breaks": []}


@pytest.mark.long
def test_dropout_breaks_no_graph_and_is_drawn_again_where_layers_are_computed_again() -> None:
    found = []
    for how in ("none", "full"):
        model = make("gemma2 windows", attention_dropout=0.5).train()
        checkpoint_activations(model, how)
        torch._dynamo.reset()
        compilation = Compilation(*_read_counts())
        find_body(model).compile(backend="aot_eager")
        torch.manual_seed(7)
        found.append(run(model))
        assert not torch.allclose(found[-1][0], run(model)[0])
        assert compilation.report().ok, "no graph breaks"
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (4, None), (None, 4)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_of_the_operation_are_those_of_its_output(
    window: int | None, chunk: int | None, dropout: float
) -> None:
    """By differences of the output, with the draw of the forward pass."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 20, 6, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    sink = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    packed = PackedRows.of(POSITIONS_BL)
    seed = torch.tensor([3]) if dropout else None
    rest = (packed.positions_BL, packed.host_bounds_C, seed, window, chunk, 0.4, 2.0, dropout)
    assert torch.autograd.gradcheck(
        lambda *inputs: _attend_spans(*inputs, *rest), (q, k, v, sink), fast_mode=True
    )


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch looks at the inputs of a graph that begins behind a break
@pytest.mark.parametrize("kernel", ["flash", "flex"])
def test_a_kernel_that_needs_the_documents_on_the_host_breaks_the_graph(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are chosen on a GPU only. The choice is told here; what runs is what a CPU has."""
    monkeypatch.setattr(compiled, "choose_kernel", lambda _: kernel)
    model = make("gemma2 windows")
    expected = run(model)
    torch._dynamo.reset()
    compilation = Compilation(*_read_counts())
    find_body(model).compile(backend="eager")
    for mine, theirs in zip(run(model), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert "flash-attn and flex attention run outside the graph" in str(compilation.report())


class _HostReads(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors: on a GPU it would wait for each."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


#: Models without experts, whose counts of tokens the host reads.
DENSE = ("llama tied", "gemma2 windows", "mistral", "gpt2")


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("packed", [True, False])
def test_no_layer_reads_a_number_from_the_device(kind: str, packed: bool) -> None:
    model = make(kind)
    rows = PackedRows.of(POSITIONS_BL) if packed else None
    with _HostReads() as reads:
        compute_hidden_states(model, TOKENS_BL, rows).square().sum().backward()
    assert reads.count == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", [*DENSE, "llama4"])
def test_documents_are_found_without_the_values_of_the_device(kind: str) -> None:
    """Tensors without values stand for a device that nobody waits for."""
    model = make(kind)
    known = PackedRows.of(POSITIONS_BL)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        rows = known.map(mode.from_tensor)
        hidden_BLD = compute_hidden_states(model, mode.from_tensor(TOKENS_BL), rows)
        hidden_BLD.square().sum().backward()
    assert hidden_BLD.shape == (2, 20, 32)


def test_a_mask_that_sees_ahead_is_not_taken_for_a_causal_one() -> None:
    """What the queries of a model read is found once, but not for masks of another form."""
    model = make("llama tied")
    embedded_BLD = model.get_input_embeddings()(TOKENS_BL)
    with reading_rows(model, PackedRows.of(POSITIONS_BL)):
        causal = create_causal_mask(model.config, embedded_BLD, None, None)
        both_ways = create_bidirectional_mask(model.config, embedded_BLD, None)
    assert isinstance(causal, DocumentMask)
    document_BL = (POSITIONS_BL == 0).cumsum(dim=1)
    expected_BLL = document_BL[:, :, None] == document_BL[:, None]
    assert torch.equal(both_ways[:, 0], expected_BLL)


@pytest.mark.parametrize("kind", ["llama tied", "gemma2 windows"])
def test_adapters_get_the_gradients_of_the_own_attention(kind: str) -> None:
    torch.manual_seed(0)
    model = add_adapters(build(kind), LoraConfig(rank=2, targets=("q_proj", "v_proj")))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    model.double()  # in float32 a sum of many terms is rounded by more than the bound
    expected = run(model)
    isolate_documents(model)
    for mine, theirs in zip(run(model), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows_and_generation_are_left_to_the_model(kind: str) -> None:
    model = make(kind)
    padding_BL = torch.ones_like(TOKENS_BL)
    padding_BL[0, :4] = 0

    def answer() -> list[Tensor]:
        text = model.generate(TOKENS_BL[:, :6], max_new_tokens=5, do_sample=False)
        logits = model(input_ids=TOKENS_BL, attention_mask=padding_BL).logits
        return [text, logits[0, 4:], logits[1]]

    with torch.no_grad():
        ours = answer()
        use_own_attention(model)
        theirs = answer()
    assert torch.equal(ours[0], theirs[0])
    for mine, expected in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_row_of_one_document_is_the_same_to_the_bit() -> None:
    """A cache that was captured before holds the same records."""
    model = build("llama tied")
    before = compute_hidden_states(model, TOKENS_BL)
    isolate_documents(model)
    assert torch.equal(compute_hidden_states(model, TOKENS_BL), before)
    in_one_row = compute_hidden_states(
        model, TOKENS_BL, PackedRows.of(torch.arange(20).expand(2, -1))
    )
    assert torch.equal(in_one_row, before)


def test_all_configurations_of_a_model_are_renamed_and_named_back() -> None:
    model = build("gemma3")
    assert use_packed_attention(model)
    assert not use_packed_attention(model)
    use_own_attention(model)
    assert model.config._attn_implementation == "sdpa"
