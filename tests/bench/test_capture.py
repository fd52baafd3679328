"""The bench of the capture prints its whole tables. Measured times are not judged: they vary."""

import time

import numpy as np
import pytest

from bench.capture import (
    COLUMNS,
    QUICK,
    SimulatedDevice,
    find_places,
    make_shard_identity,
    make_texts,
    run_in_turn,
    run_overlapped,
)
from cache.disk import hash_file, list_file_sizes


@pytest.mark.slow
def test_every_row_is_there_with_rates_above_zero(print_page):
    text = print_page("bench/capture.py", "--quick", "--rates", "1000", "1e6")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert tuple(rows[0]) == COLUMNS and [row[0] for row in rows[1:3]] == ["1,000", "1,000,000"]
    parts = ["random numbers", "encoding", "sealing", "writing", "all"]
    assert [row[0] for row in rows[4:]] == parts
    assert all(float(cell) > 0 for row in rows[4:] for cell in row[1:]), rows
    assert "bytes as it is delivered" in text.splitlines()[-1]


@pytest.fixture(scope="module")
def device():
    return SimulatedDevice.prepare(QUICK, make_shard_identity(QUICK, 1).record_codec())


def test_a_simulated_device_delivers_no_sooner_than_its_rate_and_each_sequence_once(device):
    sequences = make_texts(QUICK)
    began = time.perf_counter()
    rows = 0
    for delivery in device.deliver(sequences, 0, 1000.0):
        places = find_places(sequences, 0, rows)
        assert delivery.positions == len(places.position_N) == len(delivery.encode())
        rows += delivery.sequences
        assert time.perf_counter() - began >= rows * (QUICK.length - 1) / 1000.0
    assert rows == QUICK.shard_sequences
    assert np.array_equal(np.unique(places.sequence_N), np.arange(rows - delivery.sequences, rows))


def test_both_runs_write_the_same_shards(device, tmp_path):
    found = []
    for run in (run_overlapped, run_in_turn):
        root = tmp_path / run.__name__
        paced = run(device, QUICK, 1e9, 2, root)
        assert paced.tokens == 2 * QUICK.shard_tokens and 0 < paced.reading <= paced.whole
        files = [name for name in list_file_sizes(root) if "/shards/0" in name]
        found.append({name: hash_file(root / name) for name in files})
    assert found[0] and found[0] == found[1]
