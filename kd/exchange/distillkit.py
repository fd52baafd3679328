"""DistillKit's compressed log-probabilities, read and written in numpy.

A dataset is Parquet files whose rows hold ``input_ids``, and for each position a list of bytes in
``compressed_logprobs`` and in ``bytepacked_indices``; a ``compression_config.yaml`` beside them says what the bytes
mean. Record r is the distribution of token r + 1: the sampler leaves out the first prompt position, which has none, so
a row of n tokens has n - 1 records (n where the tool that packs rows has cut the last token off). It ends short rows
with one padding token, so that the last token of the text has a record too; that token is imported as it stands.

    bytes of a position    first the ``exact_k`` largest log-probabilities, then the coefficients of a curve through the
                           others over t = 0, 1, ... (or t from 0 to 1: ``normalize_t``), then for each residual bin a
                           scale and integers of ``element_bits``. With ``delta_encoding`` all of it describes the
                           differences of neighbours. Numbers are little-endian, bits most significant first.
    ids of a position      k times ceil(log2 d) bits, in the order of the log-probabilities

Format: arcee-ai/DistillKit, distillkit/compression, version 1 (the polynomial codec that came before stored logits and
is not read). It has no mark of its own: bytes read with another configuration decode to other numbers, so lengths are
checked here and everything else in ``kd.exchange.rows``.

P positions    k entries of a position    B bytes
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from cache.codec import bfloat16_bits
from kd.config.section import Section
from kd.errors import DataError
from kd.exchange.files import parquet_batches
from kd.exchange.parquet import flat_column, nested_column, token_column
from kd.exchange.rows import MASS_TOLERANCE, Row, one_document

CONFIG = "compression_config.yaml"
LOGPROBS, INDICES = "compressed_logprobs", "bytepacked_indices"
#: Probabilities of 16-bit log-probabilities may sum to so much more than 1: 2^-9 of each log-probability.
_ROUNDING_16 = 1e-2

Float = Literal["float16", "bfloat16", "float32", "float64"]
_NUMPY = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "bfloat16": "<u2"}


class Bin(Section):
    """Residuals of so many consecutive entries, as integers times a scale of their own."""

    scale_dtype: Float
    element_bits: int = Field(ge=1, le=32)
    num_elements: int = Field(ge=1)


class Compression(Section):
    """A ``compression_config.yaml``; defaults are DistillKit's."""

    d: int = Field(ge=2)
    k: int = Field(ge=1)
    exact_k: int = Field(ge=0)
    exact_dtype: Float = "float32"
    polynomial_terms: tuple[int | Literal["sqrt", "exp"], ...] | None = None
    term_dtype: Float = "float32"
    residual_bins: tuple[Bin, ...]
    delta_encoding: bool = True
    error_diffusion: bool = False
    normalize_t: bool = False

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.exact_k > self.k:
            raise ValueError(f"exact_k {self.exact_k} is more than k {self.k}")
        if self.fitted and not self.polynomial_terms and not self.residual_bins:
            raise ValueError("exact_k below k needs polynomial_terms or residual_bins")
        if sum(each.num_elements for each in self.residual_bins) > self.k - self.exact_k:
            raise ValueError("residual_bins hold more elements than k - exact_k")
        return self

    @classmethod
    def read(cls, path: Path) -> Compression:
        """The configuration in the YAML file at ``path``; raises ``DataError``."""
        try:
            return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            remedy = "It is written beside the data when it is captured; without it the bytes mean nothing."
            raise DataError(f"{path} does not exist.", remedy) from error
        except (ValidationError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is no DistillKit compression configuration: {error}", "Correct it.") from error

    def to_yaml(self) -> str:
        """The file that ``read`` reads."""
        return yaml.safe_dump(self.model_dump(mode="json"))

    @property
    def fitted(self) -> bool:
        """Whether some entries are a curve and rounded residuals, not numbers of their own."""
        return self.exact_k < self.k

    @property
    def id_bits(self) -> int:
        """Bits of an id."""
        return int(np.ceil(np.log2(np.float32(self.d))))

    @property
    def id_bytes(self) -> int:
        """Bytes of a position's ids."""
        return -(-self.k * self.id_bits // 8)

    @property
    def logprob_bytes(self) -> int:
        """Bytes of a position's log-probabilities."""
        own = self.exact_k * _width(self.exact_dtype) + len(self.polynomial_terms or ()) * _width(self.term_dtype)
        return own + sum(_width(each.scale_dtype) + _packed_bytes(each) for each in self.residual_bins)

    @property
    def rounding(self) -> float:
        """How far the rounding of numbers lifts a sum of probabilities above 1."""
        return _ROUNDING_16 if _width(self.exact_dtype) == 2 else MASS_TOLERANCE

    @cached_property
    def curve(self) -> NDArray[Any]:
        """The terms at each entry that is not exact, (k - exact_k, terms)."""
        count = self.k - self.exact_k
        t = np.linspace(0.0, 1.0, count) if self.normalize_t else np.arange(float(count))
        functions = {"sqrt": np.sqrt, "exp": np.exp}
        with np.errstate(over="ignore"):
            terms = [functions[term](t) if isinstance(term, str) else t**term for term in self.polynomial_terms or ()]
            return _rounded(np.stack(terms, axis=-1), self.term_dtype) if terms else np.zeros((count, 0))


# ---------------------------------------------------------------------- bytes and numbers


def decode(compression: Compression, logprob_bytes: NDArray[Any], id_bytes: NDArray[Any]) -> tuple[Any, Any]:
    """Ids (P, k) int64 and log-probabilities (P, k) float64 of the bytes (P, B) of each."""
    ids = unpack(id_bytes, compression.id_bits, compression.k)
    cut = compression.exact_k * _width(compression.exact_dtype)
    exact = _from_bytes(logprob_bytes[:, :cut], compression.exact_dtype)
    terms = len(compression.polynomial_terms or ()) * _width(compression.term_dtype)
    coefficients = _from_bytes(logprob_bytes[:, cut : cut + terms], compression.term_dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # of another configuration; found out when rows are checked
        fit = coefficients @ compression.curve.T
        fit += _residuals(compression, logprob_bytes[:, cut + terms :])
        logprobs = np.concatenate([exact, fit], axis=1)
        return ids, np.cumsum(logprobs, axis=1) if compression.delta_encoding else logprobs


def _residuals(compression: Compression, stored: NDArray[Any]) -> NDArray[Any]:
    parts, used = [], 0
    for each in compression.residual_bins:
        width, packed = _width(each.scale_dtype), _packed_bytes(each)
        scale = _from_bytes(stored[:, used : used + width], each.scale_dtype)
        steps = unpack(stored[:, used + width : used + width + packed], each.element_bits, each.num_elements)
        parts.append(scale * (2 * steps - 1 if each.element_bits == 1 else steps - (1 << (each.element_bits - 1))))
        used += width + packed
    rest = compression.k - compression.exact_k - sum(part.shape[1] for part in parts)
    return np.concatenate([*parts, np.zeros((len(stored), rest))], axis=1)


def encode(compression: Compression, ids: NDArray[Any], logprobs: NDArray[Any]) -> tuple[Any, Any]:
    """The bytes (P, B) of log-probabilities and of ids: the inverse of ``decode``, as far as the format is exact.

    ``ids`` and ``logprobs`` are (P, k); they are sorted here.
    """
    order = np.argsort(-logprobs, axis=1, kind="stable")
    ids, values = (np.take_along_axis(each, order, axis=1) for each in (ids, logprobs.astype(np.float64)))
    if compression.delta_encoding:
        values = np.concatenate([values[:, :1], np.diff(values, axis=1)], axis=1)
    chunks = [_to_bytes(values[:, : compression.exact_k], compression.exact_dtype)]
    rest = values[:, compression.exact_k :]
    if compression.polynomial_terms:
        solved = np.linalg.lstsq(compression.curve, rest.T, rcond=None)[0].T
        chunks.append(_to_bytes(solved, compression.term_dtype))
        rest = rest - _rounded(solved, compression.term_dtype) @ compression.curve.T
    for each in compression.residual_bins:
        chunks += _binned(each, rest[:, : each.num_elements], compression.error_diffusion)
        rest = rest[:, each.num_elements :]
    return np.concatenate(chunks, axis=1), pack(ids, compression.id_bits)


def _binned(spec: Bin, values: NDArray[Any], diffuse: bool) -> list[NDArray[np.uint8]]:
    half = 1 << spec.element_bits - 1
    lowest, highest = (0, 1) if spec.element_bits == 1 else (-half, half - 1)
    largest = np.abs(values).max(axis=1, keepdims=True)
    scale = _rounded(np.where(largest == 0, 1.0, largest / max(-lowest, 1)), spec.scale_dtype)
    wanted = np.divide(values, scale, out=np.zeros_like(values), where=scale > 0)  # a scale may round to 0
    steps, error = np.empty_like(wanted), np.zeros(len(values))
    for place in range(values.shape[1]):
        steps[:, place] = np.rint(wanted[:, place] + error).clip(lowest, highest)
        error = (wanted[:, place] + error - steps[:, place]) * diffuse  # handed on to the next element
    return [_to_bytes(scale, spec.scale_dtype), pack((steps - lowest).astype(np.int64), spec.element_bits)]


def pack(values: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Integers (P, n) as bytes (P, ceil(n bits / 8)), each by its lowest ``bits``, most significant first."""
    each = (values[..., None].astype(np.int64) >> np.arange(bits - 1, -1, -1)) & 1
    return np.packbits(each.astype(np.uint8).reshape(len(values), values.shape[1] * bits), axis=1)


def unpack(stored: NDArray[Any], bits: int, count: int) -> NDArray[np.int64]:
    """The ``count`` integers of each row: the inverse of ``pack``."""
    each = np.unpackbits(np.ascontiguousarray(stored), axis=1, count=count * bits).reshape(len(stored), count, bits)
    return each.astype(np.int64) @ (1 << np.arange(bits - 1, -1, -1, dtype=np.int64))


def _packed_bytes(spec: Bin) -> int:
    return -(-spec.num_elements * spec.element_bits // 8)


def _width(dtype: Float) -> int:
    return np.dtype(_NUMPY[dtype]).itemsize


def _from_bytes(stored: NDArray[Any], dtype: Float) -> NDArray[np.float64]:
    values = np.ascontiguousarray(stored).view(_NUMPY[dtype])
    if dtype == "bfloat16":
        values = (values.astype("<u4") << 16).view("<f4")
    return values.astype(np.float64)


def _to_bytes(values: NDArray[Any], dtype: Float) -> NDArray[np.uint8]:
    if dtype == "bfloat16":
        values = bfloat16_bits(values)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values.astype(_NUMPY[dtype])).view(np.uint8).reshape(len(values), -1)


def _rounded(values: NDArray[Any], dtype: Float) -> NDArray[np.float64]:
    """``values`` as they come back from ``dtype``."""
    return _from_bytes(_to_bytes(values, dtype), dtype).reshape(values.shape)


# ---------------------------------------------------------------------- rows


def rows(path: Path, compression: Compression) -> Iterator[Row]:
    """The rows of one Parquet file of a dataset.

    ``labels`` below 0 leave a token out as a target, ``attention_mask`` numbers the documents of a packed row, where
    there are such columns. Raises ``DataError`` naming the row whose bytes are not of ``compression``.
    """
    for first, batch in parquet_batches(path, ("input_ids", LOGPROBS, INDICES), ("labels", "attention_mask")):
        for index in range(len(batch)):
            yield _row(batch, index, f"{path}: row {first + index}", compression)


def _row(batch: Any, index: int, where: str, compression: Compression) -> Row:
    tokens = token_column(batch, index, where)
    logprob_bytes = _bytes(batch, LOGPROBS, index, where, compression.logprob_bytes)
    id_bytes = _bytes(batch, INDICES, index, where, compression.id_bytes)
    count = len(logprob_bytes)
    if len(id_bytes) != count or count not in (len(tokens) - 1, len(tokens)):
        raise DataError(
            f"{where} has {len(tokens)} tokens, {count} positions of {LOGPROBS} and {len(id_bytes)} of {INDICES}.",
            "There must be as many positions as tokens, or one fewer.",
        )
    ids, logprobs = decode(compression, logprob_bytes, id_bytes)
    start, wanted = one_document(len(tokens)), np.ones(count, bool)
    if (documents := flat_column(batch, "attention_mask", index, where)) is not None:
        start[1:] |= documents[1:] != documents[:-1]
        wanted &= documents[:count] > 0
    if (labels := flat_column(batch, "labels", index, where)) is not None:
        wanted &= np.concatenate([labels[1:], labels[:1]])[:count] >= 0
    gold = np.full(count, np.nan)
    row = Row(
        where, tokens, start, np.arange(count), ids, logprobs, gold, None, compression.rounding, compression.fitted
    )
    return row.keep(wanted)


def _bytes(batch: Any, name: str, index: int, where: str, expected: int) -> NDArray[np.uint8]:
    flat, counts = nested_column(batch, name, index, where)
    if (wrong := np.flatnonzero(counts != expected)).size:
        detail = f"{where}, position {wrong[0]}: expected {expected} bytes of {name}, but got {counts[wrong[0]]}."
        raise DataError(detail, f"Give the {CONFIG} that the data was captured with.")
    return flat.astype(np.uint8).reshape(len(counts), expected)


def schema() -> Any:
    """The ``pyarrow.Schema`` of a dataset."""
    import pyarrow

    per_position = pyarrow.list_(pyarrow.list_(pyarrow.uint8()))
    names = [("input_ids", pyarrow.list_(pyarrow.uint64())), (LOGPROBS, per_position), (INDICES, per_position)]
    return pyarrow.schema(names)
