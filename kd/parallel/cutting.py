"""How a student is cut into the stages of a pipeline. Imports no torch."""

from __future__ import annotations


def cut_layers(count: int, stages: int) -> list[int]:
    """The number of layers in each stage; the first ones have one more where they do not divide."""
    if stages > count:
        raise ValueError(f"{count} layers cannot be cut into {stages} stages")
    each, rest = divmod(count, stages)
    return [each + (stage < rest) for stage in range(stages)]


def compute_bubble(stages: int, micro_batches: int) -> float:
    """The share of a step in which a stage waits for the others: (S - 1) / (M + S - 1).

    Huang et al. 2019 (GPipe, arXiv 1811.06965), section 2.
    """
    return (stages - 1) / (micro_batches + stages - 1)
