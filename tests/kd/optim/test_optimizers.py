"""Optimisers take the steps of their papers, by hand in float64; rates and decay per group."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kd.config.train import TrainConfig
from kd.errors import TrainingError
from kd.models.layers import group_layers
from kd.optim.optimizers import list_optimizer_arguments, make_optimizer
from tests.support.kd.quantizers import needs_torchao

CPU = torch.device("cpu")
NAMES = ("adamw", "adamw_8bit", "adafactor", "muon", "lion", "lars", "schedule_free")
SHAPE = {
    "vocab_size": 24,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}


def options(**changes: object) -> TrainConfig:
    """Options without the checks of the configuration: the optimiser refuses them again."""
    return TrainConfig(max_steps=8, learning_rate=0.01, weight_decay=0.1).model_copy(update=changes)


def llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).double()


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "qwen": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, num_key_value_heads=1, tie_word_embeddings=False)
    ),
    "gemma": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, num_key_value_heads=1, head_dim=4, tie_word_embeddings=False)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(**SHAPE | {"n_inner": 12}, tie_word_embeddings=False)
    ),
    # Its final norm is declared before its layers.
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**SHAPE, ffn_dim=12, word_embed_proj_dim=8, tie_word_embeddings=False)
    ),
}


def gradient(parameter: Tensor, step: int) -> Tensor:
    """Some gradient of full rank that differs by parameter and step."""
    index = torch.arange(parameter.numel(), dtype=torch.float64)
    return (
        torch.sin(1.7 * index + 0.31 * index**2 + step + 0.01 * parameter.numel())
        .view_as(parameter)
        .to(parameter.dtype)
    )


# ---------------------------------------------------------------------- the steps of each, by hand
# Every function takes a start, the gradients, a rate and a decay, and returns where three steps
# end.

Reference = Callable[..., Tensor]


def adamw(
    w: Tensor, gradients: list[Tensor], rate: float, decay: float, floor: float = 0.0
) -> Tensor:
    m = v = torch.zeros_like(w)
    for step, g in enumerate(gradients, 1):
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g
        w = (
            w
            - rate * decay * w
            - rate * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        )
        v = torch.maximum(v, floor**2 * v.mean())
    return w


def adafactor(w: Tensor, gradients: list[Tensor], rate: float, decay: float) -> Tensor:
    """Shazeer and Stern 2018, algorithms 4 and 5, without relative steps."""
    row = column = second = torch.zeros(())
    for step, g in enumerate(gradients, 1):
        beta = 1 - step**-0.8
        square = g * g + 1e-30
        if w.ndim == 2:
            row = beta * row + (1 - beta) * square.mean(1)
            column = beta * column + (1 - beta) * square.mean(0)
            estimate = torch.outer(row, column) / row.mean()
        else:
            second = estimate = beta * second + (1 - beta) * square
        update = g / estimate.sqrt()
        w = w - rate * decay * w - rate * update / max(1.0, float(update.square().mean().sqrt()))
    return w


def lion(w: Tensor, gradients: list[Tensor], rate: float, decay: float) -> Tensor:
    m = torch.zeros_like(w)
    for g in gradients:
        update = torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
        w = w - rate * decay * w - rate * update
    return w


def lars(w: Tensor, gradients: list[Tensor], rate: float, decay: float) -> Tensor:
    m = torch.zeros_like(w)
    for g in gradients:
        if w.ndim > 1:
            g = 1e-3 * w.norm() / (g.norm() + decay * w.norm()) * (g + decay * w)
        m = 0.9 * m + g
        w = w - rate * m
    return w


def schedule_free(
    w: Tensor, gradients: list[Tensor], rate: float, decay: float, floor: float = 0.0
) -> Tensor:
    """Defazio et al. 2024: gradients at y, steps of z, x their mean; where it is evaluated is x."""
    x = z = y = w
    v = torch.zeros_like(w)
    for step, g in enumerate(gradients, 1):
        v = 0.95 * v + 0.05 * g * g
        z = z - rate * (g / ((v / (1 - 0.95**step)).sqrt() + 1e-8) + decay * y)
        x = x + (z - x) / step
        y = 0.1 * z + 0.9 * x
        v = torch.maximum(v, floor**2 * v.mean())
    return y


REFERENCES: dict[str, Reference] = {
    "adamw": adamw,
    "adafactor": adafactor,
    "lion": lion,
    "lars": lars,
    "schedule_free": schedule_free,
}


def trained(student: nn.Module, chosen: TrainConfig, steps: int = 3) -> None:
    optimizer = make_optimizer(student, (), chosen, CPU)
    for step in range(steps):
        for parameter in student.parameters():
            parameter.grad = gradient(parameter, step) if parameter.requires_grad else None
        optimizer.step()


@pytest.mark.parametrize("name", REFERENCES)
def test_three_steps_are_those_of_the_paper(name: str) -> None:
    student = llama()
    expected = take_reference_steps(name, student)
    trained(student, options(optim=name, lm_head_floor=0))
    for key, parameter in student.named_parameters():
        assert torch.allclose(parameter, expected[key], rtol=1e-10, atol=1e-12), key


def take_reference_steps(
    name: str, student: nn.Module, floors: dict[str, float] | None = None
) -> dict[str, Tensor]:
    """Three steps by hand for every parameter; ``floors`` are those of some, by name."""
    floors = floors or {}
    return {
        key: REFERENCES[name](
            parameter.detach().clone(),
            [gradient(parameter, step) for step in range(3)],
            0.01,
            0.1 * (parameter.ndim > 1),
            **({"floor": floors[key]} if key in floors else {}),
        )
        for key, parameter in student.named_parameters()
    }


# ---------------------------------------------------------------------- the floor of the LM head


@pytest.mark.parametrize("name", ["adamw", "schedule_free"])
@pytest.mark.parametrize(("tied", "key"), [(False, "lm_head"), (True, "model.embed_tokens")])
def test_the_floor_is_that_of_the_lm_head_alone(name: str, tied: bool, key: str) -> None:
    student = llama(tied)
    plain = take_reference_steps(name, student)
    expected = take_reference_steps(name, student, {f"{key}.weight": 0.7})
    assert not torch.allclose(plain[f"{key}.weight"], expected[f"{key}.weight"], rtol=1e-3)
    trained(student, options(optim=name, lm_head_floor=0.7))
    for each, parameter in student.named_parameters():
        assert torch.allclose(parameter, expected[each], rtol=1e-10, atol=1e-12), each


@pytest.mark.parametrize("name", ["adamw", "muon", "schedule_free"])
def test_rows_with_small_gradients_move_in_proportion_to_them(name: str) -> None:
    """Adam alone moves each row by the rate, and so would enlarge the noise of rare words."""

    def measure_steps(floor: float) -> Tensor:
        student = llama()
        start = student.lm_head.weight.detach().clone()
        chosen = options(optim=name, lm_head_floor=floor, weight_decay=0)
        optimizer = make_optimizer(student, (), chosen, CPU)
        for step in range(20):
            for parameter in student.parameters():
                parameter.grad = gradient(parameter, 0) * (0.9**step + 1)
            student.lm_head.weight.grad[:] = 1 + step % 2
            student.lm_head.weight.grad[:12] *= 1e-4
            optimizer.step()
        return (student.lm_head.weight.detach() - start).abs().mean(1)

    plain = measure_steps(0)
    assert plain[0] == pytest.approx(float(plain[-1]), rel=0.01)
    floored = measure_steps(0.1)
    assert floored[-1] == pytest.approx(float(plain[-1]), rel=1e-6)
    # The first step is taken before there is a floor.
    assert floored[0] < 0.1 * floored[-1]


@pytest.mark.parametrize("name", ["adafactor", "lion", "lars"])
def test_optimisers_without_a_mean_square_have_no_floor(name: str) -> None:
    with_floor = llama()
    without = llama()
    trained(with_floor, options(optim=name, lm_head_floor=0.7))
    trained(without, options(optim=name, lm_head_floor=0))
    assert torch.equal(with_floor.lm_head.weight, without.lm_head.weight)


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_lm_head_needs_no_floor(name: str) -> None:
    student = llama()
    student.lm_head.requires_grad_(False)
    before = student.lm_head.weight.clone()
    trained(student, options(optim=name))
    assert torch.equal(student.lm_head.weight, before)


def test_muon_orthogonalises_the_matrices_of_the_layers_and_nothing_else() -> None:
    """Newton-Schulz in float64 is the reference.

    torch's runs in bfloat16, and the quintic map amplifies its rounding.
    """
    student = llama()
    start = llama()
    trained(student, options(optim="muon"), steps=1)
    for (key, parameter), before in zip(
        student.named_parameters(), start.parameters(), strict=True
    ):
        g = gradient(before, 0)
        if parameter.ndim < 2 or "layers" not in key:
            assert torch.allclose(
                parameter, adamw(before, [g], 0.01, 0.1 * (before.ndim > 1)), atol=1e-12
            ), key
            continue
        x = (
            0.05 * g * 1.95 if g.shape[0] <= g.shape[1] else 0.05 * g.T * 1.95
        )  # Nesterov; its scale does not matter
        x = x / x.norm()
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = x if g.shape[0] <= g.shape[1] else x.T
        expected = before * (1 - 0.01 * 0.1) - 0.01 * 0.2 * math.sqrt(max(g.shape)) * x
        step = (expected - before).norm()
        assert (parameter - expected).norm() < 0.03 * step, key


@pytest.mark.parametrize("name", NAMES)
def test_rates_of_the_groups_are_those_of_the_step(name: str) -> None:
    """A schedule sets the rates; at rate zero no parameter moves, in either half of muon."""
    student = llama()
    start = llama()
    optimizer = make_optimizer(student, (), options(optim=name), CPU)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in student.parameters():
        parameter.grad = gradient(parameter, 0)
    optimizer.step()
    assert all(
        torch.equal(a, b) for a, b in zip(student.parameters(), start.parameters(), strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_only_matrices_decay_and_every_parameter_is_in_one_group(name: str) -> None:
    student = llama()
    groups = make_optimizer(student, (), options(optim=name), CPU).param_groups
    for group in groups:
        assert all(
            (parameter.ndim >= 2) == (group["weight_decay"] == 0.1) for parameter in group["params"]
        )
        assert group["weight_decay"] in (0.1, 0.0) and group["lr"] == 0.01
    assert sum(len(group["params"]) for group in groups) == len(list(student.parameters()))


@pytest.mark.parametrize("name", NAMES)
def test_biases_of_experts_are_no_matrices_though_they_stand_in_one(name: str) -> None:
    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    student = GptOssForCausalLM(GptOssConfig(**SHAPE, **experts))
    group_of = {
        parameter: group
        for group in make_optimizer(student, (), options(optim=name), CPU).param_groups
        for parameter in group["params"]
    }
    own = student.model.layers[0].mlp.experts
    for bias in (own.gate_up_proj_bias, own.down_proj_bias):
        assert (
            bias.ndim == 2
            and group_of[bias]["weight_decay"] == 0
            and "ns_steps" not in group_of[bias]
        )
    assert group_of[own.down_proj]["weight_decay"] == 0.1
    map_of_states = student.model.layers[0].self_attn.q_proj.weight
    assert ("ns_steps" in group_of[map_of_states]) == (name == "muon")


@pytest.mark.parametrize("name", NAMES)
def test_every_optimiser_falls_on_a_real_loss(name: str) -> None:
    torch.manual_seed(0)
    student = llama().float()
    tokens = torch.randint(24, (4, 12))
    optimizer = make_optimizer(
        student, (), options(optim=name, learning_rate=10.0 if name == "lars" else 0.01), CPU
    )
    losses = []
    for _ in range(30):
        loss = student(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses


# ---------------------------------------------------------------------- layers


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_found_in_every_family(family: str) -> None:
    student = FAMILIES[family]()
    groups = group_layers(student)
    assert [name for name, _ in groups] == ["embeddings", "layer 0", "layer 1", "layer 2", "head"]
    assert sum(len(parameters) for _, parameters in groups) == len(list(student.parameters()))
    name_of = {parameter: name for name, parameter in student.named_parameters()}
    for group, parameters in groups:
        for parameter in parameters:
            name = name_of[parameter]
            in_layer = any(f".{part}.{group[6:]}." in name for part in ("layers", "h"))
            embedded = "embed" in name or "wte" in name or "wpe" in name
            assert {
                "embeddings": embedded,
                "head": "norm" in name or "ln_f" in name or "lm_head" in name,
            }.get(group, in_layer), (group, name)


def test_tied_head_is_an_embedding_and_frozen_parameters_are_nowhere() -> None:
    student = llama(tied=True)
    student.model.layers[1].requires_grad_(False)
    groups = dict(group_layers(student))
    assert [len(groups[name]) for name in ("embeddings", "head")] == [
        1,
        1,
    ] and "layer 1" not in groups
    optimizer = make_optimizer(student, (), options(), CPU)
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    assert trained == {parameter for parameter in student.parameters() if parameter.requires_grad}


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(TrainingError, match="no parameter to train"):
        make_optimizer(llama().requires_grad_(False), (), options(), CPU)


@pytest.mark.parametrize("name", NAMES)
def test_extra_parameters_are_trained_at_the_full_rate(name: str) -> None:
    projection = nn.Linear(8, 12).double()
    before = [parameter.detach().clone() for parameter in projection.parameters()]
    optimizer = make_optimizer(llama(), projection.parameters(), options(optim=name), CPU)
    for parameter in projection.parameters():
        parameter.grad = gradient(parameter, 0)
        (group,) = [
            group
            for group in optimizer.param_groups
            if any(p is parameter for p in group["params"])
        ]
        assert (group["lr"], group["weight_decay"]) == (0.01, 0.1 if parameter.ndim > 1 else 0.0)
        assert "ns_steps" not in group, "a projection is no map between hidden states of one layer"
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, projection.parameters(), strict=True))


# ---------------------------------------------------------------------- kernels


@pytest.mark.parametrize(
    ("device", "fused"), [("cuda", True), ("cpu", True), ("mps", True), ("mtia", None)]
)
def test_adamw_is_fused_where_the_device_has_it_and_else_torch_chooses(
    device: str, fused: bool | None
) -> None:
    group = make_optimizer(llama(), (), options(), torch.device(device)).param_groups[0]
    assert group["fused"] is fused and group["foreach"] is None


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_overflows_is_skipped_by_every_optimiser(name: str) -> None:
    student = llama().float()
    optimizer = make_optimizer(student, (), options(optim=name), CPU)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = [parameter.detach().clone() for parameter in student.parameters()]
    scaler.scale(sum(parameter.sum() for parameter in student.parameters())).backward()
    next(student.parameters()).grad[0] = math.inf
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, student.parameters(), strict=True))
    assert scaler.get_scale() == 1.0


# ---------------------------------------------------------------------- train.optim_args


def test_arguments_reach_the_optimiser() -> None:
    def group(name: str, **arguments: float) -> dict[str, object]:
        return make_optimizer(
            llama(), (), options(optim=name, optim_args=arguments), CPU
        ).param_groups[-1]

    muon = group("muon", momentum=0.8, nesterov=False, ns_steps=3)
    assert (muon["momentum"], muon["nesterov"], muon["ns_steps"]) == (0.8, False, 3)
    assert group("muon", ns_b=-4.0)["ns_coefficients"] == (3.4445, -4.0, 2.0315)
    assert group("lion", beta2=0.98)["betas"] == (0.9, 0.98)
    assert group("lars", trust_coefficient=0.01)["trust_coefficient"] == 0.01
    assert group("adafactor", eps2=0.01, decay_rate=-0.7)["eps"] == (1e-30, 0.01)
    assert group("schedule_free", r=1.0)["r"] == 1.0
    assert group("adamw", amsgrad=1)["amsgrad"] is True


def test_adam_arguments_reach_all_that_are_adam() -> None:
    adam = {"beta1": 0.8, "eps": 1e-6}
    for name in ("adamw", "muon", "schedule_free"):
        given = {} if name == "muon" else adam
        chosen = options(optim=name, optim_args=given)
        group = make_optimizer(llama(), (), chosen, CPU).param_groups[0]
        expected = ((0.9, 0.95), 1e-8) if name == "muon" else ((0.8, 0.95), 1e-6)
        assert (group["betas"], group["eps"]) == expected


@pytest.mark.parametrize(
    ("name", "argument", "suggestion"),
    [
        ("muon", "momentun", "momentum"),
        ("lion", "beta_2", "beta2"),
        ("lars", "trust_coef", "trust_coefficient"),
        ("adamw", "beta_1", "beta1"),
        ("lion", "use_gc", None),  # taken by its **kwargs, silently
        ("muon", "lr", None),
        ("lion", "weight_decay", "weight_decouple"),
    ],
)
def test_unknown_argument_is_refused_with_the_known_ones(
    name: str, argument: str, suggestion: str | None
) -> None:
    with pytest.raises(
        TrainingError, match=f"optim_args of {name} cannot hold '{argument}'"
    ) as caught:
        make_optimizer(llama(), (), options(optim=name, optim_args={argument: 0.5}), CPU)
    assert suggestion is None or f"did you mean '{suggestion}'?" in str(caught.value)
    for known in list_optimizer_arguments(name, options()):
        assert known in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "argument", "value", "wanted"),
    [("muon", "ns_steps", 2.5, "a whole number"), ("muon", "nesterov", 2.0, "true or false")],
)
def test_argument_of_another_type_is_refused(
    name: str, argument: str, value: float, wanted: str
) -> None:
    with pytest.raises(
        TrainingError, match=f"optim_args.{argument} of {name} is {value}"
    ) as caught:
        make_optimizer(llama(), (), options(optim=name, optim_args={argument: value}), CPU)
    assert wanted in caught.value.remedy


def test_argument_that_the_optimiser_itself_refuses_is_named() -> None:
    with pytest.raises(TrainingError, match=r"train\.optim lars cannot be made") as caught:
        make_optimizer(llama(), (), options(optim="lars", optim_args={"momentum": 7.0}), CPU)
    assert "optim_args" in caught.value.remedy


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=needs_torchao if each == "adamw_8bit" else ()) for each in NAMES],
)
def test_every_known_argument_is_taken(name: str) -> None:
    for key, value in list_optimizer_arguments(name, options()).items():
        make_optimizer(llama(), (), options(optim=name, optim_args={key: value}), CPU)
