"""What the forms of records hold, against each other and against the stored columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.support.small.caches import make_lm_head
from cache.rounding import KNOWN_STEP, make_cosine_basis
from kd.cached.decoding import IGNORED
from kd.cached.opening import open_cache
from tests.support.kd.own_loops import EARLIER, LENGTH, TRAIN, VOCABULARY

SAMPLED = [("threshold", 1.0), (EARLIER, 1.0), ("tempered", 1.0), ("tempered", 1.6)]


def read(folder: Path, form: Any, temperature: float = 1.0, **options: Any) -> dict[str, Any]:
    opened = open_cache(folder, form=form, temperature=temperature, **options)
    return next(iter(opened.stream(TRAIN, order="shuffled")))


def find_targets(batch: dict[str, Any]) -> Tensor:
    """Whether each position has a target, (B, L)."""
    target_BL = torch.zeros_like(batch["labels"], dtype=torch.bool)
    target_BL[:, :-1] = batch["labels"][:, 1:] != IGNORED
    return target_BL


def scatter(ids: Tensor, weights: Tensor) -> Tensor:
    return torch.zeros(*ids.shape[:-1], VOCABULARY).scatter_add(-1, ids, weights)


@pytest.mark.long
@pytest.mark.parametrize("profile, temperature", SAMPLED)
def test_entries_ragged_and_dense_are_one_sample(
    folders: dict[str, Path], profile: str, temperature: float
) -> None:
    entries, ragged, dense = (
        read(folders[profile], form, temperature) for form in ("entries", "ragged", "dense")
    )
    padded = scatter(entries["teacher_ids"], entries["teacher_weights"])
    torch.testing.assert_close(padded, dense["teacher_probs"])
    counts = ragged["teacher_offsets"].diff()
    rows = torch.arange(TRAIN * LENGTH).repeat_interleave(counts)
    flat = torch.zeros(TRAIN * LENGTH, VOCABULARY)
    flat.index_put_((rows, ragged["teacher_ids"]), ragged["teacher_weights"], accumulate=True)
    torch.testing.assert_close(flat.view_as(padded), padded)
    target_BL = find_targets(entries)
    assert (counts.view(TRAIN, LENGTH) > 0).equal(target_BL)
    assert not entries["teacher_weights"][~target_BL].any()


def test_weights_of_threshold_sum_to_one_at_each_target(folders: dict[str, Path]) -> None:
    entries = read(folders["threshold"], "entries")
    sums = entries["teacher_weights"].sum(-1)
    torch.testing.assert_close(sums, find_targets(entries).float())


def test_the_gold_token_is_the_label_after_its_position(folders: dict[str, Path]) -> None:
    entries = read(folders["threshold"], "entries")
    target_BL = find_targets(entries)
    gold_N = entries["labels"][:, 1:][target_BL[:, :-1]]
    assert entries["teacher_ids"][target_BL][:, 0].equal(gold_N)


@pytest.mark.parametrize("profile, temperature", SAMPLED)
def test_topk_of_a_sample_is_of_its_entries_in_order(
    folders: dict[str, Path], profile: str, temperature: float
) -> None:
    top, entries = (read(folders[profile], form, temperature, k=4) for form in ("topk", "entries"))
    ids, probs = top["teacher_ids"], top["teacher_probs"]
    assert probs.shape == (TRAIN, LENGTH, 4)
    assert (probs.diff(dim=-1) <= 0).all()
    same = entries["teacher_ids"][..., None, :] == ids[..., None]
    same &= entries["teacher_weights"][..., None, :] == probs[..., None]
    assert same.any(-1)[probs > 0].all()


@pytest.mark.parametrize("name", ["threshold", EARLIER])
def test_topk_of_threshold_has_no_token_of_the_tail(folders: dict[str, Path], name: str) -> None:
    opened = open_cache(folders[name])
    top, records = (read(folders[name], form, k=60) for form in ("topk", "records"))
    columns = {name: each.long() for name, each in records["records"].items()}
    known_N1 = (columns["known"][:, :1].double() * -KNOWN_STEP).exp()
    kept_N1 = (columns["known"][:, 1:].double() * -KNOWN_STEP).exp()
    target_BL = find_targets(top)
    gold_N = top["labels"][:, 1:][target_BL[:, :-1]]
    counts_N = columns["head_count"]
    if name == EARLIER:
        p_H = (columns["head_logprobs"].double() * -opened.codec.head_step).exp()
    else:
        # What the known tokens leave, in units of at most the threshold.
        kept_once_N = kept_N1[:, 0] * ~torch.isin(gold_N, torch.tensor(opened.codec.always_keep))
        rest_N = 1.0 - known_N1[:, 0] - kept_once_N
        unit_N = rest_N / (rest_N / opened.codec.threshold).ceil()
        p_H = columns["head_units"] // 2 * unit_N.repeat_interleave(counts_N)
    heads = p_H.split(counts_N.tolist())
    rows = zip(gold_N, known_N1, kept_N1, heads, top["teacher_probs"][target_BL], strict=True)
    for gold, gold_1, kept_1, head, probs in rows:
        # An id that is always kept is no entry of its own where it is the gold token.
        exact = [gold_1, head] if int(gold) in opened.codec.always_keep else [gold_1, kept_1, head]
        expected = torch.cat(exact).sort(descending=True).values.float()
        assert torch.allclose(probs[: len(expected)], expected, rtol=1e-5)
        assert not probs[len(expected) :].any()


def test_topk_of_profile_topk_is_what_is_stored(folders: dict[str, Path]) -> None:
    top, records = (read(folders["topk"], form, k=3) for form in ("topk", "records"))
    target_BL = find_targets(top)
    stored = records["records"]["top_ids"].long()[:, :3]
    assert top["teacher_ids"][target_BL].equal(stored)
    assert (top["teacher_probs"].sum(-1) <= 1).all()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("profile", ["dense", "hidden"])
def test_whole_distributions_are_softmaxes_at_the_temperature(
    folders: dict[str, Path], profile: str, temperature: float
) -> None:
    dense, records, top = (
        read(folders[profile], form, temperature, k=7) for form in ("dense", "records", "topk")
    )
    columns = records["records"]
    if profile == "dense":
        logits = columns["logprobs"].double()
    else:
        states = columns["hidden"].double() * columns["hidden_scale"].double()[:, None]
        if open_cache(folders[profile]).codec.cosines:
            states = states @ torch.from_numpy(make_cosine_basis(states.shape[1]))
        logits = states @ torch.from_numpy(make_lm_head(VOCABULARY)["weight"]).double().T
    expected = torch.softmax(logits / temperature, 1).float()
    target_BL = find_targets(dense)
    torch.testing.assert_close(dense["teacher_probs"][target_BL], expected, rtol=1e-4, atol=1e-6)
    probs, ids = expected.topk(7)
    torch.testing.assert_close(top["teacher_probs"][target_BL], probs, rtol=1e-4, atol=1e-6)
    assert top["teacher_ids"].shape == (TRAIN, LENGTH, 7) and ids.shape[1] == 7
    assert not dense["teacher_probs"][~target_BL].any()
