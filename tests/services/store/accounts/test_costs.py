"""The price of a device, by the names that operators write."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.settings import Settings, parse_prices
from services.store.costs import find_price

PRICES = "h100=2.5, a100-80gb=1.8, A6000=0.9, cpu=0.04, 0.5"


@pytest.mark.parametrize(
    ("kind", "name", "price"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", 2.5),
        ("cuda", "h100", 2.5),
        ("cuda", "NVIDIA RTX A6000", 0.9),
        ("cuda", "NVIDIA L4", 0.5),
        ("cpu", "Some h100 of a CPU", 0.04),
    ],
)
def test_a_device_has_the_price_of_its_kind(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str, price: float
) -> None:
    monkeypatch.setenv("KD_DEVICE_PRICES", PRICES)
    assert find_price(Settings().prices, kind, name) == price


def test_a_device_without_a_price_has_no_cost() -> None:
    assert find_price({}, "cpu", "") is None
    assert find_price(parse_prices(["h100=2"]), "cuda", "NVIDIA L4") is None
    assert find_price(parse_prices(["h100=2"]), "cpu", "") is None
    assert find_price(parse_prices(["0"]), "cpu", "") == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h100=much", "'h100=much' is not a price"),
        ("h100=-1", "'h100=-1' is not a price"),
        ("h100=nan", "is not a price"),
        ("1,2", "any other device has two prices"),
        ("cpu=1,CPU=2", "cpu has two prices"),
    ],
)
def test_a_wrong_price_is_refused_when_a_process_starts(
    monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.setenv("KD_DEVICE_PRICES", text)
    with pytest.raises(ValidationError, match=words):
        Settings()
