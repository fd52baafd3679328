"""Packed documents are computed as if alone, and sequences fit the context of the model."""

import itertools

import pytest
import torch
import transformers

from kd.errors import ModelError
from kd.models.attention.isolation import isolate_documents
from kd.models.layers import compute_hidden_states, require_context
from kd.text.packed_rows import PackedRows
from tests.support.kd.zoo import (
    PACKS,
    SINGLE,
    build,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", PACKS)
@torch.no_grad()
def test_packed_documents_are_computed_as_if_alone(name):
    model = build(name) if name in SINGLE else build(name).double()
    tolerance = 1e-5 if name in SINGLE else 1e-6  # some compute their rotations in float32 always
    isolate_documents(model)
    tokens = some_tokens(1, 15)
    cuts = [0, 4, 5, 11, 15]
    positions = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(cuts)])[
        None
    ]
    packed = compute_hidden_states(model, tokens, PackedRows.of(positions))
    for start, stop in itertools.pairwise(cuts):
        alone = compute_hidden_states(model, tokens[:, start:stop])
        torch.testing.assert_close(packed[:, start:stop], alone, rtol=tolerance, atol=tolerance)


def test_the_context_is_found_under_the_name_of_its_family() -> None:
    shape = {"vocab_size": 40, "d_model": 8, "n_layers": 1, "n_heads": 2, "max_seq_len": 48}
    with torch.device("meta"):
        model = transformers.DbrxForCausalLM(
            transformers.DbrxConfig(
                **shape, pad_token_id=0, attn_config={"kv_n_heads": 1, "rope_theta": 1e4}
            )
        )
    require_context(model, 48)
    with pytest.raises(ModelError, match="has a context of 48 tokens"):
        require_context(model, 49)


def test_sequences_longer_than_the_context_are_refused() -> None:
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_positions=32, n_embd=8, n_layer=1, n_head=1)
    )
    require_context(model, 32)
    with pytest.raises(
        ModelError, match=r"context of 32 tokens, but data.sequence_length is 33"
    ) as caught:
        require_context(model, 33)
    assert "32 or less" in caught.value.remedy
