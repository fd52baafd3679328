"""Adapters: what they change and what they leave, against W + (alpha / rank) B A by hand and peft's own loader."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from kd import models
from kd.config.student import LoraConfig
from kd.errors import ModelError
from kd.levers import adapters
from kd.losses import Objective, distillation_loss
from kd.targets import Targets
from tests.test_kd_models import VOCABULARY, build

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ["llama tied", "llama untied", "gpt2", "gemma2 soft cap", "qwen2", "qwen3", "mistral", "phi bias", "gpt-neox"]
TOKENS_BT = torch.arange(48).view(3, 16) % VOCABULARY


def adapted(kind: str = "llama tied", **changes) -> PreTrainedModel:
    """A model with adapters that do something."""
    student = build(kind).eval()
    torch.manual_seed(1)
    adapters.add_adapters(student, LoraConfig(**{"rank": 4, "alpha": 8.0} | changes))
    with torch.no_grad():
        for parameter in adapters.trained(student):
            parameter.normal_(0.0, 0.1)
    return student


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> Tensor:
    return model(input_ids=TOKENS_BT).logits


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_begin_as_nothing_and_alone_are_trained(kind: str) -> None:
    student = build(kind).eval()
    before, weights = logits_of(student), {id(p): p.detach().clone() for p in student.parameters()}
    assert adapters.add_adapters(student, LoraConfig(rank=4)) is student
    assert torch.equal(logits_of(student), before)
    names = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
    assert {parameter.dtype for parameter in adapters.trained(student)} == {torch.float32}
    head = models.head_of(student, VOCABULARY)
    optimizer = torch.optim.SGD(adapters.trained(student), lr=0.5)
    losses = []
    for _ in range(6):
        hidden_BTD = models.hidden_states(student, TOKENS_BT)
        loss = cross_entropy(head.logits(hidden_BTD[:, :-1].flatten(0, 1)), TOKENS_BT[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01
    frozen = [parameter for parameter in student.parameters() if id(parameter) in weights]
    assert len(frozen) == len(weights) and all(torch.equal(p, weights[id(p)]) and p.grad is None for p in frozen)


def test_an_adapter_of_every_linear_layer_but_the_head() -> None:
    student = adapted("llama untied")
    with_one = {name.split(".lora_A")[0] for name, _ in student.named_parameters() if ".lora_A." in name}
    own = {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    assert with_one == {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in own}


def test_only_the_targets_asked_for_are_adapted() -> None:
    student = adapted(targets=("q_proj", "mlp.up_proj"))
    with_one = {
        name.split(".lora_A")[0].split("layers.")[1] for name, _ in student.named_parameters() if "lora_A" in name
    }
    assert with_one == {"0.self_attn.q_proj", "1.self_attn.q_proj", "0.mlp.up_proj", "1.mlp.up_proj"}


@pytest.mark.parametrize("target", ["query", "lm_head", "embed_tokens", "proj", "model.layers"])
def test_a_target_that_matches_nothing_is_refused_with_those_that_there_are(target: str) -> None:
    student = build("llama untied")
    with pytest.raises(ModelError, match=f"no linear layer named {target}") as caught:
        adapters.add_adapters(student, LoraConfig(targets=("q_proj", target)))
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in caught.value.remedy
    assert not adapters.has_adapters(student) and all(p.requires_grad for p in student.parameters())


def test_a_model_that_peft_cannot_adapt_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"MambaForCausalLM cannot have adapters at .*out_proj"):
        adapters.add_adapters(build("mamba"), LoraConfig())


def mixture(kind: str) -> PreTrainedModel:
    """A dense layer, and one of experts, in DeepSeek with a shared one."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 12, "moe_intermediate_size": 4, "num_experts_per_tok": 2}
    if kind == "qwen3":
        experts = {"num_experts": 4, "mlp_only_layers": [0], "head_dim": 4}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    heads = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**shape, **experts, **heads))


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning")  # peft, of its own conversion
@pytest.mark.parametrize(
    ("kind", "left"),
    [("qwen3", "[k_proj, o_proj, q_proj, v_proj]"),
     ("deepseek", "[kv_a_proj_with_mqa, kv_b_proj, o_proj, q_a_proj, q_b_proj]")],
)  # fmt: skip
def test_adapters_of_other_layers_than_were_to_get_one_are_refused(kind: str, left: str) -> None:
    with pytest.raises(
        ModelError, match=r"layers\.0\.mlp\.down_proj would get none, and .*mlp\.experts would"
    ) as caught:
        adapters.add_adapters(mixture(kind), LoraConfig())
    assert f"student.lora.targets to {left}," in caught.value.remedy
    targets = tuple(left.strip("[]").split(", "))
    student = adapters.add_adapters(mixture(kind), LoraConfig(targets=targets))
    with_one = {name.split(".lora_A")[0] for name, _ in student.named_parameters() if ".lora_A." in name}
    assert with_one == {f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in targets}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_w_plus_scaled_b_a_and_the_model_is_plain(kind: str) -> None:
    plain, student = build(kind), adapted(kind)
    with_adapters = logits_of(student)
    scale, parts = 8.0 / 4, dict(student.named_parameters())
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
    plain, bare = build("qwen2"), adapters.remove_adapters(adapted("qwen2"))
    assert bare.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(bare.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
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
    assert torch.equal(logits_of(student), expected) and len(adapters.trained(student)) > 0
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
    """Its gradients are those of the plain loss on the model's own logits."""
    student = adapted("llama untied")
    head, gold_N = models.head_of(student, VOCABULARY), TOKENS_BT[:, 1:].flatten()
    hidden_ND = models.hidden_states(student, TOKENS_BT)[:, :-1].flatten(0, 1)
    distillation_loss(hidden_ND, head, Targets(gold_N), Objective(alpha=1.0)).total.backward()
    found = [parameter.grad.clone() for parameter in adapters.trained(student)]
    assert head.weight.grad is None
    student.zero_grad()
    logits_NV = student(input_ids=TOKENS_BT).logits[:, :-1, :VOCABULARY].flatten(0, 1)
    cross_entropy(logits_NV, gold_N, reduction="sum").backward()
    for parameter, gradient in zip(adapters.trained(student), found, strict=True):
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
        made.append(adapters.trained(adapters.add_adapters(student, LoraConfig(rank=4))))
    assert all(torch.equal(a, b) for a, b in zip(made[0], made[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(made[0], made[2], strict=True))
