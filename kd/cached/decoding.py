"""Records to tensors that have a row for each position of a sequence.

    form     keys of a batch                          shapes
    records  records: the columns as stored           one row for each target, and for each entry
    entries  teacher_ids, teacher_weights             (B, L, E)
    ragged   teacher_ids, teacher_weights, _offsets   (E of all positions), (B L + 1)
    dense    teacher_probs                            (B, L, V)
    topk     teacher_ids, teacher_probs               (B, L, K)

``teacher_ids`` are int64, weights and probabilities float32.

Entries are a sample: the mean of their weights over draws is p, and -sum w log q is an unbiased
estimate of the cross-entropy with the teacher. With them comes ``teacher_entropy``, H(p) in nats,
or its mean over the sequence (``Codec.entropy_of``). Absent entries, and positions without a
target, have the weight 0. Form ``topk`` of a sampled profile has the tokens that the record holds
by themselves; all tokens above the threshold are among them. Their probabilities are sums of
units in profile threshold, but that of the next token.

Shapes: B sequences, L positions of a sequence, N positions with a target, E entries of a position
at most (for flat tensors: of all positions), V vocabulary, K most probable tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from cache.codec import Codec
from cache.records import Records, Sequences
from kd.loss.decoder import TargetDecoder
from kd.loss.sparse_targets import SparseTarget
from kd.loss.targets import TeacherTarget
from kd.loss.whole_targets import TopTarget
from kd.text.batches import make_batch
from kd.text.packing import compute_position_ids

#: A sequence or a batch: tensors by the names above; ``records`` has tensors by their columns.
Item = dict[str, Any]
Form = Literal["records", "entries", "ragged", "dense", "topk"]
#: The label of a token that is no target, as in transformers.
IGNORED = -100


@dataclass(frozen=True)
class Decoding:
    """How records are decoded: to which form, at which temperature, and how many with ``topk``."""

    form: Form = "records"
    temperature: float = 1.0
    k: int = 50

    def require_served(self, codec: Codec) -> None:
        """Raise ``ValueError`` if the records of ``codec`` cannot be decoded so."""
        forms = _list_forms(codec)
        if self.form not in forms:
            raise ValueError(
                f"form must be one of {', '.join(forms)} for a cache of profile {codec.profile}, "
                f"but got {self.form!r}."
            )
        if self.k < 1:
            raise ValueError(f"k must be at least 1, but got {self.k}.")
        if why := codec.why_unsupported(temperatures=(self.temperature,)):
            raise ValueError(f"{why}.")


def _list_forms(codec: Codec) -> tuple[Form, ...]:
    """Return the forms that the records of ``codec`` can be decoded to."""
    if codec.rules.sampled:
        return get_args(Form)
    return ("records", "dense", "topk") if codec.rules.any_divergence else ("records", "topk")


def decode_batch(
    sequences: Sequences, records: Records, decoder: TargetDecoder, decoding: Decoding
) -> Item:
    """Return the tensors of a batch in the form of ``decoding``.

    ``input_ids``, ``position_ids`` and ``labels`` are (B, L) in int64. Positions restart at each
    document. A label is the token itself where the position before it has a target, else -100, as
    models of transformers expect it: row l of the teacher belongs to the label at l + 1.
    """
    tensors = make_inputs(sequences)
    batch = make_batch(sequences, records)
    if decoding.form == "records":
        return tensors | {"records": batch.teacher}
    assert decoder.codec is not None
    targets = decoder.decode(batch.gold_N, batch.teacher, decoding.temperature)
    assert targets.teacher is not None
    rows = _Rows(batch.rows_N, tuple(tensors["input_ids"].shape))
    return tensors | _decode_form(targets.teacher, rows, decoder.codec.vocabulary_size, decoding)


def make_inputs(sequences: Sequences) -> dict[str, Tensor]:
    """Return ``input_ids``, ``position_ids`` and ``labels``."""
    tokens_BL = torch.from_numpy(sequences.tokens.astype("int64"))
    target_BL = torch.from_numpy(sequences.target_mask)
    labels_BL = torch.full_like(tokens_BL, IGNORED)
    labels_BL[:, 1:] = tokens_BL[:, 1:].where(target_BL[:, :-1], IGNORED)
    positions_BL = torch.from_numpy(compute_position_ids(sequences.document_start))
    return {"input_ids": tokens_BL, "position_ids": positions_BL, "labels": labels_BL}


@dataclass(frozen=True)
class _Rows:
    """The flat places of N positions in (B, L)."""

    rows_N: Tensor
    shape: tuple[int, ...]

    def spread(self, values_N: Tensor) -> Tensor:
        """Put the rows of N positions into (B, L, ...); other positions get 0."""
        out = values_N.new_zeros(self.shape[0] * self.shape[1], *values_N.shape[1:])
        out[self.rows_N] = values_N
        return out.view(*self.shape, *values_N.shape[1:])


def _decode_form(
    target: TeacherTarget, rows: _Rows, vocabulary: int, decoding: Decoding
) -> dict[str, Tensor]:
    positions = len(rows.rows_N)
    match decoding.form:
        case "entries":
            assert isinstance(target, SparseTarget)
            ids_NE, weights_NE = _pad_entries(target, target.weights_E)
            return {
                "teacher_ids": rows.spread(ids_NE),
                "teacher_weights": rows.spread(weights_NE),
                "teacher_entropy": rows.spread(target.entropy_N.float()),
            }
        case "ragged":
            assert isinstance(target, SparseTarget)
            counts_BL = rows.spread(target.offsets_N1.diff()).flatten()
            return {
                "teacher_ids": target.ids_E,
                "teacher_weights": target.weights_E.float(),
                "teacher_offsets": torch.cat([counts_BL.new_zeros(1), counts_BL.cumsum(0)]),
                "teacher_entropy": rows.spread(target.entropy_N.float()),
            }
        case "dense":
            return {"teacher_probs": rows.spread(_make_dense(target, positions, vocabulary))}
        case _:
            ids_NK, probs_NK = _find_most_probable(target, positions, vocabulary, decoding.k)
            return {"teacher_ids": rows.spread(ids_NK), "teacher_probs": rows.spread(probs_NK)}


def _pad_entries(target: SparseTarget, weights_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids (N, E) in int64 and weights (N, E) in float32, padded with 0."""
    counts_N = target.offsets_N1.diff()
    width = int(counts_N.max()) if len(counts_N) else 1
    # Entry e of position n goes to n * width + its rank, that is e + (n * width - offset of n).
    shift_N = torch.arange(len(counts_N)) * width - target.offsets_N1[:-1]
    place_E = shift_N.repeat_interleave(counts_N, output_size=len(target.ids_E))
    place_E += torch.arange(len(place_E))
    ids = target.ids_E.new_zeros(len(counts_N) * width)
    weights = torch.zeros(len(ids))
    ids[place_E] = target.ids_E
    weights[place_E] = weights_E.float()
    return ids.view(-1, width), weights.view(-1, width)


def _make_dense(target: TeacherTarget, positions: int, vocabulary: int) -> Tensor:
    """Return p or its sample, (N, V) in float32."""
    p_NV = torch.zeros(positions, vocabulary)
    target.take_chunk(slice(0, positions)).subtract_(p_NV, -1.0)
    return p_NV


def _find_most_probable(
    target: TeacherTarget, positions: int, vocabulary: int, k: int
) -> tuple[Tensor, Tensor]:
    """Return ids (N, K) and probabilities (N, K) in float32, most probable first."""
    if isinstance(target, TopTarget):
        return target.ids_NK[:, :k], target.p_NK[:, :k].float()
    if not isinstance(target, SparseTarget):
        probs_NK, ids_NK = _make_dense(target, positions, vocabulary).topk(min(k, vocabulary))
        return ids_NK, probs_NK
    assert target.tail_places_M is not None
    ids_NE, probs_NE = _pad_entries(target, target.weights_E.index_fill(0, target.tail_places_M, 0))
    probs_NK, rank_NK = probs_NE.topk(min(k, probs_NE.shape[1]))
    # An absent entry has the id 0, as padding has.
    return ids_NE.gather(1, rank_NK).where(probs_NK > 0, 0), probs_NK
