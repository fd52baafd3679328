"""What holds up a stage of a distillation, each with the rate at which it is full. No torch.

Every limit is told in tokens a second of the whole stage, so the least of them is the rate of the
stage, and the next one is what is reached when that is lifted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kd.planning.distillation.rates import StudentRate, TeacherRate
from kd.planning.distillation.sources import (
    BEAT_SECONDS,
    BEATS,
    DEVICE_CORES,
    DEVICE_RATES,
    STORE_GETS,
    STORE_LINK,
    STORE_PUTS,
    STORING,
    TOKENIZING,
    find_host_rate,
    find_reader_rate,
)
from kd.planning.distillation.storage import RecordSize, StoreSize, TokenCount

StageName = Literal["tokenising", "capture", "training", "evaluation"]


@dataclass(frozen=True)
class Fleet:
    """Devices, and the hosts that they are in."""

    devices: int
    hosts: int


@dataclass(frozen=True)
class Limit:
    """A part of a stage, and the tokens a second at which it is full.

    ``grows`` says that more devices lift it. A ``part`` takes a share of the time of the limit
    before it, and holds up nothing alone.
    """

    stage: StageName
    name: str
    full_at: float
    grows: bool
    source: str
    part: bool = False

    def count_devices(self, devices: int, own: float) -> int:
        """The devices that fill it, where ``devices`` alone would reach ``own`` tokens/s."""
        return int(devices * self.full_at / own)

    def to_json(self, rate: float, devices: int, own: float) -> dict[str, Any]:
        """The limit of a stage that runs at ``rate``; its devices alone would reach ``own``."""
        return {
            "stage": self.stage,
            "limit": self.name,
            "tokens_per_second": float(f"{self.full_at:.6g}"),
            "used": float(f"{rate / self.full_at:.4g}"),
            "full_at_devices": None if self.grows else self.count_devices(devices, own),
            "source": self.source,
        }


#: Writes for a shard of the token store: its file, its seal, and the progress.
_TEXT_PUTS = 3


def list_tokenizing_limits(store: StoreSize, fleet: Fleet) -> tuple[Limit, ...]:
    """The limits of tokenising on the cores of all hosts, a part of the text on each."""
    cores = DEVICE_CORES.value * fleet.devices
    puts = _TEXT_PUTS / store.shard_tokens
    return (
        Limit(
            "tokenising", "tokenizer on the cores", TOKENIZING.value * STORING.value * cores, True,
            f"{TOKENIZING} x {STORING}; {DEVICE_CORES.source}",
        ),
        Limit(
            "tokenising", "writes of the token store",
            STORE_LINK.value * fleet.hosts / store.layout.bytes_per_token, True, STORE_LINK.source,
        ),
        Limit(
            "tokenising", "objects of the token store", STORE_PUTS.value / puts, False,
            STORE_PUTS.source,
        ),
    )  # fmt: skip


def list_capture_limits(
    teacher: TeacherRate, records: RecordSize, text: TokenCount, fleet: Fleet
) -> tuple[Limit, ...]:
    """The limits of a capture by as many teachers as the devices hold, a worker for each."""
    workers = fleet.devices // teacher.ranks
    size = records.count_token_bytes(text)
    host = find_host_rate(records.codec, size, records.entries)
    objects = records.count_shard_objects(text) / text.shard_positions

    def limit(name: str, full_at: float, grows: bool, source: str, part: bool = False) -> Limit:
        return Limit("capture", name, full_at, grows, source, part)

    parts = {"layers": teacher.layers, "links": teacher.links, "LM head": teacher.head}
    return (
        limit("teacher", workers * teacher.tokens, True, DEVICE_RATES),
        *(
            limit(f"teacher: {name} alone", workers / seconds, True, DEVICE_RATES, part=True)
            for name, seconds in parts.items()
            if seconds
        ),
        limit(
            "encoding and sealing, a core for each worker", workers * host.value, True, host.source
        ),
        limit(
            "writes to the storage", STORE_LINK.value * fleet.hosts / size, True, STORE_LINK.source
        ),
        limit("objects written", STORE_PUTS.value / objects, False, STORE_PUTS.source),
        limit(
            "Redis: beats of the workers", BEATS.value * BEAT_SECONDS * teacher.tokens, False,
            f"{BEATS}; a beat a second of each worker",
        ),
    )  # fmt: skip


def list_training_limits(
    student: StudentRate, records: RecordSize, text: TokenCount, fleet: Fleet
) -> tuple[Limit, ...]:
    """The limits of a training whose devices each read their part of every step."""
    size = records.count_token_bytes(text)
    reader = find_reader_rate(records.codec, size, text.length)
    objects = records.count_shard_objects(text) / text.shard_positions

    def limit(name: str, full_at: float, grows: bool, source: str) -> Limit:
        return Limit("training", name, full_at, grows, source)

    return (
        limit("student", student.tokens, True, f"kd plan; {DEVICE_RATES}"),
        limit("reader, a core for each device", fleet.devices * reader.value, True, reader.source),
        limit(
            "reads from the storage", STORE_LINK.value * fleet.hosts / size, True, STORE_LINK.source
        ),
        limit(
            "objects read once an epoch", STORE_GETS.value / objects, False, STORE_GETS.source
        ),
    )  # fmt: skip


def find_bound(limits: tuple[Limit, ...]) -> Limit:
    """The limit that is full first."""
    return min((each for each in limits if not each.part), key=lambda each: each.full_at)


def list_others(limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
    """The limits besides the first one that is full, in the order in which they fill."""
    bound = find_bound(limits)
    others = [each for each in limits if not each.part and each is not bound]
    return tuple(sorted(others, key=lambda each: each.full_at))
