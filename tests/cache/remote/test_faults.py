"""Whatever a server or a network does wrong, nothing is lost, wrong, or there twice."""

import random
import threading
from pathlib import Path

import pytest

from bench.stores.proxy import ANSWERS, LASTING, PASSING, Proxy
from bench.stores.server import KEYS
from bench.support.small.caches import fill_cache, make_cache, make_identity
from cache.checking.verify import verify_cache
from cache.errors import PotstillError, StoreError, StoreUnfit
from cache.remote import bucket as bucket_module
from cache.remote.address import StoreAddress, bind_caches
from cache.remote.bucket import Bucket
from cache.remote.probe import probe
from cache.store import open_cache
from cache.writing.writer import open_writer
from tests.support.caches import equal

#: Attempts of a job that faults may end.
ATTEMPTS = 60


@pytest.fixture(autouse=True)
def _hurried(monkeypatch) -> None:
    """Wait little between attempts: the faults here last for one request."""
    monkeypatch.setattr(bucket_module, "_PAUSES", (0.01, 0.02, 0.05, 0.1))
    monkeypatch.setattr(bucket_module, "_RETRIES", 1)


class RandomFaults:
    """Chooses a fault for a part of all requests, by a seed."""

    def __init__(self, seed: int, share: float, kinds: tuple[str, ...]) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._share = share
        self._kinds = kinds

    def __call__(self, _method: str, _path: str) -> str:
        with self._lock:
            if self._random.random() < self._share:
                return self._random.choice(self._kinds)
        return ""


def capture_and_read(root: Path, elsewhere: Path, identity, expected) -> int:
    """Capture and read until both succeed, as a service retries jobs; return the attempts."""
    for attempt in range(ATTEMPTS):
        try:
            with open_writer(root, identity) as writer:
                fill_cache(writer)
            opened = open_cache(elsewhere / identity.fingerprint, identity)
            assert equal(opened.read(range(len(opened))), expected)
        except StoreError:
            continue
        return attempt + 1
    raise AssertionError(f"no success in {ATTEMPTS} attempts")


def run_faults(s3_server, reach, address, tmp_path, seed, kinds, wanted) -> Proxy:
    """Capture and read caches until ``wanted`` faults were met."""
    identity = make_identity(train_sequences=21)
    plain = make_cache(tmp_path / "plain", identity)
    expected = open_cache(plain).read(range(24))
    proxy = Proxy(s3_server.port, RandomFaults(seed, 0.08, kinds))
    with proxy.running():
        for turn in range(1000):
            if proxy.faults.total() >= wanted:
                break
            reach(proxy.port)
            place = f"{address}/{turn}"
            roots = [bind_caches(tmp_path / f"{turn}-{name}", place) for name in "ab"]
            capture_and_read(*roots, identity, expected)
            # What is in the bucket afterwards, as it is without faults.
            reach(s3_server.port)
            far = bind_caches(tmp_path / f"{turn}-c", place)
            assert verify_cache(far / identity.fingerprint) == []
            bucket = Bucket(StoreAddress.parse(place))
            manifest = bucket.get(f"{identity.fingerprint}/manifest.json")
            assert manifest == (plain / "manifest.json").read_bytes()
    return proxy


@pytest.mark.long
def test_faults_of_every_kind_are_survived(s3_server, reach, address, tmp_path) -> None:
    proxy = run_faults(s3_server, reach, address, tmp_path, 1, PASSING + LASTING, 20)
    assert len(proxy.faults) >= 5


@pytest.mark.slow
def test_300_faults_are_survived(s3_server, reach, address, tmp_path) -> None:
    proxy = run_faults(s3_server, reach, address, tmp_path, 7, PASSING + LASTING, 300)
    assert set(proxy.faults) == {*PASSING, *LASTING}


@pytest.mark.long
@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes_ends_no_capture(s3_server, reach, address, tmp_path, fault) -> None:
    """Every fifth request has it, and the capture goes on in its first attempt."""
    count = 0

    def choose(_method: str, _path: str) -> str:
        nonlocal count
        count += 1
        return fault if count % 5 == 0 else ""

    proxy = Proxy(s3_server.port, choose)
    with proxy.running():
        reach(proxy.port)
        folder = make_cache(bind_caches(tmp_path / "a", address))
        far = bind_caches(tmp_path / "b", address) / folder.name
        assert verify_cache(far) == []
    assert proxy.faults[fault] > 5


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        pytest.param("expired", "credentials have expired", marks=pytest.mark.long),
        ("full", "bucket is full"),
    ],
)
def test_a_lasting_fault_ends_the_capture_with_its_remedy(
    s3_server, reach, address, tmp_path, fault, remedy
) -> None:
    proxy = Proxy(s3_server.port, lambda *_: "")
    with proxy.running():
        reach(proxy.port)
        root = bind_caches(tmp_path / "a", address)
        identity = make_identity()
        with open_writer(root, identity) as writer:
            proxy.choose = lambda *_: fault
            with pytest.raises(StoreError, match=remedy) as found:
                fill_cache(writer)
            proxy.choose = lambda *_: ""
        assert found.value.to_json()["type"] == "store_error"
        for secret in KEYS.values():
            assert secret not in str(found.value)
        assert verify_cache(make_cache(root)) == []


def test_a_server_that_ignores_conditions_is_refused(s3_server, reach, address, tmp_path) -> None:
    proxy = Proxy(s3_server.port, lambda *_: "deaf")
    with proxy.running():
        reach(proxy.port)
        found = {each.name: each.holds for each in probe(Bucket(StoreAddress.parse(address)))}
        assert [name for name, holds in found.items() if not holds] == [
            "create only if there is none",
            "replace only what was read",
        ]
        root = bind_caches(tmp_path, address)
        with pytest.raises(StoreUnfit, match="create only if there is none"):
            make_cache(root)
        assert not [path for path in root.iterdir() if path.is_dir()]


def test_a_secret_that_a_server_repeats_is_not_shown(
    s3_server, reach, address, monkeypatch
) -> None:
    secret = KEYS["AWS_SECRET_ACCESS_KEY"]
    answer = (403, "SignatureDoesNotMatch", f"{KEYS['AWS_ACCESS_KEY_ID']} and {secret} differ")
    monkeypatch.setitem(ANSWERS, "told", answer)
    proxy = Proxy(s3_server.port, lambda *_: "told")
    with proxy.running():
        reach(proxy.port)
        with pytest.raises(PotstillError) as found:
            list(Bucket(StoreAddress.parse(address)).walk(""))
    assert "$AWS_SECRET_ACCESS_KEY differ" in str(found.value)
    assert not any(value in repr(found.value.to_json()) for value in KEYS.values())
    assert found.value.__cause__ is None
    assert found.value.__suppress_context__
