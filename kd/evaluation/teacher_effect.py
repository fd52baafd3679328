"""The effect of a teacher: the student that it taught beside one that learned from text alone.

Two students are compared wherever both are known: with evaluation.baseline, in a search that tries
a ``loss.alpha`` of 1 among others, and by `kd demo --baseline`. Imports no torch, because the API
and the terminal compare students too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kd.checks.verdict import Verdict
from kd.progress import Monitor

#: The name of the verdict.
CHECK = "teacher"
REMEDY = (
    "Try another teacher, more weight on the text (loss.alpha), or text that is more like the "
    "teacher's training text."
)
#: Steps after which a teacher that is of use shows it.
FEW_STEPS = 1_000
_TRAIN_LONGER = "Train longer, and with more tokens in a step: this training was short. Otherwise: "


def warn_of_verdict(report: Mapping[str, Any], monitor: Monitor) -> None:
    """Emit the verdict of a report as a warning, if it is one."""
    verdict = report.get("verdict")
    if verdict is not None and not verdict["ok"]:
        monitor.emit("warning", message=f"{verdict['message']} {verdict['remedy']}")


def judge_pair(
    with_teacher: float,
    without: float,
    tokens: int | None,
    interval: Any = None,
    steps: int = FEW_STEPS,
) -> Verdict:
    """Judge two held-out perplexities of students that differ in the teacher alone.

    ``interval`` is that of the difference in nats per token, with the keys low and high. Of few
    ``steps`` the verdict says first that more may help.
    """
    nats = math.log(with_teacher) - math.log(without)
    facts = {"with_teacher": with_teacher, "without_teacher": without, "nats": nats}
    size = f", {tokens:,} tokens" if tokens is not None else ""
    ends = sorted(abs(interval[end]) for end in ("low", "high")) if interval else []
    noisy = interval is not None and interval["low"] <= 0 <= interval["high"]
    spread = f", 95 % interval {ends[0]:.3f} to {ends[1]:.3f}" if ends and not noisy else ""
    figures = (
        f"held-out perplexity {with_teacher:,.2f} with it, {without:,.2f} without"
        f"{size}; {abs(nats):.3f} nats per token {'worse' if nats > 0 else 'better'}{spread}"
    )
    if noisy:
        message = f"The teacher made no difference that can be measured on this text: {figures}."
        return Verdict(CHECK, True, message, REMEDY, facts)
    if nats > 0:
        message = f"The student is worse with the teacher than without it: {figures}."
        longer = _TRAIN_LONGER + REMEDY[0].lower() + REMEDY[1:]
        return Verdict(CHECK, False, message, longer if steps < FEW_STEPS else REMEDY, facts)
    return Verdict(CHECK, True, f"The teacher helped: {figures}.", "", facts)
