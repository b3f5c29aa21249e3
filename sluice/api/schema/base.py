"""Base class and shared field types of the API models.

Fields are camelCase in YAML, unknown fields are refused, and rules are also CEL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError, core_schema

from sluice.api.schema.rules import Rule

GROUP = "sluice.dev"
VERSION = "v1alpha1"
API_VERSION: Literal["sluice.dev/v1alpha1"] = "sluice.dev/v1alpha1"


class Model(BaseModel):
    """Base of all API objects."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        validate_default=False,
        frozen=True,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for rule in self.rules:
            if not rule.check(self):
                values = f"({rule.shows(self)}) " if rule.shows else ""
                message = rule.message.replace("{} ", values)
                context = {
                    "message": message,
                    "field": rule.field,
                    "alternatives": rule.alternatives,
                }
                raise PydanticCustomError("rule", "{message}", context)
        return self


@dataclass(frozen=True, slots=True)
class Unique:
    """Annotation of a list type: entries are unique, or their fields `key` (camelCase) are.

    Two writers may then apply one entry each (server-side apply) without removing the other.
    """

    key: str = ""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        kind = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [self.key]}
        return {**handler(schema), **(kind if self.key else {"x-kubernetes-list-type": "set"})}

    def _check(self, entries: list[Any]) -> list[Any]:
        names = [
            entry.model_dump(by_alias=True)[self.key] if self.key else entry for entry in entries
        ]
        for name in names:
            if names.count(name) > 1:
                message = f"{self.key} {name!r} is here twice; expected once".strip()
                raise PydanticCustomError("rule", "{message}", {"message": message})
        return entries


def manifest(model: Model) -> dict[str, Any]:
    """Return a model as a manifest: camelCase, only the fields that were set."""
    return model.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)


QUANTITY = r"^([0-9]+(\.[0-9]+)?|\.[0-9]+)([eE][-+]?[0-9]+|[KMGTPE]i|[numkMGTPE])?$"
_QUANTITY = re.compile(QUANTITY)
_SUFFIX = {
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
}
_SUFFIX |= {f"{prefix}i": 1024.0 ** (power + 1) for power, prefix in enumerate("KMGTPE")}


def quantity_value(quantity: str) -> float:
    """Return the number of a Kubernetes quantity: '512Mi' -> 536870912.0."""
    match = _QUANTITY.match(quantity)
    if not match:
        raise ValueError(f"{quantity!r} is not a quantity such as 500m, 2, 512Mi or 1.5G")
    number, suffix = match.group(1), match.group(3)
    if suffix and suffix[0] in "eE" and len(suffix) > 1 and suffix[1] != "i":
        return float(number + suffix)
    return float(number) * _SUFFIX.get(suffix or "", 1.0)


def _quantity(value: str | int | float) -> str:
    text = str(value)
    quantity_value(text)
    return text


# A Kubernetes resource quantity (`512Mi`, `2`, `500m`).
Quantity = Annotated[
    str | int,
    AfterValidator(_quantity),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            # `minimum` applies to integers alone, `pattern` to strings alone.
            "minimum": 0,
            "pattern": QUANTITY,
        }
    ),
]

_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_NAME}(\.{_NAME})*"
SUBDOMAIN = rf"^{_SUBDOMAIN}$"
CLASS = rf"^({_SUBDOMAIN})?$"
ENTRY = r"^[-._a-zA-Z0-9]+$"
CONTROLLER = rf"^{_SUBDOMAIN}/[A-Za-z0-9/._~!$&'()*+,;=:%-]+$"
# Name of an object in Kubernetes: an RFC 1123 subdomain.
ObjectName = Annotated[str, Field(pattern=SUBDOMAIN, max_length=253)]
# Name of an object that is also the value of a pod label.
LabelledName = Annotated[str, Field(pattern=SUBDOMAIN, max_length=63)]
# Name of a StorageClass. Empty means a volume without a class.
ClassName = Annotated[str, Field(pattern=CLASS, max_length=253)]
# Key in the data of a Secret or ConfigMap.
SecretEntry = Annotated[str, Field(pattern=ENTRY, max_length=253)]
# Path below a domain, as in managedBy of a Job: acme.io/controller.
ControllerName = Annotated[str, Field(pattern=CONTROLLER, max_length=63)]
# Name of an RLJob or RLEnginePool: an RFC 1035 label, short enough for the suffixes of the pods'
# names.
ShortName = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=40)]

# An object that Kubernetes or user code describes: a pod template, arguments of a function.
FreeForm = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})
]

PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**31 - 1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
