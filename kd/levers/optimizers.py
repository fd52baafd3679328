"""Which optimiser trains the student, what decays, and how fast each layer learns.

    adamw           torch.optim.AdamW: fused kernels where the device has them, else foreach, else a plain loop
    adafactor       transformers' Adafactor with a rate of its own choosing switched off, as its Trainer uses it
    muon            torch.optim.Muon for the matrices of the layers, AdamW for embeddings, head, norms and the rest
    lion, lars      pytorch_optimizer's
    schedule_free   schedulefree's AdamW: the weights that are evaluated are an average that it keeps itself

Whichever it is, the loop sees one ``torch.optim.Optimizer``: groups with rates, ``step`` and ``zero_grad``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel
from transformers.optimization import Adafactor

from kd.config.train import TrainConfig
from kd.errors import TrainingError
from kd.models import decoder_layers

Group = dict[str, Any]


def make_optimizer(
    student: PreTrainedModel, extra: Iterable[Parameter], options: TrainConfig, device: torch.device
) -> Optimizer:
    """The optimiser that ``options`` name over the trained parameters of ``student`` and over ``extra``.

    Weight decay is on matrices only, for decaying norms and biases only shrinks their scale. The first group holds the
    head and learns at the full rate; ``extra`` does so too. Raises ``TrainingError`` for an argument in
    ``train.optim_args`` that the optimiser does not have, naming those that it has.
    """
    groups = _groups(student, list(extra), options)
    if options.optim == "muon":
        return _muon(student, groups, options, device)
    return _make(options.optim, groups, options, device)


# ---------------------------------------------------------------------- layers


def layer_groups(student: PreTrainedModel) -> list[tuple[str, list[Parameter]]]:
    """The trained parameters from the bottom up: ``embeddings``, ``layer 0`` ..., ``head`` (with the final norm).

    A head that is tied to the embeddings is one of them; what trains nothing is left out.
    """
    return [(name, parameters) for name, parameters, _ in _strata(student) if parameters]


def _strata(student: PreTrainedModel) -> list[tuple[str, list[Parameter], int]]:
    """Name, trained parameters, and how far below the last layer; the head is level with the last layer."""
    layers = decoder_layers(student)
    strata: list[tuple[str, list[Parameter], int]] = [
        (f"layer {index}", list(layer.parameters()), len(layers) - 1 - index) for index, layer in enumerate(layers)
    ]
    inside = {parameter for _, parameters, _ in strata for parameter in parameters}
    embedded = {
        parameter
        for module in student.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    outside = [parameter for parameter in student.parameters() if parameter not in inside]
    strata.insert(0, ("embeddings", [parameter for parameter in outside if parameter in embedded], len(layers)))
    strata.append(("head", [parameter for parameter in outside if parameter not in embedded], 0))
    return [(name, [each for each in parameters if each.requires_grad], depth) for name, parameters, depth in strata]


def _groups(student: PreTrainedModel, extra: list[Parameter], options: TrainConfig) -> list[Group]:
    """Groups of parameters that share a rate and a decay, those with the full rate first."""
    rates: dict[Parameter, float] = dict.fromkeys(
        (parameter for parameter in student.parameters() if parameter.requires_grad), options.learning_rate
    )
    if options.layer_lr_decay < 1:
        for _, parameters, depth in _strata(student):
            rates.update(dict.fromkeys(parameters, options.learning_rate * options.layer_lr_decay**depth))
    rates.update(dict.fromkeys(extra, options.learning_rate))
    if not rates:
        raise TrainingError("The student has no parameter to train.", "Do not freeze all of it.")
    biases = _biases(student)
    groups: list[Group] = [
        {
            "params": [p for p in rates if rates[p] == rate and (p.ndim >= 2 and p not in biases) == decays],
            "lr": rate,
            "weight_decay": decay,
        }
        for rate in sorted(set(rates.values()), reverse=True)
        for decays, decay in ((True, options.weight_decay), (False, 0.0))
    ]
    return [group for group in groups if group["params"]]


def _biases(student: PreTrainedModel) -> set[Parameter]:
    """The biases of ``student``, by their names: those of all experts of a layer may stand in one matrix."""
    return {parameter for name, parameter in student.named_parameters() if name.endswith("bias")}


# ---------------------------------------------------------------------- optimisers


def _make(name: str, groups: list[Group], options: TrainConfig, device: torch.device) -> Optimizer:
    factory, settings = _recipe(name, options, device)
    arguments = _arguments(name, options)
    try:
        optimizer: Optimizer = factory(groups, lr=options.learning_rate, **settings, **arguments)
    except ValueError as error:
        raise TrainingError(
            f"train.optim {name} cannot be made with optim_args {arguments}: {error}", "Change train.optim_args."
        ) from error
    if name == "schedule_free":
        optimizer.train()  # type: ignore[attr-defined]  # it begins in the mode that cannot step
    return optimizer


# Where torch has one kernel for the whole of AdamW; elsewhere it takes foreach if the device has that, else a loop.
_FUSED = {"cuda", "xpu", "mps", "cpu"}


def _recipe(name: str, options: TrainConfig, device: torch.device) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The optimiser's class, and what ``options`` or its use here decide about it."""
    adam = {"betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_epsilon}
    if name == "adamw":
        return AdamW, {**adam, "fused": True if device.type in _FUSED else None}
    if name == "muon":
        # Steps of AdamW's size, so that one rate serves both halves (Liu et al. 2025, arXiv 2502.16982).
        return Muon, {"adjust_lr_fn": "match_rms_adamw"}
    if name == "adafactor":
        # The rate is the configuration's: neither relative to the weights' size nor falling by itself.
        return Adafactor, {"scale_parameter": False, "relative_step": False, "warmup_init": False}
    if name == "schedule_free":
        from schedulefree import AdamWScheduleFree

        return AdamWScheduleFree, {**adam, "warmup_steps": 0}
    from pytorch_optimizer import LARS, Lion

    return {"lion": Lion, "lars": LARS}[name], {}


def _muon(student: PreTrainedModel, groups: list[Group], options: TrainConfig, device: torch.device) -> Optimizer:
    """Muon orthogonalises maps between hidden states; rows of embeddings and head, and biases, are no such maps."""
    biases = _biases(student)
    maps = {
        parameter
        for layer in decoder_layers(student)
        for parameter in layer.parameters()
        if parameter.requires_grad and parameter.ndim == 2 and parameter not in biases
    }
    adam = options.model_copy(update={"optim_args": {}})
    halves = [
        _make(name, part, chosen, device)
        for name, chosen, mine in (("adamw", adam, False), ("muon", options, True))
        if (part := _part(groups, maps, mine))
    ]
    return Several(halves, options.learning_rate)


def _part(groups: list[Group], maps: set[Parameter], mine: bool) -> list[Group]:
    parts = [{**group, "params": [p for p in group["params"] if (p in maps) == mine]} for group in groups]
    return [part for part in parts if part["params"]]


class Several(Optimizer):
    """Optimisers of different parameters as one: its groups are theirs, and all keep their state in one dictionary."""

    def __init__(self, parts: list[Optimizer], learning_rate: float) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {"lr": learning_rate})
        self.parts = parts
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each of them."""
        assert closure is None, "the loop computes gradients itself"
        for part in self.parts:
            part.step()


# ---------------------------------------------------------------------- train.optim_args

_NAMES = {"betas": ("beta1", "beta2"), "eps": ("eps1", "eps2"), "ns_coefficients": ("ns_a", "ns_b", "ns_c")}
_NEVER = {"lr", "weight_decay", "maximize", "differentiable", "capturable", "foreach", "fused"}


def optimizer_arguments(name: str, options: TrainConfig) -> dict[str, Any]:
    """What ``train.optim_args`` may hold for the optimiser ``name``, with its defaults; pairs are taken apart.

    What has a field of its own is not among them: rates, decay and AdamW's betas.
    """
    factory, settings = _recipe(name, options, torch.device("cpu"))
    known: dict[str, Any] = {}
    for key, parameter in inspect.signature(factory).parameters.items():
        if key in _NEVER | settings.keys():
            continue
        if isinstance(parameter.default, tuple):
            known.update(zip(_NAMES[key], parameter.default, strict=True))
        elif isinstance(parameter.default, int | float):
            known[key] = parameter.default
    return known


def _arguments(name: str, options: TrainConfig) -> dict[str, Any]:
    """``train.optim_args`` as the optimiser takes them."""
    known = optimizer_arguments(name, options)
    for key in options.optim_args.keys() - known.keys():
        close = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.5)
        raise TrainingError(
            f"train.optim_args of {name} cannot hold {key!r}{f': did you mean {close[0]!r}?' if close else '.'}",
            f"It takes {', '.join(sorted(known)) or 'none'}; rates, decay and AdamW's betas are fields of train.",
        )
    given = {key: _like(known[key], name, key, value) for key, value in options.optim_args.items()}
    whole = {key: value for key, value in given.items() if not any(key in parts for parts in _NAMES.values())}
    for key, parts in _NAMES.items():
        if given.keys() & set(parts):
            whole[key] = tuple(given.get(part, known[part]) for part in parts)
    return whole


def _like(default: Any, name: str, key: str, value: float) -> Any:
    """``value`` as the type of ``default``: a number in YAML may mean a count or yes and no."""
    if not isinstance(default, int):
        return value
    if value != int(value) or (isinstance(default, bool) and value not in (0, 1)):
        wanted = "true or false" if isinstance(default, bool) else "a whole number"
        raise TrainingError(f"train.optim_args.{key} of {name} is {value}.", f"Give {wanted}.")
    return type(default)(value)
