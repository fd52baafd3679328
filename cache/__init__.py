"""The format on disk of what a teacher predicts at every token of a text.

    caches/
    ├── {fingerprint}.lock            held while a capture runs: one writer for one cache
    └── {fingerprint}/                32 hex digits: the fingerprint of the cache's identity
        ├── shards/                   one Zarr v3 group; any Zarr v3 reader opens it
        │   ├── zarr.json
        │   └── 000000/               shard 0: ``shard_sequences`` consecutive sequences
        │       ├── zarr.json
        │       ├── tokens/           (S, L) uint16, or uint32 above 65,536 words
        │       ├── document_start/   (S, L) bool: a document, or a piece of one, begins here
        │       ├── target_mask/      (S, L) bool: this position has a record
        │       ├── offsets/          (S + 1, ...) uint32: positions before each sequence; sampled
        │       │                     profiles: also head entries, tail entries, and bytes of head
        │       │                     bits and of tail bits
        │       ├── known/, entropy/  the columns of the profile: see codec.py
        │       │
        │       │                     profiles threshold and tempered; draw r of R draws
        │       ├── token_classes/    (V,) uint8: bit length of each token's count, which gives
        │       │                     the order of ids
        │       ├── head_count/       (N,) uint8 or uint16; tail_count/ has the same type
        │       ├── head_symbols/     (H,) uint8, and head_bits/ bytes: ids as gaps in that order,
        │       │                     see idcode.py
        │       ├── head_logprobs/    (H,) in the same order
        │       ├── tail_{r}_symbols/ (M,) uint8, and tail_{r}_bits/ bytes: ids as gaps
        │       ├── tail_{r}_logprobs/ (M,) uint8, in profile tempered
        │       └── partition/        (N, J, 2) int16, in profile tempered
        ├── head/                     the teacher's LM head, in profile hidden: weight/, bias/,
        │                             transform/
        ├── seals/
        │   └── 000000.json           counts, and size and sha256 of every file of shard 0;
        │                             head.json for the LM head
        ├── manifest/000000.bin       the entries of many shards, in pieces: see shards/entries.py
        └── manifest.json             written last: its presence means that the cache is complete

One process writes a shard. Sequences are numbered through: training sequences first, then
validation sequences. Every chunk carries a crc32c, every file a sha256 in its folder's seal, every
seal a digest in the manifest, and the manifest a digest of itself.

    random.py     counter-based random numbers        shard.py       one folder of arrays, its seal
    records.py    sequences and records in memory     manifest.py    identity and fingerprint
    profiles/     what each profile keeps             disk.py        durable writes, and locks
    codec.py      records as small integers           store.py       open and read a cache
    idcode.py     token ids in few bits               inspection.py  compare, count
    layout.py     records <-> arrays of a shard       operations.py  find, remove
"""
