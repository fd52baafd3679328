"""The metrics page, read with Prometheus's own parser, and the metrics of dashboard and alerts."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import typer
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from bench.support.harness import Parts, make_config
from bench.support.paths import ROOT
from kd.client.wire.service import Device, WorkerState
from services.api.answers.prometheus import HISTOGRAM_SUFFIXES, METRICS, render_metrics
from services.api.guards.request_metrics import RequestMetrics
from services.settings import Settings
from services.store.connection import connect_redis
from services.store.embedded import find_free_port
from services.store.jobs.leases import EventBatch
from services.store.jobs.store import JobStore
from services.terminal.cli import app

OBSERVABILITY = ROOT / "docs" / "observability"
ALERTS = yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text(encoding="utf-8"))
DASHBOARD = json.loads((OBSERVABILITY / "dashboard.json").read_text(encoding="utf-8"))


@dataclass
class Service:
    """The parts of the API's service that the page reads."""

    settings: Settings
    store: JobStore
    request_metrics: RequestMetrics = field(default_factory=RequestMetrics)


@pytest.fixture
def service(parts: Parts) -> Service:
    return Service(parts.settings, parts.jobs)


def page(service: Service) -> dict[str, Metric]:
    """Return the metrics of a page by their name in METRICS."""
    families = text_string_to_metric_families(
        render_metrics(service.settings, service.store, service.request_metrics).decode()
    )
    return {
        family.name + ("_total" if family.type == "counter" else ""): family for family in families
    }


def value(service: Service, name: str, **labels: str) -> float | None:
    """Return one sample, or None."""
    samples = [
        sample
        for family in page(service).values()
        for sample in family.samples
        if sample.name == name
    ]
    found = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
    assert len(found) <= 1, found
    return found[0] if found else None


def run_a_job(parts: Parts, name: str = "quick", ending: str = "succeeded") -> str:
    job_id = parts.jobs.create(make_config(name)).id
    claim = parts.jobs.claim(job_id, "train", "host:1", 10)
    assert claim is not None
    parts.jobs.finish(
        claim,
        cast(Any, ending),
        None if ending == "succeeded" else {"type": "data_error", "detail": ""},
    )
    return job_id


def test_an_empty_service_shows_every_metric_without_labels(service: Service) -> None:
    families = page(service)
    assert value(service, "kd_store_up") == 1
    assert value(service, "kd_jobs", status="running") == 0
    assert value(service, "kd_queue_depth", queue="train") == 0
    assert value(service, "kd_workers", state="busy") == 0
    assert value(service, "kd_reconciler_last_run_timestamp_seconds") == 0
    assert cast(float, value(service, "kd_disk_free_bytes")) > 0
    assert value(service, "kd_disk_floor_bytes") == service.settings.disk_floor_bytes
    assert cast(float, value(service, "kd_store_memory_bytes")) > 0
    unlabelled = {name for name, one in METRICS.items() if one.type == "counter" and not one.labels}
    assert {name: families[name].samples[0].value for name in unlabelled} == dict.fromkeys(
        unlabelled, 0.0
    )


def test_transitions_are_counted(service: Service, parts: Parts) -> None:
    run_a_job(parts)
    run_a_job(parts, ending="failed")
    parts.submit("waits")
    assert value(service, "kd_jobs_total", kind="train", status="queued") == 3
    assert value(service, "kd_jobs_total", kind="train", status="succeeded") == 1
    assert value(service, "kd_jobs_total", kind="train", status="failed") == 1
    assert value(service, "kd_jobs", status="queued") == 1
    assert value(service, "kd_queue_depth", queue="train") == 1
    assert value(service, "kd_job_duration_seconds_count", kind="train", status="failed") == 1
    assert value(service, "kd_job_queue_wait_seconds_count", stage="train") == 2


def test_deaths_and_fenced_writes_are_counted(service: Service, parts: Parts) -> None:
    job_id = parts.jobs.create(make_config("dies")).id
    claim = parts.jobs.claim(job_id, "train", "host:1", 10)
    assert claim is not None
    parts.jobs.fail_attempt(claim, {"type": "worker_lost", "detail": "gone"})
    assert parts.jobs.beat(claim, 10, EventBatch(1, ())) == "fenced"
    lost = parts.jobs.claim(job_id, "train", "host:1", 0.001)
    assert lost is not None
    time.sleep(0.01)
    assert parts.jobs.expire() == [job_id]
    assert value(service, "kd_job_attempts_total", reason="worker_lost") == 2
    assert value(service, "kd_fenced_writes_total") == 1
    assert value(service, "kd_lease_expirations_total") == 1


def histograms(service: Service) -> Iterator[tuple[str, dict[float, float], float, float]]:
    """Yield every histogram: its name, its buckets in the page's order, its count and its sum."""
    for name, family in page(service).items():
        series: dict[tuple[tuple[str, str], ...], list[Any]] = {}
        for sample in family.samples if family.type == "histogram" else ():
            labels = tuple(
                sorted((label, text) for label, text in sample.labels.items() if label != "le")
            )
            series.setdefault(labels, []).append(sample)
        for samples in series.values():
            buckets = {
                float(one.labels["le"]): one.value
                for one in samples
                if one.name == f"{name}_bucket"
            }
            (count,) = (one.value for one in samples if one.name == f"{name}_count")
            (total,) = (one.value for one in samples if one.name == f"{name}_sum")
            yield name, buckets, count, total


def test_histograms_are_whole(service: Service, parts: Parts) -> None:
    run_a_job(parts)
    run_a_job(parts, ending="failed")
    for seconds in (0.002, 0.2, 40.0):
        service.request_metrics.add("GET", "/jobs", 200, seconds)
    parts.jobs.count("kd_cache_chunk_write_seconds_sum", 0.5)
    parts.jobs.count("kd_cache_chunk_write_seconds_count", 2)
    parts.jobs.count("kd_cache_chunk_write_seconds_bucket", 2, le="1")
    parts.jobs.count("kd_cache_chunk_write_seconds_bucket", 2, le="+Inf")
    found = list(histograms(service))
    assert {name for name, *_ in found} == {
        name for name, one in METRICS.items() if one.type == "histogram"
    }
    for name, buckets, count, total in found:
        bounds = list(buckets)
        counts = list(buckets.values())
        assert bounds == sorted(bounds), name
        assert counts == sorted(counts), f"{name}: buckets are cumulative"
        assert bounds[-1] == math.inf
        assert counts[-1] == count > 0
        assert total >= 0


def test_workers_are_counted_by_state_and_by_host(service: Service, parts: Parts) -> None:
    long_ago = parts.jobs.read_clock() - timedelta(seconds=12)
    gpus = Device(kind="cuda", index="0,1", count=2, memory_bytes=80 << 30)
    for number, (job, stopping) in enumerate([("job_1", False), (None, False), (None, True)]):
        beat_at = long_ago if number == 0 else long_ago + timedelta(seconds=11)
        device = gpus if number == 0 else Device()
        parts.jobs.show_worker(
            WorkerState(
                id=f"a:{number}",
                host="a",
                job=job,
                stopping=stopping,
                beat_at=beat_at,
                device=device,
            ),
            30,
        )
    assert [
        value(service, "kd_workers", state=state) for state in ("busy", "idle", "stopping")
    ] == [1, 1, 1]
    assert value(service, "kd_worker_heartbeat_age_seconds", host="a") == pytest.approx(12, abs=2)
    assert value(service, "kd_gpu_memory_bytes", host="a", device="1") == 80 << 30


def test_counters_of_workers_are_shown_even_without_a_description(
    service: Service, parts: Parts
) -> None:
    parts.jobs.count("kd_train_tokens_total", 512)
    parts.jobs.count("kd_train_tokens_total", 512)
    parts.jobs.count("kd_new_total", 3, where="here")
    assert value(service, "kd_train_tokens_total") == 1024
    assert value(service, "kd_new_total", where="here") == 3


def test_no_label_holds_an_id(service: Service, parts: Parts) -> None:
    job_id = run_a_job(parts)
    parts.jobs.show_worker(
        WorkerState(id="host:123", host="host", pid=123, job=job_id, beat_at=datetime.now(UTC)), 30
    )
    text = render_metrics(service.settings, service.store, service.request_metrics).decode()
    assert 'host="host"' in text
    assert job_id not in text
    assert "host:123" not in text


def test_every_sample_has_the_type_and_the_labels_that_are_described(
    service: Service, parts: Parts
) -> None:
    run_a_job(parts)
    service.request_metrics.add("GET", "/jobs", 200, 0.1)
    for name, family in page(service).items():
        described = METRICS[name]
        assert (family.type, family.documentation) == (described.type, described.help)
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(described.labels), sample


def test_without_redis_the_page_says_so(tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{find_free_port()}/0"
    service = Service(
        Settings(home=tmp_path / "not" / "made", redis_url=url), JobStore(connect_redis(url))
    )
    service.request_metrics.add("GET", "/jobs", 503, 0.1)
    assert value(service, "kd_store_up") == 0
    assert value(service, "kd_http_requests_total", method="GET", route="/jobs", status="503") == 1
    assert value(service, "kd_jobs", status="queued") is None


# The metrics of the code and those of the documents


def test_everything_that_is_counted_is_described() -> None:
    sources = [*(ROOT / "services").rglob("*.py"), ROOT / "services" / "store" / "jobs.lua"]
    named = re.compile(r"['\"](kd_[a-z_]+[a-z])['\"]")
    counted = {name for path in sources for name in named.findall(path.read_text(encoding="utf-8"))}
    assert {"kd_jobs_total", "kd_train_tokens_total"} <= counted
    samples = {
        name + part
        for name, one in METRICS.items()
        if one.type == "histogram"
        for part in HISTOGRAM_SUFFIXES
    }
    assert counted - METRICS.keys() - samples == set()


def expressions() -> dict[str, str]:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    targets = [
        (panel["title"], target)
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    ]
    found = {rule["alert"]: rule["expr"] for rule in rules}
    return found | {f"{title}: {target['refId']}": target["expr"] for title, target in targets}


EXPRESSIONS = expressions()
FUNCTIONS = {
    "sum",
    "max",
    "min",
    "count",
    "by",
    "on",
    "and",
    "absent",
    "increase",
    "rate",
    "time",
    "histogram_quantile",
}
WORDS = FUNCTIONS | {"le"} | {label for one in METRICS.values() for label in one.labels}
TOKEN = re.compile(
    r"\s+|(?P<string>\"[^\"]*\")|(?P<duration>\[\d+[smhd]\])|(?P<number>\d+(?:\.\d+)?)|(?P<name>[a-zA-Z_]\w*)"
    r"|(?P<operator>==|!=|>=|<=|=~|!~|[-+*/<>=])|(?P<open>[({])|(?P<close>[)}])|,"
)


def tokens(expression: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(expression):
        match = TOKEN.match(expression, position)
        assert match is not None, f"{expression[position:]!r} is no part of a query"
        position = match.end()
        if match.lastgroup:
            yield match.lastgroup, match[0]


def check(expression: str) -> set[str]:
    """Return the metrics of a query; raise AssertionError if it is not well formed."""
    opened = []
    names = set()
    before = ""
    for kind, text in tokens(expression):
        if kind == "open":
            opened.append({"(": ")", "{": "}"}[text])
        elif kind == "close":
            assert opened and opened.pop() == text, f"{text} closes nothing"
        elif kind == "name" and text not in WORDS:
            names.add(text)
        assert (before, kind) != ("operator", "close"), f"nothing before {text}"
        assert not (
            kind == before
            and kind in ("name", "number", "operator", "string")
            and text not in WORDS
        ), text
        before = kind
    assert not opened, "a bracket stays open"
    return names


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_the_metrics_of_dashboard_and_alerts_are_exported(where: str) -> None:
    exported = METRICS.keys() | {
        name + part
        for name, one in METRICS.items()
        if one.type == "histogram"
        for part in HISTOGRAM_SUFFIXES
    }
    names = check(EXPRESSIONS[where])
    assert names
    assert names - exported == set()
    for name in names:
        series = next(
            one
            for one in (name, *(name.removesuffix(part) for part in HISTOGRAM_SUFFIXES))
            if one in METRICS
        )
        if METRICS[series].type == "gauge":
            assert not re.search(rf"(rate|increase)\({name}", EXPRESSIONS[where]), (
                "a gauge has no rate"
            )
        else:
            assert re.search(rf"(rate|increase)\({name}", EXPRESSIONS[where]), (
                "a counter means something only by its rate"
            )


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_the_labels_of_dashboard_and_alerts_exist(where: str) -> None:
    expression = EXPRESSIONS[where]
    for name, matchers in re.findall(r"(kd_\w+)\{([^}]*)\}", expression):
        series = next(
            one
            for one in (name, *(name.removesuffix(part) for part in HISTOGRAM_SUFFIXES))
            if one in METRICS
        )
        assert set(re.findall(r"(\w+)(?:=|!|=~|!~)", matchers)) <= set(METRICS[series].labels)
    for words, name in re.findall(r"by \(([\w, ]+)\) \((?:rate\(|increase\()?(kd_\w+)", expression):
        series = next(
            one
            for one in (name, *(name.removesuffix(part) for part in HISTOGRAM_SUFFIXES))
            if one in METRICS
        )
        assert set(words.split(", ")) <= {*METRICS[series].labels, "le"}


@pytest.mark.parametrize(
    "wrong",
    [
        "sum(kd_jobs",
        "sum(kd_jobs))",
        "kd_jobs kd_jobs",
        "kd_jobs{status=}",
        "rate(kd_jobs[5x])",
        "kd_jobs > > 1",
    ],
)
def test_a_query_that_is_not_well_formed_is_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


def test_every_metric_is_shown_somewhere() -> None:
    asked = {name for expression in EXPRESSIONS.values() for name in check(expression)}
    shown = {
        next(
            one
            for one in (name, *(name.removesuffix(part) for part in HISTOGRAM_SUFFIXES))
            if one in METRICS
        )
        for name in asked
    }
    assert METRICS.keys() - shown == set()


def test_the_alerts_are_rules_and_each_says_what_to_do() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "remedy"}
        assert re.fullmatch(r"\d+[smhd]", rule.get("for", "0s"))
        for used in re.findall(r"\$labels\.(\w+)", str(rule["annotations"])):
            assert f"by ({used})" in rule["expr"]


def test_the_dashboard_is_one_that_can_be_imported() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert DASHBOARD["templating"]["list"][0]["type"] == "datasource"
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"
    assert not re.search(r"__inputs|https?://", json.dumps(DASHBOARD))


@pytest.mark.parametrize("name", METRICS)
def test_names_are_in_prometheus_s_form(name: str) -> None:
    described = METRICS[name]
    assert re.fullmatch(r"kd_[a-z_]+", name)
    assert (described.type == "counter") == name.endswith("_total")
    assert not {"job", "job_id", "id", "instance", "le", "quantile"} & set(described.labels)


def test_the_commands_and_settings_that_the_documents_name_exist() -> None:
    texts = [
        (OBSERVABILITY / name).read_text(encoding="utf-8") for name in ("README.md", "alerts.yml")
    ]
    commands = [words.split() for text in texts for words in re.findall(r"`kd ([^`]+)`", text)]
    assert len(commands) >= 5
    for words in commands:
        command: Any = typer.main.get_command(app)
        for word in (word for word in words if hasattr(command, "commands")):
            command = command.commands[word]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, words
    named = {name for text in texts for name in re.findall(r"\bKD_([A-Z_]+)", text)}
    assert {name.lower() for name in named} <= Settings.model_fields.keys()


def test_the_readme_lists_every_metric() -> None:
    readme = (OBSERVABILITY / "README.md").read_text(encoding="utf-8")
    listed = readme.partition("of each metric what it tells:")[2].partition(".\n")[0]
    assert re.findall(r"`(kd_\w+)`", listed) == list(METRICS)
