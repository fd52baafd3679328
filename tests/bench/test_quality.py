"""bench/quality.py with a teacher: kills, resuming, rows, shares and errors, on tiny models."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import quality
from bench.support.quality.capture import capture_together
from bench.support.quality.methods import COUNTED_SEQUENCES, count_entries
from bench.support.quality.rows import DEFAULT_ROWS, FULL, PLAIN, parse_rows
from bench.support.quality.runs import locate_run, make_student, read_finished
from bench.support.quality.study import SHARD_SEQUENCES, Study
from bench.support.waiting import PATIENCE_SECONDS
from bench.support.warm import MODELS, get_warm_python
from cache.records import Records
from cache.rounding import TOP_STEP, UNKNOWN
from cache.shards.names import TAIL_SUMS
from cache.store import open_cache
from kd.capture.capturing import capture_cache
from kd.config.jobfile import load_config
from kd.errors import DataError
from kd.loss.decoder import TargetDecoder
from kd.progress import SILENT
from kd.text.batches import PlainText

pytestmark = pytest.mark.usefixtures("one_thread")

THRESHOLD = "threshold 0.04"
#: Runs the bench, and kills its process where the run of a name has come so far. A checkpoint is
#: written beside the steps: one that has begun is waited for.
KILLED = """
import os, pathlib, signal, sys, time
from bench import quality
from kd.progress import Monitor
name, done = sys.argv.pop(1), int(sys.argv.pop(1))
runs = pathlib.Path(sys.argv[sys.argv.index("--work") + 1], "runs")

def make_monitor(run, should_stop):
    def listen(event):
        if run == name and event.type == "progress" and event.data["done"] == done:
            while name != "capture" and not list(runs.glob(f"{name}*/checkpoints/step-*")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
    return Monitor(listen, should_stop)

quality.make_monitor = make_monitor
quality.main()
"""

Flags = Callable[..., list[str]]


@pytest.fixture
def flags(tiny_teacher: Path, tiny_text: Path, tmp_path: Path) -> Flags:
    """Return the flags of a small study; ``changes`` replace some, and None leaves one out."""
    return partial(make_flags, (tiny_teacher, tiny_text, tmp_path / "work"))


def make_flags(paths: tuple[Path, Path, Path], **changes: Any) -> list[str]:
    teacher, text, work = paths
    wanted: dict[str, Any] = {
        "teacher": teacher,
        "text": text,
        "held_out": text,
        "held_out_sequences": 6,
        "sequences": 24,
        "work": work,
        "layers": 1,
        "width": 16,
        "length": 32,
        "steps": 4,
        "batch": 4,
        "warmup": 2,
        "seeds": 2,
        "save_steps": 2,
        "rows": [PLAIN, FULL],
    }
    words = []
    for name, value in (wanted | changes).items():
        if value is not None:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def parse(words: list[str]) -> Study:
    return Study.of(quality.parse_arguments(words))


def run_bench(words: list[str]) -> int:
    """Run the bench in this process; returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        quality.main(words)
    return int(ended.value.code or 0)


def run_and_kill(folder: Path, words: list[str], run: str, done: int) -> None:
    """Run the bench in a process of its own, and kill it where ``run`` has come so far."""
    (folder / "killed.py").write_text(KILLED)
    arguments = [run, str(done), *words]
    with Path(os.devnull).open() as nothing, (folder / "log").open("w") as log:
        files = [nothing.fileno(), log.fileno(), log.fileno()]
        process = get_warm_python(MODELS).start("killed", arguments, files, folder, {**os.environ})
        code = process.wait(PATIENCE_SECONDS)
    assert code == -signal.SIGKILL, (folder / "log").read_text()


def read_losses(work: Path) -> dict[str, list[float]]:
    return {
        path.parent.name: np.load(path).tolist() for path in (work / "runs").glob("*/losses.npy")
    }


def list_times(work: Path) -> dict[Path, int]:
    """When each file was written, but for what is removed when a cache is sealed."""
    files = (path for path in work.rglob("*") if path.is_file() and path.suffix != ".writers")
    return {path: path.stat().st_mtime_ns for path in files if TAIL_SUMS not in path.parts}


# ---------------------------------------------------------------------- kills and resuming


@pytest.mark.long
def test_a_killed_study_goes_on_and_ends_as_one_that_was_never_stopped(
    flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"rows": [FULL, THRESHOLD], "sequences": SHARD_SEQUENCES + 8}
    words = flags(**changes)
    work = tmp_path / "work"
    run_and_kill(tmp_path, words, "capture", SHARD_SEQUENCES + 3)
    sealed = list_times(work / "caches")
    assert len(list(work.glob("caches/*/seals/000000.json"))) == 2, "the first shard of both caches"
    run_and_kill(tmp_path, words, f"{THRESHOLD}, seed 0", 3)
    (checkpoint,) = work.glob(f"runs/{THRESHOLD}*/checkpoints/step-*")
    assert checkpoint.name.endswith("2")
    assert sealed.items() <= list_times(work).items(), "no sealed shard was captured again"
    (kept,) = work.glob(f"runs/{FULL}, seed 0*/found.json")
    finished_at = kept.stat().st_mtime_ns

    assert run_bench(words) == 0
    page = capsys.readouterr().out
    assert kept.stat().st_mtime_ns == finished_at, "a finished student was not trained again"
    assert not list(work.glob("runs/*/checkpoints"))

    other = tmp_path / "other"
    assert run_bench(flags(work=other, **changes)) == 0
    assert len(read_losses(work)) == 4
    assert read_losses(work) == read_losses(other)
    assert drop_hours(page) == drop_hours(capsys.readouterr().out)


def drop_hours(page: str) -> list[str]:
    return [line.rsplit("|", 2)[0] for line in page.splitlines()]


@pytest.mark.long
def test_a_student_that_fails_does_not_stop_the_others(
    flags: Flags,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = flags(seeds=1)
    study = parse(words)
    folder = locate_run(study, study.rows[0], 0, PlainText(study.text.corpus))
    (folder / "metrics.jsonl").mkdir(parents=True)
    assert run_bench(words) == 1
    said = capsys.readouterr()
    assert "Failed, and to be run again: cross-entropy only, seed 0." in said.out
    assert "| all of p | 2,048.0 |" in said.out
    assert "IsADirectoryError" in said.err
    assert "IsADirectoryError" in (folder / "error.txt").read_text()

    (folder / "metrics.jsonl").rmdir()
    assert run_bench(words) == 0
    assert "Failed" not in capsys.readouterr().out
    assert not (folder / "error.txt").exists()


def test_other_settings_are_other_runs(flags: Flags) -> None:
    def locate(**changes: Any) -> Path:
        study = parse(flags(**changes))
        return locate_run(study, study.rows[0], 0, PlainText(study.text.corpus))

    changes: list[dict[str, Any]] = [
        {"steps": 5},
        {"untied": True},
        {"held_out_sequences": 5},
        {"set": "train.weight_decay=0.2"},
        {"micro_batch": 2},
        {"rows": [FULL]},
    ]
    assert len({locate(), *(locate(**change) for change in changes)}) == 1 + len(changes)
    assert locate(save_steps=3) == locate(), "checkpoints shape no weights"


# ---------------------------------------------------------------------- caches


@pytest.mark.long
def test_caches_of_one_pass_are_those_of_single_captures(flags: Flags, tmp_path: Path) -> None:
    rows = [FULL, "threshold 0.02", "topk 5"]
    study = parse(flags(rows=rows, set="teacher.batch_size=1"))
    plans = study.plan_captures()
    capture_together(plans, study.caches)
    for plan in plans:
        capture_cache(plan, tmp_path / "single", SILENT)
        ours = open_cache(study.caches / plan.identity.fingerprint).manifest
        single = open_cache(tmp_path / "single" / plan.identity.fingerprint).manifest
        assert [each.digest for each in ours.shards] == [each.digest for each in single.shards]
        assert ours.head == single.head


@pytest.fixture(scope="module")
def captured(
    tiny_teacher: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Study:
    """A study of every kind of row, with its caches."""
    rows = [*DEFAULT_ROWS, "3 draws with replacement", f"{THRESHOLD}, 25% by entropy"]
    folder = tmp_path_factory.mktemp("captured")
    changes = {"rows": rows, "sequences": 40}
    study = parse(make_flags((tiny_teacher, tiny_text, folder), **changes))
    capture_together(study.plan_captures(), study.caches)
    return study


def open_row(study: Study, name: str) -> Any:
    (row,) = parse_rows([name])
    return row.open(study.open_caches(row))


def decode(records: Any) -> np.ndarray:
    """The dense weights (N, V) of top-k records, divided by their sum."""
    steps = records["top_logprobs"].astype(np.float64)
    weights = np.where(steps == UNKNOWN, 0.0, np.exp(-steps * TOP_STEP))
    dense = np.zeros((len(weights), 2048))
    np.put_along_axis(dense, records["top_ids"].astype(np.int64), 0.0, axis=1)
    np.add.at(dense, (np.arange(len(dense))[:, None], records["top_ids"].astype(np.int64)), weights)
    return dense / dense.sum(1, keepdims=True)


def read_teacher(study: Study, numbers: list[int]) -> np.ndarray:
    """p (N, V) of the teacher, by torch alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(study.text.teacher.folder).eval()
    sequences = study.text.corpus.train.select(numbers)
    with torch.no_grad():
        logits = model(torch.from_numpy(sequences.tokens.astype(np.int64))).logits[..., :2048]
    p = torch.softmax(logits.double(), -1).numpy()
    return p[sequences.target_mask]  # type: ignore[no-any-return]


@pytest.mark.long
def test_rows_of_other_methods_hold_what_their_names_say(captured: Study) -> None:
    numbers = [0, 1]
    p_NV = read_teacher(captured, numbers)
    order = np.argsort(-p_NV, axis=1)

    _, top = open_row(captured, "topk 50").source.read(numbers)
    kept = np.where(np.argsort(order, axis=1) < 50, p_NV, 0.0)
    assert np.abs(decode(top) - kept / kept.sum(1, keepdims=True)).max() < 1e-3

    for name, entries in (("budget", 50), ("recommended", 128)):
        told = open_row(captured, f"distillkit {name}")
        _, records = told.source.read(np.array(numbers))
        kept = np.where(np.argsort(order, axis=1) < entries, p_NV, 0.0)
        kept = kept / kept.sum(1, keepdims=True)
        assert count_entries(told.source) == entries
        assert np.abs(decode(records) - kept).sum(1).mean() < 0.1
        # 11 bits an id; exact values in 2 bytes, terms in 4.
        exact = {"budget": 2 + 3 * 4, "recommended": 32 + 6 * 4}[name]
        assert told.bytes_per_token == exact + -(-entries * 11 // 8)


def test_draws_with_replacement_are_unbiased_and_belong_to_their_sequence(
    captured: Study,
) -> None:
    told = open_row(captured, "3 draws with replacement")
    _, both = told.source.read(np.array([4, 7]))
    _, second = told.source.read(np.array([7]))
    assert (both["top_ids"][-len(second) :] == second["top_ids"]).all()
    assert set(np.unique(np.round(decode(both) * 3).astype(int))) <= {0, 1, 2, 3}

    # The mean weight over sequences, by decade of p, is p within its standard error.
    numbers = np.arange(40)
    _, records = told.source.read(numbers)
    p_NV = read_teacher(captured, numbers.tolist())
    w_NV = decode(records)
    for low, high in ((0.1, 1.0), (0.01, 0.1), (0.001, 0.01), (0.0, 0.001)):
        inside = (p_NV >= low) & (p_NV < high)
        error = np.sqrt((p_NV * (1 - p_NV) / 3)[inside].sum())
        assert abs((w_NV - p_NV)[inside].sum()) < 4 * error + 1e-3 * p_NV[inside].sum()


@pytest.mark.parametrize("rule", ["25% by entropy", "first 25%", "25% at random"])
def test_rows_of_some_positions_keep_whole_records_of_these_alone(
    captured: Study, rule: str
) -> None:
    (selected,) = parse_rows([f"{THRESHOLD}, {rule}"])
    (whole,) = captured.open_caches(selected)
    told = selected.open([whole])
    numbers = np.array([4, 7])
    all_of_them, records = whole.read(numbers)
    kept, few = told.source.read(numbers)
    _, second = told.source.read(numbers[1:])
    assert (few["entropy"][-len(second) :] == second["entropy"]).all(), "by the sequence's number"
    assert len(few) == kept.positions and not (kept.target_mask & ~all_of_them.target_mask).any()
    kept_N = kept.target_mask[all_of_them.target_mask]
    assert_same(few, join_rows(records, np.flatnonzero(kept_N)))
    for row in range(len(numbers)):
        mine = all_of_them.target_mask[row]
        chosen = kept.target_mask[row][mine]
        assert chosen.sum() == round(0.25 * mine.sum())
        if rule == "first 25%":
            assert chosen[: chosen.sum()].all()
        if rule == "25% by entropy":
            counts = all_of_them.target_mask.sum(1)
            entropies = np.split(records["entropy"], counts[:1])[row]
            assert entropies[chosen].min() >= entropies[~chosen].max()
            assert entropies[chosen].min() > entropies.min(), "each position's own"
    share = count_entries(told.source) / count_entries(whole)
    assert told.bytes_per_token == pytest.approx(0.25 * share * whole.bytes_per_token, rel=0.05)
    assert (share > 1) if rule == "25% by entropy" else share == pytest.approx(1, abs=0.25)
    assert told.source.tail_mean() is None, "it is that of all positions"


def join_rows(records: Records, rows: np.ndarray) -> Records:
    return Records.concatenate([records.slice(row, row + 1) for row in rows])


def assert_same(some: Records, others: Records) -> None:
    assert {name: column.tolist() for name, column in some.columns.items()} == {
        name: column.tolist() for name, column in others.columns.items()
    }


def test_the_other_positions_learn_from_the_text_at_no_byte(captured: Study) -> None:
    name = f"{THRESHOLD}, 25% by entropy"
    alone, beside = open_row(captured, name), open_row(captured, f"{name} and the text")
    assert beside.bytes_per_token == alone.bytes_per_token
    numbers = np.array([4, 7])
    kept, few = alone.source.read(numbers)
    sequences, records = beside.source.read(numbers)
    kept_N = kept.target_mask[sequences.target_mask]
    assert 0 < kept_N.sum() < len(records) == sequences.positions
    assert_same(join_rows(records, np.flatnonzero(kept_N)), few)
    gold_N = torch.from_numpy(sequences.find_gold_ids().astype(np.int64))
    columns = {name: torch.from_numpy(each) for name, each in records.columns.items()}
    logits_NV = torch.randn(len(records), 2048, dtype=torch.float64)
    targets = TargetDecoder.of(beside.source, torch.device("cpu")).decode(gold_N, columns)
    assert targets.teacher is not None
    chunk = targets.teacher.take_chunk(slice(0, len(records)), torch.float64)
    told_N = torch.logsumexp(logits_NV, 1) - chunk.compute_expected_N(logits_NV)
    plain_N = torch.nn.functional.cross_entropy(logits_NV, gold_N, reduction="none")
    assert torch.allclose(told_N[~kept_N], plain_N[~kept_N])
    assert not torch.allclose(told_N[kept_N], plain_N[kept_N])
    assert (chunk.entropy_N[~kept_N] == 0).all()


def test_draws_like_a_threshold_have_as_many_tokens(captured: Study) -> None:
    like = count_entries(open_row(captured, THRESHOLD).source)
    told = open_row(captured, f"draws like {THRESHOLD}")
    entries = count_entries(told.source)
    assert entries == pytest.approx(like, rel=0.05)
    assert told.bytes_per_token == pytest.approx(3 * entries)
    assert told.source.train_count > COUNTED_SEQUENCES


# ---------------------------------------------------------------------- students


def test_without_a_teacher_students_are_the_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--seeds=1", "--steps=2", "--sequences=16", "--held-out-sequences=2", "--length=32"]
    assert run_bench([*small, "--rows", "tempered 0.05", "--set", "loss.temperature=2"]) == 0
    printed = capsys.readouterr().out
    assert "Students: 2 fresh layers of width 128; 2 steps of 8 x 32 tokens" in printed
    assert "| tempered 0.05 |" in printed
    cut_out = parse([*small, "--from-teacher", "2", "--work", str(tmp_path)])
    assert cut_out.section["student"] == {"from_teacher": {"layers": 2}}


def test_students_of_a_seed_begin_alike_and_untied_ones_have_a_head_of_their_own(
    flags: Flags,
) -> None:
    cut_out: dict[str, Any] = {"layers": None, "width": None, "from_teacher": 1}
    for changes in ({}, {"untied": True}, cut_out, cut_out | {"untied": True}):
        study = parse(flags(**changes))
        plain, full = (make_student(study, study.make_job(row, 1), 1) for row in study.rows)
        for ours, theirs in zip(plain.parameters(), full.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        head = plain.get_output_embeddings().weight
        embedding = plain.get_input_embeddings().weight
        assert (head is embedding) == ("untied" not in changes)
        if "from_teacher" in changes:
            assert torch.equal(head, embedding), "a head that was cut off begins with its weights"


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"held_out": "nowhere.txt"}, "--held-out: there is no file nowhere.txt."),
        ({"text": "nowhere.txt"}, "--text: there is no file nowhere.txt."),
        (
            {"rows": [""]},
            "--rows: there is no row ''. A row is one of: cross-entropy only; all of p;",
        ),
        ({"rows": ["topk"]}, "--rows: there is no row 'topk'."),
        ({"rows": ["threshold 0.9"]}, "cache.threshold"),
        ({"rows": ["topk 4000"]}, "cache.k: 4000 is more than the teacher has"),
        ({"from_teacher": 1}, "The student's shape is not given, or is given twice."),
        ({"layers": None}, "Give either --from-teacher LAYERS"),
        (
            {"layers": None, "width": None, "from_teacher": 9},
            "student.from_teacher.layers is 9, but the teacher",
        ),
        ({"micro_batch": 3}, "--batch 4 is not a multiple of --micro-batch 3."),
        ({"sequences": 9999}, "9,999 sequences of the text are asked for, but it has "),
        ({"sequences": None, "steps": 2000}, "8,000 sequences of the text are asked for"),
        ({"held_out_sequences": 9999}, "9,999 sequences of the held-out text are asked for"),
        ({"teacher": "nowhere"}, "--teacher: there is no folder nowhere."),
        ({"set": "train.speed=2"}, "train.speed"),
        ({"work": None}, "--teacher needs --work too"),
        ({"rows": []}, "--rows: expected at least one argument"),
        ({"seeds": 0}, "it must be 1 or more, but got 0"),
    ],
)
def test_wrong_flags_are_refused_before_the_teacher_is_read(
    flags: Flags,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    expected: str,
) -> None:
    words = flags(**changes)
    # A list without a value is the flag alone.
    assert run_bench(words) == 2
    assert expected in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "work" / "caches").exists()


def test_a_teacher_without_a_tokenizer_is_refused(
    flags: Flags,
    tiny_teacher: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((tiny_teacher / name).read_bytes())
    assert run_bench(flags(teacher=bare)) == 2
    assert f"{bare} holds no tokenizer." in capsys.readouterr().err


def test_the_default_rows_are_rows_and_a_row_given_twice_is_one() -> None:
    assert [row.name for row in parse_rows(list(DEFAULT_ROWS))] == list(DEFAULT_ROWS)
    assert [row.name for row in parse_rows(["topk  5", "topk 5", FULL])] == ["topk 5", FULL]
    with pytest.raises(DataError, match="0 draws with replacement"):
        parse_rows(["0 draws with replacement"])


def test_figures_are_kept_as_json(flags: Flags) -> None:
    words = flags(seeds=1, rows=[PLAIN])
    assert run_bench(words) == 0
    study = parse(words)
    (kept,) = (study.work / "runs").glob("*/found.json")
    found = json.loads(kept.read_text())
    finished = read_finished(kept.parent)
    assert finished is not None
    assert found["loss"] == pytest.approx(finished.losses_N.mean())
    assert found["targets"] == study.text.corpus.validation.positions == len(finished.losses_N)
    job = load_config(kept.with_name("job.json"))
    assert job == study.make_job(study.rows[0], 0)
    assert (found["steps"], found["entries"], found["bytes_per_token"]) == (4, None, None)


def test_the_distance_to_the_teacher_is_that_of_the_whole_distributions(flags: Flags) -> None:
    """The student is the teacher, but also predicts the padding rows of the teacher's head.

    With Q its probability of the vocabulary, KL is the mean of -log Q and 1 - TV that of Q, so
    KL is a little larger than -log(1 - TV).
    """
    changes = {"steps": 1, "warmup": 0, "learning_rate": 1e-12, "from_teacher": 2}
    words = flags(seeds=1, rows=[FULL], layers=None, width=None, **changes)
    assert run_bench(words) == 0
    (kept,) = (parse(words).work / "runs").glob("*/found.json")
    found = json.loads(kept.read_text())
    assert 0.02 < found["kl"] < 0.05
    least = -math.log(found["acceptance"])
    assert least <= found["kl"] <= 1.02 * least
    assert 0.0 <= found["calibration"] <= 1.0
