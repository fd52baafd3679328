"""The loading of weights is reported where it takes long, and the bars of others are let be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from bench.support.paths import AUSTEN
from kd.models.loading import hide_progress_bars, load_model
from kd.progress import Event, Monitor
from kd.tracking import loading_events


@pytest.fixture
def events() -> list[Event]:
    hide_progress_bars()
    return []


def test_the_loading_of_a_model_is_reported(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_events, "_SECONDS", 0.0)
    with loading_events.reported_loading(Monitor(events.append)):
        model = load_model(Path(AUSTEN) / "teacher", torch.float32)
    last = events[-1].data
    assert {event.type for event in events} == {"progress"}
    assert last["unit"] == "weights"
    assert last["done"] == last["total"] >= len(list(model.parameters()))
    assert last["eta_seconds"] == 0.0


def test_a_short_loading_is_not_reported(events: list[Event]) -> None:
    with loading_events.reported_loading(Monitor(events.append)):
        load_model(Path(AUSTEN) / "teacher", torch.float32)
    assert events == []


def test_other_bars_and_the_hook_of_others_stay(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_events, "_SECONDS", 0.0)
    before = transformers.utils.logging.set_tqdm_hook(None)
    with loading_events.reported_loading(Monitor(events.append)):
        assert list(transformers.utils.logging.tqdm([1, 2], desc="Writing files")) == [1, 2]
    assert events == []
    assert transformers.utils.logging.set_tqdm_hook(before) is None
