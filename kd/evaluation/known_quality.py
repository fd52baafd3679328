"""How good students of sampled records were where that was measured, beside the job at hand.

``docs/benchmarks/quality.md`` has the tables: the share of the gap between plain training and
training on all probabilities that a student of sampled records closes.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.codec import Codec

#: What was the same in all measurements: the records' threshold, and the tokens of a step, of which
#: the last of each sequence has no target.
THRESHOLD = 0.04
STEP_TOKENS = 2_048
#: Part of a step's tokens that have a target, at least.
_COUNTED = 0.9


@dataclass(frozen=True)
class KnownShare:
    """A measured share of the gap: 1 is as good as training on all probabilities."""

    vocabulary: int
    steps: int
    share: float

    def describe(self) -> str:
        """Say where it was measured, and what was found."""
        return (
            f"{self.share:.0%} at a vocabulary of {self.vocabulary:,}, after {self.steps:,} steps "
            f"of {STEP_TOKENS:,} tokens"
        )


#: By vocabulary and steps, the smallest first.
KNOWN_SHARES = (
    KnownShare(vocabulary=2_048, steps=400, share=1.04),
    KnownShare(vocabulary=49_152, steps=82, share=0.97),
    KnownShare(vocabulary=49_152, steps=330, share=0.93),
)


def describe_known_quality(
    codec: Codec | None, vocabulary: int, steps: int, targets: int
) -> str | None:
    """Say where students of such records were measured, and how that differs from this training.

    ``vocabulary`` and ``steps`` are those of the training, ``targets`` those of a step. None for
    records without a sample, for a temperature of their own (profile ``tempered``), and without
    records.
    """
    if codec is None or codec.profile != "threshold":
        return None
    known = "; ".join(each.describe() for each in KNOWN_SHARES)
    said = (
        "How much of the gap between plain training and training on all probabilities students "
        f"of records with a threshold of {THRESHOLD:g} closed: {known}. This training has a "
        f"threshold of {codec.threshold:g}, a vocabulary of {vocabulary:,} and {steps:,} steps of "
        f"{targets:,} targets"
    )
    beyond = _list_beyond(codec.threshold, vocabulary, steps, targets)
    if not beyond:
        return f"{said}."
    return (
        f"{said}: {' and '.join(beyond)} than in the measurement. A lower cache.threshold, or more "
        "tokens in a step, makes the noise of the records smaller."
    )


def _list_beyond(threshold: float, vocabulary: int, steps: int, targets: int) -> list[str]:
    """List in which respects a training lies beyond those that were measured."""
    largest = KNOWN_SHARES[-1]
    # What was measured at a larger vocabulary holds for a smaller one, too.
    known = [each for each in KNOWN_SHARES if each.vocabulary >= vocabulary] or [largest]
    beyond = {
        "a larger threshold": threshold > THRESHOLD,
        "a larger vocabulary": vocabulary > largest.vocabulary,
        "more steps": steps > max(each.steps for each in known),
        "smaller steps": targets < _COUNTED * STEP_TOKENS,
    }
    return [what for what, is_beyond in beyond.items() if is_beyond]
