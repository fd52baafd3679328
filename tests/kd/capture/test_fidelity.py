"""Fidelity: the right teacher always passes, any other teacher fails, and a biased sampler is
found.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bench.support.small.caches import make_cache
from cache.checking.listing import summarise_cache
from cache.checking.verify import verify_cache
from cache.manifest import FidelityRow
from cache.records import Records, Sequences
from cache.store import Cache, open_cache, read_manifest, replace_fidelity
from kd.capture.capturing import summarise_cache as describe_cache
from kd.capture.fidelity.bounds import LARGEST_Z
from kd.capture.fidelity.live import LiveTeacher, TeacherLocation
from kd.capture.fidelity.measure import FidelityMeasurement, choose_temperatures, measure_fidelity
from kd.capture.fidelity.verdict import find_out_of_bounds, judge_fidelity
from kd.config.cache import CacheConfig
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import FidelityError
from kd.models.layers import compute_hidden_states
from kd.pipeline import run_stage
from kd.progress import SILENT, Event, Monitor
from kd.stages.capture import run_precompute
from tests.support.commands import kd
from tests.support.kd.captures import PROFILES, capture, live
from tests.support.kd.samples import stop_chance
from tests.support.kd.zoo import write_gguf

pytestmark = pytest.mark.usefixtures("one_thread")

# ---------------------------------------------------------------------- the right teacher


@pytest.mark.long
@pytest.mark.parametrize("name", PROFILES)
def test_a_capture_ends_with_its_fidelity(stores: dict[str, Cache], name: str) -> None:
    store = stores[name]
    rows = store.manifest.fidelity
    assert tuple(row.temperature for row in rows) == choose_temperatures(store.codec)
    assert all(row.positions == 32 and row.top1_agreement == 1.0 for row in rows)
    sampled = name in ("threshold", "tempered")
    for row in rows:
        assert (row.kl is None) == sampled == (row.bias_z is not None) == (row.stored_z is not None)
        assert 0 < row.kept_mass <= 1 + 1e-9
    assert find_out_of_bounds(store, FidelityMeasurement(rows, 0.0)) == []
    assert verify_cache(store.folder) == []


@pytest.mark.parametrize(("name", "known"), [("threshold", 3), ("tempered", 1), ("topk", 16)])
def test_the_next_token_counts_as_an_entry(stores: dict[str, Cache], name: str, known: int) -> None:
    """So does the concept page count: the next token, the head and the tail are 18 entries.

    The cache of profile threshold also keeps two tokens always; topk has its K alone.
    """
    _, records = stores[name].read(range(len(stores[name])))
    counts = [records.columns.get(f"{part}_count", np.zeros(1)) for part in ("head", "tail")]
    expected = known + sum(float(np.mean(each)) for each in counts)
    found = describe_cache(stores[name], reused=True)["entries_per_token"]
    assert found == pytest.approx(expected, abs=1e-3)


def test_what_is_measured_is_true(stores: dict[str, Cache], tiny_teacher: Path) -> None:
    """Kept mass, KL and gold error of topk are computed from the teacher's own logits."""
    store = stores["topk"]
    (row,) = measure_fidelity(store, live(tiny_teacher), positions=24 * 64).rows
    sequences, records = store.read(range(len(store)))
    assert row.positions == len(records)
    with torch.no_grad():
        tokens = torch.from_numpy(sequences.tokens.astype(np.int64))
        hidden_BLD = compute_hidden_states(
            live(tiny_teacher).model, tokens, None
        )  # each sequence is one document
        places = hidden_BLD[torch.from_numpy(sequences.target_mask)]
        logp = live(tiny_teacher).lm_head.compute_logits(places).double().log_softmax(-1)
    top = logp.sort(descending=True).values[:, :16]
    assert row.kept_mass == pytest.approx(float(top.exp().sum(1).mean()), abs=1e-4)
    gold = logp.gather(1, torch.from_numpy(sequences.find_gold_ids().astype(np.int64))[:, None])[
        :, 0
    ].numpy()
    error = np.abs(np.expm1(records["known"][:, 0] * -(2.0**-8) - gold)).mean()
    assert row.gold_error == pytest.approx(float(error), rel=1e-2)
    entropy = torch.special.entr(logp.exp()).sum(1).numpy()
    assert row.entropy_error == pytest.approx(
        float((records["entropy"] / 16 - entropy).mean()), abs=1e-4
    )


@pytest.mark.parametrize("name", PROFILES)
def test_the_same_teacher_gives_the_same_rows(
    stores: dict[str, Cache], tiny_teacher: Path, name: str
) -> None:
    found = measure_fidelity(stores[name], live(tiny_teacher))
    assert found.rows == stores[name].manifest.fidelity


@pytest.mark.parametrize("gain", [0.3, 1.0, 4.0, 12.0])
@pytest.mark.long
def test_no_false_alarm(tiny_teacher: Path, tiny_text: Path, tmp_path: Path, gain: float) -> None:
    """Teachers range from nearly uniform to nearly certain, where a draw changes once in a thousand
    positions.
    """
    teacher = altered(
        tiny_teacher, tmp_path / "teacher", lambda model: model.model.norm.weight.mul_(gain)
    )
    for seed in range(4):
        folder = capture(teacher, tiny_text, tmp_path, threshold=0.2, seed=seed)
        (row,) = read_manifest(folder).fidelity
        assert row.bias_z is not None and row.bias_z < 5
        assert row.stored_z is not None and row.stored_z < 5


def test_a_bfloat16_teacher_passes(tiny_teacher: Path, tiny_text: Path, tmp_path: Path) -> None:
    """The bounds allow for the teacher's own noise: it captures eight sequences at a time, and is
    compared one by one.
    """
    data = {"train": str(tiny_text), "sequence_length": 64, "max_train_samples": 20}
    job = {
        "kind": "precompute",
        "teacher": {"model": str(tiny_teacher), "dtype": "bfloat16"},
        "data": data,
    }
    assert run_precompute(parse_config(job), tmp_path, tmp_path / "run", SILENT).cache["tokens"] > 0


# ---------------------------------------------------------------------- any other


def altered(teacher: Path, folder: Path, change: Any) -> Path:
    """Return the teacher with its weights changed in place."""
    shutil.copytree(teacher, folder)
    model = LlamaForCausalLM.from_pretrained(teacher)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    return folder


def other_weights(model: LlamaForCausalLM) -> None:
    torch.manual_seed(1)
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) * 0.05 * weight.std())


def other_head(model: LlamaForCausalLM) -> None:
    torch.manual_seed(1)
    head = torch.nn.Linear(32, 2112, bias=False)
    head.weight.copy_(model.lm_head.weight[torch.randperm(2112)])
    model.lm_head = head
    model.config.tie_word_embeddings = False


class Shifted(LiveTeacher):
    """A teacher whose hidden states are those of the next position."""

    def compute_states(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        hidden_ND, gold_N = super().compute_states(sequences)
        counts = sequences.target_mask.sum(1).tolist()
        return torch.cat([part.roll(-1, 0) for part in hidden_ND.split(counts)]), gold_N


@pytest.mark.parametrize("change", [other_weights, other_head])
@pytest.mark.parametrize("name", PROFILES)
def test_another_teacher_fails(
    stores: dict[str, Cache], tiny_teacher: Path, tmp_path: Path, name: str, change: Any
) -> None:
    teacher = live(altered(tiny_teacher, tmp_path / "other", change))
    with pytest.raises(FidelityError, match="gold_error at temperature") as caught:
        judge_fidelity(stores[name], measure_fidelity(stores[name], teacher), CacheConfig())
    assert str(stores[name].folder) in caught.value.detail
    assert "delete" in caught.value.remedy


@pytest.mark.parametrize("name", PROFILES)
def test_shifted_positions_fail(stores: dict[str, Cache], tiny_teacher: Path, name: str) -> None:
    right = live(tiny_teacher)
    found = measure_fidelity(stores[name], Shifted(right.model, right.lm_head))
    assert found.noise < 1e-4, "the same shift in every batch is no noise"
    assert find_out_of_bounds(stores[name], found)


@pytest.mark.parametrize("options", [PROFILES["threshold"], PROFILES["tempered"]])
def test_a_biased_sampler_fails_the_capture(
    tiny_teacher: Path,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    """Heads, gold tokens and entropies are right; only the tail is not drawn at random."""
    events: list[Event] = []
    with monkeypatch.context() as patch:
        stop_chance(patch)
        with pytest.raises(FidelityError, match="bias_z"):
            capture(tiny_teacher, tiny_text, tmp_path, Monitor(events.append), **options)
    (folder,) = (path for path in (tmp_path / "caches").iterdir() if path.is_dir())
    assert not (folder / "manifest.json").exists(), "it must not be trained on"
    assert len(list((folder / "seals").glob("[0-9]*.json"))) == 4, "the shards stay"
    assert "checking fidelity" in [event.data.get("phase") for event in events]


@pytest.mark.long
def test_a_capture_that_was_killed_before_its_check_is_checked_when_it_goes_on(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    folder = capture(tiny_teacher, tiny_text, tmp_path)
    manifest = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").unlink()
    events: list[Event] = []
    capture(tiny_teacher, tiny_text, tmp_path, Monitor(events.append))
    phases = [event.data.get("phase", "") for event in events]
    assert "capturing" not in phases and "checking fidelity" in phases
    assert (folder / "manifest.json").read_bytes() == manifest


# ---------------------------------------------------------------------- once it is sealed

ROW = FidelityRow(1.0, 32, 0.5, 0.001, None, 2.0, 2.5, 0.001, None, 0.01)


def test_rows_are_replaced_and_nothing_else(tmp_path: Path) -> None:
    folder = make_cache(tmp_path)
    before = read_manifest(folder)
    summary = summarise_cache(folder)
    assert (
        replace_fidelity(folder, (ROW,))
        == replace(before, fidelity=(ROW,))
        == read_manifest(folder)
    )
    assert verify_cache(folder) == []
    assert summarise_cache(folder).created == summary.created


@pytest.fixture
def home(stores: dict[str, Cache], tmp_path: Path) -> Path:
    folder = stores["threshold"].folder
    shutil.copytree(folder, tmp_path / "caches" / folder.name)
    return tmp_path


@pytest.mark.long
def test_kd_cache_fidelity_measures_anew(home: Path, stores: dict[str, Cache]) -> None:
    folder = home / "caches" / stores["threshold"].folder.name
    replace_fidelity(folder, ())
    arguments = ("cache", "fidelity", folder.name[:8], "--home", home)
    done = kd(*arguments, "--positions", 48, "--redraws", 10, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "kept_mass" in done.stdout and "kl" not in done.stdout.split()
    (row,) = read_manifest(folder).fidelity
    assert row.positions == 48
    assert verify_cache(folder) == []
    info = kd("cache", "info", folder.name[:8], "--home", home)
    assert "kept_mass" in info.stdout
    document = json.loads(kd("cache", "info", folder.name[:8], "--home", home, "--json").stdout)
    assert document["fidelity"][0]["positions"] == 48


@pytest.mark.long
def test_kd_cache_fidelity_with_another_teacher(
    home: Path, stores: dict[str, Cache], tiny_teacher: Path
) -> None:
    folder = home / "caches" / stores["threshold"].folder.name
    before = (folder / "manifest.json").read_bytes()
    other = altered(tiny_teacher, home / "other", other_weights)
    done = kd("cache", "fidelity", folder.name, "--home", home, "--teacher", other, "--json")
    assert done.returncode == 4, done.stderr
    answer = json.loads(done.stdout)
    assert any(line.startswith("gold_error at temperature 1 is") for line in answer["problems"])
    assert answer["written"] is False
    assert (folder / "manifest.json").read_bytes() == before


def make_fidelity_job(store: Cache, teacher: Path) -> JobConfig:
    return parse_config(
        {
            "kind": "fidelity",
            "teacher": {"model": str(teacher)},
            "cache": {"fingerprint": store.folder.name},
        }
    )


def test_a_job_measures_anew_and_the_cache_keeps_it(
    home: Path, stores: dict[str, Cache], tiny_teacher: Path
) -> None:
    store = stores["threshold"]
    folder = home / "caches" / store.folder.name
    replace_fidelity(folder, ())
    events: list[Event] = []
    run = home / "run"
    done = run_stage(
        "precompute", make_fidelity_job(store, tiny_teacher), home, run, Monitor(events.append)
    )
    assert done.cache["faithful"] is True
    written = json.loads((run / "fidelity.json").read_text())
    assert (written["fingerprint"], written["problems"]) == (folder.name, [])
    assert read_manifest(folder).fidelity == store.manifest.fidelity
    assert [event.data["name"] for event in events if event.type == "artifact"] == ["fidelity.json"]
    assert verify_cache(folder) == []


def test_a_job_refuses_another_teacher(
    home: Path, stores: dict[str, Cache], tiny_teacher: Path
) -> None:
    other = altered(tiny_teacher, home / "other", other_weights)
    folder = home / "caches" / stores["threshold"].folder.name
    before = (folder / "manifest.json").read_bytes()
    job = make_fidelity_job(stores["threshold"], other)
    with pytest.raises(FidelityError, match="captured from other weights"):
        run_stage("precompute", job, home, home / "run")
    assert (folder / "manifest.json").read_bytes() == before


@pytest.mark.long
def test_a_job_fails_where_records_differ(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_cache(capture(tiny_teacher, tiny_text, tmp_path, threshold=0.02))
    monkeypatch.setattr("kd.capture.fidelity.bounds.LARGEST_Z", 0.0)
    with pytest.raises(FidelityError, match="bias_z at temperature 1"):
        run_stage("precompute", make_fidelity_job(store, tiny_teacher), tmp_path, tmp_path / "two")
    problems = json.loads((tmp_path / "two" / "fidelity.json").read_text())["problems"]
    assert len(problems) == 2


@pytest.mark.long
def test_a_gguf_teacher_is_found_where_the_cache_says(
    tokenizer: Any, tiny_text: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    (tmp_path / "teacher").mkdir()
    write_gguf(LlamaForCausalLM(shape), tokenizer, tmp_path / "teacher" / "tiny.gguf", np.float32)
    job = {
        "kind": "precompute",
        "teacher": {"model": str(tmp_path / "teacher"), "gguf_file": "tiny.gguf"},
        "data": {
            "train": str(tiny_text),
            "sequence_length": 16,
            "max_train_samples": 4,
            "max_eval_samples": 1,
        },
    }
    found = run_precompute(parse_config(job), tmp_path, tmp_path / "run", SILENT).cache[
        "fingerprint"
    ]
    store = open_cache(tmp_path / "caches" / found)
    origin = TeacherLocation.find(store, None, tmp_path)
    assert (
        origin.genuine
        and origin.teacher.section.gguf_file == "tiny.gguf"
        and origin.teacher.folder == tmp_path / "teacher"
    )


def test_records_of_a_server_or_of_an_import_have_no_live_teacher(
    stores: dict[str, Cache], tmp_path: Path
) -> None:
    store = stores["topk"]
    identity = replace(store.identity, teacher=replace(store.identity.teacher, dtype="imported"))
    imported = Cache(store.folder, replace(store.manifest, identity=identity))
    with pytest.raises(FidelityError, match="no live teacher") as caught:
        TeacherLocation.find(imported, None, tmp_path)
    assert "kd cache verify" in caught.value.remedy


def test_the_bound_of_z_is_what_the_docstring_says() -> None:
    """Check Bennett's inequality at the largest z, for changes of size 1 at any rate: variance =
    rate.
    """
    rates = np.geomspace(1e-6, 1e6, 400)
    reach = LARGEST_Z * np.sqrt(rates + 1)
    share = reach / rates
    chance = np.exp(-rates * ((1 + share) * np.log1p(share) - share))
    assert chance.max() < 1e-9


@pytest.mark.long
def test_sequences_without_targets_are_passed_over(
    tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding and prompts have no records; one of all sampled positions has a record."""
    text = tmp_path / "text.txt"
    text.write_text("It was " * 400)
    folder = capture(tiny_teacher, text, tmp_path, shard_sequences=2)
    store = open_cache(folder)
    read = Cache.read

    def first_only(self: Cache, indices: Any, draws: Any = 0) -> tuple[Sequences, Records]:
        sequences, records = read(self, indices, draws)
        mask = np.zeros_like(sequences.target_mask)
        mask[:, 0] = list(indices) == [0]
        return replace(sequences, target_mask=mask), records.slice(0, int(mask.sum()))

    monkeypatch.setattr(Cache, "read", first_only)
    found = measure_fidelity(store, live(tiny_teacher), positions=80)
    assert [row.positions for row in found.rows] == [1]
    assert find_out_of_bounds(store, found) == []
