"""The CRD is structural, and says in CEL what pydantic says in Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.api.schema.crd import KINDS, RLENGINEPOOL, RLJOB, Kind, custom_resource_definition
from sluice.api.schema.mutability import MUTABLE
from sluice_cli.render import to_yaml

ROOT = Path(__file__).parents[3]
CRD = custom_resource_definition(RLJOB)
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
POOL = custom_resource_definition(RLENGINEPOOL)["spec"]["versions"][0]
SCHEMAS = {
    "rljobs": SCHEMA,
    "rlenginepools": POOL["schema"]["openAPIV3Schema"],
}
of_each_kind = pytest.mark.parametrize(
    "schema", [pytest.param(schema, id=kind) for kind, schema in SCHEMAS.items()]
)


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}.{key}")


@pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.plural) for kind in KINDS])
def test_the_generated_file_is_current(kind: Kind) -> None:
    file = ROOT / f"crds/sluice.dev_{kind.plural}.yaml"
    assert file.read_text() == to_yaml([custom_resource_definition(kind)]), "run `make crds`"


@of_each_kind
def test_every_node_is_structural(schema: dict[str, Any]) -> None:
    for path, node in nodes(schema):
        assert (
            "type" in node
            or node.get("x-kubernetes-int-or-string")
            or "x-kubernetes-preserve-unknown-fields" in node
        ), path
        assert not {"$ref", "$defs", "anyOf", "oneOf", "title", "const"} & node.keys(), path


@of_each_kind
def test_no_default_is_refused_by_a_bound_that_is_cut_to_a_whole_number(
    schema: dict[str, Any],
) -> None:
    """API servers compare a whole number with the whole part of a bound: 0 < 0.5 is false there."""
    for path, node in nodes(schema):
        if node.get("exclusiveMaximum"):
            assert node["maximum"] == int(node["maximum"]), path


@of_each_kind
def test_every_field_has_a_description(schema: dict[str, Any]) -> None:
    ours = [(path, node) for path, node in nodes(schema) if path.startswith((".spec", ".status"))]
    elements = (".items", ".additionalProperties")  # their list or map is described
    assert [
        path for path, node in ours if not path.endswith(elements) and not node.get("description")
    ] == []


def test_replicas_have_a_default_because_autoscalers_read_them_through_scale() -> None:
    """An API server answers GET on /scale with an error if specReplicasPath leads nowhere."""
    scale = CRD["spec"]["versions"][0]["subresources"]["scale"]
    assert scale["specReplicasPath"] == ".spec.rollout.replicas"
    rollout = SCHEMA["properties"]["spec"]["properties"]["rollout"]
    assert rollout["properties"]["replicas"]["default"] == rollout["default"]["replicas"] == 1


@of_each_kind
def test_lists_are_bounded_so_that_cel_has_a_cost(schema: dict[str, Any]) -> None:
    for path, node in nodes(schema["properties"]["spec"]):
        if node.get("type") == "array" and ".engineArgs" not in path:
            assert "maxItems" in node, path


def test_columns_are_those_that_people_expect() -> None:
    columns = [
        c["name"].upper()
        for c in CRD["spec"]["versions"][0]["additionalPrinterColumns"]
        if not c.get("priority")
    ]
    assert columns == ["STATE", "STEP", "REWARD", "LAG", "ROLLOUTS", "VERSION", "RESTARTS", "AGE"]


def test_columns_of_a_pool() -> None:
    columns = [
        column["name"].upper()
        for column in POOL["additionalPrinterColumns"]
        if not column.get("priority")
    ]
    assert columns == ["MODEL", "ENGINES", "JOBS", "TOKENS/S", "AGE"]


def test_a_pool_is_scaled_by_its_replicas() -> None:
    assert POOL["subresources"]["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }


def test_what_a_pool_cannot_change_has_a_sentence() -> None:
    rules = SCHEMAS["rlenginepools"]["x-kubernetes-validations"]
    sentences = {rule["fieldPath"]: rule["message"] for rule in rules}
    assert sentences.keys() == {".spec.model", ".spec.engine", ".spec.gpusPerReplica"}
    assert all(text.startswith("cannot be changed") for text in sentences.values())


def test_rules_are_in_the_schema() -> None:
    trainer = SCHEMA["properties"]["spec"]["properties"]["trainer"]
    rule = {
        "rule": "has(self.steps) != has(self.epochs)",
        "message": "exactly one of steps and epochs must be set",
        "fieldPath": ".steps",
    }
    assert rule in trainer["x-kubernetes-validations"]


def test_each_change_that_the_operator_refuses_the_api_server_refuses_first() -> None:
    """Each part of the spec that cannot change has a rule, and no rule covers a part that can."""
    rules = SCHEMA["x-kubernetes-validations"]
    frozen = {rule["fieldPath"].removeprefix(".spec.") for rule in rules}
    parts = {path.removeprefix(".spec.") for path, _ in nodes(SCHEMA) if path.startswith(".spec.")}
    for part in parts - {"rollout"}:
        within = {*MUTABLE} & {*prefixes(part)}
        assert bool(within) != bool(frozen & {*prefixes(part)}), part


def prefixes(path: str) -> list[str]:
    names = path.split(".")
    return [".".join(names[: count + 1]) for count in range(len(names))]


@of_each_kind
def test_the_default_of_an_object_holds_those_of_its_fields(schema: dict[str, Any]) -> None:
    """Servers apply an object's rules to its default as it is written, before they fill it in."""
    for path, node in nodes(schema["properties"]["spec"]):
        if isinstance(node.get("default"), dict):
            own = {
                name: child["default"]
                for name, child in node["properties"].items()
                if "default" in child
            }
            assert node["default"] == own, path
