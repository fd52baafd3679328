"""Estimates compared with real captures, and captures refused for lack of disk space."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from bench.support.paths import ROOT
from bench.support.small.caches import make_codec, make_identity
from bench.support.waiting import PATIENCE_SECONDS
from cache.codec import Codec
from cache.errors import StorageError
from cache.manifest import CacheIdentity
from cache.records import Sequences
from cache.remote.address import bind_caches
from cache.store import open_cache
from kd.capture.estimate import storage, text
from kd.capture.estimate.job import estimate_by_table, make_estimate
from kd.capture.estimate.storage import (
    CacheSize,
    estimate_bytes,
    estimate_cache_size,
    require_space,
)
from kd.capture.estimate.text import CaptureSize
from kd.capture.plan import plan_capture
from kd.capture.recording import TeacherReading
from kd.capture.teacher import Teacher
from kd.client.wire.plans import JobEstimate
from kd.config.job import JobConfig
from kd.config.jobfile import load_config, parse_config
from kd.errors import ConfigError, DataError
from kd.forecast import trial
from kd.forecast.rehearsal import estimate_job
from kd.progress import SILENT, Event, Monitor
from kd.stages.capture import run_precompute

pytestmark = pytest.mark.usefixtures("one_thread")

PROFILES: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.02, "always_keep": [0, 7]},
    "tempered": {"profile": "tempered", "threshold": 0.1},
    "topk": {"profile": "topk", "k": 16},
    "dense": {"profile": "dense"},
    "hidden": {"profile": "hidden"},
}


def job(
    teacher: Path, text: Path | str, data: dict[str, Any] | None = None, **options: Any
) -> JobConfig:
    raw = {"train": str(text), "sequence_length": 64, "validation_fraction": 0.1}
    cut = {"shard_sequences": 32, **options}
    return parse_config(
        {
            "kind": "precompute",
            "teacher": {"model": str(teacher)},
            "data": raw | (data or {}),
            "cache": cut,
        }
    )


def estimate_by_trial(config: JobConfig, home: Path) -> JobEstimate:
    found = estimate_job(config, home).capture
    assert found is not None
    return found


# ---------------------------------------------------------------------- by a trial


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.long
def test_a_trial_foretells_the_capture(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path, name: str
) -> None:
    config = job(tiny_teacher, tiny_text, **PROFILES[name])
    estimate = estimate_by_trial(config, tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing of a trial stays"
    fingerprint = run_precompute(config, tmp_path, tmp_path / "run", SILENT).cache["fingerprint"]
    store = open_cache(tmp_path / "caches" / fingerprint)
    data = store.identity.data
    assert estimate.positions == pytest.approx(store.manifest.positions, rel=0.1)
    assert estimate.shards == pytest.approx(len(store.manifest.shards), rel=0.1)
    assert estimate.train_sequences == pytest.approx(data.train_sequences, rel=0.1)
    assert estimate.validation_sequences == pytest.approx(data.validation_sequences, abs=2)
    assert estimate.tokens == pytest.approx(data.sequences * 64, rel=0.1)
    assert estimate.bytes_per_token == pytest.approx(store.bytes_per_token, rel=0.15)
    assert estimate.method == "trial" and not estimate.tokens_counted and estimate.fits
    assert estimate.seconds is not None and estimate.seconds > 0
    assert estimate.hours == pytest.approx(estimate.seconds / 3600, abs=1e-3)
    assert estimate.device == "cpu, 1 threads"


@pytest.mark.long
def test_a_trial_stops_when_it_has_enough(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(tiny_teacher, tiny_text, profile="dense")
    read = []
    inner = Teacher.deliver

    def counted(self: Teacher, sequences: Sequences, first: int) -> Iterator[TeacherReading]:
        for delivery in inner(self, sequences, first):
            read.append(delivery.sequences)
            yield delivery

    with monkeypatch.context() as patch:
        patch.setattr(Teacher, "deliver", counted)
        patch.setattr(trial, "RECORD_BYTES", 1)
        one_batch = estimate_by_trial(config, tmp_path)
    assert read == [8]
    assert one_batch.bytes_per_token == pytest.approx(
        estimate_by_trial(config, tmp_path).bytes_per_token, rel=0.05
    )


# ---------------------------------------------------------------------- by the table


def sentences(count: int) -> list[str]:
    text = (ROOT / "examples/austen/text/persuasion.txt").read_text(encoding="utf-8")
    return [line.strip() for line in text.split(". ") if len(line) > 40][:count]


def write_jsonl(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"text": line, "id": n}) + "\n" for n, line in enumerate(sentences(2000))
        )
    )
    return path


def write_gzip(folder: Path) -> Path:
    path = folder / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(write_jsonl(folder).read_bytes()))
    return path


def write_zstd(folder: Path) -> Path:
    path = folder / "rows.jsonl.zst"
    rows = write_jsonl(folder).read_bytes()
    path.write_bytes(pyarrow.compress(rows, codec="zstd", asbytes=True))
    return path


def write_array(folder: Path) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps([{"text": line} for line in sentences(500)]))
    return path


def write_files(folder: Path) -> Path:
    (folder / "many").mkdir()
    for number, line in enumerate(sentences(60)):
        (folder / "many" / f"{number:03}.txt").write_text(line * (1 + number % 5))
    return folder / "many"


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("write", [write_jsonl, write_gzip, write_zstd, write_array, write_files])
def test_tokens_are_counted_in_a_sample(
    tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, packing: bool
) -> None:
    monkeypatch.setattr(text, "SAMPLE_BYTES", 1 << 16)
    config = job(tiny_teacher, write(tmp_path), {"packing": packing})
    estimate = estimate_by_table(config, Path(), tmp_path)
    corpus = plan_capture(config).corpus
    assert estimate.tokens == pytest.approx(
        (len(corpus.train) + len(corpus.validation)) * 64, rel=0.15
    )
    assert estimate.positions == pytest.approx(
        corpus.train.positions + corpus.validation.positions, rel=0.15
    )
    assert estimate.validation_sequences == pytest.approx(
        len(corpus.validation), abs=max(3, 0.2 * len(corpus.validation))
    )
    assert estimate.method == "table" and not estimate.tokens_counted
    assert estimate.seconds is None and estimate.hours is None


def test_a_gzip_file_is_estimated_without_pyarrow(
    tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "SAMPLE_BYTES", 1 << 16)
    config = job(tiny_teacher, write_gzip(tmp_path))
    expected = estimate_by_table(config, Path(), tmp_path).tokens
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert estimate_by_table(config, Path(), tmp_path).tokens == expected


def test_a_text_that_is_read_whole_is_counted_right(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    config = job(tiny_teacher, tiny_text, {"max_train_samples": 40, "max_eval_samples": 3})
    estimate = estimate_by_table(config, Path(), tmp_path)
    corpus = plan_capture(config).corpus
    assert (estimate.train_sequences, estimate.validation_sequences) == (40, 3)
    assert estimate.positions == pytest.approx(
        corpus.train.positions + corpus.validation.positions, rel=0.01
    )
    assert estimate.shards == 2


def test_of_chats_only_answers_have_records(tiny_teacher: Path, tmp_path: Path) -> None:
    chat = {
        "messages": [
            {"role": "user", "content": "a b c " * 30},
            {"role": "assistant", "content": "d e f " * 10},
        ]
    }
    (tmp_path / "chat.jsonl").write_text((json.dumps(chat) + "\n") * 200)
    of_answers, of_all = (
        estimate_by_table(
            job(
                tiny_teacher,
                tmp_path / "chat.jsonl",
                {"format": "messages", "assistant_only_loss": only},
            ),
            Path(),
            tmp_path,
        )
        for only in (True, False)
    )
    assert of_answers.tokens == of_all.tokens
    assert of_answers.positions == pytest.approx(of_all.positions / 4, rel=0.1)


@pytest.mark.parametrize(
    ("format", "row"),
    [
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        ),
        ("alpaca", {"instruction": "Q", "output": "A"}),
        ("prompt_completion", {"prompt": "Q", "completion": "A"}),
    ],
)
def test_of_other_formats_only_answers_have_records(
    tiny_teacher: Path, tmp_path: Path, format: str, row: Any
) -> None:
    text = json.dumps(row).replace('"Q"', '"' + "a b c " * 30 + '"')
    (tmp_path / "a.jsonl").write_text((text.replace('"A"', '"' + "d e f " * 10 + '"') + "\n") * 200)
    of_answers, of_all = (
        estimate_by_table(
            job(
                tiny_teacher,
                tmp_path / "a.jsonl",
                {"format": format, "assistant_only_loss": only},
            ),
            Path(),
            tmp_path,
        )
        for only in (True, False)
    )
    assert of_answers.tokens == of_all.tokens
    assert of_answers.positions == pytest.approx(of_all.positions / 4, rel=0.1)


def test_the_size_of_a_saved_dataset_is_not_guessed(tiny_teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": []}')
    with pytest.raises(ConfigError, match="not known without reading it"):
        estimate_by_table(job(tiny_teacher, tmp_path / "set"), Path(), tmp_path)


def test_a_message_may_have_no_content(tiny_teacher: Path, tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    for number, message in enumerate((call, call | {"content": None})):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(
            (json.dumps({"messages": [{"role": "user", "content": "a b c " * 30}, message]}) + "\n")
            * 50
        )
        assert (
            estimate_by_table(
                job(tiny_teacher, path, {"format": "messages"}), Path(), tmp_path
            ).tokens
            > 0
        )


def test_files_that_cannot_be_counted_are_named(tiny_teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "torn.jsonl.gz").write_bytes(b"no gzip")
    for name, options, words in (
        ("other.jsonl", {"format": "messages"}, ": row 1 has no 'messages'"),
        ("torn.jsonl.gz", {}, " cannot be read as data.format"),
    ):
        with pytest.raises(DataError, match=name + words):
            estimate_by_table(job(tiny_teacher, tmp_path / name, options), Path(), tmp_path)


@pytest.mark.parametrize("fraction", [0.01, 0.03, 0.05])
def test_as_many_are_held_out_as_will_be(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path, fraction: float
) -> None:
    config = job(tiny_teacher, tiny_text, {"validation_fraction": fraction})
    estimate = estimate_by_table(config, Path(), tmp_path)
    corpus = plan_capture(config).corpus
    assert estimate.validation_sequences == len(corpus.validation)


@pytest.mark.long
@pytest.mark.parametrize("name", ["topk", "dense", "hidden"])
def test_arithmetic_is_what_a_capture_takes_before_compression(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path, name: str
) -> None:
    config = job(tiny_teacher, tiny_text, **PROFILES[name])
    by_table = estimate_by_table(config, Path(), tmp_path)
    by_trial = estimate_by_trial(config, tmp_path)
    assert 0.9 < by_table.bytes_per_token / by_trial.bytes_per_token < 1.8


def test_the_table_is_interpolated_in_the_logarithm() -> None:
    def position(threshold: float, **options: Any) -> float:
        return estimate_cache_size(
            Codec("threshold", 49_152, threshold=threshold, clusters=64, **options)
        ).position

    def tempered(draws: int) -> float:
        codec = Codec("tempered", 49_152, threshold=0.04, temperatures=(0.5, 2.0), draws=draws)
        return estimate_cache_size(codec).position

    between = position(math.sqrt(0.04 * 0.02))
    assert between == pytest.approx((position(0.04) + position(0.02)) / 2)
    assert position(0.5) == position(0.25), "beyond the table, its end"
    assert 7.5 < position(0.125) < 8.5 and 14.5 < position(0.04) < 16.5
    assert tempered(draws=3) > tempered(draws=2) > tempered(draws=1) + 10
    assert position(0.04, always_keep=(1, 2)) == position(0.04) + 4


def test_the_table_is_right_for_the_example(tmp_path: Path) -> None:
    """The example's vocabulary is a 24th of the table's; its cache takes 13.6 bytes per token
    (README).
    """
    found = estimate_by_table(
        load_config(ROOT / "examples" / "austen" / "job.yaml"), ROOT, tmp_path
    )
    assert found.bytes_per_token == pytest.approx(13.6, rel=0.03)


def set_free_bytes(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(storage.Disk, "of", lambda folder: storage.Disk(free, free, None))


def test_an_estimate_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = CaptureSize(100, 10, 64, 5000, counted=True)
    set_free_bytes(monkeypatch, 10**9)
    found = make_estimate(work, CacheSize(20.0, 1000.0, 300), 32, tmp_path, pace=(0.5, "cpu"))
    assert (found.tokens, found.shards, found.bytes) == (7040, 4, 5000 * 20 + 4 * 1000 + 300)
    assert found.bytes_per_token == pytest.approx(found.bytes / 5000, abs=0.01)
    assert (found.seconds, found.fits) == (55.0, True)
    assert (found.local_bytes, found.bucket) == (found.bytes, "")
    set_free_bytes(monkeypatch, 10**5)
    assert not make_estimate(work, CacheSize(20.0, 1000.0), 32, tmp_path).fits


def test_of_a_cache_in_a_bucket_only_what_the_disk_keeps_must_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = CaptureSize(100, 10, 64, 1 << 30, counted=True)
    caches = bind_caches(tmp_path, "s3://bucket/prefix", 100 << 20)
    set_free_bytes(monkeypatch, 200 << 20)
    found = make_estimate(work, CacheSize(20.0, 1000.0), 32, caches)
    assert found.bytes > 20 << 30 and found.fits
    assert found.bucket == "what is free in s3://bucket/prefix is not known"
    set_free_bytes(monkeypatch, 100 << 20)
    assert not make_estimate(work, CacheSize(20.0, 1000.0), 32, caches).fits
    # What the mirror keeps already leaves it before it has too much.
    shard = caches / ("0" * 32) / "shards" / "000000" / "tokens"
    shard.parent.mkdir(parents=True)
    shard.touch()
    os.truncate(shard, 90 << 20)
    assert make_estimate(work, CacheSize(20.0, 1000.0), 32, caches).fits
    assert make_estimate(work, CacheSize(0.001, 0.0), 32, caches).local_bytes < 2 << 20


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"data": {"train": [{"path": "someone/something"}]}}, "/data/train/0"),
        ({"kind": "train", "loss": {"alpha": 1.0}, "train": {"max_steps": 1}}, "/kind"),
    ],
)
def test_what_cannot_be_estimated_is_said(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path, change: dict[str, Any], pointer: str
) -> None:
    raw = job(tiny_teacher, tiny_text).model_dump(mode="json") | {
        "student": {"init": {"layers": 1, "hidden_size": 16}}
    }
    with pytest.raises(ConfigError) as caught:
        estimate_by_table(parse_config(raw | change), Path(), tmp_path)
    assert caught.value.problems[0].pointer == pointer


def test_the_table_needs_no_torch(tiny_teacher: Path, tiny_text: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(job(tiny_teacher, tiny_text, profile="hidden").model_dump_json())
    code = (
        "import sys; from pathlib import Path; from kd.config.jobfile import load_config; "
        "from kd.capture.estimate.job import estimate_by_table; "
        f"job = load_config(Path({str(path)!r})); "
        f"found = estimate_by_table(job, Path(), Path({str(tmp_path)!r})); "
        "print(found.positions > 0, {'torch', 'transformers', 'datasets'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE_SECONDS,
    )
    assert done.stdout.strip() == "True set()", done.stderr


# ---------------------------------------------------------------------- the disk


def require_estimated_space(
    folder: Path, identity: CacheIdentity, positions: int, width: int = 0
) -> None:
    require_space(folder, identity, positions, estimate_bytes(identity, positions, width))


def test_what_no_disk_holds_is_refused(tmp_path: Path) -> None:
    identity = make_identity(vocabulary_size=49_152, codec=make_codec("dense"))
    require_estimated_space(tmp_path, identity, 1000)
    with pytest.raises(
        StorageError, match=r"needs about .* TiB for 1,000,000,000,000 tokens of profile dense"
    ) as caught:
        require_estimated_space(tmp_path, identity, 10**12)
    assert "cache.threshold" in caught.value.remedy and "KD_HOME" in caught.value.remedy


@pytest.mark.long
@pytest.mark.parametrize("profile", ["threshold", "topk", "dense", "hidden"])
def test_what_fits_when_it_is_compressed_is_not_refused(
    tiny_teacher: Path,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    profile: str,
) -> None:
    config = job(tiny_teacher, tiny_text, profile=profile)
    fingerprint = run_precompute(config, tmp_path, tmp_path / "run", SILENT).cache["fingerprint"]
    store = open_cache(tmp_path / "caches" / fingerprint)
    identity = plan_capture(config).identity
    set_free_bytes(monkeypatch, round(store.bytes_per_token * store.manifest.positions))
    width = store.teacher_head()["weight"].shape[1] if profile == "hidden" else 0
    require_estimated_space(tmp_path / "elsewhere", identity, store.manifest.positions, width)


def test_a_capture_is_refused_before_its_teacher_is_loaded(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free_bytes(monkeypatch, 10_000)
    events: list[Event] = []
    config = job(tiny_teacher, tiny_text)
    with pytest.raises(StorageError, match=r"its disk has .* left"):
        run_precompute(config, tmp_path, tmp_path / "run", Monitor(events.append))
    assert "loading the teacher" not in [event.data.get("phase") for event in events]


@pytest.mark.long
def test_what_is_sealed_already_is_not_needed_again(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(tiny_teacher, tiny_text, profile="dense")
    fingerprint = run_precompute(config, tmp_path, tmp_path / "run", SILENT).cache["fingerprint"]
    identity = plan_capture(config).identity
    store = open_cache(tmp_path / "caches" / fingerprint)
    set_free_bytes(monkeypatch, store.manifest.positions * 2000)
    require_estimated_space(store.folder, identity, store.manifest.positions)
    with pytest.raises(StorageError):
        require_estimated_space(tmp_path / "elsewhere", identity, store.manifest.positions)
