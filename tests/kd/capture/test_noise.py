"""The teacher's own noise: it is measured, an honest cache passes at any noise, a fault is found.

A noise of a given size is added to the hidden states that are read from the model; each batch has
its own. The capture, the reading one by one and the reading together have independent noises of
equal size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.support.small.caches import make_cache, make_identity
from cache.checking.verify import verify_cache
from cache.manifest import FidelityOverride, Manifest
from cache.records import Sequences
from cache.store import Cache, open_cache, read_manifest, replace_fidelity
from kd.capture.fidelity.live import LiveTeacher
from kd.capture.fidelity.measure import FidelityMeasurement, measure_fidelity
from kd.capture.fidelity.verdict import find_out_of_bounds
from kd.capture.noise import LARGEST_NOISE, read_together
from kd.errors import FidelityError
from kd.progress import Event, Monitor
from tests.support.kd.captures import PROFILES, capture, live
from tests.support.kd.samples import stop_chance

pytestmark = pytest.mark.usefixtures("one_thread")

#: Readings of the noise that each test judges, with a seed each.
TRIALS = 3
NAMES = ("threshold", "tempered", "topk", "dense", "hidden")
Fault = Callable[[Tensor, Sequences], Tensor]


def leave(states_ND: Tensor, _: Sequences) -> Tensor:
    """Change nothing."""
    return states_ND


def find_key(sequences: Sequences, row: int) -> int:
    return int(sequences.tokens[row].astype(np.int64).sum())


@dataclass(frozen=True)
class NoisyTeacher(LiveTeacher):
    """A teacher whose hidden states have a noise that depends on the batch.

    With u and w normal, the reading one by one has the noise u, the reading together
    u / 2 + sqrt(3) / 2 w: as seen from the capture, whose noise is in neither.
    """

    scale: float = 0.0
    seed: int = 0
    fault: Fault = leave

    def compute_states(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        states_ND, gold_N = super().compute_states(sequences)
        counts = sequences.target_mask.sum(1).tolist()
        parts = []
        for row, states in enumerate(states_ND.split(counts)):
            dice = torch.Generator().manual_seed(self.seed * 10_007 + find_key(sequences, row))
            alone = torch.randn(states.shape, generator=dice)
            together = alone / 2 + math.sqrt(0.75) * torch.randn(states.shape, generator=dice)
            noise = alone if len(counts) == 1 else together
            parts.append(self.fault(states + self.scale * noise, sequences.select([row])))
        return torch.cat(parts), gold_N


def as_bfloat16(store: Cache) -> Cache:
    """Return the cache as one of bfloat16: no other precision is as noisy as these tests."""
    teacher = replace(store.identity.teacher, dtype="bfloat16")
    manifest = replace(store.manifest, identity=replace(store.identity, teacher=teacher))
    return Cache(store.folder, manifest)


def judge(
    store: Cache, teacher: LiveTeacher, nats: float, seed: int, fault: Fault = leave
) -> list[str]:
    """Judge a cache by a teacher whose readings differ by ``nats``; return the problems."""
    small = NoisyTeacher(teacher.model, teacher.lm_head, scale=1e-3, seed=seed)
    per_scale = measure_fidelity(store, small, redraws=2).noise / small.scale
    noisy = replace(small, scale=nats / per_scale, fault=fault)
    found = measure_fidelity(store, noisy, redraws=10)
    if fault is leave:
        assert found.noise == pytest.approx(nats, rel=0.3, abs=1e-5)
    return find_out_of_bounds(store, found)


@pytest.mark.long
@pytest.mark.parametrize("nats", [0.0, 0.05, 0.1, 0.15, 0.3])
@pytest.mark.parametrize("name", NAMES)
def test_an_honest_cache_passes_at_any_noise(
    stores: dict[str, Cache], tiny_teacher: Path, name: str, nats: float
) -> None:
    store = as_bfloat16(stores[name])
    teacher = live(tiny_teacher)
    assert [judge(store, teacher, nats, seed) for seed in range(TRIALS)] == [[]] * TRIALS


def shift(states_ND: Tensor, _: Sequences) -> Tensor:
    """Read every position one place too early."""
    return states_ND.roll(-1, 0)


def cool(states_ND: Tensor, _: Sequences) -> Tensor:
    """Multiply the logits by 1.5: the LM head of this teacher is linear."""
    return states_ND * 1.5


def damage(states_ND: Tensor, sequences: Sequences) -> Tensor:
    """Turn the positions round in about half of the sequences."""
    return states_ND.flip(0) if find_key(sequences, 0) % 2 else states_ND


def revise(states_ND: Tensor, _: Sequences) -> Tensor:
    """Change the hidden states by half their size, as another revision of the teacher does."""
    width = states_ND.shape[1]
    turn_DD = torch.randn(width, width, generator=torch.Generator().manual_seed(1))
    return states_ND + 0.5 * states_ND @ turn_DD / math.sqrt(width)


@pytest.mark.parametrize("nats", [0.0, 0.15, 0.3])
@pytest.mark.parametrize("fault", [shift, cool, damage, revise])
@pytest.mark.parametrize("name", ["threshold", "topk"])
def test_a_fault_is_found_at_any_noise(
    stores: dict[str, Cache], tiny_teacher: Path, name: str, fault: Fault, nats: float
) -> None:
    assert judge(as_bfloat16(stores[name]), live(tiny_teacher), nats, 0, fault)


def test_a_teacher_that_is_nothing_but_noise_proves_nothing(
    stores: dict[str, Cache], tiny_teacher: Path
) -> None:
    (line,) = find_out_of_bounds(
        stores["topk"], FidelityMeasurement(stores["topk"].manifest.fidelity, 2 * LARGEST_NOISE)
    )
    assert line.startswith("the teacher's own noise between two batches is 1 nats")


# ---------------------------------------------------------------------- reading together


@pytest.mark.parametrize("fitting,sizes", [(4, [4]), (2, [4, 2, 2]), (1, [4, 2])])
def test_as_many_sequences_are_read_together_as_memory_holds(
    stores: dict[str, Cache], fitting: int, sizes: list[int]
) -> None:
    sequences, _ = stores["topk"].read(range(4))
    seen: list[int] = []

    def read(part: Sequences) -> Tensor:
        seen.append(len(part))
        if len(part) > fitting:
            raise torch.OutOfMemoryError("no memory")
        return torch.ones(len(part))

    together = read_together(read, sequences)
    assert seen == sizes
    assert (together is None) == (fitting == 1)
    assert together is None or len(together) == 4


# ---------------------------------------------------------------------- an overruled verdict


@pytest.fixture
def unfair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw tails that are not random, so that the records differ from the teacher."""
    stop_chance(monkeypatch)


@pytest.mark.long
def test_a_field_overrules_the_verdict_and_the_cache_keeps_it(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path, unfair: None
) -> None:
    with pytest.raises(FidelityError, match="bias_z") as refusal:
        capture(tiny_teacher, tiny_text, tmp_path)
    assert "cache.fidelity: warn" in refusal.value.remedy

    events: list[Event] = []
    monitor = Monitor(events.append)
    store = open_cache(capture(tiny_teacher, tiny_text, tmp_path, monitor, fidelity="warn"))
    overruled = store.manifest.overruled
    assert overruled is not None and overruled.field == "cache.fidelity: warn"
    assert 0 <= overruled.noise < 1e-3 and overruled.problems[0].startswith("bias_z at temperature")
    warnings = [str(event.data["message"]) for event in events if event.type == "warning"]
    assert [overruled.describe() in message for message in warnings].count(True) == 1
    (summary,) = [event.data for event in events if event.type == "cache"]
    assert summary["overruled"] == overruled.to_json()
    assert json.loads((store.folder / "manifest.json").read_bytes())["version"] == 8
    assert verify_cache(store.folder) == []

    # A job that uses the cache and does not overrule the verdict itself is warned, too.
    later: list[Event] = []
    capture(tiny_teacher, tiny_text, tmp_path, Monitor(later.append))
    messages = [str(event.data["message"]) for event in later if event.type == "warning"]
    assert any(overruled.describe() in message for message in messages)

    # A verdict that was found good takes the other's place.
    replace_fidelity(store.folder, store.manifest.fidelity)
    assert read_manifest(store.folder).overruled is None


@pytest.mark.long
def test_a_faithful_cache_is_the_same_with_the_field(
    stores: dict[str, Cache], tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    options = {"fidelity": "warn", **PROFILES["threshold"]}
    store = open_cache(capture(tiny_teacher, tiny_text, tmp_path, **options))
    plain = stores["threshold"].folder
    assert store.folder.name == plain.name
    manifest = (store.folder / "manifest.json").read_bytes()
    assert manifest == (plain / "manifest.json").read_bytes()
    assert b"overruled" not in manifest and json.loads(manifest)["version"] == 8


def test_a_manifest_keeps_an_overruled_verdict(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, make_identity())
    verdict = FidelityOverride(0.2, ("kl is large",), "cache.fidelity: warn")
    manifest = replace(read_manifest(folder), overruled=verdict)
    assert Manifest.from_bytes(manifest.to_bytes(), "it") == manifest
