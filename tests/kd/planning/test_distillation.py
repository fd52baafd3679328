"""The plan of a whole distillation: its numbers by hand, how they grow, where they come from."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.devices.plan_rates import count_files
from bench.support.paths import ROOT
from cache.disk import list_file_sizes
from cache.shard import make_shard_arrays, write_arrays
from cache.testing import make_codec, make_identity, make_sequences, make_shard
from kd.config.cache import CacheConfig
from kd.errors import ConfigError
from kd.memory.devices import DEVICE_KINDS
from kd.memory.model_work import count_model_work
from kd.memory.parallel import LINK_SHARE, count_usable
from kd.planning.devices import DeviceName
from kd.planning.distillation import sources
from kd.planning.distillation.fit import Fit, PlannedJob
from kd.planning.distillation.limits import find_bound, list_capture_limits, list_others
from kd.planning.distillation.models import choose_shape, read_model
from kd.planning.distillation.plan import plan_distillation
from kd.planning.distillation.rates import Micro, rate_teacher, spread_teacher
from kd.planning.distillation.request import PlanRequest, parse_tokens, read_config
from kd.planning.distillation.sources import Measurement, find_host_rate, find_reader_rate
from kd.planning.distillation.storage import (
    RecordSize,
    StoreSize,
    TokenCount,
    count_shard_objects,
    describe_profiles,
)
from tests.support.kd.students import make_llama

H100 = DEVICE_KINDS["h100"]
VOCABULARY = 128_256


def ask(tokens: int = 10**12, devices: str = "64xh100", **changes: Any) -> PlanRequest:
    question = PlanRequest(tokens, DeviceName.parse(devices), "8B", "1B", 24.0, {})
    return replace(question, **changes)


def make_job(question: PlanRequest, *overrides: str) -> PlannedJob:
    count = question.devices.count
    config = read_config(None, question.teacher, question.student, None, count, overrides)
    return PlannedJob.of(config, question, ROOT)


def plan(question: PlanRequest, *overrides: str) -> dict[str, Any]:
    config = make_job(question, *overrides).config
    return plan_distillation(config, question, ROOT)


def find(rows: list[dict[str, Any]], key: str, name: str) -> dict[str, Any]:
    return next(row for row in rows if row[key] == name)


# ---------------------------------------------------------------------- sources


def list_measurements() -> list[Measurement]:
    def walk(value: Any) -> list[Measurement]:
        if isinstance(value, Measurement):
            return [value]
        inner = value.values() if isinstance(value, dict) else value
        return [each for item in inner for each in walk(item)] if isinstance(
            value, dict | tuple
        ) else []  # fmt: skip

    return [each for value in vars(sources).values() for each in walk(value)]


def read_cell(measurement: Measurement) -> list[float]:
    """The numbers that the page has in this row and column; a page may have the row twice."""
    page = (ROOT / "docs/benchmarks" / measurement.page).read_text(encoding="utf-8")
    columns: list[str] = []
    found = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if not line.startswith("|"):
            columns = []
        elif not columns:
            columns = cells
        elif cells[0] == measurement.row and measurement.column in columns:
            cell = cells[columns.index(measurement.column)].replace(",", "")
            found += [float(cell)] if cell != "-" else []
    return found


@pytest.mark.parametrize("measurement", list_measurements(), ids=lambda each: f"{each}")
def test_a_measured_number_stands_in_its_page(measurement: Measurement) -> None:
    assert measurement.value in read_cell(measurement)


def test_the_sizes_beside_the_measurements_stand_in_their_pages() -> None:
    for profile, size in sources.WRITTEN_BYTES.items():
        found = replace(sources.WRITING[profile], column="bytes/token")
        assert read_cell(found) == [size]
    for measured, size in sources.READING.values():
        assert size in read_cell(replace(measured, column="bytes a token"))
    page = (ROOT / "docs/benchmarks/capture.md").read_text(encoding="utf-8")
    assert "1.8 head and 18.1 tail entries" in page
    assert pytest.approx(1.8 + 18.1) == sources.CAPTURED_ENTRIES


def test_a_measured_rate_is_scaled_down_by_larger_records_and_never_up() -> None:
    codec = RecordSize.of(CacheConfig(threshold=0.01), VOCABULARY, 64).codec
    small = find_host_rate(codec, 20.0, 5.0).value
    assert small == find_host_rate(codec, 20.0, 19.9).value == pytest.approx(1e6 / 1.64)
    assert find_host_rate(codec, 20.0, 39.8).value == pytest.approx(small / 2)
    assert find_reader_rate(codec, 10.0, 512).value == 1_145_343
    assert find_reader_rate(codec, 2 * 28.4, 2047).value == pytest.approx(1_145_343 / 2)
    assert find_reader_rate(codec, 10.0, 64).value == 1_145_343
    hidden = RecordSize.of(CacheConfig(profile="hidden"), VOCABULARY, 64).codec
    assert find_reader_rate(hidden, 1000.0, 512).value == pytest.approx(210e6 / 1000)


# ---------------------------------------------------------------------- bytes and objects


def test_shards_and_bytes_are_those_of_the_formulas() -> None:
    text = TokenCount(tokens=10**9, length=1000, shard_sequences=100)
    assert (text.sequences, text.positions, text.shards) == (10**6, 999 * 10**6, 10**4)
    assert text.pieces == 3 and text.shard_positions == 99_900
    # Dense: V numbers of 2 bytes, the gold id (2), its log-probability (2) and the entropy (1).
    records = RecordSize.of(CacheConfig(profile="dense"), 1000, 64)
    shard = 6_000
    assert records.count_bytes(text) == 2005 * text.positions + shard * text.shards
    assert records.count_token_bytes(text) == pytest.approx(2005 + shard / 99_900)
    size = 2005 * 99_900
    assert records.count_shard_objects(text) == 2 + 2 * 7 + size // 2**20


def test_a_manifest_of_few_shards_has_no_pieces() -> None:
    text = TokenCount(tokens=4096 * 100 * 1000, length=1000, shard_sequences=100)
    assert (text.shards, text.pieces) == (4096, 0)
    assert replace(text, tokens=text.tokens + 1).pieces == 2


@pytest.mark.parametrize(("vocabulary", "bytes_per_token"), [(65_536, 2.25), (65_537, 4.25)])
def test_the_token_store_is_what_the_store_writes(vocabulary: int, bytes_per_token: float) -> None:
    text = TokenCount(tokens=(1 << 22) + 1, length=1024, shard_sequences=256)
    store = StoreSize.of(text, vocabulary)
    assert store.layout.bytes_per_token == bytes_per_token
    assert store.bytes == text.sequences * 1024 * bytes_per_token
    assert (store.shard_tokens, store.objects) == (1 << 22, 4)
    three = make_sequences(0, 3, 1024, vocabulary)
    assert len(store.layout.encode(three)) == 3 * 1024 * bytes_per_token


@pytest.mark.parametrize("profile", ["threshold", "tempered", "topk", "dense", "hidden"])
def test_a_shard_has_as_many_files_as_are_told(profile: str, tmp_path: Path) -> None:
    arrays, files = count_files(profile)
    assert arrays == sources.ARRAYS[profile].value
    assert files == count_shard_objects(arrays, 0)
    # A larger one: each array of n bytes has n / 1 MiB chunks, rounded up.
    identity = make_identity(
        sequence_length=65, train_sequences=256, codec=make_codec(profile, shard_sequences=256)
    )
    large = make_shard_arrays(*make_shard(identity, 0), identity.record_codec())
    write_arrays(tmp_path / "shard", large)
    size = sum(array.nbytes for array in large.values())
    told = count_shard_objects(arrays, size)
    assert abs(told - len(list_file_sizes(tmp_path / "shard")) - 1) <= arrays
    assert profile != "dense" or size > 8 * 2**20


def test_bytes_grow_with_the_tokens() -> None:
    small, large = plan(ask(10**9)), plan(ask(10**12))
    for name in ("text", "token store", "cache", "objects of the cache"):
        one, thousand = (find(each["storage"], "name", name)["value"] for each in (small, large))
        assert thousand == pytest.approx(1000 * one, rel=1e-3)
    for one, thousand in zip(small["profiles"], large["profiles"], strict=True):
        assert thousand["bytes"] == pytest.approx(1000 * one["bytes"], rel=1e-2)
        assert thousand["bytes_per_token"] == one["bytes_per_token"]


def test_the_profiles_have_the_job_s_own_first_where_it_is_none_of_the_usual() -> None:
    text = TokenCount(10**9, 512, 256)
    usual = describe_profiles(text, CacheConfig(), VOCABULARY, 64)
    own = describe_profiles(text, CacheConfig(threshold=0.125), VOCABULARY, 64)
    assert own[0]["profile"] == "threshold 0.125" and own[1:] == usual
    smaller = [each["bytes"] for each in own[:4]]
    assert smaller == sorted(smaller)


# ---------------------------------------------------------------------- the capture


def test_a_teacher_on_one_device_is_as_fast_as_the_page_of_expected_rates_says() -> None:
    """docs/benchmarks/gpu.md: capture, 8B, 1k on h100, of a model of 8.03 billion parameters."""
    teacher = read_model("8B", ROOT, "/teacher")
    found = rate_teacher(teacher, H100, Micro(8, 1024), 1)
    assert found.links == 0
    assert found.tokens == pytest.approx(25_896, rel=0.005)
    work = teacher.plan.work
    layers = 2 * work.products + 2 * work.attention * 1024
    assert found.layers == pytest.approx(layers / (0.4 * 989e12))
    assert found.head == pytest.approx(2 * work.head * 1023 / 1024 / (0.4 * 989e12))


def test_of_a_spread_teacher_the_layers_are_divided_and_the_head_is_not() -> None:
    teacher = read_model("70B", ROOT, "/teacher")
    one, four = (rate_teacher(teacher, H100, Micro(8, 1024), ranks) for ranks in (1, 4))
    assert four.layers == pytest.approx(one.layers / 4) and four.head == one.head
    shape = teacher.plan.shape
    sent = 2 * shape.layer_count * 2 * 3 / 4 * 2 * shape.width
    assert four.links == pytest.approx(sent / (LINK_SHARE * 450e9))


def test_a_teacher_is_spread_over_as_few_devices_as_hold_it() -> None:
    micro = Micro(8, 512)
    teacher = read_model("70B", ROOT, "/teacher")
    found = spread_teacher(teacher, H100, micro, 64)
    assert found is not None and found.ranks == 4  # 35 GB of weights on each
    assert 35e9 < found.memory_bytes <= count_usable(H100.memory)
    assert spread_teacher(teacher, H100, micro, 2) is None
    small = spread_teacher(read_model("8B", ROOT, "/teacher"), H100, micro, 64)
    assert small is not None and small.ranks == 1


@pytest.mark.parametrize("stage", ["capture", "training"])
def test_twice_the_devices_take_half_the_hours(stage: str) -> None:
    one, two = (
        find(plan(ask(devices=f"{count}xh100"))["stages"], "stage", stage) for count in (32, 64)
    )
    assert two["hours"] == pytest.approx(one["hours"] / 2, rel=0.01)
    assert two["device_hours"] == pytest.approx(one["device_hours"], rel=0.01)


def test_more_devices_do_not_help_where_something_else_is_full() -> None:
    """Small shards: the object store takes 3,500 objects a second."""
    questions = [ask(devices=f"{count}xh100") for count in (1024, 2048)]
    one, two = (plan(each, "cache.shard_sequences=16") for each in questions)
    first, second = (find(each["stages"], "stage", "capture") for each in (one, two))
    assert first["bound"] == second["bound"] == "objects written"
    assert first["hours"] == second["hours"]
    # 16 sequences of 511 positions a shard, and 30 files of it.
    assert first["tokens_per_second"] == pytest.approx(3500 * 16 * 511 / 30, rel=1e-4)
    row = find(two["limits"], "limit", "objects written")
    assert row["full_at_devices"] < 1024 and row["used"] == 1.0


def test_a_stage_runs_at_the_least_of_its_limits() -> None:
    for devices in ("1xt4", "64xh100", "4096xb200"):
        found = plan(ask(devices=devices, teacher="1B"), "cache.shard_sequences=32")
        for stage in found["stages"][:-1]:
            limits = [each for each in found["limits"] if each["stage"] == stage["stage"]]
            whole = [each for each in limits if " alone" not in each["limit"]]
            rate = min(each["tokens_per_second"] for each in whole)
            assert stage["tokens_per_second"] == pytest.approx(rate)
            assert max(each["used"] for each in whole) == pytest.approx(1.0)
            seconds = stage["tokens"] / stage["tokens_per_second"]
            assert stage["hours"] == pytest.approx(seconds / 3600, rel=1e-4)


def test_the_parts_of_a_teacher_are_all_of_its_time() -> None:
    job = make_job(ask(teacher="70B"))
    fit = Fit.of(job, H100, 64)
    assert fit.teacher is not None
    limits = list_capture_limits(fit.teacher, job.records, job.text, fit.fleet)
    parts = [each for each in limits if each.part]
    assert len(parts) == 3
    assert sum(limits[0].full_at / each.full_at for each in parts) == pytest.approx(1.0)
    assert find_bound(limits) == limits[0]
    others = list_others(limits)
    assert {*others} == {*limits} - {limits[0], *parts}
    assert [each.full_at for each in others] == sorted(each.full_at for each in others)


def test_the_devices_at_which_a_limit_is_full_make_it_full() -> None:
    row = find(plan(ask())["limits"], "limit", "objects written")
    at = row["full_at_devices"]
    before, after = (
        find(plan(ask(devices=f"{count}xh100"))["stages"], "stage", "capture")["bound"]
        for count in (at, at + 1)
    )
    assert (before, after) == ("teacher", "objects written")
    said = plan(ask())["saturation"][1]
    assert f"With more devices the next limit is objects written, at {at:,} devices." in said
    small = plan(ask(devices="2048xh100"), "cache.shard_sequences=16")["saturation"][1]
    assert "bound by objects written" in small and "More devices do not help." in small


def test_the_workers_of_a_wished_duration_take_no_longer() -> None:
    question = ask(within=100.0)
    needs = plan(question)["needs"]
    workers = find(needs, "name", "workers for a capture in 100 h")["value"]
    one = find(plan(ask(devices="1xh100"))["stages"], "stage", "capture")["hours"]
    assert one / workers <= 100.0 < one / (workers - 1)


def test_what_storage_carries_is_the_bytes_over_the_time() -> None:
    found = plan(ask())
    stage = find(found["stages"], "stage", "capture")
    size = find(found["storage"], "name", "cache")["value"]
    written = find(found["needs"], "name", "capture writes")["value"]
    assert written == pytest.approx(size / (3600 * stage["hours"]), rel=0.01)
    each = find(found["needs"], "name", "training reads, each device")["value"]
    whole = find(found["needs"], "name", "training reads, all")["value"]
    assert whole == pytest.approx(64 * each, rel=1e-4)


def test_the_cost_is_the_device_hours_times_the_price() -> None:
    found = plan(ask(prices={"h100": 2.0}))
    for stage in found["stages"]:
        assert stage["cost"] == pytest.approx(2.0 * stage["device_hours"], rel=1e-4)
    by_kind = {each["device"]: each for each in found["kinds"]}
    assert by_kind["h100"]["cost"] == pytest.approx(
        sum(s["cost"] for s in found["stages"]), rel=1e-4
    )
    assert by_kind["t4"]["cost"] is None and by_kind["t4"]["device_hours"] > 0
    assert all(stage["cost"] is None for stage in plan(ask())["stages"])


def test_every_line_names_its_source() -> None:
    found = plan(ask())
    rows = [row for name in ("storage", "profiles", "stages", "needs", "limits", "kinds")
            for row in found[name]]  # fmt: skip
    assert all(row["source"] for row in rows)
    for stage in found["stages"][1:]:
        assert "not measured on a GPU" in stage["source"]
    assert json.loads(json.dumps(found)) == found


def test_what_does_not_fit_is_missing_and_the_rest_is_planned() -> None:
    found = plan(ask(teacher="405B", devices="1xt4"))
    assert [each["stage"] for each in found["stages"]] == ["tokenising"]
    assert "teacher does not fit on 1 x t4" in found["missing"][0] and len(found["missing"]) == 2
    by_kind = {each["device"]: each for each in found["kinds"]}
    assert by_kind["t4"]["device_hours"] is None and by_kind["t4"]["teacher_devices"] is None


def test_a_plan_without_a_student_has_a_capture_alone() -> None:
    found = plan(ask(student=None))
    assert [each["stage"] for each in found["stages"]] == ["tokenising", "capture"]
    assert found["student"] is None and found["missing"] == []


# ---------------------------------------------------------------------- models and questions


@pytest.mark.parametrize("size", [135e6, 500e6, 1e9, 3e9, 8e9, 14e9, 32e9, 70e9, 405e9, 1e12])
def test_a_size_stands_for_a_model_of_about_so_many_parameters(size: float) -> None:
    shape = choose_shape(size)
    assert shape is not None and shape.hidden_size % shape.attention_heads == 0
    name = f"{size / 1e6:.0f}M"
    found = read_model(name, ROOT, "/teacher")
    half_a_layer = 0.5 / shape.layers
    assert found.parameters == pytest.approx(size, rel=half_a_layer)
    assert "assumed" in found.source


def test_8b_has_the_layers_and_the_width_of_llama() -> None:
    shape = choose_shape(8.03e9)
    assert shape is not None
    assert (shape.layers, shape.hidden_size, shape.mlp_width) == (32, 4096, 14336)
    assert (shape.attention_heads, shape.tie_word_embeddings) == (32, False)
    assert choose_shape(1e6) is None


def test_a_model_is_read_from_its_config_alone(tmp_path: Path) -> None:
    model = make_llama(width=64, layers=4)
    model.config.save_pretrained(tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]
    work = count_model_work(model, model.config.vocab_size)
    for name in ("model", "model/config.json"):
        found = read_model(name, tmp_path, "/teacher")
        assert (found.vocabulary, found.parameters) == (model.config.vocab_size, work.stored)
        assert found.plan.work.products == work.products
        assert found.plan.work.attention == work.attention
        assert found.plan.work.head == work.head


def test_a_model_that_nothing_tells_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is neither a folder on this machine"):
        read_model("org/unknown", tmp_path, "/teacher")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no config"):
        read_model("empty", tmp_path, "/teacher")
    with pytest.raises(ConfigError, match="1M is not a size of a Llama"):
        read_model("1M", tmp_path, "/teacher")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(ConfigError, match=r"^teacher: "):
        read_model("odd", tmp_path, "/teacher")


def test_tokens_are_a_positive_number() -> None:
    assert parse_tokens("1e12") == 10**12 and parse_tokens(" 2048 ") == 2048
    for text, why in (
        ("many", "'many' is not a number"),
        ("", "is not a number"),
        ("0", "at least 1"),
        ("-1e9", "at least 1"),
        ("nan", "at least 1"),
        ("inf", "at least 1"),
        ("1e19", "the most of a plan"),
    ):
        with pytest.raises(ConfigError, match=why):
            parse_tokens(text)


def test_a_step_has_the_job_s_sequences_rounded_up_to_passes_of_every_device() -> None:
    """The job of no file has four passes of 8 sequences of 512 tokens on each device."""
    found = plan(ask(10**9, "8xh100"))
    steps = find(found["needs"], "name", "optimiser steps")
    assert steps["source"] == f"{8 * 4 * 8 * 512:,} tokens a step"
    assert steps["value"] == math.ceil(10**9 / 512 / (8 * 4 * 8))
    odd = plan(ask(10**9, "8xh100"), "train.gradient_accumulation_steps=3")
    assert (
        find(odd["needs"], "name", "optimiser steps")["source"] == f"{8 * 8 * 512:,} tokens a step"
    )


def test_a_cpu_and_a_teacher_on_a_server_are_refused() -> None:
    with pytest.raises(ConfigError, match="a plan by --tokens is for GPUs"):
        plan(ask(devices="cpu"))
    served = (
        "teacher.backend=http", "teacher.url=http://127.0.0.1:1", "teacher.tokenizer=folder",
        "cache.profile=topk",
    )  # fmt: skip
    config = read_config(None, "8B", "1B", None, 64, served)
    with pytest.raises(ConfigError, match="a teacher on a server runs on devices of its own"):
        PlannedJob.of(config, ask(teacher=None), ROOT)
