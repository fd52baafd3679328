"""Take shards of an earlier cache for a text that has grown: ``cache.extends``.

The records of a sequence depend on the teacher, on the settings, and on the sequence and its
number. So a shard whose sequences are the same in both texts has the same bytes in both caches, and
the new cache gets it by hard links: its bytes stay where they are. It needs the earlier one no
more. It is like one that was captured whole with the same tables of tails, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from cache.errors import CacheError
from cache.manifest import CacheIdentity, list_differences
from cache.reading.usage import hold_for
from cache.shard import PER_SEQUENCE
from cache.store import Cache, open_cache
from cache.writing.writer import CacheWriter
from kd.capture.codec_identity import EARLIER_RECORDS
from kd.capture.plan import CapturePlan
from kd.errors import ConfigError, Problem
from kd.progress import Monitor

FIELD = "/cache/extends"
_NO_SUMS = (
    "it does not keep the sums of its tails, from which the mean tail of a longer text is made: it "
    "is too small for them, or an earlier version of Potstill captured it."
)
_OTHER_TEXT = (
    "its text is not the beginning of this job's text: training sequence {number:,} differs. New "
    "text must come after the old: in files that come later in data.train, or at the end of its "
    "last file."
)
_OTHER_TABLES = (
    "the capture in {folder} was begun with other tables of dither than cache {name} has, and all "
    "records of a cache need the same ones."
)
#: The remedy for every cache that cannot be extended.
_WHOLE = "Remove cache.extends to capture all of the text."


def settle_recipe(plan: CapturePlan, root: Path) -> CapturePlan:
    """Return the plan with the tables' recipe of the cache below ``root`` that it extends, if any.

    The shards that it takes need its tables, and have entropies as that cache keeps them. Raises
    ``ConfigError`` if the cache is not there.
    """
    if plan.options.extends is None or not plan.options.rules.dithered:
        return plan
    known = _open(root / plan.options.extends).identity.codec
    if not known.clusters:
        refuse([f"the cache {plan.options.extends}: {EARLIER_RECORDS}"])
    own = plan.identity.codec
    entropies = own.entropies or known.entropies
    codec = replace(own, clusters=known.clusters, fitted=known.fitted, entropies=entropies)
    return replace(plan, identity=replace(plan.identity, codec=codec))


def adopt_known_shards(
    plan: CapturePlan, root: Path, writer: CacheWriter, monitor: Monitor
) -> None:
    """Take all shards that the cache ``cache.extends`` below ``root`` has in common with the plan.

    Does nothing for a job that extends no cache. Raises ``ConfigError`` if the cache is not
    there, is of another teacher or other settings, or its text is not the beginning of the plan's,
    or if the capture was begun with other tables of dither; and ``CacheCorrupt`` if one of its
    shards is damaged.
    """
    name = plan.options.extends
    if name is None:
        return
    source = _open(root / name)
    hold_for(source, root / name)
    refuse(list_extension_problems(plan.identity, source))
    if source.codec.rules.dithered:
        take_tables(writer, source)
    count = source.identity.lasting_shards
    phase = f"taking {count} of {plan.identity.shard_count} shards from cache {name[:12]}"
    monitor.emit("stage", stage="precompute", phase=phase)
    for index in range(count):
        monitor.check("while shards were taken from another cache")
        monitor.report_alive()
        numbers = np.asarray(plan.identity.shard_range(index))
        theirs, _ = source.read(numbers)
        ours = plan.corpus.train.select(numbers)
        pairs = ((getattr(ours, name), getattr(theirs, name)) for name in PER_SEQUENCE)
        differs = np.any([(one != other).any(axis=1) for one, other in pairs], axis=0)
        if differs.any():
            refuse([_OTHER_TEXT.format(number=int(numbers[differs.argmax()]))])
        writer.adopt_shard(source, index)
    if source.manifest.first_tails.digest:
        writer.adopt_tail_sums(source)


def take_tables(writer: CacheWriter, source: Cache) -> None:
    """Write the tables of ``source``, by which the records of its shards are read.

    Raises ``ConfigError`` if the capture has others already, which name other tokens.
    """
    sealed = writer.write_tables(source.tables).to_arrays()
    wanted = source.tables.to_arrays()
    if not all(np.array_equal(array, sealed[name]) for name, array in wanted.items()):
        name = source.identity.fingerprint[:12]
        refuse([_OTHER_TABLES.format(folder=writer.folder, name=name)])


def _open(folder: Path) -> Cache:
    try:
        return open_cache(folder)
    except CacheError as error:
        raise ConfigError([Problem(FIELD, error.detail, error.remedy)]) from None


def refuse(problems: Iterable[str]) -> None:
    """Raise ``ConfigError`` for the field ``cache.extends`` if there is a problem."""
    if found := [Problem(FIELD, each, _WHOLE) for each in problems]:
        raise ConfigError(found)


def list_extension_problems(wanted: CacheIdentity, source: Cache) -> list[str]:
    """List why a cache of the identity ``wanted`` cannot extend ``source``; texts are not read."""
    known = source.identity
    # The text may be longer, and with it the number of sequences.
    data = replace(
        wanted.data,
        sha256=known.data.sha256,
        train_sequences=known.data.train_sequences,
        validation_sequences=known.data.validation_sequences,
    )
    count = known.data.train_sequences
    if differences := list_differences(replace(wanted, data=data), known):
        return [f"it is a cache of other inputs: {'; '.join(differences)}."]
    if not known.lasting_shards:
        size = known.codec.shard_sequences
        return [
            f"it has {count:,} training sequences, and no whole shard of {size} before the end."
        ]
    if wanted.data.train_sequences < count:
        fewer = wanted.data.train_sequences
        return [f"it has {count:,} training sequences, and this job only {fewer:,}."]
    if source.manifest.tail_mean.digest and not source.manifest.first_tails.digest:
        return [_NO_SUMS]
    return []
