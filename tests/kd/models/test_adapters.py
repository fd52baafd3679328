"""Adapters compared with W + (alpha / rank) B A computed by hand, and with peft's own loader."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    JambaConfig,
    JambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from kd.config.student import LoraConfig
from kd.errors import ModelError
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.targets import Targets
from kd.models import adapters
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import find_lm_head
from tests.support.kd.zoo import VOCABULARY, build

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = [
    "llama tied",
    "llama untied",
    "gpt2",
    "gemma2 soft cap",
    "qwen2",
    "qwen3",
    "mistral",
    "phi bias",
    "gpt-neox",
]
TOKENS_BL = torch.arange(48).view(3, 16) % VOCABULARY


def adapted(kind: str = "llama tied", **changes) -> PreTrainedModel:
    """Return a model with adapters that change its logits."""
    student = build(kind).eval()
    torch.manual_seed(1)
    adapters.add_adapters(student, LoraConfig(**{"rank": 4, "alpha": 8.0} | changes))
    with torch.no_grad():
        for parameter in adapters.list_trained_parameters(student):
            parameter.normal_(0.0, 0.1)
    return student


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> Tensor:
    return model(input_ids=TOKENS_BL).logits


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_begin_as_nothing_and_alone_are_trained(kind: str) -> None:
    student = build(kind).eval()
    before = logits_of(student)
    weights = {id(p): p.detach().clone() for p in student.parameters()}
    assert adapters.add_adapters(student, LoraConfig(rank=4)) is student
    assert torch.equal(logits_of(student), before)
    names = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
    assert {parameter.dtype for parameter in adapters.list_trained_parameters(student)} == {
        torch.float32
    }
    head = find_lm_head(student, VOCABULARY)
    optimizer = torch.optim.SGD(adapters.list_trained_parameters(student), lr=0.5)
    losses = []
    for _ in range(6):
        hidden_BLD = compute_hidden_states(student, TOKENS_BL)
        loss = cross_entropy(
            head.compute_logits(hidden_BLD[:, :-1].flatten(0, 1)), TOKENS_BL[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01
    frozen = [parameter for parameter in student.parameters() if id(parameter) in weights]
    assert len(frozen) == len(weights) and all(
        torch.equal(p, weights[id(p)]) and p.grad is None for p in frozen
    )


def test_an_adapter_of_every_linear_layer_but_the_head() -> None:
    student = adapted("llama untied")
    with_one = {
        name.split(".lora_A")[0] for name, _ in student.named_parameters() if ".lora_A." in name
    }
    own = {f"self_attn.{x}_proj" for x in "qkvo"} | {
        f"mlp.{x}_proj" for x in ("gate", "up", "down")
    }
    assert with_one == {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in own}


def test_linear_layers_of_a_list_are_told_from_decoder_layers_of_the_same_numbers() -> None:
    """Gemma 3n holds altup_projections.0 and .1 beside layers.0 and .1."""
    shape = Gemma3nTextConfig(
        vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY, hidden_size=32, head_dim=16,
        intermediate_size=[48, 48], num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, hidden_size_per_layer_input=8, laurel_rank=4,
        num_kv_shared_layers=0, activation_sparsity_pattern=[0.0, 0.0],
    )  # fmt: skip
    torch.manual_seed(0)
    student = Gemma3nForCausalLM(shape).eval()
    layers = adapters.find_linear_layers(student)
    before = logits_of(student)
    adapters.add_adapters(student, LoraConfig(rank=2))
    named = dict(student.named_modules())
    assert all(hasattr(named[path], "lora_A") for path in layers)
    assert torch.equal(logits_of(student), before)


def test_only_the_targets_asked_for_are_adapted() -> None:
    student = adapted(targets=("q_proj", "mlp.up_proj"))
    with_one = {
        name.split(".lora_A")[0].split("layers.")[1]
        for name, _ in student.named_parameters()
        if "lora_A" in name
    }
    assert with_one == {
        "0.self_attn.q_proj",
        "1.self_attn.q_proj",
        "0.mlp.up_proj",
        "1.mlp.up_proj",
    }


@pytest.mark.parametrize("target", ["query", "lm_head", "embed_tokens", "proj", "model.layers"])
def test_a_target_that_matches_nothing_is_refused_with_those_that_there_are(target: str) -> None:
    student = build("llama untied")
    with pytest.raises(ModelError, match=f"no linear layer named {target}") as caught:
        adapters.add_adapters(student, LoraConfig(targets=("q_proj", target)))
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in caught.value.remedy
    assert not adapters.has_adapters(student) and all(p.requires_grad for p in student.parameters())


def test_a_model_that_peft_cannot_adapt_is_refused_by_name() -> None:
    """peft refuses layers named out_proj by the model's type alone."""
    student = build("opt")
    student.config.model_type = "mamba"
    with pytest.raises(ModelError, match=r"OPTForCausalLM cannot have adapters at .*out_proj"):
        adapters.add_adapters(student, LoraConfig())


#: Models with state-space mixers, and the linear layers that may have adapters.
MIXERS = {
    "mamba": "in_proj",
    "mamba2": "in_proj",
    "falcon-h1": "down_proj, gate_proj, in_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
    "jamba": "down_proj, gate_proj, in_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
}


def make_mixer(kind: str) -> PreTrainedModel:
    """Return a model with state-space mixers, two layers deep."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    if kind == "mamba2":
        return Mamba2ForCausalLM(
            Mamba2Config(**shape, num_heads=8, head_dim=8, state_size=4, n_groups=1, chunk_size=8)
        )
    if kind == "jamba":
        attention = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48}
        places = {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
        return JambaForCausalLM(
            JambaConfig(**shape, **attention, **places, num_experts=1, mamba_d_state=4)
        )
    return build(kind)


@pytest.mark.parametrize("kind", MIXERS)
def test_state_space_mixers_have_adapters_where_their_layers_are_called(
    kind: str, tmp_path: Path
) -> None:
    plain = make_mixer(kind).eval()
    before = logits_of(plain)
    student = adapters.add_adapters(copy.deepcopy(plain), LoraConfig(rank=2))
    torch.testing.assert_close(logits_of(student), before, rtol=1e-6, atol=1e-6)
    with_one = {
        name.split(".lora_A")[0].rpartition(".")[2]
        for name, _ in student.named_parameters()
        if "lora_A" in name
    }
    assert ", ".join(sorted(with_one)) == MIXERS[kind]
    randomise(student).train()
    compute_hidden_states(student, TOKENS_BL).square().sum().backward()
    for parameter in adapters.list_trained_parameters(student):
        assert parameter.grad is not None and bool(parameter.grad.abs().sum())
    after = logits_of(student.eval())
    adapters.save_adapters(student, tmp_path, "the/base")
    again = adapters.load_adapters(copy.deepcopy(plain), tmp_path)
    torch.testing.assert_close(logits_of(again), after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "target"),
    [("mamba", "dt_proj"), ("mamba", "x_proj"), ("mamba2", "out_proj"), ("jamba", "dt_proj")],
)
def test_a_target_that_a_mixer_never_calls_is_refused_with_those_that_would_do(
    kind: str, target: str
) -> None:
    student = make_mixer(kind)
    with pytest.raises(ModelError, match=f"adapters at {target} of .* no effect") as caught:
        adapters.add_adapters(student, LoraConfig(targets=("in_proj", target)))
    assert f"choose from {MIXERS[kind]}." in caught.value.remedy
    assert not adapters.has_adapters(student)


def mixture(kind: str) -> PreTrainedModel:
    """Return DeepSeek with a dense layer, and a layer of experts with a shared one."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    shape |= {
        "num_key_value_heads": 2,
        "intermediate_size": 12,
        "moe_intermediate_size": 4,
        "num_experts_per_tok": 2,
    }
    if kind == "qwen3":
        experts = {"num_experts": 4, "mlp_only_layers": [0], "head_dim": 4}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    heads = {
        "q_lora_rank": 4,
        "kv_lora_rank": 4,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**shape, **experts, **heads))


MIXTURES = {
    "mixtral": lambda: build("mixtral"),
    "qwen3": lambda: mixture("qwen3"),
    "deepseek": lambda: mixture("deepseek"),
    "gpt-oss": lambda: build("gpt-oss"),
    "llama4": lambda: build("llama4"),
    "olmoe": lambda: build("olmoe"),
}


def randomise(student: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapters.list_trained_parameters(student):
            parameter.normal_(0.0, 0.1)
    return student


def compute_update(student: PreTrainedModel, prefix: str, weight: Tensor) -> Tensor:
    """The scaled B A of each expert by hand, in either order of the weight's axes."""
    a_RI = student.get_parameter(f"{prefix}.lora_A.default.weight").detach()
    b_OR = student.get_parameter(f"{prefix}.lora_B.default.weight").detach()
    experts = len(weight)
    a_ErI = a_RI.view(experts, -1, a_RI.shape[1])
    b_OrE = b_OR.view(len(b_OR), -1, experts)
    updates = [2.0 * b_OrE[:, :, expert] @ a_ErI[expert] for expert in range(experts)]
    own = updates[0].shape == weight.shape[1:]
    return torch.stack([update if own else update.T for update in updates])


@pytest.mark.parametrize("kind", MIXTURES)
def test_every_expert_gets_an_adapter_beside_the_linear_layers(kind: str, tmp_path: Path) -> None:
    plain = MIXTURES[kind]().eval()
    before = logits_of(plain)
    student = adapters.add_adapters(copy.deepcopy(plain), LoraConfig(rank=4, alpha=8.0))
    torch.testing.assert_close(logits_of(student), before, rtol=1e-6, atol=1e-6)
    randomise(student)
    inner = [name for name, _ in plain.named_parameters() if name.endswith("experts.down_proj")]
    assert inner
    # The adapters of one layer's experts are nested, in the order of their names.
    updates = {}
    for name in inner:
        experts = name.rpartition(".")[0]
        gate = f"{experts}.gate_up_proj"
        updates[name] = compute_update(student, experts, plain.get_parameter(name))
        updates[gate] = compute_update(student, f"{experts}.base_layer", plain.get_parameter(gate))
    linear = {f"{name}.weight" for name in adapters.find_linear_layers(plain)}
    with_adapters = logits_of(student)
    assert not torch.allclose(with_adapters, before, atol=1e-3)
    adapters.save_adapters(student, tmp_path, "the/base")
    again = adapters.load_adapters(copy.deepcopy(plain), tmp_path)
    merged = adapters.merge_adapters(student)
    for model in (merged, again):
        torch.testing.assert_close(logits_of(model), with_adapters, rtol=1e-4, atol=1e-4)
        assert model.state_dict().keys() == plain.state_dict().keys()
    for name, weight in plain.named_parameters():
        found = merged.get_parameter(name)
        if name in updates:
            torch.testing.assert_close(found, weight + updates[name], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(found, weight) == (name not in linear)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft asks for it
def test_saved_adapters_of_experts_are_read_by_peft_itself(tmp_path: Path) -> None:
    from peft import PeftModel

    student = build("mixtral").eval()
    randomise(adapters.add_adapters(student, LoraConfig(rank=4)))
    expected = logits_of(student)
    adapters.save_adapters(student, tmp_path, "the/base")
    theirs = PeftModel.from_pretrained(build("mixtral").eval(), str(tmp_path))
    assert torch.equal(logits_of(theirs), expected)


def test_adapters_of_experts_are_removed_and_take_a_gradient() -> None:
    plain = build("mixtral").eval()
    student = randomise(adapters.add_adapters(copy.deepcopy(plain), LoraConfig(rank=4)))
    compute_hidden_states(student, TOKENS_BL).square().sum().backward()
    trained = adapters.list_trained_parameters(student)
    assert all(parameter.grad is not None for parameter in trained)
    assert all(".lora_" in name for name, each in student.named_parameters() if each.requires_grad)
    bare = adapters.remove_adapters(student)
    assert bare.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(logits_of(bare), logits_of(plain))


def test_experts_are_left_out_by_name_only() -> None:
    linear = adapters.add_adapters(build("mixtral"), LoraConfig(targets=("q_proj",)))
    assert not any("experts.lora" in name for name, _ in linear.named_parameters())
    experts = adapters.add_adapters(build("mixtral"), LoraConfig(targets=("experts.down_proj",)))
    assert {
        name.split(".lora_")[0].split("layers.")[1]
        for name, _ in experts.named_parameters()
        if ".lora_" in name
    } == {"0.mlp.experts", "1.mlp.experts"}


def test_dropout_of_the_adapters_of_experts_is_refused_with_what_may_have_it() -> None:
    with pytest.raises(ModelError, match=r"dropout is 0\.1, but adapters of experts") as caught:
        adapters.add_adapters(build("mixtral"), LoraConfig(dropout=0.1))
    assert "student.lora.targets to [k_proj, o_proj, q_proj, v_proj]" in caught.value.remedy


@pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern:RuntimeWarning"
)  # peft, of its own conversion
def test_adapters_that_peft_left_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peft takes the names of dense layers for the experts alone."""
    monkeypatch.setattr(adapters, "_TAKEN", ())
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.down_proj would get none"):
        adapters.add_adapters(mixture("qwen3"), LoraConfig())


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_w_plus_scaled_b_a_and_the_model_is_plain(kind: str) -> None:
    plain = build(kind)
    student = adapted(kind)
    with_adapters = logits_of(student)
    scale = 8.0 / 4
    parts = dict(student.named_parameters())
    deltas = {
        name.replace(".lora_A.default", ""): scale * parts[name.replace("lora_A", "lora_B")] @ a
        for name, a in parts.items()
        if "lora_A" in name
    }
    assert not torch.allclose(logits_of(plain.eval()), with_adapters, atol=1e-3)
    merged = adapters.merge_adapters(student)
    torch.testing.assert_close(logits_of(merged), with_adapters, rtol=1e-5, atol=1e-5)
    assert not adapters.has_adapters(merged) and all(p.requires_grad for p in merged.parameters())
    assert merged.state_dict().keys() == plain.state_dict().keys()
    for name, weight in plain.named_parameters():
        delta = deltas.pop(name, None)
        delta = 0.0 if delta is None else delta.T if kind == "gpt2" else delta
        torch.testing.assert_close(merged.get_parameter(name), weight + delta, rtol=1e-6, atol=1e-6)
    assert not deltas


def test_taken_out_adapters_leave_the_base_bit_for_bit() -> None:
    plain = build("qwen2")
    bare = adapters.remove_adapters(adapted("qwen2"))
    assert bare.state_dict().keys() == plain.state_dict().keys()
    assert all(
        torch.equal(bare.state_dict()[name], tensor) for name, tensor in plain.state_dict().items()
    )


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft asks for it
@pytest.mark.parametrize("kind", ["llama tied", "gpt2"])
def test_saved_adapters_are_read_by_peft_itself_and_by_us(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    student = adapted(kind)
    expected = logits_of(student)
    adapters.save_adapters(student, tmp_path / "adapter", "the/base", "v1")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert (
        torch.equal(logits_of(student), expected)
        and len(adapters.list_trained_parameters(student)) > 0
    )
    theirs = PeftModel.from_pretrained(build(kind).eval(), str(tmp_path / "adapter"))
    assert torch.equal(logits_of(theirs), expected)
    assert theirs.peft_config["default"].base_model_name_or_path == "the/base"
    ours = adapters.load_adapters(build(kind).eval(), tmp_path / "adapter")
    torch.testing.assert_close(logits_of(ours), expected, rtol=1e-5, atol=1e-5)
    assert not adapters.has_adapters(ours)


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    adapters.save_adapters(adapted(), tmp_path, None)
    with pytest.raises(ModelError, match="are not for LlamaForCausalLM"):
        adapters.load_adapters(build("llama tied", num_hidden_layers=1), tmp_path)


def test_the_fused_loss_moves_the_adapters_and_not_the_frozen_head() -> None:
    """The fused loss gives the gradients of the plain loss on the model's own logits."""
    student = adapted("llama untied")
    head = find_lm_head(student, VOCABULARY)
    gold_N = TOKENS_BL[:, 1:].flatten()
    hidden_ND = compute_hidden_states(student, TOKENS_BL)[:, :-1].flatten(0, 1)
    compute_distillation_loss(
        hidden_ND, head, Targets(gold_N), Objective(alpha=1.0)
    ).total.backward()
    found = [parameter.grad.clone() for parameter in adapters.list_trained_parameters(student)]
    assert head.weight.grad is None
    student.zero_grad()
    logits_NV = student(input_ids=TOKENS_BL).logits[:, :-1, :VOCABULARY].flatten(0, 1)
    cross_entropy(logits_NV, gold_N, reduction="sum").backward()
    for parameter, gradient in zip(adapters.list_trained_parameters(student), found, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


def test_dropout_is_drawn_in_training_only() -> None:
    student = adapted(dropout=0.5)
    assert torch.equal(logits_of(student), logits_of(student))
    student.train()
    assert not torch.equal(logits_of(student), logits_of(student))


def test_adapters_are_a_function_of_the_random_state() -> None:
    made = []
    for seed in (1, 1, 2):
        student = build("llama tied")
        torch.manual_seed(seed)
        made.append(
            adapters.list_trained_parameters(adapters.add_adapters(student, LoraConfig(rank=4)))
        )
    assert all(torch.equal(a, b) for a, b in zip(made[0], made[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(made[0], made[2], strict=True))
