"""The files of `deploy/` fit together, and fit this millrace: commands, settings, ports, users, versions, probes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from millrace import __version__
from millrace.cli.root import NOUNS, app
from millrace.config import BrokerConfig, parse_properties
from support import deployment
from support.deployment import BASE, DEPLOY, IMAGE_SETTINGS, OVERLAY, ROOT, Program

OURS = f"millrace:{__version__}"
PROBES = {"/livez", "/readyz"}


def overlay() -> list[dict[str, Any]]:
    """The resources with the second listener, as kustomize makes them."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here, which has kustomize in it")
    done = subprocess.run(["kubectl", "kustomize", str(OVERLAY)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return deployment.documents_in(done.stdout)


def programs() -> list[Program]:
    return [
        *deployment.composed().values(),
        *deployment.pod_programs(deployment.manifests()),
        deployment.image_program(),
        deployment.unit_program(),
    ]


def broker_programs() -> list[Program]:
    return [program for program in programs() if program.arguments[0] == "broker"]


def named(kind: str, name: str, resources: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    resources = deployment.manifests() if resources is None else resources
    (found,) = [each for each in resources if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def listeners(program: Program) -> dict[str, tuple[int, str, int]]:
    """By name: the port that is listened on, the host and the port that are advertised."""
    config = BrokerConfig(program.settings)
    told = {listener.name: listener for listener in config.advertised_listeners}
    return {each.name: (each.port, told[each.name].host, told[each.name].port) for each in config.listeners}


# Every file


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_yaml_is_read_and_tidy(path: Path) -> None:
    assert deployment.documents(path)
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        assert line == line.rstrip() and "\t" not in line, f"{path}:{number}"


def test_a_key_that_stands_twice_is_found() -> None:
    with pytest.raises(AssertionError, match="b twice"):
        deployment.documents_in("a: [{b: 1, c: 2, b: 3}]")


@pytest.mark.parametrize("program", programs(), ids=lambda program: program.place)
def test_every_command_is_one(program: Program) -> None:
    noun, *rest = program.arguments
    if noun not in NOUNS:
        assert noun == "console"
        pytest.skip("`millrace console` is not part of this millrace")
    root = get_command(app)
    command = root.get_command(root.make_context("millrace", [noun, *rest]), noun)
    context = command.make_context(noun, list(rest))
    assert not context.args


@pytest.mark.parametrize("program", broker_programs(), ids=lambda program: program.place)
def test_every_setting_exists_and_the_file_is_the_one_that_is_named(program: Program) -> None:
    config = BrokerConfig(program.settings)
    assert not config.ignored
    assert config.log_dirs == ("/var/lib/millrace/data",)
    assert program.arguments == ("broker", "--config", IMAGE_SETTINGS)


def test_images_have_versions() -> None:
    services = [service["image"] for service in deployment.compose()["services"].values()]
    pods = [each["image"] for _, pod in deployment.pod_specs(deployment.manifests()) for each in pod["containers"]]
    bases = [rest.split()[0] for name, rest in deployment.instructions() if name == "FROM"]
    strangers = {image for image in (*services, *pods, *bases) if image not in (OURS, "millrace")}
    assert len(strangers) == 2
    for image in strangers:
        assert re.fullmatch(r"docker\.io/library/[a-z]+:\d+\.\d+\.\d+(-[a-z-]+)?", image), image
    (kustomization,) = deployment.documents(BASE / "kustomization.yaml")
    assert [each["newTag"] for each in kustomization["images"]] == [__version__]


def test_zookeeper_is_the_version_that_the_tests_run_with() -> None:
    pyspark = pytest.importorskip("pyspark", reason="ZooKeeper's jars come with pyspark")
    (jar,) = Path(pyspark.__file__).parent.glob("jars/zookeeper-[0-9]*.jar")
    image = deployment.compose()["services"]["zookeeper"]["image"]
    assert image == f"docker.io/library/zookeeper:{jar.stem.removeprefix('zookeeper-')}"
    (container,) = named("StatefulSet", "zookeeper")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == image


def test_the_page_names_files_that_are_there() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    paths = set(re.findall(r"\bdeploy/[A-Za-z0-9_./-]*[A-Za-z0-9]", page))
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    assert set(re.findall(r"\bmillrace:(\d[\w.]*)", page)) == {__version__}


# The image


def test_the_image_is_made_of_what_it_may_see() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignore[1] == "*"
    seen = {line[1:] for line in ignore if line.startswith("!")}
    copies = [rest.split()[:-1] for name, rest in deployment.instructions() if name == "COPY" and "--from" not in rest]
    copied = {source.removeprefix("./") for sources in copies for source in sources}
    assert copied == seen
    assert all((ROOT / source).exists() for source in copied)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for file in (declared["project"]["readme"], *declared["project"]["license-files"]):
        assert file in copied, "the package is not built without it"


def test_the_image_has_what_the_console_needs() -> None:
    """If that is an extra of the package, it has to be asked for."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked_for = any("[console]" in rest for name, rest in deployment.instructions() if name == "RUN")
    assert ("console" in extras) == asked_for


def test_the_image_does_not_run_as_root() -> None:
    user, group = deployment.instruction("USER").split(":")
    assert int(user) >= 1000 and int(group) >= 1000
    order = [name for name, _ in deployment.instructions()]
    assert "RUN" not in order[order.index("USER") :]
    for workload, pod in deployment.pod_specs(deployment.manifests()):
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] > 0, workload["metadata"]["name"]
        if pod["containers"][0]["image"] == "millrace":
            assert (context["runAsUser"], context["runAsGroup"]) == (int(user), int(group))
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_image_lays_its_data_into_the_volume_and_opens_the_ports_it_listens_on() -> None:
    program = deployment.image_program()
    (volume,) = json.loads(deployment.instruction("VOLUME"))
    assert program.settings["log.dirs"].startswith(f"{volume}/")
    ports = {listened for listened, _, _ in listeners(program).values()} | {program.metrics_port}
    assert {int(port) for port in deployment.instruction("EXPOSE").split()} == ports
    assert deployment.instruction("COPY") == f"deploy/server.properties {IMAGE_SETTINGS}"
    check = deployment.instruction("HEALTHCHECK")
    assert re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", check) == [(str(program.metrics_port), "/readyz")]


def test_the_image_alone_has_a_door_for_the_host_and_one_for_its_network() -> None:
    found = listeners(deployment.image_program())
    assert found["HOST"] == (9092, "localhost", 9092)
    assert found["INTERNAL"] == (29092, "0.0.0.0", 29092)  # which a broker advertises as its host name


# The compose file


def test_brokers_of_the_compose_file_are_reached_from_both_sides() -> None:
    file, brokers = deployment.compose(), deployment.brokers()
    assert len(brokers) == 3
    published = []
    for name, program in brokers.items():
        service = file["services"][name]
        found = listeners(program)
        host_port = found["HOST"][0]
        assert found["HOST"] == (host_port, "localhost", host_port)
        assert found["INTERNAL"] == (29092, name, 29092)
        assert service["hostname"] == name
        assert service["ports"][0] == f"127.0.0.1:{host_port}:{host_port}"
        assert service["ports"][1].endswith(f":{program.metrics_port}")
        published += [port.rpartition(":")[0] for port in service["ports"]]
        assert BrokerConfig(program.settings).inter_broker_listener == "INTERNAL"
    published += [port.rpartition(":")[0] for port in file["services"]["console"]["ports"]]
    assert len(set(published)) == len(published)
    assert all(address.startswith("127.0.0.1:") for address in published), "open to nobody else by default"
    assert len({BrokerConfig(program.settings).broker_id for program in brokers.values()}) == 3


def test_the_compose_file_keeps_data_in_volumes_of_their_own() -> None:
    file = deployment.compose()
    (data,) = json.loads(deployment.instruction("VOLUME"))
    mounted = {name: file["services"][name]["volumes"] for name in deployment.brokers()}
    assert mounted == {name: [f"{name}:{data}"] for name in mounted}
    assert set(mounted) < set(file["volumes"])
    zookeeper = dict(
        volume.split(":")[1::-1] for volume in file["services"]["zookeeper"]["volumes"] if not volume.startswith(".")
    )
    config = parse_properties((DEPLOY / "zookeeper" / "zoo.cfg").read_text())
    assert set(zookeeper) == {config["dataDir"], config["dataLogDir"]}
    assert set(zookeeper.values()) < set(file["volumes"])


def test_services_of_the_compose_file_wait_for_each_other_and_find_each_other() -> None:
    services = deployment.compose()["services"]
    config = parse_properties((DEPLOY / "zookeeper" / "zoo.cfg").read_text())
    assert "./zookeeper/zoo.cfg:/conf/zoo.cfg:ro" in services["zookeeper"]["volumes"]
    for name, program in deployment.brokers().items():
        assert program.settings["zookeeper.connect"] == f"zookeeper:{config['clientPort']}/millrace"
        assert services[name]["depends_on"] == {"zookeeper": {"condition": "service_healthy"}}
        (address,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", services[name]["healthcheck"]["test"][-1])
        assert address == (str(program.metrics_port), "/readyz")
    console = deployment.composed()["console"].arguments
    addresses = console[console.index("--bootstrap") + 1].split(",")
    assert addresses == [f"{name}:29092" for name in deployment.brokers()]
    port = console[console.index("--listen") + 1].rpartition(":")[2]
    assert services["console"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert set(services["console"]["depends_on"]) == set(deployment.brokers())


@pytest.mark.parametrize("path", [DEPLOY / "zookeeper" / "zoo.cfg", BASE / "zoo.cfg"], ids=["compose", "kubernetes"])
def test_zookeeper_grants_the_session_that_brokers_ask_for(path: Path) -> None:
    config = parse_properties(path.read_text())
    wanted = BrokerConfig({}).get_int("zookeeper.session.timeout.ms")
    assert int(config["minSessionTimeout"]) <= wanted <= int(config["maxSessionTimeout"])
    assert config["4lw.commands.whitelist"] == "srvr", "what `zkServer.sh status` asks"


# Kubernetes


@pytest.mark.parametrize("made", ["base", "node-ports"])
def test_what_points_at_pods_finds_them(made: str) -> None:
    resources = deployment.manifests() if made == "base" else overlay()
    pods = {
        workload["metadata"]["name"]: (workload["spec"]["template"]["metadata"]["labels"], pod)
        for workload, pod in deployment.pod_specs(resources)
    }
    for workload, _ in deployment.pod_specs(resources):
        labels, _ = pods[workload["metadata"]["name"]]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        if workload["kind"] == "StatefulSet":
            assert named("Service", workload["spec"]["serviceName"], resources)["spec"]["clusterIP"] == "None"
            budget = named("PodDisruptionBudget", workload["metadata"]["name"], resources)
            assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
            assert budget["spec"]["maxUnavailable"] == 1
    for service in (each for each in resources if each["kind"] == "Service"):
        selector = dict(service["spec"]["selector"])
        one = selector.pop("statefulset.kubernetes.io/pod-name", None)
        chosen = [
            pod for name, (labels, pod) in pods.items()
            if (one.rpartition("-")[0] == name if one else selector.items() <= labels.items())
        ]  # fmt: skip
        assert len(chosen) == 1, service["metadata"]["name"]
        ports = {port["name"]: port["containerPort"] for each in chosen[0]["containers"] for port in each["ports"]}
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            assert target in ports or target in ports.values(), service["metadata"]["name"]


def test_pods_listen_where_they_are_probed() -> None:
    pods = {workload["metadata"]["name"]: pod for workload, pod in deployment.pod_specs(deployment.manifests())}
    (broker,) = pods["broker"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in broker["ports"]}
    program = next(each for each in deployment.pod_programs(deployment.manifests()) if each.file)
    assert ports["metrics"] == program.metrics_port
    assert ports["internal"] == listeners(program)["INTERNAL"][0]
    probes = {name: broker[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {probe["path"] for probe in probes.values()} == PROBES
    assert probes["readinessProbe"]["path"] == "/readyz"
    assert probes["livenessProbe"]["path"] == "/livez", "a broker that waits for others is not to be killed"
    assert {probe["port"] for probe in probes.values()} == {"metrics"}
    annotations = named("StatefulSet", "broker")["spec"]["template"]["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) == program.metrics_port
    (console,) = pods["console"]["containers"]
    assert console["args"][-2:] == ["--listen", f"0.0.0.0:{console['ports'][0]['containerPort']}"]


def test_every_pod_is_advertised_by_its_own_name() -> None:
    programs = [each for each in deployment.pod_programs(deployment.manifests()) if each.file]
    for number, program in enumerate(programs, start=1):
        assert BrokerConfig(program.settings).broker_id == number
        assert listeners(program) == {"INTERNAL": (9092, f"broker-{number}.brokers.millrace.svc.cluster.local", 9092)}
    assert len(programs) == int(programs[0].settings["default.replication.factor"]) == 3
    bootstrap = named("Service", "millrace")["spec"]["ports"][0]["port"]
    (console,) = [each for each in deployment.pod_programs(deployment.manifests()) if each.arguments[0] == "console"]
    assert f"millrace:{bootstrap}" in console.arguments


def test_the_second_listener_is_advertised_by_the_port_of_the_nodes() -> None:
    resources = overlay()
    programs = [each for each in deployment.pod_programs(resources) if each.file]
    for number, program in enumerate(programs, start=1):
        found = listeners(program)
        assert found["INTERNAL"] == (9092, f"broker-{number}.brokers.millrace.svc.cluster.local", 9092)
        service = named("Service", f"broker-{number}-external", resources)["spec"]
        assert service["selector"] == {"statefulset.kubernetes.io/pod-name": f"broker-{number}"}
        (port,) = service["ports"]
        assert found["EXTERNAL"] == (9094, "nodes.example", port["nodePort"])
        assert 30000 <= port["nodePort"] <= 32767
    assert len(programs) == 3
    assert BrokerConfig(programs[0].settings).inter_broker_listener == "INTERNAL"


def test_zookeepers_of_the_ensemble_find_each_other() -> None:
    config = parse_properties((BASE / "zoo.cfg").read_text())
    workload = named("StatefulSet", "zookeeper")["spec"]
    pods = [f"zookeeper-{workload['ordinals']['start'] + number}" for number in range(workload["replicas"])]
    servers = {name: value for name, value in config.items() if name.startswith("server.")}
    service = f"{workload['serviceName']}.millrace.svc.cluster.local"
    assert servers == {f"server.{pod.rpartition('-')[2]}": f"{pod}.{service}:2888:3888;2181" for pod in pods}
    connect = parse_properties((BASE / "server.properties").read_text())["zookeeper.connect"]
    assert connect == ",".join(f"{pod}.{workload['serviceName']}:2181" for pod in pods) + "/millrace"
    mounted = {each["mountPath"] for each in workload["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert mounted == {"/conf/zoo.cfg", config["dataDir"], config["dataLogDir"]}


def test_pods_mount_what_there_is() -> None:
    (kustomization,) = deployment.documents(BASE / "kustomization.yaml")
    maps = {each["name"]: each["files"] for each in kustomization["configMapGenerator"]}
    assert all((BASE / file).is_file() for files in maps.values() for file in files)
    for workload, pod in deployment.pod_specs(deployment.manifests()):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
        for mount in pod["containers"][0]["volumeMounts"]:
            assert mount["name"] in volumes.keys() | claims
        for volume in volumes.values():
            assert "configMap" not in volume or volume["configMap"]["name"] in maps


# systemd


def unit_copy(tmp_path: Path) -> Path:
    """The unit with a program that is there: systemd looks for it."""
    text = (DEPLOY / "systemd" / "millrace-broker.service").read_text()
    copy = tmp_path / "millrace-broker.service"
    copy.write_text(text.replace("/opt/millrace/bin/millrace", "/bin/true"))
    return copy


def analyzed(*arguments: str) -> str:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    done = subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    assert analyzed("verify", "--man=no", str(unit_copy(tmp_path))) == ""


def test_systemd_calls_the_unit_hardened(tmp_path: Path) -> None:
    told = analyzed("security", "--offline=true", "--no-pager", str(unit_copy(tmp_path)))
    (exposure,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", told)
    assert float(exposure) <= 1.5


def test_the_unit_may_write_where_its_data_lies() -> None:
    unit = dict(deployment.unit_lines())
    assert deployment.unit_program().settings["log.dirs"].startswith(f"/var/lib/{unit['StateDirectory']}/")
    (user,) = re.findall(r"(?m)^u (\S+)", (DEPLOY / "systemd" / "millrace.sysusers").read_text())
    assert unit["User"] == unit["Group"] == user
