"""Records of other tools: formats are compared with bytes that those tools wrote, imports with log-
probabilities.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.support.paths import DATA
from kd.capture.log_mass import log1mexp, log_sum_exp
from kd.errors import DataError
from kd.exchange import distillkit
from kd.exchange.distillkit import (
    Compression,
    decode_entries,
    encode_entries,
    pack_integers,
    unpack_integers,
)
from kd.exchange.rows import Alignment, Row, check_row, mark_one_document, resize_row

CASES = json.loads((DATA / "distillkit.json").read_text())["cases"]


def hexadecimal(lines: list[str]) -> np.ndarray:
    return np.array([list(bytes.fromhex(line)) for line in lines], np.uint8)


# ---------------------------------------------------------------------- DistillKit's bytes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_distillkits_own_bytes_are_read(case: dict[str, Any]) -> None:
    compression = Compression.model_validate(case["config"])
    logprob_bytes, id_bytes = (
        hexadecimal(case[name]) for name in (distillkit.LOGPROBS, distillkit.INDICES)
    )
    assert compression.logprob_bytes == logprob_bytes.shape[1]
    assert compression.id_bytes == id_bytes.shape[1]
    ids, logprobs = decode_entries(compression, logprob_bytes, id_bytes)
    np.testing.assert_array_equal(ids, case["ids"])
    # Its decoder rounds what it returns to exact_dtype, and sums in it.
    coarse = compression.exact_dtype == "float16"
    np.testing.assert_allclose(
        logprobs, case["decoded"], rtol=2e-3 if coarse else 0, atol=4e-3 if coarse else 3e-6
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_what_is_written_is_as_close_as_what_distillkit_writes(case: dict[str, Any]) -> None:
    compression = Compression.model_validate(case["config"])
    truth = np.array(case["logprobs"])
    shuffle = np.random.default_rng(0).permuted(
        np.tile(np.arange(compression.k), (len(truth), 1)), axis=1
    )
    logprob_bytes, id_bytes = encode_entries(
        compression,
        *(np.take_along_axis(each, shuffle, 1) for each in (np.array(case["ids"]), truth)),
    )
    np.testing.assert_array_equal(id_bytes, hexadecimal(case[distillkit.INDICES]))
    ours = decode_entries(compression, logprob_bytes, id_bytes)[1]
    theirs = np.array(case["decoded"])
    assert np.square(ours - truth).mean() <= np.square(theirs - truth).mean() * 1.05 + 1e-9
    if not compression.polynomial_terms:
        np.testing.assert_array_equal(logprob_bytes, hexadecimal(case[distillkit.LOGPROBS]))


@given(st.integers(1, 32), st.integers(1, 9), st.integers(0, 5), st.randoms(use_true_random=False))
def test_bits_come_back(bits: int, count: int, rows: int, random: Any) -> None:
    values = np.array(
        [[random.getrandbits(bits) for _ in range(count)] for _ in range(rows)], np.int64
    )
    values = values.reshape(rows, count)
    stored = pack_integers(values, bits)
    assert stored.shape == (rows, -(-count * bits // 8))
    np.testing.assert_array_equal(unpack_integers(stored, bits, count), values)


@st.composite
def compressions(draw: Any) -> Compression:
    k = draw(st.integers(1, 24))
    exact_k = draw(st.integers(0, k))
    dtypes = st.sampled_from(["float16", "bfloat16", "float32", "float64"])
    rest = k - exact_k
    bins = []
    while rest and draw(st.booleans()):
        bins.append(
            {
                "scale_dtype": draw(dtypes),
                "element_bits": draw(st.integers(1, 16)),
                "num_elements": draw(st.integers(1, rest)),
            }
        )
        rest -= bins[-1]["num_elements"]
    terms = draw(
        st.lists(st.sampled_from([0, 1, 2, "sqrt", "exp"]), unique=True, min_size=0 if bins else 1)
    )
    return Compression(
        d=draw(st.integers(k + 1, 300_000)), k=k, exact_k=exact_k, exact_dtype=draw(dtypes),
        term_dtype="float64", polynomial_terms=terms, residual_bins=bins,
        delta_encoding=draw(st.booleans()), normalize_t=True,
    )  # fmt: skip


@settings(max_examples=60)
@given(compressions(), st.integers(0, 2**31))
def test_every_configuration_comes_back(compression: Compression, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logprobs = -np.sort(rng.exponential(2.0, (3, compression.k)), axis=1)
    ids = np.stack([rng.choice(compression.d, compression.k, replace=False) for _ in range(3)])
    logprob_bytes, id_bytes = encode_entries(compression, ids, logprobs)
    assert logprob_bytes.shape == (3, compression.logprob_bytes)
    assert id_bytes.shape == (3, compression.id_bytes)
    same, back = decode_entries(compression, logprob_bytes, id_bytes)
    np.testing.assert_array_equal(same, ids)
    width = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 1e-6, "float64": 1e-12}[
        compression.exact_dtype
    ]
    exact = np.abs(back - logprobs)[:, : compression.exact_k]
    assert (
        exact
        <= width * (1 + np.abs(logprobs[:, : compression.exact_k])) * max(compression.exact_k, 1)
    ).all()
    assert np.isfinite(back).all()


def test_a_configuration_comes_back_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / distillkit.CONFIG
    with pytest.raises(DataError, match="does not exist"):
        Compression.read(path)
    whole = Compression.model_validate(CASES[4]["config"])
    path.write_text(whole.to_yaml())
    assert Compression.read(path) == whole
    for text in (
        "d: [",
        "d: 300",
        "- 1",
        "{d: 300, k: 4, exact_k: 5, residual_bins: []}",
        "{d: 300, k: 4, exact_k: 2, residual_bins: []}",
    ):
        path.write_text(text)
        with pytest.raises(DataError, match="not a DistillKit compression configuration"):
            Compression.read(path)


# ---------------------------------------------------------------------- what is checked of a row


def make_row(tokens: Any, ids: Any, logprobs: Any, **changes: Any) -> Row:
    count = len(ids)
    values: dict[str, Any] = {
        "document_start": mark_one_document(len(tokens)),
        "positions": np.arange(count),
        "gold": np.full(count, np.nan),
    }
    arrays = (np.array(tokens), np.array(ids, np.int64), np.array(logprobs, float))
    return Row(
        "a file: row 3", arrays[0], ids=arrays[1], logprobs=arrays[2], **{**values, **changes}
    )


def test_the_residual_is_what_is_missing_to_the_last_digit() -> None:
    x = np.array([-1e-12, -1e-5, -0.5, -np.log(2), -1.0, -40.0])
    expected = [1e-12, -np.expm1(-1e-5), 1 - np.exp(-0.5), 0.5, 1 - np.exp(-1.0)]
    np.testing.assert_allclose(log1mexp(x), [*np.log(expected), -np.exp(-40.0)], rtol=1e-9)
    assert np.isneginf(log_sum_exp(np.full((2, 0), -np.inf))).all()
    row = check_row(make_row([5, 6, 7], [[1, 6], [2, 9]], np.log([[0.2, 0.7], [0.5, 0.25]])), 100)
    np.testing.assert_array_equal(row.ids, [[6, 1], [2, 9]])
    np.testing.assert_allclose(np.exp(row.residual), [0.1, 0.25])  # type: ignore[arg-type]
    np.testing.assert_allclose(row.gold, [np.log(0.7), np.nan])
    fewer = resize_row(row, 1)
    more = resize_row(row, 3)
    np.testing.assert_allclose(np.exp(fewer.residual), [0.3, 0.5])  # type: ignore[arg-type]
    assert np.isneginf(more.logprobs[:, 2]).all()
    np.testing.assert_array_equal(more.residual, row.residual)  # type: ignore[arg-type]


def test_a_tiny_excess_is_scaled_away_and_leaves_no_residual() -> None:
    row = check_row(make_row([5, 6], [[1, 6]], np.log([[0.3005, 0.7]])), 100)
    np.testing.assert_allclose(np.exp(row.logprobs).sum(), 1.0)
    assert np.isneginf(row.residual).all()  # type: ignore[arg-type]
    whole = check_row(make_row([5, 6], [[1, 6]], np.log([[0.3, 0.7 - 1e-8]])), 100)
    assert np.isneginf(whole.residual).all()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "p", "why"),
    [
        (
            [[1, 6]],
            [[0.31, 0.7]],
            "position 0: the probabilities sum to 1.01, more than 1 \\+ 0.001",
        ),
        ([[1, 100]], [[0.3, 0.5]], "position 0: id 100 lies outside the tokenizer's 100 tokens"),
        ([[1, 1]], [[0.3, 0.5]], "position 0: id 1 is named twice"),
        ([[1, -1]], [[0.3, 0.5]], "id -1 lies outside"),
        ([[1, 2]], [[0.3, np.nan]], "not finite"),
        ([[1, 2]], [[0.0, 0.0]], "not finite"),
        (
            [[1, 2]],
            [[0.5, 1e-9]],
            "position 0: 0.5000 of the probability is missing, and cannot lie below",
        ),
    ],
)
def test_a_wrong_record_is_named(ids: Any, p: Any, why: str) -> None:
    with np.errstate(divide="ignore"):
        row = make_row([5, 6], ids, np.log(p))
    with pytest.raises(DataError, match=why) as error:
        check_row(row, 100)
    assert error.value.detail.startswith("a file: row 3")


def test_a_residual_that_the_source_says_is_kept_but_must_fit() -> None:
    entries = [[1, 6]], np.log([[0.3, 0.7004]])
    row = check_row(make_row([5, 6], *entries, residual=np.log([1e-5])), 100)
    np.testing.assert_array_equal(np.exp(row.logprobs), [[0.7004, 0.3]])
    np.testing.assert_allclose(np.exp(row.residual), [1e-5])  # type: ignore[arg-type]
    with pytest.raises(
        DataError, match=r"position 0: the probabilities sum to 1.1004, more than 1"
    ):
        check_row(make_row([5, 6], *entries, residual=np.log([0.1])), 100)
    with pytest.raises(DataError, match=r"position 0: the probabilities sum to 0.9, less than 1"):
        check_row(make_row([5, 6], [[1, 6]], np.log([[0.3, 0.5]]), residual=np.log([0.1])), 100)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(DataError, match="row 3: token id 200 lies outside the tokenizer's 100"):
        check_row(make_row([5, 200], [[1]], [[-0.1]]), 100)


def test_records_that_predict_nothing_are_left_out() -> None:
    start = np.array([True, False, True, False])
    row = check_row(
        make_row([1, 2, 3, 4], [[2], [3], [4], [5]], [[-0.1]] * 4, document_start=start), 100
    )
    np.testing.assert_array_equal(row.positions, [0, 2])


@pytest.mark.parametrize(
    ("shift", "said"),
    [(0, "off by one.* token t in 100%"), (1, ""), (2, r"off by one.* token t \+ 2 in 100%")],
)
@pytest.mark.parametrize("records", [498, 10])
def test_records_of_another_token_are_noticed_in_few_records_too(
    shift: int, said: str, records: int
) -> None:
    tokens = np.random.default_rng(0).permutation(500)[: records + 2]
    row = make_row(tokens, np.roll(tokens, -shift)[:-2, None], np.full((records, 1), -0.1))
    alignment = Alignment()
    if not said:
        alignment.add(row)
        alignment.require(["x"])
        return
    with pytest.raises(DataError, match=rf"position \d+: the records are {said}"):
        alignment.add(row)


def test_a_row_whose_records_are_shifted_from_one_on_is_noticed() -> None:
    tokens = np.random.default_rng(0).permutation(500)[:300]
    ids = np.concatenate([tokens[1:150], tokens[151:]])[:, None]
    with pytest.raises(DataError, match=r"position 193: the records are off by one.*token t \+ 2"):
        Alignment().add(make_row(tokens[:-1], ids, np.full((298, 1), -0.1)))


def test_shifts_that_no_single_row_shows_are_noticed_in_many() -> None:
    alignment = Alignment()
    tokens = np.random.default_rng(0).permutation(500)
    for first in range(0, 60, 6):
        some = tokens[first : first + 6]
        alignment.add(make_row(some, some[:-1, None], np.full((5, 1), -0.1)))
    with pytest.raises(DataError, match=r"x: the records are off by one.* token t in 100%"):
        alignment.require(["x"])


def test_random_records_prove_nothing() -> None:
    rng = np.random.default_rng(0)
    chance = Alignment()
    logprobs = np.full((499, 3), -6.0)
    chance.add(make_row(rng.permutation(500), rng.integers(0, 500, (499, 3)), logprobs))
    chance.require(["x"])
