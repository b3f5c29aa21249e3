"""Messages about problems of a manifest: file, line, field, what is expected and a suggestion."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from sluice import container_images
from sluice.api.groups.storage import BUCKET_URI
from sluice.api.groups.weight_sync import STORE_URI
from sluice.api.job import RLJob
from sluice.api.schema.annotations import Location, field_path
from sluice.api.schema.base import CLASS, CONTROLLER, ENTRY, QUANTITY, SUBDOMAIN
from sluice.api.schema.kubernetes_fields import Fault
from sluice.api.schema.paths import DOTTED_PATH
from sluice.api.schema.renamed_fields import OldField, old_fields
from sluice.api.schema.suggestions import suggestion

_FUNCTION = "a Python function as package.module.name or path/to/file.py:name"
# Pattern of a field -> the same for people.
PATTERNS = {
    DOTTED_PATH: _FUNCTION,
    DOTTED_PATH + "|^none$": f"none, or {_FUNCTION}",
    DOTTED_PATH + "|^nonzero_std$": f"nonzero_std, or {_FUNCTION}",
    r"^(default|pissa|pissa_niter_[1-9][0-9]?|eva)$": "default, pissa or pissa_niter_N",
    r"^(all-linear|[A-Za-z_][A-Za-z0-9_.]*)$": "all-linear, or the name of a layer such as q_proj",
    r"^https?://": "an address that begins with http:// or https://",
    r"^[A-Za-z0-9][A-Za-z0-9_.-]*$": "letters, digits, '.', '_' and '-'; the first a letter or a "
    "digit",
    r"^[A-Za-z][A-Za-z0-9_-]*$": "the name of a tag: letters, digits, '_' and '-'; the first a "
    "letter",
    r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$": (
        "the name of a label, such as topology.kubernetes.io/zone"
    ),
    SUBDOMAIN: "the name of an object of Kubernetes: small letters, digits, '-' and '.'; the first "
    "and the last a letter or a digit",
    CLASS: "the name of a StorageClass, or nothing",
    ENTRY: "a key in a Secret: letters, digits, '-', '_' and '.'",
    CONTROLLER: "a path below a domain, such as acme.io/controller",
    QUANTITY: "a quantity such as 500m, 2, 512Mi or 1.5G",
    BUCKET_URI: "a prefix in an object store: s3://bucket/path, gs://bucket/path or "
    "az://container/path",
    container_images.PATTERN: "the name of an image, in which {metadata.KEY} may stand for a text "
    "of the row",
    container_images.ALLOWED_PATTERN: "an image, or a registry and path that ends with /",
    STORE_URI: "s3://bucket/path, gs://, az://, or an absolute path",
    r"^[a-z]([-a-z0-9]*[a-z0-9])?$": "small letters, digits and '-'; the first a letter, the last "
    "no '-'",
}
# pydantic's type of error -> what is expected. Other types keep pydantic's message.
_EXPECTED = {
    "model_type": "an object",
    "dict_type": "an object",
    "list_type": "a list",
    "string_type": "a text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "at least {min_length} character(s)",
    "string_too_long": "at most {max_length} characters",
    "too_short": "at least {min_length} entry(s)",
    "too_long": "at most {max_length} entries",
    "literal_error": "{expected}",
}
# Parts that pydantic adds to the location of an error for the members of a union.
_UNION = ("str", "int", "float", "bool")


# Location of a value -> the `path=value` of the command line that set it.
Overrides = Mapping[Location, str]
NO_OVERRIDES: Overrides = {}


def describe(
    error: ValidationError,
    document: Any,
    source: str,
    overrides: Overrides = NO_OVERRIDES,
    model: type[BaseModel] = RLJob,
) -> str:
    """Describe all problems of a manifest, one a line: file:line: field.path: what is wrong.

    A problem with a value of `overrides` begins with `--set path=value` instead of file and line.
    model: the model of the manifest, whose fields are suggested in place of unknown ones.
    """
    may_be_old = model is RLJob and isinstance(document, Mapping)
    old = old_fields(document.get("spec")) if may_be_old else []
    explanations: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        location = list(problem["loc"])
        if any(_is_within(location, field) for field in old):
            continue
        extra = (problem.get("ctx") or {}).get("field", "")
        location += str(extra).split(".") if extra else []
        if location and (location[-1] in _UNION or str(location[-1]).startswith("function-")):
            location.pop()
        explanations.setdefault(_place(location, document, source, overrides), []).append(
            _explain(problem, location, model) + _way_out(problem, document, overrides)
        )
    renamed = [_renamed(field, document, source, overrides) for field in old]
    return "\n".join(
        renamed
        + [where + " or ".join(dict.fromkeys(texts)) for where, texts in explanations.items()]
    )


def _is_within(location: Sequence[str | int], old: OldField) -> bool:
    """True if a problem is about an old field: one of the two locations is part of the other."""
    shared = min(len(location), len(old.location))
    return shared > 1 and tuple(location[:shared]) == old.location[:shared]


def _renamed(old: OldField, document: Any, source: str, overrides: Overrides) -> str:
    place = _place(old.location, document, source, overrides)
    return place.removesuffix(f"{field_path(old.location)}: ") + old.sentence(
        "FILE" if place.startswith("--set ") else source
    )


def describe_faults(
    faults: Iterable[Fault], document: Any, source: str, overrides: Overrides = NO_OVERRIDES
) -> str:
    """Describe faults of objects of Kubernetes, one a line, as `describe` does."""
    return "\n".join(
        _place(fault.location, document, source, overrides) + fault.text for fault in faults
    )


def _place(location: Sequence[str | int], document: Any, source: str, overrides: Overrides) -> str:
    for at, override in reversed(list(overrides.items())):
        if tuple(location[: len(at)]) == at:
            return f"--set {override}: {field_path(location)}: "
    line = _line(document, location)
    return (
        f"{source}:{line}: {field_path(location)}: "
        if line
        else f"{source}: {field_path(location)}: "
    )


def _way_out(problem: Any, document: Any, overrides: Overrides) -> str:
    """The `--set` flags that remove fields of the manifest which an override excludes."""
    at = tuple(problem["loc"])
    alternatives = (problem.get("ctx") or {}).get("alternatives", ())
    if not any((*at, name) in overrides for name in alternatives):
        return ""
    holder = document
    for part in at:
        holder = holder[part]
    present = [
        name
        for name in alternatives
        if holder.get(name) is not None and (*at, name) not in overrides
    ]
    paths = {name: field_path((*at, name)).removeprefix("spec.") for name in present}
    return "".join(f"; --set {path}=null takes {name} out" for name, path in paths.items())


def _explain(problem: Any, location: list[str | int], model: type[BaseModel]) -> str:
    kind, value, context = problem["type"], problem.get("input"), problem.get("ctx") or {}
    if kind == "extra_forbidden":
        known = _known_fields(model, location[:-1])
        return f"unknown field; {suggestion(str(location[-1]), known)}"
    if kind == "missing":
        return "required field is missing"
    if kind == "rule":
        return str(problem["msg"])
    if kind == "value_error":
        return str(context["error"])
    expected = PATTERNS.get(context.get("pattern", "")) or _EXPECTED.get(kind, "").format_map(
        context
    )
    text = f"expected {expected}" if expected else str(problem["msg"])
    text += f", found {value!r}" if isinstance(value, str | int | float) or value is None else ""
    if kind == "literal_error" and isinstance(value, str):
        choices = [
            choice.strip("' ")
            for choice in str(context["expected"]).replace(" or ", ",").split(",")
        ]
        close = difflib.get_close_matches(value, choices, n=1, cutoff=0.6)
        text += f"; did you mean {close[0]}?" if close else ""
    return text


def _known_fields(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    for part in location:
        if isinstance(part, int):
            continue
        field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None)
        inner = _model_of(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
    return [f.alias or n for n, f in model.model_fields.items()]


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        model = _model_of(argument)
        if model:
            return model
    return None


def _line(document: Any, location: Sequence[str | int]) -> int | None:
    """Line of the deepest part of a location that is in the file."""
    line, node = None, document
    for part in location:
        try:
            if isinstance(node, CommentedMap) and part in node:
                line = node.lc.key(part)[0] + 1
            elif isinstance(node, CommentedSeq) and isinstance(part, int) and part < len(node):
                line = node.lc.item(part)[0] + 1
            else:
                return line
        except (KeyError, AttributeError, TypeError):  # set by an override: it has no line
            return line
        node = node[part]
    return line
