"""The whole run in process, also resumed, damaged or short of disk: always the same student."""

import hashlib
import itertools
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.checking.verify import verify_cache
from cache.errors import CacheCorrupt, CacheNotFound, StorageError
from cache.records import Sequences
from cache.store import open_cache
from kd.capture.plan import plan_capture, set_packing
from kd.config.jobfile import parse_config
from kd.errors import ConfigError, Interrupted, ModelError, TokenizerMismatch, TrainingError
from kd.files import read_json, write_json
from kd.forecast.rehearsal import estimate_job
from kd.models.loading import load_model
from kd.pipeline import run_stage, run_stages, settle_run
from kd.progress import Event, Monitor, StageResult
from kd.tracking.metrics import read_metrics
from tests.support.kd.tiny import make_tiny_job
from tests.support.kd.tokenizers import permuted
from tests.support.packed_zoo import make_random

pytestmark = pytest.mark.usefixtures("one_thread")
long_param = partial(pytest.param, marks=pytest.mark.long)
Job = dict[str, Any]


@pytest.fixture(scope="module")
def job(tiny_teacher: Path, tiny_text: Path) -> Job:
    train = {"eval_steps": 3, "save_steps": 2, "logging_steps": 1}
    rate = {"learning_rate": 1e-2, "warmup_steps": 2}
    return make_tiny_job(tiny_teacher, tiny_text, train=train | rate)


class Listener:
    """Keeps every event, and asks for a stop after the n-th of a type."""

    def __init__(self, stop_at: tuple[str, int] | None = None) -> None:
        self.events: list[Event] = []
        self.stop_at = stop_at
        self.monitor = Monitor(self.events.append, self._stop)

    def _stop(self) -> bool:
        return self.stop_at is not None and len(self.of(self.stop_at[0])) >= self.stop_at[1]

    def of(self, type: str) -> list[dict[str, Any]]:
        return [event.data for event in self.events if event.type == type]

    def phases(self) -> list[str]:
        return [f"{data.get('stage')}: {data['phase']}" for data in self.of("stage")]


def run(
    job: Job, home: Path, name: str = "x", listener: Listener | None = None, stage: str = ""
) -> StageResult:
    config, monitor = parse_config(job), (listener or Listener()).monitor
    if stage:
        return run_stage(stage, config, home, home / "runs" / name, monitor)
    return run_stages(config, home, home / "runs" / name, monitor)


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_read(
    job: Job, tmp_path: Path
) -> None:
    listener = Listener()
    with pytest.raises(
        ConfigError, match=r"train\.report_to\.0: wandb is not installed\. Install it"
    ):
        run(job | {"train": job["train"] | {"report_to": ["wandb"]}}, tmp_path, listener=listener)
    assert listener.events == []


def student_bytes(home: Path, name: str = "x") -> dict[str, str]:
    """The hashes of the student's files, without its model card and provenance."""
    folder = home / "runs" / name / "student"
    files = (folder / "model.safetensors", folder / "config.json", folder / "tokenizer.json")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def cache_bytes(home: Path) -> dict[str, str]:
    files = sorted(path for path in (home / "caches").rglob("*") if path.is_file())
    return {
        str(path.relative_to(home)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def shard_bytes(home: Path) -> dict[str, str]:
    """All but what says when and for whom it was made."""
    found = {name: digest for name, digest in cache_bytes(home).items() if "/shards/" in name}
    assert found
    return found


class Done:
    """One undisturbed run, which the others must equal; nobody writes to its folder."""

    def __init__(self, job: Job, home: Path) -> None:
        self.home = home
        self.listener = Listener()
        self.result = run(job, home, listener=self.listener)
        self.run_dir = home / "runs" / "x"
        self.student = student_bytes(home)


@pytest.fixture(scope="module")
def done(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Done:
    import torch

    torch.set_num_threads(1)
    return Done(job, tmp_path_factory.mktemp("done"))


@pytest.mark.long
def test_the_student_writes_a_sample_at_each_evaluation(done: Done) -> None:
    evaluated = [data["step"] for data in done.listener.of("evaluation")]
    samples = done.listener.of("samples")
    assert [data["step"] for data in samples] == evaluated == [0, 3, 6]
    assert len({data["texts"][0]["prompt"] for data in samples}) == 1
    assert all(len(data["texts"]) == 1 and data["texts"][0]["text"] for data in samples)
    stored = [
        line for line in read_metrics(done.run_dir / "metrics.jsonl") if line["type"] == "samples"
    ]
    assert [line["texts"] for line in stored] == [data["texts"] for data in samples]


@pytest.fixture
def home(done: Done, tmp_path: Path) -> Path:
    """A home with the finished cache and nothing else."""
    shutil.copytree(done.home / "caches", tmp_path / "home" / "caches")
    return tmp_path / "home"


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers(inner)
    elif isinstance(value, int | float):
        yield value


# ---------------------------------------------------------------------- one whole run


def test_a_run_leaves_a_sealed_cache_and_everything_it_names(done):
    (folder,) = [path for path in (done.home / "caches").iterdir() if path.is_dir()]
    assert folder.name == done.result.cache["fingerprint"] and verify_cache(folder) == []
    written = {"student", "report.md", "report.json", "metrics.jsonl", "profile.json"}
    plots = {"curves.png", "reliability.png"}
    assert set(done.result.artifacts) == written | plots | {"tokens.json"}
    assert all(Path(path).exists() for path in done.result.artifacts.values())
    assert not list(done.home.rglob(".tmp-*"))
    assert [path.name for path in sorted((done.run_dir / "checkpoints").iterdir())] == [
        "step-00000006",
    ]  # fmt: skip


def test_a_run_tells_its_format(done):
    assert json.loads((done.run_dir / "run.json").read_text()) == {"format": 1}


def test_the_job_is_written_down_and_can_be_read_back(done, job):
    written = json.loads((done.run_dir / "config.json").read_text(encoding="utf-8"))
    assert parse_config(written) == set_packing(parse_config(job), True)
    assert (
        json.loads((done.run_dir / "student" / "distillation.json").read_text(encoding="utf-8"))[
            "job"
        ]
        == written
    )


def test_the_report_is_complete_and_finite(done):
    report = json.loads((done.run_dir / "report.json").read_text(encoding="utf-8"))
    assert report == done.result.report
    assert all(math.isfinite(number) for number in numbers(report))
    assert (report["name"], report["kind"], report["alpha"], report["steps"]) == (
        "tiny",
        "distill",
        0.1,
        6,
    )
    assert report["fingerprint"] == done.result.cache["fingerprint"]
    assert report["tokens"] == sum(each["tokens"] for each in [done.listener.of("metrics")[-1]])
    for name in (
        "teacher_perplexity",
        "student_perplexity_before",
        "student_perplexity",
        "bytes_per_token",
    ):
        assert report[name] > 1
    assert report["student_perplexity"] < report["student_perplexity_before"]
    assert 0 <= report["validation_agreement"] <= 1
    assert report["entries_per_token"] <= 26  # 1 / threshold + 1
    page = (done.run_dir / "report.md").read_text(encoding="utf-8")
    for name in ("teacher_perplexity", "student_perplexity_before", "student_perplexity"):
        assert f"| {report[name]:,.2f} |" in page
    assert report["fingerprint"] in page and "6 steps" in page and "10% of the weight" in page
    # Whoever may read the report may read the weights.
    rights = {(done.run_dir / "report.md").stat().st_mode & 0o777}
    saved = [*(done.run_dir / "student").iterdir(), *(done.run_dir / "checkpoints").glob("*/*")]
    assert {path.stat().st_mode & 0o777 for path in saved if path.is_file()} == rights
    card = (done.run_dir / "student" / "README.md").read_text(encoding="utf-8")
    teacher = done.result.report["teacher"]
    assert Path(teacher).is_absolute() and teacher in page
    assert card.startswith("---\n") and page.replace(teacher, Path(teacher).name) in card
    assert str(Path(teacher).parent) not in card


def held_out_perplexity(folder: Path, sequences: Sequences) -> float:
    """The reference: the library's own model, one piece of a document at a time.

    Padded output rows do not count.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    losses = []
    for row in range(len(sequences)):
        starts = [*sequences.document_start[row].nonzero()[0].tolist(), sequences.length]
        for start, stop in itertools.pairwise(starts):
            ids = torch.from_numpy(sequences.tokens[row, start:stop].astype("int64"))[None]
            if stop - start > 1 and sequences.target_mask[row, start]:
                with torch.no_grad():
                    logits = model(ids).logits[0, :-1, :2048]
                losses += torch.nn.functional.cross_entropy(
                    logits, ids[0, 1:], reduction="none"
                ).tolist()
    assert len(losses) == sequences.positions
    return math.exp(sum(losses) / len(losses))


def test_the_reported_perplexities_are_those_of_the_models_on_disk(done, tiny_teacher):
    from cache.store import open_cache

    store = open_cache(done.home / "caches" / done.result.cache["fingerprint"])
    sequences, _ = store.read(store.validation)
    report = done.result.report
    student = held_out_perplexity(done.run_dir / "student", sequences)
    assert report["student_perplexity"] == pytest.approx(student, rel=1e-5)
    assert report["teacher_perplexity"] == pytest.approx(
        held_out_perplexity(tiny_teacher, sequences), rel=1e-3
    )


def test_events_tell_the_run_in_order(done):
    phases = iter(done.listener.phases())
    for expected in (
        "precompute: loading data", "precompute: loading the teacher", "precompute: capturing",
        "train: loading data", "train: training", "train: saving",
    ):  # fmt: skip
        assert expected in phases  # consumes what comes before it: in this order
    (told,) = [phase for phase in done.listener.phases() if "held out" in phase]
    assert told.startswith("precompute: text: ") and " sequences to train on; " in told
    progress = done.listener.of("progress")
    assert [each["done"] for each in progress if each["unit"] == "sequences"] == [
        4,
        8,
        12,
        16,
        20,
        24,
    ]
    assert [each["done"] for each in progress if each["unit"] == "steps"] == [1, 2, 3, 4, 5, 6]
    (told,) = done.listener.of("report")
    assert told.items() <= done.result.report.items()
    table = done.result.report["evaluation"]
    bits = math.log(told["student_perplexity"]) * table["tokens"] / table["bytes"] / math.log(2)
    assert told["student_bits_per_byte"] == pytest.approx(bits)
    assert told["teacher_bits_per_byte"] > 0 and told["held_out_bytes"] == table["bytes"]

    assert [each["step"] for each in done.listener.of("metrics")] == [1, 2, 3, 4, 5, 6]
    assert [each["step"] for each in done.listener.of("evaluation")] == [0, 3, 6]
    assert [each["step"] for each in done.listener.of("checkpoint")] == [2, 4, 6]
    assert {each["name"] for each in done.listener.of("artifact")} == set(done.result.artifacts)
    assert all(
        math.isfinite(number) for event in done.listener.events for number in numbers(event.data)
    )
    for each in done.listener.of("metrics"):
        assert {
            "loss",
            "kd_loss",
            "ce_loss",
            "train_perplexity",
            "temperature",
            "learning_rate",
            "grad_norm",
        } <= set(each)
        assert each["loss"] == pytest.approx(
            0.9 * each["kd_loss"] + 0.1 * each["ce_loss"], rel=1e-4
        )


# ---------------------------------------------------------------------- again


def test_the_same_job_in_the_same_folders_finds_everything_done(done, job, tmp_path):
    home = shutil.copytree(done.home, tmp_path / "home")
    before = cache_bytes(home)
    listener = Listener()
    result = run(job, home, listener=listener)
    assert result.cache["reused"] is True
    assert "precompute: capturing" not in listener.phases() and listener.of("metrics") == []
    assert student_bytes(home) == done.student and cache_bytes(home) == before
    # Nothing is measured either: also what a clock says is that of the first time.
    assert result.report == done.result.report
    assert "train: this run has finished before, and nothing is measured again" in listener.phases()
    assert listener.of("report") == done.listener.of("report")
    assert {each["name"] for each in listener.of("artifact")} == set(result.artifacts)


@pytest.mark.long
@pytest.mark.parametrize("change", ["another evaluation", "no student", "another report"])
def test_a_finished_run_is_measured_again_where_anything_differs(done, job, tmp_path, change):
    home = shutil.copytree(done.home, tmp_path / "home")
    if change == "no student":
        shutil.rmtree(home / "runs/x/student")
    if change == "another report":
        write_json(home / "runs/x/report.json", {})
    other = {"evaluation": {"max_new_tokens": 2}} if change == "another evaluation" else {}
    listener = Listener()
    run(merged(job, other), home, listener=listener)
    assert "train: measuring on the held-out text" in listener.phases()
    assert student_bytes(home) == done.student


@pytest.mark.long
@pytest.mark.parametrize(("limit", "kept"), [(None, [6]), (2, [4, 6])])
def test_a_finished_run_keeps_its_last_checkpoint_and_that_of_its_baseline(
    job, tmp_path, limit, kept
):
    train = job["train"] | {"save_total_limit": limit, "save_steps": 2}
    run(job | {"train": train, "evaluation": {"baseline": True}}, tmp_path)
    for folder in ("checkpoints", "baseline/checkpoints"):
        found = sorted((tmp_path / "runs/x" / folder).glob("step-*"))
        assert [int(path.name[5:]) for path in found] == kept


@pytest.mark.parametrize(
    "changes, fields",
    [
        ({"train": {"max_steps": 8}}, "train.max_steps"),
        (
            {"student": {"init": {"layers": 2}}, "train": {"seed": 3}},
            "student.init.layers, train.seed",
        ),
        ({"data": {"sequence_length": 16}}, "data.sequence_length"),
        ({"loss": {"entropy_weighting": 1.0}}, "loss.entropy_weighting"),
        ({"loss": {"alpha": 0.5}, "cache": {"seed": 9}}, "loss.alpha, cache.seed"),
    ],
)
def test_another_job_in_the_same_run_folder_is_refused_before_its_capture(
    done, job, tmp_path, changes, fields
):
    home = shutil.copytree(done.home, tmp_path / "home")
    before = (home / "runs/x/config.json").read_bytes()
    listener = Listener()
    other = merged(job, changes)
    with pytest.raises(TrainingError, match="another job") as refused:
        run(other, home, listener=listener)
    assert (
        refused.value.detail.endswith(f"differs in {fields}.")
        and "--run-dir" in refused.value.remedy
    )
    assert listener.events == [] and (home / "runs/x/config.json").read_bytes() == before


def test_a_run_folder_of_a_newer_version_is_refused_and_left_as_it_is(job, tmp_path):
    place = tmp_path / "runs" / "x"
    place.mkdir(parents=True)
    (place / "run.json").write_text('{"format": 2}')
    with pytest.raises(TrainingError, match="run format 2, but this version reads 1"):
        run(job, tmp_path)
    assert [path.name for path in place.iterdir()] == ["run.json"]
    assert not (tmp_path / "caches").exists()


@pytest.mark.long
def test_what_does_not_shape_the_weights_may_change_between_runs(done, job, tmp_path):
    home = shutil.copytree(done.home, tmp_path / "home")
    free = {
        "train": {"save_steps": 3, "logging_steps": 2, "save_dtype": "float32"},
        "teacher": {"batch_size": 2},
    }
    moved = shutil.copy(job["data"]["train"], tmp_path / "moved.txt")
    run(merged(job, {**free, "data": {"train": str(moved)}, "name": "renamed"}), home)
    assert student_bytes(home) == done.student


def test_a_folder_whose_configuration_did_not_write_its_checkpoints_is_not_judged_by_it(
    done, job, tmp_path
):
    home = shutil.copytree(done.home, tmp_path / "home")
    other = parse_config(merged(job, {"train": {"max_steps": 8}}))
    write_json(home / "runs/x/config.json", other.model_dump(mode="json"))
    run(job, home)
    assert student_bytes(home) == done.student
    with pytest.raises(TrainingError, match="another job"):
        run_stages(other, home, home / "runs/x")


def merged(job: Job, changes: Job) -> Job:
    """``job`` with the fields of ``changes``, at any depth."""
    inner = {
        key: merged(job.get(key, {}), value) if isinstance(value, dict) else value
        for key, value in changes.items()
    }
    return job | inner


def test_another_job_with_the_same_teacher_and_text_uses_the_cache(done, job, home):
    before = cache_bytes(home)
    result = run(job, home, "other")
    assert result.cache["reused"] is True and cache_bytes(home) == before
    assert student_bytes(home, "other") == done.student


@pytest.mark.long
def test_a_home_elsewhere_gives_the_same_bytes(done, job, tmp_path):
    run(job, tmp_path)
    assert (
        shard_bytes(tmp_path) == shard_bytes(done.home) and student_bytes(tmp_path) == done.student
    )


@pytest.mark.parametrize(
    "stop_at", [long_param(("progress", 3)), ("metrics", 3)], ids=["in a capture", "in a training"]
)
def test_a_run_that_was_stopped_ends_in_the_same_student(done, job, tmp_path, stop_at):
    with pytest.raises(Interrupted) as caught:
        run(job, tmp_path, listener=Listener(stop_at))
    assert caught.value.remedy and not (tmp_path / "runs" / "x" / "student").exists()
    run(job, tmp_path)
    assert student_bytes(tmp_path) == done.student
    assert shard_bytes(tmp_path) == shard_bytes(done.home)


@pytest.mark.long
@pytest.mark.parametrize("stop_at", [None, ("progress", 3)])
def test_a_manifest_in_pieces_gives_the_same_student(
    done, job, tmp_path, monkeypatch, stop_at
) -> None:
    monkeypatch.setattr("cache.shards.entries.PIECE_SHARDS", 2)
    if stop_at is not None:
        with pytest.raises(Interrupted):
            run(job, tmp_path, listener=Listener(stop_at))
    report = run(job, tmp_path)
    folder = tmp_path / "caches" / report.cache["fingerprint"]
    assert [path.name for path in sorted((folder / "manifest").iterdir())] == [
        "000000.bin",
        "000001.bin",
    ]
    assert verify_cache(folder) == []
    assert student_bytes(tmp_path) == done.student


# ---------------------------------------------------------------------- the other kinds


def test_precompute_then_train_is_distill(done, job, tmp_path):
    captured = {key: job[key] for key in ("name", "teacher", "data", "cache")} | {
        "kind": "precompute"
    }
    result = run(captured, tmp_path, "first")
    assert result.to_json().keys() == {"cache"} and result.cache["reused"] is False
    assert json.loads(
        (tmp_path / "runs" / "first" / "cache.json").read_text(encoding="utf-8")
    ).items() >= (result.cache.items())
    listener = Listener()
    run(job | {"kind": "train"}, tmp_path, "second", listener)
    assert student_bytes(tmp_path, "second") == done.student
    assert not [phase for phase in listener.phases() if "teacher" in phase]


@pytest.mark.long
def test_training_on_plain_text_needs_neither_teacher_nor_cache(job, tiny_teacher, tmp_path):
    student = {"init": {"layers": 1, "hidden_size": 16, "tokenizer": str(tiny_teacher)}}
    long = job["train"] | {"max_steps": 20, "learning_rate": 3e-3}
    plain = {
        "data": job["data"],
        "train": long,
        "kind": "train",
        "loss": {"alpha": 1},
        "student": student,
    }
    report = run(plain, tmp_path).report
    assert not (tmp_path / "caches").exists() and report["teacher"] is None
    assert report["student_perplexity"] < report["student_perplexity_before"]
    assert report["validation_kl"] is None and "teacher_perplexity" not in report
    assert "Trained on plain text" in (tmp_path / "runs" / "x" / "report.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.long
def test_a_student_may_start_from_a_checkpoint(job, home, tiny_teacher, tokenizer, tmp_path):
    """From the teacher itself: nothing is left to learn, up to the sampling of the records."""
    # The records are of the tokens alone, and a student's softmax has padded rows too.
    model = load_model(tiny_teacher, torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    same = job | {
        "student": {"model": str(tmp_path / "start")},
        "train": job["train"] | {"learning_rate": 1e-9},
    }
    report = run(same, home).report
    assert report["student_perplexity_before"] == pytest.approx(
        report["teacher_perplexity"], rel=2e-3
    )
    assert (
        report["validation_agreement"] > 0.97
    )  # rounding may swap two tokens that are nearly as probable


def test_training_without_a_capture_is_refused(job, tmp_path):
    with pytest.raises(CacheNotFound, match="No cache at") as caught:
        run(job | {"kind": "train"}, tmp_path)
    assert "precompute" in caught.value.remedy
    assert not (tmp_path / "runs" / "x" / "checkpoints").exists()


@pytest.fixture
def bloom(tokenizer: Any, tmp_path: Path) -> Path:
    """The folder of a Bloom, whose documents cannot share a row."""
    import torch
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=2048, hidden_size=16, n_layer=3, n_head=2))
    model.save_pretrained(tmp_path / "bloom")
    tokenizer.save_pretrained(tmp_path / "bloom")
    return tmp_path / "bloom"


@pytest.mark.long
def test_a_student_whose_documents_cannot_share_rows_gets_rows_of_their_own(job, bloom, tmp_path):
    job = job | {"student": {"model": str(bloom)}}
    packed = job | {"data": job["data"] | {"packing": True}}
    with pytest.raises(ModelError, match="BloomForCausalLM attends across") as caught:
        run(packed, tmp_path)
    assert "data.packing to false" in caught.value.remedy
    assert not (tmp_path / "caches").exists()
    listener = Listener()
    result = run(job, tmp_path, listener=listener)
    assert result.report["steps"] == 6
    told = [each["message"] for each in listener.of("warning") if "share a row" in each["message"]]
    (message,) = told
    assert message.startswith("Models in which documents cannot share a row, so that each gets")
    assert "the student: BloomForCausalLM attends across the documents" in message
    used = read_json(tmp_path / "runs" / "x" / "config.json")
    assert used is not None
    assert (used["data"]["packing"], used["train"]["order"]) == (False, "length")
    # The same cache as with the field itself, which also keeps the order.
    alone = job | {"data": job["data"] | {"packing": False}}
    cache = run(alone, tmp_path, name="y", stage="precompute").cache
    assert cache["reused"] and cache["fingerprint"] == result.cache["fingerprint"]
    # Later stages do as the capture of their run did, and try no model.
    later = parse_config(job | {"student": {"model": str(tmp_path / "nowhere")}})
    settled = settle_run(later, tmp_path / "runs" / "x", Listener().monitor)
    assert (settled.data.packing, settled.require_train().order) == (False, "length")


@pytest.mark.long
def test_a_teacher_whose_documents_cannot_share_rows_reads_each_alone(job, bloom, tmp_path):
    job = job | {"teacher": {"model": str(bloom), "batch_size": 4}, "kind": "precompute"}
    with pytest.raises(ModelError, match="BloomForCausalLM attends across"):
        run(job | {"data": job["data"] | {"packing": True}}, tmp_path)
    summary = run(job, tmp_path).cache
    assert not open_cache(tmp_path / "caches" / summary["fingerprint"]).identity.data.packing


def test_auto_is_the_same_cache_as_true_where_documents_can_share_rows(job):
    found = [
        plan_capture(parse_config(job | {"data": job["data"] | {"packing": packing}})).identity
        for packing in ("auto", True)
    ]
    assert found[0] == found[1] and found[0].data.packing is True


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "own"),
    [("doge", {}), ("gemma4_text", {"vocab_size_per_layer_input": 2048}), ("lfm2", {})],
)
def test_a_student_with_shapes_of_its_own_is_trained_and_forecast(
    kind, own, job, tokenizer, tmp_path
):
    """Heads of two widths (Gemma 4), no routers although its class has some (Doge)."""
    sizes = {"vocab_size": 2048, "eos_token_id": 0, "bos_token_id": 0} | own
    student = make_random(kind, **sizes)
    student.save_pretrained(tmp_path / kind)
    tokenizer.save_pretrained(tmp_path / kind)
    # The layers of some have no dropout.
    train = {name: value for name, value in job["train"].items() if name != "dropout"}
    job = job | {"student": {"model": str(tmp_path / kind)}, "train": train}
    forecast = estimate_job(parse_config(job), tmp_path).training
    assert forecast is not None
    assert forecast.parameters == student.num_parameters()
    assert run(job, tmp_path).report["steps"] == 6


SMALL = {
    "vocab_size": 2048, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip
UNFIT = {
    "the LM head reads 8": ("ElectraConfig", {"embedding_size": 8, "is_decoder": True}),
    "LlamaForCausalLM looks ahead": ("LlamaConfig", {"is_causal": False}),
}


@pytest.mark.parametrize("role", ["student", "teacher"])
@pytest.mark.parametrize("reason", UNFIT)
def test_a_model_that_cannot_be_distilled_is_refused_before_the_capture(
    job, tokenizer, tmp_path, reason, role
):
    import torch
    import transformers

    torch.manual_seed(0)
    kind, own = UNFIT[reason]
    shape = getattr(transformers, kind)(**SMALL, **own)
    transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "unfit")
    tokenizer.save_pretrained(tmp_path / "unfit")
    unfit = job | {role: {"model": str(tmp_path / "unfit")}}
    with pytest.raises(ModelError, match=reason):
        run(unfit, tmp_path)
    assert not list(tmp_path.glob("caches/*/shards/0*"))


# ---------------------------------------------------------------------- damage


def damage_shard(home: Path, flip: int | None) -> Path:
    """Flip a byte of a chunk in the second shard, or delete the chunk."""
    (path,) = (home / "caches").glob("*/shards/000001/gap_symbols/c*")
    data = bytearray(path.read_bytes())
    if flip is None:
        path.unlink()
    else:
        data[flip] ^= 0x40
        path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "flip", [len(b"header") + 30, long_param(-1), long_param(None)], ids=["within", "last", "gone"]
)
def test_a_damaged_cache_is_refused_and_captured_anew(done, job, home, flip):
    before = cache_bytes(home)
    path = damage_shard(home, flip)
    with pytest.raises(CacheCorrupt) as caught:
        run(job | {"kind": "train"}, home)
    assert "000001" in caught.value.detail and caught.value.remedy
    listener = Listener()
    assert run(job, home, "again", listener).cache["reused"] is False
    captured = [each["done"] for each in listener.of("progress") if each["unit"] == "sequences"]
    assert captured == [20, 24]  # of 24: only the damaged shard was read again
    assert path.exists() and cache_bytes(home).keys() == before.keys()
    assert shard_bytes(home) == shard_bytes(done.home)
    assert student_bytes(home, "again") == done.student


def test_a_student_with_another_tokenizer_is_refused_before_training(
    job, home, tiny_teacher, tmp_path
):
    other = permuted(tiny_teacher, tmp_path / "permuted")
    with pytest.raises(TokenizerMismatch, match="does not encode text alike") as caught:
        run(job | {"kind": "train", "student": {"model": str(other)}}, home)
    assert caught.value.remedy and not (home / "runs" / "x" / "checkpoints").exists()


@pytest.mark.long
def test_a_student_that_cannot_be_is_refused_before_the_capture(
    job, tiny_teacher, tmp_path, monkeypatch
):
    """It is the teacher's reading that takes days."""
    wrong = [
        (
            {"model": str(permuted(tiny_teacher, tmp_path / "permuted"))},
            TokenizerMismatch,
            "does not encode text alike",
        ),
        ({"from_teacher": {"layers": 200}}, ModelError, "but the teacher .* has only"),
        (
            {"model": str(tiny_teacher), "lora": {"targets": ["foo"]}},
            ModelError,
            "no linear layer named foo",
        ),
    ]
    for student, error, message in wrong:
        with pytest.raises(error, match=message):
            run(job | {"student": student}, tmp_path / "home")
        assert not (tmp_path / "home" / "caches").exists()
    monkeypatch.setenv("KD_DEVICES", "cpu,cpu,cpu,cpu")  # four stages of a student of two layers
    steps = {"strategy": "pipeline", "batch_size": 2, "gradient_accumulation_steps": 4}
    staged = {"resources": {"gpus": 4}, "train": job["train"] | steps}
    shallow = {"init": {"layers": 2, "hidden_size": 16}}
    with pytest.raises(ModelError, match="2 layers cannot be cut into 4 stages"):
        run(job | staged | {"student": shallow}, tmp_path / "home")
    assert not (tmp_path / "home" / "caches").exists()
    alone = {key: value for key, value in job.items() if key != "train"} | {"kind": "precompute"}
    assert run(alone | {"student": wrong[0][0]}, tmp_path / "home").cache, (
        "whoever captures alone may say anything"
    )


def test_input_that_is_wrong_is_refused_before_anything_is_written(job, tmp_path):
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written"):
        run(job, tmp_path / "file" / "home")
    missing = job | {
        "data": job["data"] | {"train": "none.txt"},
        "teacher": {"model": "no/such/folder/x"},
    }
    with pytest.raises(ConfigError) as caught:
        run(missing, tmp_path / "home")
    assert [problem.pointer for problem in caught.value.problems] == [
        "/teacher/model",
        "/data/train/0",
    ]
    assert not (tmp_path / "home").exists()


def test_a_schedule_that_lacks_its_arguments_is_refused_before_the_capture(job, tmp_path):
    wrong = job | {"train": job["train"] | {"lr_scheduler_type": "warmup_stable_decay"}}
    with pytest.raises(ConfigError, match="num_decay_steps"):
        run(wrong, tmp_path)


# ---------------------------------------------------------------------- full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB where the checkpoints go; ``mount -o remount`` frees space on it."""
    folder = tmp_path / "runs" / "x" / "checkpoints"
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if (
        shutil.which("mount") is None
        or subprocess.run(command, capture_output=True).returncode != 0
    ):
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.long
@pytest.mark.parametrize("size", ["300k", "700k"], ids=["for no checkpoint", "for one checkpoint"])
def test_a_full_disk_ends_the_run_with_a_remedy_and_space_lets_it_go_on(
    done, job, tmp_path, small_disk, size
):
    shutil.copytree(done.home / "caches", tmp_path / "caches")
    subprocess.run(["mount", "-o", f"remount,size={size}", str(small_disk)], check=True)
    with pytest.raises(StorageError, match=r"(?i)no space left on") as caught:
        run(job, tmp_path)
    assert "Free space" in caught.value.remedy
    kept = [path.name for path in small_disk.iterdir()]
    assert kept == ([] if size == "300k" else ["step-00000002"])
    assert not (tmp_path / "runs" / "x" / "student").exists()
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    listener = Listener()
    run(job, tmp_path, listener=listener)
    assert listener.of("metrics")[0]["step"] == (1 if size == "300k" else 3)
    assert student_bytes(tmp_path) == done.student


@pytest.mark.long
@pytest.mark.parametrize(("stage", "folder"), [("precompute", "caches"), ("train", "runs/x")])
def test_a_folder_that_is_removed_under_a_run_is_named(
    job: Job, tmp_path: Path, stage: str, folder: str
) -> None:
    if stage == "train":
        run(job, tmp_path, stage="precompute")

    def remove(seen: Event) -> None:
        if seen.type == "progress" and seen.data.get("done", 0) > 0:
            shutil.rmtree(tmp_path / folder, ignore_errors=True)

    with pytest.raises(StorageError, match=r"was removed while it was in use") as caught:
        run_stage(stage, parse_config(job), tmp_path, tmp_path / "runs" / "x", Monitor(remove))
    assert folder in caught.value.detail
    shutil.rmtree(tmp_path / folder, ignore_errors=True)
    run(job, tmp_path)
    assert student_bytes(tmp_path)
