"""The job files that stand in the documents are valid."""

from __future__ import annotations

import pytest
import yaml

from kd.config.jobfile import parse_config
from tests.support.documents import DOCUMENTS, Block, list_blocks

BLOCKS = [block for page in DOCUMENTS for block in list_blocks(page, "yaml")]
JOBS = [block for block in BLOCKS if "kind" in yaml.safe_load(block.text)]


@pytest.mark.parametrize("block", JOBS, ids=lambda block: block.name)
def test_a_job_of_the_documents_is_valid(block: Block) -> None:
    parse_config(yaml.safe_load(block.text))
