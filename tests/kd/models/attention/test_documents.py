"""The first key of each query says what a mask of transformers says."""

import itertools

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as masks

from kd.models.attention.documents import DocumentMask, find_document_starts, find_first_keys

L = 23
#: Rows whose documents have these lengths.
ROWS = [[23], [1, 4, 2, 16], [9, 14], [1] * 23]
POSITIONS_BL = torch.stack([torch.cat([torch.arange(each) for each in row]) for row in ROWS])
KINDS = {
    "causal": masks.causal_mask_function,
    "window 1": masks.sliding_window_causal_mask_function(1),
    "window 5": masks.sliding_window_causal_mask_function(5),
    "chunks": masks.chunked_causal_mask_function(4, torch.zeros(len(ROWS), dtype=torch.int64)),
}


def make_packed(kind: str) -> masks.Callable[..., Tensor]:
    """Return the function that transformers makes of ``kind`` for packed rows."""
    documents_BL = masks.find_packed_sequence_indices(POSITIONS_BL)
    assert documents_BL is not None
    return masks.packed_sequence_compatibility_function(KINDS[kind], POSITIONS_BL, documents_BL)


def expand(first_BL: Tensor) -> Tensor:
    """Return the mask (B, L, L) of which ``first_BL`` are the first keys."""
    place_L = torch.arange(first_BL.shape[1])
    return (place_L <= place_L[:, None]) & (place_L >= first_BL[:, :, None])


def expected_mask(kind: str) -> Tensor:
    mask = masks.sdpa_mask(
        len(ROWS), L, L, mask_function=make_packed(kind), allow_is_causal_skip=False
    )
    assert mask is not None
    return mask[:, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_have_the_mask_of_transformers(kind: str) -> None:
    starts_BL = find_document_starts(POSITIONS_BL)
    first_BL = find_first_keys(make_packed(kind), starts_BL)
    assert torch.equal(expand(first_BL), expected_mask(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_hides_its_documents_has_them_told(kind: str) -> None:
    first_BL = find_first_keys(KINDS[kind], find_document_starts(POSITIONS_BL))
    assert torch.equal(expand(first_BL), expected_mask(kind))


def test_documents_that_are_not_told_come_from_the_mask() -> None:
    unknown_BL = torch.zeros_like(POSITIONS_BL)
    first_BL = find_first_keys(make_packed("window 5"), unknown_BL, known=False)
    assert torch.equal(expand(first_BL), expected_mask("window 5"))


def test_a_mask_that_sees_ahead_has_no_first_keys() -> None:
    starts_BL = torch.zeros_like(POSITIONS_BL)
    blocks = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(POSITIONS_BL // 8))
    for function in (masks.bidirectional_mask_function, blocks):
        assert DocumentMask.of(find_first_keys(function, starts_BL, known=False)) is None


def make_mask(first_BL: Tensor) -> DocumentMask:
    mask = DocumentMask.of(first_BL)
    assert mask is not None
    return mask


def test_rows_are_cut_where_no_later_query_looks_back() -> None:
    first_BL = find_first_keys(make_packed("window 5"), find_document_starts(POSITIONS_BL))
    mask = make_mask(first_BL)
    lengths = [[len(span) for span in row] for row in mask.spans]
    assert lengths == ROWS
    assert [span.causal for span in mask.spans[1]] == [True, True, True, False]
    assert (mask.regular, mask.window, mask.longest, mask.causal) == (True, 5, 23, False)
    starts = [0, *itertools.accumulate(itertools.chain(*ROWS))]
    assert mask.bounds_C.tolist() == starts
    assert mask.bounds_C.dtype == torch.int32


def test_chunks_are_spans_of_their_own() -> None:
    first_BL = find_first_keys(make_packed("chunks"), find_document_starts(POSITIONS_BL))
    mask = make_mask(first_BL)
    assert [len(span) for span in mask.spans[2]] == [4, 4, 1, 4, 4, 4, 2]
    assert all(span.causal for row in mask.spans for span in row)
    assert mask.window is None


def test_windows_of_two_widths_are_not_regular() -> None:
    first_BL = torch.tensor([[0, 0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 3]])
    mask = make_mask(first_BL)
    assert not mask.regular
    assert mask.window is None
