"""Read and write DistillKit's compressed log-probabilities, in numpy.

A dataset consists of Parquet files. A row holds ``input_ids``, and for each position a list of
bytes in ``compressed_logprobs`` and in ``bytepacked_indices``; ``compression_config.yaml`` beside
the files describes the bytes. Record r is the distribution of token r + 1. The sampler leaves out
the first token, which nothing predicts, so a row of n tokens has n - 1 records (or n, if a
packing tool has cut off the last token). The sampler ends short rows with one padding token, so
that the last token of the text has a record too; this padding token is imported as a normal token.

    bytes of a position    the ``exact_k`` largest log-probabilities; then the coefficients of a
                           curve through the others over t = 0, 1, ... (or t from 0 to 1:
                           ``normalize_t``); then for each residual bin a scale and integers of
                           ``element_bits``. With ``delta_encoding`` all values are differences of
                           neighbours. Numbers are little-endian, bits most significant first.
    ids of a position      K times ceil(log2 d) bits, in the order of the log-probabilities

Format: arcee-ai/DistillKit, distillkit/compression, version 1; the older polynomial codec is not
supported. The bytes carry no mark of their format, and decode to other numbers with another
configuration. So lengths are checked here, and values in ``kd.exchange.rows``.

Shapes: N positions, K entries of a position, B bytes of a position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from cache.rounding import round_to_bfloat16
from kd.config.section import Section
from kd.errors import DataError
from kd.exchange.foreign_files import read_table_batches
from kd.exchange.parquet import read_flat_column, read_nested_column, read_token_column
from kd.exchange.rows import MASS_TOLERANCE, Row, mark_one_document

CONFIG = "compression_config.yaml"
#: The column of compressed log-probabilities.
LOGPROBS = "compressed_logprobs"
#: The column of compressed ids.
INDICES = "bytepacked_indices"
#: The log-probability of entries that fill a record up to K in DistillKit's format, where every
#: record has K. DistillKit's own sampler writes -inf, which its loss turns into NaN; -100 is
#: finite, and exp(-100) is as good as 0.
FILL_LOGPROB = -100.0
#: The most by which probabilities of 16-bit log-probabilities may sum above 1; rounding moves each
#: log-probability by up to 2^-9 of its value.
_ROUNDING_16 = 1e-2

Float = Literal["float16", "bfloat16", "float32", "float64"]
#: numpy has no bfloat16: its bits are handled as integers.
_NUMPY = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "bfloat16": "<u2"}


class ResidualBin(Section):
    """The format of the residuals of consecutive entries: integers times a common scale."""

    scale_dtype: Float
    element_bits: int = Field(ge=1, le=32)
    num_elements: int = Field(ge=1)


class Compression(Section):
    """The content of ``compression_config.yaml``, with DistillKit's defaults."""

    d: int = Field(ge=2)
    k: int = Field(ge=1)
    exact_k: int = Field(ge=0)
    exact_dtype: Float = "float32"
    polynomial_terms: tuple[int | Literal["sqrt", "exp"], ...] | None = None
    term_dtype: Float = "float32"
    residual_bins: tuple[ResidualBin, ...]
    delta_encoding: bool = True
    error_diffusion: bool = False
    normalize_t: bool = False

    @model_validator(mode="after")
    def _require_consistent(self) -> Self:
        if self.exact_k > self.k:
            raise ValueError(f"exact_k {self.exact_k} is more than k {self.k}")
        if self.fitted and not self.polynomial_terms and not self.residual_bins:
            raise ValueError("exact_k below k needs polynomial_terms or residual_bins")
        if sum(each.num_elements for each in self.residual_bins) > self.k - self.exact_k:
            raise ValueError("residual_bins hold more elements than k - exact_k")
        return self

    @classmethod
    def read(cls, path: Path) -> Compression:
        """Read the configuration from a YAML file; raises ``DataError``."""
        try:
            return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            remedy = "DistillKit writes it beside the data; the bytes cannot be decoded without it."
            raise DataError(f"{path} does not exist.", remedy) from error
        except (ValidationError, yaml.YAMLError, UnicodeDecodeError) as error:
            detail = f"{path} is not a DistillKit compression configuration: {error}"
            raise DataError(detail, "Correct it.") from error

    def to_yaml(self) -> str:
        """Return the text of the file that ``read`` reads."""
        return yaml.safe_dump(self.model_dump(mode="json"))

    @property
    def fitted(self) -> bool:
        """True if some entries are stored as a curve with rounded residuals."""
        return self.exact_k < self.k

    @property
    def id_bits(self) -> int:
        """The number of bits in an id."""
        # float32, like DistillKit: above 2^24 the rounding can change the result.
        return int(np.ceil(np.log2(np.float32(self.d))))

    @property
    def id_bytes(self) -> int:
        """The number of bytes in the ids of a position."""
        return -(-self.k * self.id_bits // 8)

    @property
    def logprob_bytes(self) -> int:
        """The number of bytes in the log-probabilities of a position."""
        exact = self.exact_k * _get_byte_width(self.exact_dtype)
        curve = len(self.polynomial_terms or ()) * _get_byte_width(self.term_dtype)
        bins = self.residual_bins
        scales = sum(_get_byte_width(each.scale_dtype) for each in bins)
        return exact + curve + scales + sum(map(_count_packed_bytes, bins))

    @property
    def rounding(self) -> float:
        """The most by which the rounding of numbers may lift a sum of probabilities above 1."""
        return _ROUNDING_16 if _get_byte_width(self.exact_dtype) == 2 else MASS_TOLERANCE

    @cached_property
    def curve(self) -> NDArray[Any]:
        """The terms of the curve at each entry that is not exact, (K - exact_k, terms)."""
        count = self.k - self.exact_k
        t = np.linspace(0.0, 1.0, count) if self.normalize_t else np.arange(float(count))
        functions = {"sqrt": np.sqrt, "exp": np.exp}
        if not self.polynomial_terms:
            return np.zeros((count, 0))
        with np.errstate(over="ignore"):
            terms = [
                functions[term](t) if isinstance(term, str) else t**term
                for term in self.polynomial_terms
            ]
            return _round_to(np.stack(terms, axis=-1), self.term_dtype)


# ---------------------------------------------------------------------- bytes and numbers


def decode_entries(
    compression: Compression, logprob_bytes: NDArray[Any], id_bytes: NDArray[Any]
) -> tuple[Any, Any]:
    """Decode bytes (N, B) into ids (N, K) int64 and log-probabilities (N, K) float64."""
    ids = unpack_integers(id_bytes, compression.id_bits, compression.k)
    cut = compression.exact_k * _get_byte_width(compression.exact_dtype)
    exact = _from_bytes(logprob_bytes[:, :cut], compression.exact_dtype)
    terms = len(compression.polynomial_terms or ()) * _get_byte_width(compression.term_dtype)
    coefficients = _from_bytes(logprob_bytes[:, cut : cut + terms], compression.term_dtype)
    # Bytes of another configuration may overflow; the check of rows then finds the wrong values.
    with np.errstate(over="ignore", invalid="ignore"):
        fit = coefficients @ compression.curve.T
        fit += _decode_residuals(compression, logprob_bytes[:, cut + terms :])
        logprobs = np.concatenate([exact, fit], axis=1)
        return ids, np.cumsum(logprobs, axis=1) if compression.delta_encoding else logprobs


def _decode_residuals(compression: Compression, stored: NDArray[Any]) -> NDArray[Any]:
    parts = []
    used = 0
    for each in compression.residual_bins:
        width = _get_byte_width(each.scale_dtype)
        packed = _count_packed_bytes(each)
        scale = _from_bytes(stored[:, used : used + width], each.scale_dtype)
        begin = used + width
        integers = stored[:, begin : begin + packed]
        steps = unpack_integers(integers, each.element_bits, each.num_elements)
        half = 1 << (each.element_bits - 1)
        parts.append(scale * (2 * steps - 1 if each.element_bits == 1 else steps - half))
        used += width + packed
    rest = compression.k - compression.exact_k - sum(part.shape[1] for part in parts)
    return np.concatenate([*parts, np.zeros((len(stored), rest))], axis=1)


def encode_entries(
    compression: Compression, ids: NDArray[Any], logprobs: NDArray[Any]
) -> tuple[Any, Any]:
    """Encode ids and log-probabilities (N, K) into bytes (N, B): the inverse of ``decode_entries``.

    Entries are sorted here. Fitted entries lose precision.
    """
    order = np.argsort(-logprobs, axis=1, kind="stable")
    ids, values = (
        np.take_along_axis(each, order, axis=1) for each in (ids, logprobs.astype(np.float64))
    )
    if compression.delta_encoding:
        values = np.concatenate([values[:, :1], np.diff(values, axis=1)], axis=1)
    chunks = [_to_bytes(values[:, : compression.exact_k], compression.exact_dtype)]
    rest = values[:, compression.exact_k :]
    if compression.polynomial_terms:
        solved = np.linalg.lstsq(compression.curve, rest.T, rcond=None)[0].T
        chunks.append(_to_bytes(solved, compression.term_dtype))
        rest = rest - _round_to(solved, compression.term_dtype) @ compression.curve.T
    for each in compression.residual_bins:
        chunks += _encode_bin(each, rest[:, : each.num_elements], compression.error_diffusion)
        rest = rest[:, each.num_elements :]
    return np.concatenate(chunks, axis=1), pack_integers(ids, compression.id_bits)


def _encode_bin(spec: ResidualBin, values: NDArray[Any], diffuse: bool) -> list[NDArray[np.uint8]]:
    half = 1 << spec.element_bits - 1
    lowest, highest = (0, 1) if spec.element_bits == 1 else (-half, half - 1)
    largest = np.abs(values).max(axis=1, keepdims=True)
    scale = _round_to(np.where(largest == 0, 1.0, largest / max(-lowest, 1)), spec.scale_dtype)
    # A small scale may round to 0.
    wanted = np.divide(values, scale, out=np.zeros_like(values), where=scale > 0)
    steps = np.empty_like(wanted)
    error = np.zeros(len(values))
    for place in range(values.shape[1]):
        steps[:, place] = np.rint(wanted[:, place] + error).clip(lowest, highest)
        # Error diffusion adds the rounding error of an element to the next one.
        error = (wanted[:, place] + error - steps[:, place]) * diffuse
    return [
        _to_bytes(scale, spec.scale_dtype),
        pack_integers((steps - lowest).astype(np.int64), spec.element_bits),
    ]


def pack_integers(values: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Pack integers (N, n) into bytes (N, ceil(n bits / 8)): the lowest ``bits`` of each, highest
    bit first.
    """
    each = (values[..., None].astype(np.int64) >> np.arange(bits - 1, -1, -1)) & 1
    return np.packbits(each.astype(np.uint8).reshape(len(values), values.shape[1] * bits), axis=1)


def unpack_integers(stored: NDArray[Any], bits: int, count: int) -> NDArray[np.int64]:
    """Unpack ``count`` integers from each row of bytes: the inverse of ``pack_integers``."""
    flat = np.unpackbits(np.ascontiguousarray(stored), axis=1, count=count * bits)
    each = flat.reshape(len(stored), count, bits)
    return each.astype(np.int64) @ (1 << np.arange(bits - 1, -1, -1, dtype=np.int64))


def _count_packed_bytes(spec: ResidualBin) -> int:
    return -(-spec.num_elements * spec.element_bits // 8)


def _get_byte_width(dtype: Float) -> int:
    return np.dtype(_NUMPY[dtype]).itemsize


def _from_bytes(stored: NDArray[Any], dtype: Float) -> NDArray[np.float64]:
    values = np.ascontiguousarray(stored).view(_NUMPY[dtype])
    if dtype == "bfloat16":
        values = (values.astype("<u4") << 16).view("<f4")
    return values.astype(np.float64)


def _to_bytes(values: NDArray[Any], dtype: Float) -> NDArray[np.uint8]:
    if dtype == "bfloat16":
        values = round_to_bfloat16(values)
    width = values.shape[1] * _get_byte_width(dtype)
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(values.astype(_NUMPY[dtype]))
        return stored.view(np.uint8).reshape(len(values), width)


def _round_to(values: NDArray[Any], dtype: Float) -> NDArray[np.float64]:
    """Round ``values`` to ``dtype`` and back."""
    return _from_bytes(_to_bytes(values, dtype), dtype).reshape(values.shape)


# ---------------------------------------------------------------------- rows


def read_rows(path: Path, compression: Compression) -> Iterator[Row]:
    """Yield the rows of one Parquet file of a dataset.

    Two columns are optional: ``labels`` below 0 exclude a token as a target, and ``attention_mask``
    numbers the documents of a packed row. Raises ``DataError`` for a row whose bytes do not fit
    ``compression``.
    """
    for first, batch in read_table_batches(
        path, ("input_ids", LOGPROBS, INDICES), ("labels", "attention_mask")
    ):
        for index in range(len(batch)):
            yield _read_row(batch, index, f"{path}: row {first + index}", compression)


def _read_row(batch: Any, index: int, where: str, compression: Compression) -> Row:
    tokens = read_token_column(batch, index, where)
    logprob_bytes = _read_bytes(batch, LOGPROBS, index, where, compression.logprob_bytes)
    id_bytes = _read_bytes(batch, INDICES, index, where, compression.id_bytes)
    count = len(logprob_bytes)
    if len(id_bytes) != count or count not in (len(tokens) - 1, len(tokens)):
        raise DataError(
            f"{where} has {len(tokens)} tokens, {count} positions of {LOGPROBS} "
            f"and {len(id_bytes)} of {INDICES}.",
            "There must be as many positions as tokens, or one fewer.",
        )
    ids, logprobs = decode_entries(compression, logprob_bytes, id_bytes)
    logprobs = np.where(logprobs <= FILL_LOGPROB, -np.inf, logprobs)
    start = mark_one_document(len(tokens))
    wanted = np.ones(count, bool)
    if (documents := read_flat_column(batch, "attention_mask", index, where)) is not None:
        start[1:] |= documents[1:] != documents[:-1]
        wanted &= documents[:count] > 0
    if (labels := read_flat_column(batch, "labels", index, where)) is not None:
        wanted &= np.concatenate([labels[1:], labels[:1]])[:count] >= 0
    row = Row(where, tokens, start, np.arange(count), ids, logprobs, np.full(count, np.nan))
    row = replace(row, rounding=compression.rounding, fitted=compression.fitted)
    return row.keep(wanted)


def _read_bytes(batch: Any, name: str, index: int, where: str, expected: int) -> NDArray[np.uint8]:
    flat, counts = read_nested_column(batch, name, index, where)
    if (wrong := np.flatnonzero(counts != expected)).size:
        detail = (
            f"{where}, position {wrong[0]}: expected {expected} bytes of {name}, "
            f"but got {counts[wrong[0]]}."
        )
        raise DataError(detail, f"Give the {CONFIG} that the data was captured with.")
    return flat.astype(np.uint8).reshape(len(counts), expected)


def make_schema() -> Any:
    """Return the ``pyarrow.Schema`` of a dataset."""
    import pyarrow

    tokens = ("input_ids", pyarrow.list_(pyarrow.uint64()))
    per_position = pyarrow.list_(pyarrow.list_(pyarrow.uint8()))
    return pyarrow.schema([tokens, (LOGPROBS, per_position), (INDICES, per_position)])
