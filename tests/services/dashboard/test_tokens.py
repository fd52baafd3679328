"""The page of single tokens in a browser: what real models expected, of one job and of two."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page, expect

from bench.support.harness import Parts, make_config
from bench.support.paths import AUSTEN
from kd.config.jobfile import parse_config
from kd.evaluation.baseline import build_starting_student
from kd.evaluation.in_depth import STUDENT
from kd.evaluation.teacher_comparison import TEACHER, EvaluatedModel
from kd.evaluation.tokens.scoring import FILE, write_tokens
from kd.files import read_json, write_json
from kd.models.loading import load_model
from kd.models.tokenizers import load_tokenizer
from kd.progress import SILENT
from kd.stages.source import open_source
from tests.support.services.api import tell
from tests.support.services.pages import check_page

pytestmark = pytest.mark.usefixtures("one_thread")
JOB = {
    "kind": "train",
    "name": "scored",
    "student": {"init": {"layers": 1, "hidden_size": 16, "tokenizer": str(AUSTEN / "teacher")}},
    "data": {
        "train": str(AUSTEN / "text" / "persuasion.txt"),
        "validation_fraction": 0.1,
        "sequence_length": 48,
        "max_train_samples": 12,
        "max_eval_samples": 3,
    },
    "loss": {"alpha": 1.0},
    "train": {"max_steps": 2, "batch_size": 4, "warmup_steps": 0},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of two students on one text, and of one without its teacher."""
    folder = tmp_path_factory.mktemp("tokens")
    config = parse_config(JOB)
    _, source = open_source(config, folder, folder, SILENT)
    tokenizer = load_tokenizer(AUSTEN / "teacher")

    def read(model: torch.nn.Module) -> EvaluatedModel:
        return EvaluatedModel.of(model, 2048, config.data)

    teacher = read(load_model(AUSTEN / "teacher", torch.float32))
    random = read(build_starting_student(config, tokenizer))
    made = {
        "same": {STUDENT: teacher, TEACHER: teacher},
        "random": {STUDENT: random, TEACHER: teacher},
    }
    for name, models in made.items():
        write_tokens(folder / f"{name}.json", models, source, tokenizer, None)
    write_tokens(folder / "alone.json", {STUDENT: random}, source, tokenizer, "it runs on a server")
    return {name: folder / f"{name}.json" for name in (*made, "alone")}


@pytest.fixture
def page(new_tab: Callable[..., AbstractContextManager[Page]]) -> Iterator[Page]:
    with new_tab(viewport={"width": 1440, "height": 900}) as tab:
        yield tab


def finish_job(api: Parts, name: str, tokens: Path | None) -> str:
    claim = api.jobs.claim(api.jobs.create(make_config(name)).id, "train", "test", 600)
    assert claim is not None
    if tokens is not None:
        path = api.settings.run_dir(claim.id) / FILE
        path.parent.mkdir(parents=True)
        shutil.copy(tokens, path)
        tell(api, claim, ("artifact", {"name": FILE, "path": str(path)}))
    api.jobs.finish(claim, "succeeded")
    return str(claim.id)


def test_a_token_opens_what_the_models_expected(
    page: Page, api: Parts, files: dict[str, Path]
) -> None:
    job_id = finish_job(api, "scored", files["random"])
    page.goto(f"{api.settings.server}/jobs/{job_id}")
    page.get_by_role("main").get_by_role("link", name="Tokens").click()
    expect(page).to_have_title("Tokens · Potstill")
    found = read_json(files["random"])
    tokens = page.locator('.text [role="button"]')
    expect(tokens).to_have_count(3 * 47)
    expect(tokens.nth(5)).to_have_attribute("title", re.compile(rf"KL.*: {int(found['kl'][5])}"))
    tokens.nth(5).click()
    panel = page.get_by_role("region", name="Distributions")
    best = panel.get_by_role("table", name="Most probable tokens")
    expect(best.get_by_role("columnheader")).to_have_text(["Token", "Teacher", "Student"])
    ranks = [f"{found['models'][name]['rank'][5]:,}" for name in (TEACHER, STUDENT)]
    expect(
        panel.get_by_role("row", name="Rank of the text's token").get_by_role("cell")
    ).to_have_text(["Rank of the text's token", *ranks])
    listed = {*found["models"][TEACHER]["top_ids"][5], *found["models"][STUDENT]["top_ids"][5]}
    expect(best.get_by_role("row")).to_have_count(1 + len(listed))
    check_page(page, "tokens")
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(6)).to_be_focused()
    expect(tokens.nth(6)).to_have_attribute("aria-pressed", "true")
    page.get_by_label("Colour").select_option("Entropy of the teacher")
    expect(page).to_have_url(re.compile("colour=teacher"))
    entropy = found["models"][TEACHER]["entropy"][5]
    expect(tokens.nth(5)).to_have_attribute("title", re.compile(rf"Entropy.*: {int(entropy)}"))


@pytest.mark.long
def test_two_students_are_compared_by_their_difference(
    page: Page, api: Parts, files: dict[str, Path]
) -> None:
    ids = [finish_job(api, name, files[name]) for name in ("same", "random")]
    page.goto(f"{api.settings.server}/tokens?jobs={','.join(ids)}")
    token = page.locator('.text [role="button"]').nth(5)
    # The first student is the teacher, so the second one is farther away.
    expect(token).to_have_class(re.compile("level-[1-6] below"))
    token.click()
    panel = page.get_by_role("region", name="Distributions")
    best = panel.get_by_role("table", name="Most probable tokens")
    expect(best.get_by_role("columnheader")).to_have_text(
        ["Token", "Teacher", "Student 1: same", "Student 2: random"]
    )
    check_page(page, "two")


def test_the_page_says_what_is_missing(
    page: Page, api: Parts, files: dict[str, Path], tmp_path: Path
) -> None:
    alone = finish_job(api, "alone", files["alone"])
    page.goto(f"{api.settings.server}/tokens?jobs={alone}")
    expect(page.get_by_text("The teacher was not measured: it runs on a server.")).to_be_visible()
    nothing = finish_job(api, "nothing", None)
    page.goto(f"{api.settings.server}/tokens?jobs={nothing}")
    expect(page.get_by_text("has no scored tokens")).to_be_visible()
    page.goto(f"{api.settings.server}/tokens")
    page.get_by_label("Job", exact=True).select_option(alone)
    expect(page.get_by_text("The teacher was not measured")).to_be_visible()
    other = read_json(files["random"])
    other["sequences"][0]["ids"][0] += 1
    write_json(tmp_path / "other.json", other)
    pair = f"{alone},{finish_job(api, 'other', tmp_path / 'other.json')}"
    page.goto(f"{api.settings.server}/tokens?jobs={pair}")
    expect(page.get_by_text("not measured on the same tokens")).to_be_visible()
