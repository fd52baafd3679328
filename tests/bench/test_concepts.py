"""docs/concepts against the code: the numbers of its example, and its pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.concepts.example import make_example, make_facts
from bench.concepts.passage import Passage, read_passage
from bench.concepts.pictures import DRAWINGS, draw_pictures
from bench.support.paths import ROOT

CONCEPTS = ROOT / "docs" / "concepts"
PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def passage() -> Passage:
    return read_passage()


def read_page(name: str) -> str:
    return " ".join((CONCEPTS / name).read_text(encoding="utf-8").split())


def test_the_worked_example_is_what_the_code_makes(passage: Passage) -> None:
    written = (CONCEPTS / "threshold-records.md").read_text(encoding="utf-8").splitlines()
    example = make_example(passage)
    assert written[(start := written.index(example[0])) : start + len(example)] == example


def test_the_numbers_of_the_concepts_are_what_the_code_computes(passage: Passage) -> None:
    facts = make_facts(passage)
    assert sum(map(len, facts.values())) > 10
    missing = [fact for page, each in facts.items() for fact in each if fact not in read_page(page)]
    assert missing == []


@pytest.mark.long
def test_the_pictures_of_the_concepts_are_drawn_and_shown(passage: Passage, tmp_path: Path) -> None:
    draw_pictures(passage, tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    shown = {
        name
        for page in CONCEPTS.glob("*.md")
        for name in re.findall(r"\(\.\./pictures/(\w+\.svg)\)", page.read_text(encoding="utf-8"))
    }
    assert drawn == shown
    committed = {path.name for path in PICTURES.glob("*.svg")}
    assert committed - drawn == {"learned.svg"}, "how-to/chat.md shows it: the screen of a command"
    assert drawn == {f"{name}.svg" for name in DRAWINGS}
    for name in drawn:
        new, committed = (read_labels(folder / name) for folder in (tmp_path, PICTURES))
        assert new == committed, f"docs/pictures/{name} is old: run bench/concepts/example.py"


def read_labels(picture: Path) -> list[str]:
    """The texts of a picture. Its curves may differ in the last digit on another CPU."""
    return re.findall(r"<text[^>]*>([^<]+)</text>", picture.read_text(encoding="utf-8"))


def test_a_picture_has_no_date(passage: Passage) -> None:
    texts = [path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")]
    assert texts
    assert not any("<dc:date>" in text for text in texts)
