"""The first sentences of *Persuasion*, read by the demo's teacher, and the records of its tokens.

Shapes: N positions, V vocabulary, E entries of a record.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.support.bias import fit_to_logits
from bench.support.paths import AUSTEN
from cache.codec import Codec
from cache.profiles.threshold import UnitSample
from cache.records import Records
from cache.rounding import RecordPositions
from cache.units.dither import DitherTables
from kd.capture.units.drawing import UnitRandomness, UnitSampler
from kd.config.jobfile import load_config
from kd.loss.sparse_targets import SparseTarget, decode_threshold
from kd.models.loading import load_model
from kd.models.tokenizers import load_tokenizer

#: The passage: its first words, and how many characters it has.
BEGINNING = "Sir Walter Elliot, of Kellynch"
CHARACTERS = 900
#: The text before the token of the worked example.
ENDING = "never took up"


@dataclass(frozen=True)
class Passage:
    """What the teacher says at each position: ``logits_NV``, and the next token, ``gold_N``.

    ``words`` has the text of every token of the vocabulary, and ``text_N`` that of each position.
    """

    logits_NV: Tensor
    gold_N: Tensor
    text_N: tuple[str, ...]
    words: tuple[str, ...]

    def temper(self, temperature: float = 1.0) -> Tensor:
        """Compute p at a temperature, (N, V) in float64."""
        return (self.logits_NV.double() / temperature).softmax(-1)

    def find(self, ending: str) -> int:
        """Find the first position before which the passage reads ``ending``."""
        read = ""
        for number, text in enumerate(self.text_N):
            read += text
            if read.endswith(ending):
                return number
        raise ValueError(f"The passage has no {ending!r}.")


def show(word: str) -> str:
    """A token as it is printed: a space is visible."""
    return word.replace(" ", "␣").replace("\n", "⏎")


@functools.cache
@torch.no_grad()
def read_passage() -> Passage:
    """Read the passage with the teacher, in float32."""
    tokenizer = load_tokenizer(AUSTEN / "teacher")
    text = (AUSTEN / "text" / "persuasion.txt").read_text(encoding="utf-8")
    start = text.index(BEGINNING)
    ids = tokenizer(text[start : start + CHARACTERS])["input_ids"]
    model = load_model(AUSTEN / "teacher", torch.float32).eval()
    logits_LV = model(torch.tensor([ids])).logits[0].float()
    words = tuple(tokenizer.decode([each]) for each in range(len(tokenizer)))
    return Passage(
        logits_LV[:-1], torch.tensor(ids[1:]), tuple(words[each] for each in ids[:-1]), words
    )


def make_codec(vocabulary: int, seed: int = 0) -> Codec:
    """Make the codec of the demo's cache, with a seed."""
    threshold = load_config(AUSTEN / "job.yaml").cache.threshold
    return Codec("threshold", vocabulary, seed=seed, threshold=threshold, clusters=1)


def make_tables(passage: Passage, codec: Codec) -> DitherTables:
    """Fit the table of the candidates to the passage itself."""
    return fit_to_logits(codec, passage.logits_NV)


def make_records(passage: Passage, codec: Codec) -> Records:
    """Make the records of all positions, as a capture does."""
    places = np.arange(len(passage.gold_N))
    (chance,) = UnitRandomness.of_each(codec, [0], [places], torch.device("cpu"))
    sampler = UnitSampler(codec, make_tables(passage, codec))
    clusters = torch.zeros_like(passage.gold_N)
    found = sampler.draw_units(passage.logits_NV, passage.gold_N, clusters, chance)
    sample = UnitSample(**{name: each.numpy() for name, each in found.items()})
    return codec.encode(sample, RecordPositions(np.zeros_like(places), places))


def decode_records(passage: Passage, codec: Codec, records: Records) -> SparseTarget:
    """Decode records to ids and weights, as a training does."""
    columns = {name: torch.from_numpy(column) for name, column in records.columns.items()}
    return decode_threshold(codec, columns, passage.gold_N)


def spread_weights(target: SparseTarget, vocabulary: int) -> Tensor:
    """Write the weights of all positions into (N, V), with 0 for a token that is no entry."""
    weights_NV = torch.zeros(len(target.entropy_N), vocabulary, dtype=torch.float64)
    return weights_NV.index_put_((target.rows_E, target.ids_E), target.weights_E, accumulate=True)
