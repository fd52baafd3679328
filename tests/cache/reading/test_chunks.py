"""Chunks are decoded as Zarr decodes them, and arrays of another kind are refused."""

import json

import numpy as np
import pytest
import zarr

from cache import shard
from cache.reading.chunks import StoredArray


def write(folder, values):
    shard.write_arrays(folder, {"known": values})
    return folder / "known"


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "uint16", "int16", "uint32", "float16"])
@pytest.mark.parametrize("shape", [(1,), (7,), (40,), (41, 3), (9, 2, 2)])
def test_every_chunk_is_decoded_as_zarr_decodes_it(tmp_path, monkeypatch, dtype, shape):
    monkeypatch.setattr(shard, "CHUNK_BYTES", 40)
    values = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    folder = write(tmp_path / "new", values)
    array = StoredArray.parse((folder / "zarr.json").read_bytes())
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    files = sorted(folder.glob("c.*"), key=lambda file: int(file.name.split(".")[1]))
    assert [file.name for file in files] == [array.name_chunk(n) for n in range(len(files))]
    chunks = [array.decode_chunk(n, file.read_bytes()) for n, file in enumerate(files)]
    assert np.array_equal(np.concatenate(chunks), zarr.open_array(store=folder, mode="r")[...])
    assert all(not chunk.flags.writeable and chunk.dtype == values.dtype for chunk in chunks)


@pytest.mark.parametrize(
    "change",
    [
        {"codecs": [{"name": "bytes"}, {"name": "crc32c"}]},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 1]}}},
    ],
)
def test_an_array_of_another_kind_is_refused(tmp_path, change):
    folder = write(tmp_path / "new", np.zeros((8, 3), np.uint16))
    document = json.loads((folder / "zarr.json").read_bytes()) | change
    with pytest.raises(ValueError, match=r"expected codecs .* and chunks of whole rows"):
        StoredArray.parse(json.dumps(document).encode())
