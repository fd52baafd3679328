"""Frequencies that depend on the length of a text are those of each document alone."""

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import kd.models.layers
from cache.store import Cache, open_cache
from kd.config.jobfile import parse_config
from kd.errors import FidelityError
from kd.models.attention.isolation import isolate_documents
from kd.models.layers import compute_hidden_states
from kd.progress import SILENT
from kd.stages.capture import run_precompute
from kd.text.packed_rows import PackedRows
from tests.support.kd.zoo import DEEPSEEK, LLAMA, NARROW, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

#: Tokens up to which all texts have the same frequencies. Padded rows of 9 to 16 are read together.
USUAL = 12
LOW_RANKS = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip
LONG = {"original_max_position_embeddings": USUAL}
SHORT = {"max_position_embeddings": USUAL}


def longrope(angles: int) -> dict[str, Any]:
    short, long = [1.0] * angles, [2.0 + each for each in range(angles)]
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long}


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
BY_LAYER = {"full_attention": DYNAMIC, "sliding_attention": PLAIN}
VARYING: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3Config", LLAMA | NARROW | LONG | {"rope_scaling": longrope(4)}),
    "minicpm3": ("MiniCPM3Config", LLAMA | LONG | LOW_RANKS | {"rope_scaling": longrope(2)}),
    "llama": ("LlamaConfig", LLAMA | SHORT | {"rope_scaling": DYNAMIC}),
    "cohere": ("CohereConfig", LLAMA | SHORT | {"rope_scaling": DYNAMIC}),
    "deepseek": ("DeepseekV3Config", DEEPSEEK | SHORT | {"rope_scaling": DYNAMIC}),
    "gemma3, by layer": (
        "Gemma3TextConfig",
        LLAMA | SHORT | {
            "rope_parameters": BY_LAYER,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
}  # fmt: skip


def make(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config_class, shape = VARYING[kind]
    config = getattr(transformers, config_class)(**copy.deepcopy(shape))
    return AutoModelForCausalLM.from_config(config).eval()


def read_alone(kind: str, tokens_1L: Tensor) -> Tensor:
    """Read a document by plain transformers, in a model that has read nothing before."""
    found: Tensor = make(kind).base_model(input_ids=tokens_1L, use_cache=False).last_hidden_state
    return found


@pytest.mark.parametrize("kind", VARYING)
@torch.no_grad()
def test_documents_of_any_length_in_any_row_are_computed_as_alone(kind: str) -> None:
    model = make(kind)
    isolate_documents(model)
    tokens_BL = some_tokens(2, 62)
    cuts = [[0, 5, 35, 35 + USUAL, 62], [0, 41, 58, 62]]
    rows = [
        torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(each)])
        for each in cuts
    ]
    packed = compute_hidden_states(model, tokens_BL, PackedRows.of(torch.stack(rows)))
    for row, each in enumerate(cuts):
        for start, stop in itertools.pairwise(each):
            alone = read_alone(kind, tokens_BL[row : row + 1, start:stop])
            torch.testing.assert_close(packed[row : row + 1, start:stop], alone)


@pytest.mark.parametrize("kind", VARYING)
@torch.no_grad()
def test_padding_and_what_was_read_before_do_not_count(kind: str) -> None:
    model = copy.deepcopy(make(kind))
    tokens_BL = some_tokens(2, 40)
    compute_hidden_states(model, tokens_BL)
    short = compute_hidden_states(model, tokens_BL[:1, :USUAL])
    torch.testing.assert_close(short, read_alone(kind, tokens_BL[:1, :USUAL]))
    sizes = (9, 30)
    places = [torch.cat([torch.arange(size), torch.arange(40 - size)]) for size in sizes]
    padded = PackedRows.of(torch.stack(places), apart=False)
    found = compute_hidden_states(copy.deepcopy(model), tokens_BL, padded)
    for row, size in enumerate(sizes):
        alone = read_alone(kind, tokens_BL[row : row + 1, :size])
        torch.testing.assert_close(found[row : row + 1, :size], alone)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own use, while it compiles
@torch.no_grad()
def test_a_compiled_model_keeps_them_apart_too() -> None:
    model = make("phi3")
    isolate_documents(model)
    packed = PackedRows.of(torch.cat([torch.arange(9), torch.arange(31)])[None])
    expected = compute_hidden_states(model, some_tokens(1, 40), packed)
    model.base_model.compile()
    found = compute_hidden_states(model, some_tokens(1, 40), packed)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------- a capture


@pytest.fixture
def teacher(tmp_path: Path, tokenizer: Any) -> Path:
    """A Phi-3 whose short and long texts have other frequencies, and which minds that."""
    torch.manual_seed(0)
    shape = LLAMA | NARROW | LONG | {"vocab_size": 2048, "initializer_range": 0.3}
    config = transformers.Phi3Config(**shape, rope_scaling=longrope(4))
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path / "phi3")
    tokenizer.save_pretrained(tmp_path / "phi3")
    return tmp_path / "phi3"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Documents of up to as many tokens as all texts share, and longer ones."""
    words = ["She", "was", "not", "at", "all", "sorry", "to", "be", "alone", "with", "him"]
    sizes = [10, 14, 8, 60, 9, 13, 11] * 9
    lines = [" ".join((words * 6)[at : at + size]) for at, size in enumerate(sizes)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines), encoding="utf-8")
    return path


def capture(teacher: Path, rows: Path, home: Path, batch_size: int, packing: bool) -> Cache:
    data = {"train": str(rows), "sequence_length": 64, "packing": packing, "max_eval_samples": 2}
    job = {
        "kind": "precompute",
        "teacher": {"model": str(teacher), "batch_size": batch_size},
        "data": data,
        "cache": {"profile": "topk", "k": 16},
    }
    summary = run_precompute(parse_config(job), home, home / "run", SILENT).cache
    return open_cache(home / "caches" / summary["fingerprint"])


@pytest.mark.long
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@torch.no_grad()
def test_records_depend_on_their_document_alone(
    teacher: Path, rows: Path, tmp_path: Path, packing: bool
) -> None:
    model = transformers.Phi3ForCausalLM.from_pretrained(teacher).eval()
    stores = [capture(teacher, rows, tmp_path / str(size), size, packing) for size in (1, 8)]
    assert stores[0].identity == stores[1].identity
    for store in stores:
        sequences, records = store.read(range(len(store)))
        # Of this profile the next token's log-probability is stored in steps of 2^-8.
        stored = iter(torch.from_numpy(records["known"][:, 0].astype(np.float64)) * -(2.0**-8))
        lengths = set()
        for row in range(len(sequences)):
            starts = np.flatnonzero(sequences.document_start[row]).tolist()
            for start, stop in itertools.pairwise([*starts, 64]):
                tokens_L = torch.from_numpy(sequences.tokens[row, start:stop].astype(np.int64))
                logp_LV = model(input_ids=tokens_L[None]).logits[0].double().log_softmax(1)
                for place in np.flatnonzero(sequences.target_mask[row, start:stop]).tolist():
                    gold = float(logp_LV[place, tokens_L[place + 1]])
                    assert float(next(stored)) == pytest.approx(gold, abs=6e-3)
                    lengths.add(stop - start > USUAL)
        assert lengths == {True, False} and next(stored, None) is None


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_the_fidelity_check_sees_records_of_neighbours(
    teacher: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    monkeypatch.setattr(kd.models.layers, "keep_frequencies_apart", lambda model: None)
    with pytest.raises(FidelityError, match="the records differ from the teacher"):
        capture(teacher, rows, tmp_path, 8, packing)
