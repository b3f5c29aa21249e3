"""CustomResourceDefinitions of RLJob and RLEnginePool, from their models.

The schema is structural, with defaults, CEL rules, printer columns and subresources.

Kubernetes' structural schemas are a subset of what pydantic emits: references are inlined, `anyOf`
with null becomes `nullable`, and constraints that OpenAPI v3.0 writes otherwise (exclusive bounds)
are rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from sluice.api import job, pool
from sluice.api.job import ObjectMeta, RLJob, RLJobSpec
from sluice.api.pool import RLEnginePool, RLEnginePoolSpec, RLEnginePoolStatus
from sluice.api.schema.base import GROUP, VERSION, Model
from sluice.api.schema.mutability import constants, transitions
from sluice.api.schema.renamed_fields import RENAMED, RenamedField
from sluice.api.schema.rules import Rule, nested_model
from sluice.api.status import RLJobStatus

# Models by name, as JSON schema definitions name them.
Models = Mapping[str, type[Model]]
_DROPPED = ("title", "default", "const", "examples", "discriminator")
# Name, type, path and priority; columns with a priority above 0 are shown by `kubectl get -o wide`.
Column = tuple[str, str, str, int]
_AGE: Column = ("Age", "date", ".metadata.creationTimestamp", 0)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of objects, and what its definition says besides the schema of its models."""

    name: str
    plural: str
    short_name: str
    model: type[Model]
    spec: Callable[[], dict[str, Any]]
    status: Callable[[], dict[str, Any]]
    # Paths of the desired and the actual number of replicas, and of their label selector.
    scale: tuple[str, str, str]
    columns: Sequence[Column]
    # Rules over the whole object.
    rules: Callable[[], list[dict[str, str]]]
    # Paths of fields by which objects can be listed.
    selectable: Sequence[str] = ()


def custom_resource_definitions() -> list[dict[str, Any]]:
    """Return the CRDs of all kinds."""
    return [custom_resource_definition(kind) for kind in KINDS]


def custom_resource_definition(kind: Kind) -> dict[str, Any]:
    """Return the CRD of a kind."""
    schema = {
        "description": _unwrapped((kind.model.__doc__ or "").strip()),
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": _name()}},
            "spec": kind.spec(),
            "status": kind.status(),
        },
        "x-kubernetes-validations": kind.rules(),
    }
    fields = ("specReplicasPath", "statusReplicasPath", "labelSelectorPath")
    selectable = [{"jsonPath": path} for path in kind.selectable]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": dict(zip(fields, kind.scale, strict=True)),
        },
        **({"selectableFields": selectable} if selectable else {}),
        "additionalPrinterColumns": [
            {
                "name": name,
                "type": type_,
                "jsonPath": path,
                **({"priority": priority} if priority else {}),
            }
            for name, type_, path, priority in kind.columns
        ],
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": [kind.short_name],
                "categories": ["all", "ml"],
            },
            "versions": [version],
        },
    }


def _job_spec() -> dict[str, Any]:
    """The schema of a job's spec, with the old names of fields: each is refused with its new name.

    Without them an API server would drop the fields in silence, and train something else.
    """
    schema = schema_of(RLJobSpec)
    for renamed in sorted(RENAMED, key=lambda renamed: renamed.old.count(".")):
        _refuse(schema, renamed)
    return schema


def _refuse(schema: dict[str, Any], renamed: RenamedField) -> None:
    """Add the old name to the schema, with a rule against it, unless it has a new meaning."""
    *parents, last = renamed.old.split(".")
    for parent in parents:
        if parent not in schema["properties"]:
            last = parent
            break
        schema = schema["properties"][parent]
        if "properties" not in schema:
            return
    if last in schema["properties"]:
        return
    sentence = renamed.sentence(None)
    old: dict[str, Any] = {"description": f"Refused: {sentence}.", "type": renamed.type}
    free = {"x-kubernetes-preserve-unknown-fields": True} if renamed.type == "object" else {}
    schema["properties"][last] = old | free
    schema.setdefault("x-kubernetes-validations", []).append(
        {
            "rule": f"!has(self.{last})",
            "message": sentence,
            "fieldPath": f".{last}",
            "reason": "FieldValueForbidden",
        }
    )


def _name() -> dict[str, Any]:
    """Schema of metadata.name. A CRD may restrict names only by rules of a string."""
    schema = ObjectMeta.model_json_schema()["properties"]["name"]
    return {key: schema[key] for key in ("type", "pattern", "maxLength", "description")}


def _job_status() -> dict[str, Any]:
    """Schema of a job's status. A job that the operator has not seen yet is shown as pending."""
    schema = schema_of(RLJobStatus)
    schema["properties"]["state"]["default"] = "Pending"
    return schema | {"default": {"state": "Pending"}}


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the structural schema of a model, with defaults and rules of all models in it."""
    schema = model.model_json_schema(by_alias=True)
    definitions = schema.pop("$defs", {})
    models = {model.__name__: model for model in _models(Model)}
    return _structural(schema | {"_model": model.__name__}, definitions, models)


def _models(base: type[Model]) -> list[type[Model]]:
    return [model for direct in base.__subclasses__() for model in (direct, *_models(direct))]


def _structural(
    node: dict[str, Any], definitions: dict[str, Any], models: Models
) -> dict[str, Any]:
    if "description" in node:
        node = node | {"description": _unwrapped(node["description"])}
    # Structural schemas have no references: each is replaced by what it refers to.
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        extra = {k: v for k, v in node.items() if k != "$ref"}
        return _structural({**definitions[name], "_model": name} | extra, definitions, models)
    if "allOf" in node and len(node["allOf"]) == 1:
        return _structural(
            {**node["allOf"][0], **{k: v for k, v in node.items() if k != "allOf"}},
            definitions,
            models,
        )
    if node.get("x-kubernetes-int-or-string"):
        default = {"default": node["default"]} if node.get("default") is not None else {}
        limits = {key: node[key] for key in ("minimum", "pattern") if key in node}
        return _described(node, {"x-kubernetes-int-or-string": True} | limits | default)
    if "anyOf" in node:
        return _optional(node, definitions, models)
    return _plain(node, definitions, models)


def _unwrapped(description: str) -> str:
    """Put each paragraph of a docstring on one line."""
    return "\n\n".join(" ".join(part.split()) for part in description.split("\n\n"))


def _optional(node: dict[str, Any], definitions: dict[str, Any], models: Models) -> dict[str, Any]:
    """Schema of `X | None`, a field that may be left out.

    Writing null is the same as leaving it out, so fields are not `nullable`.
    """
    choices = [c for c in node["anyOf"] if c.get("type") != "null"]
    if len(choices) != 1:
        raise TypeError(f"a structural schema cannot choose between {choices}")
    return _described(node, _structural(choices[0], definitions, models))


def _described(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    return schema | ({"description": node["description"]} if "description" in node else {})


def _plain(node: dict[str, Any], definitions: dict[str, Any], models: Models) -> dict[str, Any]:
    schema = {k: v for k, v in node.items() if k not in _DROPPED and k != "_model"}
    # OpenAPI v3.0 has the bound in `minimum`, and a flag that it is exclusive.
    for limit, flag in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if limit in schema:
            schema[flag], schema[limit] = schema[limit], True
    if "const" in node:
        schema |= {"type": "string", "enum": [node["const"]]}
    if "properties" in schema:
        schema["properties"] = {
            k: _structural(v, definitions, models) for k, v in schema["properties"].items()
        }
        schema.pop("additionalProperties", None)
    elif isinstance(schema.get("additionalProperties"), dict):
        schema["additionalProperties"] = _structural(
            schema["additionalProperties"], definitions, models
        )
    if "items" in schema:
        schema["items"] = _structural(schema["items"], definitions, models)
    default = node.get("default")
    if isinstance(default, str | int | float | bool | list) and default not in ("", []):
        schema["default"] = default
    if model := models.get(node.get("_model", "")):
        _fill(schema, model)
    return schema


def _fill(schema: dict[str, Any], model: type[Model]) -> None:
    """Add the rules, and the defaults of nested objects, so that the whole spec is stored."""
    for name, field in model.model_fields.items():
        if inner := nested_model(field):
            schema["properties"][field.alias or name]["default"] = _default(inner())
    if model.rules:
        schema["x-kubernetes-validations"] = [_validation(rule, model) for rule in model.rules]


def _default(value: BaseModel) -> dict[str, Any]:
    """Complete default of an object: an API server checks the rules on it as it is."""
    fields: dict[str, Any] = {}
    for name, field in type(value).model_fields.items():
        inner = getattr(value, name)
        if isinstance(inner, BaseModel):
            fields[field.alias or name] = _default(inner)
        elif inner not in (None, "", [], {}):
            fields[field.alias or name] = inner
    return fields


def _validation(rule: Rule, model: type[Model]) -> dict[str, str]:
    validation = {"rule": rule.cel(model), "message": rule.message.replace("{} ", "")}
    if rule.field:
        validation["fieldPath"] = f".{rule.field}"
    if rule.reason != "FieldValueInvalid":
        validation["reason"] = rule.reason
    return validation


RLJOB = Kind(
    job.KIND,
    job.PLURAL,
    job.SHORT_NAME,
    RLJob,
    spec=_job_spec,
    status=_job_status,
    scale=(".spec.rollout.replicas", ".status.rolloutReplicas", ".status.rolloutSelector"),
    columns=[
        ("State", "string", ".status.state", 0),
        ("Step", "integer", ".status.step", 0),
        ("Reward", "string", ".status.reward", 0),
        ("Lag", "string", ".status.policyLag", 0),
        ("Rollouts", "integer", ".status.rolloutReplicas", 0),
        ("Version", "integer", ".status.weightVersion", 0),
        ("Restarts", "integer", ".status.restarts", 0),
        _AGE,
        ("Steps", "integer", ".status.totalSteps", 1),
        ("Loss", "string", ".status.loss", 1),
        ("Goodput", "string", ".status.goodput.ratio", 1),
        ("Reason", "string", ".status.reason", 1),
    ],
    rules=lambda: transitions(RLJobSpec),
    selectable=[".status.state"],
)
RLENGINEPOOL = Kind(
    pool.KIND,
    pool.PLURAL,
    pool.SHORT_NAME,
    RLEnginePool,
    spec=lambda: schema_of(RLEnginePoolSpec),
    status=lambda: schema_of(RLEnginePoolStatus),
    scale=(".spec.replicas", ".status.replicas", ".status.selector"),
    columns=[
        ("Model", "string", ".spec.model.path", 0),
        ("Engines", "string", ".status.engines", 0),
        ("Jobs", "integer", ".status.jobs", 0),
        ("Tokens/s", "string", ".status.tokensPerSecond", 0),
        _AGE,
        ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 1),
    ],
    rules=lambda: constants(pool.IMMUTABLE),
)
KINDS = (RLJOB, RLENGINEPOOL)
