"""A teacher that SGLang serves: captures of profiles topk and hidden, and what is refused."""

import base64
import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from bench.support.paths import AUSTEN
from cache.checking.verify import verify_cache
from cache.codec import Codec
from cache.manifest import Manifest
from cache.store import Cache, open_cache
from kd.capture import remote
from kd.capture.plan import plan_capture
from kd.capture.remote import DocumentPrompt
from kd.capture.served import local_weights
from kd.capture.served.local_weights import read_lm_head, read_top_here
from kd.capture.served.self_test import REQUESTS
from kd.capture.served.sglang import parse_answer, parse_states
from kd.config.jobfile import parse_config
from kd.config.teacher import TeacherConfig
from kd.errors import ConfigError, ModelError
from kd.loss.decoder import TargetDecoder
from kd.models.lm_head import find_lm_head
from kd.models.loading import load_model
from kd.models.teacher_files import TeacherFiles
from kd.preflight.problems import Folders, find_problems
from kd.progress import Event, Monitor
from kd.stages.capture import run_precompute
from kd.text.batches import make_batch
from tests.support.remote_server import RemoteServer, error

VOCABULARY = 2048
TEACHER = AUSTEN / "teacher"
CACHES = {"topk": {"profile": "topk", "k": 16}, "hidden": {"profile": "hidden"}}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteServer]:
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", 0.01)
    with RemoteServer(TEACHER, VOCABULARY) as running:
        yield running


def make_job(url: str, text: Path, profile: str, **teacher: Any) -> dict[str, Any]:
    served = {"backend": "sglang", "model": "teacher", "url": url, "tokenizer": str(TEACHER)}
    data = {"train": str(text), "sequence_length": 48}
    data |= {"max_train_samples": 8, "max_eval_samples": 3}
    cache = CACHES[profile] | {"shard_sequences": 5}
    return {"kind": "precompute", "teacher": served | teacher, "data": data, "cache": cache}


def capture(job: dict[str, Any], home: Path, events: list[Event] | None = None) -> Cache:
    listener = [] if events is None else events
    summary = run_precompute(parse_config(job), home, home / "run", Monitor(listener.append)).cache
    return open_cache(home / "caches" / str(summary["fingerprint"]))


def decode(store: Cache) -> torch.Tensor:
    """Return p of all positions, (N, V), as a loss reads it."""
    batch = make_batch(*store.read(range(len(store))))
    target = TargetDecoder.of(store, torch.device("cpu")).decode(batch.gold_N, batch.teacher)
    p_NV = torch.zeros(len(batch.gold_N), VOCABULARY)
    target.teacher.take_chunk(slice(0, len(batch.gold_N))).subtract_(p_NV, -1.0)
    return p_NV


@pytest.mark.parametrize("profile", CACHES)
def test_a_capture_has_the_records_of_the_local_teacher(server, tiny_text, tmp_path, profile):
    job = make_job(server.url, tiny_text, profile)
    far = capture(job, tmp_path / "far")
    near = capture(job | {"teacher": {"model": str(TEACHER)}}, tmp_path / "near")
    assert far.identity.teacher.server == "sglang 0.5.23"
    assert far.manifest.served is not None and far.manifest.served.requests == REQUESTS
    assert far.manifest.served.spread < 1e-3
    assert verify_cache(far.folder) == []
    assert torch.allclose(decode(far), decode(near), atol=2e-4)
    entropies = [store.read(range(len(store)))[1]["entropy"] for store in (far, near)]
    assert profile == "topk" or np.abs(np.subtract(*entropies, dtype=float)).max() <= 2


FAULTS = {
    "late": "shifted by one position",
    "last": "the last position is missing",
    "warm": "does not answer as the weights in",
    "warm prompts": "answers at another temperature",
    "swapped": "ids are swapped",
    "replicas": "4 equal requests gave log-probabilities that differ by",
    "late states": "are not what the LM head in .* reads: its own log-probabilities differ by",
    "raw": "are not what the LM head in .* reads.*from before the last norm",
    "chunked": "but are .24, 256..*--chunked-prefill-size -1",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_server_is_refused_by_name_before_anything_is_captured(
    server, tiny_text, tmp_path, fault
):
    server.fault = fault
    for profile in CACHES if list(FAULTS).index(fault) < 6 else ["hidden"]:
        with pytest.raises(ModelError, match=FAULTS[fault]) as caught:
            capture(make_job(server.url, tiny_text, profile), tmp_path)
        assert caught.value.remedy
        assert not list(tmp_path.glob("caches/*/shards/0*"))


def test_states_that_change_during_a_capture_are_refused(server, tiny_text, tmp_path):
    server.twists.extend([lambda answer: answer] * 12 + [shift_states])
    with pytest.raises(ModelError, match=r"sequence \d+: the hidden states of .* are not what"):
        capture(make_job(server.url, tiny_text, "hidden"), tmp_path)


def shift_states(answer: Any) -> Any:
    rows = answer["meta_info"]["hidden_states"][0]
    rows.insert(0, rows.pop())
    return answer


ABOUT = {"version": "0.5.23", "model_path": "/models/other", "served_model_name": "other"}


@pytest.mark.parametrize(
    "about, named",
    [
        ({"detail": "Not Found"}, "does not say at /server_info that it is SGLang"),
        (ABOUT, "serves other, but teacher.model is teacher"),
    ],
)
def test_a_server_of_something_else_is_refused(server, tiny_text, about, named):
    server.about = about
    with pytest.raises(ModelError, match=named):
        plan_capture(parse_config(make_job(server.url, tiny_text, "topk")))


def test_a_wrong_key_is_told_when_the_server_is_asked_for_its_version(
    server, tiny_text, monkeypatch
):
    server.key = "right"
    monkeypatch.setenv("KD_TEACHER_KEY", "wrong")
    job = make_job(server.url, tiny_text, "topk", api_key_env="KD_TEACHER_KEY")
    with pytest.raises(ModelError, match="answers 401") as caught:
        plan_capture(parse_config(job))
    assert "teacher.api_key_env" in caught.value.remedy
    monkeypatch.setenv("KD_TEACHER_KEY", "right")
    assert plan_capture(parse_config(job)).identity.teacher.server == "sglang 0.5.23"


def test_a_context_that_is_too_short_is_refused_before_a_request(server, tiny_text, tmp_path):
    server.max_model_len = 54
    with pytest.raises(ModelError, match=r"has a context of 48 tokens, but data.sequence_length"):
        capture(make_job(server.url, tiny_text, "topk"), tmp_path)
    assert not server.asked


def test_a_server_that_returns_no_states_is_refused_in_its_words(server, tiny_text, tmp_path):
    server.gives_states = False
    with pytest.raises(ModelError, match=r"400: .*not configured to return hidden") as caught:
        capture(make_job(server.url, tiny_text, "hidden"), tmp_path)
    assert "--return-hidden-states-mode full" in caught.value.remedy


def test_the_version_is_part_of_the_identity(server, tiny_text):
    config = parse_config(make_job(server.url, tiny_text, "topk"))
    known = plan_capture(config).identity
    server.about = {"version": "0.6.0", "model_path": "teacher"}
    assert plan_capture(config).identity.fingerprint != known.fingerprint
    assert known.to_json()["teacher"]["server"] == "sglang 0.5.23"


def test_only_topk_and_hidden_are_served(tiny_text):
    job = make_job("http://host", tiny_text, "hidden")
    for changes, named in [
        ({"cache": {"profile": "dense"}}, "set cache.profile to topk, not dense, or to hidden"),
        ({"teacher": job["teacher"] | {"backend": "http"}}, "to topk, not hidden, or set teacher"),
    ]:
        with pytest.raises((ConfigError, ValidationError), match=named):
            parse_config(job | changes)


def test_a_folder_without_the_lm_head_is_found_before_the_run(server, tiny_text, tmp_path):
    folder = tmp_path / "teacher"
    shutil.copytree(TEACHER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    job = make_job(server.url, tiny_text, "hidden", tokenizer=str(folder))
    found = find_problems(parse_config(job), Folders(Path(), tmp_path))
    assert [each.pointer for each in found] == ["/teacher/tokenizer"]
    assert "stores the LM head" in found[0].detail
    assert (
        find_problems(parse_config(job | {"cache": CACHES["topk"]}), Folders(Path(), tmp_path))
        == []
    )
    with pytest.raises(ModelError, match="does not hold the LM head"):
        capture(job, tmp_path)


# ---------------------------------------------------------------------- answers


def make_answer(piece: DocumentPrompt, k: int = 3) -> dict[str, Any]:
    logp_NV = torch.randn(len(piece.tokens) - 1, 60, generator=torch.Generator().manual_seed(0))
    best = (3.0 * logp_NV).log_softmax(1).topk(k)
    gold = (3.0 * logp_NV).log_softmax(1).gather(1, torch.tensor(piece.tokens[1:])[:, None])
    about = {
        "input_token_logprobs": [[None, 5, None], *([each, 0, None] for (each,) in gold.tolist())],
        "input_top_logprobs_shape": [len(logp_NV), k],
        "input_top_logprobs_null_prefix": 1,
        "hidden_states": [np.arange(2.0 * len(piece.tokens)).reshape(-1, 2).tolist(), [0.0, 0.0]],
    }
    arrays = {"val": (best.values, np.float32), "idx": (best.indices, np.int32)}
    for name, (array, dtype) in arrays.items():
        field = f"input_top_logprobs_{name}_flat_b64"
        about[f"{field}_dtype"] = dtype.__name__
        about[field] = base64.b64encode(array.numpy().astype(dtype).tobytes()).decode()
    return {"prompt_token_ids": piece.tokens, "meta_info": about}


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Any]:
    def change_meta(answer: Any) -> Any:
        change(answer["meta_info"])
        return answer

    return change_meta


VAL = "input_top_logprobs_val_flat_b64"
WRONG = {
    "nested": (changed(lambda m: m.pop(VAL)), "no flat log-probabilities as of SGLang 0.5.23"),
    "no object": (lambda _: [1], "no flat log-probabilities"),
    "no base64": (changed(lambda m: m.update({VAL: "*"})), "no flat log-probabilities"),
    "float64": (
        changed(lambda m: m.update({f"{VAL}_dtype": "float64"})),
        "is float64, not float32",
    ),
    "shape": (changed(lambda m: m.update(input_top_logprobs_shape=[3, 4])), r"must be \(4, 3\)"),
    "prefix": (changed(lambda m: m.update(input_top_logprobs_null_prefix=0)), "after 0 without"),
    "gold": (changed(lambda m: m["input_token_logprobs"].pop()), "and 4 of the tokens"),
    "first": (
        changed(lambda m: m["input_token_logprobs"][0].__setitem__(0, -1.0)),
        "the first token has log-probabilities",
    ),
    "null": (
        changed(lambda m: m["input_token_logprobs"][1].__setitem__(0, None)),
        "None is no log-probability",
    ),
    "late": (
        changed(lambda m: m["input_token_logprobs"].insert(1, m["input_token_logprobs"].pop())),
        "positions are shifted",
    ),
    "other tokens": (
        lambda answer: answer | {"prompt_token_ids": [1, *answer["prompt_token_ids"][1:]]},
        "read other tokens",
    ),
    "no states": (changed(lambda m: m.pop("hidden_states")), "hidden_states cannot be read"),
    "ragged": (changed(lambda m: m["hidden_states"][0].append([1.0])), "cannot be read"),
    "short": (changed(lambda m: m["hidden_states"][0].pop()), "for each of 5 tokens, but are"),
    "nan": (changed(lambda m: m["hidden_states"][0][2].append(0)), "cannot be read"),
    "infinite": (
        changed(lambda m: m["hidden_states"][0].__setitem__(2, [1.0, float("inf")])),
        "NaN or infinite",
    ),
}


@pytest.mark.parametrize("change, named", WRONG.values(), ids=WRONG)
def test_a_wrong_answer_is_named_and_nothing_is_filled(change, named):
    piece = DocumentPrompt(8, 3, [5, 6, 7, 8, 9], [0, 2, 3])
    answer = make_answer(piece)
    tokens = answer["meta_info"]["input_token_logprobs"]
    # The second token is the most probable one of its position, so that it is told twice.
    best = np.frombuffer(base64.b64decode(answer["meta_info"][VAL]), "<f4").reshape(4, 3)
    ids = np.frombuffer(base64.b64decode(answer["meta_info"][VAL.replace("val", "idx")]), "<i4")
    piece.tokens[4], tokens[4][0] = int(ids.reshape(4, 3)[3, 0]), float(best[3, 0])
    found = parse_states(copy.deepcopy(answer), piece, 3, 60)
    assert found.states.tolist() == [[0.0, 1.0], [4.0, 5.0], [6.0, 7.0]]
    assert np.array_equal(found.top.logprobs, best[[0, 2, 3]])
    assert np.array_equal(parse_answer(answer, piece, 3, 60).gold, found.top.gold)
    with pytest.raises(ModelError, match=rf"sequence 8, position \d: .*{named}"):
        parse_states(change(answer), piece, 3, 60)


# ---------------------------------------------------------------------- weights on this machine


def files(folder: Path, **changes: Any) -> TeacherFiles:
    section = {"backend": "sglang", "model": "lab/teacher", "url": "http://h", "tokenizer": "t"}
    return TeacherFiles(TeacherConfig(**section | {"tokenizer": str(folder)} | changes), folder)


def test_weights_of_another_name_or_too_large_ones_are_not_loaded(monkeypatch):
    tokens = list(range(40, 60))
    found = read_top_here(files(TEACHER), VOCABULARY, tokens, Monitor())
    assert found is not None and found.ids.shape == (19, 20)
    assert read_top_here(files(TEACHER, model="large"), VOCABULARY, tokens, Monitor()) is None
    monkeypatch.setattr(local_weights, "LARGEST", 4 * 5_000_000)
    assert read_top_here(files(TEACHER), VOCABULARY, tokens, Monitor()) is None


def test_weights_that_cannot_be_loaded_are_named(tmp_path):
    folder = tmp_path / "teacher"
    shutil.copytree(TEACHER, folder)
    config = (folder / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(config.replace('"llama"', '"newer"'), encoding="utf-8")
    events: list[Event] = []
    assert read_top_here(files(folder), VOCABULARY, [1, 2, 3], Monitor(events.append)) is None
    assert "was not compared with the weights in" in events[-1].data["message"]


def make_model(folder: Path, kind: Any, made: Any, **fields: Any) -> Path:
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    made(kind(**shape | fields)).save_pretrained(folder)
    return folder


MODELS = {
    "soft cap": (Gemma2Config, Gemma2ForCausalLM, {"final_logit_softcapping": 7.0}),
    "scale": (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 4.0}),
    "untied": (GraniteConfig, GraniteForCausalLM, {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_lm_head_of_a_folder_is_that_of_the_loaded_model(tmp_path, name):
    kind, made, fields = MODELS[name]
    folder = make_model(tmp_path, kind, made, **fields)
    known = find_lm_head(load_model(folder, torch.float32).eval(), 290)
    found = read_lm_head(files(folder), 290, torch.device("cpu"))
    assert torch.equal(found.weight, known.weight)
    assert (found.scale, found.softcap) == (known.scale, known.softcap)
    assert (found.bias, found.vocabulary) == (None, 290)
    assert name == "untied" or (found.scale, found.softcap) != (1.0, None)


def test_a_manifest_with_a_server_is_of_the_newest_version(server, tiny_text, tmp_path):
    """Also if it names no test, as after a capture all of whose shards were there."""
    manifest = capture(make_job(server.url, tiny_text, "topk"), tmp_path).manifest
    without = Manifest(**{**vars(manifest), "served": None})
    assert Manifest.from_bytes(without.to_bytes(), "here") == without
    assert b'"version":9' in without.to_bytes().replace(b" ", b"")


def test_a_refusal_during_a_capture_is_told_and_the_next_attempt_goes_on(
    server, tiny_text, tmp_path
):
    job = make_job(server.url, tiny_text, "hidden", concurrency=1)
    server.twists.extend([lambda answer: answer] * 14 + [lambda _: error(400, "no")])
    with pytest.raises(ModelError, match="answers 400"):
        capture(job, tmp_path)
    begun = len(server.asked)
    found = capture(job, tmp_path)
    assert len(server.asked) - begun < begun
    whole = capture(job, tmp_path / "whole")
    assert [each.digest for each in found.entries] == [each.digest for each in whole.entries]


def test_a_reader_of_states_serves_no_other_codec():
    codec = Codec("hidden", VOCABULARY, seed=1, bits=16)
    section = TeacherConfig(backend="http", model="m", url="http://h", tokenizer="t")
    with pytest.raises(ModelError, match="most probable tokens"):
        remote.RemoteTeacher.connect(section, codec)
