"""Capture several caches in one pass of the teacher, whose records are of the same logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cache.manifest import CacheIdentity
from cache.records import Records
from cache.writing.writer import CacheWriter
from cache.writing.writer import open_writer as open_for_capture
from kd.capture.capturing import OTHER_CAPTURE, find_sealed_cache, select_shard_sequences
from kd.capture.estimate.storage import require_space
from kd.capture.plan import CapturePlan, make_provenance
from kd.capture.teacher import Teacher, fit_recorder
from kd.models.folder import ModelFolder
from kd.models.lm_head import LMHead
from kd.models.precision import float32_products
from kd.progress import SILENT, Monitor, ProgressMeter


@dataclass(frozen=True)
class SharedHead(LMHead):
    """An LM head that computes the logits of the same hidden states once, for several recorders.

    Each recorder gets a copy in its own memory, because recorders write over their logits. Call
    ``forget`` before other hidden states: they may lie at the same place in memory.
    """

    _kept: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, head: LMHead) -> SharedHead:
        """Return ``head`` with an empty memory."""
        return cls(**{each.name: getattr(head, each.name) for each in fields(LMHead)})

    def compute_logits(self, hidden_ND: Tensor, room_NV: Tensor | None = None) -> Tensor:
        """Return the logits (N, V), in the memory ``room_NV`` where it has their dtype."""
        key = (hidden_ND.data_ptr(), len(hidden_ND))
        if key not in self._kept:
            self._kept[key] = super().compute_logits(hidden_ND)
        kept_NV = self._kept[key]
        fits = room_NV is not None and room_NV.dtype == kept_NV.dtype
        return room_NV.copy_(kept_NV) if fits else kept_NV.clone()

    def forget(self) -> None:
        """Drop all logits."""
        self._kept.clear()


def capture_together(plans: Iterable[CapturePlan], root: Path, monitor: Monitor = SILENT) -> None:
    """Seal the caches of ``plans`` below ``root``, in one pass of their teacher.

    The plans differ in ``cache`` alone. Caches that are sealed already are left as they are. A
    capture that was stopped goes on after the shards that were sealed. One shard of each cache is
    in memory at a time. Raises ``Interrupted`` between two sequences where ``monitor`` asks for it.
    """
    wanted = {
        plan.identity: plan
        for plan in plans
        if find_sealed_cache(root / plan.identity.fingerprint, plan.identity) is None
    }
    if not wanted:
        return
    waiting = partial(monitor.check, f"while it waited for {OTHER_CAPTURE}")
    with contextlib.ExitStack() as stack, float32_products(), torch.no_grad():
        # In one order, so that two processes cannot each hold what the other waits for.
        writers = {
            each: stack.enter_context(open_for_capture(root, each, waiting))
            for each in sorted(wanted, key=lambda identity: identity.fingerprint)
        }
        for identity, plan in wanted.items():
            positions = plan.corpus.train.positions + plan.corpus.validation.positions
            teacher = plan.teacher
            is_gguf = teacher.section.gguf_file is not None
            width = 0 if is_gguf else ModelFolder(teacher.folder).hidden_width
            require_space(root / identity.fingerprint, identity, positions, width or 0)
        _capture_shards(wanted, writers, monitor)
        for identity, writer in writers.items():
            writer.finish(make_provenance(wanted[identity]))


def _capture_shards(
    plans: dict[CacheIdentity, CapturePlan],
    writers: dict[CacheIdentity, CacheWriter],
    monitor: Monitor,
) -> None:
    """Write every shard that is missing in a cache."""
    missing = {each: set(writer.find_missing_shards()) for each, writer in writers.items()}
    shards = sorted(set().union(*missing.values()))
    if not shards:
        return
    any_plan = next(iter(plans.values()))
    loaded = Teacher.load(any_plan)
    head = SharedHead.of(loaded.recorder.lm_head)
    teachers = {}
    for each, plan in plans.items():
        # Tables are fitted with a head that keeps no logits: states are freed meanwhile.
        teacher = fit_recorder(loaded, plan, writers[each], monitor)
        teachers[each] = replace(teacher, recorder=replace(teacher.recorder, lm_head=head))
    meter = ProgressMeter(
        sum(len(any_plan.identity.shard_range(index)) for index in shards), "sequences"
    )
    for index in shards:
        sequences = select_shard_sequences(any_plan, index)
        numbers = any_plan.identity.shard_range(index)
        parts: dict[CacheIdentity, list[Records]] = {
            each: [] for each in writers if index in missing[each]
        }
        for row, number in enumerate(numbers):
            # Not after the last sequence: its shard is written first, so that it is not lost.
            monitor.check(f"in shard {index + 1} of {any_plan.identity.shard_count}")
            ((hidden_ND, gold_N, positions_N),) = loaded.read_rows(
                sequences.select(slice(row, row + 1))
            )
            head.forget()
            for each, found in parts.items():
                found.append(teachers[each].recorder.record(hidden_ND, gold_N, number, positions_N))
            monitor.emit("progress", **meter.advance(1, len(gold_N)))
        for each, found in parts.items():
            tails = teachers[each].take_tail_sums()
            writers[each].write_shard(index, sequences, Records.concatenate(found), tails)
