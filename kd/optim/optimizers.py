"""The optimiser of the student: which one, which weights decay, and how fast each layer learns.

    adamw          torch.optim.AdamW: fused if the device allows it, else foreach or a loop
    adamw_8bit     torchao's AdamW of 8 bits for the matrices of the layers, AdamW for the rest
    adafactor      transformers' Adafactor without its own choice of the rate, as in its Trainer
    muon           torch.optim.Muon for the matrices of the layers, AdamW for the rest
    lion, lars     those of pytorch_optimizer
    schedule_free  schedulefree's AdamW, which keeps an average of the weights for evaluation

The loop sees one ``torch.optim.Optimizer`` each time: groups with rates, ``step``, ``zero_grad``.
With train.precision bf16_pure the steps of AdamW are rounded stochastically (``kd.optim.rounded``).
Where AdamW or schedule-free trains the LM head, rows of rare words move little
(``kd.optim.rare_rows``).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel
from transformers.optimization import Adafactor

from kd.config.extras import NO_TORCHAO, require_torchao
from kd.config.train import OPTIMIZERS, TrainConfig
from kd.errors import TrainingError
from kd.models.layers import find_decoder_layers
from kd.optim.rare_rows import keep_floor
from kd.optim.state_size import ParameterShape
from kd.optim.whole_steps import ParameterGroup, WholeSteps, needs_whole_steps


def make_optimizer(
    student: PreTrainedModel, extra: Iterable[Parameter], options: TrainConfig, device: torch.device
) -> Optimizer:
    """Make the optimiser of ``options`` for ``student``'s trained parameters and ``extra``.

    Weight decay is on matrices only: on norms and biases it would only shrink their scale. The
    first group holds the LM head and has the full rate, and so has ``extra``. Raises
    ``TrainingError`` for an argument in ``train.optim_args`` that the optimiser does not have; the
    message lists those it has. Raises ``ConfigError`` if the optimiser's library is missing.
    """
    # Groups have parameters of the same rate and decay; those with the full rate come first.
    trained = (each for each in student.parameters() if each.requires_grad)
    rates: dict[Parameter, float] = dict.fromkeys(trained, options.learning_rate)
    rates.update(dict.fromkeys(extra, options.learning_rate))
    if not rates:
        raise TrainingError("The student has no parameter to train.", "Do not freeze all of it.")
    biases = _find_biases(student)
    decaying = {each for each in rates if each.ndim >= 2 and each not in biases}
    groups: list[ParameterGroup] = []
    for rate in sorted(set(rates.values()), reverse=True):
        for decays, decay in ((True, options.weight_decay), (False, 0.0)):
            own = [p for p in rates if rates[p] == rate and (p in decaying) == decays]
            if own:
                groups.append({"params": own, "lr": rate, "weight_decay": decay})
    optimizer: Optimizer
    if options.optim in _HALVES:
        optimizer = _make_halves(_HALVES[options.optim](student), groups, options, device)
    else:
        optimizer = _make_one_optimizer(options.optim, groups, options, device)
    if options.lm_head_floor:
        keep_floor(optimizer, student.get_output_embeddings().weight, options.lm_head_floor)
    return optimizer


# ---------------------------------------------------------------------- layers


def _find_biases(student: PreTrainedModel) -> set[Parameter]:
    """The biases of ``student``, by their names.

    The shape does not show it: the biases of all experts of a layer may be one tensor of two axes.
    """
    return {parameter for name, parameter in student.named_parameters() if name.endswith("bias")}


def find_layer_matrices(student: PreTrainedModel) -> set[Parameter]:
    """The trained matrices of the decoder layers, which Muon orthogonalises.

    Muon is made for maps between hidden states. Rows of the embeddings and of the LM head are no
    such maps, nor are biases.
    """
    biases = _find_biases(student)
    return {
        parameter
        for layer in find_decoder_layers(student)
        for parameter in layer.parameters()
        if parameter.requires_grad and parameter.ndim == 2 and parameter not in biases
    }


def list_trained_shapes(student: PreTrainedModel) -> dict[Parameter, ParameterShape]:
    """The shape of each trained parameter, from which the size of its state follows."""
    matrices = find_layer_matrices(student)
    return {
        parameter: ParameterShape(tuple(parameter.shape), parameter in matrices)
        for parameter in student.parameters()
        if parameter.requires_grad
    }


def find_eight_bit_weights(student: PreTrainedModel) -> set[Parameter]:
    """The trained weights whose state ``adamw_8bit`` keeps in 8 bits."""
    shapes = list_trained_shapes(student).items()
    return {parameter for parameter, shape in shapes if shape.has_eight_bit_state}


#: The optimisers of some parameters alone, with what finds these; AdamW has all others.
_HALVES = {"muon": find_layer_matrices, "adamw_8bit": find_eight_bit_weights}


# ---------------------------------------------------------------------- optimisers


def _make_one_optimizer(
    name: str, groups: list[ParameterGroup], options: TrainConfig, device: torch.device
) -> Optimizer:
    factory, settings = _choose_class_and_settings(name, options, device)
    arguments = _read_arguments(name, options)
    try:
        chosen = settings | arguments
        optimizer: Optimizer = factory(groups, lr=options.learning_rate, **chosen)
    except ValueError as error:
        detail = f"train.optim {name} cannot be made with optim_args {arguments}: {error}"
        raise TrainingError(detail, "Change train.optim_args.") from error
    if OPTIMIZERS[name].whole and needs_whole_steps(groups):
        optimizer = WholeSteps(optimizer)
    if OPTIMIZERS[name].averages:
        # It is made in the mode for evaluation, in which it cannot step.
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


#: What AdamW has where the job says nothing else.
_ADAM: dict[str, object] = {"betas": (0.9, 0.95), "eps": 1e-8}
# Where torch has one kernel for the whole of AdamW; elsewhere it takes foreach if the device has
# that, else a loop.
_FUSED_DEVICES = {"cuda", "xpu", "mps", "cpu"}


def _choose_class_and_settings(
    name: str, options: TrainConfig, device: torch.device
) -> tuple[Callable[..., Any], dict[str, object]]:
    """The optimiser's class, and the arguments that ``options`` or this project decide."""
    adam: dict[str, object] = dict(_ADAM)
    if name == "adamw":
        adam["fused"] = True if device.type in _FUSED_DEVICES else None
        if not options.is_pure_bfloat16:
            return AdamW, adam
        # It needs pytorch_optimizer, which a training in other precisions does not.
        from kd.optim.rounded import RoundedAdamW

        return RoundedAdamW, adam
    if name == "adamw_8bit":
        require_torchao(NO_TORCHAO)
        from kd.optim.eight_bit import EightBitAdamW

        return EightBitAdamW, {**adam, "bf16_stochastic_round": options.is_pure_bfloat16}
    if name == "muon":
        # Steps of AdamW's size, so that one rate serves both halves (Liu et al. 2025, arXiv
        # 2502.16982).
        return Muon, {"adjust_lr_fn": "match_rms_adamw"}
    if name == "adafactor":
        # The rate is the configuration's: neither relative to the weights' size nor falling by
        # itself.
        return Adafactor, {"scale_parameter": False, "relative_step": False, "warmup_init": False}
    if name == "schedule_free":
        from schedulefree import AdamWScheduleFree

        return AdamWScheduleFree, {**adam, "warmup_steps": 0}
    from pytorch_optimizer import LARS, Lion

    return {"lion": Lion, "lars": LARS}[name], {}


def _make_halves(
    own: set[Parameter], groups: list[ParameterGroup], options: TrainConfig, device: torch.device
) -> Optimizer:
    """The optimiser of ``options`` for the parameters in ``own``, and AdamW for all others."""
    adam = options.model_copy(update={"optim_args": {}})
    halves = []
    for name, chosen, mine in (("adamw", adam, False), (options.optim, options, True)):
        parts = [
            {**group, "params": [p for p in group["params"] if (p in own) == mine]}
            for group in groups
        ]
        if parts := [part for part in parts if part["params"]]:
            halves.append(_make_one_optimizer(name, parts, chosen, device))
    return CombinedOptimizer(halves, options.learning_rate)


class CombinedOptimizer(Optimizer):
    """Several optimisers of different parameters as one.

    Its groups are theirs, and all keep their state in one dictionary.
    """

    def __init__(self, parts: list[Optimizer], learning_rate: float) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__(groups, {"lr": learning_rate})
        self.parts = parts
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of each optimiser."""
        assert closure is None, "the loop computes gradients itself"
        for part in self.parts:
            part.step()


# ---------------------------------------------------------------------- train.optim_args

#: Arguments that are tuples, with the names of their parts in ``train.optim_args``.
_TUPLE_ARGUMENTS = {
    "betas": ("beta1", "beta2"),
    "eps": ("eps1", "eps2"),
    "ns_coefficients": ("ns_a", "ns_b", "ns_c"),
}
#: Arguments that the loop sets itself, or that would break it.
_RESERVED_ARGUMENTS = {
    "lr", "weight_decay", "maximize", "differentiable", "capturable", "foreach", "fused",
}  # fmt: skip


def list_optimizer_arguments(name: str, options: TrainConfig) -> dict[str, float]:
    """The possible arguments in ``train.optim_args`` of the optimiser ``name``, with defaults.

    Each part of a tuple is an argument. Rates and decay are missing: they have fields of their own.
    """
    factory, settings = _choose_class_and_settings(name, options, torch.device("cpu"))
    known: dict[str, float] = {}
    for key, parameter in inspect.signature(factory).parameters.items():
        if key in _RESERVED_ARGUMENTS | (settings.keys() - _ADAM.keys()):
            continue
        default: Any = settings.get(key, parameter.default)
        if isinstance(default, tuple):
            known.update(zip(_TUPLE_ARGUMENTS[key], default, strict=True))
        elif isinstance(default, int | float):
            known[key] = default
    return known


def _read_arguments(name: str, options: TrainConfig) -> dict[str, float | tuple[float, ...]]:
    """``train.optim_args`` as arguments of the optimiser's class."""
    known = list_optimizer_arguments(name, options)
    for key in options.optim_args.keys() - known.keys():
        close = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.5)
        hint = f": did you mean {close[0]!r}?" if close else "."
        raise TrainingError(
            f"train.optim_args of {name} cannot hold {key!r}{hint}",
            f"It takes {', '.join(sorted(known)) or 'none'}; rates and decay are fields of train.",
        )
    given = {
        key: _convert_to_type_of(known[key], name, key, value)
        for key, value in options.optim_args.items()
    }
    for key, parts in _TUPLE_ARGUMENTS.items():
        if given.keys() & set(parts):
            given[key] = tuple(given.pop(part, known[part]) for part in parts)
    return given


def _convert_to_type_of(default: Any, name: str, key: str, value: float) -> Any:
    """``value`` in the type of ``default``: a number may stand for a count or for a truth value."""
    if not isinstance(default, int):
        return value
    if value != int(value) or (isinstance(default, bool) and value not in (0, 1)):
        wanted = "true or false" if isinstance(default, bool) else "a whole number"
        raise TrainingError(f"train.optim_args.{key} of {name} is {value}.", f"Give {wanted}.")
    return type(default)(value)
