"""``kd demo``: the example job through the whole service, over HTTP, on this machine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cache.errors import PotstillError
from kd.config.job import JobConfig
from kd.jobfile import load_config
from services.settings import Settings
from services.terminal.client import Client
from services.terminal.console import complain
from services.terminal.follow import Display
from services.terminal.up import running

EXAMPLE = Path("examples/austen/job.yaml")
BASELINE = ("kind=train", "loss.alpha=1", "name=austen-baseline")
ROWS = {
    "teacher_perplexity": "teacher's perplexity on held-out text",
    "student_perplexity_before": "student's, before training",
    "student_perplexity": "student's, after training",
    "validation_kl": "KL(teacher || student), nats per token",
    "validation_agreement": "agreement on the best next token",
    "bytes_per_token": "cache, bytes per token",
    "train_tokens_per_second": "training, tokens per second",
}


def run_demo(settings: Settings, baseline: bool, out: Console, err: Console) -> int:
    """Start the service, run the job and with ``baseline`` its twin without a teacher, stop; returns the exit code."""
    root = _root(settings)
    overrides = [(), BASELINE] if baseline else [()]
    configs = [load_config(root / EXAMPLE, changes) for changes in overrides]
    settings = settings.model_copy(update={"root": root, "port": 0, "host": "127.0.0.1"})
    with running(settings, 1, err.print) as running_settings, _client(running_settings) as client:
        err.print(f"the service is up at {running_settings.server}, with its data in {settings.home}")
        jobs = [_post_and_follow(client, config, running_settings.server, err) for config in configs]
    for job in jobs:
        _print_outcome(job, out)
    if baseline and all(job["status"] == "succeeded" for job in jobs):
        _compare(jobs, out)
    err.print("`kd up` serves what was made, with its curves in the browser")
    return 0 if all(job["status"] == "succeeded" for job in jobs) else 1


def _client(settings: Settings) -> Client:
    return Client(settings.server, settings.api_key)


def _root(settings: Settings) -> Path:
    for root in (settings.root, Path(__file__).resolve().parents[2]):
        if (root / EXAMPLE).is_file():
            return root
    raise PotstillError(f"The example {EXAMPLE} is not here.", "Run `kd demo` in the folder of the source code.")


def _post_and_follow(client: Client, config: JobConfig, server: str, err: Console) -> dict[str, Any]:
    job: dict[str, Any] = client.post("/jobs", config.model_dump(mode="json"))
    err.print(f"POST /jobs: {job['id']} ({job['kind']} {job['name']})")
    err.print(f"curves:     {server}/#/jobs/{job['id']}", soft_wrap=True)
    with Display(err) as display:
        for kind, data in client.events(job["id"]):
            display.show(kind, data)
    return dict(client.get(f"/jobs/{job['id']}"))


def _print_outcome(job: dict[str, Any], out: Console) -> None:
    if job["error"]:
        complain(f"{job['name']} failed: {job['error']['detail']}", job["error"]["remedy"])
    page = Path(job["artifacts"].get("report.md", "-"))
    if page.is_file():
        out.print(page.read_text(encoding="utf-8"), markup=False)
    for name, path in job["artifacts"].items():
        out.print(f"{name}: {path}", soft_wrap=True)
    out.print(f"status: {job['status']}")


def _compare(jobs: list[dict[str, Any]], out: Console) -> None:
    """The reports side by side, as far as both have the figure."""
    reports = [_report(job) for job in jobs]
    table = Table("", *(job["name"] for job in jobs), box=None, pad_edge=False)
    for key, label in ROWS.items():
        values = [report.get(key) for report in reports]
        if any(value is not None for value in values):
            table.add_row(label, *("" if value is None else f"{value:,.3f}" for value in values))
    out.print(table)
    if (share := _share_of_distance(*reports)) is not None:
        out.print(f"distillation covers {share:.0%} of the distance from the student without a teacher to the teacher")


def _share_of_distance(distilled: dict[str, Any], plain: dict[str, Any]) -> float | None:
    """How far towards the teacher, in nats of held-out cross-entropy, distillation takes the student."""
    found = (plain.get("student_perplexity"), distilled.get("student_perplexity"), distilled.get("teacher_perplexity"))
    nats = [math.log(perplexity) for perplexity in found if perplexity is not None]
    if len(nats) < len(found) or nats[0] <= nats[2]:
        return None
    without, with_teacher, teacher = nats
    return (without - with_teacher) / (without - teacher)


def _report(job: dict[str, Any]) -> dict[str, Any]:
    file = Path(job["artifacts"].get("report.json", "-"))
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
