"""The verdict on a run's teacher, for the first line of its report.

known       a baseline was trained on the text alone: ``kd.evaluation.teacher_effect``
suspected   without a baseline: the teacher is worse than a bigram or than the student, or the
            student is worse than before its training
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cache.perplexity import Interval, Perplexity
from kd.capture.usefulness import describe_useless_teacher
from kd.checks.verdict import Verdict
from kd.evaluation.in_depth import BASELINE, BEFORE, STUDENT
from kd.evaluation.teacher_comparison import TEACHER
from kd.evaluation.teacher_effect import CHECK, FEW_STEPS, REMEDY, judge_pair

Report = Mapping[str, Any]
#: Nats that a student must be better than its teacher before it is worth a word.
_NOTABLE_NATS = 0.02
#: The keys of a run's report for the perplexities that every run has.
PERPLEXITIES = {
    TEACHER: "teacher_perplexity",
    BEFORE: "student_perplexity_before",
    STUDENT: "student_perplexity",
}
_MEASURE = "evaluation.baseline: true also trains on the text alone, and compares the two."


def judge_teacher(report: Report) -> Verdict | None:
    """Judge a run by its report; None where there is no teacher, or nothing to say."""
    if report.get("teacher") is None:
        return None
    evaluation = report.get("evaluation") or {}
    effect = evaluation.get("teacher_effect")
    if effect is not None and effect.get("nats") is not None:
        models = evaluation["models"]
        pair = (models[STUDENT]["perplexity"], models[BASELINE]["perplexity"])
        steps = report.get("steps", FEW_STEPS)
        return judge_pair(*pair, evaluation["tokens"], effect.get("interval"), steps)
    before, after = (find_perplexity(report, name) for name in (BEFORE, STUDENT))
    doubt = _suspect_teacher(report)
    if doubt is not None or before is None or after is None or after <= before:
        return doubt
    message = (
        "The student is worse after training than before it: held-out perplexity "
        f"{_show_perplexity(report, STUDENT)}, and {_show_perplexity(report, BEFORE)} before."
    )
    facts = {"student_perplexity": after, "student_perplexity_before": before}
    return Verdict(CHECK, False, message, f"Try a lower train.learning_rate. {_MEASURE}", facts)


def find_perplexity(report: Report, name: str) -> float | None:
    """Find a model's held-out perplexity in the report of a run or of an examination."""
    models = (report.get("evaluation") or {}).get("models") or {}
    found = models.get(name, {}).get("perplexity", report.get(PERPLEXITIES[name]))
    return None if found is None else float(found)


def _show_perplexity(report: Report, name: str) -> str:
    """Format a perplexity that the report has, with its tokens and the interval of few tokens."""
    value = find_perplexity(report, name) or math.nan
    found = ((report.get("evaluation") or {}).get("models") or {}).get(name) or {}
    key = PERPLEXITIES[name]
    tokens = found.get("tokens", report.get(f"{key}_tokens", report.get("held_out_tokens")))
    if tokens is None:
        return f"{value:,.2f}"
    ends = found.get("perplexity_interval", report.get(f"{key}_interval"))
    return str(Perplexity(value, tokens, Interval(**ends) if ends else None))


def _suspect_teacher(report: Report) -> Verdict | None:
    teacher = find_perplexity(report, TEACHER)
    student = find_perplexity(report, STUDENT)
    ngrams = (report.get("evaluation") or {}).get("ngrams") or {}
    if teacher is None:
        return None
    facts = {"teacher_perplexity": teacher, "student_perplexity": student, **ngrams}
    if ngrams and math.log(teacher) > ngrams["bigram_loss"]:
        shown = (_show_perplexity(report, TEACHER), math.exp(ngrams["unigram_loss"]))
        message = describe_useless_teacher(*shown, math.exp(ngrams["bigram_loss"]))
        return Verdict(CHECK, False, message, _MEASURE, facts)
    if student is not None and math.log(teacher) - math.log(student) > _NOTABLE_NATS:
        message = (
            f"The student is better than its teacher on the held-out text: perplexity "
            f"{_show_perplexity(report, STUDENT)}, and {_show_perplexity(report, TEACHER)} of the "
            "teacher. The teacher may hold it back."
        )
        return Verdict(CHECK, False, message, f"{_MEASURE} {REMEDY}", facts)
    return None
