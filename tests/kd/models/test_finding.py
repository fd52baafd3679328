"""The hub's models found or refused with a remedy, and the fingerprint of a folder."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bench.support.waiting import PATIENCE_SECONDS
from kd.errors import ModelError
from kd.models.folder import compute_fingerprint, resolve_model
from tests.support.caches import flip

pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------------- fingerprint


def test_the_fingerprint_is_of_the_content_alone(tiny_teacher, copied_teacher):
    original = compute_fingerprint(tiny_teacher)
    for path in copied_teacher.iterdir():
        os.utime(path, (1, 1))
    (copied_teacher / "README.md").write_text("says nothing about the outputs", encoding="utf-8")
    assert compute_fingerprint(copied_teacher) == original


@pytest.mark.parametrize("offset", [0, 5000, -1])
def test_one_flipped_bit_of_the_weights_changes_the_fingerprint(
    tiny_teacher, copied_teacher, offset
):
    flip(copied_teacher / "model.safetensors", 8 * offset)
    assert compute_fingerprint(copied_teacher) != compute_fingerprint(tiny_teacher)


def test_configuration_and_file_names_are_in_the_fingerprint(tiny_teacher, copied_teacher):
    original = compute_fingerprint(tiny_teacher)
    config = copied_teacher / "config.json"
    before = config.read_text(encoding="utf-8")
    config.write_text(
        before.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'), encoding="utf-8"
    )
    assert config.read_text(encoding="utf-8") != before
    assert compute_fingerprint(copied_teacher) != original
    config.write_text(before, encoding="utf-8")
    (copied_teacher / "model.safetensors").rename(copied_teacher / "model-1.safetensors")
    assert compute_fingerprint(copied_teacher) != original


def test_a_folder_without_weights_or_configuration_is_refused(copied_teacher):
    (copied_teacher / "config.json").rename(copied_teacher / "config.bak")
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        compute_fingerprint(copied_teacher)
    (copied_teacher / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no \*\.safetensors"):
        compute_fingerprint(copied_teacher)
    with pytest.raises(ModelError, match=r"x\.gguf does not exist"):
        compute_fingerprint(copied_teacher, "x.gguf")


# ---------------------------------------------------------------------- finding


class Hub(BaseHTTPRequestHandler):
    """A hub without models, where models under ``gated/`` need permission."""

    def do_GET(self) -> None:
        gated = "/gated/" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


RESOLVE = """
import json, sys
from kd.errors import ModelError
from kd.models.folder import resolve_model
errors = {}
for model in sys.argv[1:]:
    try:
        resolve_model(model)
    except ModelError as error:
        errors[model] = [error.detail, error.remedy]
print(json.dumps(errors))
"""


def resolve_errors(*names: str, **environment: str) -> dict[str, list[str]]:
    """Resolve in a new process, because ``huggingface_hub`` reads its environment at import."""
    code = RESOLVE
    clean = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        capture_output=True,
        text=True,
        env=clean | environment,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_hub_models_that_cannot_be_had_are_refused_with_what_to_do(hub, tmp_path):
    found = resolve_errors(
        "gated/model", "org/none", HF_ENDPOINT=hub, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0"
    )
    assert "is gated" in found["gated/model"][0] and "hf auth login" in found["gated/model"][1]
    assert (
        "(RepositoryNotFoundError)" in found["org/none"][0]
        and "Check the name" in found["org/none"][1]
    )


def test_offline_only_what_is_cached_is_found(tmp_path):
    snapshot = tmp_path / "hub" / "models--org--known" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "hub" / "models--org--known" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--known" / "refs" / "main").write_text(
        "0" * 40, encoding="utf-8"
    )
    found = resolve_errors("org/known", "org/none", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert found.keys() == {"org/none"} and "HF_HUB_OFFLINE=1" in found["org/none"][1]


def test_folders_are_taken_as_they_are_and_other_names_refused(tiny_teacher):
    assert resolve_model(str(tiny_teacher)) == tiny_teacher
    with pytest.raises(ModelError, match=r"model folder '\./no/such/folder' does not exist"):
        resolve_model("./no/such/folder")
