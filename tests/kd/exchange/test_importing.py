"""Imports of every format, compared with the log-probabilities that were written, and exports read
by other tools.
"""

from __future__ import annotations

import gzip
import json
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from bench.support.paths import AUSTEN
from cache.checking.verify import verify_cache
from cache.rounding import ENTROPY_STEP, KNOWN_STEP, TOP_STEP, UNKNOWN, UNKNOWN_ENTROPY
from cache.store import Cache, open_cache
from kd.capture.log_mass import log_sum_exp
from kd.config.jobfile import parse_config
from kd.errors import ConfigError, DataError, Interrupted
from kd.exchange import distillkit, importing
from kd.exchange.distillkit import Compression, encode_entries
from kd.exchange.importing import ImportRequest, import_records
from kd.loss.decoder import TargetDecoder
from kd.progress import Monitor
from kd.text.batches import make_batch
from kd.training.preparing.requirements import require_entropies

TOKENIZER = AUSTEN / "teacher"
V = 2048
K = 6


@dataclass(frozen=True)
class Truth:
    """A row of tokens (L,), with the teacher's log-probabilities (L - 1, V) of all but the last."""

    tokens: np.ndarray
    logprobs: np.ndarray

    def top(self, k: int = K) -> tuple[np.ndarray, np.ndarray]:
        ids = np.argsort(-self.logprobs, axis=1)[:, :k]
        return ids, np.take_along_axis(self.logprobs, ids, 1)

    def gold(self) -> np.ndarray:
        return self.logprobs[np.arange(len(self.logprobs)), self.tokens[1:]]


def make_truth(seed: int, length: int) -> Truth:
    """Return a teacher that predicts most of the text."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, length)
    logits = rng.normal(0, 2, (length - 1, V))
    logits[np.arange(length - 1), tokens[1:]] += rng.choice(
        [0.0, 8.0, 14.0], length - 1, p=[0.3, 0.4, 0.3]
    )
    return Truth(tokens, logits - log_sum_exp(logits)[:, None])


TRUTHS = [make_truth(seed, length) for seed, length in enumerate((24, 9, 17, 30, 2, 12))]


# ---------------------------------------------------------------------- writers of the formats


def write_distillkit(folder: Path, **changes: Any) -> None:
    options = {"d": V + 1, "k": K, "exact_k": K, "residual_bins": [], "delta_encoding": False}
    compression = Compression.model_validate(options | changes)
    rows: dict[str, list[Any]] = {"input_ids": [], distillkit.LOGPROBS: [], distillkit.INDICES: []}
    for truth in TRUTHS:
        stored = encode_entries(compression, *truth.top(compression.k))
        rows["input_ids"].append(truth.tokens.tolist())
        for name, content in zip((distillkit.LOGPROBS, distillkit.INDICES), stored, strict=True):
            rows[name].append(content.tolist())
    folder.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(
        pyarrow.table(rows, schema=distillkit.make_schema()), folder / "data_0.parquet"
    )
    (folder / distillkit.CONFIG).write_text(compression.to_yaml())


def vllm_item(truth: Truth, place: int, k: int) -> dict[str, Any]:
    """Return a server's item of token ``place``: the token itself, then the K most probable."""
    ids, logprobs = (each[place - 1] for each in truth.top(k))
    own = int(truth.tokens[place])
    rank = int((truth.logprobs[place - 1] > truth.gold()[place - 1]).sum()) + 1
    item = {
        str(own): {"logprob": float(truth.gold()[place - 1]), "rank": rank, "decoded_token": "x"}
    }
    for number, (token, logprob) in enumerate(zip(ids.tolist(), logprobs.tolist(), strict=True), 1):
        item[str(token)] = {"logprob": logprob, "rank": number, "decoded_token": "y"}
    return item


def vllm_answer(truth: Truth, k: int = K) -> dict[str, Any]:
    items = [None, *(vllm_item(truth, place, k) for place in range(1, len(truth.tokens)))]
    return {"prompt_token_ids": truth.tokens.tolist(), "prompt_logprobs": items}


def write_vllm(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    answers = [
        {"id": "cmpl-1", "choices": [{"index": 0, **vllm_answer(truth)}]} for truth in TRUTHS
    ]
    with gzip.open(folder / "answers.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(answer) + "\n" for answer in answers)


def echoed(truth: Truth) -> dict[str, Any]:
    ids, logprobs = truth.top()
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    tops = [{f"token_id:{token}": lp for token, lp in zip(*pair, strict=True)} for pair in pairs]
    return {
        "tokens": [f"token_id:{token}" for token in truth.tokens],
        "token_logprobs": [None, *truth.gold().tolist()],
        "top_logprobs": [None, *tops],
    }


def write_echo(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    write_lines(
        folder / "answers.jsonl", ({"choices": [{"logprobs": echoed(truth)}]} for truth in TRUTHS)
    )


def axolotl_lists(truth: Truth) -> list[list[dict[str, Any]]]:
    return [
        [
            {"token": f"token_id:{token}", "logprob": logprob}
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        for ids, logprobs in zip(*(each.tolist() for each in truth.top()), strict=True)
    ]


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_axolotl(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    rows = (
        {"input_ids": truth.tokens.tolist(), "logprobs": axolotl_lists(truth)} for truth in TRUTHS
    )
    write_lines(folder / "rows.jsonl", rows)


def write_axolotl_v2(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    tops = [truth.top() for truth in TRUTHS]
    rows = {
        "input_ids": [truth.tokens.tolist() for truth in TRUTHS],
        "target_token_ids": [ids.tolist() for ids, _ in tops],
        "logprobs": [logprobs.tolist() for _, logprobs in tops],
    }
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "rows.parquet")


def write_axolotl_prepared(folder: Path) -> None:
    """Write rows like axolotl's dataset preparation, but unscaled: a list for every token, the
    first one padding.
    """
    folder.mkdir(exist_ok=True)
    tops = [truth.top() for truth in TRUTHS]
    rows = {
        "input_ids": [truth.tokens.tolist() for truth in TRUTHS],
        "labels": [truth.tokens.tolist() for truth in TRUTHS],
        "target_token_ids": [[list(range(K)), *ids.tolist()] for ids, _ in tops],
        "target_logprobs": [[[-np.inf] * K, *logprobs.tolist()] for _, logprobs in tops],
        "target_mask": [[[0] * K, *([1] * K for _ in logprobs)] for _, logprobs in tops],
    }
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "rows.parquet")


def write_parquet(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    tops = [truth.top() for truth in TRUTHS]
    rows = {
        "input_ids": [truth.tokens.tolist() for truth in TRUTHS],
        "ids": [ids.tolist() for ids, _ in tops],
        "logprobs": [logprobs.tolist() for _, logprobs in tops],
        "text": ["not read"] * len(TRUTHS),
    }
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "rows.parquet", row_group_size=2)


FITTED = {
    "exact_k": 2,
    "polynomial_terms": [0, 1, "sqrt"],
    "term_dtype": "float64",
    "normalize_t": True,
    "residual_bins": [{"scale_dtype": "float32", "element_bits": 16, "num_elements": 4}],
}
WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "distillkit": ("distillkit", write_distillkit),
    "distillkit, fitted": ("distillkit", lambda folder: write_distillkit(folder, **FITTED)),
    "vllm": ("vllm", write_vllm),
    "vllm, echo": ("vllm", write_echo),
    "axolotl": ("axolotl", write_axolotl),
    "axolotl, v2": ("axolotl", write_axolotl_v2),
    "axolotl, prepared": ("axolotl", write_axolotl_prepared),
    "parquet": ("parquet", write_parquet),
}


def imported(format: str, source: Path, root: Path, **changes: Any) -> Cache:
    request = replace(ImportRequest(format, (source,), TOKENIZER), **changes)
    summary = import_records(request, root)
    assert verify_cache(root / summary["fingerprint"]) == []
    return open_cache(root / summary["fingerprint"])


def decoded(store: Cache, number: int) -> dict[str, np.ndarray]:
    """Return the records of one sequence in nats: NaN if unknown, -inf if there is no entry."""
    _, records = store.read([number])

    def nats(name: str, step: float, nothing: float) -> np.ndarray:
        return np.where(records[name] == UNKNOWN, nothing, records[name].astype(float) * -step)

    return {
        "ids": records["top_ids"].astype(int),
        "logprobs": nats("top_logprobs", TOP_STEP, -np.inf),
        "residual": nats("residual", TOP_STEP, -np.inf),
        "gold": nats("known", KNOWN_STEP, np.nan)[:, 0],
        "entropy": records["entropy"],
    }


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_teachers_own_numbers(name: str, tmp_path: Path) -> None:
    kind, write = WRITERS[name]
    write(tmp_path / "source")
    store = imported(kind, tmp_path / "source", tmp_path / "caches")
    assert len(store) == len(store.train) == len(TRUTHS)
    assert store.identity.codec.k == K
    assert store.identity.data.sequence_length == 30
    assert store.identity.teacher.dtype == "imported"
    sequences, _ = store.read(range(len(TRUTHS)))
    for number, truth in enumerate(TRUTHS):
        length = len(truth.tokens)
        np.testing.assert_array_equal(sequences.tokens[number, :length], truth.tokens)
        np.testing.assert_array_equal(sequences.target_mask[number], np.arange(30) < length - 1)
        np.testing.assert_array_equal(
            np.flatnonzero(sequences.document_start[number]), [0, length][: 1 + (length < 30)]
        )
        found = decoded(store, number)
        (ids, logprobs) = truth.top()
        np.testing.assert_array_equal(found["ids"], ids)
        np.testing.assert_allclose(found["logprobs"], logprobs, atol=TOP_STEP)
        np.testing.assert_allclose(
            np.exp(found["residual"]), 1 - np.exp(logprobs).sum(1), atol=1e-3
        )
        among = (ids == truth.tokens[1:, None]).any(1)
        assert among.any()
        np.testing.assert_allclose(found["gold"][among], truth.gold()[among], atol=2 * KNOWN_STEP)
        if kind == "vllm":
            np.testing.assert_allclose(found["gold"], truth.gold(), atol=2 * KNOWN_STEP)
        else:
            assert np.isnan(found["gold"][~among]).all()
        assert (found["entropy"] == UNKNOWN_ENTROPY).all()


def test_long_rows_go_on_as_sequences_of_their_own(tmp_path: Path) -> None:
    write_parquet(tmp_path / "source")
    store = imported("parquet", tmp_path / "source", tmp_path / "caches", sequence_length=10)
    sequences, _ = store.read(range(len(store)))
    # 24 = 10 + 10 + 4, 9, 17 = 10 + 7, 30 = 10 + 10 + 10, 2, 12 = 10 + 2
    np.testing.assert_array_equal(
        sequences.target_mask.sum(1), [9, 9, 3, 8, 9, 6, 9, 9, 9, 1, 9, 1]
    )
    np.testing.assert_array_equal(sequences.tokens[2, :4], TRUTHS[0].tokens[20:])
    np.testing.assert_allclose(
        decoded(store, 2)["logprobs"], TRUTHS[0].top()[1][20:], atol=TOP_STEP
    )
    assert sequences.document_start[:, 0].all()


def test_fewer_entries_leave_more_outside(tmp_path: Path) -> None:
    write_parquet(tmp_path / "source")
    store = imported("parquet", tmp_path / "source", tmp_path / "caches", k=2)
    found = decoded(store, 0)
    np.testing.assert_array_equal(found["ids"], TRUTHS[0].top(2)[0])
    np.testing.assert_allclose(
        np.exp(found["residual"]), 1 - np.exp(TRUTHS[0].top(2)[1]).sum(1), atol=1e-3
    )
    third = TRUTHS[0].top(3)[0][:, 2] == TRUTHS[0].tokens[1:]
    assert np.isfinite(found["gold"][third]).all(), (
        "the gold token is known though its entry is cut off"
    )
    with pytest.raises(DataError, match="k is 7, but no record has more than 6"):
        imported("parquet", tmp_path / "source", tmp_path / "caches", k=7)


def test_the_end_is_held_out_or_files_that_are_called_so(tmp_path: Path) -> None:
    write_parquet(tmp_path / "source")
    store = imported("parquet", tmp_path / "source", tmp_path / "caches", validation_fraction=0.3)
    assert (len(store.train), len(store.validation)) == (4, 2)
    shutil.copy(tmp_path / "source" / "rows.parquet", tmp_path / "source" / "validation-0.parquet")
    both = imported("parquet", tmp_path / "source", tmp_path / "caches")
    assert (len(both.train), len(both.validation)) == (6, 6)
    with pytest.raises(DataError, match="and a validation fraction is given too"):
        imported("parquet", tmp_path / "source", tmp_path / "caches", validation_fraction=0.3)
    with pytest.raises(DataError, match="no sequence with a record to train on"):
        imported("parquet", tmp_path / "source" / "validation-0.parquet", tmp_path / "caches")


def test_a_cache_is_named_by_content_and_not_imported_twice(tmp_path: Path) -> None:
    write_distillkit(tmp_path / "source")
    request = ImportRequest("distillkit", (tmp_path / "source",), TOKENIZER)
    first, again = (import_records(request, tmp_path / "caches") for _ in range(2))
    assert (first["reused"], again["reused"]) == (False, True)
    assert first["fingerprint"] == again["fingerprint"]
    shutil.copytree(tmp_path / "source", tmp_path / "elsewhere")
    moved = import_records(replace(request, paths=(tmp_path / "elsewhere",)), tmp_path / "caches")
    assert moved["fingerprint"] == first["fingerprint"]
    names = [
        (replace(request, **change))
        for change in ({"k": 3}, {"sequence_length": 10}, {"validation_fraction": 0.2})
    ]
    others = {import_records(name, tmp_path / "caches")["fingerprint"] for name in names}
    assert len(others | {first["fingerprint"]}) == 4


def test_the_tokenizer_travels_with_the_cache(tmp_path: Path, tokenizer: Any) -> None:
    from kd.models.tokenizers import (
        KnownTokenizer,
        hash_tokenizer,
        make_token_map,
        require_same_tokenizer,
    )
    from kd.models.tokenizing.token_map import TokenMap

    write_vllm(tmp_path / "source")
    store = imported("vllm", tmp_path / "source", tmp_path / "caches", teacher_name="theirs")
    require_same_tokenizer(tokenizer, KnownTokenizer.of_cache(store))
    assert TokenMap.of_cache(store) == make_token_map(tokenizer, V)
    assert store.identity.tokenizer.sha256 == hash_tokenizer(tokenizer)
    assert store.identity.tokenizer.vocabulary_size == V
    assert store.manifest.provenance.teacher_name == "theirs"


def test_a_rare_next_token_may_be_named_beside_the_most_probable_ones(tmp_path: Path) -> None:
    """For k=K a server returns the K most probable entries and the text's own token."""
    truth = TRUTHS[3]
    logprobs = truth.logprobs.copy()
    logprobs[np.arange(len(logprobs)), truth.tokens[1:]] = -30.0
    logprobs -= log_sum_exp(logprobs)[:, None]
    ids = np.concatenate([np.argsort(-logprobs, axis=1)[:, :K], truth.tokens[1:, None]], 1)
    rows = [
        [
            {"token": f"token_id:{token}", "logprob": logprob}
            for token, logprob in zip(*row, strict=True)
        ]
        for row in zip(ids.tolist(), np.take_along_axis(logprobs, ids, 1).tolist(), strict=True)
    ]
    path = write_lines(
        tmp_path / "rows.jsonl", [{"input_ids": truth.tokens.tolist(), "logprobs": rows}] * 2
    )
    store = imported("axolotl", path, tmp_path / "caches")
    found = decoded(store, 0)
    np.testing.assert_array_equal(found["ids"][:, :K], ids[:, :K])
    own = logprobs[np.arange(len(logprobs)), truth.tokens[1:]]
    assert own.max() < -20.0
    np.testing.assert_allclose(found["gold"], own, atol=0.01)


def test_entropies_come_back_and_may_be_unknown(tmp_path: Path) -> None:
    write_parquet(tmp_path / "source")
    table = pyarrow.parquet.read_table(tmp_path / "source" / "rows.parquet")
    known = [-(np.exp(truth.logprobs) * truth.logprobs).sum(1) for truth in TRUTHS]
    column = [
        [None if place == 1 else value for place, value in enumerate(row.tolist())] for row in known
    ]
    with_entropy = table.append_column("entropy", pyarrow.array(column))
    pyarrow.parquet.write_table(with_entropy, tmp_path / "source" / "rows.parquet")
    store = imported("parquet", tmp_path / "source", tmp_path / "caches")
    for number, entropy in enumerate(known):
        codes = decoded(store, number)["entropy"]
        unknown = np.arange(len(codes)) == 1
        assert (codes[unknown] == UNKNOWN_ENTROPY).all()
        np.testing.assert_allclose(
            codes[~unknown] * ENTROPY_STEP, entropy[~unknown], atol=ENTROPY_STEP
        )
    column[0][0] = -1.0
    pyarrow.parquet.write_table(
        table.append_column("entropy", pyarrow.array(column)), tmp_path / "source" / "rows.parquet"
    )
    refused(
        "parquet",
        tmp_path / "source",
        tmp_path / "others",
        "row 1: entropy must not be negative, but got -1",
    )


def test_tokens_cannot_weigh_by_entropies_that_no_record_holds(tmp_path: Path) -> None:
    write_parquet(tmp_path / "source")
    source = imported("parquet", tmp_path / "source", tmp_path / "caches")
    job = {
        "kind": "train",
        "student": {"init": {"layers": 1, "hidden_size": 8, "tokenizer": "."}},
        "cache": {"fingerprint": source.fingerprint},
        "train": {"max_steps": 1},
    }
    require_entropies(parse_config(job).loss, source)
    with pytest.raises(ConfigError, match="which the records of this cache do not hold"):
        require_entropies(parse_config(job | {"loss": {"entropy_weighting": 1.0}}).loss, source)


def test_training_sees_the_imported_distributions(tmp_path: Path) -> None:
    write_axolotl(tmp_path / "source")
    source = imported("axolotl", tmp_path / "source", tmp_path / "caches")
    batch = make_batch(*source.read(np.arange(source.train_count)))
    target = (
        TargetDecoder.of(source, torch.device("cpu")).decode(batch.gold_N, batch.teacher).teacher
    )
    assert target is not None
    logits_NV = torch.randn(len(batch), V, generator=torch.Generator().manual_seed(0))
    ids, logprobs = (
        np.concatenate(each) for each in zip(*(truth.top() for truth in TRUTHS), strict=True)
    )
    s = logits_NV.double().numpy()
    outside = s.copy()
    np.put_along_axis(outside, ids, -np.inf, axis=1)
    rest = 1 - np.exp(logprobs).sum(1)
    expected = (np.exp(logprobs) * np.take_along_axis(s, ids, 1)).sum() + (
        rest * log_sum_exp(outside)
    ).sum()
    found = float(target.take_chunk(slice(0, len(batch))).compute_expected_N(logits_NV).sum())
    assert found == pytest.approx(expected, rel=2e-3)


def test_an_interrupted_import_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "SHARD_SEQUENCES", 2)
    write_parquet(tmp_path / "source")
    request = ImportRequest("parquet", (tmp_path / "source",), TOKENIZER)
    done: list[int] = []

    def listen(event: Any) -> None:
        done.append(event.data.get("done", 0))

    with pytest.raises(Interrupted):
        import_records(
            request, tmp_path / "caches", Monitor(listen, lambda: max(done, default=0) >= 2)
        )
    (folder,) = (path for path in (tmp_path / "caches").iterdir() if path.is_dir())
    assert len(list((folder / "seals").iterdir())) == 1
    seal = (folder / "seals" / "000000.json").stat()
    import_records(request, tmp_path / "caches")
    assert (folder / "seals" / "000000.json").stat().st_mtime_ns == seal.st_mtime_ns, (
        "a sealed shard is kept"
    )
    whole = import_records(request, tmp_path / "again")["fingerprint"]
    for file in (path for path in (tmp_path / "again" / whole).rglob("*") if path.is_file()):
        assert (
            file.read_bytes()
            == (folder / file.relative_to(tmp_path / "again" / whole)).read_bytes()
        ), file


# ---------------------------------------------------------------------- what is refused


def refused(format: str, source: Path, root: Path, why: str, **changes: Any) -> None:
    with pytest.raises(DataError, match=why):
        imported(format, source, root, **changes)
    assert not root.exists(), "nothing is written"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"d": 300_000}, "row 1, position 0: expected 15 bytes of bytepacked_indices, but got 9"),
        (
            {"k": 5, "exact_k": 5},
            "row 1, position 0: expected 20 bytes of compressed_logprobs, but got 24",
        ),
        ({"exact_dtype": "bfloat16"}, "expected 12 bytes of compressed_logprobs, but got 24"),
        (
            {"delta_encoding": True},
            "of the probability is missing, and cannot lie below the last entry",
        ),
        ({"exact_k": 0, "polynomial_terms": [0, 1, 2, 3, 4, "sqrt"]}, "row 1, position"),
    ],
)
def test_another_compression_configuration_is_noticed(
    change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    write_distillkit(tmp_path / "source")
    whole = Compression.read(tmp_path / "source" / distillkit.CONFIG)
    other = tmp_path / "other.yaml"
    other.write_text(Compression.model_validate(whole.model_dump() | change).to_yaml())
    refused("distillkit", tmp_path / "source", tmp_path / "caches", why, config=other)


def test_deltas_read_without_delta_encoding_are_noticed(tmp_path: Path) -> None:
    write_distillkit(tmp_path / "source", delta_encoding=True)
    imported("distillkit", tmp_path / "source", tmp_path / "caches")
    config = tmp_path / "source" / distillkit.CONFIG
    config.write_text(config.read_text().replace("delta_encoding: true", "delta_encoding: false"))
    refused(
        "distillkit", tmp_path / "source", tmp_path / "none", "the probabilities sum to|more than 1"
    )
    config.unlink()
    refused(
        "distillkit",
        tmp_path / "source",
        tmp_path / "none",
        "compression_config.yaml does not exist",
    )


def test_a_curve_read_over_another_range_is_noticed(tmp_path: Path) -> None:
    recommended = {
        "k": 64,
        "exact_k": 8,
        "polynomial_terms": [0, 1, 2, 3, 4, "sqrt"],
        "normalize_t": True,
    }
    write_distillkit(tmp_path / "source", **recommended)
    assert imported("distillkit", tmp_path / "source", tmp_path / "fine", k=8).codec.k == 8
    config = tmp_path / "source" / distillkit.CONFIG
    config.write_text(config.read_text().replace("normalize_t: true", "normalize_t: false"))
    refused("distillkit", tmp_path / "source", tmp_path / "caches", "row 1, position")


def test_rounding_in_16_bits_is_no_reason_to_refuse(tmp_path: Path) -> None:
    sure = Truth(np.array([5, 6, 7]), np.log(np.array([[0.5, 0.5 - 1e-9] + [1e-12] * (V - 2)] * 2)))
    TRUTHS.append(sure)
    try:
        write_distillkit(tmp_path / "source", exact_dtype="bfloat16")
    finally:
        TRUTHS.pop()
    store = imported("distillkit", tmp_path / "source", tmp_path / "caches")
    np.testing.assert_allclose(decoded(store, 6)["logprobs"][:, :2], np.log(0.5), atol=2 * TOP_STEP)
    assert np.isneginf(decoded(store, 6)["residual"]).all()
    refused(
        "distillkit",
        tmp_path / "source",
        tmp_path / "none",
        "row 7, position 0: .* 1.0017",
        tolerance=1e-3,
    )


def test_packed_and_masked_rows_of_distillkit(tmp_path: Path) -> None:
    compression = Compression(d=V, k=K, exact_k=K, residual_bins=(), delta_encoding=False)
    truth = TRUTHS[0]
    stored = encode_entries(compression, *truth.top())
    row = {
        "input_ids": [truth.tokens[:-1].tolist()],
        distillkit.LOGPROBS: [stored[0].tolist()],
        distillkit.INDICES: [stored[1].tolist()],
        "attention_mask": [[1] * 8 + [2] * 12 + [0] * 3],
        "labels": [[-100] * 4 + truth.tokens[4:-1].tolist()],
    }
    (tmp_path / "source").mkdir()
    pyarrow.parquet.write_table(pyarrow.table(row), tmp_path / "source" / "packed.parquet")
    (tmp_path / "source" / distillkit.CONFIG).write_text(compression.to_yaml())
    store = imported("distillkit", tmp_path / "source", tmp_path / "caches")
    sequences, _ = store.read([0])
    np.testing.assert_array_equal(np.flatnonzero(sequences.document_start[0]), [0, 8, 20])
    np.testing.assert_array_equal(
        np.flatnonzero(sequences.target_mask[0]), [3, 4, 5, 6, *range(8, 19)]
    )
    assert store.identity.data.packing


def spoil_own(answer: dict[str, Any], place: int, logprob: Any) -> None:
    """Change the log-probability of the token at ``place`` itself."""
    answer["prompt_logprobs"][place][str(answer["prompt_token_ids"][place])] = {"logprob": logprob}


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (
            lambda answer: answer["prompt_logprobs"].pop(),
            "row 1: 23 items of prompt_logprobs for 24 tokens",
        ),
        (
            lambda answer: answer["prompt_logprobs"].__setitem__(4, None),
            "row 1, token 4: 0 entries",
        ),
        (lambda answer: answer["prompt_logprobs"][4].clear(), "row 1, token 4: 0 entries"),
        (
            lambda answer: answer["prompt_token_ids"].__setitem__(4, 2047),
            "row 1, token 4: id 2047 is not among",
        ),
        (
            lambda answer: answer.pop("prompt_token_ids"),
            "has prompt_logprobs, but none of prompt_token_ids",
        ),
        (
            lambda answer: answer.pop("prompt_logprobs"),
            "is not an answer with prompt_logprobs: KeyError",
        ),
        (
            lambda answer: answer["prompt_logprobs"][3].update(x={"logprob": -1}),
            "is not an answer with prompt_logprobs",
        ),
        (
            lambda answer: spoil_own(answer, 5, math.nan),
            "row 1, token 5 is not an answer.*expected a log-probability, got nan",
        ),
        (
            lambda answer: spoil_own(answer, 5, math.inf),
            "row 1, token 5 is not an answer.*expected a log-probability, got inf",
        ),
        (
            lambda answer: spoil_own(answer, 5, "high"),
            "row 1, token 5 is not an answer.*could not convert.*'high'",
        ),
        (
            lambda answer: answer["prompt_logprobs"].__setitem__(5, [1]),
            "row 1, token 5 is not an answer.*AttributeError",
        ),
        (
            lambda answer: answer["prompt_token_ids"].__setitem__(0, 2.7),
            "whole number as a token id, got 2.7",
        ),
        (
            lambda answer: answer["prompt_token_ids"].__setitem__(0, 1 << 63),
            "whole number as a token id, got 9223",
        ),
        (
            lambda answer: answer["prompt_token_ids"].__setitem__(0, "2"),
            "whole number as a token id, got '2'",
        ),
        (
            lambda answer: answer.update(choices=[1]),
            r"row 1: choices must be a list of JSON objects, but got \[1\]",
        ),
        (
            lambda answer: answer.update(choices={"a": {}}),
            "row 1: choices must be a list of JSON objects",
        ),
        (
            lambda answer: answer["prompt_logprobs"][3].update({"99999": {"logprob": -1e-3}}),
            "lies outside|sum to",
        ),
    ],
)
def test_a_wrong_answer_of_a_server_is_named(
    spoil: Callable[[Any], object], why: str, tmp_path: Path
) -> None:
    answer = vllm_answer(TRUTHS[0])
    spoil(answer)
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps(answer))
    refused("vllm", file, tmp_path / "caches", why)


def test_what_vllm_writes_for_nothing_is_nothing(tmp_path: Path) -> None:
    answer = {
        "prompt_token_ids": [5, 6],
        "prompt_logprobs": [None, {"6": {"logprob": -0.0}, "7": {"logprob": -9999.0}}],
    }
    (tmp_path / "answers.jsonl").write_text(json.dumps(answer))
    found = decoded(imported("vllm", tmp_path / "answers.jsonl", tmp_path / "caches"), 0)
    np.testing.assert_array_equal(found["logprobs"], [[0.0, -np.inf]])
    assert np.isneginf(found["residual"]).all()


def test_records_of_another_token_are_noticed(tmp_path: Path) -> None:
    long = [make_truth(seed, 300) for seed in (7, 8)]
    rows = [
        {"input_ids": truth.tokens.tolist(), "logprobs": axolotl_lists(truth)} for truth in long
    ]
    own = write_lines(tmp_path / "own.jsonl", rows)
    refused(
        "axolotl", own, tmp_path / "none", "off by one.* token t in.* without --ahead", ahead=True
    )
    # A list for every token, as a trainer that does not shift reads them: the last is about a token
    # that is cut off.
    ahead = write_lines(
        tmp_path / "ahead.jsonl", [row | {"input_ids": row["input_ids"][:-1]} for row in rows]
    )
    refused("axolotl", ahead, tmp_path / "none", r"off by one.* token t \+ 2 in.* with --ahead")
    store = imported("axolotl", ahead, tmp_path / "caches", ahead=True)
    np.testing.assert_array_equal(decoded(store, 0)["ids"], long[0].top()[0][:-1])


def test_chats_and_answers_alone(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    )
    try:
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        messages = [
            {"role": "user", "content": "Will it rain?"},
            {"role": "assistant", "content": "Yes, it will."},
        ]
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    finally:
        tokenizer.chat_template = None
    answer = 5  # its last tokens
    lists: list[Any] = [
        [{"token": f"token_id:{token}", "logprob": -0.1}, {"token": "token_id:9", "logprob": -3.0}]
        for token in ids[-answer:]
    ]
    lists[1] = None
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages, "logprobs": lists}))
    store = imported(
        "axolotl", tmp_path / "chats.jsonl", tmp_path / "caches", tokenizer=tmp_path / "tokenizer"
    )
    sequences, _ = store.read([0])
    assert sequences.tokens[0].tolist() == ids
    last = len(ids) - 1
    np.testing.assert_array_equal(
        np.flatnonzero(sequences.target_mask[0]), [last - 5, last - 3, last - 2, last - 1]
    )
    np.testing.assert_allclose(decoded(store, 0)["gold"], -0.1, atol=2 * KNOWN_STEP)
    (tmp_path / "long.jsonl").write_text(json.dumps({"input_ids": [1, 2], "logprobs": lists}))
    refused(
        "axolotl",
        tmp_path / "long.jsonl",
        tmp_path / "none",
        "row 1 has 2 tokens, 5 lists of log-probabilities",
    )


def test_files_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    root = tmp_path / "caches"
    file = tmp_path / "rows.parquet"
    text = tmp_path / "rows.jsonl"
    refused("parquet", tmp_path / "none.parquet", root, "none.parquet does not exist")
    refused("parquet", tmp_path, root, "holds no file that ends in .parquet")
    refused("csv", tmp_path, root, "no format 'csv'")
    file.write_bytes(b"PAR1 and nothing else")
    refused("parquet", file, root, "cannot be read")
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": [[1, 2]]}), file)
    refused("parquet", file, root, "has no column ids; its columns: input_ids")
    pyarrow.parquet.write_table(
        pyarrow.table({"input_ids": [[1, 2]], "ids": [[[2]]], "weights": [[[1.0]]]}), file
    )
    refused("parquet", file, root, "no column logprobs, but weights of sampled entries")
    for ids, logprobs, why in (
        ([[[2], [3], [4]]], [[[-0.1]] * 3], "row 1: 2 tokens, 3 positions of ids"),
        ([[[2]]], [[[-0.1, -3.0]]], "row 1: 2 tokens, 1 positions of ids, 1 of logprobs"),
        ([[[None]]], [[[-0.1]]], "row 1: ids holds null"),
        ([None], [[[-0.1]]], "row 1: ids is not a list of lists"),
        ([[2]], [[-0.1]], "row 1: ids is not a list of lists"),
        ([[[2.7, 4.2]]], [[[-0.1, -3.0]]], "row 1: ids must hold whole numbers, but got 2.7"),
        ([[["2"]]], [[[-0.1]]], "row 1: ids must hold whole numbers, but got '2'"),
        ([[[2]]], [[["-0.1"]]], "row 1: logprobs must hold numbers, but got '-0.1'"),
    ):
        pyarrow.parquet.write_table(
            pyarrow.table({"input_ids": [[1, 2]], "ids": ids, "logprobs": logprobs}), file
        )
        refused("parquet", file, root, why)
    for more, why in (
        ({"gold_logprob": [["-0.1"]]}, "row 1: gold_logprob must hold numbers, but got '-0.1'"),
        ({"document_start": [[True]]}, "row 1: document_start has 1 items for 2 positions"),
    ):
        whole = {"input_ids": [[1, 2]], "ids": [[[2]]], "logprobs": [[[-0.1]]]}
        pyarrow.parquet.write_table(pyarrow.table(whole | more), file)
        refused("parquet", file, root, why)
    for content, why in (
        ("[1]", "row 1 is not a JSON object"),
        ("{}\n{", "row 2 cannot be read|row 1 is not an answer"),
    ):
        text.write_text(content)
        refused("vllm", text, root, why)
    text.with_suffix(".jsonl.gz").write_bytes(b"not gzip")
    refused("vllm", text.with_suffix(".jsonl.gz"), root, "cannot be read: it is not gzip")
    text.write_text('{"input_ids": [1, 2]}')
    refused("axolotl", text, root, "row 1 does not have axolotl's columns: KeyError")
    text.write_text('{"input_ids": [1, 2], "target_token_ids": [[2.7]], "logprobs": [[-0.1]]}')
    refused(
        "axolotl",
        text,
        root,
        "row 1 does not have axolotl's columns: .*whole number as a token id, got 2.7",
    )
