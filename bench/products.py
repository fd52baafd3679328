"""Print what the precision of the LM head's products costs, and what chunks of logits move.

    python bench/products.py [--vocabulary 49152] [--width 2048] [--positions 64]

Every product is compared with that of the same factors in float64. The factors are random and
normal; they are scaled so that the largest logit is the one stated.

logits of a teacher   its factors are bfloat16. KL is that of softmax of the logits from the exact
                      one, in nats, the mean over positions.
profile hidden        the teacher's hidden states are float32, its weight as stored. TF32 is
                      emulated: factors with 10 bits after the first. Products in bfloat16 run in
                      float32 on a CPU, which holds their terms exactly and sums them as a GPU does.
chunks of logits      arithmetic, no measurement: the gradient of the LM head's weight in float32,
                      and the chunk that a GPU with so many free bytes takes in bfloat16.

Shapes: N positions, D hidden width, V vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kd.loss.chunk_size import choose_gpu_chunk_positions, count_head_gradient_bytes
from kd.models.lm_head import LMHead, SplitLMHead
from kd.models.products.split import split_into_halves
from kd.models.products.wide import add_product_, write_product_

LARGEST_LOGITS = (20.0, 36.0)
GIB = 2**30
#: LM heads and micro-batches: positions, D, V, and the free memory of the GPU.
HEADS = {
    "1B student, H100": (16_384, 2_048, 128_256, 40 * GIB),
    "1B student, 24 GiB": (8_192, 2_048, 128_256, 6 * GIB),
    "Qwen3 1.7B, H100": (16_384, 2_048, 151_669, 40 * GIB),
    "16384 x 2048 x 248320, H100": (16_384, 2_048, 248_320, 60 * GIB),
}
#: Most logits of a chunk before, when the weight's gradient was filled with zeros first.
_EARLIER_ELEMENTS = 2**28


@dataclass(frozen=True)
class Factors:
    """Hidden states (N, D) in float32 and a weight (V, D), with their product in float64."""

    hidden_ND: Tensor
    weight_VD: Tensor
    logits_NV: Tensor

    @classmethod
    def make(cls, sizes: tuple[int, int, int], largest: float, dtype: torch.dtype) -> Factors:
        """Draw factors whose largest logit is about ``largest``; the weight is of ``dtype``."""
        positions, width, vocabulary = sizes
        generator = torch.Generator().manual_seed(0)
        hidden_ND = torch.randn(positions, width, generator=generator)
        weight_VD = torch.randn(vocabulary, width, generator=generator)
        peak = float((hidden_ND @ weight_VD.T).abs().max())
        return cls.of(hidden_ND * (largest / peak), weight_VD.to(dtype))

    @classmethod
    def of(cls, hidden_ND: Tensor, weight_VD: Tensor) -> Factors:
        """Multiply in float64."""
        return cls(hidden_ND, weight_VD, hidden_ND.double() @ weight_VD.double().T)

    def round_hidden(self) -> Factors:
        """The same weight, and hidden states in bfloat16."""
        return Factors.of(self.hidden_ND.bfloat16(), self.weight_VD)

    def describe(self, name: str, found_NV: Tensor) -> str:
        """A row of a table: root of the mean square and largest error in nats, and KL."""
        error_NV = found_NV.double() - self.logits_NV
        logp_NV = self.logits_NV.log_softmax(1)
        logq_NV = found_NV.double().log_softmax(1)
        kl = float((logp_NV.exp() * (logp_NV - logq_NV)).sum(1).mean())
        root = float(error_NV.square().mean().sqrt())
        return f"| {name} | {root:.1e} | {float(error_NV.abs().max()):.1e} | {max(kl, 0.0):.1e} |"


def compare_teacher_logits(sizes: tuple[int, int, int]) -> Iterator[str]:
    """Rows for the logits of a teacher in bfloat16."""
    for largest in LARGEST_LOGITS:
        factors = Factors.make(sizes, largest, torch.bfloat16).round_hidden()
        head = LMHead(factors.weight_VD, None, 1.0, None, sizes[2])
        rounded_NV = head.multiply(factors.hidden_ND)
        yield factors.describe(f"rounded to bfloat16, largest logit {largest:g}", rounded_NV)
        wide_NV = head.compute_logits(factors.hidden_ND)
        yield factors.describe(f"float32, largest logit {largest:g}", wide_NV)


def compare_hidden_products(sizes: tuple[int, int, int]) -> Iterator[str]:
    """Rows for the product of profile hidden, at the first largest logit."""
    for stored in (torch.bfloat16, torch.float32):
        factors = Factors.make(sizes, LARGEST_LOGITS[0], stored)
        x_ND = factors.hidden_ND
        wide_VD = factors.weight_VD.float()
        parts = split_into_halves(factors.weight_VD)
        head = SplitLMHead(factors.weight_VD, None, 1.0, None, sizes[2], parts)
        kind = str(stored).removeprefix("torch.")
        count = {1: 3, 3: 6}[len(parts)]
        yield factors.describe(f"{kind} weight: float32", x_ND @ wide_VD.T)
        yield factors.describe(
            f"{kind} weight: split, {count} products in bfloat16", head.compute_logits(x_ND)
        )
        yield factors.describe(
            f"{kind} weight: hi hi + hi lo + lo hi", multiply_two_parts(x_ND, wide_VD)
        )
        tf32_NV = round_to_tf32(x_ND) @ round_to_tf32(wide_VD).T
        yield factors.describe(f"{kind} weight: TF32", tf32_NV)


def multiply_two_parts(x_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """Three products of two parts in bfloat16 each."""
    x_high, x_low, _ = split_into_halves(x_ND)
    w_high, w_low, _ = split_into_halves(weight_VD)
    out_NV = x_ND.new_empty(len(x_ND), len(weight_VD))
    write_product_(out_NV, x_low, w_high.T)
    add_product_(out_NV, x_high, w_low.T)
    add_product_(out_NV, x_high, w_high.T)
    return out_NV


def round_to_tf32(matrix: Tensor) -> Tensor:
    """The 10 bits after the first one that TF32 keeps of a factor."""
    return ((matrix.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def count_chunks() -> Iterator[str]:
    """Rows for the bytes that the gradient of the weight moves in a micro-batch."""
    for name, (positions, width, vocabulary, free) in HEADS.items():
        numbers = width * vocabulary
        chunk = choose_gpu_chunk_positions(vocabulary, free, 2)
        earlier = min(free // 128, _EARLIER_ELEMENTS) // vocabulary
        now, least, before = (
            count_head_gradient_bytes(numbers, -(-positions // size))
            for size in (chunk, positions, earlier)
        )
        before += 2 * numbers * torch.float32.itemsize
        sizes = (before, now, least, now - least)
        cells = (f"{free // GIB}", f"{chunk:,}", *(f"{size / 1e9:.1f}" for size in sizes))
        yield f"| {name} | {' | '.join(cells)} |"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--width", type=int, default=2_048)
    parser.add_argument("--positions", type=int, default=64)
    options = parser.parse_args()
    sizes = (options.positions, options.width, options.vocabulary)
    print(f"N = {sizes[0]}, D = {sizes[1]:,}, V = {sizes[2]:,}, torch {torch.__version__}")
    for title, rows in (
        ("logits of a teacher in bfloat16", compare_teacher_logits(sizes)),
        (f"profile hidden, largest logit {LARGEST_LOGITS[0]:g}", compare_hidden_products(sizes)),
    ):
        print(f"\n| {title} | error, root mean square | largest error | KL, nats |")
        print("|---|--:|--:|--:|", *rows, sep="\n")
    columns = ("free GiB", "chunk", "GB before", "GB", "GB, floor", "gap, GB")
    print(f"\n| gradient of the weight, expected | {' | '.join(columns)} |")
    print("|---|--:|--:|--:|--:|--:|--:|", *count_chunks(), sep="\n")


if __name__ == "__main__":
    main()
