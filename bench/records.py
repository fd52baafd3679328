"""Measure bytes, closeness and speed of every cache profile, beside the formats of other tools.

    python bench/records.py [--teacher FOLDER [--gguf-file NAME]] [--text FILE] [--sequences 32]
                            [--length 512]

bytes/token   bytes on disk, everything included: tokens, index, metadata, checksums, manifest. For
              other tools: their Parquet file.
KL            KL(decoded || live) in nats over the whole vocabulary: the distance of the student's
              target from the truth. A sample has no KL: its mean over draws is the truth (tests
              check this), a single draw is not.
gradient      the error of the gradient of the LM head's weight over all positions, for a student
              whose hidden states are the teacher's plus noise: the norm of the difference from the
              dense gradient, relative to the norm of the dense gradient. A bias stays for any
              number of tokens; the noise of a sample falls with the square root of their number.
encode        logits to records. The recorder makes the logits itself, chunk by chunk in the same
              memory. That product is timed separately for each sequence and subtracted. For other
              tools: softmax and selection of the k.
write, read   to sealed files and back to arrays, with the files in the system's page cache
decode        arrays to the target of the loss
              All but write are the least of three runs.

Other tools: DistillKit's recommended and its budget configuration, in its format as kd/exchange
writes it, and the k most probable tokens in bfloat16. Both are decoded as DistillKit does by
default: renormalised over the k, at T = 2 as well.

Shapes: N positions, V vocabulary, D hidden width, K entries.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.support.paths import AUSTEN
from bench.support.quality.methods import DISTILLKIT, make_compression
from cache.codec import Codec
from cache.manifest import (
    CacheIdentity,
    CodecIdentity,
    DataIdentity,
    Provenance,
    TeacherIdentity,
    TokenizerIdentity,
)
from cache.profiles.table import PROFILES as RULES
from cache.records import Records, Sequences
from cache.rounding import round_to_bfloat16
from cache.store import Cache, open_cache
from cache.units.dither import DitherTables
from cache.writing.writer import open_writer
from kd.capture.codec_identity import Recipe
from kd.capture.knots import choose_knots
from kd.capture.recording import LOGIT_ELEMENTS, Recorder
from kd.capture.units.fitting import fit_tables
from kd.config.data import DataConfig
from kd.exchange import distillkit
from kd.loss.decoder import TargetDecoder
from kd.loss.targets import subtract_target_
from kd.loss.whole_targets import decode_lm_head
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import LMHead, find_lm_head
from kd.models.loading import hide_progress_bars, load_model
from kd.models.tokenizers import get_vocabulary_size, load_tokenizer
from kd.text.packing import Document, pack_documents
from kd.text.text_encoder import TextEncoder

#: Positions whose (N, V) targets are compared together.
CHUNK = 128
#: Sequences that are read and decoded together.
BATCH = 8

PROFILES: list[tuple[str, dict[str, Any]]] = [
    ("threshold 0.125", {"profile": "threshold", "threshold": 0.125}),
    ("threshold 0.04", {"profile": "threshold", "threshold": 0.04}),
    ("threshold 0.02", {"profile": "threshold", "threshold": 0.02}),
    ("threshold 0.01", {"profile": "threshold", "threshold": 0.01}),
    ("tempered 0.0155", {"profile": "tempered", "threshold": 0.0155, "temperatures": (0.5, 2.0)}),
    ("topk 32", {"profile": "topk", "k": 32}),
    ("topk 128", {"profile": "topk", "k": 128}),
    ("dense float16", {"profile": "dense", "bits": 16}),
    ("hidden int8", {"profile": "hidden", "bits": 8}),
    ("hidden int16", {"profile": "hidden", "bits": 16}),
]


@dataclass(frozen=True)
class Truth:
    """The teacher's LM head, and its hidden states and next tokens: one list entry a sequence."""

    sequences: Sequences
    hidden: list[Tensor]
    gold: list[Tensor]
    head: LMHead

    @property
    def positions(self) -> int:
        """Positions with a target."""
        return self.sequences.positions

    def chunks(self, limit: int) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield (sequence, its rows, logits (N, V)) of the first ``limit`` sequences, by chunks."""
        for number, hidden_ND in enumerate(self.hidden[:limit]):
            for start in range(0, len(hidden_ND), CHUNK):
                rows = slice(start, min(start + CHUNK, len(hidden_ND)))
                yield number, rows, self.head.compute_logits(hidden_ND[rows])


#: Turns the student's probabilities q (N, V) of some rows of a sequence into the gradient q - p.
Subtract = Callable[[int, slice, Tensor, float], Tensor]


@dataclass(frozen=True)
class StorageMethod:
    """One way to store a teacher: its size, its rates in tokens a second, and its targets."""

    name: str
    entries: float
    bytes_per_token: float
    rates: tuple[float | None, ...]
    subtract: Subtract
    temperatures: tuple[float, ...]
    sampled: bool = False


def time_fastest_run(run: Callable[[], Any], rounds: int = 3) -> tuple[float, Any]:
    """Measure the least wall time of ``run`` in seconds; returns it and the result of ``run``."""
    least = float("inf")
    for _ in range(rounds):
        result = None  # frees the memory of the last result, so that the next run can use it
        began = time.perf_counter()
        result = run()
        least = min(least, time.perf_counter() - began)
    return least, result


# ---------------------------------------------------------------------- storage methods


@torch.no_grad()
def add_source_options(parser: argparse.ArgumentParser, sequences: int, length: int) -> None:
    """Add the options that ``read_teacher`` reads, with these defaults."""
    parser.add_argument("--teacher", type=Path, default=AUSTEN / "teacher")
    parser.add_argument("--gguf-file")
    parser.add_argument("--text", type=Path, default=AUSTEN / "text" / "persuasion.txt")
    parser.add_argument("--sequences", type=int, default=sequences)
    parser.add_argument("--length", type=int, default=length)


def read_teacher(arguments: argparse.Namespace) -> tuple[Truth, Any]:
    """Read the first sequences of the text with the teacher; returns truth and tokenizer."""
    tokenizer = load_tokenizer(arguments.teacher, arguments.gguf_file)
    text = arguments.text.read_text(encoding="utf-8")
    batches = TextEncoder(tokenizer).encode([text])
    ids = np.concatenate([part.ids for parts in batches for part in parts])
    config = DataConfig(train=("-",), sequence_length=arguments.length)
    sequences = pack_documents([Document(ids)], config).select(np.arange(arguments.sequences))
    model = load_model(arguments.teacher, torch.float32, arguments.gguf_file).eval()
    head = find_lm_head(model, get_vocabulary_size(tokenizer))
    hidden = []
    gold = []
    for tokens_L, mask_L in zip(sequences.tokens, sequences.target_mask, strict=True):
        tokens_1L = torch.from_numpy(tokens_L.astype(np.int64))[None]
        rows = torch.from_numpy(np.flatnonzero(mask_L))
        hidden.append(compute_hidden_states(model, tokens_1L)[0, rows].clone())
        gold.append(tokens_1L[0, rows + 1])
    return Truth(sequences, hidden, gold, head), tokenizer


def make_cache_identity(truth: Truth, codec: CodecIdentity) -> CacheIdentity:
    """Make the identity of a cache that is used here only."""
    count, length = truth.sequences.tokens.shape
    return CacheIdentity(
        TeacherIdentity("0" * 64, "float32"),
        TokenizerIdentity(truth.head.vocabulary, "0" * 64),
        DataIdentity("0" * 64, length, True, count, 0),
        codec,
    )


def make_codec_identity(options: dict[str, Any], truth: Truth) -> CodecIdentity:
    """Make the identity of records; the tables of profile threshold have the recipe of a job."""
    if not RULES[options["profile"]].dithered:
        return CodecIdentity(**options)
    recipe = Recipe.choose(truth.positions, len(truth.hidden))
    return CodecIdentity(**options, clusters=recipe.clusters, fitted=recipe.sequences)


def fit_own_tables(truth: Truth, codec: CodecIdentity) -> DitherTables:
    """Fit the tables of profile threshold to the first sequences, as a capture does."""
    first = zip(truth.hidden[: codec.fitted], truth.gold[: codec.fitted], strict=True)
    return fit_tables(first, truth.head, codec.record_codec(truth.head.vocabulary), codec.clusters)


@torch.no_grad()
def keep_ours(name: str, options: dict[str, Any], truth: Truth, folder: Path) -> StorageMethod:
    """Capture a cache of one profile, and measure its rates."""
    identity = make_cache_identity(truth, make_codec_identity(options, truth))
    codec = identity.record_codec()
    tempered = codec.profile == "tempered"
    knots = choose_knots(truth.hidden[0], truth.gold[0], truth.head, codec).count if tempered else 0
    tables = fit_own_tables(truth, identity.codec) if codec.rules.dithered else None
    recorder = Recorder(truth.head, codec, knots, tables=tables)
    places = [np.flatnonzero(mask_L) for mask_L in truth.sequences.target_mask]

    encoding = 0.0
    parts = []
    room = truth.hidden[0].new_empty(
        LOGIT_ELEMENTS["cpu"] // truth.head.vocabulary, truth.head.vocabulary
    )
    for number, (hidden_ND, gold_N) in enumerate(zip(truth.hidden, truth.gold, strict=True)):
        product, _ = time_fastest_run(partial(make_logits, truth.head, hidden_ND, room))
        both, records = time_fastest_run(
            partial(recorder.record, hidden_ND, gold_N, number, places[number])
        )
        encoding += both - product
        parts.append(records)
    with open_writer(folder, identity) as writer:
        if codec.profile == "hidden":
            writer.write_lm_head(recorder.make_lm_head_arrays())
        if tables is not None:
            writer.write_tables(tables)
        writing, _ = time_fastest_run(
            lambda: writer.write_shard(0, truth.sequences, Records.concatenate(parts)), 1
        )
        manifest = writer.finish(Provenance())
    store = open_cache(folder / identity.fingerprint)
    batches = [
        range(start, min(start + BATCH, len(parts))) for start in range(0, len(parts), BATCH)
    ]
    reading, read = time_fastest_run(lambda: [store.read(batch)[1] for batch in batches])
    decoding = None
    # The loss decodes dense and hidden itself, chunk by chunk.
    if codec.profile not in ("dense", "hidden"):
        decoding, _ = time_fastest_run(
            lambda: [_decode(codec, truth, *pair) for pair in zip(batches, read, strict=True)]
        )
    head_bytes = manifest.head.bytes / max(manifest.positions, 1)
    rates = tuple(
        each and truth.positions / max(each, 1e-9)
        for each in (encoding, writing, reading, decoding)
    )
    served = tuple(t for t in (1.0, 2.0) if codec.why_unsupported(temperatures=(t,)) is None)
    known = 0 if codec.profile in ("dense", "hidden", "topk") else 1
    entries = manifest.entries / manifest.positions + known
    return StorageMethod(
        name,
        entries,
        store.bytes_per_token - head_bytes,
        rates,
        _subtract_ours(store, truth),
        served,
        known == 1,
    )


def make_logits(head: LMHead, hidden_ND: Tensor, room: Tensor) -> None:
    """Compute the logits and nothing else, in the same chunks as the recorder."""
    for rows_ND in hidden_ND.split(len(room)):
        head.compute_logits(rows_ND, room[: len(rows_ND)])


def _decode(codec: Codec, truth: Truth, batch: range, records: Records) -> None:
    columns = {name: torch.from_numpy(column) for name, column in records.columns.items()}
    TargetDecoder(codec).decode(torch.cat([truth.gold[number] for number in batch]), columns)


def _subtract_ours(store: Cache, truth: Truth) -> Subtract:
    codec = store.codec
    head = (
        decode_lm_head(store.teacher_head(), codec.vocabulary_size, torch.device("cpu"))
        if codec.profile == "hidden"
        else None
    )

    def subtract(number: int, rows: slice, q_NV: Tensor, temperature: float) -> Tensor:
        records = store.read([number])[1]
        columns = {name: torch.from_numpy(column) for name, column in records.columns.items()}
        targets = TargetDecoder(codec, head).decode(truth.gold[number], columns, temperature)
        assert targets.teacher is not None
        return subtract_target_(q_NV, targets.teacher.take_chunk(rows))

    return subtract


@torch.no_grad()
def keep_top(
    name: str, k: int, truth: Truth, compression: distillkit.Compression | None, folder: Path
) -> StorageMethod:
    """Store the k most probable tokens as DistillKit does, or in bfloat16 where it is None."""
    encoding = 0.0
    bits = 2 if truth.head.vocabulary <= 1 << 16 else 4
    stored = {}
    for number, hidden_ND in enumerate(truth.hidden):
        taken, pair = time_fastest_run(
            partial(_encode_top, truth.head.compute_logits(hidden_ND), k, compression)
        )
        encoding += taken
        stored[number] = pair
    tokens = [row.tolist() for row in truth.sequences.tokens]
    writing, path = time_fastest_run(
        lambda: _write_parquet(folder / f"{name}.parquet", tokens, list(stored.values()))
    )
    reading, _ = time_fastest_run(lambda: _read_parquet(path))
    decoding, decoded = time_fastest_run(
        lambda: {n: _decode_top(pair, k, compression, bits) for n, pair in stored.items()}
    )

    def subtract(number: int, rows: slice, q_NV: Tensor, temperature: float) -> Tensor:
        ids_NK, logp_NK = decoded[number]
        p_NK = torch.softmax(logp_NK[rows] / temperature, 1).to(q_NV.dtype)
        return q_NV.scatter_add_(1, ids_NK[rows], -p_NK)

    rates = tuple(
        truth.positions / max(each, 1e-9) for each in (encoding, writing, reading, decoding)
    )
    return StorageMethod(
        name, k, path.stat().st_size / truth.positions, rates, subtract, (1.0, 2.0)
    )


def _encode_top(
    logits_NV: Tensor, k: int, compression: distillkit.Compression | None
) -> tuple[Any, Any]:
    top_NK, ids_NK = torch.log_softmax(logits_NV, -1).topk(k, dim=1)
    if compression is None:
        ids = ids_NK.numpy().astype(np.uint16 if logits_NV.shape[1] <= 1 << 16 else np.uint32)
        return round_to_bfloat16(top_NK.numpy()).view(np.uint8), ids.view(np.uint8)
    return distillkit.encode_entries(compression, ids_NK.numpy(), top_NK.numpy())


def _decode_top(
    pair: tuple[Any, Any], k: int, compression: distillkit.Compression | None, id_bytes: int
) -> tuple[Tensor, Tensor]:
    if compression is not None:
        ids, logprobs = distillkit.decode_entries(compression, *pair)
        return torch.from_numpy(ids), torch.from_numpy(logprobs)
    values = (pair[0].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    ids = pair[1].view(np.uint16 if id_bytes == 2 else np.uint32).astype(np.int64)
    return torch.from_numpy(ids.reshape(-1, k)), torch.from_numpy(
        values.astype(np.float64).reshape(-1, k)
    )


def _write_parquet(
    path: Path, tokens: list[list[int]], rows: list[tuple[NDArray[Any], NDArray[Any]]]
) -> Path:
    """Write Parquet as DistillKit does: a row a sequence, a list of bytes a position."""
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table(
        {
            "input_ids": tokens,
            "compressed_logprobs": [list(values) for values, _ in rows],
            "bytepacked_indices": [list(ids) for _, ids in rows],
        }
    )
    parquet.write_table(table, path)
    return path


def _read_parquet(path: Path) -> Any:
    from pyarrow import parquet

    return parquet.read_table(path)


# ---------------------------------------------------------------------- closeness


@torch.no_grad()
def measure_closeness(
    kept: StorageMethod, truth: Truth, limit: int, noise: float, temperature: float
) -> tuple[float, float]:
    """Measure mean KL(decoded || live) and the relative error of the LM head's gradient.

    Both are taken over the first ``limit`` sequences.
    """
    generator = torch.Generator().manual_seed(0)
    spread = torch.stack([h_ND.std() for h_ND in truth.hidden[:limit]]).mean()
    error = torch.zeros_like(truth.head.weight[: truth.head.vocabulary])
    exact = torch.zeros_like(error)
    divergence = 0.0
    count = 0
    for number, rows, logits_NV in truth.chunks(limit):
        p_NV = torch.softmax(logits_NV / temperature, 1)
        told_NV = -kept.subtract(number, rows, torch.zeros_like(p_NV), temperature)
        x_ND = truth.hidden[number][rows]
        x_ND = x_ND + noise * spread * torch.randn(x_ND.shape, generator=generator)
        q_NV = torch.softmax(truth.head.compute_logits(x_ND) / temperature, 1)
        exact.addmm_((q_NV - p_NV).T, x_ND)
        error.addmm_(
            (kept.subtract(number, rows, q_NV.clone(), temperature) - (q_NV - p_NV)).T, x_ND
        )
        if not kept.sampled:
            divergence += float(
                (
                    torch.xlogy(told_NV, told_NV)
                    - told_NV * torch.log_softmax(logits_NV / temperature, 1)
                ).sum()
            )
        count += len(p_NV)
    return divergence / count, float(error.norm() / exact.norm())


def make_cells(kept: StorageMethod, truth: Truth, arguments: argparse.Namespace) -> list[str]:
    """Make the row of one storage method."""
    found = {
        t: measure_closeness(kept, truth, arguments.gradient, arguments.noise, t)
        for t in kept.temperatures
    }
    divergences = []
    errors = []
    for temperature in (1.0, 2.0):
        divergence, error = found.get(temperature, (None, None))
        shown = "sample" if kept.sampled else f"{divergence:.1e}" if divergence is not None else "-"
        divergences.append(shown if error is not None else "-")
        errors.append(f"{error:.1%}" if error is not None else "-")
    rates = ["-" if rate is None or rate > 1e9 else f"{rate / 1e3:,.0f}" for rate in kept.rates]
    entries = f"{kept.entries:,.1f}" if kept.entries else "-"
    return [kept.name, entries, f"{kept.bytes_per_token:,.1f}", *divergences, *errors, *rates]


COLUMNS = [
    *("what", "entries", "bytes/token", "KL, T=1", "KL, T=2", "gradient error, T=1", "T=2"),
    *("encode, k tokens/s", "write", "read", "decode"),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_source_options(parser, sequences=32, length=512)
    parser.add_argument(
        "--gradient", type=int, default=8, help="sequences on which closeness is measured"
    )
    parser.add_argument(
        "--noise",
        type=float,
        default=0.3,
        help="noise of the student's hidden states, relative to their spread",
    )
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    hide_progress_bars()
    truth, _ = read_teacher(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for name, options in PROFILES:
            rows.append(
                make_cells(keep_ours(name, options, truth, Path(temporary)), truth, arguments)
            )
        for name in DISTILLKIT:
            compression = make_compression(DISTILLKIT[name], truth.head.vocabulary)
            kept = keep_top(
                f"DistillKit {name}", compression.k, truth, compression, Path(temporary)
            )
            rows.append(make_cells(kept, truth, arguments))
        for k in (32, 128):
            rows.append(
                make_cells(
                    keep_top(f"top-{k}, bfloat16", k, truth, None, Path(temporary)),
                    truth,
                    arguments,
                )
            )
    page = "\n".join([*make_heading(truth, arguments), "", *format_table(COLUMNS, rows)])
    print(page)
    if arguments.out:
        arguments.out.write_text(page + "\n", encoding="utf-8")


def make_heading(truth: Truth, arguments: argparse.Namespace) -> list[str]:
    """The lines about the machine and the text."""
    threads = torch.get_num_threads()
    about = (
        f"Teacher {arguments.teacher.name}, V = {truth.head.vocabulary:,}, "
        f"D = {truth.hidden[0].shape[1]}; {truth.positions:,} positions of {arguments.text.name}, "
        f"closeness on {arguments.gradient} sequences. "
        "The hidden profile's LM head, kept once a cache, is not in its bytes."
    )
    machine = f"{platform.system()} {platform.machine()}"
    return [f"Machine: {machine}, {threads} threads, torch {torch.__version__}", "", about]


def format_table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Format a markdown table with its numbers aligned to the right."""
    rule = "|---|" + "--:|" * (len(columns) - 1)
    return [f"| {' | '.join(columns)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]


if __name__ == "__main__":
    main()
