"""The part of a cache's identity that says what is stored for each position."""

from __future__ import annotations

from dataclasses import replace

from cache.manifest import CodecIdentity, choose_codec_version
from kd.config.cache import CacheConfig

#: Clusters of a cache whose text is not known yet: those of some two million tokens.
USUAL_CLUSTERS = 64
#: Why a job of profile threshold cannot extend or mend a cache without tables.
EARLIER_RECORDS = (
    "Potstill 0.2.0 or an earlier version captured it, in records of profile threshold that are "
    "read, but not written any more."
)


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
    recipe = {"clusters": own.clusters, "fitted": own.fitted, "entropies": own.entropies}
    return found.clusters == 0 < own.clusters and replace(found, **recipe) == own
