"""How close a finished student is to its teacher, by held-out records of profile hidden.

Shapes: N positions that have a target, V vocabulary, D hidden width.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kd.config.job import JobConfig
from kd.evaluation.teacher_comparison import (
    CHUNK_ELEMENTS,
    ComparedScores,
    ComparisonSums,
    measure_chunk,
    summarise_sums,
)
from kd.loss.decoder import TargetDecoder
from kd.loss.targets import widen_logprobs
from kd.loss.whole_targets import HiddenTarget
from kd.models.lm_head import find_student_head
from kd.models.precision import Precision, compute_target_hidden_states, pick_device
from kd.text.batches import Source
from kd.text.steps.reading import read_validation_batches


@torch.no_grad()
def measure_closeness(
    student: PreTrainedModel, records: Source, vocabulary: int, job: JobConfig
) -> ComparedScores:
    """Compare ``student`` with the whole distributions that ``records`` hold, at T = 1."""
    device = pick_device()
    options = job.require_train()
    precision = Precision.choose(options.precision, device)
    decoder = TargetDecoder.of(records, device)
    lm_head = find_student_head(student, vocabulary)
    size = max(CHUNK_ELEMENTS // vocabulary, 1)
    totals: ComparisonSums | None = None
    student.eval()
    for batch in read_validation_batches(records, options.batch_size):
        batch = batch.to(device)
        hidden_ND = compute_target_hidden_states(student, batch, precision)
        target = decoder.decode(batch.gold_N, batch.teacher).teacher
        assert isinstance(target, HiddenTarget), "records of profile hidden"
        for start in range(0, len(batch), size):
            rows = slice(start, min(start + size, len(batch)))
            q_NV = lm_head.compute_logits(hidden_ND[rows]).float().log_softmax(1)
            p_NV = widen_logprobs(target.take_chunk(rows).logp_NV, q_NV.shape[1])
            gold_N = batch.gold_N[rows]
            sums = measure_chunk(p_NV, q_NV, gold_N, torch.ones_like(gold_N))
            totals = sums if totals is None else totals + sums
    assert totals is not None, "a study has held-out text"
    found = summarise_sums(totals, None, against_teacher=True)
    assert isinstance(found, ComparedScores), "it was compared with its teacher"
    return found
