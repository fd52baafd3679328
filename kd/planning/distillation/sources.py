"""The numbers that a plan of a distillation is made of, each with its source. Imports no torch.

A number is measured (its page in docs/benchmarks, its row and its column: a test compares them),
stated by somebody else, assumed, or computed from others. **No rate was measured on a GPU.**
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cache.codec import Codec
from kd.memory.devices import HOST_DEVICES
from kd.memory.work import ASSUMED_UTILIZATION

#: What stands beside every number of a GPU.
NOT_MEASURED = "not measured on a GPU"
#: The rates of devices, links and memory.
DEVICE_RATES = f"data sheet, {ASSUMED_UTILIZATION:.0%} of it assumed; {NOT_MEASURED}"


@dataclass(frozen=True)
class Measurement:
    """A number in a table of docs/benchmarks: its page, the first cell of its row, its column."""

    page: str
    row: str
    column: str
    value: float

    def __str__(self) -> str:
        return f"docs/benchmarks/{self.page}: {self.row}"


@dataclass(frozen=True)
class Rate:
    """Tokens, bytes or operations a second, and where the number comes from."""

    value: float
    source: str


@dataclass(frozen=True)
class Line:
    """One line of a plan: a number with its unit, and its source."""

    name: str
    value: float | int
    unit: str
    source: str

    def to_json(self) -> dict[str, Any]:
        """Return the line as JSON values."""
        value = self.value if isinstance(self.value, int) else float(f"{self.value:.6g}")
        return {"name": self.name, "value": value, "unit": self.unit, "source": self.source}


# ---------------------------------------------------------------------- measured

TOKENIZING = Measurement("plan.md", "SmolLM2-135M-Instruct", "tokens/s, per core", 869_696)
#: What the token store leaves of the bare tokenizer's rate.
STORING = Measurement("tokens.md", "token store", "of the bare tokenizer's, per core", 0.84)
BEATS = Measurement("plan.md", "beats", "a second", 3_054)
#: Arrays of a shard; each has one file for its metadata and at least one for its chunks.
ARRAYS = {
    profile: Measurement("plan.md", profile, "arrays", count)
    for profile, count in (
        ("threshold", 14), ("tempered", 16), ("topk", 9), ("dense", 7), ("hidden", 8),
    )
}  # fmt: skip
#: The host's work of a capture of profile threshold, of this many entries a token.
CAPTURING = Measurement("capture.md", "all", "us a token", 1.64)
CAPTURED_ENTRIES = 19.9
#: The same of the other profiles: thousands of tokens a second, at these sizes of a record.
WRITING = {
    "tempered": Measurement("records.md", "tempered 0.0155", "write", 117),
    "topk": Measurement("records.md", "topk 128", "write", 109),
    "dense": Measurement("records.md", "dense float16", "write", 1),
    "hidden": Measurement("records.md", "hidden int16", "write", 69),
}
#: Bytes of a record in these measurements.
WRITTEN_BYTES = {"tempered": 95.1, "topk": 389.6, "dense": 65_997.9, "hidden": 963.8}
#: The reader of records of profile threshold by the tokens of a sequence, and its bytes a token.
READING = {
    512: (Measurement("reader.md", "512", "cold, per core", 1_145_343), 28.4),
    2048: (Measurement("reader.md", "2,048", "cold, per core", 1_556_857), 27.4),
    8192: (Measurement("reader.md", "8,192", "cold, per core", 1_637_903), 27.8),
}
#: The reader of the other profiles, in MB/s of a core.
READING_OTHERS = {
    profile: Measurement("reader.md", profile, "cold, MB/s per core", rate)
    for profile, rate in (("tempered", 38), ("topk", 91), ("dense", 241), ("hidden", 210))
}
#: Bytes a token at V = 49,152, beside which the estimate for another V stands.
RECORDS = {
    name: Measurement("records.md", name, "bytes/token", size)
    for name, size in (
        ("threshold 0.04", 24.1), ("threshold 0.02", 36.4), ("threshold 0.01", 55.7),
        ("tempered 0.0155", 95.1), ("topk 32", 103.3), ("topk 128", 389.6),
        ("hidden int8", 545.4), ("hidden int16", 963.8), ("dense float16", 65_997.9),
    )
}  # fmt: skip

# ---------------------------------------------------------------------- stated, assumed

#: Cores for each device of a host: the 112 of a DGX H100 with its 8 devices.
DEVICE_CORES = Rate(112 / HOST_DEVICES, "14 cores a device, as in a DGX H100 (data sheet)")
#: Bytes a second between a host and where caches and texts lie.
STORE_LINK = Rate(12.5e9, "100 Gb/s from each host to the storage, assumed")
#: Requests a second of an object store. A bucket splits into more prefixes under load.
STORE_PUTS = Rate(3_500, "3,500 PUT/s for a prefix (Amazon S3's user guide)")
STORE_GETS = Rate(5_500, "5,500 GET/s for a prefix (Amazon S3's user guide)")
#: Seconds between two beats of a worker (``services.store.jobs.leases.BEAT_SECONDS``).
BEAT_SECONDS = 1.0


def find_host_rate(codec: Codec, position_bytes: float, entries: float) -> Rate:
    """The tokens that one core of the host encodes, seals and writes in a second.

    A measured rate is scaled down where a record has more entries or bytes than those measured,
    and never up.
    """
    if codec.profile == "threshold":
        larger = max(entries / CAPTURED_ENTRIES, 1.0)
        return Rate(1e6 / (CAPTURING.value * larger), str(CAPTURING))
    measured = WRITING[codec.profile]
    larger = max(position_bytes / WRITTEN_BYTES[codec.profile], 1.0)
    return Rate(1e3 * measured.value / larger, str(measured))


def find_reader_rate(codec: Codec, position_bytes: float, length: int) -> Rate:
    """The tokens that one core reads of a cold cache in a second, in sequences of ``length``."""
    if codec.profile != "threshold":
        measured = READING_OTHERS[codec.profile]
        return Rate(1e6 * measured.value / position_bytes, str(measured))
    fitting = [each for each in READING if each <= length] or [min(READING)]
    measured, size = READING[max(fitting)]
    return Rate(measured.value / max(position_bytes / size, 1.0), str(measured))
