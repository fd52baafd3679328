"""Jobs that earlier versions have written mean today what they meant then.

The files hold records and the identities of their checkpoints, as the commits themselves computed
them.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kd.config.fields.removed import REMOVED, drop_removed
from kd.config.job import JobConfig
from kd.config.jobfile import (
    MEANT_BEFORE,
    keep_meaning,
    parse_config,
    read_record,
    set_value,
)
from kd.errors import ConfigError, Problem
from kd.pipeline import settle_run
from kd.progress import SILENT
from kd.stages.source import are_cache_inputs, read_cache_inputs, select_cache_inputs
from kd.training.resume.identity import compute_resume_identity

RECORDS = Path(__file__).parents[2] / "support" / "formats"


def read_records(commit: str) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = json.loads(
        (RECORDS / f"records-{commit}.json").read_text(encoding="utf-8")
    )
    return found


@pytest.mark.parametrize("commit", ["2f65502", "8cefb88"])
def test_a_checkpoint_of_an_earlier_version_belongs_to_the_record_that_it_wrote(
    commit: str,
) -> None:
    for name, (written, identity) in read_records(commit).items():
        assert compute_resume_identity(read_record(written), "src") == identity, name


def test_a_field_that_a_record_lacks_means_what_was_done_then() -> None:
    for written, _ in read_records("2f65502").values():
        config = read_record(written)
        for section, fields in MEANT_BEFORE.items():
            for field, value in fields.items():
                assert field not in written[section]
                assert getattr(getattr(config, section), field) == value
    # What a person writes has the defaults of today.
    assert parse_config(drop_removed(written)).require_train().lm_head_floor == 0.1


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_field_is_an_error_that_names_the_new_way_and_a_record_may_have_its_default(
    name: str,
) -> None:
    written, _ = read_records("8cefb88")["init"]
    learned = {"loss": {"temperature": {"mode": "adversarial"}}}
    search = {"kind": "search", "search": {"space": {"train.seed": {"choices": [1]}}}}
    written |= search | {"cache": {"profile": "hidden"}, "loss": written["loss"] | learned["loss"]}
    meant = REMOVED[name].meant
    for value in ("another",) if meant is None else meant:
        assert read_record(set_value(written, name.split("."), value)) == read_record(written)
    value = "another" if meant is None else meant[0]
    found = [find_problems(parse_config, set_value(learned, name.split("."), value))]
    if meant is not None:
        found.append(find_problems(read_record, set_value(written, name.split("."), "another")))
    for problems in found:
        (told,) = [each for each in problems if each.pointer == f"/{name.replace('.', '/')}"]
        assert told.detail == "is no field of a job any more."
        assert told.remedy == REMOVED[name].instead


def find_problems(read: Callable[[Any], JobConfig], written: Any) -> Sequence[Problem]:
    with pytest.raises(ConfigError) as caught:
        read(written)
    return caught.value.problems


def test_the_cache_of_a_run_that_the_version_before_began_is_found_without_its_text() -> None:
    """Such a run has written what the cache was made of, and may have no teacher any more."""
    for written, _ in read_records("8cefb88").values():
        inputs = {name: written[name] for name in ("teacher", "data", "cache")}
        assert are_cache_inputs(read_cache_inputs({"inputs": inputs}), read_record(written))


@pytest.mark.parametrize("weighting", [0.0, 1.0])
def test_the_cache_of_a_run_is_that_of_a_job_with_the_same_entropies(weighting: float) -> None:
    written, _ = read_records("8cefb88")["init"]
    config = read_record(written | {"loss": written["loss"] | {"entropy_weighting": weighting}})
    inputs = select_cache_inputs(config)
    assert inputs["entropies"] == (weighting > 0)
    assert are_cache_inputs(read_cache_inputs({"inputs": inputs}), config)
    others = inputs | {"entropies": not inputs["entropies"]}
    assert not are_cache_inputs(read_cache_inputs({"inputs": others}), config)
    # Version 0.2.0 kept the entropies of positions for every job.
    del inputs["entropies"]
    assert are_cache_inputs(read_cache_inputs({"inputs": inputs}), config)


@pytest.mark.parametrize("known", [None, {}, [], {"inputs": None}, {"inputs": {"data": 1}}])
def test_a_run_that_does_not_tell_what_its_cache_was_made_from(known: Any) -> None:
    assert read_cache_inputs(known) is None


def test_the_job_file_of_a_run_that_an_earlier_version_began_continues_it() -> None:
    written, identity = read_records("2f65502")["init"]
    body = drop_removed({name: written[name] for name in ("teacher", "data")})
    body |= {"student": {"init": {"layers": 1, "hidden_size": 32, "num_attention_heads": 2}}}
    job = parse_config(body | {"train": {"max_steps": 10}})
    assert compute_resume_identity(job, "src") != identity
    kept = keep_meaning(job, written)
    assert compute_resume_identity(kept, "src") == identity
    # So it stays where this version has written its own record of the run.
    again = keep_meaning(job, kept.model_dump(mode="json"))
    assert compute_resume_identity(again, "src") == identity
    # What the file says, and a run of today, stay as they are.
    said = parse_config(body | {"train": {"max_steps": 10, "lm_head_floor": 0.2}})
    assert keep_meaning(said, written).require_train().lm_head_floor == 0.2
    assert keep_meaning(job, job.model_dump(mode="json")) == job
    assert keep_meaning(job, {}) == job


@pytest.mark.parametrize("record", ["{", "[1]", "3", '{"data": 3}', None])
def test_a_record_that_is_damaged_or_missing_does_not_end_its_run(
    tmp_path: Path, record: str | None
) -> None:
    student = {"init": {"layers": 1, "hidden_size": 16, "tokenizer": "."}}
    body = {"kind": "train", "student": student, "data": {"train": "x"}}
    job = parse_config(body | {"loss": {"alpha": 1}, "train": {"max_steps": 1}})
    if record is not None:
        (tmp_path / "config.json").write_text(record)
    assert settle_run(job, tmp_path, SILENT).data.packing is True
