"""A student learns from a teacher with another tokenizer, from any cache, or is refused early."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cache.records import Sequences
from cache.rounding import KNOWN_STEP
from cache.store import Cache, open_cache
from kd.config.jobfile import parse_config
from kd.errors import ConfigError, ModelError, TokenizerMismatch
from kd.files import read_json
from kd.loss.decoder import TargetDecoder
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.models.lm_head import LMHead
from kd.models.tokenizers import get_vocabulary_size, load_tokenizer
from kd.models.tokenizing.aligned_cache import AlignedCache, require_aligned
from kd.models.tokenizing.alignment import Aligner, AlignmentCounts
from kd.models.tokenizing.pieces import TokenPieces
from kd.pipeline import run_stages
from kd.progress import SILENT, Monitor, Notice
from kd.stages.capture import run_precompute
from kd.text.batches import make_batch
from tests.support.kd.tiny import make_tiny_job
from tests.support.kd.tokenizers import train_fallback, train_kind

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
D = 8
Job = dict[str, Any]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer with the rules of SentencePiece."""
    folder = tmp_path_factory.mktemp("tokenizers") / "own"
    train_fallback().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def store(tiny_teacher: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """A sealed cache of the teacher, in its own tokens."""
    home = tmp_path_factory.mktemp("home")
    config = parse_config(make_tiny_job(tiny_teacher, tiny_text))
    (home / "run").mkdir()
    made = run_precompute(config, home, home / "run", SILENT)
    return open_cache(home / "caches" / made.cache["fingerprint"])


def make_job(teacher: Path, text: Path, own: Path, method: str, **sections: Any) -> Job:
    loss = {"tokenizers": method} | sections.pop("loss", {})
    job = make_tiny_job(teacher, text, loss=loss, **sections)
    return job | {"student": {"init": {"layers": 1, "hidden_size": 16, "tokenizer": str(own)}}}


def run(job: Job, home: Path) -> tuple[Path, list[Any]]:
    events = list[Any]()
    run_dir = home / "runs" / "x"
    run_stages(parse_config(job), home, run_dir, Monitor(events.append))
    return run_dir, events


def align(store: Cache, folder: Path, by_chunks: bool, length: int = 64) -> AlignedCache:
    tokenizer = load_tokenizer(folder)
    return AlignedCache.of(store, tokenizer, get_vocabulary_size(tokenizer), by_chunks, length)


def sum_losses(source: Any, parts: list[list[int]]) -> tuple[float, torch.Tensor]:
    """Sum loss and gradient of sequences read part by part, for states that tokens decide."""
    generator = torch.Generator().manual_seed(1)
    size = source.codec.vocabulary_size
    table = torch.randn(size, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(size, D, generator=generator, dtype=torch.float64).requires_grad_()
    head = LMHead(weight, None, 1.0, None, size)
    decoder = TargetDecoder.of(source, CPU)
    total = 0.0
    for part in parts:
        batch = make_batch(*source.read(np.array(part)))
        hidden_ND = table[batch.tokens_BL.flatten()[batch.rows_N]]
        targets = decoder.decode(batch.gold_N, batch.teacher)
        loss = compute_distillation_loss(hidden_ND, head, targets, Objective(0.2)).total
        loss.backward()
        total += float(loss.detach())
    assert weight.grad is not None
    return total, weight.grad


@pytest.mark.parametrize("method", ["projected", "alm"])
def test_a_student_with_its_own_tokenizer_is_taught_and_measured_by_bytes(
    tiny_teacher: Path, tiny_text: Path, own: Path, tmp_path: Path, method: str
) -> None:
    job = make_job(tiny_teacher, tiny_text, own, method)
    run_dir, events = run(job, tmp_path)
    measured = [each.data for each in events if each.type == "evaluation"]
    assert all(each["validation_bits_per_byte"] > 0 for each in measured)
    report = read_json(run_dir / "report.json")
    assert report["tokenizers"] == method and report["validation_kl"] > 0
    # The last evaluation and the report measure the same weights, here in float32.
    found = report["student_bits_per_byte"]
    assert measured[-1]["validation_bits_per_byte"] == pytest.approx(found, rel=1e-5)
    # The teacher's perplexity is that of the student's tokens: both compare as their bits do.
    bits = np.log2([report["teacher_perplexity"], report["student_perplexity"]])
    expected = report["teacher_bits_per_byte"] / found
    assert bits[0] / bits[1] == pytest.approx(expected)
    assert "Its perplexity is given for each token of the student" in (
        run_dir / "report.md"
    ).read_text(encoding="utf-8")
    saved = AutoTokenizer.from_pretrained(run_dir / "student")
    assert saved.get_vocab() == AutoTokenizer.from_pretrained(own).get_vocab()
    assert (report["evaluation"]["ngrams"] or {})["counted_tokens"] > 0


def test_any_cache_teaches_without_its_teacher(
    store: Cache, own: Path, tmp_path: Path, tiny_teacher: Path, tiny_text: Path
) -> None:
    shutil.copytree(store.folder, tmp_path / "caches" / store.fingerprint)
    job = make_job(tiny_teacher, tiny_text, own, "alm")
    kept = {name: job[name] for name in ("name", "student", "train", "loss", "evaluation")}
    kept |= {"kind": "train", "cache": {"fingerprint": store.fingerprint}}
    run_dir, _ = run(kept, tmp_path)
    assert read_json(run_dir / "report.json")["fingerprint"] == store.fingerprint


@pytest.mark.long
def test_equal_tokenizers_train_the_same_student_to_the_bit(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    students = []
    for method in ("same", "projected"):
        job = make_tiny_job(tiny_teacher, tiny_text, loss={"tokenizers": method})
        run_dir, _ = run(job, tmp_path / method)
        students.append((run_dir / "student" / "model.safetensors").read_bytes())
    assert students[0] == students[1]


def test_equal_tokenizers_through_the_alignment_give_the_same_batches(
    store: Cache, tiny_teacher: Path
) -> None:
    """Sequences, records and loss are those of the cache itself, to the bit."""
    aligned = align(store, tiny_teacher, by_chunks=False)
    rows = np.array([3, 0, 7, store.train_count])
    for ours, theirs in zip(aligned.read(rows)[0].arrays, store.read(rows)[0].arrays, strict=True):
        # What comes after the text of a row is padding, which nothing reads.
        kept = store.read(rows)[0].target_mask
        assert np.array_equal(ours[kept], theirs[kept])
    parts = [[3, 0], [7, 5, 6]]
    plain, through = sum_losses(store, parts), sum_losses(aligned, parts)
    assert plain[0] == through[0] and torch.equal(plain[1], through[1])
    chunks = align(store, tiny_teacher, by_chunks=True).read(rows)[1]
    assert chunks is not None and (np.bincount(chunks["chunk"]) == 1).all()


@pytest.mark.parametrize("by_chunks", [True, False])
def test_the_sum_does_not_depend_on_how_sequences_are_read(
    store: Cache, own: Path, by_chunks: bool
) -> None:
    aligned = align(store, own, by_chunks)
    whole, by_whole = sum_losses(aligned, [list(range(12))])
    for parts in ([[*range(4)], [*range(4, 8)], [*range(8, 12)]], [[each] for each in range(12)]):
        total, gradient = sum_losses(aligned, parts)
        assert total == pytest.approx(whole, rel=1e-11)
        torch.testing.assert_close(gradient, by_whole, rtol=1e-9, atol=1e-11)


def test_the_chunks_of_the_teacher_have_the_sum_of_its_learned_tokens(
    store: Cache, own: Path
) -> None:
    aligned = align(store, own, by_chunks=True)
    for row in range(6):
        theirs, records = store.read(np.array([row]))
        (found,) = aligned.aligner.align(theirs, AlignmentCounts())
        inside = found.chunk_L[1:][theirs.target_mask[0, :-1]] >= 0
        expected = -KNOWN_STEP * records["known"][inside, 0].astype(float).sum()
        own_records = aligned.read(np.array([row]))[1]
        assert own_records is not None
        chunk_N = own_records["chunk"]
        first = np.unique(chunk_N[chunk_N >= 0], return_index=True)[1]
        said = own_records["chunk_logprob"][chunk_N >= 0][first].sum()
        assert said == pytest.approx(expected, abs=1e-9)
        assert inside.mean() > 0.9


def test_long_rows_are_cut_and_the_source_has_a_name_of_its_own(store: Cache, own: Path) -> None:
    whole, cut = align(store, own, True), align(store, own, True, length=16)
    assert cut.read(np.arange(4))[0].length == 16 < whole.read(np.arange(4))[0].length
    names = {whole.fingerprint, cut.fingerprint, align(store, own, False).fingerprint}
    assert len(names | {store.fingerprint}) == 4
    assert whole.fingerprint == align(store, own, True).fingerprint
    notices = list[Notice]()
    require_aligned(cut.aligner, store.read(np.arange(8))[0], 16, notices.append)
    assert any("more than 16 of the student's tokens, cut there" in each.what for each in notices)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"loss": {"tokenizers": "same"}}, r"is not the teacher's.*loss\.tokenizers: projected"),
        ({"cache": {"profile": "topk", "k": 4}}, r"loss\.tokenizers: .* Set it to alm, or capture"),
        ({"cache": {"profile": "dense"}, "loss": {"divergence": "jsd"}}, r"loss\.divergence: "),
        (
            {"cache": {"profile": "hidden"}, "loss": {"features": {"weight": 1.0}}},
            r"loss\.features: .* Set it to weight 0",
        ),
        (
            {"cache": {"profile": "hidden"}, "loss": {"temperature": 2.0, "tokenizers": "alm"}},
            r"loss\.temperature: .* Set it to 1",
        ),
        ({"evaluation": {"teacher": True}}, r"evaluation\.teacher: .*bits per byte"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_before_the_capture(
    tiny_teacher: Path, tiny_text: Path, own: Path, tmp_path: Path,
    sections: dict[str, Any], message: str,
) -> None:  # fmt: skip
    job = make_job(tiny_teacher, tiny_text, own, "projected", **sections)
    with pytest.raises((ConfigError, TokenizerMismatch), match=message):
        run(job, tmp_path)
    assert not list((tmp_path / "caches").glob("*/shards"))


def test_a_tokenizer_of_words_is_refused_before_the_capture(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    train_kind("BERT cased").save_pretrained(tmp_path / "words")
    job = make_job(tiny_teacher, tiny_text, tmp_path / "words", "alm")
    with pytest.raises(ModelError, match="do not tell their bytes"):
        run(job, tmp_path)


def test_rows_without_a_common_boundary_are_refused(tokenizer: Any) -> None:
    """The student's tokenizer makes one token of each row."""
    word = "abcdefgh"
    letters = sorted(ByteLevel.alphabet())
    joined = [word[:end] for end in range(2, len(word) + 1)]
    vocabulary = {token: number for number, token in enumerate([*letters, *joined])}
    merges = [(word[: end - 1], word[end - 1]) for end in range(2, len(word) + 1)]
    student = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, merges)))
    ids = tokenizer(word)["input_ids"]
    aligner = Aligner.of(TokenPieces.of_tokenizer(tokenizer, 2048), student, len(vocabulary))
    tokens = np.array([ids] * 4, np.uint32)
    places = np.broadcast_to(np.arange(len(ids)), tokens.shape)
    rows = Sequences(tokens, places == 0, places < len(ids) - 1)
    with pytest.raises(ConfigError, match=r"no common boundary in 4 of 4 sampled rows"):
        require_aligned(aligner, rows, 64, SILENT.note)


# ---------------------------------------------------------------------- chats

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
ASKED = [{"role": "user", "content": "Who is Anne?"}]


def make_chat_job(teacher: Path, own: Path, folder: Path, known: bool) -> Job:
    """A job on chats whose template writes a special token; ``known``: the student has it."""
    theirs = Path(shutil.copytree(teacher, folder / "teacher"))
    added = AutoTokenizer.from_pretrained(theirs)
    added.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    added.chat_template = TEMPLATE
    added.save_pretrained(theirs)
    tokenizer = AutoTokenizer.from_pretrained(own)
    if known:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.save_pretrained(folder / "own")
    answer = {"role": "assistant", "content": "She is the daughter of Sir Walter Elliot."}
    rows = folder / "chats.jsonl"
    rows.write_text((json.dumps({"messages": [*ASKED, answer]}) + "\n") * 12)
    data = {"format": "messages", "sequence_length": 64}
    return make_job(theirs, rows, folder / "own", "projected", data=data)


def test_chats_are_learned_after_the_template_of_the_teacher(
    tiny_teacher: Path, own: Path, tmp_path: Path
) -> None:
    """Only answers are learned, and the saved student ends them as it was taught."""
    job = make_chat_job(tiny_teacher, own, tmp_path, known=True)
    run_dir, _ = run(job, tmp_path)
    saved = AutoTokenizer.from_pretrained(run_dir / "student")
    assert saved.chat_template == TEMPLATE and saved.eos_token == "</s>"
    asked = saved.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert asked == "<|turn|>user\nWho is Anne?</s>\n<|turn|>assistant\n"
    store = open_cache(tmp_path / "caches" / read_json(run_dir / "cache.json")["fingerprint"])
    aligned = align(store, tmp_path / "own", by_chunks=False, length=128)
    sequences, _ = aligned.read(np.arange(1))
    learned = saved.decode(sequences.find_gold_ids().tolist())
    expected = "She is the daughter of Sir Walter Elliot.</s>"
    assert learned.split("</s>")[0] + "</s>" in expected and "</s>" in learned
    assert "Anne" not in learned and "turn" not in learned


def test_a_template_whose_tokens_the_student_lacks_is_refused(
    tiny_teacher: Path, own: Path, tmp_path: Path
) -> None:
    job = make_chat_job(tiny_teacher, own, tmp_path, known=False)
    with pytest.raises(ModelError, match=r"template writes <\|turn\|>, which the student's"):
        run(job, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("method", ["projected", "alm"])
def test_a_context_that_only_the_teacher_reads_is_learned_in_other_tokens(
    tiny_teacher: Path, own: Path, tmp_path: Path, method: str
) -> None:
    numbers = range(40)
    rows = tmp_path / "rows.jsonl"
    texts = (
        {"prompt": f"Number {number}:", "completion": f" {number} is a number, {number}."}
        for number in numbers
    )
    rows.write_text("".join(json.dumps(each) + "\n" for each in texts))
    data = {"format": "prompt_completion", "sequence_length": 40}
    train = {"max_steps": 30, "eval_steps": 30, "learning_rate": 1e-2, "dropout": None}
    loss = {"alpha": 0.0}
    job = make_job(tiny_teacher, rows, own, method, data=data, train=train, loss=loss)
    job["teacher"]["context"] = "Say that all is well. {prompt}"
    _, events = run(job, tmp_path)
    first, *_, last = (each.data["validation_kl"] for each in events if each.type == "evaluation")
    assert last < 0.8 * first
