"""Print the worked example of docs/concepts, and draw the pictures of that folder.

    python bench/concepts/example.py [--pictures FOLDER]

All numbers are those of real records: the demo's teacher reads a passage of *Persuasion*, and the
code of a capture and of a training makes and decodes the records.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.concepts.passage import (
    ENDING,
    Passage,
    decode_records,
    make_codec,
    make_records,
    make_tables,
    read_passage,
    show,
)
from bench.concepts.pictures import draw_pictures
from cache.profiles.threshold import WHOLE, count_rest
from cache.rounding import KNOWN_STEP, decode_masses
from cache.units.layout import encode_units
from kd.models.loading import hide_progress_bars

if TYPE_CHECKING:
    from cache.codec import Codec
    from cache.records import Records


def make_example(passage: Passage) -> list[str]:
    """Return the lines of the table of one record: every entry, with p and its weight."""
    codec = make_codec(len(passage.words))
    row = passage.find(ENDING)
    records = make_records(passage, codec)
    target = decode_records(passage, codec, records)
    entries = target.find_entries(slice(row, row + 1))
    ids, weights = target.ids_E[entries].tolist(), target.weights_E[entries].tolist()
    p_V = passage.temper()[row]
    record = records.slice(row, row + 1)
    units = (record["head_units"] // 2).tolist()
    tails = len(record["tail_ids"])
    parts = ["next token", *["head"] * len(units), *["tail"] * tails]
    counts = ["-", *units, *[1] * tails]
    candidates = ["-"] * (1 + len(units)) + [str(k or "none") for k in record["tail_k"].tolist()]
    lines = [
        "| part | token | *p* | units | weight | candidate |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for part, token, weight, count, k in zip(parts, ids, weights, counts, candidates, strict=True):
        word = show(passage.words[token])
        lines.append(f"| {part} | `{word}` | {p_V[token]:.4f} | {count} | {weight:.4f} | {k} |")
    total = sum(units) + tails
    cells = ["sum", f"{len(ids)} entries", f"{p_V[ids].sum():.4f}", total, f"{sum(weights):.4f}"]
    lines.append(f"| {' | '.join(map(str, cells))} | |")
    return lines


def make_facts(passage: Passage) -> dict[str, list[str]]:
    """Return the sentences with numbers of each page of docs/concepts."""
    p_NV = passage.temper()
    codec = make_codec(len(passage.words))
    records = make_records(passage, codec)
    mean = len(decode_records(passage, codec, records).ids_E) / len(records)
    k = round(mean)
    kept = float(p_NV.topk(k).values.sum(1).mean())
    share = {each: float(1 - passage.temper(each).topk(50).values.sum(1).mean()) for each in (1, 2)}
    return {
        "threshold-records.md": _describe_record(passage, records, codec),
        "why-top-k-is-biased.md": [
            f"{len(records)} tokens",
            f"{mean:.1f} entries a token",
            f"The {k} most probable tokens hold {kept:.0%} of the probability.",
        ],
        "temperature.md": [
            f"At T = 1, {share[1]:.0%} of the probability lies outside the top 50",
            f"at T = 2, {share[2]:.0%} does",
        ],
    }


def _describe_record(passage: Passage, records: Records, codec: Codec) -> list[str]:
    row = passage.find(ENDING)
    p_V = passage.temper()[row]
    record = records.slice(row, row + 1)
    known = decode_masses(KNOWN_STEP, record["known"])[0, 0]
    rest_1, number_1 = count_rest(codec, record["known"], np.ones((1, 1), bool))
    rest, number = float(rest_1[0]) / WHOLE, int(number_1[0])
    heads = record["head_ids"].astype(int)
    units = int((record["head_units"] // 2).sum())
    drawn = record["tail_ids"].astype(int)
    tail = float(1 - p_V[heads].sum() - p_V[passage.gold_N[row]])
    rare = int(drawn[p_V[drawn].argmin()])
    chance = len(drawn) * float(p_V[rare]) / tail
    _, arrays = encode_units(record, np.array([0, 1]), codec, make_tables(passage, codec))
    return [
        f"entropy is {-(p_V * p_V.log()).sum():.2f} nats",
        f"1 − {known:.4f} = {rest:.4f}",
        f"n = ⌈{rest:.4f} / {codec.threshold:g}⌉ = {number} units of {rest / number:.4f}",
        f"{len(heads)} tokens have *p* above a unit, and get {units} units",
        f"m = {number} − {units} = {len(drawn)} tokens are drawn",
        f'"{passage.words[rare].strip()}" has far too much weight here: {rest / number:.4f}',
        f"instead of {p_V[rare]:.4f}",
        f"about one of {1 / chance:.0f} such records",
        f"{len(p_V):,} probabilities became {1 + len(heads) + len(drawn)} entries",
        f"{sum(each.nbytes for each in arrays.values())} bytes",
    ]


def main() -> None:
    """Print the example, and draw the pictures where a folder is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=Path, help="write the pictures into this folder")
    arguments = parser.parse_args()
    hide_progress_bars()
    passage = read_passage()
    print("\n".join(make_example(passage)))
    for page, facts in make_facts(passage).items():
        print("\n".join(["", f"{page}:", *facts]))
    if arguments.pictures:
        draw_pictures(passage, arguments.pictures)


if __name__ == "__main__":
    main()
