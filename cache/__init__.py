"""The format: what a teacher knows about every token of a text, on disk.

    caches/
    ├── {fingerprint}.lock                 held while a capture runs: one writer for one cache
    └── {fingerprint}/                     first 32 hex digits of the sha256 of what the cache depends on
        ├── shards/                        one Zarr v3 group; any Zarr v3 reader opens it
        │   ├── zarr.json
        │   └── 000000/                    shard 0: ``shard_sequences`` consecutive sequences, written by one process
        │       ├── zarr.json
        │       ├── tokens/                (S, L) uint16, or uint32 above 65,536 words; ids likewise
        │       ├── document_start/        (S, L) bool: a document, or a piece of one, begins here
        │       ├── target_mask/           (S, L) bool: this position has a record
        │       ├── offsets/               (S + 1, 3) uint32: positions, head and tail entries before each sequence
        │       ├── head_count/            (P,) uint8
        │       ├── head_ids/              (H,) descending probability within a record
        │       ├── head_logprobs/         (H,) uint8: steps above log(threshold)
        │       ├── tail_count/            (P,) uint8
        │       ├── tail_ids/              (M,) ascending within a record; every tail entry weighs (1 - sum head) / m
        │       ├── gold_logprob/          (P,) uint16: steps of 2^-11 nats below 0
        │       └── entropy/               (P,) uint16: steps of 2^-12 nats
        ├── seals/
        │   └── 000000.json                counts, and size and sha256 of every file of shard 0
        └── manifest.json                  written last: its presence means that the cache is complete

Sequences are numbered through: training sequences first, then validation sequences. Every chunk carries a crc32c,
every file a sha256 in its shard's seal, every seal a digest in the manifest, and the manifest a digest of itself.

    random.py     counter-based random numbers        manifest.py   what a cache is, and its fingerprint
    records.py    sequences and records in memory     disk.py       what a power cut must not undo
    codec.py      records as small integers           shard.py      one shard folder and its seal
    store.py      capture, open, verify, list         testing.py    small valid data for tests
"""
