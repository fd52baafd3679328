"""The recipes of ``examples/deploy`` against the code: commands, settings, queues, images, metrics.

None of them was run on a cluster here. Kubernetes' own objects are checked by the schemas of
kubernetes-validate, those of KEDA, Kueue and JobSet by their documented fields.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.support.paths import ROOT
from kd.config.jobfile import load_config
from kd.config.kinds import list_stage_names
from kd.preflight.problems import Folders, find_problems
from services.api.answers.prometheus import METRICS
from services.settings import Settings
from tests.support.deployment.recipes import (
    FOLDER,
    OTHERS,
    list_cluster_objects,
    list_commands,
    list_composed,
    list_files,
    list_pod_specs,
    list_settings,
    read_objects,
)
from tests.support.images import PROJECT, STAGES_OF_IMAGE, rests, run_python, seconds, whole

PAGES = ("docs/how-to/several-hosts.md", "docs/how-to/kubernetes.md")
SETTINGS = {f"KD_{name.upper()}" for name in Settings.model_fields}
#: The schemas of this version of Kubernetes are used, if kubernetes-validate has them.
KUBERNETES = "1.33.0"
OBJECTS = list_cluster_objects()
NATIVE = [each for each in OBJECTS if (each["apiVersion"], each["kind"]) not in OTHERS]


def name_of(each: Any) -> str:
    return f"{each['kind']}-{each['metadata']['name']}" if isinstance(each, dict) else str(each)


def test_a_page_names_every_file() -> None:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert [path.name for path in files if path.name not in text] == []
    named = set(re.findall(r"examples/deploy/[\w./-]+\w", text))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("each", NATIVE, ids=name_of)
def test_an_object_of_kubernetes_suits_its_schema(each: dict[str, Any]) -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="needs kubernetes-validate, which has the schemas"
    )
    validator.validate(each, KUBERNETES, strict=True)


def test_the_jobs_of_a_set_suit_the_schema_of_jobs() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    (found,) = [each for each in OBJECTS if each["kind"] == "JobSet"]
    for each in found["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": each["name"]}}
        validator.validate(job | each["template"], KUBERNETES, strict=True)


@pytest.mark.parametrize("each", [each for each in OBJECTS if each not in NATIVE], ids=name_of)
def test_an_object_of_others_has_documented_fields(each: dict[str, Any]) -> None:
    # Imported here, because its grammars of addresses take a second, which each process would pay.
    from jsonschema import Draft202012Validator

    schema = OTHERS[each["apiVersion"], each["kind"]]
    Draft202012Validator.check_schema(schema)
    problems = [problem.message for problem in Draft202012Validator(schema).iter_errors(each)]
    assert problems == []
    misspelt = {**each, "spec": {**each["spec"], "replicaCount": 1}}
    assert not Draft202012Validator(schema).is_valid(misspelt)


@pytest.mark.parametrize(
    "words", [pytest.param(each, id=" ".join(each)) for each in list_commands()]
)
def test_every_command_is_one_of_ours(words: list[str]) -> None:
    if words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None
        assert words[3:] in (["api"], ["worker"])
    elif words[0] == "torchrun":
        # Imported here, because torch takes seconds, which each process would pay.
        from torch.distributed.run import get_args_parser

        found = get_args_parser().parse_args(words[1:])
        assert (found.module, found.training_script) == (True, "kd.rank")
        file, *settings = found.training_script_args
        job = load_config(ROOT / file, [each.removeprefix("--set=") for each in settings])
        assert job.resources.devices == int(found.nnodes) * int(found.nproc_per_node)
        assert find_problems(job, Folders(ROOT, None)) == []
    elif words[0] == "kd":
        module, function = PROJECT["scripts"]["kd"].split(":")
        program = f"import sys; sys.argv[0] = 'kd'; from {module} import {function}; {function}()"
        done = run_python(["-c", program, *words[1:], "--help"])
        assert done.returncode == 0, done.stderr
    else:
        assert words[0] in ("valkey-server", "sh")
    if "--queues" in words:
        assert set(words[words.index("--queues") + 1].split(",")) == set(list_stage_names("worker"))


def test_every_setting_is_one_of_ours() -> None:
    assert list_settings() - SETTINGS == set()
    assert {"KD_REDIS_URL", "KD_REDIS_CA_FILE", "KD_REDIS_PASSWORD_FILE"} <= list_settings()


def test_every_image_is_one_that_the_project_builds() -> None:
    images = {
        container["image"] for pod in list_pod_specs().values() for container in pod["containers"]
    } | {service["image"] for service in list_composed().values()}
    ours = {image for image in images if "potstill" in image}
    assert images - ours == {"valkey/valkey:9.1-alpine"}
    for image in ours:
        registry, _, rest = image.rpartition("/")
        name, _, tag = rest.partition(":")
        assert name.removeprefix("potstill-") in STAGES_OF_IMAGE
        assert tag in (PROJECT["version"], "${POTSTILL_TAG}")
        assert registry in ("registry.example.org", "${POTSTILL_REGISTRY}")
    example = (FOLDER / "compose" / "hosts.env.example").read_text()
    assert f"POTSTILL_TAG={PROJECT['version']}\n" in example
    text = (FOLDER / "skypilot" / "worker.yaml").read_text()
    assert f"POTSTILL_VERSION: {PROJECT['version']}\n" in text


@pytest.mark.parametrize("name", list_pod_specs())
def test_a_pod_is_unprivileged_and_cannot_write_to_its_root(name: str) -> None:
    pod = list_pod_specs()[name]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == (999 if name == "redis" else 10001)
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        places = {mount["mountPath"] for mount in container["volumeMounts"]}
        if name != "redis":
            assert {"/data", "/models", "/tmp"} <= places
            variables = dict(rest.split("=", 1) for rest in _environment(whole("api")))
            assert {variables["KD_HOME"], variables["HF_HOME"]} <= places


def _environment(stage: Any) -> list[str]:
    return [pair for rest in rests("ENV", stage) for pair in rest.split() if "=" in pair]


def test_a_stopped_worker_has_time_for_its_checkpoint() -> None:
    pod = list_pod_specs()["worker"]
    (grace,) = [
        each["value"]
        for each in pod["containers"][0]["env"]
        if each["name"] == "KD_STOP_GRACE_SECONDS"
    ]
    assert pod["terminationGracePeriodSeconds"] >= int(grace) + 10
    service = list_composed()["worker"]
    grace = service["environment"]["KD_STOP_GRACE_SECONDS"]
    assert seconds(service["stop_grace_period"]) >= int(grace) + 10
    script = (FOLDER / "slurm" / "workers.sbatch").read_text()
    signalled = re.search(r"--signal=TERM@(\d+)", script)
    given = re.search(r"KD_STOP_GRACE_SECONDS=(\d+)", script)
    assert signalled is not None
    assert given is not None
    assert int(signalled[1]) >= int(given[1]) + 10


def test_probes_and_selectors_meet_their_targets() -> None:
    by_kind = {(each["kind"], each["metadata"]["name"]): each for each in OBJECTS}
    for name in ("api", "worker"):
        workload = by_kind["Deployment", name]["spec"]
        labels = workload["template"]["metadata"]["labels"]
        assert workload["selector"]["matchLabels"].items() <= labels.items()
        budget = by_kind["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"]
        assert budget.items() <= labels.items()
        allowed = by_kind["NetworkPolicy", "redis"]["spec"]["ingress"][0]["from"][0]
        assert allowed["podSelector"]["matchLabels"].items() <= labels.items()
    container = list_pod_specs()["api"]["containers"][0]
    assert container["ports"][0]["containerPort"] == int(container["args"][-1])
    paths = {container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")}
    assert paths == {"/healthz", "/readyz"}
    assert by_kind["ScaledObject", "worker"]["spec"]["scaleTargetRef"]["name"] == "worker"
    queue = by_kind["Job", "austen"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert by_kind["LocalQueue", queue]["spec"]["clusterQueue"] == queue
    listed = read_objects(FOLDER / "kubernetes" / "kustomization.yaml")[0]["resources"]
    files = {path.name for path in list_files("kubernetes")}
    assert files - set(listed) == {
        "kustomization.yaml", "autoscaling.yaml", "training.yaml", "several-nodes.yaml",
    }  # fmt: skip


def test_the_scaler_asks_for_metrics_that_the_api_has() -> None:
    (scaled,) = [each for each in OBJECTS if each["kind"] == "ScaledObject"]
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    names = set(re.findall(r"\bkd_\w+", query))
    assert names <= METRICS.keys()
    for label in re.findall(r"by \((\w+)\)", query):
        assert any(label in METRICS[name].labels for name in names)


def test_the_kubernetes_page_makes_every_secret_that_a_pod_mounts() -> None:
    page = (ROOT / "docs/how-to/kubernetes.md").read_text(encoding="utf-8")
    made = set(re.findall(r"create secret generic (\S+)", page))
    mounted = set(
        re.findall(
            r"secretName: ([\w-]+)|secret: \{name: ([\w-]+)\}|^ +name: (potstill-redis-[\w-]+)$",
            "".join(path.read_text() for path in list_files("kubernetes")),
            re.MULTILINE,
        )
    )
    assert {name for names in mounted for name in names if name} == made


@pytest.mark.parametrize(
    "script",
    [*list_files("slurm"), FOLDER / "redis" / "make_certificates.sh"],
    ids=lambda p: p.name,
)
def test_a_script_is_one_that_its_shell_reads(script: Path) -> None:
    shell = script.read_text().splitlines()[0].removeprefix("#!").split("/")[-1]
    found = shutil.which(shell)
    assert found is not None
    subprocess.run([found, "-n", script], check=True)
