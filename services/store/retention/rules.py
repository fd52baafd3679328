"""The rules of the operator: what is removed, and after which time.

kind          what                                            age counts from
caches        sealed caches                                   the last use; the capture
texts         token stores                                    the last use
runs          records and run folders of ended jobs           the end of the job
checkpoints   checkpoints of ended jobs beyond the newest     (a number, no age)
events        events and metrics of ended jobs, in Redis      the end of the job
logs          logs of ended jobs                              the end of the job
files         uploaded files                                  the upload
imports       models and data that `import kd` saved          the last call that saved them
leftovers     what crashes left behind                        the last write
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from services.settings import DAY_SECONDS, Settings

KINDS = (
    "caches",
    "texts",
    "runs",
    "checkpoints",
    "events",
    "logs",
    "files",
    "imports",
    "leftovers",
)
#: Age of leftovers that `kd gc` removes if the settings name none.
LEFTOVERS_DAYS = 7.0
#: The counter of the bytes that the rules have freed, by kind.
FREED = "kd_retention_freed_bytes_total"


@dataclass(frozen=True)
class AgeLimits:
    """Ages in seconds above which something is removed; None = never.

    ``caches_captured`` counts from the capture of a cache, ``caches`` from its last use.
    ``checkpoints`` is the number that a job keeps from ``checkpoints_after`` seconds after its end
    on; None = all. Without ``student_checkpoints`` a job that has succeeded keeps none beside its
    saved student.
    """

    caches: float | None = None
    caches_captured: float | None = None
    texts: float | None = None
    runs: float | None = None
    checkpoints: int | None = None
    checkpoints_after: float = 0.0
    student_checkpoints: bool = True
    events: float | None = None
    logs: float | None = None
    files: float | None = None
    imports: float | None = None
    leftovers: float | None = None

    @classmethod
    def of(cls, settings: Settings) -> AgeLimits:
        """The rules that the settings state."""
        return cls(
            caches=_to_seconds(settings.retain_caches_unused_days),
            caches_captured=_to_seconds(settings.retain_caches_days),
            texts=_to_seconds(settings.retain_texts_days),
            runs=_to_seconds(settings.retain_runs_days),
            checkpoints=settings.retain_checkpoints or None,
            student_checkpoints=settings.retain_checkpoints_of_students,
            events=_to_seconds(settings.retain_events_days),
            logs=_to_seconds(settings.retain_logs_days),
            files=_to_seconds(settings.retain_files_days),
            imports=_to_seconds(settings.retain_imports_days),
            leftovers=_to_seconds(settings.retain_leftovers_days),
        )

    @classmethod
    def of_gc(cls, settings: Settings) -> AgeLimits:
        """The rules that one call of `kd gc` applies, if its options name no others."""
        found = cls.of(settings)
        if found.leftovers is not None:
            return found
        return replace(found, leftovers=_to_seconds(LEFTOVERS_DAYS))

    def has(self, kind: str) -> bool:
        """Whether a rule is set for a kind."""
        if kind == "checkpoints":
            return self.checkpoints is not None or not self.student_checkpoints
        if kind == "caches" and self.caches_captured is not None:
            return True
        return getattr(self, kind) is not None

    def only(self, kinds: Collection[str]) -> AgeLimits:
        """These rules for some kinds, and none for the others."""
        left_out = dict.fromkeys(set(KINDS) - set(kinds), None)
        more = {} if "caches" in kinds else {"caches_captured": None}
        if "checkpoints" not in kinds:
            more["student_checkpoints"] = True  # type: ignore[assignment]
        return replace(self, **left_out, **more)  # type: ignore[arg-type]

    def with_age(self, kinds: Collection[str], age: float) -> AgeLimits:
        """These rules with another age for some kinds; that of caches counts from the last use."""
        ages: dict[str, float | None] = {kind: age for kind in kinds if kind != "checkpoints"}
        if "caches" in kinds:
            ages["caches_captured"] = None
        if "checkpoints" in kinds:
            ages["checkpoints_after"] = age
        return replace(self, **ages)  # type: ignore[arg-type]

    @property
    def remove_nightly(self) -> bool:
        """Whether a rule is set that Redis does not apply by itself, as it does that of events."""
        return any(self.has(kind) for kind in KINDS if kind != "events")


def _to_seconds(days: float) -> float | None:
    return days * DAY_SECONDS if days else None
