"""Check that a student begins where it must: a fresh one near ln V, a trained one below it.

A fresh student knows nothing, so it guesses; a trained one knows something.
"""

from __future__ import annotations

import math

from kd.checks.verdict import Verdict

#: How far from ln V a fresh student may begin, as a share of ln V. Logits of standard deviation s
#: cost s^2 / 2 nats: with weights of 0.02 that is 0.02^2 D / 2, or 0.8 nats at a width D of 4096.
TOLERANCE = 0.1


def check_initial_loss(ce: float, vocabulary: int, fresh: bool) -> Verdict:
    """Compare a student's cross-entropy before its first step, in nats per token, with ln V.

    A fresh student must be within 10 % of ln V, the loss of guessing. One that was trained before
    must be below it. NaN fails either way.
    """
    guessing = math.log(vocabulary)
    facts = {"loss": ce, "ln_vocabulary": guessing, "fresh": fresh}
    message = (
        f"The student begins at {ce:.3f} nats per token; guessing among {vocabulary:,} tokens "
        f"costs {guessing:.3f}."
    )
    if abs(ce - guessing) <= TOLERANCE * guessing if fresh else ce < guessing:
        return Verdict("initial_loss", True, message, facts=facts)
    if not fresh:
        remedy = (
            "Check that its weights were loaded and that its tokenizer is its own; "
            "removed layers raise the loss, too."
        )
    elif ce < guessing:
        remedy = (
            "A fresh student cannot know that much: check that the loss is the mean over tokens, "
            "and how the labels are shifted."
        )
    else:
        remedy = (
            "A fresh student's logits are small: check that the loss is the mean over tokens, "
            "and the size of the weights."
        )
    return Verdict("initial_loss", False, message, remedy, facts)
