"""How good students of sampled records were where that was measured, beside the job at hand.

``docs/benchmarks/quality.md`` has the tables: the share of the gap between plain training and
training on all probabilities that a student of sampled records closes.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.codec import Codec


@dataclass(frozen=True)
class KnownShare:
    """A measured share of the gap: 1 is as good as training on all probabilities.

    ``threshold`` is that of the records, and ``tokens`` are those of a step, with and without a
    target.
    """

    vocabulary: int
    threshold: float
    steps: int
    tokens: int
    share: float

    def describe(self) -> str:
        """Say where it was measured, and what was found."""
        return (
            f"{self.share:.0%} at a vocabulary of {self.vocabulary:,}, after {self.steps:,} steps "
            f"of {self.tokens:,} tokens"
        )


KNOWN_SHARES = (
    KnownShare(vocabulary=2_048, threshold=0.04, steps=400, tokens=2_048, share=1.04),
    KnownShare(vocabulary=49_152, threshold=0.04, steps=82, tokens=2_048, share=0.97),
)

#: Part of a step's tokens that have a target, at least: the last of a sequence has none.
_COUNTED = 0.9


def describe_known_quality(
    codec: Codec | None, vocabulary: int, steps: int, tokens: int
) -> str | None:
    """Say where students of such records were measured, and how that differs from this training.

    ``vocabulary`` and ``steps`` are those of the training, ``tokens`` are the targets of a step.
    None for records without a sample, for a temperature of their own (profile ``tempered``), and
    without records.
    """
    if codec is None or codec.profile != "threshold":
        return None
    known = "; ".join(each.describe() for each in KNOWN_SHARES)
    said = (
        f"Of the gap between plain training and training on all probabilities, students of "
        f"records with a threshold of {KNOWN_SHARES[0].threshold:g} closed {known}."
    )
    here = (
        f"This training has a threshold of {codec.threshold:g}, a vocabulary of {vocabulary:,} and "
        f"{steps:,} steps of {tokens:,} targets"
    )
    beyond = _list_beyond(codec.threshold, vocabulary, steps, tokens)
    if not beyond:
        return f"{said} {here}."
    return (
        f"{said} {here}: {' and '.join(beyond)} than was measured. A lower cache.threshold, or "
        "more tokens in a step, makes the noise of the records smaller."
    )


def _list_beyond(threshold: float, vocabulary: int, steps: int, tokens: int) -> list[str]:
    """List in which respects a training lies beyond those that were measured."""
    # What was measured at a larger vocabulary holds for a smaller one, too.
    known = [each for each in KNOWN_SHARES if each.vocabulary >= vocabulary] or KNOWN_SHARES
    beyond = {
        "a larger threshold": threshold > max(each.threshold for each in known),
        "a larger vocabulary": vocabulary > max(each.vocabulary for each in known),
        "more steps": steps > max(each.steps for each in known),
        "smaller steps": tokens < _COUNTED * min(each.tokens for each in known),
    }
    return [what for what, is_beyond in beyond.items() if is_beyond]
