"""Measure what a plan of a whole distillation needs and no other bench prints.

    python bench/devices/plan_rates.py [--quick] [--tokenizer FILE ...] [--out FILE]

``kd plan --tokens`` counts with these numbers (``kd/planning/distillation/sources.py``):

    tokenising  text to ids by the library tokenizers, one thread; tokens for each second of a core
    objects     the arrays and the files of one shard of each profile, with its seal; every array
                is small here, so that each has one chunk
    beats       beats of a worker that one client sends to the store, one after the other
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.speed import read_cpu_name
from bench.support.paths import AUSTEN
from cache.disk import list_file_sizes
from cache.profiles.table import PROFILES
from cache.shard import make_shard_arrays, write_arrays
from cache.testing import make_codec, make_identity, make_shard
from kd.config.jobfile import parse_config
from services.store.connection import connect_redis
from services.store.embedded import EmbeddedServer, find_binary
from services.store.jobs.leases import Claim, EventBatch
from services.store.jobs.store import JobStore

#: Bytes of text, and beats, of a measurement; and rounds, of which the best counts.
TEXT_BYTES = 4 << 20
BEATS = 5000
ROUNDS = 3
#: The seal of a shard lies beside its folder.
SEALS = 1
JOB = {
    "kind": "precompute",
    "teacher": {"model": "teacher"},
    "data": {"train": "text"},
}
LEASE_SECONDS = 60.0


def read_text(size: int) -> list[str]:
    """Read ``size`` bytes of prose as paragraphs; the text is repeated where it is shorter."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((AUSTEN / "text").glob("*.txt"))]
    whole = "\n\n".join(texts)
    repeated = whole * (size // len(whole) + 1)
    return repeated[:size].split("\n\n")


def measure_tokenizing(path: Path, paragraphs: list[str]) -> tuple[int, float]:
    """The vocabulary of a tokenizer.json, and its tokens for each second of a core."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    best = 0.0
    for _ in range(ROUNDS):
        began = time.process_time()
        found = tokenizer.encode_batch(paragraphs, add_special_tokens=False)
        best = max(best, sum(map(len, found)) / (time.process_time() - began))
    return tokenizer.get_vocab_size(), best


def count_files(profile: str) -> tuple[int, int]:
    """The arrays of a shard of ``profile``, and its files with the seal."""
    identity = make_identity(codec=make_codec(profile))
    arrays = make_shard_arrays(*make_shard(identity, 0), identity.record_codec())
    with tempfile.TemporaryDirectory() as name:
        write_arrays(Path(name) / "shard", arrays)
        return len(arrays), len(list_file_sizes(Path(name) / "shard")) + SEALS


def measure_beats(count: int) -> float:
    """Beats a second that one client sends to a store of its own."""
    with tempfile.TemporaryDirectory() as name:
        server = EmbeddedServer(Path(name) / "redis", find_binary())
        server.start()
        try:
            with connect_redis(server.url, timeout=30) as client:
                store = JobStore(client)
                job = store.create(parse_config(JOB))
                claim = store.claim(job.id, "precompute", "bench", LEASE_SECONDS)
                assert claim is not None, "a new job can be claimed"
                return max(_time(lambda: _beat(store, claim, count)) for _ in range(ROUNDS)) * count
        finally:
            server.stop()


def _beat(store: JobStore, claim: Claim, count: int) -> None:
    for _ in range(count):
        store.beat(claim, LEASE_SECONDS, EventBatch(0, ()))


def _time(work: Callable[[], None]) -> float:
    """How often ``work`` could be done in a second."""
    began = time.perf_counter()
    work()
    return 1 / (time.perf_counter() - began)


def render(tokenizers: list[Path], text_bytes: int, beats: int) -> Iterator[str]:
    """Yield the lines of the three tables."""
    load = os.getloadavg()[0]
    yield f"Machine: {read_cpu_name()}, {os.cpu_count()} cores, load {load:.1f}."
    yield ""
    yield "| tokenizer | V | tokens/s, per core |"
    yield "|---|--:|--:|"
    paragraphs = read_text(text_bytes)
    for path in tokenizers:
        vocabulary, rate = measure_tokenizing(path, paragraphs)
        yield f"| {path.parent.name} | {vocabulary:,} | {rate:,.0f} |"
    yield ""
    yield "| profile | arrays | files |"
    yield "|---|--:|--:|"
    for profile in PROFILES:
        arrays, files = count_files(profile)
        yield f"| {profile} | {arrays} | {files} |"
    yield ""
    yield "| store | a second |"
    yield "|---|--:|"
    yield f"| beats | {measure_beats(beats):,.0f} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="little text and few beats")
    parser.add_argument(
        "--tokenizer", type=Path, nargs="+", default=[AUSTEN / "teacher/tokenizer.json"]
    )
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sizes = (1 << 16, 50) if arguments.quick else (TEXT_BYTES, BEATS)
    text = "\n".join(render(arguments.tokenizer, *sizes)) + "\n"
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
