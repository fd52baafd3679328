"""``GET /templates``: the job files of ``kd init``, in which models and texts are empty."""

from __future__ import annotations

import pytest

from bench.support.harness import Parts
from kd.client.client import Client
from kd.config.jobfile import parse_config, parse_yaml
from kd.config.templates.filling import fill_template, list_templates
from kd.errors import ConfigError
from services.api.routes.templates import JOB_NAME

ANSWERS = {"teacher": "org/teacher", "student": "org/student", "train": "texts/*.txt"}


def test_the_templates_are_those_of_the_command(api: Parts) -> None:
    found = api.http.get("/templates").json()["data"]
    assert [each["name"] for each in found] == list_templates()
    for each in found:
        assert each["title"].endswith(".") and each["title"] in each["text"]
        filled = each["text"].replace('model: ""', 'model: "org/teacher"', 1)
        filled = filled.replace('model: ""', 'model: "org/student"')
        for field in ("train", "path"):
            filled = filled.replace(f'{field}: ""', f'{field}: "texts/*.txt"')
        for field in ("tokenizer", "proposal"):  # the student reads the text of a served teacher
            filled = filled.replace(f'{field}: ""', f'{field}: "org/student"')
        assert filled == fill_template(each["name"], JOB_NAME, ANSWERS)


def test_only_what_the_user_knows_is_missing(api: Parts) -> None:
    with Client(api.settings.server) as client:
        for template in client.templates():
            with pytest.raises(ConfigError) as refused:
                parse_config(parse_yaml(template.text))
            pointers = {each.pointer for each in refused.value.problems}
            known = {"/teacher/model", "/student/model", "/data/train/0"}
            if template.name == "served":
                known |= {"/teacher/tokenizer", "/teacher/proposal"}
            if template.name == "teachers":
                known = {"/teachers/general/model", "/student/model", "/data/train/0/path"}
            assert pointers <= known
