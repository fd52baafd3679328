"""The client uploads files to train on, each once, although connections are cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.support.harness import Parts
from kd.client.client import Client
from kd.client.errors import Refused
from tests.support.services.api import valid
from tests.support.wire.cutting_proxy import cutting

#: More than one piece of what is read and sent at one time.
CONTENT = b"".join(json.dumps({"text": f"text {n}"}).encode() + b"\n" for n in range(50_000))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_bytes(CONTENT)
    return path


def test_a_file_is_uploaded_used_and_deleted(api: Parts, text: str, file: Path) -> None:
    with Client(api.settings.server) as client:
        made = client.upload_file(file)
        assert (made.name, made.bytes, made.rows) == ("train.jsonl", len(CONTENT), 50_000)
        assert client.upload_file(str(file)) == made
        other = client.upload_file(file, "a name?.jsonl")
        assert [each.name for each in client.files()] == ["a name?.jsonl", "train.jsonl"]
        assert Path(other.path).read_bytes() == CONTENT
        job = client.submit(valid("quick", text, "distill") | {"data": {"train": made.path}})
        with pytest.raises(Refused, match=f"The job {job.id} needs the file train.jsonl"):
            client.delete_file("train.jsonl")
        client.cancel(job)
        for each in client.files():
            client.delete_file(each.name)
        assert client.files() == []


def test_an_upload_whose_answer_is_lost_makes_one_file(api: Parts, file: Path) -> None:
    with cutting(api.settings.port, 0, 10) as proxy, Client(proxy.url) as client:
        made = client.upload_file(file)
        assert not proxy.limits, "both answers were cut"
        assert client.files() == [made]
        client.delete_file(made.id)


def test_a_refused_file_names_its_line(api: Parts, file: Path) -> None:
    file.write_bytes(CONTENT + b"{oops\n")
    with Client(api.settings.server) as client:
        with pytest.raises(Refused, match="Line 50001 of the file is not valid"):
            client.upload_file(file)
        assert client.files() == []
