"""A served teacher that scores proposed ids: its records are unbiased, and a server that answers
wrongly is refused.
"""

import base64
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.support.paths import AUSTEN
from cache.checking.verify import verify_cache
from cache.codec import Codec
from cache.inspection import compute_cache_stats
from cache.profiles.threshold import UnitSample
from cache.random import PURPOSE_PROPOSAL, draw_uniforms
from cache.rounding import RecordPositions
from cache.store import Cache, open_cache
from kd.capture import remote
from kd.capture.plan import plan_capture
from kd.capture.remote import DocumentPrompt, TopEntries
from kd.capture.sampling import make_sample
from kd.capture.served.drawing import DrawnIds, draw_ids, find_chances, weigh
from kd.capture.served.scoring import Scores, parse_scores
from kd.capture.served.self_test import REQUESTS
from kd.capture.units.drawing import UnitRandomness, UnitSampler
from kd.capture.units.fitting import make_tables
from kd.config.jobfile import parse_config
from kd.errors import ModelError, TokenizerMismatch
from kd.exchange.exporting import export_records
from kd.exchange.importing import ImportRequest, import_records
from kd.loss.decoder import TargetDecoder
from kd.loss.sparse_targets import decode_units
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import find_lm_head
from kd.models.loading import load_model
from kd.models.tokenizers import load_tokenizer
from kd.progress import Monitor
from kd.stages.capture import run_precompute
from kd.text.batches import make_batch
from tests.support.kd.tokenizers import exchange_ids, list_rare_tokens
from tests.support.remote_server import (
    RemoteServer,
    Torn,
    encode_array,
    error,
    make_items,
    score_rows,
)

VOCABULARY = 2048
TEACHER = AUSTEN / "teacher"
TEXT = (AUSTEN / "text" / "persuasion.txt").read_text(encoding="utf-8")[20_000:21_000]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteServer]:
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", 0.01)
    with RemoteServer(TEACHER, VOCABULARY, max_logprobs=64) as running:
        yield running


def make_job(url: str, proposal: Path, text: Path, **changes: Any) -> dict[str, Any]:
    teacher = {
        "backend": "http",
        "model": "teacher",
        "url": url,
        "tokenizer": str(TEACHER),
        "proposal": str(proposal),
        "concurrency": 4,
    }
    data = {
        "train": str(text),
        "sequence_length": 48,
        "max_train_samples": 12,
        "max_eval_samples": 4,
    }
    job = {"kind": "precompute", "teacher": teacher, "data": data}
    return job | {"cache": {"k": 32, "shard_sequences": 5}} | changes


def capture(job: dict[str, Any], home: Path) -> Path:
    summary = run_precompute(parse_config(job), home, home / "run", Monitor()).cache
    return home / "caches" / str(summary["fingerprint"])


def list_digests(store: Cache) -> list[str]:
    return [each.digest for each in store.entries]


# ---------------------------------------------------------------------- ids and weights


@torch.no_grad()
def read_logits(context: int = 59) -> torch.Tensor:
    """Return the logits (V,) after some text, of which ``context`` tokens are read."""
    tokens = load_tokenizer(TEACHER)(TEXT)["input_ids"][:59][-context:]
    model = load_model(TEACHER, torch.float32).eval()
    hidden_1LD = compute_hidden_states(model, torch.tensor([tokens]), None)
    (logits_V,) = find_lm_head(model, VOCABULARY).compute_logits(hidden_1LD[0, -1:])
    return logits_V


def test_chances_sum_to_the_number_of_ids_and_grow_with_the_proposal():
    torch.manual_seed(0)
    for spread in (0.1, 3.0, 30.0):
        g_NV = (spread * torch.randn(20, 300, dtype=torch.float64)).softmax(1)
        for count in (1, 7, 299):
            chance_NV = find_chances(g_NV, count)
            assert torch.allclose(chance_NV.sum(1), torch.tensor(float(count)).double())
            rate_NV = chance_NV / g_NV
            free_NV = chance_NV < 1.0
            assert (rate_NV.masked_fill(free_NV, 0.0).amax(1) <= rate_NV.amax(1) * (1 + 1e-9)).all()
            # All but the certain ones are in proportion.
            least_N = rate_NV.masked_fill(~free_NV, math.inf).amin(1)
            assert ((least_N == math.inf) | (least_N >= rate_NV.amax(1) * (1 - 1e-9))).all()


def test_drawn_ids_are_different_and_never_the_next_token():
    torch.manual_seed(1)
    logits_NV = 4.0 * torch.randn(200, 500)
    gold_N = logits_NV.argmax(1)
    uniform_N = torch.rand(200, dtype=torch.float64)
    uniform_N[:2] = torch.tensor([0.0, 1.0 - 2.0**-53])
    drawn = draw_ids(logits_NV, gold_N, 40, uniform_N)
    assert drawn.ids_NA.shape == (200, 40) and (drawn.ids_NA != gold_N[:, None]).all()
    assert all(len(set(row)) == 40 for row in drawn.ids_NA.tolist())
    assert (drawn.chance_NA > 0).all() and (drawn.chance_NA <= 1).all()
    everything = draw_ids(logits_NV, gold_N, 10_000, uniform_N)
    assert everything.ids_NA.shape == (200, 499) and (everything.chance_NA > 1 - 1e-9).all()


def test_scores_of_all_ids_give_all_of_p_and_its_entropy():
    torch.manual_seed(2)
    logp_NV = (3.0 * torch.randn(5, 50)).double().log_softmax(1)
    gold_N = torch.arange(5)
    drawn = draw_ids(torch.zeros(5, 50), gold_N, 49, torch.rand(5).double())
    weights = weigh(score(logp_NV, drawn, gold_N), drawn, gold_N)
    assert torch.allclose(weights.spread(slice(5), 50).exp(), logp_NV.exp())
    assert torch.allclose(weights.entropy_N, -(logp_NV.exp() * logp_NV).sum(1))


def score(logp_NV: torch.Tensor, drawn: DrawnIds, gold_N: torch.Tensor) -> Scores:
    """Return what a server with ``logp_NV`` says of the drawn ids."""
    best = logp_NV.topk(20)
    gold_N1 = logp_NV.gather(1, gold_N[:, None])
    columns = (best.indices, best.values, gold_N1[:, 0], gold_N1[:, 0])
    top = TopEntries(np.arange(len(gold_N)), *(column.numpy() for column in columns))
    return Scores(top, logp_NV.gather(1, drawn.ids_NA).numpy())


def redraw(
    logp_V: torch.Tensor, proposal_V: torch.Tensor, redraws: int, threshold: float = 0.04
) -> tuple[np.ndarray, np.ndarray]:
    """Draw, weigh, encode and decode one position many times.

    Returns the weights of the decades of p, (redraws, 6), and the entropies of all redraws.
    """
    codec = Codec(
        "threshold", VOCABULARY, seed=5, threshold=threshold, k=64, clusters=1, entropies=True
    )
    tables = make_tables(logp_V.exp()[None].numpy(), np.zeros((1, VOCABULARY)), np.zeros((1, 4)))
    sampler = UnitSampler(codec, tables)
    decade_V = (-logp_V / math.log(10)).floor().clamp(0, 5).long().numpy()
    gold = int(logp_V.topk(3).indices[2])
    sums = np.zeros((redraws, 6))
    entropies = np.zeros(redraws)
    for start in range(0, redraws, 500):
        count = min(500, redraws - start)
        gold_N = torch.full((count,), gold)
        numbers = np.arange(start, start + count)
        uniform_N = torch.from_numpy(draw_uniforms(9, PURPOSE_PROPOSAL, numbers, 0))
        drawn = draw_ids(proposal_V.expand(count, -1), gold_N, 64, uniform_N)
        scored = score(logp_V.expand(count, -1), drawn, gold_N)
        weights = weigh(scored, drawn, gold_N)
        logw_NV = weights.spread(slice(None), VOCABULARY)
        each = UnitRandomness.of_each(codec, numbers, [np.zeros(1, int)] * count, gold_N.device)
        none = torch.zeros_like(gold_N)
        found = sampler.draw_units(logw_NV, gold_N, none, UnitRandomness.join(each))
        arrays = {name: column.numpy() for name, column in found.items()}
        sample = make_sample([arrays], UnitSample)
        records = codec.encode(sample, RecordPositions(numbers, np.zeros(count, int)))
        stored = records.columns.items()
        columns = {name: torch.from_numpy(column.astype(np.int64)) for name, column in stored}
        target = decode_units(codec, columns, gold_N)
        rows_E = np.repeat(numbers, target.offsets_N1.diff().numpy())
        np.add.at(sums, (rows_E, decade_V[target.ids_E.numpy()]), target.weights_E.numpy())
        entropies[numbers] = weights.entropy_N.numpy()
    return sums, entropies


PROPOSALS = {
    "a model with 4 tokens of context": lambda logits_V, short_V: short_V,
    "noise": lambda logits_V, short_V: logits_V + 2.0 * torch.randn_like(logits_V),
    "counts that know nothing": lambda logits_V, short_V: torch.linspace(0.0, -6.0, VOCABULARY),
}


@pytest.mark.long
@pytest.mark.parametrize("make", PROPOSALS.values(), ids=PROPOSALS)
def test_the_mean_of_10_000_redraws_is_p_in_every_decade(make):
    torch.manual_seed(3)
    logits_V = read_logits()
    short_V = read_logits(context=4)
    logp_V = logits_V.double().log_softmax(0)
    sums, entropies = redraw(logp_V, make(logits_V, short_V), 10_000)
    decade_V = (-logp_V / math.log(10)).floor().clamp(0, 5).long()
    truth = torch.zeros(6).double().index_add_(0, decade_V, logp_V.exp()).numpy()
    error = sums.std(0) / 100.0
    assert (sums.std(0) > 0).sum() >= 5, "several decades are sampled"
    assert (np.abs(sums.mean(0) - truth) <= 5.0 * error + 1e-9).all()
    entropy = -float((logp_V.exp() * logp_V).sum())
    assert abs(entropies.mean() - entropy) <= 5.0 * entropies.std() / 100.0


def test_the_weights_of_a_record_do_not_sum_to_1_and_a_loss_knows_it():
    logits_V = read_logits()
    sums, _ = redraw(logits_V.double().log_softmax(0), torch.zeros(VOCABULARY), 200)
    assert sums.sum(1).std() > 0.01
    assert abs(sums.sum(1).mean() - 1.0) < 5.0 * sums.sum(1).std() / math.sqrt(200)


# ---------------------------------------------------------------------- whole captures


def test_a_capture_is_sealed_with_the_test_of_its_server(server, tiny_text, tmp_path):
    store = open_cache(capture(make_job(server.url, TEACHER, tiny_text), tmp_path))
    assert store.manifest.served is not None and store.manifest.served.requests == REQUESTS
    assert 0 <= store.manifest.served.spread < 1e-3, "one model, on one thread"
    identity = store.identity
    assert identity.teacher.server == "vllm 0.33.0" and len(identity.teacher.proposal) == 64 + 8
    assert identity.codec.k == 32 and store.codec.rules.counts_units
    sequences, records = store.read(range(len(store)))
    assert len(records) == sequences.positions
    assert all(
        "temperature" not in json.dumps(body) for body in server.asked if "token_ids" in body
    )


@pytest.mark.long
def test_records_are_near_those_of_the_local_teacher(server, tiny_text, tmp_path):
    """The proposal is the teacher itself: its ids are the best, and the rest is noise of units."""
    job = make_job(server.url, TEACHER, tiny_text)
    far = open_cache(capture(job, tmp_path / "far"))
    local = job | {"teacher": {"model": str(TEACHER)}, "cache": {"shard_sequences": 5}}
    near = open_cache(capture(local, tmp_path / "near"))
    means = []
    for store in (far, near):
        sequences, records = store.read(range(len(store)))
        batch = make_batch(sequences, records)
        target = TargetDecoder.of(store, torch.device("cpu")).decode(batch.gold_N, batch.teacher)
        chunk = target.teacher.take_chunk(slice(0, len(batch.gold_N)))
        p_NV = torch.zeros(len(batch.gold_N), VOCABULARY)
        chunk.subtract_(p_NV, -1.0)
        means.append((p_NV, chunk.entropy_N))
    (far_NV, far_N), (near_NV, near_N) = means
    assert torch.allclose(far_NV.sum(1).mean(), torch.tensor(1.0), atol=0.02)
    assert (far_NV - near_NV).square().sum(1).mean() < 0.06
    assert abs(float((far_N - near_N).mean())) < 0.1
    known = [store.read(range(len(store)))[1]["known"] for store in (far, near)]
    assert (known[0] == known[1]).mean() > 0.99, "the next token is exact in both"


@pytest.mark.long
def test_order_and_concurrency_change_no_byte(server, tiny_text, tmp_path):
    job = make_job(server.url, TEACHER, tiny_text)
    one = capture(job, tmp_path / "one")
    job["teacher"]["concurrency"] = 1
    server.twists.extend([delayed(0.1), *[lambda answer: answer] * 3] * 6)
    other = capture(job, tmp_path / "other")
    assert one.name == other.name
    stores = [open_cache(folder) for folder in (one, other)]
    assert [each.digest for each in stores[0].entries] == [
        each.digest for each in stores[1].entries
    ]


FAULTS = {
    "late": "shifted by one position",
    "last": "the last position is missing",
    "warm": "answers at a temperature above 1",
    "warm prompts": "answers at another temperature",
    "swapped": "ids are swapped",
    "replicas": "4 equal requests gave log-probabilities that differ by",
}


BY_WEIGHTS = f"does not answer as the weights in {TEACHER} do"


@pytest.mark.parametrize("fault, named", FAULTS.items())
def test_a_faulty_server_is_refused_by_name_before_anything_is_captured(
    server, tiny_text, tmp_path, fault, named
):
    server.fault = fault
    with pytest.raises(ModelError, match=named) as caught:
        capture(make_job(server.url, TEACHER, tiny_text), tmp_path)
    assert caught.value.remedy
    assert not list(tmp_path.glob("caches/*/shards/0*"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_server_of_the_most_probable_tokens_is_refused(server, tiny_text, tmp_path, fault):
    """The two last ones by the weights, which are on this machine, too."""
    server.fault = fault
    job = make_job(server.url, TEACHER, tiny_text, cache={"profile": "topk", "k": 16})
    del job["teacher"]["proposal"]
    other = {"last": "must have 48 items", "swapped": BY_WEIGHTS, "warm": BY_WEIGHTS}
    named = other.get(fault, FAULTS[fault])
    with pytest.raises(ModelError, match=named):
        capture(job, tmp_path)


def test_a_server_without_logprobs_of_generated_tokens_is_believed_aloud(
    server, tiny_text, tmp_path
):
    job = make_job(server.url, TEACHER, tiny_text, cache={"profile": "topk", "k": 16})
    del job["teacher"]["proposal"]
    server.fault = "silent"
    events = []
    run_precompute(parse_config(job), tmp_path, tmp_path / "run", Monitor(events.append))
    messages = [event.data["message"] for event in events if event.type == "warning"]
    assert any("could not be checked: it returns no logprobs" in each for each in messages)


@pytest.mark.parametrize("version, named", [("0.32.1", "is vLLM 0.32.1"), (None, "does not say")])
def test_a_server_that_cannot_score_ids_is_refused(server, tiny_text, tmp_path, version, named):
    server.version = version
    with pytest.raises(ModelError, match=f"{named}.*needs vLLM 0.33") as caught:
        capture(make_job(server.url, TEACHER, tiny_text), tmp_path)
    assert "topk" in caught.value.remedy


def test_more_ids_than_the_server_allows_are_refused_in_its_words(server, tiny_text, tmp_path):
    job = make_job(server.url, TEACHER, tiny_text, cache={"k": 65})
    with pytest.raises(ModelError, match=r"Set max_logprobs \(--max-logprobs\) to at least 65"):
        capture(job, tmp_path)


def test_a_proposal_of_another_tokenizer_is_refused(server, tokenizer, tiny_text, tmp_path):
    other = tmp_path / "proposal"
    shutil.copytree(TEACHER, other)
    exchange_ids(tokenizer, other, list_rare_tokens(tokenizer, 1))
    with pytest.raises(TokenizerMismatch, match="The proposal's tokenizer is not the teacher's"):
        capture(make_job(server.url, other, tiny_text), tmp_path)


WRONG = {
    "no array": (lambda _: None, "cannot be read"),
    "no base64": (lambda _: "*", "cannot be read"),
    "no npy": (lambda _: base64.b64encode(b"hello").decode(), "cannot be read"),
    "float64": (lambda found: encode_array(found.astype(np.float64)), "must be float32"),
    "too wide": (lambda found: encode_array(np.tile(found, 2)), "must be float32"),
    "nan": (lambda found: encode_array(found * np.nan), "has the log-probability nan"),
    "without the last": (lambda found: encode_array(found[:-1]), "the last position is missing"),
    "late": (lambda found: encode_array(np.roll(found, 1, 0)), "positions are shifted"),
    "swapped": (lambda found: encode_array(found[:, ::-1]), "ids are swapped"),
    "logits": (lambda found: encode_array(found + 20.0), "has the log-probability 1"),
}


@pytest.mark.parametrize("change, named", WRONG.values(), ids=WRONG)
def test_wrong_scores_are_named_and_nothing_is_filled(change, named):
    piece = DocumentPrompt(8, 3, [5, 6, 7, 8, 9], [0, 2, 3])
    logp_NV = torch.randn(4, 60, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    ids = np.array([[1, 2], [3, 4], [50, 6]])
    rows = [ids[0].tolist(), [], *ids[1:].tolist()]
    answer = {
        "prompt_logprobs": make_items(logp_NV, piece.tokens, 20),
        "prompt_token_ids": piece.tokens,
        "prompt_token_id_logprobs": encode_array(score_rows(logp_NV, rows)),
    }
    found = parse_scores(answer, piece, ids, 20, 60)
    expected = [
        [float(logp_NV[place, token]) for token in row]
        for place, row in zip(piece.targets, ids, strict=True)
    ]
    assert np.allclose(found.asked, expected) and len(found.top) == 3
    answer["prompt_token_id_logprobs"] = change(score_rows(logp_NV, rows))
    with pytest.raises(ModelError, match=rf"sequence 8, position [36]: .*{named}"):
        parse_scores(answer, piece, ids, 20, 60)


def delayed(seconds: float) -> Any:
    def wait(answer: Any) -> Any:
        time.sleep(seconds)
        return answer

    return wait


TEMPORARY = [
    lambda _: error(503, "starting"),
    lambda _: error(429, "busy", Retry_After="0"),
    lambda _: Torn(),
    delayed(1.5),
]


@pytest.mark.long
def test_what_may_pass_is_tried_again(server, tiny_text, tmp_path, monkeypatch):
    job = make_job(server.url, TEACHER, tiny_text)
    expected = open_cache(capture(job, tmp_path / "one"))
    server.asked.clear()
    server.twists.extend([*TEMPORARY, *[lambda answer: answer] * 9, *TEMPORARY])
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 1.0)
    found = open_cache(capture(job, tmp_path / "other"))
    assert list_digests(found) == list_digests(expected)
    assert not server.twists


@pytest.mark.long
def test_a_capture_goes_on_after_the_last_whole_shard(server, tiny_text, tmp_path):
    job = make_job(server.url, TEACHER, tiny_text)
    whole = open_cache(capture(job, tmp_path / "whole"))
    server.twists.extend([lambda answer: answer] * 15 + [lambda _: error(400, "no")])
    with pytest.raises(ModelError, match="answers 400"):
        capture(job, tmp_path / "cut")
    begun = len(server.asked)
    found = open_cache(capture(job, tmp_path / "cut"))
    assert len(server.asked) - begun < begun, "not all is asked again"
    assert list_digests(found) == list_digests(whole)


# ---------------------------------------------------------------------- identity


def test_the_identity_has_what_changes_the_bytes(server, tiny_teacher, tiny_text, tmp_path):
    job = make_job(server.url, TEACHER, tiny_text)

    def fingerprint(**changes: Any) -> str:
        changed = job | {"teacher": job["teacher"] | changes.pop("teacher", {})} | changes
        return plan_capture(parse_config(changed)).identity.fingerprint

    known = fingerprint()
    assert fingerprint(teacher={"concurrency": 2}) == known
    others = [
        fingerprint(teacher={"proposal": str(tiny_teacher)}),
        fingerprint(cache={"k": 33, "shard_sequences": 5}),
    ]
    server.version = "0.34.0"
    others.append(fingerprint())
    assert len({known, *others}) == 4


def test_a_cache_of_the_most_probable_tokens_keeps_its_identity(tiny_text):
    """That of version 0.2.0; the server is not asked."""
    job = make_job("http://host:8000", TEACHER, tiny_text, cache={"profile": "topk", "k": 16})
    del job["teacher"]["proposal"]
    identity = plan_capture(parse_config(job)).identity.to_json()
    assert set(identity["teacher"]) == {"model_sha256", "dtype"}
    assert identity["codec"]["k"] == 16 and identity["codec"]["version"] == 2


@pytest.mark.long
def test_what_reads_a_cache_reads_that_of_a_served_teacher(server, tiny_text, tmp_path):
    """Checks, statistics, and an export that comes back."""
    folder = capture(make_job(server.url, TEACHER, tiny_text), tmp_path)
    assert verify_cache(folder) == []
    store = open_cache(folder)
    found = compute_cache_stats(store)
    _, records = store.read(range(len(store)))
    entries = 1 + records["head_count"].astype(int) + records["tail_count"]
    assert found.entries is not None and found.entries.mean == pytest.approx(entries.mean())
    export_records(store, "parquet", tmp_path / "records")
    files = tuple(sorted((tmp_path / "records").glob("*.parquet")))
    imported = import_records(ImportRequest("parquet", files, TEACHER), tmp_path / "other")
    back = open_cache(tmp_path / "other" / str(imported["fingerprint"]))
    assert back.identity == store.identity and list_digests(back) == list_digests(store)
