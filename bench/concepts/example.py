"""Print the worked example of docs/concepts, and draw the pictures of that folder.

    python bench/concepts/example.py [--pictures FOLDER]

All numbers are those of real records: the demo's teacher reads a passage of *Persuasion*, and the
code of a capture and of a training makes and decodes the records.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bench.concepts.passage import (
    ENDING,
    Passage,
    decode_records,
    make_codec,
    make_records,
    read_passage,
    show,
)
from bench.concepts.pictures import draw_pictures
from kd.models.loading import hide_progress_bars

if TYPE_CHECKING:
    from cache.codec import Codec
    from cache.records import Records

#: A drawn token of the example that the teacher finds improbable.
RARE = " tri"


def make_example(passage: Passage) -> list[str]:
    """Return the lines of the table of one record: every entry, with p and its weight."""
    codec = make_codec(len(passage.words))
    row = passage.find(ENDING)
    records = make_records(passage, codec)
    target = decode_records(passage, codec, records)
    entries = target.find_entries(slice(row, row + 1))
    ids, weights = target.ids_E[entries].tolist(), target.weights_E[entries].tolist()
    p_V = passage.temper()[row]
    heads = int(records["head_count"][row])
    parts = ["next token", *["head"] * heads, *["tail"] * (len(ids) - 1 - heads)]
    lines = ["| part | token | *p* | weight |", "|---|---|--:|--:|"]
    for part, token, weight in zip(parts, ids, weights, strict=True):
        lines.append(
            f"| {part} | `{show(passage.words[token])}` | {p_V[token]:.4f} | {weight:.4f} |"
        )
    lines.append(f"| sum | {len(ids)} entries | {p_V[ids].sum():.4f} | {sum(weights):.4f} |")
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
    gold = int(passage.gold_N[row])
    heads, tails = int(records["head_count"][row]), int(records["tail_count"][row])
    is_known_V = p_V > codec.threshold
    is_known_V[gold] = True
    known = float(p_V[is_known_V].sum())
    rare = passage.words.index(RARE)
    return [
        f"entropy is {-(p_V * p_V.log()).sum():.2f} nats",
        f"{heads} tokens have *p* > {codec.threshold:g}",
        f"R = 1 − {known:.4f} = {1 - known:.4f}",
        f"m = ⌊{1 - known:.4f} / {codec.threshold:g}⌋ = {tails}",
        f"{len(p_V):,} probabilities became {1 + heads + tails} entries",
        f"about one of {(1 - known) / tails / float(p_V[rare]):.0f} such records",
        f"5 + 3 · {heads} + 2 · {tails} = {5 + 3 * heads + 2 * tails} bytes",
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
