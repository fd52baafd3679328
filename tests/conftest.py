"""What needs the real services: skipped where no server can be found, unless this is CI."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Where there is no GPU, Triton's kernels run in its interpreter. It reads this when somebody first imports it.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

from services.embedded import ServerError, find_binary
from tests.harness import Parts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: processes that share the files would else wait for the last of them."""
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def _server_binary() -> Path:
    try:
        return find_binary()
    except ServerError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def _shared(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    parts = Parts(tmp_path_factory.mktemp("parts"))
    yield parts
    parts.close()


@pytest.fixture
def parts(_shared: Parts) -> Parts:
    """An empty server and nothing else."""
    _shared.jobs.redis.flushall()
    return _shared


@pytest.fixture
def new_parts(_server_binary: Path, tmp_path: Path) -> Iterator[Callable[..., Parts]]:
    """Servers of the test's own, with settings of its own."""
    made: list[Parts] = []

    def make(**settings: Any) -> Parts:
        made.append(Parts(tmp_path / f"home {len(made)}", **settings))
        return made[-1]

    yield make
    for parts in made:
        parts.close()


@pytest.fixture(scope="module")
def service(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """API and worker, with the scripted child; shared by the tests of a module, which leave them running."""
    folder = tmp_path_factory.mktemp("service")
    parts = Parts(folder, data_roots=(tmp_path_factory.getbasetemp(),), rate_post=10**6, rate_get=10**6)
    parts.start_api()
    parts.start_worker()
    yield parts
    parts.close()


# ---------------------------------------------------------------------- tiny models and text (kd)

AUSTEN = Path(__file__).resolve().parent.parent / "examples" / "austen"


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The example's real tokenizer: byte-level BPE, 2,048 tokens."""
    from kd.models import load_tokenizer

    return load_tokenizer(AUSTEN / "teacher")


@pytest.fixture(scope="session")
def tiny_teacher(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama of two layers whose head is padded to 2,112 rows. Tests that change it copy it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=2112,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,  # far from uniform: records with heads and with tails
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("teacher")
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of about 5,000 tokens."""
    path = tmp_path_factory.mktemp("text") / "persuasion.txt"
    path.write_text((AUSTEN / "text" / "persuasion.txt").read_text(encoding="utf-8")[:16_000], encoding="utf-8")
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: tiny models gain nothing from more, and lose where the cores are busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
