"""The part of a cache's identity that says what is stored for each position."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cache.manifest import CodecIdentity, choose_codec_version
from cache.profiles.threshold import MOST_CLUSTERS
from kd.config.cache import CacheConfig

#: Clusters of a cache whose text is not known yet: those of some two million tokens.
USUAL_CLUSTERS = 64
#: Why a job of profile threshold cannot extend or mend a cache without tables.
EARLIER_RECORDS = (
    "Potstill 0.2.0 or an earlier version captured it, in records of profile threshold that are "
    "read, but not written any more."
)
#: Positions of the whole text for each cluster: their tables take a hundredth of its bytes.
_POSITIONS_PER_CLUSTER = 1 << 15
#: Positions that are read for each cluster, and at least in all.
_READ_PER_CLUSTER = 1 << 8
_LEAST_READ = 1 << 13
#: The largest part of the text that is read twice.
_READ_PART = 16


@dataclass(frozen=True)
class Recipe:
    """How many clusters a cache has, and how many of its first sequences make their tables."""

    clusters: int
    sequences: int

    @classmethod
    def choose(cls, positions: int, sequences: int) -> Recipe:
        """Choose them for a text of so many training sequences, which have ``positions`` targets.

        A short text gets one cluster: its mean tail.
        """
        wanted = max(positions // _POSITIONS_PER_CLUSTER, 1)
        clusters = min(1 << (wanted.bit_length() - 1), MOST_CLUSTERS)
        read = min(max(_READ_PER_CLUSTER * clusters, _LEAST_READ), positions // _READ_PART)
        each = max(positions // max(sequences, 1), 1)
        return cls(clusters, min(max(-(-read // each), 1), max(sequences, 1)))


def make_codec_identity(
    options: CacheConfig,
    entropies: bool = False,
    dtype: str = "",
    clusters: int = USUAL_CLUSTERS,
    fitted: int = 1,
) -> CodecIdentity:
    """Return what a job stores for each position, and the seed of its random numbers.

    ``entropies`` is ``JobConfig.keeps_entropies``; ``dtype`` is that of the teacher, if it is
    known; ``clusters`` and ``fitted`` are the recipe of the tables of profile threshold.
    """
    dithered = options.rules.dithered
    return CodecIdentity(
        profile=options.profile,
        threshold=options.threshold if options.sampled else 0.0,
        temperatures=options.range,
        always_keep=options.always_keep,
        draws=options.draws,
        k=options.entries,
        bits=options.bits,
        seed=options.seed,
        shard_sequences=options.shard_sequences,
        version=choose_codec_version(options.profile, options.bits, dtype),
        clusters=clusters if dithered else 0,
        fitted=fitted if dithered else 0,
        entropies=entropies,
    )


def is_earlier_form(found: CodecIdentity, own: CodecIdentity) -> bool:
    """Return whether version 0.2.0 captured ``found`` for what a job now captures as ``own``."""
    newer = replace(found, clusters=own.clusters, fitted=own.fitted, entropies=own.entropies)
    return found.clusters == 0 < own.clusters and newer == own
