"""The axes of an ablation: one field of a job, or a few that belong together, and its values.

    optimisers                      a ready axis, with its own values
    alpha=0,0.5                     a ready axis of one field, with other values
    train.optim=adamw,lion          any field

Values are YAML. Each setting becomes a whole job: as long in tokens as the job itself, with the
same seed and the same order of data. Imports no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import yaml

from kd.config.job import JobConfig
from kd.config.jobfile import parse_config, parse_yaml, set_value
from kd.config.train import OPTIMIZERS
from kd.errors import ConfigError, Problem

#: Steps of a run where neither the command nor a shorter job says another number.
STEPS = 200
#: Arguments of schedules that count steps.
_STEP_ARGUMENTS = (
    "num_decay_steps", "num_stable_steps", "step_size", "milestones", "timescale",
)  # fmt: skip
#: Evaluations, checkpoints and reports of a run, about.
_EVALUATIONS, _SAVES, _REPORTS = 8, 4, 50
#: Steps between two evaluations at least: an evaluation of a short training costs more than steps.
_LEAST_STEPS = 20
_LENGTH_FIELDS = ("train.max_steps", "train.epochs")


@dataclass(frozen=True)
class AxisSetting:
    """One value of an axis, and the fields that it sets."""

    label: str
    overrides: Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    """What varies, and its settings; ``why`` says what its fields do besides the value."""

    name: str
    settings: tuple[AxisSetting, ...]
    why: str = ""


# ---------------------------------------------------------------------- ready axes


def _list_schedules(config: JobConfig) -> Axis:
    steps = config.require_train().max_steps or STEPS
    decay = {"num_decay_steps": max(steps // 5, 1)}
    warm = "constant_with_warmup" if config.require_train().warmup_steps else "constant"
    names: dict[str, dict[str, int]] = {
        "cosine": {}, "linear": {}, warm: {}, "inverse_sqrt": {}, "warmup_stable_decay": decay,
        "onecycle": {},
    }  # fmt: skip
    settings = (
        AxisSetting(name, {"train.lr_scheduler_type": name, "train.lr_scheduler_kwargs": arguments})
        for name, arguments in names.items()
    )
    return Axis("schedules", tuple(settings), "Each has the job's peak rate and warm-up.")


def _list_clippings(config: JobConfig) -> Axis:
    limits = {"none": 0.0, "norm 1": 1.0, "norm 0.1": 0.1}
    settings = (AxisSetting(label, {"train.max_grad_norm": norm}) for label, norm in limits.items())
    return Axis("clipping", tuple(settings))


def _list_accumulations(config: JobConfig) -> Axis:
    whole = config.require_train().sequences_per_step
    settings = []
    for parts in (1, 2, 4, 8):
        size, rest = divmod(whole, parts)
        if not rest:
            fields = {"train.gradient_accumulation_steps": parts, "train.batch_size": size}
            settings.append(AxisSetting(f"{parts} x {size} sequences", fields))
    return Axis("accumulation", tuple(settings), "A step has the same sequences in all of them.")


def _list_optimisers(config: JobConfig) -> Axis:
    train = config.require_train()
    warm = "constant_with_warmup" if train.warmup_steps else "constant"
    settings: list[AxisSetting] = []
    others: list[str] = []
    for name, rules in OPTIMIZERS.items():
        if rules.needs_torchao:
            continue
        fields: dict[str, object] = {"train.optim": name, "train.optim_args": {}}
        if (share := rules.rate) != 1:
            rate = train.learning_rate * share.numerator / share.denominator
            fields["train.learning_rate"] = min(rate, 10.0)
            others.append(f"{name} {share} times it")
        if rules.averages:
            fields |= {"train.lr_scheduler_type": warm, "train.lr_scheduler_kwargs": {}}
            others.append(f"{name} a constant one")
        settings.append(AxisSetting(name, fields))
    return Axis(
        "optimisers",
        tuple(settings),
        f"Each has the job's learning rate, but {', '.join(others)} (at most 10). An optimiser may "
        "need another rate: --set train.optim=... with --axis train.learning_rate=... compares "
        "rates of one.",
    )


def _list_temperatures(config: JobConfig) -> Axis:
    # Other profiles hold T = 1 alone.
    serves = config.cache.rules.any_temperature
    change = {} if serves else {"cache.profile": "tempered"}
    values = (1.0, 1.5, 2.0)
    settings = [AxisSetting(f"T = {t:g}", {"loss.temperature": t, **change}) for t in values]
    why = "" if serves else "Records of profile tempered serve all of these temperatures."
    return Axis("temperature", tuple(settings), why)


def _offer(field: str, *values: Any) -> Callable[[JobConfig], Axis]:
    def make(config: JobConfig) -> Axis:
        return Axis(field, tuple(AxisSetting(_show(value), {field: value}) for value in values))

    return make


#: The ready axes of one field, and that field.
FIELDS = {
    "precision": "train.precision",
    "label_smoothing": "loss.label_smoothing",
    "checkpointing": "train.gradient_checkpointing",
    "alpha": "loss.alpha",
    "threshold": "cache.threshold",
}
#: All ready axes, with what makes them for a job.
READY: dict[str, Callable[[JobConfig], Axis]] = {
    "schedules": _list_schedules,
    "clipping": _list_clippings,
    "precision": _offer(FIELDS["precision"], "fp32", "bf16", "fp16", "bf16_pure"),
    "accumulation": _list_accumulations,
    "optimisers": _list_optimisers,
    "label_smoothing": _offer(FIELDS["label_smoothing"], 0.0, 0.05, 0.1),
    "checkpointing": _offer(FIELDS["checkpointing"], "none", "sqrt", "full"),
    "alpha": _offer(FIELDS["alpha"], 0.0, 0.1, 0.5, 1.0),
    "threshold": _offer(FIELDS["threshold"], 0.02, 0.04, 0.125),
    "temperature": _list_temperatures,
}


def parse_axis(text: str, config: JobConfig) -> Axis:
    """Return the axis that ``text`` names: a ready one, or ``field=value,value``.

    Raises ``ConfigError`` where there is no such axis, or where values are missing or no YAML.
    """
    name, separator, listed = text.partition("=")
    name = name.strip()
    if not separator:
        if name in READY:
            return READY[name](config)
        if "." in name:
            raise _refuse(text, "a field needs values.", f"Example: {name}=value,value")
        close = difflib.get_close_matches(name, READY, n=1, cutoff=0.5)
        known = f"Did you mean {close[0]}?" if close else f"Ready axes: {', '.join(READY)}."
        raise _refuse(text, "no ready axis has this name.", known)
    try:
        values = parse_yaml(f"[{listed}]")
    except yaml.YAMLError as error:
        raise _refuse(text, f"its values are not YAML: {' '.join(str(error).split())}.") from None
    field = FIELDS.get(name, name)
    if not values or not all(field.split(".")):
        raise _refuse(text, "an axis is field=value,value.", "Example: train.optim=adamw,lion")
    return Axis(name, tuple(AxisSetting(_show(value), {field: value}) for value in values))


def _refuse(text: str, detail: str, remedy: str = "") -> ConfigError:
    return ConfigError([Problem("", f"axis {text!r}: {detail}", remedy)])


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str | int):
        return str(value)
    return yaml.safe_dump(value, default_flow_style=True, width=1000).strip()


def cross_axes(axes: Iterable[Axis]) -> Axis:
    """Return one axis with every combination of the settings of ``axes``."""
    combined = (
        AxisSetting(
            ", ".join(setting.label for setting in settings),
            {name: value for each in settings for name, value in each.overrides.items()},
        )
        for settings in product(*(axis.settings for axis in axes))
    )
    return Axis(" × ".join(axis.name for axis in axes), tuple(combined))


# ---------------------------------------------------------------------- the jobs of an ablation


def make_short_job(config: JobConfig, steps: int | None = None) -> JobConfig:
    """Return the job that all runs are compared with: ``config``, shortened and without extras.

    ``steps`` None is the job's own number, at most ``STEPS``. Warm-up and steps of the schedule
    shrink with it. Raises ``ConfigError`` for a job that trains no student.
    """
    if not config.own_kind.trains_one:
        detail = f"kind {config.kind} does not train one student."
        raise ConfigError.of_field("/kind", detail, "Use kind distill or train.")
    own = config.require_train().max_steps
    steps = steps or min(own or STEPS, STEPS)
    data = config.model_dump(mode="json")
    # The runs are compared on the held-out text; the costly parts of a report are left out.
    data["evaluation"] |= {
        "teacher": False, "baseline": False, "prompts": [], "tasks": [], "continuations": 0,
        "samples": 0,
    }  # fmt: skip
    # The ablation as a whole is asked for, and each run is to have all its tokens.
    data |= {"depends_on": [], "deadline_seconds": None, "webhook": None}
    data["train"] |= {"report_to": [], "early_stopping_patience": None}
    return parse_config(_set_length(data, own or steps, steps))


def _set_length(data: Mapping[str, Any], before: int, steps: int) -> Mapping[str, Any]:
    """Return the job ``data`` with ``steps`` steps, and with what counts steps in proportion."""
    train = data["train"]
    ratio = steps / before
    arguments = {
        name: _scale_steps(value, ratio) if name in _STEP_ARGUMENTS else value
        for name, value in train["lr_scheduler_kwargs"].items()
    }
    changed = {
        "max_steps": steps,
        "epochs": None,
        "warmup_steps": min(round(train["warmup_steps"] * ratio), steps // 2),
        "lr_scheduler_kwargs": arguments,
        "eval_steps": max(steps // _EVALUATIONS, min(steps, _LEAST_STEPS)),
        "save_steps": max(steps // _SAVES, 1),
        "logging_steps": max(steps // _REPORTS, 1),
    }
    return {**data, "train": train | changed}


def _scale_steps(value: Any, ratio: float) -> Any:
    if isinstance(value, list | tuple):
        return [_scale_steps(each, ratio) for each in value]
    return max(round(value * ratio), 1)


def make_setting_job(base: JobConfig, overrides: Mapping[str, Any]) -> JobConfig:
    """Return ``base`` with the fields of a setting, as long in tokens as ``base``.

    A setting that changes the length itself keeps it. Raises ``ConfigError`` where the job cannot
    have the fields.
    """
    data = base.model_dump(mode="json")
    for dotted, value in overrides.items():
        data = set_value(data, dotted.split("."), value)
    job = parse_config(data)
    own, train = base.require_train(), job.require_train()
    if train.sequences_per_step == own.sequences_per_step or set(overrides) & set(_LENGTH_FIELDS):
        return job
    assert own.max_steps is not None, "make_short_job gives every job a number of steps"
    steps = max(round(own.max_steps * own.sequences_per_step / train.sequences_per_step), 1)
    return parse_config(_set_length(job.model_dump(mode="json"), own.max_steps, steps))
