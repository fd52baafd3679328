"""The part of a cache's identity that says what is stored for each position."""

from __future__ import annotations

from cache.manifest import CodecIdentity, choose_codec_version
from kd.config.cache import CacheConfig


def make_codec_identity(options: CacheConfig, dtype: str = "") -> CodecIdentity:
    """Return what a job stores for each position, and the seed of its random numbers.

    ``dtype`` is that of the teacher, where it is known.
    """
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
    )
