"""Stages of a student, one after the other, compute what the whole student computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from kd.errors import ModelError
from kd.models.attention.isolation import isolate_documents
from kd.models.layers import compute_hidden_states
from kd.models.precision import Precision
from kd.models.stages.cut import StudentStage, cut, require_cuttable
from kd.text.batches import Batch
from kd.text.packed_rows import PackedRows
from tests.support.kd.zoo import DECODERS, ZOO, build, some_tokens

FLOAT = Precision("cpu", torch.float32)
#: Models of the zoo that cannot be cut, and why.
REFUSED = {
    "gemma4": "each layer reads embeddings of its own",
}
MODELS = ZOO | DECODERS
#: Four layers each, for stages of one layer.
DEEP = ("gemma2 windows", "olmo3", "granite deep", "gpt2 deep", "gpt-neox deep")


def make_batch(packed: bool) -> Batch:
    """Two rows of three documents each; only the body's inputs are set."""
    places = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]).expand(2, -1).contiguous()
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(some_tokens(), PackedRows.of(places) if packed else None, none, none, None)


def run_stages(
    stages: list[StudentStage], batch: Batch
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return the final hidden states, and what each stage sent, as it was sent and received."""
    hidden = None
    travelled = []
    for stage in stages[:-1]:
        with stage.receiving(hidden):
            sent = stage.pass_on(batch)
        hidden = sent.detach().requires_grad_()
        travelled.append((sent, hidden))
    with stages[-1].receiving(hidden):
        final = compute_hidden_states(stages[-1].student, batch.tokens_BL, batch.packed)
    return final, travelled


def assert_near(found: Tensor, wanted: Tensor, share: float = 1e-6) -> None:
    torch.testing.assert_close(
        found, wanted, rtol=0, atol=share * float(wanted.detach().abs().max())
    )


@pytest.mark.parametrize("name", [each for each in MODELS if each not in REFUSED])
@pytest.mark.parametrize("packed", [False, True])
def test_stages_compute_the_hidden_states_of_the_whole(name: str, packed: bool) -> None:
    student = build(name).eval()
    if packed:
        try:
            isolate_documents(student)
        except ModelError:
            pytest.skip("its documents cannot be kept apart")
    batch = make_batch(packed)
    whole = compute_hidden_states(student, batch.tokens_BL, batch.packed)
    stages = [cut(copy.deepcopy(student), number, 2, FLOAT) for number in range(2)]
    final, _ = run_stages(stages, batch)
    assert_near(final, whole)


@pytest.mark.parametrize("name", DEEP)
def test_stages_compute_the_gradients_of_the_whole(name: str) -> None:
    student = build(name).eval()
    isolate_documents(student)
    batch = make_batch(packed=True)
    stages = [cut(copy.deepcopy(student), number, 4, FLOAT) for number in range(4)]
    compute_hidden_states(student, batch.tokens_BL, batch.packed).square().sum().backward()
    final, travelled = run_stages(stages, batch)
    final.square().sum().backward()
    for sent, received in reversed(travelled):
        sent.backward(received.grad)
    wanted = {name: each.grad for name, each in student.named_parameters()}
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.student.named_parameters():
            if parameter.grad is not None:
                found[name] = found.get(name, 0.0) + parameter.grad
    for name, gradient in wanted.items():
        if gradient is not None:
            assert_near(found[name], gradient, 1e-5)


@pytest.mark.parametrize("name", DEEP)
def test_stages_know_the_type_of_what_travels(name: str) -> None:
    student = build(name).eval()
    half = Precision("cpu", torch.bfloat16)
    stages = [cut(copy.deepcopy(student), number, 4, half) for number in range(4)]
    _, travelled = run_stages(stages, make_batch(packed=False))
    for (sent, _), before, after in zip(travelled, stages[:-1], stages[1:], strict=True):
        assert sent.dtype == before.sent_dtype == after.given_dtype


def test_every_parameter_is_on_one_stage_and_a_tied_one_on_the_first_and_the_last() -> None:
    student = build("gemma2 windows")
    names = [name for name, _ in student.named_parameters()]
    whole = [copy.deepcopy(student) for _ in range(3)]
    everything = [list(each.parameters()) for each in whole]
    stages = [cut(each, number, 3, FLOAT) for number, each in enumerate(whole)]
    own = [[name for name, _ in stage.student.named_parameters()] for stage in stages]
    embeddings = "model.embed_tokens.weight"
    assert own[0][0] == own[2][0] == embeddings and embeddings not in own[1]
    assert own[0] + own[1] + own[2][1:] == names
    assert [len(stage.tied) for stage in stages] == [1, 0, 1]
    # Whoever refers to a parameter of another stage keeps no memory.
    for stage, parameters in zip(stages, everything, strict=True):
        assert {each for each in parameters if each.numel()} == stage.owned


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(
        ModelError, match=r"Gemma4ForCausalLM, cannot be cut .* embeddings of its own"
    ):
        require_cuttable(build("gemma4"), 2)
    shared = build("gemma4", hidden_size_per_layer_input=0, num_kv_shared_layers=2)
    with pytest.raises(ModelError, match="keys and values of earlier ones"):
        require_cuttable(shared, 2)
    with pytest.raises(ModelError, match="2 layers cannot be cut into 3 stages") as found:
        cut(build("llama tied"), 0, 3, FLOAT)
    assert "Set resources.gpus to 2 or less" in str(found.value)


def test_layers_that_share_a_weight_are_refused() -> None:
    student = build("gpt-neox deep")
    layers = student.base_model.layers
    layers[3].mlp = layers[0].mlp
    with pytest.raises(ModelError, match=r"several of its layers share .*layers\.0\.mlp"):
        cut(student, 0, 2, FLOAT)


def test_a_model_whose_layers_read_more_than_hidden_states_is_refused() -> None:
    kept: list[Tensor] = []

    def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kept[:] = [inputs[0]]

    def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + kept[0]

    student = build("qwen3")
    student.base_model.layers[0].register_forward_hook(keep)
    student.base_model.layers[1].register_forward_hook(add)
    assert cut(copy.deepcopy(student), 0, 2, FLOAT).number == 0
    with pytest.raises(ModelError, match="its hidden states differ by"):
        cut(student, 1, 2, FLOAT)
