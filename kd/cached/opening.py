"""Open a sealed cache for a training loop of one's own.

opened = open_cache("potstill-data/caches/0123...")
loader = DataLoader(opened.stream(batch_size=8), batch_size=None, num_workers=2)
for batch in loader: ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.codec import Codec
from cache.reading.arrays import MEMORY_BYTES
from kd.cached.datasets import CachedSequences, CachedStream, EpochSampler, Order
from kd.cached.decoding import Decoding, Form, Item
from kd.cached.items import collate
from kd.cached.shared_store import SharedStore, find_cache_folder


@dataclass(frozen=True)
class OpenCache:
    """A sealed cache, open for training; ``open_cache`` makes it. It may be pickled and forked.

    ``train`` and ``validation`` are data sets of torch with one item for each sequence.
    """

    store: SharedStore
    decoding: Decoding
    train: CachedSequences
    validation: CachedSequences

    def __repr__(self) -> str:
        return (
            f"OpenCache({self.fingerprint[:12]}, profile {self.codec.profile}: {len(self.train)} "
            f"sequences to train on and {len(self.validation)} held out, of "
            f"{self.sequence_length} tokens)"
        )

    @property
    def folder(self) -> Path:
        """The folder of the cache."""
        return self.store.folder

    @property
    def fingerprint(self) -> str:
        """The name of its content."""
        return self.store.open().fingerprint

    @property
    def codec(self) -> Codec:
        """The codec of the records: profile, vocabulary size, temperatures."""
        return self.store.open().codec

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence, L."""
        return self.store.open().identity.data.sequence_length

    @property
    def packed(self) -> bool:
        """True if a sequence may hold several documents, which attention must keep apart."""
        return self.store.open().identity.data.packing

    def stream(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        order: Order = "windows",
        steps: int | None = None,
        start: int = 0,
    ) -> CachedStream:
        """Return the training batches in the order of our own loop; ``CachedStream`` says more."""
        return CachedStream(self.store, self.decoding, batch_size, seed, order, steps, start)

    def sampler(self, *, seed: int = 0, order: Order = "windows") -> EpochSampler:
        """Return a sampler of ``train`` with the order of our own loop."""
        return EpochSampler(self.store, seed, order)

    def collate(self, items: Sequence[Mapping[str, Any]]) -> Item:
        """Join items to a batch: the ``collate_fn`` of a ``DataLoader`` over ``train``."""
        return collate(items)


def open_cache(
    path_or_fingerprint: str | Path,
    *,
    home: str | Path | None = None,
    memory_bytes: int | None = None,
    form: Form = "records",
    temperature: float = 1.0,
    k: int = 50,
) -> OpenCache:
    """Open the cache in a folder, or by its fingerprint below ``home``/caches.

    ``form`` says how the teacher's records come (``kd.cached.decoding`` lists the forms): as
    stored, which ``DistillationLoss`` takes, or decoded at ``temperature``. ``k`` is for form
    ``topk``. Each process keeps decoded chunks of ``memory_bytes`` at most; the default is half a
    GiB. ``home`` is by default KD_HOME, else potstill-data. Raises ``CacheNotFound``,
    ``CacheIncomplete``, ``CacheMismatch`` or ``CacheCorrupt`` for a cache that cannot be used, and
    ``ValueError`` if its profile cannot serve the form or the temperature.
    """
    folder = find_cache_folder(path_or_fingerprint, home)
    store = SharedStore(folder, MEMORY_BYTES if memory_bytes is None else memory_bytes)
    source = store.open()
    decoding = Decoding(form, temperature, k)
    decoding.require_served(source.codec)
    sets = (CachedSequences(store, each, decoding) for each in (source.train, source.validation))
    return OpenCache(store, decoding, *sets)
