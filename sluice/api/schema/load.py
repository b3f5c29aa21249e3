"""Loading of manifest files.

A message about bad input names file, line, field and what is expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from sluice.api import pool
from sluice.api.job import KIND, RLJob, RLJobSpec
from sluice.api.pool import RLEnginePool, RLEnginePoolSpec
from sluice.api.schema import yaml_text
from sluice.api.schema.annotations import Location
from sluice.api.schema.base import API_VERSION, Model
from sluice.api.schema.containers import faults_of_containers
from sluice.api.schema.kubernetes_fields import faults_of
from sluice.api.schema.problems import NO_OVERRIDES, Overrides, describe, describe_faults
from sluice.api.schema.yaml_text import MAX_BYTES

M = TypeVar("M", RLJob, RLEnginePool)


class ManifestError(ValueError):
    """A manifest that cannot be used. The message says where, what, and what to do."""


def read_documents(path: Path) -> list[CommentedMap]:
    """Return all documents of a file, in YAML 1.2 as kubectl reads it: 1e-6 is a number."""
    return parse_documents(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Return the text of a YAML file. Raises ManifestError if it cannot be read or is too large."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise ManifestError(f"{path}: more than {MAX_BYTES >> 10} KiB; expected an RLJob manifest")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ManifestError(
            f"{path}: not a text file: {error.reason} at byte {error.start}"
        ) from error


def parse_documents(text: str, source: str) -> list[CommentedMap]:
    try:
        documents = [d for d in yaml_text.load_all(text) if d is not None]
    except YAMLError as error:
        raise ManifestError(yaml_text.explain(error, source)) from error
    if not documents:
        raise ManifestError(f"{source}: the file is empty; expected an RLJob manifest")
    for document in documents:
        if not isinstance(document, CommentedMap):
            raise ManifestError(
                f"{source}: expected an object with apiVersion, kind, metadata and spec"
            )
    return documents


def load_job(path: Path, overrides: list[str] | None = None) -> RLJob:
    """Load the one RLJob of a file, with `path=value` overrides (`spec.` may be left out)."""
    return parse_job(one_job(path), str(path), overrides)


def load_pool(path: Path, overrides: list[str] | None = None) -> RLEnginePool:
    """Load the one RLEnginePool of a file, with `path=value` overrides as `load_job`."""
    return parse_pool(_one_of_kind(path, pool.KIND), str(path), overrides)


def one_job(path: Path) -> CommentedMap:
    """Return the document of the one RLJob in a file."""
    return _one_of_kind(path, KIND)


def _one_of_kind(path: Path, kind: str) -> CommentedMap:
    documents = read_documents(path)
    matching = [d for d in documents if d.get("kind") == kind] or documents
    if len(matching) > 1:
        names = ", ".join(str((d.get("metadata") or {}).get("name", "?")) for d in matching)
        raise ManifestError(f"{path}: {len(matching)} {kind}s in one file ({names}); expected one")
    return matching[0]


def parse_job(document: CommentedMap, source: str, overrides: list[str] | None = None) -> RLJob:
    return _parsed(RLJob, RLJobSpec, KIND, document, source, overrides)


def parse_pool(
    document: CommentedMap, source: str, overrides: list[str] | None = None
) -> RLEnginePool:
    return _parsed(RLEnginePool, RLEnginePoolSpec, pool.KIND, document, source, overrides)


def _parsed(
    model: type[M],
    spec: type[Model],
    kind: str,
    document: CommentedMap,
    source: str,
    overrides: list[str] | None,
) -> M:
    changed = {apply_override(document, override): override for override in overrides or []}
    if document.get("kind") != kind or document.get("apiVersion") != API_VERSION:
        header = f"apiVersion {document.get('apiVersion')!r}, kind {document.get('kind')!r}"
        raise ManifestError(
            f"{source}: expected apiVersion {API_VERSION}, kind {kind}; found {header}"
        )
    plain = _plain(document)
    try:
        parsed = model.model_validate(plain, by_alias=True, by_name=False)
    except ValidationError as error:
        raise ManifestError(describe(error, document, source, changed, model)) from error
    check_kubernetes_fields(plain, document, source, changed, spec)
    return parsed


def check_kubernetes_fields(
    plain: Mapping[str, Any],
    document: Any,
    source: str,
    changed: Overrides = NO_OVERRIDES,
    model: type[Model] = RLJobSpec,
) -> None:
    """Check pod templates, volumes and other objects of Kubernetes in a spec.

    Parameters
    ----------
    plain
        The manifest in plain types.
    document
        The manifest as it was read, with line numbers.
    source
        Name of the manifest, for messages.
    changed
        Values that the command line set.
    model
        The model of the spec.

    Raises
    ------
    ManifestError
        A field is unknown to Kubernetes, or a template changes a container that no pod has.

    """
    faults = faults_of(model, plain["spec"]) or faults_of_containers(plain["spec"])
    if faults:
        raise ManifestError(describe_faults(faults, document, source, changed))


def apply_override(document: Any, override: str) -> Location:
    """Set one value of a document and return its location.

    override: `trainer.steps=10`, `spec.data.prompts[0].path=x.jsonl`. The value is YAML.
    """
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ManifestError(f"--set {override}: expected path=value, such as trainer.steps=10")
    keys = path.replace("[", ".").replace("]", "").split(".")
    if keys[0] not in ("spec", "metadata", "kind", "apiVersion"):
        keys.insert(0, "spec")
    target, location = document, list[str | int]()
    for position, key in enumerate(keys[:-1]):
        location.append(int(key) if isinstance(target, list) and key.isdigit() else key)
        target = _descend(target, key, override, ".".join(keys[:position]))
    _can_hold(target, override, ".".join(keys[:-1]))
    try:
        value = yaml_text.load(text) if text else ""
    except YAMLError as error:
        raise ManifestError(yaml_text.explain(error, f"--set {path}")) from error
    if isinstance(target, list):
        index = _index(target, keys[-1], override)
        if index == len(target):
            target.append(value)
        else:
            target[index] = value
        return (*location, index)
    target[keys[-1]] = value
    return (*location, keys[-1])


def _descend(target: Any, key: str, override: str, path: str) -> Any:
    if isinstance(target, list):
        index = _index(target, key, override)
        if index == len(target):
            target.append(CommentedMap())
        return target[index]
    _can_hold(target, override, path)
    if target.get(key) is None:
        target[key] = CommentedMap()
    return target[key]


def _can_hold(target: Any, override: str, path: str) -> None:
    if not isinstance(target, dict | list):
        raise ManifestError(f"--set {override}: {path} is {target!r}, which has no fields")


def _index(target: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) > len(target):
        raise ManifestError(
            f"--set {override}: {key!r} is not an index into a list of {len(target)}"
        )
    return int(key)


def _plain(node: Any) -> Any:
    """Convert round-trip types of ruamel to plain dict, list and scalars."""
    if isinstance(node, dict):
        return {str(k): _plain(v) for k, v in node.items()}
    if isinstance(node, list):
        return [_plain(v) for v in node]
    if isinstance(node, bool) or node is None:
        return node
    # ruamel's ScalarInt and ScalarFloat remember how they were written.
    for plain in (int, float, str):
        if isinstance(node, plain):
            return plain(node)
    return str(node)
