"""What ``kd plan --tokens`` prints: the plan of a whole distillation, for people."""

from __future__ import annotations

from typing import Any

from services.terminal.console import format_value, out, print_table

#: Decimal prefixes, because disks and links are sold by them.
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def print_distillation(found: dict[str, Any]) -> None:
    """Print a plan: sizes, profiles, stages, needs, limits, kinds of devices, notes."""
    student = found["student"]
    models = [_format_model("teacher", found["teacher"])]
    models += [] if student is None else [_format_model("student", student)]
    _say(f"{found['tokens']:,} tokens on {found['devices']}, records {found['records']}")
    for model in models:
        _say(model)
    _say("All numbers are expected.")
    _print_lines("size", found["storage"])
    _print_profiles(found["profiles"])
    _print_stages(found["stages"])
    for line in found["missing"]:
        _say(line)
    _print_lines("while it runs", found["needs"])
    _print_limits(found["limits"])
    for line in found["saturation"]:
        _say(line)
    _print_kinds(found["kinds"])
    _say("")
    for line in found["notes"]:
        _say(line)


def _say(line: str) -> None:
    out.print(line, markup=False, highlight=False, soft_wrap=True)


def _format_model(what: str, model: dict[str, Any]) -> str:
    size = f"{model['parameters'] / 1e9:.4g} billion parameters, V = {model['vocabulary']:,}"
    return f"{what} {model['name']}: {size} ({model['source']})"


def _print_lines(title: str, lines: list[dict[str, Any]]) -> None:
    if not lines:
        return
    _say("")
    print_table(
        [title, "expected", "source"],
        [[each["name"], format_amount(each["value"], each["unit"]), each["source"]]
         for each in lines],
    )  # fmt: skip


def _print_profiles(rows: list[dict[str, Any]]) -> None:
    _say("")
    print_table(
        ["profile", "bytes a token", "cache", "objects", "source"],
        [
            [
                each["profile"],
                f"{each['bytes_per_token']:,.1f}",
                format_amount(each["bytes"], "bytes"),
                f"{each['objects']:,}",
                each["source"],
            ]
            for each in rows
        ],
    )


def _print_stages(stages: list[dict[str, Any]]) -> None:
    _say("")
    print_table(
        ["stage", "tokens", "tokens/s", "hours", "device-hours", "cost", "bound by", "source"],
        [
            [
                each["stage"],
                f"{each['tokens']:,}",
                f"{each['tokens_per_second']:,.0f}",
                format_number(each["hours"]),
                format_number(each["device_hours"]),
                _format_cost(each["cost"]),
                each["bound"],
                each["source"],
            ]
            for each in stages
        ],
    )


def _print_limits(limits: list[dict[str, Any]]) -> None:
    _say("")
    print_table(
        ["stage", "limit", "full at tokens/s", "used", "at devices", "source"],
        [
            [
                each["stage"],
                each["limit"],
                f"{each['tokens_per_second']:,.0f}",
                f"{format_number(100 * each['used'])} %",
                "grows" if each["full_at_devices"] is None else f"{each['full_at_devices']:,}",
                each["source"],
            ]
            for each in limits
        ],
    )


def _print_kinds(kinds: list[dict[str, Any]]) -> None:
    _say("")
    stages = max((list(each["hours"]) for each in kinds), key=len)
    print_table(
        ["same number of", "devices of a teacher", *(f"{name} h" for name in stages),
         "device-hours", "cost", "source"],
        [
            [
                each["device"],
                format_value(each["teacher_devices"]) or "does not fit",
                *(_format_hours(each, name) for name in stages),
                "-" if each["device_hours"] is None else format_number(each["device_hours"]),
                _format_cost(each["cost"]),
                each["source"],
            ]
            for each in kinds
        ],
    )  # fmt: skip


def _format_hours(kind: dict[str, Any], stage: str) -> str:
    hours = kind["hours"].get(stage)
    return "-" if hours is None else format_number(hours)


def _format_cost(cost: float | None) -> str:
    return "-" if cost is None else format_number(cost)


def format_number(value: float) -> str:
    """Format a number with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_amount(value: float, unit: str) -> str:
    """Format a number with its unit; bytes, also in a second, with a decimal prefix."""
    if unit.startswith("bytes"):
        return f"{_format_bytes(value)}{unit.removeprefix('bytes')}"
    number = f"{value:,}" if isinstance(value, int) else format_number(value)
    return f"{number} {unit}".rstrip()


def _format_bytes(value: float) -> str:
    size = float(value)
    for prefix in _PREFIXES:
        if size < 999.5 or prefix == _PREFIXES[-1]:
            break
        size /= 1000
    return f"{size:.3g} {prefix}B"
