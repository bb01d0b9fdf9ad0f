"""The files of `deploy/`, read: which programs they run, with which settings, at which addresses.

A container's settings are those of its properties file with its variables on top, as `millrace broker` reads them.
Not here: what has to be right about them (`tests/unit/deploy`), and running them (`tests/pages/test_deployment.py`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from millrace.config import is_setting, parse_properties
from millrace.config.environment import settings_in
from support.maven import ROOT

DEPLOY: Final = ROOT / "deploy"
BASE: Final = DEPLOY / "kubernetes" / "base"
OVERLAY: Final = DEPLOY / "kubernetes" / "node-ports"
IMAGE_SETTINGS: Final = "/etc/millrace/server.properties"
METRICS: Final = "metrics.listener"


@dataclass(frozen=True, slots=True)
class Program:
    """A command line of millrace in one of the files, with the variables it gets."""

    place: str
    arguments: tuple[str, ...]
    """Without the program's own name."""
    environment: Mapping[str, str]
    file: Path | None = None
    """What is found where `--config` points to."""

    @property
    def settings(self) -> dict[str, str]:
        """Of a broker: its file, and its variables on top; without those that this millrace does not have."""
        assert self.file is not None, self.place
        given = parse_properties(self.file.read_text()) | settings_in(self.environment)
        return {name: value for name, value in given.items() if name != METRICS or is_setting(METRICS)}

    @property
    def metrics_port(self) -> int:
        assert self.file is not None, self.place
        return int(parse_properties(self.file.read_text())[METRICS].rpartition(":")[2])


def documents(path: Path) -> list[dict[str, Any]]:
    """The documents of a YAML file."""
    return documents_in(path.read_text())


def documents_in(text: str) -> list[dict[str, Any]]:
    for node in yaml.compose_all(text, yaml.SafeLoader):
        _refuse_keys_twice(node)
    return list(yaml.safe_load_all(text))


def _refuse_keys_twice(node: Any) -> None:
    """PyYAML takes the last one and says nothing."""
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value]
        twice = sorted({name for name in names if names.count(name) > 1})
        assert not twice, f"{', '.join(twice)} twice{node.start_mark}"
        for _, value in node.value:
            _refuse_keys_twice(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_keys_twice(value)


def compose() -> dict[str, Any]:
    (document,) = documents(DEPLOY / "compose.yaml")
    return document


def brokers() -> dict[str, Program]:
    """The brokers of the compose file, by the name of their service."""
    return {name: program for name, program in composed().items() if program.arguments[0] == "broker"}


def composed() -> dict[str, Program]:
    """What the services of the compose file run that have our image."""
    found = {}
    for name, service in compose()["services"].items():
        if service["image"].startswith("millrace:"):
            arguments = tuple(service["command"])
            file = DEPLOY / "server.properties" if "--config" in arguments else None
            found[name] = Program(f"compose.yaml, {name}", arguments, service.get("environment", {}), file)
    return found


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Containerfile, each with its text in one line."""
    lines = (line for line in (DEPLOY / "Containerfile").read_text().splitlines() if not line.startswith("#"))
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def instruction(name: str) -> str:
    """The last one of this name: that of the image that is made."""
    return [rest for each, rest in instructions() if each == name][-1]


def image_program() -> Program:
    """What the image runs that is told nothing."""
    assert json.loads(instruction("ENTRYPOINT")) == ["millrace"]
    return Program("Containerfile", tuple(json.loads(instruction("CMD"))), {}, DEPLOY / "server.properties")


def unit_lines() -> list[tuple[str, str]]:
    """The directives of the systemd unit, which may stand there more than once."""
    lines = (DEPLOY / "systemd" / "millrace-broker.service").read_text().splitlines()
    return [(name, value) for name, equals, value in (line.partition("=") for line in lines) if equals]


def unit_program() -> Program:
    ((_, command),) = [line for line in unit_lines() if line[0] == "ExecStart"]
    program, *arguments = shlex.split(command)
    assert program == "/opt/millrace/bin/millrace"
    return Program("millrace-broker.service", tuple(arguments), {}, DEPLOY / "systemd" / "server.properties")


def manifests(folder: Path = BASE) -> list[dict[str, Any]]:
    """The resources that a kustomization names itself."""
    (kustomization,) = documents(folder / "kustomization.yaml")
    files = [folder / name for name in kustomization["resources"]]
    return [resource for file in files if file.is_file() for resource in documents(file)]


def pod_specs(resources: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every workload with the specification of its pods."""
    for resource in resources:
        if resource["kind"] in {"StatefulSet", "Deployment"}:
            yield resource, resource["spec"]["template"]["spec"]


def environment_of(workload: Mapping[str, Any], container: Mapping[str, Any], index: int) -> dict[str, str]:
    """The variables of a container in the pod of this number: a `$(NAME)` is only what stands before it."""
    pod = f"{workload['metadata']['name']}-{index}"
    fields = {
        "metadata.name": pod,
        "metadata.namespace": "millrace",
        "metadata.labels['apps.kubernetes.io/pod-index']": str(index),
    }
    values: dict[str, str] = {}
    for variable in container.get("env", ()):
        if "value" in variable:
            value = _expanded(variable["value"], values)
        else:
            value = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        values[variable["name"]] = value
    return values


def _expanded(text: str, known: Mapping[str, str]) -> str:
    return re.sub(r"\$\(([^)]+)\)", lambda found: known.get(found[1], found[0]), text)


def pod_programs(resources: list[dict[str, Any]]) -> list[Program]:
    """What the pods run that have our image; every broker by itself."""
    found = []
    for workload, pod in pod_specs(resources):
        first = workload["spec"].get("ordinals", {}).get("start", 0)
        for container in pod["containers"]:
            if not re.fullmatch(r"millrace(:.*)?", container["image"]):
                continue
            arguments = tuple(container["args"])
            file = BASE / "server.properties" if "--config" in arguments else None
            for index in range(first, first + workload["spec"]["replicas"]):
                place = f"{workload['kind']} {workload['metadata']['name']}-{index}"
                found.append(Program(place, arguments, environment_of(workload, container, index), file))
    return found
