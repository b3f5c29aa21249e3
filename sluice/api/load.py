"""Manifest files -> RLJob. Bad input gets one message that names file, line, field and what was expected."""

from __future__ import annotations

import difflib
import io
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError

from sluice.api.base import API_VERSION
from sluice.api.job import KIND, RLJob


class ManifestError(ValueError):
    """A manifest that cannot be used. The text is for people: where, what, and what to do."""


def read_documents(path: Path) -> list[CommentedMap]:
    """All YAML documents of a file (YAML 1.2, as kubectl reads them: 1e-6 is a number)."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: not a text file: {error.reason} at byte {error.start}") from error
    return parse_documents(text, str(path))


def parse_documents(text: str, source: str) -> list[CommentedMap]:
    yaml = YAML(typ="rt")
    try:
        documents = [d for d in yaml.load_all(io.StringIO(text)) if d is not None]
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ManifestError(f"{source}{line}: not valid YAML: {error.problem or error.context}") from error
    if not documents:
        raise ManifestError(f"{source}: the file is empty; expected an RLJob manifest")
    for document in documents:
        if not isinstance(document, CommentedMap):
            raise ManifestError(f"{source}: expected an object with apiVersion, kind, metadata and spec")
    return documents


def load_job(path: Path, overrides: list[str] | None = None) -> RLJob:
    """The one RLJob in a file, with `path=value` overrides applied (`spec.` may be left out)."""
    jobs = [d for d in read_documents(path) if d.get("kind") == KIND] or read_documents(path)
    if len(jobs) > 1:
        names = ", ".join(str(d.get("metadata", {}).get("name", "?")) for d in jobs)
        raise ManifestError(f"{path}: {len(jobs)} RLJobs in one file ({names}); expected one")
    return parse_job(jobs[0], str(path), overrides)


def parse_job(document: CommentedMap, source: str, overrides: list[str] | None = None) -> RLJob:
    for override in overrides or []:
        apply_override(document, override)
    if document.get("kind") != KIND or document.get("apiVersion") != API_VERSION:
        found = f"apiVersion {document.get('apiVersion')!r}, kind {document.get('kind')!r}"
        raise ManifestError(f"{source}: expected apiVersion {API_VERSION}, kind {KIND}; found {found}")
    try:
        return RLJob.model_validate(_plain(document))
    except ValidationError as error:
        raise ManifestError(describe(error, document, source)) from error


def apply_override(document: Any, override: str) -> None:
    """Set one value: `trainer.steps=10`, `spec.data.prompts[0].path=x.jsonl`. The value is YAML."""
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ManifestError(f"--set {override}: expected path=value, such as trainer.steps=10")
    keys = path.replace("[", ".").replace("]", "").split(".")
    if keys[0] not in ("spec", "metadata", "kind", "apiVersion"):
        keys.insert(0, "spec")
    target = document
    for position, key in enumerate(keys[:-1]):
        target = _descend(target, key, override, ".".join(keys[: position + 1]))
    try:
        value = YAML(typ="safe").load(text) if text else ""
    except MarkedYAMLError as error:
        raise ManifestError(f"--set {override}: the value is not valid YAML: {error.problem}") from error
    if isinstance(target, list):
        index = _index(target, keys[-1], override)
        if index == len(target):
            target.append(value)
        else:
            target[index] = value
    else:
        target[keys[-1]] = value


def _descend(target: Any, key: str, override: str, path: str) -> Any:
    if isinstance(target, list):
        index = _index(target, key, override)
        if index == len(target):
            target.append(CommentedMap())
        return target[index]
    if not isinstance(target, dict):
        raise ManifestError(f"--set {override}: {path} is not inside an object")
    if target.get(key) is None:
        target[key] = CommentedMap()
    return target[key]


def _index(target: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) > len(target):
        raise ManifestError(f"--set {override}: {key!r} is not an index into a list of {len(target)}")
    return int(key)


def describe(error: ValidationError, document: Any, source: str) -> str:
    """All problems of a manifest, one line each: file:line: field.path: what is wrong."""
    lines = []
    for problem in error.errors(include_url=False):
        location = list(problem["loc"])
        extra = (problem.get("ctx") or {}).get("field", "")
        location += str(extra).split(".") if extra else []
        name = field_path(location)
        position = _line(document, location)
        where = f"{source}:{position}" if position else source
        lines.append(f"{where}: {name}: {_explain(problem, location)}")
    return "\n".join(lines)


def field_path(location: list[str | int]) -> str:
    """('spec', 'data', 'prompts', 0, 'path') -> spec.data.prompts[0].path"""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _explain(problem: Any, location: list[str | int]) -> str:
    if problem["type"] == "extra_forbidden":
        known = _known_fields(location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else f"known fields: {', '.join(sorted(known))}"
        return f"unknown field; {hint}"
    if problem["type"] == "missing":
        return "required field is missing"
    if problem["type"] == "rule":
        return str(problem["msg"])
    value = problem.get("input")
    shown = f" (found {value!r})" if isinstance(value, str | int | float | bool) or value is None else ""
    return f"{problem['msg']}{shown}"


def _known_fields(location: list[str | int]) -> list[str]:
    model: Any = RLJob
    for part in location:
        if isinstance(part, int):
            continue
        field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None)
        model = _model_of(field.annotation) if field else None
        if model is None:
            return []
    return [f.alias or n for n, f in model.model_fields.items()]


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_of(argument)
        if found:
            return found
    return None


def _line(document: Any, location: list[str | int]) -> int | None:
    """Line of the deepest part of the location that the file has."""
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


def _plain(node: Any) -> Any:
    """Ruamel's round-trip types as plain dict, list and scalars."""
    if isinstance(node, dict):
        return {str(k): _plain(v) for k, v in node.items()}
    if isinstance(node, list):
        return [_plain(v) for v in node]
    if isinstance(node, bool) or node is None:
        return node
    for plain in (int, float, str):
        if isinstance(node, plain):
            return plain(node)
    return str(node)
