"""A teacher that does not know the text is named while the capture has hardly begun."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.support.paths import AUSTEN
from cache.records import Records, Sequences
from cache.rounding import KNOWN_STEP, UNKNOWN
from cache.store import open_cache
from kd.capture.usefulness import HeldOutLosses
from kd.config.jobfile import parse_config
from kd.progress import Event, Monitor
from kd.stages.capture import run_precompute
from kd.text.ngrams import NGrams

pytestmark = pytest.mark.usefixtures("one_thread")


def capture(teacher: Path, text: Path, home: Path, **data: Any) -> list[Event]:
    """Capture 24 training sequences in shards of 8, and 4 held-out ones in the last of them."""
    job = {
        "kind": "precompute",
        "teacher": {"model": str(teacher)},
        "data": {
            "train": str(text), "sequence_length": 64, "max_train_samples": 24,
            "validation_fraction": 0.1, "max_eval_samples": 4, **data,
        },
        "cache": {"shard_sequences": 8},
    }  # fmt: skip
    events: list[Event] = []
    run_precompute(parse_config(job), home, home / "run", Monitor(events.append))
    return events


@pytest.mark.long
def test_a_teacher_that_does_not_know_the_text_is_named_after_the_held_out_shards(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """Its weights are random."""
    events = capture(tiny_teacher, tiny_text, tmp_path)
    kinds = [event.type for event in events if event.type in ("shard", "warning", "cache")]
    assert kinds == ["shard", "warning", "shard", "shard", "shard", "cache"], "early, and once"
    (message,) = (event.data["message"] for event in events if event.type == "warning")
    assert "The teacher does not know this text: its held-out perplexity is " in message
    assert "(252 tokens, 95 % interval " in message and "use another teacher" in message
    store = open_cache(next(path for path in (tmp_path / "caches").iterdir() if path.is_dir()))
    assert len(store.validation) == 4


@pytest.mark.long
@pytest.mark.parametrize("fraction", [0.1, 0.0])
def test_a_good_teacher_and_a_text_without_held_out_part_are_no_reason_to_warn(
    fraction: float, tiny_text: Path, tmp_path: Path
) -> None:
    events = capture(AUSTEN / "teacher", tiny_text, tmp_path, validation_fraction=fraction)
    assert "warning" not in {event.type for event in events}
    assert [event.type for event in events].count("shard") == (4 if fraction else 3)


def make_losses(nats: float, noise: float, known: int = 400) -> HeldOutLosses:
    """A teacher's losses on 400 random targets, of which so many are known."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 50, (1, 401)).astype(np.uint32)
    mask = np.array([[True] * 400 + [False]])
    start = np.array([[True] + [False] * 400])
    sequences = Sequences(tokens, start, mask)
    ngrams = NGrams.of([sequences], 50)
    assert ngrams is not None
    losses = ngrams.score_bigram(sequences) + nats + random.normal(0, noise, 400)
    codes = np.maximum(losses / KNOWN_STEP, 0).round().astype(np.uint16)
    codes[known:] = UNKNOWN
    columns = {"known": codes[:, None], "entropy": np.zeros(400, np.uint8)}
    return HeldOutLosses.of(sequences, Records(columns), ngrams)


def test_a_teacher_is_worse_only_beyond_the_noise_of_the_text() -> None:
    assert make_losses(0.5, 1.0).is_teacher_worse
    assert not make_losses(-0.5, 1.0).is_teacher_worse
    noisy = make_losses(0.02, 3.0)
    assert (noisy.teacher - noisy.bigram).interval is not None and not noisy.is_teacher_worse


def test_only_tokens_that_the_teacher_was_asked_about_are_compared() -> None:
    found = make_losses(0.5, 0.0, known=300)
    assert found.teacher.tokens == found.unigram.tokens == found.bigram.tokens == 300
    assert (found.teacher - found.bigram).mean == pytest.approx(0.5, abs=KNOWN_STEP)
    assert not HeldOutLosses().is_teacher_worse
    assert math.isclose(
        math.exp((found + found).teacher.mean or 0), math.exp(found.teacher.mean or 1)
    )
