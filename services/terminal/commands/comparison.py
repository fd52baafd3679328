"""``kd jobs diff``: two jobs side by side, their settings and their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import typer

from services.terminal import console

#: What is measured of a job: its name in the table, and where its record has it.
RESULTS = {
    "perplexity": "metrics.student_perplexity",
    "perplexity at the last evaluation": "metrics.validation_perplexity",
    "teacher's perplexity": "metrics.teacher_perplexity",
    "bits per byte": "metrics.student_bits_per_byte",
    "teacher's bits per byte": "metrics.teacher_bits_per_byte",
    "held-out tokens": "metrics.held_out_tokens",
    "held-out bytes": "metrics.held_out_bytes",
    "KL": "metrics.validation_kl",
    "agreement": "metrics.validation_agreement",
    "steps": "metrics.step",
    "bytes per token": "cache.bytes_per_token",
    "tokens per second": "metrics.tokens_per_second",
    "device seconds": "device_seconds",
}
OTHER_TEXT = (
    "The perplexities are not comparable: the jobs held out different texts, or their tokenizers "
    "cut the text differently. Bits per byte compare tokenizers on one text."
)
#: Settings that name a job, and say nothing about what it does.
NAMES = ("name", "labels")

app = typer.Typer()


@app.command("diff")
def jobs_diff(
    first: console.JobName, second: console.JobName, server: console.Server = None
) -> None:
    """Show the settings in which two jobs differ, and their results side by side."""
    from services.terminal.client import connect, dump, find_job

    with connect(server) as client:
        jobs = [find_job(client, each) for each in (first, second)]
    settings = compare_settings(*(job.config for job in jobs))
    results = compare_results(*(dump(job) for job in jobs))
    ids = [job.id for job in jobs]
    if console.print_as_json({"jobs": ids, "settings": settings, "results": results}):
        return
    if not settings:
        console.notes.print("The jobs have the same settings.")
    rows = [
        [name, *map(console.format_value, pair)] for name, pair in {**settings, **results}.items()
    ]
    console.print_table(["", *(f"{job.name} ({job.id[:12]})" for job in jobs)], rows)
    texts = [results.get(f"held-out {unit}", [None, None]) for unit in ("tokens", "bytes")]
    if any(None not in pair and pair[0] != pair[1] for pair in texts):
        console.notes.print(OTHER_TEXT)


def compare_settings(first: Any, second: Any) -> dict[str, list[Any]]:
    """Return the values of each setting that differs, by its dotted name; None = not given."""
    both = dict(_flatten(first)), dict(_flatten(second))
    pairs = {name: [one.get(name) for one in both] for name in both[0] | both[1]}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def compare_results(first: Any, second: Any) -> dict[str, list[Any]]:
    """Return the status and the results of both jobs; a result that neither has is left out."""
    rows: dict[str, list[Any]] = {"status": [first["status"], second["status"]]}
    for name, path in RESULTS.items():
        section, _, field = path.rpartition(".")
        found = [(job.get(section) or {}) if section else job for job in (first, second)]
        pair = [each.get(field) for each in found]
        if pair != [None, None]:
            rows[name] = pair
    return rows


def _flatten(value: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        path = f"{before}{name}"
        if path in NAMES:
            continue
        if isinstance(inner, Mapping) and inner:
            yield from _flatten(inner, f"{path}.")
        else:
            yield path, inner
