"""Files of file managers and file servers among those of a cache: the seals decide what counts."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.small.caches import (
    PROVENANCE,
    fill_cache,
    make_cache,
    make_shard,
    write_folders,
)
from cache.checking.verify import find_extras, verify_cache
from cache.disk import list_file_sizes, remove_path, storage_errors
from cache.errors import StorageError
from cache.store import open_cache
from cache.writing.writer import open_writer
from tests.support.caches import IDENTITY, content

FOREIGN = ("{}/.DS_Store", "{}/.nfs0001", "{}/tokens/._c.0.0", "{}/@eaDir/c.0.0", "Thumbs.db")


def add_foreign_files(folder: Path) -> list[str]:
    """Put foreign files into a cache, also into folders of arrays, and return their names."""
    places = ["shards/000000", "shards/000001", "token_map", "seals", "shards"]
    names = sorted({name.format(place) for name in FOREIGN for place in places})
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    return names


def test_foreign_files_are_named_and_cost_no_shard(plain_copy: Path) -> None:
    before = content(plain_copy)
    names = add_foreign_files(plain_copy)
    assert verify_cache(plain_copy) == []
    assert find_extras(plain_copy) == names
    with open_writer(plain_copy.parent, IDENTITY) as writer:
        assert list(writer.find_missing_shards()) == []
        writer.write_token_map({})  # it is sealed and whole
    after = content(plain_copy)
    assert {name: after[name] for name in before} == before, "nothing took the seals back"


def test_foreign_files_are_taken_into_no_other_cache(plain_copy: Path, tmp_path: Path) -> None:
    add_foreign_files(plain_copy)
    with open_writer(tmp_path / "other", IDENTITY) as writer:
        writer.adopt_shard(open_cache(plain_copy), 0)
        taken = {Path(name).name for name in list_file_sizes(writer.folder / "shards")}
    assert not {name for name in taken if not name.startswith(("c", "zarr.json"))}


def test_a_file_that_comes_while_a_shard_is_written_is_not_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cache.writing import writer as module

    with open_writer(tmp_path, IDENTITY) as writer:
        write_folders(writer)
    write = module.write_arrays

    def write_beside_a_file_manager(folder: Path, arrays: dict) -> None:  # type: ignore[type-arg]
        write(folder, arrays)
        (folder / ".DS_Store").write_bytes(b"x")
        (folder / "tokens" / "._c.0.0").write_bytes(b"x")

    monkeypatch.setattr(module, "write_arrays", write_beside_a_file_manager)
    with open_writer(tmp_path, IDENTITY) as writer:
        writer.write_shard(0, *make_shard(IDENTITY, 0))
    for path in [*writer.folder.rglob(".DS_Store"), *writer.folder.rglob("._*")]:
        path.unlink()
    monkeypatch.undo()
    with open_writer(tmp_path, IDENTITY) as writer:
        assert 0 not in writer.find_missing_shards()


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Path]:
    """A folder with a file that cannot be removed: another is mounted there."""
    folder = tmp_path / "busy"
    (folder / "inside").mkdir(parents=True)
    file = folder / "inside" / ".nfs0001"
    file.touch()
    if subprocess.run(["mount", "--bind", "/dev/null", file], capture_output=True).returncode:
        pytest.skip("this process may not mount")
    yield folder
    subprocess.run(["umount", "--lazy", *tmp_path.rglob(".nfs0001")], check=True)


def test_a_busy_file_is_a_storage_error_that_says_what_to_do(busy: Path) -> None:
    with pytest.raises(StorageError, match=r"\.nfs0001.*lsof"), storage_errors(busy):
        remove_path(busy)


def test_a_busy_file_in_a_damaged_shard_does_not_stop_its_capture(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, IDENTITY)
    shard = folder / "shards/000001"
    (shard / "tokens/c.0.0").write_bytes(b"")
    held = shard / ".nfs0001"
    held.touch()
    if subprocess.run(["mount", "--bind", "/dev/null", held], capture_output=True).returncode:
        pytest.skip("this process may not mount")
    try:
        with open_writer(tmp_path, IDENTITY) as writer:
            assert list(writer.find_missing_shards()) == [1]
            fill_cache(writer)
            writer.finish(PROVENANCE)
        assert verify_cache(folder) == []
    finally:
        subprocess.run(["umount", "--lazy", *tmp_path.rglob(".nfs0001")], check=True)
