"""Whether a student begins where it must: a fresh one knows nothing, any other knows something."""

from __future__ import annotations

import math

from kd.checks.verdict import Verdict

#: How far from ln V a fresh student may begin, as a share of ln V. Logits of standard deviation s cost s^2 / 2 nats: an
#: initialisation of 0.02 makes that 0.02^2 D / 2, which is 0.8 nats at D = 4096.
TOLERANCE = 0.1


def initial_loss(ce: float, vocabulary: int, fresh: bool) -> Verdict:
    """Compare a student's cross-entropy before its first step, in nats per token, with ln V of guessing.

    A fresh student must be within 10 % of it; one that was trained before must be below it. NaN is neither.
    """
    guessing = math.log(vocabulary)
    facts = {"loss": ce, "ln_vocabulary": guessing, "fresh": fresh}
    message = (
        f"The student begins at {ce:.3f} nats per token; guessing among {vocabulary:,} tokens costs {guessing:.3f}."
    )
    if abs(ce - guessing) <= TOLERANCE * guessing if fresh else ce < guessing:
        return Verdict("initial_loss", True, message, facts=facts)
    if not fresh:
        remedy = "See that its weights were loaded and its tokenizer is its own; layers that were left out cost, too."
    elif ce < guessing:
        remedy = (
            "A fresh student cannot know that much: see that the loss is the mean over tokens, and the labels' shift."
        )
    else:
        remedy = "A fresh student's logits are small: see that the loss is the mean over tokens, and the weights' size."
    return Verdict("initial_loss", False, message, remedy, facts)
