"""A reader of caches that knows only what docs/formats.md says. It imports nothing of Potstill.

It is slow and plain on purpose: another language can copy it line by line.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google_crc32c import value as crc32c
from numcodecs import Blosc

#: The type of ``struct`` for each data type.
TYPES = {
    "bool": "?",
    "uint8": "B",
    "int8": "b",
    "uint16": "H",
    "int16": "h",
    "uint32": "I",
    "int64": "q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
}
SAMPLED = ("threshold", "tempered")
#: The constants of the hash of candidates, and the mass of a record.
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
TABLES = ("slots", "leading", "classes")
#: Tokens of a cluster that have a rank of their own there.
RANKED = 4096
WORD = (1 << 64) - 1
WHOLE = 1 << 40


@dataclass
class Array:
    shape: list[int]
    rows: list[Any]
    """One item a row: a number, or nested lists of numbers."""


def read_array(folder: Path) -> Array:
    about = json.loads((folder / "zarr.json").read_text())
    shape = about["shape"]
    chunk = about["chunk_grid"]["configuration"]["chunk_shape"]
    assert chunk[1:] == shape[1:]
    width = math.prod(shape[1:])
    numbers: list[Any] = []
    for place in range(-(-shape[0] // chunk[0])):
        data = (folder / ".".join(["c", str(place), *["0"] * (len(shape) - 1)])).read_bytes()
        body, check = data[:-4], data[-4:]
        assert int.from_bytes(check, "little") == crc32c(body)
        raw = Blosc().decode(body)
        numbers += struct.unpack(f"<{chunk[0] * width}{TYPES[about['data_type']]}", raw)
    # The last chunk is as long as the others; what lies beyond the shape is no part of the array.
    numbers = numbers[: shape[0] * width]
    return Array(shape, fold(numbers, shape))


def fold(numbers: list[Any], shape: list[int]) -> list[Any]:
    if len(shape) == 1:
        return numbers
    step = math.prod(shape[1:])
    return [fold(numbers[row * step : (row + 1) * step], shape[1:]) for row in range(shape[0])]


@dataclass
class Manifest:
    content: dict[str, Any]
    fingerprint: str
    genuine: bool


def read_signed(path: Path) -> tuple[dict[str, Any], bool]:
    """The document, and whether its bytes have the digest that is in it."""
    data = path.read_bytes()
    content = json.loads(data)
    member = f'"digest":"{content["digest"]}"'.encode()
    # At the outermost level; a digest inside the document is another one.
    for whole in (member + b",", b"," + member):
        rest = data.replace(whole, b"", 1)
        if hashlib.sha256(rest).hexdigest() == content["digest"]:
            return content, True
    return content, False


def read_manifest(folder: Path) -> Manifest:
    content, genuine = read_signed(folder / "manifest.json")
    # The manifest is canonical, so the identity's own canonical form is a part of its bytes.
    identity = json.dumps(content["identity"], sort_keys=True, separators=(",", ":")).encode()
    assert b'"identity":' + identity in (folder / "manifest.json").read_bytes()
    return Manifest(content, hashlib.sha256(identity).hexdigest()[:32], genuine)


def check_seal(folder: Path, name: str, seal: str, digest: str) -> bool:
    """Whether a folder holds the files of its seal, and the seal is the one in the manifest."""
    path = folder / "seals" / seal
    content, genuine = read_signed(path)
    files = content["files"]
    found = {
        each.relative_to(folder / name).as_posix(): {
            "bytes": each.stat().st_size,
            "sha256": hashlib.sha256(each.read_bytes()).hexdigest(),
        }
        for each in (folder / name).rglob("*")
        if each.is_file()
    }
    return genuine and files == found and hashlib.sha256(path.read_bytes()).hexdigest() == digest


def read_entry(folder: Path, shard: int) -> dict[str, Any]:
    """What the manifest says of a shard, in the manifest itself or in a piece of it."""
    content = read_manifest(folder).content
    if "shards" in content:
        return dict(content["shards"][shard])
    identity = content["identity"]
    data, size = identity["data"], identity["codec"]["shard_sequences"]
    piece, row = divmod(shard, content["pieces"]["piece_shards"])
    rows = (folder / "manifest" / f"{piece:06d}.bin").read_bytes()
    assert hashlib.sha256(rows).hexdigest() == content["pieces"]["sha256"][piece]
    fields = ("positions", "head_entries", "tail_entries", "bytes")
    found = dict(zip(fields, struct.unpack_from("<4Q", rows, row * 64), strict=True))
    digest = rows[row * 64 + 32 : row * 64 + 64].hex()
    left = data["train_sequences"] + data["validation_sequences"] - shard * size
    return {**found, "digest": digest, "sequences": min(size, left)}


def read_sequence(folder: Path, number: int, draw: int = 0) -> dict[str, list[Any]]:
    """The stored numbers of a sequence: its tokens, and the columns of its records."""
    codec = read_manifest(folder).content["identity"]["codec"]
    size = codec["shard_sequences"]
    shard = folder / "shards" / f"{number // size:06d}"
    place = number % size
    names = [each.name for each in shard.iterdir() if each.is_dir()]
    arrays = {name: read_array(shard / name) for name in names}
    offsets = arrays.pop("offsets").rows
    first, last = offsets[place], offsets[place + 1]
    found = {
        name: arrays.pop(name).rows[place] for name in ("tokens", "document_start", "target_mask")
    }
    if codec["profile"] not in SAMPLED:
        return found | {name: each.rows[first[0] : last[0]] for name, each in arrays.items()}
    if codec.get("clusters", 0):
        tables = {name: read_array(folder / "dither" / name).rows for name in TABLES}
        return found | read_units(arrays, first, last, tables, found, codec, number)
    return found | read_logarithms(arrays, first, last, draw)


def read_logarithms(
    arrays: dict[str, Array], first: list[int], last: list[int], draw: int
) -> dict[str, list[Any]]:
    """The columns of profile tempered, and of threshold in caches of version 0.2.0."""
    coded = {name for name in arrays if name.startswith(("head_", "tail_"))}
    coded -= {"head_count", "tail_count"}
    order = order_tokens(arrays.pop("token_classes").rows)
    found = {name: arrays[name].rows[first[0] : last[0]] for name in arrays if name not in coded}
    for part, stored, entries, bits in (
        ("head", "head", 1, 3),
        ("tail", f"tail_{draw}", 2, 4 + draw),
    ):
        ranks = decode_ranks(
            arrays[f"{stored}_symbols"].rows[first[entries] : last[entries]],
            arrays[f"{stored}_bits"].rows[first[bits] : last[bits]],
            found[f"{part}_count"],
        )
        found[f"{part}_ids"] = [order[rank] for rank in ranks]
        if f"{stored}_logprobs" in arrays:
            rows = arrays[f"{stored}_logprobs"].rows
            found[f"{part}_logprobs"] = rows[first[entries] : last[entries]]
    return found


def read_units(
    arrays: dict[str, Array],
    first: list[int],
    last: list[int],
    tables: dict[str, list[Any]],
    found: dict[str, list[Any]],
    codec: dict[str, Any],
    number: int,
) -> dict[str, list[Any]]:
    """The columns of profile threshold: units of heads, and the ids of heads and drawn tokens."""
    plain = ("known", "entropy", "cluster", "head_count")
    columns = {name: arrays[name].rows[first[0] : last[0]] for name in plain}
    others = arrays["other_count"].rows[first[0] : last[0]]
    columns["head_units"] = arrays["head_units"].rows[first[1] : last[1]]
    rests = list_rests(found, columns["known"], codec)
    given, accepted = 0, []
    for (_, units), heads, other in zip(rests, columns["head_count"], others, strict=True):
        taken = sum(each // 2 for each in columns["head_units"][given : given + heads])
        accepted.append(units - taken - other)
        given += heads
    ranks = {}
    counts = {"head": columns["head_count"], "gap": accepted, "other": others}
    for column, (part, count) in enumerate(counts.items(), 1):
        symbols = arrays[f"{part}_symbols"].rows[first[column] : last[column]]
        bits = arrays[f"{part}_bits"].rows[first[column + 3] : last[column + 3]]
        ranks[part] = iter(decode_ranks(symbols, bits, count))
    places = [place for place, target in enumerate(found["target_mask"]) if target]
    columns |= {"head_ids": [], "tail_count": [], "tail_ids": [], "tail_k": []}
    orders = {cluster: rank_tokens(tables, cluster) for cluster in set(columns["cluster"])}
    for row, place in enumerate(places):
        ids = orders[columns["cluster"][row]]
        slots = tables["slots"][columns["cluster"][row]]
        columns["head_ids"] += [ids[next(ranks["head"])] for _ in range(counts["head"][row])]
        columns["tail_ids"] += [ids[next(ranks["other"])] for _ in range(others[row])]
        candidates = [next(ranks["gap"]) for _ in range(accepted[row])]
        columns["tail_ids"] += [
            slots[hash_candidate(codec["seed"], number, place, k) & (len(slots) - 1)]
            for k in candidates
        ]
        columns["tail_k"] += [0] * others[row] + candidates
        columns["tail_count"].append(others[row] + accepted[row])
    return columns


def list_rests(
    found: dict[str, list[Any]], known: list[list[int]], codec: dict[str, Any]
) -> list[tuple[int, int]]:
    """The mass that the known tokens of each record leave, in 2^-40, and its number of units."""
    unit = round(codec["threshold"] * WHOLE)
    rests = []
    for codes, golds in zip(known, list_known_ids(found, codec), strict=True):
        rest = WHOLE - sum(measure_code(codes[place]) for place in golds.values())
        rests.append((rest, max(-(-rest // unit), 0)))
    return rests


def list_known_ids(found: dict[str, list[Any]], codec: dict[str, Any]) -> list[dict[int, int]]:
    """The known tokens of each record, each with its place: the gold token comes first."""
    golds = [
        found["tokens"][place + 1] for place, target in enumerate(found["target_mask"]) if target
    ]
    kept = {token: place for place, token in enumerate(codec["always_keep"], 1)}
    return [{**kept, gold: 0} for gold in golds]


def measure_code(code: int) -> int:
    return 0 if code == 65535 else round(math.exp(-code / 256) * WHOLE)


def mix(word: int) -> int:
    word = (word ^ (word >> 30)) * FIRST & WORD
    word = (word ^ (word >> 27)) * SECOND & WORD
    return word ^ (word >> 31)


def hash_candidate(seed: int, sequence: int, position: int, k: int) -> int:
    start = mix(mix((sequence * STEP + seed) & WORD) ^ position)
    return mix((start + k * STEP) & WORD)


def order_tokens(classes: list[int]) -> list[int]:
    """The token at each rank: the highest class first, ids ascend within a class."""
    return sorted(range(len(classes)), key=lambda token: (-classes[token], token))


def rank_tokens(tables: dict[str, list[Any]], cluster: int) -> list[int]:
    """The token at each rank of a cluster; from RANKED on all of them once more."""
    by_class = order_tokens(tables["classes"])
    slots, leading = Counter(tables["slots"][cluster]), tables["leading"][cluster]
    given = set(leading)
    others = [token for token in by_class if token not in given]
    # Sorting leaves equals in the order of their classes.
    first = leading + sorted(others, key=lambda token: -slots[token])
    return first[:RANKED] + by_class


def decode_ranks(symbols: list[int], bits: list[int], counts: list[int]) -> list[int]:
    """The ranks of all entries of a sequence, record after record."""
    stream = int.from_bytes(bytes(bits), "little")
    found, entry = [], 0
    for count in counts:
        rank = 0
        for _ in range(count):
            symbol = symbols[entry]
            entry += 1
            if symbol < 16:
                gap = symbol
            else:
                length = symbol // 8 - 1
                gap = ((8 + symbol % 8) << length) + (stream & ((1 << length) - 1))
                stream >>= length
            rank += gap
            found.append(rank)
    assert entry == len(symbols)
    return found


@dataclass
class Record:
    """One record of tempered, or of threshold of version 0.2.0: log-probabilities in nats."""

    known: list[tuple[int, float]]
    head: list[tuple[int, float]]
    tail: list[tuple[int, float]]
    partition: list[list[float]]


Weights = list[tuple[int, float]]


def list_records(found: dict[str, list[Any]], codec: dict[str, Any]) -> list[Record]:
    """The records of a sequence; the tail's log-probabilities are 0 in profile threshold."""
    step = 2**-6 if codec["profile"] == "tempered" else math.log(1 / codec["threshold"]) / 127
    places = [place for place, target in enumerate(found["target_mask"]) if target]
    records, head, tail = [], 0, 0
    for number, place in enumerate(places):
        gold = found["tokens"][place + 1]
        ids = [gold, *codec["always_keep"]]
        logs = [-code / 256 for code in found["known"][number]]
        known = [(ids[0], logs[0])]
        known += [each for each in zip(ids[1:], logs[1:], strict=True) if each[0] != gold]
        heads, tails = found["head_count"][number], found["tail_count"][number]
        codes = found.get("tail_logprobs", [0] * len(found["tail_ids"]))
        records.append(
            Record(
                known,
                [
                    (found["head_ids"][at], -step * found["head_logprobs"][at])
                    for at in range(head, head + heads)
                ],
                [(found["tail_ids"][at], -codes[at] / 8) for at in range(tail, tail + tails)],
                [
                    [code / 1024 for code in knot]
                    for knot in (found["partition"][number] if "partition" in found else [])
                ],
            )
        )
        head, tail = head + heads, tail + tails
    return records


def weigh_units(found: dict[str, list[Any]], codec: dict[str, Any]) -> list[Weights]:
    """The weights of each record of profile threshold, which sum to 1."""
    result, head, tail = [], 0, 0
    known = list_known_ids(found, codec)
    for row, (rest, units) in enumerate(list_rests(found, found["known"], codec)):
        codes = found["known"][row]
        weights = [
            (token, measure_code(codes[place]) / WHOLE) for token, place in known[row].items()
        ]
        if not units:
            gold = next(token for token, place in known[row].items() if place == 0)
            weights.append((gold, rest / WHOLE))
        share = rest / WHOLE / max(units, 1)
        for _ in range(found["head_count"][row]):
            weights.append((found["head_ids"][head], found["head_units"][head] // 2 * share))
            head += 1
        for _ in range(found["tail_count"][row]):
            weights.append((found["tail_ids"][tail], share))
            tail += 1
        result.append(weights)
    return result


def find_best(found: dict[str, list[Any]], codec: dict[str, Any]) -> list[int]:
    """The teacher's best token of each record of profile threshold, -1 where it is not known."""
    result, start = [], 0
    known = list_known_ids(found, codec)
    for row, (rest, units) in enumerate(list_rests(found, found["known"], codec)):
        codes = found["known"][row]
        # The gold token first: it is the heaviest of equals.
        places = sorted((place, token) for token, place in known[row].items())
        masses = {token: measure_code(codes[place]) for place, token in places}
        if not units:
            masses[places[0][1]] += rest
        heaviest = max(masses, key=lambda token: masses[token])
        best = heaviest if masses[heaviest] > codec["threshold"] * WHOLE else -1
        end = start + found["head_count"][row]
        heads = list(zip(found["head_ids"][start:end], found["head_units"][start:end], strict=True))
        most = max((twice // 2 for _, twice in heads), default=0)
        if most > 1 and most * rest > masses[heaviest] * units:
            best = min(token for token, twice in heads if twice // 2 == most)
        if marked := [token for token, twice in heads if twice % 2]:
            best = heaviest if min(marked) == best else min(marked)
        result.append(best)
        start = end
    return result


def weigh_threshold(record: Record) -> Weights:
    explicit = [(token, math.exp(log)) for token, log in record.known + record.head]
    rest = 1 - sum(weight for _, weight in explicit)
    if not record.tail:
        return [(explicit[0][0], explicit[0][1] + rest), *explicit[1:]]
    return explicit + [(token, rest / len(record.tail)) for token, _ in record.tail]


def weigh_tempered(record: Record, codec: dict[str, Any], temperature: float) -> Weights:
    least, most = codec["temperatures"]
    beta = 1 / temperature

    def space(count: int) -> list[float]:
        return [(1 / most) * (most / least) ** (at / (count - 1)) for at in range(count)]

    def tail(b: float) -> float:
        if not record.tail:
            return -math.inf
        knots = space(len(record.partition))
        left = max(at for at in range(len(knots) - 1) if at == 0 or knots[at] <= b)
        width = knots[left + 1] - knots[left]
        t = (b - knots[left]) / width
        (b0, d0), (b1, d1) = record.partition[left], record.partition[left + 1]
        return (
            (1 + 2 * t) * (1 - t) ** 2 * b0
            + t * (1 - t) ** 2 * width * d0
            + t**2 * (3 - 2 * t) * b1
            + t**2 * (t - 1) * width * d1
        )

    def total(b: float) -> float:
        explicit = sum(math.exp(b * log) for _, log in record.known + record.head)
        return math.log(explicit + math.exp(tail(b)))

    proposal = space(max(2, math.ceil(math.log2(most / least) - 1e-9) + 1))
    mass = sum(math.exp(tail(b) - total(b)) for b in proposal) / len(proposal)
    weights = [
        (token, math.exp(beta * log - total(beta))) for token, log in record.known + record.head
    ]
    for token, log in record.tail:
        g = sum(math.exp(b * log - total(b)) for b in proposal) / len(proposal)
        p = math.exp(beta * log - total(beta))
        weights.append((token, p * mass / (len(record.tail) * g)))
    return weights


def weigh_top(found: dict[str, list[Any]]) -> list[tuple[Weights, float]]:
    """The weighted entries of each record of profile topk, and the mass of the rest."""
    result = []
    for ids, codes, rest in zip(
        found["top_ids"], found["top_logprobs"], found["residual"], strict=True
    ):
        values = [0.0 if code == 65535 else math.exp(-code / 2048) for code in [*codes, rest]]
        shares = [value / sum(values) for value in values]
        result.append((list(zip(ids, shares[:-1], strict=True)), shares[-1]))
    return result
