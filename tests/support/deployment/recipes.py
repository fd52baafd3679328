"""The files of ``examples/deploy``, and the documented fields of objects of others.

Kubernetes' own objects are checked by the schemas of kubernetes-validate, if it is installed. Those
of KEDA, Kueue and JobSet are not among them: the schemas here have the fields that their documents
name and our files use, and allow no other.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from bench.support.paths import ROOT

FOLDER = ROOT / "examples" / "deploy"
Object = dict[str, Any]


def read_objects(file: Path) -> list[Object]:
    """Every document of a YAML file."""
    # The loader in C is ten times as fast, and every worker of the tests reads these files.
    documents = yaml.load_all(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return [each for each in documents if each]


def list_files(folder: str, pattern: str = "*") -> list[Path]:
    """Return the files of one recipe, sorted."""
    return sorted(path for path in (FOLDER / folder).glob(pattern) if path.is_file())


def list_cluster_objects() -> list[Object]:
    """Every object of the recipe for Kubernetes."""
    files = [path for path in list_files("kubernetes") if path.name != "kustomization.yaml"]
    return [each for file in files for each in read_objects(file)]


def list_pod_specs() -> dict[str, Object]:
    """Name of a workload -> the specification of its pods."""
    objects = list_cluster_objects()
    found = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in objects
        if each["kind"] in ("Deployment", "StatefulSet", "Job")
    }
    sets = {
        each["metadata"]["name"]: job["template"]["spec"]["template"]["spec"]
        for each in objects
        if each["kind"] == "JobSet"
        for job in each["spec"]["replicatedJobs"]
    }
    return found | sets


def list_composed() -> dict[str, Object]:
    """Name of a service -> its description, of both Compose files."""
    found: dict[str, Object] = {}
    for file in list_files("compose", "*.yml"):
        found |= read_objects(file)[0]["services"]
    return found


def list_commands() -> Iterator[list[str]]:
    """Every command ``kd ...``, ``python -m ...`` or ``torchrun ...`` that a recipe runs."""
    for pod in list_pod_specs().values():
        for container in pod["containers"]:
            yield from (container[name] for name in ("args", "command") if name in container)
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if "exec" in container.get(probe, {}):
                    yield container[probe]["exec"]["command"]
    for service in list_composed().values():
        yield service["command"]
        yield service["healthcheck"]["test"][1:]
    scripts = [*list_files("slurm"), *list_files("skypilot")]
    for script in scripts:
        for match in re.finditer(r"bin/(kd .*?)(?: && .*)?$", script.read_text(), re.MULTILINE):
            yield shlex.split(match[1])


def list_settings() -> set[str]:
    """Every variable ``KD_...`` that a recipe sets or reads."""
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    return set(re.findall(r"\bKD_[A-Z_]+\b", "".join(path.read_text() for path in files)))


# ---------------------------------------------------------------------- schemas of others

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}


def _object(required: list[str], **properties: Any) -> Object:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _list(items: Any) -> Object:
    return {"type": "array", "items": items, "minItems": 1}


def _kind(spec: Object) -> Object:
    metadata = _object(["name"], name=_TEXT, namespace=_TEXT, labels={"type": "object"})
    return _object(["spec"], apiVersion=_TEXT, kind=_TEXT, metadata=metadata, spec=spec)


#: https://keda.sh/docs/latest/reference/scaledobject-spec, and .../scalers/prometheus for the
#: metadata of the trigger; the behaviour is that of Kubernetes' HorizontalPodAutoscaler v2.
SCALED_OBJECT = _kind(
    _object(
        ["scaleTargetRef", "triggers"],
        scaleTargetRef=_object(["name"], name=_TEXT, kind=_TEXT, apiVersion=_TEXT),
        minReplicaCount=_COUNT,
        maxReplicaCount=_COUNT,
        pollingInterval=_COUNT,
        cooldownPeriod=_COUNT,
        advanced=_object(
            [],
            horizontalPodAutoscalerConfig=_object(
                [],
                behavior=_object(
                    [],
                    scaleDown=_object(
                        [],
                        stabilizationWindowSeconds={**_COUNT, "maximum": 3600},
                        policies=_list(
                            _object(
                                ["type", "value", "periodSeconds"],
                                type={"enum": ["Pods", "Percent"]},
                                value=_COUNT,
                                periodSeconds={**_COUNT, "maximum": 1800},
                            )
                        ),
                    ),
                ),
            ),
        ),
        triggers=_list(
            _object(
                ["type", "metadata"],
                type={"const": "prometheus"},
                metadata=_object(
                    ["serverAddress", "query", "threshold"],
                    serverAddress=_TEXT,
                    query=_TEXT,
                    threshold=_TEXT,
                ),
            )
        ),
    )
)

#: https://kueue.sigs.k8s.io/docs/reference/kueue.v1beta1
_QUOTA = _object(["name", "nominalQuota"], name=_TEXT, nominalQuota=_TEXT)
OTHERS: dict[tuple[str, str], Object] = {
    ("keda.sh/v1alpha1", "ScaledObject"): SCALED_OBJECT,
    ("kueue.x-k8s.io/v1beta1", "ResourceFlavor"): _kind(
        _object([], nodeLabels={"type": "object", "additionalProperties": _TEXT})
    ),
    ("kueue.x-k8s.io/v1beta1", "ClusterQueue"): _kind(
        _object(
            ["resourceGroups"],
            namespaceSelector=_object([], matchLabels={"type": "object"}),
            resourceGroups=_list(
                _object(
                    ["coveredResources", "flavors"],
                    coveredResources=_list(_TEXT),
                    flavors=_list(
                        _object(["name", "resources"], name=_TEXT, resources=_list(_QUOTA))
                    ),
                )
            ),
        )
    ),
    #: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): _kind(
        _object(
            ["replicatedJobs"],
            failurePolicy=_object(["maxRestarts"], maxRestarts=_COUNT),
            network=_object(
                [],
                enableDNSHostnames={"type": "boolean"},
                publishNotReadyAddresses={"type": "boolean"},
            ),
            replicatedJobs=_list(
                _object(
                    ["name", "replicas", "template"],
                    name=_TEXT,
                    replicas=_COUNT,
                    template=_object(["spec"], spec={"type": "object"}),
                )
            ),
        )
    ),
    ("kueue.x-k8s.io/v1beta1", "LocalQueue"): _kind(_object(["clusterQueue"], clusterQueue=_TEXT)),
}
