"""A served teacher that returns hidden states: it makes records of profile hidden.

    text -> server -> hidden states -> LM head, here -> records

With each answer come the most probable tokens, which the states must give, too.

Shapes: N positions with a target, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cache.manifest import ServedTest
from cache.records import Sequences
from kd.capture.recording import Recorder, SequenceStates, TeacherReading
from kd.capture.remote import RemoteTeacher, find_server_url
from kd.capture.served import self_test
from kd.capture.served.local_weights import pick_top
from kd.capture.served.sglang import StateEntries
from kd.errors import ModelError
from kd.text.teacher_side.sequences import find_teacher_side

#: Positions of each answer whose states are compared with the most probable tokens, at most, and
#: the nats by which so few may differ. Those of another position differ by several.
COMPARED, FEW_SPREAD = 8, 5 * self_test.MOST_SPREAD


@dataclass(frozen=True)
class StatesTeacher:
    """Reads records from a server that returns hidden states."""

    remote: RemoteTeacher
    recorder: Recorder
    tested: ServedTest | None = None

    def take_tail_sums(self) -> None:
        """Return None: tails are not added up."""

    @torch.no_grad()
    def deliver(self, sequences: Sequences, first: int) -> Iterator[TeacherReading]:
        """Yield what is delivered of each sequence.

        ``first`` is the number of the first sequence. Raises as ``RemoteTeacher.read_answers``.
        """
        weight = self.recorder.lm_head.weight
        for row, found in enumerate(self.remote.read_answers(find_teacher_side(sequences), first)):
            for each in found:
                some = slice(None, None, -(-len(each.states) // COMPARED))
                few = StateEntries(each.top.select(some), each.states[some])
                self._require_agreement(few, FEW_SPREAD, f"sequence {first + row}: ")
            own = sequences.select(slice(row, row + 1))
            gold_N = torch.from_numpy(own.find_gold_ids().astype(np.int64)).to(weight.device)
            hidden_ND = torch.cat([weight[:0], *map(self._convert, found)])
            positions_N = np.flatnonzero(own.target_mask[0])
            yield self.recorder.read([SequenceStates(first + row, hidden_ND, gold_N, positions_N)])

    def examine_server(self, probe: self_test.Probe) -> ServedTest:
        """Test the server with ``probe``. Raises as ``judge``, and where its states are others."""
        found = self_test.ask_often(self.remote, probe)
        tops = [(each.top, self_test.bound_entropy(each.top)) for each in found]
        tested = self_test.judge(self.remote, probe, tops)
        for each in found:
            self._require_agreement(each, self_test.MOST_SPREAD)
        return tested

    def _convert(self, found: StateEntries) -> Tensor:
        return torch.from_numpy(found.states).to(self.recorder.lm_head.weight)

    def _require_agreement(self, found: StateEntries, most: float, where: str = "") -> None:
        """Raise ``ModelError`` unless the states give the server's own log-probabilities."""
        folder, width = self.remote.config.tokenizer, self.recorder.lm_head.weight.shape[1]
        what = f"they have {found.states.shape[1]} numbers, and the LM head reads {width}"
        if found.states.shape[1] == width:
            own = pick_top(self.recorder.lm_head, self._convert(found))
            if (apart := self_test.compare(found.top, own)) <= most:
                return
            what = f"its own log-probabilities differ by {apart:.3g} nats"
        raise ModelError(
            f"{where}the hidden states of {find_server_url(self.remote.config)} are not what the "
            f"LM head in {folder} reads: {what}. They are of another position or layer, or from "
            "before the last norm, or the folder holds another model.",
            "Set teacher.tokenizer to the folder of the served model, or use profile topk.",
        )
