"""The format: what a teacher knows about every token of a text, on disk.

    caches/
    ├── {fingerprint}.lock                 held while a capture runs: one writer for one cache
    └── {fingerprint}/                     first 32 hex digits of the sha256 of what the cache depends on
        ├── shards/                        one Zarr v3 group; any Zarr v3 reader opens it
        │   ├── zarr.json
        │   └── 000000/                    shard 0: ``shard_sequences`` consecutive sequences, written by one process
        │       ├── zarr.json
        │       ├── tokens/                (S, L) uint16, or uint32 above 65,536 words
        │       ├── document_start/        (S, L) bool: a document, or a piece of one, begins here
        │       ├── target_mask/           (S, L) bool: this position has a record
        │       ├── offsets/               (S + 1, ...) uint32: positions before each sequence; of sampled profiles
        │       │                          also head entries, tail entries, and bytes of head and tail bits
        │       ├── known/, entropy/       the columns of the profile: see codec.py
        │       │
        │       │                          profiles threshold and tempered; E draws, numbered e
        │       ├── token_classes/         (V,) uint8: bit length of each token's count, which gives the order of ids
        │       ├── head_count/            (P,) uint8 or uint16; tail_count/ likewise
        │       ├── head_symbols/          (H,) uint8, and head_bits/ bytes: ids as gaps in that order, see idcode.py
        │       ├── head_logprobs/         (H,) in the same order
        │       ├── tail_{e}_symbols/      (M,) uint8, and tail_{e}_bits/ bytes: likewise
        │       └── tail_{e}_logprobs/     (M,) uint8, of profile tempered; partition/ (P, G, 2) too
        ├── head/                          the teacher's LM head, of profile hidden: weight/, bias/, transform/
        ├── seals/
        │   └── 000000.json                counts, and size and sha256 of every file of shard 0; head.json likewise
        └── manifest.json                  written last: its presence means that the cache is complete

Sequences are numbered through: training sequences first, then validation sequences. Every chunk carries a crc32c,
every file a sha256 in its folder's seal, every seal a digest in the manifest, and the manifest a digest of itself.

    random.py     counter-based random numbers        shard.py       one folder of arrays and its seal
    records.py    sequences and records in memory     manifest.py    what a cache is, and its fingerprint
    profiles.py   what can be kept, and for what      disk.py        what a power cut must not undo
    codec.py      records as small integers           store.py       capture, open, verify, list
    idcode.py     token ids in few bits               inspection.py  compare, count
    layout.py     records <-> arrays of a shard       operations.py  find, merge, remove
    testing.py    small valid data for tests
"""
