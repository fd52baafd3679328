"""``kd demo``: run the example job through the whole service on this machine, over HTTP."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from cache.errors import PotstillError
from cache.json_object import Json
from kd.client.client import Client
from kd.client.wire.jobs import Job
from kd.config.job import JobConfig
from kd.config.jobfile import load_config
from kd.files import read_json, whole_folder
from services.settings import Settings
from services.terminal.client import FOLLOW_PATIENCE, make_client
from services.terminal.commands.up import require_worker_packages, running
from services.terminal.console import print_error
from services.terminal.display import Display

if TYPE_CHECKING:
    from kd.checks.verdict import Verdict

#: The job file of the example: in the folder of the source code, or in the package of a wheel.
EXAMPLE = Path("examples/austen/job.yaml")
#: Changes that make the example train its student without a teacher.
BASELINE = ("kind=train", "loss.alpha=1", "name=austen-baseline")
#: The rows of the comparison, by the key of the report.
ROWS = {
    "teacher_perplexity": "teacher's perplexity on held-out text",
    "student_perplexity_before": "student's, before training",
    "student_perplexity": "student's, after training",
    "held_out_tokens": "tokens of the held-out text",
    "validation_kl": "KL(teacher || student), nats per token",
    "validation_agreement": "agreement on the best next token",
    "bytes_per_token": "cache, bytes per token",
    "train_tokens_per_second": "training, tokens per second",
}


def run_demo(settings: Settings, baseline: bool, err: Console) -> list[Job]:
    """Start the service, run the example job, stop the service; return the records of its jobs.

    With ``baseline`` the same job without a teacher runs too.
    """
    require_worker_packages()
    root = _find_root(settings.root)
    overrides = [(), BASELINE] if baseline else [()]
    configs = [load_config(root / EXAMPLE, changes) for changes in overrides]
    # Any free port: another service may use the usual one.
    settings = settings.model_copy(update={"root": root, "port": 0, "host": "127.0.0.1"})
    with (
        running(settings, 1, partial(err.print, markup=False)) as started,
        make_client(started.server, started.api_key).with_patience(FOLLOW_PATIENCE) as client,
    ):
        err.print(f"the service is up at {started.server}, with its data in {settings.home}")
        return [_post_and_follow(client, config, err) for config in configs]


def succeeded(jobs: list[Job]) -> bool:
    """Return whether all jobs succeeded."""
    return all(job.status == "succeeded" for job in jobs)


def print_demo(jobs: list[Job], out: Console, err: Console) -> None:
    """Print the reports of the jobs; those of a distilled and a plain student are compared."""
    for job in jobs:
        if error := job.error:
            print_error(f"{job.name} failed: {error.detail}", error.remedy, error.help)
        page = Path(job.artifacts.get("report.md", "-"))
        if page.is_file():
            out.print(page.read_text(encoding="utf-8"), markup=False)
        for name, path in job.artifacts.items():
            out.print(f"{name}: {path}", soft_wrap=True)
        out.print(f"status: {job.status}")
    if len(jobs) > 1 and succeeded(jobs):
        _compare(jobs, out)
    err.print("`kd up` shows the jobs and their curves in the browser")


def copy_example(target: Path) -> Path:
    """Copy the example's job, teacher and text below the folder ``target``; return their folder.

    The commands and programs of the documents name these files. Raises ``PotstillError`` if the
    folder exists.
    """
    final = target / EXAMPLE.parent
    if final.exists():
        raise PotstillError(f"{final} exists already.", "Remove it, or give another folder.")
    source = _find_root() / EXAMPLE.parent
    with whole_folder(final) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
    return final


def _find_root(*first: Path) -> Path:
    """The folder that the example's paths start from: one of ``first``, or that of the package."""
    package = Path(__file__).resolve().parents[2]
    for root in (*first, package.parent, package):
        if (root / EXAMPLE).is_file():
            return root
    detail = f"The example {EXAMPLE} is neither here nor in the package {package}."
    remedy = "Install Potstill again, or run `kd demo` in the folder of the source code."
    raise PotstillError(detail, remedy)


def _post_and_follow(client: Client, config: JobConfig, err: Console) -> Job:
    job = client.submit(config)
    err.print(f"POST /jobs: {job.id} ({job.kind} {job.name})")
    err.print(f"curves:     {client.server}/jobs/{job.id}", soft_wrap=True)
    with Display(err) as display:
        for event in client.events(job):
            display.show(event)
    return client.job(job)


def _compare(jobs: list[Job], out: Console) -> None:
    """Print the figures of the reports side by side; a figure that no report has is left out."""
    files = [Path(job.artifacts.get("report.json", "-")) for job in jobs]
    reports = [read_json(file) or {} for file in files]
    table = Table("", *(job.name for job in jobs), box=None, pad_edge=False)
    for key, label in ROWS.items():
        values = [report.get(key) for report in reports]
        if any(value is not None for value in values):
            table.add_row(label, *map(_format_figure, values))
    if (verdict := _judge(*reports)) is not None:
        out.print(f"{verdict.message} {verdict.remedy}".strip(), markup=False, soft_wrap=True)
    out.print(table)
    share = _compute_share_of_distance(*reports)
    if share is not None and share > 0:
        out.print(
            f"distillation covers {share:.0%} of the distance from the student without a teacher"
            " to the teacher"
        )


def _format_figure(value: float | int | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _judge(distilled: Json, plain: Json) -> Verdict | None:
    """Judge the teacher by the two students; None where a figure is not known or both are equal."""
    from kd.evaluation.teacher_effect import FEW_STEPS, judge_pair

    found = (distilled.get("student_perplexity"), plain.get("student_perplexity"))
    if found[0] is None or found[1] is None or found[0] == found[1]:
        return None
    steps = distilled.get("steps") or FEW_STEPS
    return judge_pair(found[0], found[1], distilled.get("held_out_tokens"), steps=steps)


def _compute_share_of_distance(distilled: Json, plain: Json) -> float | None:
    """Compute the share of the way to the teacher that distillation adds, in nats held out.

    The way begins at the student that was trained without a teacher. The result is None if a
    perplexity is unknown, or if that student is as good as the teacher.
    """
    key = "student_perplexity"
    found = (plain.get(key), distilled.get(key), distilled.get("teacher_perplexity"))
    nats = [math.log(perplexity) for perplexity in found if perplexity is not None]
    if len(nats) < len(found) or nats[0] <= nats[2]:
        return None
    without, with_teacher, teacher = nats
    return (without - with_teacher) / (without - teacher)
