"""Every Python block of the documents runs: the blocks of one page top to bottom, in one process.

A page whose blocks name the address of a service has one, as a page of commands has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from bench.support.paths import ROOT
from tests.support.checkout import PATIENCE_SECONDS, PRINTED, Checkout, make_checkout
from tests.support.documents import DOCUMENTS, Block, join_blocks, list_blocks

PAGES = {page: blocks for page in DOCUMENTS if (blocks := list_blocks(page, "python"))}
BLOCKS = [block for blocks in PAGES.values() for block in blocks]


def name_page(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_program(program: str, page: Path, checkout: Checkout) -> None:
    """Run a program in the checkout; it must succeed."""
    path = checkout.folder / "blocks_of_a_page.py"  # a name that hides no package
    path.write_text(program)
    environment = checkout.environment | {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, path.name],
        cwd=checkout.folder,
        env=dict(os.environ) | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, f"{name_page(page)}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_every_python_block_can_be_parsed(block: Block) -> None:
    compile(block.text, block.name, "exec")


def test_a_traceback_names_the_line_of_the_page(tmp_path: Path) -> None:
    page = ROOT / "page.md"
    blocks = [Block(page, 1, 3, "python", "a = 1\n"), Block(page, 2, 9, "python", "b = a\n")]
    assert join_blocks(blocks).splitlines() == ["", "", "", "a = 1", *[""] * 5, "b = a"]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_the_python_blocks_of_a_page_run_in_their_order(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program = join_blocks(PAGES[page])
    checkout = make_checkout(tmp_path / "potstill")
    served = PRINTED in program
    if served:
        request.getfixturevalue("_server_binary")
    with checkout.serving("kd up") if served else nullcontext():
        run_program(program.replace(f"http://{PRINTED}", checkout.server), page, checkout)
    shutil.rmtree(checkout.folder)
