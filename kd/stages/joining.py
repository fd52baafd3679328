"""The stage that makes the sealed caches of a job: of one teacher, or of several in turn.

Each teacher is captured by the stage of an ordinary job (``kd.config.routing.parts``), in a run
folder of its own below that of the job:

    cache.json                     the caches of all teachers, and the fingerprint of their join
    captures/{fingerprint}/        cache.json and notices.json of one capture

Before the first capture, which may take days, everything is planned and compared.
"""

from __future__ import annotations

from pathlib import Path

from cache.json_object import Json
from kd.capture.extending import settle_recipe
from kd.capture.plan import CapturePlan, plan_capture
from kd.config.job import JobConfig
from kd.config.kinds import CAPTURE
from kd.config.routing.parts import Member, Part, split_job
from kd.errors import ConfigError, TokenizerMismatch
from kd.files import find_caches, write_json
from kd.models.tokenizers import KnownTokenizer, require_same_tokenizer
from kd.progress import NOTICES, Monitor, StageResult, keep_notices
from kd.stages.capture import require_possible_student, run_precompute
from kd.stages.source import select_cache_inputs
from kd.text.corpus import TEXTS
from kd.text.joined.source import name_join

#: The folder of the captures of several teachers in a run folder.
CAPTURES = "captures"


def run_captures(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> StageResult:
    """Make sure that the sealed caches for this job exist: capture those that do not, in turn."""
    if not config.teachers:
        return run_precompute(config, home, run_dir, monitor)
    parts = split_job(config)
    members = [member for part in parts for member in part.members]
    names = [each.identity.fingerprint for each in plan_captures(parts, home, monitor)]
    # Before the captures, so that a listener knows all caches while they are being written.
    monitor.emit("plan", fingerprint=names[0], fingerprints=names)
    found = []
    for member, name in zip(members, names, strict=True):
        monitor.emit("stage", stage=CAPTURE.name, phase=f"teacher {member.name}")
        folder = run_dir / CAPTURES / name
        made = run_precompute(member.job, home, folder, monitor).cache
        found.append({"teacher": member.name, "weight": member.weight, **made})
    keep_notices(run_dir / NOTICES, monitor)
    summary = summarise_join(parts, found, config.loss.balance)
    write_json(run_dir / CAPTURE.last_file, {**summary, "inputs": select_cache_inputs(config)})
    return StageResult(summary)


def plan_captures(parts: tuple[Part, ...], home: Path, monitor: Monitor) -> list[CapturePlan]:
    """Plan the captures of all members; raise now what would be an error after some of them."""
    plans = []
    for part in parts:
        own = []
        for member in part.members:
            caches = find_caches(home, member.job.cache.store)
            planned = settle_recipe(plan_capture(member.job, monitor, home / TEXTS), caches)
            require_possible_student(member.job, planned, monitor)
            own.append(planned)
            require_same_text(part.members[0], own[0], member, planned)
        plans += own
    return plans


def require_same_text(
    first: Member, planned: CapturePlan, other: Member, theirs: CapturePlan
) -> None:
    """Raise ``ConfigError`` if two teachers of a mixture read the text as other tokens."""
    pointer, remedy = other.locate("/teacher"), "Give a mixture only teachers of one tokenizer."
    size = theirs.identity.tokenizer.vocabulary_size
    known = KnownTokenizer.of(theirs.tokenizer, size, f"that of {other.name}")
    try:
        require_same_tokenizer(planned.tokenizer, known, f"{first.name}'s")
    except TokenizerMismatch as error:
        raise ConfigError.of_field(pointer, error.detail, remedy) from None
    if planned.identity.data.sha256 != theirs.identity.data.sha256:
        what = "for example by its chat template, or by data.packing"
        detail = f"{other.name} reads other tokens than {first.name}, {what}."
        raise ConfigError.of_field(pointer, detail, remedy)


def summarise_join(parts: tuple[Part, ...], found: list[Json], balance: str) -> Json:
    """Return the summary of the caches ``found``, those of the members of all parts in order.

    ``fingerprint`` is that of the first cache, and ``join`` that of what a training reads.
    """
    left = iter(found)
    own = [[next(left) for _ in part.members] for part in parts]
    pairs = [[(each["weight"], each["fingerprint"]) for each in members] for members in own]
    tokens = sum(members[0]["tokens"] for members in own)
    whole = {
        key: sum(each[key] * each["tokens"] for each in found) / max(tokens, 1)
        for key in ("bytes_per_token", "entries_per_token")
    }
    return {
        **{key: round(value, 3) for key, value in whole.items()},
        "fingerprint": found[0]["fingerprint"],
        "fingerprints": [each["fingerprint"] for each in found],
        "join": name_join(pairs, balance),
        "tokens": tokens,
        "reused": all(each["reused"] for each in found),
        "caches": found,
    }
