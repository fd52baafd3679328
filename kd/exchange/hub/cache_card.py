"""The card of a cache on a hub: what it holds, what it was made from, and how to use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCardData

from cache.manifest import Manifest
from cache.store import measure_cache_bytes
from kd.files import format_bytes
from kd.models.folder import UNKNOWN_LICENCE, read_card

#: The name of a card. It is on the hub only: a cache's folder holds its own files and no other.
CARD = "README.md"
_INTRODUCTION = (
    "The next-token probabilities of a teacher on a text, as Potstill stores them: students are "
    "trained from them without the teacher.\n"
)
_FIDELITY = """## Fidelity

Records beside the live teacher, on sampled positions.

| temperature | positions | KL, nats | kept mass | same best token | entropy error, nats |
|--:|--:|--:|--:|--:|--:|"""
_USE = """## Use

```bash
kd pull owner/name --type dataset   # verifies every byte
kd cache info {short}
```

A job with the same teacher, text and settings finds the cache by its fingerprint. A job \
without a teacher sets `cache.fingerprint`.
"""


def render_cache_card(folder: Path, manifest: Manifest) -> str:
    """Return the card of the cache in ``folder``."""
    teacher = manifest.teacher.name
    known = bool(teacher) and not Path(teacher).exists()
    facts = read_card(teacher, manifest.teacher.revision or None) if teacher else {}
    licence = facts.get("license") if isinstance(facts.get("license"), str) else UNKNOWN_LICENCE
    languages = facts.get("language")
    data = DatasetCardData(
        license=licence,
        language=languages if isinstance(languages, str | list) else None,
        tags=["distillation", "knowledge-distillation", "potstill", "teacher-records"],
        # The shards are arrays, which the hub's viewer of tables cannot show.
        viewer=False,
        # A path on one machine means nothing to a reader of the card.
        distillation_teacher=teacher if known else None,
        fingerprint=manifest.identity.fingerprint,
    )
    rows = [f"| {name} | {value} |" for name, value in _list_facts(folder, manifest).items()]
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        "# Records of a teacher\n",
        _INTRODUCTION,
        "\n".join(["| | |", "|---|---|", *rows, ""]),
        *_describe_fidelity(manifest),
        _USE.format(short=manifest.identity.fingerprint[:12]),
        _describe_licences(teacher if known else "", str(licence)),
    ]
    return "\n".join(parts)


def _list_facts(folder: Path, manifest: Manifest) -> dict[str, str]:
    identity = manifest.identity
    size = measure_cache_bytes(folder, manifest)
    data = identity.data
    teacher = manifest.teacher
    return {
        "Teacher": teacher.name or "unknown",
        **({"Revision of the teacher": teacher.revision} if teacher.revision else {}),
        "Precision of the teacher": teacher.identity.describe_precision(),
        "sha256 of its weights": f"`{teacher.identity.model_sha256}`",
        "Tokenizer": f"{identity.tokenizer.vocabulary_size:,} tokens",
        "Profile": identity.codec.profile,
        "Sequences": f"{data.sequences:,} of {data.sequence_length:,} tokens, "
        f"{data.validation_sequences:,} of them held out",
        "Positions with a record": f"{manifest.positions:,}",
        "Entries per position": f"{manifest.entries / max(manifest.positions, 1):.1f}",
        "Size": format_bytes(size),
        "Bytes a token": f"{size / max(manifest.positions, 1):.2f}",
        "Fingerprint": f"`{identity.fingerprint}`",
    }


def _describe_fidelity(manifest: Manifest) -> list[str]:
    """How close the records are to the teacher, if that was measured."""
    if not manifest.fidelity:
        return []
    rows = [
        f"| {row.temperature:g} | {row.positions:,} | {_format(row.kl)} | {row.kept_mass:.4f} "
        f"| {_format(row.top1_agreement)} | {row.entropy_error:+.4f} |"
        for row in manifest.fidelity
    ]
    note = [] if manifest.overruled is None else [manifest.overruled.describe(), ""]
    return ["\n".join([_FIDELITY, *rows, "", *note])]


def _format(value: Any) -> str:
    return "–" if value is None else f"{value:.4f}"


def _describe_licences(teacher: str, licence: str) -> str:
    owner = f"`{teacher}`" if teacher else "the teacher"
    said = f"- Licence: {licence}, that of {owner}."
    if licence == UNKNOWN_LICENCE:
        said = f"- Licence: unknown. Check that of {owner} before you share or use these records."
    lines = [
        said,
        "- Some licences forbid or condition training on a model's outputs.",
        "- The cache holds the tokens of its text: check the licence of the text, too.",
    ]
    return "\n".join(["## Licences", "", *lines, ""])
