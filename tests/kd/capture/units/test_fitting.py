"""The tables of the dither: how many a text gets, the same ones each time, and before any shard."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.checking.verify import verify_cache
from cache.codec import Codec
from cache.disk import hash_file, list_file_sizes
from cache.profiles.threshold import MOST_CLUSTERS
from cache.store import open_cache
from cache.units.dither import LEADING, SLOTS
from kd.capture import teacher as reading
from kd.capture.codec_identity import Recipe
from kd.capture.units.drawing import find_nearest
from kd.capture.units.fitting import find_centres, fit_tables, make_tables
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import Interrupted
from kd.models.lm_head import LMHead
from kd.progress import SILENT, Event, Monitor
from kd.stages.capture import run_precompute

pytestmark = pytest.mark.usefixtures("one_thread")

V, D = 700, 8


# ---------------------------------------------------------------------- the recipe


@pytest.mark.parametrize(
    ("positions", "sequences", "expected"),
    [
        (0, 0, Recipe(1, 1)),
        (100, 4, Recipe(1, 1)),
        (65_535, 256, Recipe(1, 17)),
        (65_536, 256, Recipe(2, 16)),
        (1_000_000, 1000, Recipe(16, 9)),
        (20_000_000, 20_000, Recipe(MOST_CLUSTERS, 66)),
        (10**12, 10**9, Recipe(MOST_CLUSTERS, 66)),
    ],
)
def test_a_longer_text_gets_more_clusters(positions: int, sequences: int, expected: Recipe) -> None:
    assert Recipe.choose(positions, sequences) == expected


def test_no_more_than_a_sixteenth_of_a_text_is_read_twice() -> None:
    for positions in (17_000, 100_000, 3_000_000):
        recipe = Recipe.choose(positions, positions // 100)
        assert (recipe.sequences - 1) * 100 < positions / 16


# ---------------------------------------------------------------------- the tables


def make_states(count: int = 6, positions: int = 90) -> list[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(1)
    middles = 4.0 * torch.randn(3, D, generator=chance)
    return [
        (
            middles[number % 3] + torch.randn(positions, D, generator=chance),
            torch.randint(V, (positions,), generator=chance),
        )
        for number in range(count)
    ]


def make_head() -> LMHead:
    weight_VD = torch.randn(V, D, generator=torch.Generator().manual_seed(2))
    return LMHead(weight_VD, None, 1.0, None, V)


def make_codec(clusters: int) -> Codec:
    return Codec("threshold", V, threshold=0.02, clusters=clusters)


def test_a_table_has_slots_in_proportion_to_the_tails_of_its_cluster() -> None:
    states = make_states()
    head = make_head()
    tables = fit_tables(states, head, make_codec(3), 3)
    assert tables.slots_CZ.shape == (3, SLOTS)
    assert tables.leading_CL.shape == (3, LEADING) and tables.ranked_CR.shape == (3, V)
    hidden = torch.cat([hidden_ND for hidden_ND, _ in states])
    gold = torch.cat([gold_N for _, gold_N in states])
    nearest = find_nearest(torch.from_numpy(tables.centres_CD), hidden)
    assert len(nearest.unique()) == 3
    tails = torch.softmax((hidden @ head.weight.T).double(), 1)
    tails.scatter_(1, gold[:, None], 0.0)
    heads = tails > 0.02
    tails[heads] = 0.0
    mean = tails.sum(0) / tails.sum()
    for cluster in range(3):
        own = tails[nearest == cluster].sum(0)
        expected = (0.9 * own / own.sum() + 0.1 * mean).numpy() * SLOTS
        slots = np.bincount(tables.slots_CZ[cluster], minlength=V)
        assert np.abs(slots - expected).max() < 1.01
        leading = tables.leading_CL[cluster]
        counts = heads[nearest == cluster].sum(0).numpy()
        assert (np.diff(counts[leading]) <= 0).all(), "heads by their number"
        assert len(set(leading.tolist())) == LEADING
        assert sorted(tables.ranked_CR[cluster].tolist()) == list(range(V))


def test_the_same_states_make_the_same_tables_and_centres_are_bfloat16() -> None:
    first, second = (fit_tables(make_states(), make_head(), make_codec(4), 4) for _ in range(2))
    for mine, theirs in zip(first.to_arrays().values(), second.to_arrays().values(), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    stored = type(first).from_arrays(first.to_arrays())
    assert np.array_equal(stored.centres_CD, first.centres_CD), "nothing is lost on the disk"


def test_fewer_states_than_clusters_leave_clusters_that_no_state_is_in() -> None:
    states = make_states(1, 3)
    tables = fit_tables(states, make_head(), make_codec(8), 8)
    nearest = find_nearest(torch.from_numpy(tables.centres_CD), states[0][0])
    assert len(nearest.unique()) <= 3
    unused = sorted(set(range(8)) - set(nearest.tolist()))
    assert unused
    slots = [np.bincount(tables.slots_CZ[each], minlength=V) for each in range(8)]
    for each in unused:
        # Nothing is known of it: nine tenths are for all tokens alike.
        assert slots[each].min() >= int(0.9 * SLOTS / V) - 1


def test_no_state_at_all_gives_tables_of_all_tokens() -> None:
    none = (torch.zeros(0, D), torch.zeros(0, dtype=torch.int64))
    tables = fit_tables([none], make_head(), make_codec(2), 2)
    assert np.bincount(tables.slots_CZ[0], minlength=V).min() >= SLOTS // V
    assert not find_centres(torch.zeros(0, D), 3).any()


def test_tokens_that_never_come_have_no_slot_and_come_last() -> None:
    tails = np.array([[0.0, 5.0, 1.0, 0.0]])
    heads = np.array([[0.0, 0.0, 0.0, 2.0]])
    tables = make_tables(tails, heads, np.zeros((1, D), np.float32))
    assert set(tables.slots_CZ[0].tolist()) == {1, 2}
    assert tables.leading_CL[0].tolist() == tables.order_V.tolist() == [3, 1, 2, 0]


# ---------------------------------------------------------------------- in a capture


@pytest.fixture
def job(tiny_teacher: Path, tiny_text: Path) -> JobConfig:
    return parse_config(
        {
            "kind": "precompute",
            "teacher": {"model": str(tiny_teacher), "batch_size": 3},
            "data": {
                "train": str(tiny_text),
                "sequence_length": 64,
                "max_train_samples": 20,
            },
            "cache": {"shard_sequences": 7},
        }
    )


def capture(job: JobConfig, home: Path, monitor: Monitor = SILENT) -> Path:
    summary = run_precompute(job, home, home / "run", monitor).cache
    return home / "caches" / str(summary["fingerprint"])


def content(folder: Path) -> dict[str, str]:
    return {name: hash_file(folder / name) for name in list_file_sizes(folder)}


class Killed(Exception):
    """Stands for a process that ends."""


@pytest.mark.parametrize("moment", ["before the tables", "after the tables", "in the shards"])
def test_a_capture_that_ends_at_any_moment_goes_on_to_the_same_bytes(
    job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    whole = capture(job, tmp_path / "whole")
    home = tmp_path / "cut"
    fits: list[int] = []
    fit = reading.fit_tables

    def count(*arguments: Any) -> Any:
        fits.append(1)
        found = fit(*arguments)
        if moment == "before the tables" and len(fits) == 1:
            raise Killed
        return found

    monkeypatch.setattr(reading, "fit_tables", count)
    seen: list[Event] = []
    least = {"after the tables": 1, "in the shards": 4}.get(moment, 100)
    monitor = Monitor(seen.append, lambda: [each.type for each in seen].count("progress") >= least)
    with pytest.raises((Killed, Interrupted)):
        capture(job, home, monitor)
    assert (home / "caches" / whole.name / "dither").exists() == (moment != "before the tables")
    again = capture(job, home)
    assert content(again) == content(whole)
    assert len(fits) == (2 if moment == "before the tables" else 1), "sealed tables stay"


def test_damaged_tables_are_fitted_again(job: JobConfig, tmp_path: Path) -> None:
    whole = capture(job, tmp_path / "whole")
    seen: list[Event] = []
    monitor = Monitor(seen.append, lambda: [each.type for each in seen].count("progress") >= 4)
    with pytest.raises(Interrupted):
        capture(job, tmp_path / "cut", monitor)
    folder = tmp_path / "cut" / "caches" / whole.name
    (name,) = [each for each in list_file_sizes(folder) if each.startswith("dither/classes/c")]
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    assert content(capture(job, tmp_path / "cut")) == content(whole)


def test_the_tables_are_those_of_the_first_sequences_and_part_of_the_cache(
    job: JobConfig, tmp_path: Path
) -> None:
    seen: list[Event] = []
    folder = capture(job, tmp_path, Monitor(seen.append))
    store = open_cache(folder)
    codec = store.identity.codec
    assert (codec.clusters, codec.fitted) == (1, 2), "a short text has its mean tail"
    told = [each.data.get("phase") for each in seen if each.type == "stage"]
    assert "fitting one table (the text is short) of tails to 2 sequences" in told
    assert store.tables.slots_CZ.shape == (1, SLOTS)
    assert verify_cache(folder) == []
    shutil.rmtree(folder / "dither")
    assert any("dither" in line for line in verify_cache(folder))
