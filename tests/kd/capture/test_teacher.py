"""The capture: the same bytes for any batch size and any number of kills, and records that match
the teacher.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from bench.support.small.caches import make_codec, make_identity
from cache.checking.verify import verify_cache
from cache.disk import hash_file, list_file_sizes
from cache.profiles.table import PROFILES
from cache.profiles.threshold import count_rest
from cache.records import Records
from cache.rounding import ENTROPY_STEP, KNOWN_STEP
from cache.store import open_cache
from kd.capture import teacher as reading
from kd.capture.plan import plan_capture, require_counters
from kd.capture.recording import Recorder
from kd.capture.teacher import Teacher
from kd.config.data import DataConfig
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import ConfigError, Interrupted
from kd.loss.decoder import TargetDecoder
from kd.loss.sparse_targets import SparseTarget
from kd.memory.step_memory import read_resident_memory
from kd.models.lm_head import LMHead, find_lm_head
from kd.models.loading import load_model
from kd.progress import SILENT, Event, Monitor
from kd.stages.capture import run_precompute
from kd.text.batches import make_batch
from kd.text.packing import Document, pack_documents
from tests.support.kd.samples import make_recorder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def job(tiny_teacher: Path, tiny_text: Path) -> JobConfig:
    return parse_config(
        {
            "kind": "precompute",
            "teacher": {"model": str(tiny_teacher), "batch_size": 3},
            "data": {
                "train": str(tiny_text),
                "sequence_length": 64,
                "max_train_samples": 40,
                "max_eval_samples": 5,
            },
            "cache": {"shard_sequences": 7, "threshold": 0.01},
        }
    )


def with_profile(job: JobConfig, profile: str) -> JobConfig:
    """Return the same capture in another profile, with several draws if it can have them."""
    sampled = PROFILES[profile].sampled
    own: dict[str, Any] = {"threshold": 0.01, "always_keep": [0, 9]} if sampled else {}
    if "draws" in PROFILES[profile].options:
        own["draws"] = 2
    return parse_config(
        job.model_dump(mode="json") | {"cache": {"profile": profile, "shard_sequences": 7} | own}
    )


def content(folder: Path) -> dict[str, str]:
    return {name: hash_file(folder / name) for name in list_file_sizes(folder)}


def captured(job: JobConfig, home: Path, monitor: Monitor = SILENT) -> Path:
    summary = run_precompute(job, home, home / "run", monitor).cache
    return home / "caches" / str(summary["fingerprint"])


# ---------------------------------------------------------------------- same bytes


class Lookup(nn.Module):
    """A teacher whose hidden state is a table look-up, so its numbers are the same for every batch
    size.
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.device = torch.device("cpu")

    @property
    def base_model(self) -> nn.Module:
        return self

    def get_output_embeddings(self) -> None:
        """Return nothing: its LM head is not a part of it."""

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.table(input_ids))


class Wasteful(Lookup):
    """A look-up that frees 128 MiB in its forward pass, between blocks that it keeps."""

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        blocks = [torch.ones(2**14) for _ in range(2**11)]
        self.kept = blocks[::64]
        return super().forward(input_ids)


@torch.no_grad()
def test_rows_of_one_document_are_read_without_most_of_their_padding(
    job: JobConfig, tiny_teacher: Path
) -> None:
    """The width of a row depends on its own document, so that its records do, too."""
    data = job.data.model_copy(update={"packing": False})
    lengths = (3, 30, 64, 9, 33, 2)
    drawn = np.random.default_rng(0)
    documents = [Document(drawn.integers(0, 2000, each, np.uint32)) for each in lengths]
    sequences = pack_documents(documents, data)
    model = load_model(tiny_teacher, torch.float32)
    codec = make_identity(2048, codec=make_codec("topk")).record_codec()
    whole = Teacher(model, Recorder(find_lm_head(model, 2048), codec), 6)
    expected = list(whole.read_rows(sequences))
    widths: list[tuple[int, ...]] = []
    body: Any = model.base_model
    body.register_forward_pre_hook(
        lambda _, __, given: widths.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    found = list(replace(whole, cuts_padding=True).read_rows(sequences))
    assert sorted(widths) == [(1, 16), (1, 32), (2, 8), (2, 64)]
    assert len(found) == len(expected) == len(lengths)
    for (hidden_ND, gold_N, positions_N), wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(hidden_ND, wanted[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(gold_N, wanted[1])
        assert np.array_equal(positions_N, wanted[2])


@pytest.mark.usefixtures("cudnn_attention")
def test_attention_is_planned_where_all_rows_have_one_width(job: JobConfig) -> None:
    for packing in (True, False, True):
        data = job.data.model_copy(update={"packing": packing})
        Teacher.load(plan_capture(job.model_copy(update={"data": data})))
        assert torch.backends.cuda.cudnn_sdp_enabled() == packing


def test_the_memory_that_a_forward_pass_frees_is_returned(job: JobConfig) -> None:
    head = LMHead(torch.randn(300, 8), None, 1.0, None, 300)
    codec = make_identity(300, codec=make_codec("topk")).record_codec()
    teacher = Teacher(Wasteful(300, 8), Recorder(head, codec), 1)  # type: ignore[arg-type]
    sequences = pack_documents([Document(np.arange(64, dtype=np.uint32))], job.data)
    before = read_resident_memory()
    next(teacher.read_rows(sequences))
    assert read_resident_memory() - before < 2**25


@pytest.mark.parametrize("profile", PROFILES)
def test_records_do_not_depend_on_the_batch_size(job: JobConfig, profile: str) -> None:
    torch.manual_seed(0)
    model = Lookup(300, 8)
    head = LMHead(torch.randn(300, 8), None, 1.0, None, 300)
    rng = np.random.default_rng(0)
    documents = [
        Document(rng.integers(0, 300, size).astype(np.uint32)) for size in rng.integers(2, 90, 20)
    ]
    sequences = pack_documents(documents, job.data)
    codec = make_identity(300, codec=make_codec(profile, seed=3)).record_codec()

    def read(batch_size: int) -> Records:
        recorder = make_recorder(head, codec, 8, knots=4)
        teacher = Teacher(model, recorder, batch_size)  # type: ignore[arg-type]
        return Records.concatenate(each.encode() for each in teacher.deliver(sequences, first=11))

    whole = read(1)
    assert len(whole) == sequences.positions
    for batch_size in (2, 5, 100):
        other = read(batch_size)
        for name, column in whole.columns.items():
            assert np.array_equal(column, other[name]), name


@pytest.mark.long
@pytest.mark.parametrize("profile", ["threshold", "tempered"])
def test_a_teacher_is_read_in_all_of_float32_whatever_training_is_allowed(
    job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    """On a GPU with TF32, logits would be wrong by hundredths of a nat, and one fingerprint would
    mean two caches.
    """
    seen: set[str] = set()
    for name in ("find_lm_head", "compute_hidden_states"):
        real = getattr(reading, name)

        def asked(*arguments: Any, real: Any = real) -> Any:
            seen.add(torch.get_float32_matmul_precision())
            return real(*arguments)

        monkeypatch.setattr(reading, name, asked)
    torch.set_float32_matmul_precision("high")
    try:
        captured(with_profile(job, profile), tmp_path)
        assert (seen, torch.get_float32_matmul_precision()) == ({"highest"}, "high")
    finally:
        torch.set_float32_matmul_precision("highest")


def test_packed_chats_are_read_as_if_alone(tmp_path: Path) -> None:
    """Prompts are no targets: a chat does not attend to the chat before it, in any batch."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).eval()
    rng = np.random.default_rng(0)
    codec = make_identity(300, codec=make_codec("dense")).record_codec()
    teacher = Teacher(model, Recorder(find_lm_head(model, 300), codec), batch_size=2)
    options = DataConfig(train=("unused",), sequence_length=16)

    def chat(size: int) -> Document:
        return Document(rng.integers(0, 300, size).astype(np.uint32), np.arange(size) >= size // 2)

    first = chat(8)
    second = chat(8)
    text = Document(rng.integers(0, 300, 16).astype(np.uint32))
    other = Document(chat(8).ids, first.trained)
    texts = ([first, second], [other, second], [first, second, text, text])
    packed = [pack_documents(documents, options) for documents in texts]
    records = [next(teacher.deliver(sequences, 0)).encode() for sequences in packed]
    found = [each["logprobs"].astype(np.float64) for each in records]
    answers = len(second.ids) - len(second.ids) // 2
    assert not np.allclose(found[0][:answers], found[1][:answers], atol=1e-2), (
        "another chat, another answer"
    )
    for rows in found[1:]:
        np.testing.assert_allclose(
            found[0][answers : 2 * answers], rows[answers : 2 * answers], atol=2e-3
        )


@pytest.mark.parametrize(
    ("profile", "stops"),
    [("threshold", (1, 3, 9, 14)), ("tempered", (9,)), ("hidden", (4,)), ("topk", (3,))],
)
@pytest.mark.long
def test_interrupted_capture_resumes_to_the_same_bytes(
    job: JobConfig, tmp_path: Path, profile: str, stops: tuple[int, ...]
) -> None:
    job = with_profile(job, profile)
    whole = captured(job, tmp_path / "whole")
    for stop in stops:
        resume_interrupted_capture(job, tmp_path / str(stop), stop, whole)


def resume_interrupted_capture(job: JobConfig, home: Path, stop: int, whole: Path) -> None:
    """Stop a capture after ``stop`` micro-batches, go on, and compare it with ``whole``."""
    seen: list[Event] = []
    monitor = Monitor(seen.append, lambda: sum(event.type == "progress" for event in seen) >= stop)
    with pytest.raises(Interrupted, match=r"shard . of 6"):
        captured(job, home, monitor)
    phases: list[Event] = []
    resumed = captured(job, home, Monitor(phases.append))
    assert content(resumed) == content(whole)
    assert verify_cache(resumed) == []
    done = [event.data["done"] for event in phases if event.type == "progress"]
    assert done[0] == stop // 3 * 7 + 3, (
        "sealed shards are not captured again; one is three micro-batches"
    )


#: Captures again and again, once for each line of its input, each time in a fork. A fork tells its
#: number, then a line for each micro-batch; at its end comes its exit code.
CAPTURES = """
import os, sys, time
from pathlib import Path
from kd.config.jobfile import load_config
from kd.stages.capture import run_precompute
from kd.progress import Monitor

home = Path(sys.argv[2])

def listen(event):
    if event.type == "progress":
        print("progress", flush=True)
        time.sleep(0.05)

for _ in sys.stdin:
    if (pid := os.fork()) == 0:
        print(os.getpid(), flush=True)
        run_precompute(load_config(Path(sys.argv[1])), home, home / "run", Monitor(listen))
        os._exit(0)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.long
def test_killed_capture_resumes_to_the_same_bytes(job: JobConfig, tmp_path: Path) -> None:
    """A real process is killed by kill -9 at random moments, again and again, until it finishes."""
    whole = captured(job, tmp_path / "whole")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    home = tmp_path / "cut"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path.cwd()),
    }
    with subprocess.Popen(
        [sys.executable, "-c", CAPTURES, str(path), str(home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        codes = kill_captures(process, random.Random(0))
    assert {*codes} <= {0, -signal.SIGKILL} and codes.count(-signal.SIGKILL) >= 3, codes
    assert content(captured(job, home)) == content(whole)


def kill_captures(process: subprocess.Popen[str], dice: random.Random) -> list[int]:
    """Start six captures, of which one ends by itself at most; return their exit codes."""
    assert process.stdin is not None and process.stdout is not None
    codes: list[int] = []
    while len(codes) < 6 and 0 not in codes:
        process.stdin.write("go\n")
        process.stdin.flush()
        pid = int(process.stdout.readline())
        line = ""
        for _ in range(dice.randint(1, 6)):  # so many micro-batches, and then some
            line = line if line.startswith("ended") else process.stdout.readline()
        time.sleep(dice.random() * 0.1)
        if not line.startswith("ended"):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
        while not line.startswith("ended"):
            line = process.stdout.readline()
        codes.append(int(line.split()[1]))
    return codes


@pytest.mark.long
def test_sealed_cache_is_found_without_loading_the_teacher(job: JobConfig, tmp_path: Path) -> None:
    first = captured(job, tmp_path)
    events: list[Event] = []
    again = run_precompute(job, tmp_path, tmp_path / "other run", Monitor(events.append)).cache
    assert again["reused"] is True and first.name == again["fingerprint"]
    assert "loading the teacher" not in [event.data.get("phase") for event in events]


def test_which_cache_it_will_be_is_told_before_anything_of_it_lies_on_the_disk(
    job: JobConfig, tmp_path: Path
) -> None:
    planned: list[str] = []

    def listen(event: Event) -> None:
        if event.type == "plan":
            assert not (tmp_path / "caches").exists()
            planned.append(event.data["fingerprint"])

    with pytest.raises(Interrupted):
        captured(job, tmp_path, Monitor(listen, lambda: bool(planned)))
    (folder,) = (path for path in (tmp_path / "caches").iterdir() if path.is_dir())
    assert planned == [folder.name]


def test_two_jobs_that_want_the_same_cache_capture_it_once(job: JobConfig, tmp_path: Path) -> None:
    events: list[Event] = []

    def run(name: str) -> bool:
        return bool(
            run_precompute(job, tmp_path, tmp_path / name, Monitor(events.append)).cache["reused"]
        )

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(run, ("one", "two"))) == [False, True]
    phases = [event.data["phase"] for event in events if event.type == "stage"]
    assert phases.count("capturing") == 1
    assert sum(phase.startswith("waiting for another job") for phase in phases) == 1


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("cache", "threshold", 0.02),
        ("cache", "seed", 1),
        ("cache", "shard_sequences", 8),
        ("data", "sequence_length", 32),
        ("data", "max_train_samples", 39),
        ("teacher", "dtype", "bfloat16"),
    ],
)
def test_what_changes_the_bytes_changes_the_fingerprint(
    job: JobConfig, section: str, field: str, value: Any
) -> None:
    other = parse_config(
        job.model_dump(mode="json") | {section: getattr(job, section).model_dump() | {field: value}}
    )
    assert plan_capture(other).identity.fingerprint != plan_capture(job).identity.fingerprint


@pytest.mark.parametrize(
    "cache, remedy",
    [
        ({"profile": "topk", "k": 4096}, "Set it to {size} or less"),
        ({"always_keep": [4096]}, "ask the tokenizer"),
    ],
)
def test_tokens_that_the_teacher_does_not_have_are_refused_with_what_to_set(
    job: JobConfig, cache: dict[str, Any], remedy: str
) -> None:
    size = plan_capture(job).identity.tokenizer.vocabulary_size
    asked = parse_config(job.model_dump(mode="json") | {"cache": cache})
    with pytest.raises(ConfigError, match="4096 is more than the teacher has") as caught:
        plan_capture(asked)
    assert remedy.format(size=size) in str(caught.value)


def test_more_sequences_than_random_numbers_tell_apart_are_refused() -> None:
    """At 128 tokens they are a text of 5.5e11 tokens, which a capture would end in the middle."""
    require_counters(make_identity(train_sequences=2**32 - 3, validation_sequences=3))
    with pytest.raises(ConfigError, match="gives 4,294,967,297 sequences") as caught:
        require_counters(make_identity(train_sequences=2**32 - 2, validation_sequences=3))
    assert [each.pointer for each in caught.value.problems] == ["/data/sequence_length"]


def test_a_teacher_in_half_precision_has_the_codec_version_of_logits_in_float32(
    job: JobConfig,
) -> None:
    found = {}
    for dtype in ("float32", "bfloat16", "float16"):
        raw = job.model_dump(mode="json")
        raw["teacher"]["dtype"] = dtype
        found[dtype] = plan_capture(parse_config(raw)).identity.codec.version
    assert found == {"float32": 2, "bfloat16": 4, "float16": 4}


def test_what_does_not_change_the_bytes_does_not(job: JobConfig) -> None:
    raw = job.model_dump(mode="json")
    raw["name"] = "other"
    raw["teacher"]["batch_size"] = 8
    assert (
        plan_capture(parse_config(raw)).identity.fingerprint
        == plan_capture(job).identity.fingerprint
    )


# ---------------------------------------------------------------------- true to the teacher


def test_records_are_true_to_the_live_teacher(
    job: JobConfig, tmp_path: Path, tiny_teacher: Path
) -> None:
    store = open_cache(captured(job, tmp_path))
    sequences, records = store.read(range(len(store)))
    model = load_model(tiny_teacher, torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(sequences.tokens.astype(np.int64))).logits[
            :, :, :2048
        ]
    logp = torch.log_softmax(logits.double(), -1)[torch.from_numpy(sequences.target_mask)].numpy()
    p = np.exp(logp)
    gold = sequences.find_gold_ids().astype(int)
    assert len(logp) == len(records) == store.manifest.positions
    assert max(records["head_ids"].max(initial=0), records["tail_ids"].max()) < 2048, (
        "padding is never sampled"
    )
    _, number = count_rest(store.codec, records["known"], np.ones((len(p), 1), bool))
    rows = np.repeat(np.arange(len(p)), records["head_count"])
    others = 1.0 - p[np.arange(len(p)), gold]
    share = p[rows, records["head_ids"]] / (others / number)[rows]
    assert np.abs(records["head_units"] // 2 - share).max() < 1.0 + 1e-3, "floor or ceil"
    above = p * number[:, None] > others[:, None]
    above[np.arange(len(p)), gold] = False
    heads = np.zeros_like(above)
    heads[rows, records["head_ids"]] = True
    assert heads[above].all()
    step = store.codec.rules.find_step(store.codec)
    assert (
        np.abs(records["known"][:, 0] * -KNOWN_STEP - logp[np.arange(len(p)), gold]).max()
        <= step * 1.01
    )
    starts = np.cumsum(sequences.target_mask.sum(1))[:-1]
    found = np.split(records["entropy"] * ENTROPY_STEP, starts)
    exact = np.split(-(p * logp).sum(1), starts)
    errors = [ours.sum() - theirs.sum() for ours, theirs in zip(found, exact, strict=True)]
    assert np.abs(errors).max() <= ENTROPY_STEP * 0.51, "the mean of each sequence"
    # Over all positions the sampled mass of a token is its mass, within sampling error.
    batch = make_batch(sequences, records)
    target = TargetDecoder(store.codec).decode(batch.gold_N, batch.teacher).teacher
    assert isinstance(target, SparseTarget)
    mass = np.bincount(target.ids_E.numpy(), target.weights_E.numpy(), 2048)
    sigma = np.sqrt(np.maximum((0.012 * p).sum(0), 1e-12))
    assert np.abs((mass - p.sum(0)) / sigma).max() < 6


@pytest.mark.long
def test_damaged_shard_of_an_unfinished_capture_is_captured_again(
    job: JobConfig, tmp_path: Path
) -> None:
    whole = captured(job, tmp_path / "whole")
    seen: list[Event] = []
    with pytest.raises(Interrupted):
        captured(job, tmp_path / "cut", Monitor(seen.append, lambda: len(seen) > 12))
    folder = tmp_path / "cut" / "caches" / whole.name
    victim = next(
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size > 200
    )
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.write_bytes(data)
    assert content(captured(job, tmp_path / "cut")) == content(whole)
