"""What the words of a report mean, in the report itself: sentences of docs/glossary.md."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Each word as a report writes it -> its row in the glossary, and a sentence of that row.
WORDS = {
    "bigram": (
        "unigram, bigram",
        "Models that only count: how often each token occurs, and how often each pair.",
    ),
    "bits per byte": (
        "bits per byte",
        "How many bits the model needs for one byte of text: less is better.",
    ),
    "calibration error": (
        "calibration error",
        "How far the model's certainty is from the share of tokens at which it is right.",
    ),
    "held-out": ("held out", "Text on which the student is measured and never trained."),
    "interval": ("interval", "Where the true value lies with 95 %"),
    "KL": (
        "KL",
        "Kullback-Leibler divergence: how far the student's probabilities are from the teacher's",
    ),
    "nats": ("nats", "The unit of a loss with natural logarithms. One nat is 1.44 bits."),
    "parity": (
        "parity",
        "The fused loss and a plain dense loss give the same value and the same gradient",
    ),
    "perplexity": ("perplexity", "exp of the loss per held-out token."),
}
#: A sample: a block of code between two fences of the same length, which no mark in it ends.
_SAMPLE = re.compile(r"^(`{3,})text$.*?^\1$", re.DOTALL | re.MULTILINE)


def explain_words(lines: Iterable[str]) -> list[str]:
    """Return a section on the words that stand in ``lines`` of Markdown, but for its samples."""
    told = _SAMPLE.sub("", "\n".join(lines))
    found = {word: said for word, said in WORDS.items() if re.search(rf"\b{word}\b", told)}
    meanings = [f"- **{row}**: {sentence.rstrip('.')}." for row, sentence in found.values()]
    return ["", "## Words", "", *meanings] if meanings else []
