"""Measure how fast text is tokenized into a token store, and the memory that this takes.

    python bench/text/tokens.py [--tokens 2e6] [--rounds 5] [--out FILE]

The text is that of the example, again and again, with the words of each paragraph shuffled; it has
about ``--tokens`` tokens and lies in files on the disk. The ways take turns, round after round:

    bare tokenizer    the files are read and tokenized, in batches of as many characters as the
                      store's; the ids are dropped
    token store       the files are read, tokenized, packed, written and sealed
    digest            the sequences of the store are read and hashed, as a capture does
    sequences         the sequences of the store are read in random order, 8 at a time

"Per core" divides by the seconds that the processors worked for it, those of the tokenizer's
threads included; tokens/s divides by the time on the clock. The last column is the median of the
rounds' ratios. Memory is the peak of a process of its own above what it had after its imports.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.speed import read_cpu_name
from bench.support.paths import AUSTEN, ROOT
from kd.config.data import DataConfig
from kd.models.tokenizers import load_tokenizer
from kd.text.corpus import Corpus, open_corpus
from kd.text.text_encoder import BATCH_CHARACTERS, PIECE_CHARACTERS

LENGTH = 512
BATCH = 8
#: Sequences that are read in random order, at most.
READ = 4096
#: Bytes of a file of the text.
FILE_BYTES = 20 * 10**6
#: Bytes of English text for a token of the example's tokenizer.
BYTES_PER_TOKEN = 3.7
MB = 10**6
WAYS = ("bare tokenizer", "token store", "digest", "sequences")
#: Opens the text in a process of its own; prints the tokens and the bytes of memory that it took.
CHILD = """
import resource, sys
from pathlib import Path
from bench.text import tokens
tokenizer = tokens.load_tokenizer(tokens.AUSTEN / "teacher")
tokenizer("imports what it needs")
read = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = read()
corpus = tokens.open_text(Path(sys.argv[1]), Path(sys.argv[2]), tokenizer)
stored = read()
corpus.compute_sha256()
print(tokens.count_tokens(corpus), stored - before, read() - before)
"""


@dataclass(frozen=True)
class Taken:
    """Tokens of one run, its seconds on the clock, and those of the processors."""

    tokens: int
    seconds: float
    processors: float

    @classmethod
    def measure(cls, run: Callable[[], int]) -> Taken:
        """Time ``run``, which returns the number of its tokens."""
        began, worked = time.perf_counter(), time.process_time()
        tokens = run()
        return cls(tokens, time.perf_counter() - began, time.process_time() - worked)


def write_text(folder: Path, tokens: float, seed: int = 0) -> None:
    """Write files of about ``tokens`` tokens together."""
    shuffled = _shuffle_paragraphs(random.Random(seed))
    left = tokens * BYTES_PER_TOKEN
    number = 0
    while left > 0:
        size = 0
        with (folder / f"{number:05}.txt").open("w", encoding="utf-8") as file:
            while size < min(left, FILE_BYTES):
                size += file.write(next(shuffled) + "\n\n")
        left -= size
        number += 1


def _shuffle_paragraphs(order: random.Random) -> Iterator[str]:
    """Yield the paragraphs of the example without end, each with its words in another order."""
    files = sorted((AUSTEN / "text").glob("*.txt"))
    paragraphs = [part for file in files for part in file.read_text("utf-8").split("\n\n")]
    while True:
        for paragraph in paragraphs:
            words = paragraph.split()
            order.shuffle(words)
            yield " ".join(words)


def tokenize_bare(source: Path, tokenizer: Any) -> int:
    """Tokenize the files in batches of pieces, and drop the ids; return how many there are."""
    tokens = 0
    for path in sorted(source.glob("*.txt")):
        with path.open(encoding="utf-8") as file:
            while text := file.read(BATCH_CHARACTERS):
                places = range(0, len(text), PIECE_CHARACTERS)
                pieces = [text[place : place + PIECE_CHARACTERS] for place in places]
                found = tokenizer.backend_tokenizer.encode_batch_fast(pieces)
                tokens += sum(map(len, found))
    return tokens


def open_text(source: Path, texts: Path, tokenizer: Any) -> Corpus:
    """Open the text below ``source`` in the stores below ``texts``."""
    config = DataConfig(train=str(source), sequence_length=LENGTH, validation_fraction=0)
    return open_corpus(config, tokenizer, texts, size=len(tokenizer))


def count_tokens(corpus: Corpus) -> int:
    """Count the tokens of the training sequences."""
    return len(corpus.train) * corpus.train.length


def read_shuffled(corpus: Corpus) -> int:
    """Read sequences in random order, a batch at a time; return how many tokens they have."""
    order = np.random.default_rng(0).permutation(len(corpus.train))[:READ]
    batches = (order[first : first + BATCH] for first in range(0, len(order), BATCH))
    return sum(corpus.train.select(batch).tokens.size for batch in batches)


def measure_rates(source: Path, texts: Path, rounds: int) -> dict[str, list[Taken]]:
    """Let every way read the text once a round."""
    tokenizer = load_tokenizer(AUSTEN / "teacher")

    def store() -> int:
        shutil.rmtree(texts, ignore_errors=True)
        return count_tokens(open_text(source, texts, tokenizer))

    def digest() -> int:
        corpus = open_text(source, texts, tokenizer)
        corpus.compute_sha256()
        return count_tokens(corpus)

    runs = dict(
        zip(
            WAYS,
            [
                lambda: tokenize_bare(source, tokenizer),
                store,
                digest,
                lambda: read_shuffled(open_text(source, texts, tokenizer)),
            ],
            strict=True,
        )
    )
    return _take_turns(runs, rounds)


def _take_turns(runs: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[Taken]]:
    found: dict[str, list[Taken]] = {name: [] for name in runs}
    for number in range(rounds):
        # The store is written before it is read, so that only it and the bare tokenizer swap.
        bare, store, *others = runs
        for name in (*((store, bare) if number % 2 else (bare, store)), *others):
            found[name].append(Taken.measure(runs[name]))
    return found


def measure_memory(source: Path, texts: Path) -> tuple[int, int, int]:
    """Return the tokens of the text, and the bytes of memory with and without the digest."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(source), str(texts)],
        check=True, capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    tokens, stored, hashed = map(int, done.stdout.split())
    return tokens, stored, hashed


def render_rates(found: dict[str, list[Taken]]) -> list[str]:
    """The rates as a table, in Markdown."""
    lines = [
        "| what | tokens/s | tokens/s per core | of the bare tokenizer's, per core |",
        "|---|--:|--:|--:|",
    ]
    bare = [each.tokens / each.processors for each in found[WAYS[0]]]
    for name, runs in found.items():
        clock = statistics.median(each.tokens / each.seconds for each in runs)
        core = [each.tokens / each.processors for each in runs]
        ratio = statistics.median(one / other for one, other in zip(core, bare, strict=True))
        lines.append(f"| {name} | {clock:,.0f} | {statistics.median(core):,.0f} | {ratio:.2f} |")
    return lines


def render_memory(tokens: int, stored: int, hashed: int, disk: int) -> list[str]:
    """The bytes as a table, in Markdown."""
    return [
        "| bytes | MB | a token |",
        "|---|--:|--:|",
        *(
            f"| {name} | {size / MB:,.0f} | {size / tokens:.2f} |"
            for name, size in {
                "all sequences in memory would take": 6 * tokens,
                "memory while the text is tokenized and stored": stored,
                "the same, and its digest": hashed,
                "the store on the disk": disk,
            }.items()
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=float, default=2e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-tokens-") as name:
        source, texts, own = (Path(name, each) for each in ("source", "texts", "own"))
        source.mkdir()
        write_text(source, arguments.tokens)
        tokens, stored, hashed = measure_memory(source, own)
        found = measure_rates(source, texts, arguments.rounds)
        disk = sum(file.stat().st_size for file in own.glob("*/shards/*/*"))
        machine = f"Machine: {read_cpu_name()}, {os.cpu_count()} cores"
        lines = [
            f"{machine}; rounds: {arguments.rounds}; {tokens:,} tokens in sequences of {LENGTH}.",
            "",
            *render_rates(found),
            "",
            *render_memory(tokens, stored, hashed, disk),
        ]
    page = "\n".join(lines) + "\n"
    sys.stdout.write(page)
    if arguments.out:
        arguments.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
