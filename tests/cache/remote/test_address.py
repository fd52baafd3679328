"""Addresses of buckets, and the folder that mirrors one."""

import pytest

from bench.support.small.caches import make_cache
from cache.checking.listing import list_caches
from cache.errors import StoreError
from cache.remote.address import (
    MIRROR_BYTES,
    STORE_FILE,
    StoreAddress,
    bind_caches,
    is_mirror,
    locate_caches,
    read_binding,
)
from cache.remote.bucket import hide_secrets


@pytest.mark.parametrize("text", ["s3://bucket", "s3://bucket/a/b", "s3://bucket/a.b_c"])
def test_an_address_reads_as_it_was_written(text) -> None:
    assert str(StoreAddress.parse(text)) == text
    assert str(StoreAddress.parse(f"{text}/")) == text


@pytest.mark.parametrize(
    "text",
    ["s3://", "s3:///a", "http://bucket/a", "s3://b/../c", "s3://bucket/a//b", "s3://bucket/a b"],
)
def test_another_address_is_refused_with_the_form_that_is_right(text) -> None:
    with pytest.raises(StoreError, match="s3://bucket/prefix"):
        StoreAddress.parse(text)


@pytest.mark.parametrize("text", ["gs://bucket/a", "az://container/a"])
def test_services_that_were_not_tested_are_refused_by_name(text) -> None:
    with pytest.raises(StoreError, match="were not tested"):
        StoreAddress.parse(text)


@pytest.mark.parametrize("text", ["s3://key:secret@bucket/a", "s3://bucket/a?secret=1"])
def test_an_address_has_no_secrets_and_the_error_repeats_none(text) -> None:
    with pytest.raises(StoreError, match="credentials") as found:
        StoreAddress.parse(text)
    assert "secret" not in str(found.value)


def test_a_folder_is_a_folder_also_where_a_bucket_has_its_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate_caches(tmp_path, None) == tmp_path / "caches"
    assert locate_caches(tmp_path, "bucket") == tmp_path / "bucket"
    mirrored = {locate_caches(tmp_path, text) for text in ("s3://bucket", "s3://other")}
    mirrored |= {locate_caches(tmp_path, text) for text in ("s3://bucket/a", "s3://bucket/a-b")}
    assert len(mirrored) == 4
    assert all(path.parent == tmp_path / "stores" for path in mirrored)


def test_a_mirror_knows_its_bucket_and_a_folder_has_none(tmp_path) -> None:
    root = bind_caches(tmp_path, "s3://bucket/a")
    binding = read_binding(root)
    assert binding is not None
    assert (str(binding.address), binding.mirror_bytes) == ("s3://bucket/a", MIRROR_BYTES)
    bind_caches(tmp_path, "s3://bucket/a", 1 << 30)
    bind_caches(tmp_path, "s3://bucket/a")
    assert read_binding(root).mirror_bytes == 1 << 30
    assert is_mirror(root / ("0" * 32))
    plain = bind_caches(tmp_path, str(tmp_path / "plain"))
    assert read_binding(plain) is None
    assert [each.path for each in list_caches(make_cache(plain).parent)] == [
        str(each) for each in plain.iterdir() if each.is_dir()
    ]
    (root / STORE_FILE).write_text("{}")
    with pytest.raises(StoreError, match="holds copies"):
        read_binding(root)


def test_secrets_of_the_environment_are_hidden(monkeypatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "tokentokentoken")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "c2VjcmV0")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    text = "eu-central-1: tokentokentoken, c2VjcmV0"
    assert hide_secrets(text) == "eu-central-1: $AWS_SESSION_TOKEN, $AWS_SECRET_ACCESS_KEY"
