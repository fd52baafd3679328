"""Open the teacher of a capture: load a model, or connect to a server and test it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from cache.writing.writer import CacheWriter
from kd.capture.plan import CapturePlan
from kd.capture.recording import Recorder
from kd.capture.remote import RemoteTeacher
from kd.capture.served.local_weights import read_lm_head, read_top_here
from kd.capture.served.proposing import ProposedTeacher
from kd.capture.served.self_test import PROSE, Probe, examine_server
from kd.capture.served.sglang import SGLangTeacher
from kd.capture.served.states import StatesTeacher
from kd.capture.shards import RecordReader
from kd.capture.teacher import Teacher, fit_recorder, warn_of_plain_layers
from kd.models import tokenizers
from kd.models.attention.isolation import warn_of_mask
from kd.models.precision import pick_device
from kd.models.teacher_files import TeacherFiles
from kd.models.tokenizing.rules import sample_texts
from kd.progress import Monitor

#: Texts of the job that a server is asked to tokenize, and the characters of one.
ASKED_TEXTS, ASKED_CHARACTERS = 16, 1024


@contextmanager
def open_reader(
    plan: CapturePlan, writer: CacheWriter, monitor: Monitor, knots: int | None = None
) -> Iterator[RecordReader]:
    """Open the teacher of ``plan``: load its model, or connect to its server.

    ``knots`` is the number of knots that another worker has chosen.
    """
    section = plan.teacher.section
    if section.is_local:
        teacher = Teacher.load(plan, monitor)
        if plan.identity.data.packing:
            warn_of_mask(teacher.model, plan.data.sequence_length, monitor)
        warn_of_plain_layers(teacher.model, plan.identity.teacher.quantization, monitor)
        yield fit_recorder(teacher, plan, writer, monitor, knots)
        return
    kind = SGLangTeacher if section.backend == "sglang" else RemoteTeacher
    with kind.connect(section, plan.identity.record_codec(), monitor) as remote:
        some = (text[:ASKED_CHARACTERS] for text in islice(sample_texts(plan.data), ASKED_TEXTS))
        probes = tokenizers.encode_probes(plan.tokenizer, (*tokenizers.PROBE_TEXTS, *some))
        remote.require_same_tokenizer(probes, plan.read_length)
        yield _test_server(remote, plan, writer, monitor)


def _test_server(
    remote: RemoteTeacher, plan: CapturePlan, writer: CacheWriter, monitor: Monitor
) -> RecordReader:
    """Return the reader of what the server sends, once the server is tested."""
    vocabulary = plan.identity.tokenizer.vocabulary_size
    tokens = plan.tokenizer(PROSE)["input_ids"][: plan.read_length]
    probe = Probe(tokens, read_top_here(plan.teacher, vocabulary, tokens, monitor))
    if plan.identity.teacher.proposal:
        proposed = ProposedTeacher(remote, load_proposal(plan, writer, monitor))
        return replace(proposed, tested=proposed.examine_server(probe))
    if not remote.codec.rules.needs_lm_head:
        return replace(remote, tested=examine_server(remote, probe))
    lm_head = read_lm_head(plan.teacher, vocabulary, pick_device())
    teacher = StatesTeacher(remote, Recorder(lm_head, remote.codec))
    tested = teacher.examine_server(probe)
    writer.write_lm_head(teacher.recorder.make_lm_head_arrays())
    return replace(teacher, tested=tested)


def load_proposal(plan: CapturePlan, writer: CacheWriter, monitor: Monitor) -> Teacher:
    """Load the model that proposes ids to a server. Raises ``TokenizerMismatch``."""
    section = plan.teacher.section.proposer
    assert section is not None, "the identity of the cache has a proposal"
    files = TeacherFiles.resolve(section)
    vocabulary = plan.identity.tokenizer.vocabulary_size
    known = tokenizers.KnownTokenizer.of(plan.tokenizer, vocabulary, "the teacher's")
    own = tokenizers.load_source_tokenizer(section.files, files.folder)
    texts = sample_texts(plan.data)
    tokenizers.require_same_tokenizer(own, known, "The proposal's", texts, monitor.note)
    proposal = Teacher.load(replace(plan, teacher=files), monitor)
    return fit_recorder(proposal, plan, writer, monitor)
