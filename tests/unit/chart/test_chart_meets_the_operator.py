"""The chart and the code agree on settings, images, ports, labels and versions."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields

from sluice.api import parse_documents, parse_job
from sluice_operator import settings
from sluice_operator.plan import Images
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.job_defaults import NO_DEFAULTS
from sluice_operator.plan.manifests.engine_pool import pool_objects
from tests.helm import CHART, environment, find_object, load, objects
from tests.tools import ROOT
from tests.unit.operator.pool_world import make_pool

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ELSEWHERE = {"SLUICE_LOG_FORMAT"}  # read by sluice.telemetry.logs


class Recorder(Mapping[str, str]):
    """Variables, and those of them that were asked for."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.variables, self.read_names = variables, set[str]()

    def __getitem__(self, name: str) -> str:
        self.read_names.add(name)
        return self.variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.variables)

    def __len__(self) -> int:
        return len(self.variables)


def test_the_operator_reads_what_the_chart_sets_and_the_chart_sets_what_it_reads() -> None:
    container = find_object(objects(), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    variables = Recorder(
        {variable["name"]: variable.get("value", "x") for variable in container["env"]}
    )
    settings.read(variables)
    assert variables.variables.keys() - ELSEWHERE <= variables.read_names
    assert variables.read_names - variables.variables.keys() <= {
        "SLUICE_BIND",
        "SLUICE_JOB_DEFAULTS",
    }, "all interfaces; none"


def test_values_arrive_in_the_operators_settings() -> None:
    elsewhere = {"SLUICE_NAMESPACE": "x", "SLUICE_IDENTITY": "y", "SLUICE_JOB_DEFAULTS": ""}
    config = settings.read(environment(objects("everything")) | elsewhere)
    assert (config.lease_name, config.lease_seconds, config.workers) == ("elected", 30, 16)
    assert (config.probe_seconds, config.resync_seconds, config.http_port) == (2.5, 60, 9090)
    assert settings.read(environment(objects("namespaces"))).namespaces == ("team-a", "team-b")


def test_default_images_are_those_of_the_plan() -> None:
    assert settings.read(environment(objects())).images == Images()


def test_every_image_of_the_plan_is_a_value() -> None:
    images = load((CHART / "values.yaml").read_text())["images"]
    assert {field.name for field in fields(Images)} <= images.keys()


def test_ports_and_labels_are_those_of_the_plan() -> None:
    manifests = objects("everything")
    ports = {
        port["port"]
        for port in find_object(manifests, "NetworkPolicy")["spec"]["egress"][1]["ports"]
    }
    assert ports == {names.PORTS["rendezvous"], names.PORTS["buffer"]}
    monitor = find_object(manifests, "PodMonitor", "trainer-of-models-jobs")["spec"]
    assert monitor["selector"]["matchExpressions"] == [
        {"key": names.LABEL_JOB, "operator": "Exists"}
    ]
    endpoint, of_engines = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in names.PORTS
    keep, drop, path, *relabelings = of_engines["relabelings"]
    assert (drop["action"], drop["regex"]) == ("drop", ".+")
    assert (keep["action"], keep["regex"]) == ("keep", "rollout")
    assert path == {"sourceLabels": ["__metrics_path__"], "targetLabel": "metrics_path"}
    assert relabelings == endpoint["relabelings"]
    assert monitor["jobLabel"] == names.LABEL_JOB
    labels = [names.LABEL_ROLE, names.LABEL_REPLICA]
    sources = [relabeling["sourceLabels"] for relabeling in endpoint["relabelings"]]
    prefix = "__meta_kubernetes_pod_label_"
    assert sources == [[prefix + label.translate(str.maketrans("./-", "___"))] for label in labels]


def test_engines_of_pools_are_found_by_the_port_and_the_labels_of_the_plan() -> None:
    manifests = objects("everything")
    to_engines = find_object(manifests, "NetworkPolicy")["spec"]["egress"][2]
    assert [port["port"] for port in to_engines["ports"]] == [names.PORTS["http"]]
    pods = {"matchExpressions": [{"key": names.LABEL_POOL, "operator": "Exists"}]}
    assert to_engines["to"] == [{"namespaceSelector": {}, "podSelector": pods}]
    monitor = find_object(manifests, "PodMonitor", "trainer-of-models-pools")["spec"]
    assert monitor["selector"]["matchExpressions"] == [
        {"key": names.LABEL_POOL, "operator": "Exists"},
        {"key": names.LABEL_ROLE, "operator": "In", "values": [names.ENGINE]},
    ]
    (endpoint,) = monitor["podMetricsEndpoints"]
    (template,) = [
        manifest["spec"]["template"]
        for manifest in pool_objects(make_pool(), Images(), NO_DEFAULTS)
        if manifest["kind"] == "StatefulSet"
    ]
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert endpoint["port"] in ports


def test_chart_and_package_have_one_version() -> None:
    chart = load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == PYPROJECT["project"]["version"]
    images = load(chart["annotations"]["artifacthub.io/images"])
    listed = {image["name"]: image["image"] for image in images}
    container = find_object(objects(), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    used = {field.name: getattr(Images(), field.name) for field in fields(Images)}
    assert listed.pop("operator") == container["image"]
    assert listed == {name: image for name, image in used.items() if name != "rendezvous"}


def test_the_example_on_artifact_hub_is_a_valid_job() -> None:
    text = load((CHART / "Chart.yaml").read_text())["annotations"]["artifacthub.io/crdsExamples"]
    (document,) = parse_documents(textwrap.dedent(text.replace("- ", "  ", 1)), "Chart.yaml")
    assert parse_job(document, "Chart.yaml").metadata.name == "gsm8k"
