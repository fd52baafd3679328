"""A served teacher whose ids a small model proposes: it makes records of profile threshold.

    text -> proposal, here -> ids -> server -> scores -> weights -> units -> records

The proposal reads on while the server answers about the sequences before.

Shapes: N positions of a sequence with a target, A asked ids of a position, D hidden width,
V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cache.manifest import ServedTest
from cache.profiles.threshold import SCORED_TOP, UnitSample
from cache.random import PURPOSE_PROPOSAL, draw_uniforms
from cache.records import Sequences
from cache.rounding import RecordPositions
from kd.capture.host_copy import HostCopy
from kd.capture.recording import Recorder, TeacherReading
from kd.capture.remote import Answers, RemoteTeacher, TopEntries, cut_into_prompts, give_up
from kd.capture.sampling import make_sample
from kd.capture.served.drawing import DrawnIds, draw_ids, weigh
from kd.capture.served.scoring import Scores, make_question
from kd.capture.served.self_test import REQUESTS, Probe, judge
from kd.capture.units.drawing import UnitRandomness, UnitSampler
from kd.errors import ModelError

#: Positions whose logits are in memory at once, in float64.
ROWS = 64


class Proposal(Protocol):
    """A small model on this machine, with a recorder that has the tables of the dither."""

    recorder: Recorder

    def read_states(self, sequences: Sequences) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield hidden states (N, D) and next tokens (N,) of each sequence."""


@dataclass(frozen=True)
class AskedSequence:
    """A sequence whose ids are drawn, with the answers that are to come."""

    number: int
    positions_N: np.ndarray
    gold_N: Tensor
    cluster_N: Tensor
    drawn: DrawnIds
    answers: Answers


@dataclass(frozen=True)
class ProposedTeacher:
    """Reads records from a server that scores the ids which ``proposal`` draws."""

    remote: RemoteTeacher
    proposal: Proposal
    tested: ServedTest | None = None

    @property
    def recorder(self) -> Recorder:
        """The recorder of the proposal, which has the tables of the cache."""
        return self.proposal.recorder

    @cached_property
    def _sampler(self) -> UnitSampler:
        assert self.recorder.tables is not None, "they are made before the first record"
        return UnitSampler(self.remote.codec, self.recorder.tables)

    def take_tail_sums(self) -> None:
        """Return None: tails are not added up."""

    @torch.no_grad()
    def deliver(self, sequences: Sequences, first: int) -> Iterator[TeacherReading]:
        """Yield what is delivered of each sequence.

        ``first`` is the number of the first sequence. Raises as ``RemoteTeacher.read_top``.
        """
        asked = deque[AskedSequence]()
        try:
            for row, states in enumerate(self.proposal.read_states(sequences)):
                asked.append(self.ask(sequences, row, first, states))
                if len(asked) > self.remote.config.concurrency:
                    yield self._record(asked[0])
                    asked.popleft()
            while asked:
                yield self._record(asked[0])
                asked.popleft()
        finally:
            give_up(itertools.chain.from_iterable(each.answers for each in asked))

    @torch.no_grad()
    def examine_server(self, probe: Probe) -> ServedTest:
        """Test the server with ``probe``. Raises as ``judge``."""
        (states,) = self.proposal.read_states(probe.sequences)
        asked = [self.ask(probe.sequences, 0, 0, states) for _ in range(REQUESTS)]
        try:
            return judge(self.remote, probe, list(map(self._answer, asked)))
        finally:
            give_up(itertools.chain.from_iterable(each.answers for each in asked))

    def _answer(self, asked: AskedSequence) -> tuple[TopEntries, float]:
        scores = self._read(asked)
        return scores.top, float(weigh(scores, asked.drawn, asked.gold_N).entropy_N.mean())

    def ask(
        self, sequences: Sequences, row: int, first: int, states: tuple[Tensor, Tensor]
    ) -> AskedSequence:
        """Draw the ids of ``sequences[row]``, and begin to ask for them.

        ``first`` is the number of the sequence in row 0; ``states`` are the proposal's.
        """
        positions_N = np.flatnonzero(sequences.target_mask[row])
        cluster_N, drawn = self._draw(first + row, positions_N, *states)
        pieces = list(cut_into_prompts(sequences, row, first))
        cuts = np.cumsum([0, *(len(piece.targets) for piece in pieces)])
        ids_NA = drawn.ids_NA.cpu().numpy()
        answers = self.remote.start(
            make_question(self.remote, piece, ids_NA[cut : cut + len(piece.targets)])
            for piece, cut in zip(pieces, cuts.tolist(), strict=False)
        )
        return AskedSequence(first + row, positions_N, states[1], cluster_N, drawn, answers)

    def _draw(
        self, number: int, positions_N: np.ndarray, hidden_ND: Tensor, gold_N: Tensor
    ) -> tuple[Tensor, DrawnIds]:
        """Draw ids of sequence ``number``; also return the cluster of each position, (N,)."""
        codec = self.remote.codec
        numbers_N = np.full(len(positions_N), number)
        uniform_N = draw_uniforms(codec.seed, PURPOSE_PROPOSAL, numbers_N, positions_N)
        columns = (hidden_ND, gold_N, torch.from_numpy(uniform_N).to(gold_N.device))
        parts = []
        chunks = (each.split(ROWS) for each in columns)
        for hidden_nD, gold_n, uniform_n in zip(*chunks, strict=True):
            logits_nV = self.recorder.lm_head.compute_logits(hidden_nD)
            if not torch.isfinite(logits_nV).all():
                detail = f"The proposal's logits are NaN or infinite in sequence {number}."
                raise ModelError(detail, "Name another model in teacher.proposal.")
            drawn = draw_ids(logits_nV, gold_n, codec.k, uniform_n)
            clusters_n = self._sampler.find_clusters(hidden_nD)
            parts.append((clusters_n, drawn.ids_NA, drawn.chance_NA))
        cluster_N, ids_NA, chance_NA = map(torch.cat, zip(*parts, strict=True))
        return cluster_N, DrawnIds(ids_NA, chance_NA)

    def _read(self, asked: AskedSequence) -> Scores:
        """Wait for the answers about a sequence."""
        k = min(SCORED_TOP, self.remote.codec.vocabulary_size)
        width = asked.drawn.ids_NA.shape[1]
        return Scores.concatenate(self.remote.wait(asked.answers), k, width)

    def _record(self, asked: AskedSequence) -> TeacherReading:
        codec = self.remote.codec
        weights = weigh(self._read(asked), asked.drawn, asked.gold_N)
        numbers = ([asked.number], [asked.positions_N])
        (chance,) = UnitRandomness.of_each(codec, *numbers, asked.gold_N.device)
        found = []
        for start in range(0, max(len(asked.gold_N), 1), ROWS):
            cut = slice(start, start + ROWS)
            logw_nV = weights.spread(cut, codec.vocabulary_size)
            places = (asked.gold_N[cut], asked.cluster_N[cut], chance.select(cut))
            found.append(HostCopy.start(self._sampler.draw_units(logw_nV, *places)).wait())
        sample: UnitSample = make_sample(found, UnitSample)
        sample = replace(sample, entropy=weights.entropy_N.cpu().numpy())
        size = sum(column.nbytes for column in vars(sample).values())
        rows = RecordPositions(np.full(len(asked.gold_N), asked.number), asked.positions_N)
        return TeacherReading(1, len(asked.gold_N), size, partial(codec.encode, sample, rows))
