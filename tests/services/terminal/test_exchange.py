"""The commands ``kd cache import`` and ``kd cache export``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from bench.support.paths import ROOT
from bench.support.small.caches import make_cache, make_codec, make_identity
from cache.store import open_cache
from tests.support.commands import kd

TOKENIZER = ROOT / "examples" / "austen" / "teacher"


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """The answers of a vLLM server about two texts."""
    items = [None, {"6": {"logprob": -0.25, "rank": 1}, "9": {"logprob": -2.0, "rank": 2}}]
    items += [
        {
            "9": {"logprob": -0.5, "rank": 1},
            "7": {"logprob": -4.0, "rank": 5},
            "5": {"logprob": -1.5, "rank": 2},
        }
    ]
    rows = [{"prompt_token_ids": [5, 6, 7], "prompt_logprobs": items}] * 2
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "answers.jsonl"


def test_records_are_imported_and_exported_again(answers: Path, tmp_path: Path) -> None:
    home = ("--home", tmp_path / "home")
    arguments = (
        "cache",
        "import",
        "vllm",
        answers,
        "--tokenizer",
        TOKENIZER,
        "--teacher-name",
        "theirs",
        *home,
    )
    done = kd(*arguments, "--validation-fraction", "0.5", "--json")
    assert done.returncode == 0, done.stderr
    assert "import: writing" in done.stderr
    summary = json.loads(done.stdout)
    assert (summary["tokens"], summary["reused"]) == (4, False)
    store = open_cache(tmp_path / "home" / "caches" / summary["fingerprint"])
    assert (len(store.train), len(store.validation), store.codec.k) == (1, 1, 2)
    assert store.manifest.provenance.teacher_name == "theirs"
    (listed,) = json.loads(kd("cache", "ls", "--json", *home).stdout)
    assert (listed["profile"], listed["teacher"]) == ("topk", "theirs")
    assert kd("cache", "verify", summary["fingerprint"][:6], *home).returncode == 0
    again = kd(*arguments, "--validation-fraction", "0.5")
    assert re.search(r"^reused +yes$", again.stdout, re.MULTILINE)

    out = tmp_path / "out"
    done = kd(
        "cache", "export", summary["fingerprint"][:6], "--format", "parquet", "--out", out, *home
    )
    assert done.returncode == 0, done.stderr
    assert "train-00000.parquet, validation-00000.parquet" in done.stdout
    (row,) = pyarrow.parquet.read_table(out / "train-00000.parquet").to_pylist()
    assert row["ids"] == [[6, 9], [9, 5], []]
    assert row["logprobs"] == [[-0.25, -2.0], [-0.5, -1.5], []]
    np.testing.assert_allclose(row["gold_logprob"][:2], [-0.25, -4.0], atol=0.01)
    refused = kd(
        "cache", "export", summary["fingerprint"], "--format", "parquet", "--out", out, *home
    )
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "out is not empty" in refused.stderr


def test_a_wrong_import_is_a_sentence_and_leaves_nothing(answers: Path, tmp_path: Path) -> None:
    answers.write_text(answers.read_text().replace("-0.25", "0.25"))
    home = ("--home", tmp_path / "home")
    done = kd("cache", "import", "vllm", answers, "--tokenizer", TOKENIZER, *home)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "answers.jsonl: row 1, position 0: the probabilities sum to 1.4194, more than 1 + 0.001."
        in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "home" / "caches").exists()
    for wrong in (("--tokenizer", "nowhere"), ("--tokenizer", TOKENIZER, "--k", "0"), ()):
        assert kd("cache", "import", "vllm", answers, *wrong, *home).returncode in (1, 2)


def test_an_export_says_what_it_leaves_out(tmp_path: Path) -> None:
    identity = make_identity(codec=make_codec("threshold"))
    make_cache(tmp_path / "home" / "caches", identity)
    home = ("--home", tmp_path / "home")
    name = identity.fingerprint
    out = tmp_path / "out"
    arguments = ("cache", "export", name, "--format", "distillkit", "--out", out, *home)
    refused = kd(*arguments)
    assert refused.returncode == 1 and not out.exists()
    assert "DistillKit has no place for the sampled tail" in refused.stderr
    done = kd(*arguments, "--lossy")
    assert done.returncode == 0, done.stderr
    assert (
        "warning: DistillKit has no place for the sampled tail of profile threshold" in done.stderr
    )
    assert (tmp_path / "out" / "compression_config.yaml").is_file()
