"""Writes a draft as a manifest.

A comment after each field names its origin; comments above list what was not translated.
"""

from __future__ import annotations

import contextlib
import io
import textwrap
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from sluice.api import API_VERSION, KIND, RLJob, manifest
from sluice.api.schema.annotations import field_path
from sluice.api.schema.problems import describe
from sluice_migrate.draft import Draft

_TITLES = {
    "not translated": "Not translated",
    "check": "To check",
    "other default": "Written out, because sluice has another default",
}
# Fields that are never removed: without them it would be a different job.
_ESSENTIAL = (
    "algorithm.estimator",
    "model.path",
    "data.prompts",
    "reward.type",
    "trainer.steps",
    "trainer.epochs",
    "algorithm.distillation.teacher.url",
)
_WIDTH = 118
# A round removes the fields that the rules refuse; further rules may apply after it.
_ROUNDS = 20


def drop_refused_fields(draft: Draft) -> str:
    """Remove fields that a rule of the API refuses, with a note for each.

    Returns what is still wrong, or "".
    """
    for _ in range(_ROUNDS):
        try:
            RLJob.model_validate(document(draft))
        except ValidationError as error:
            if not any(
                _drop_refused(draft, problem) for problem in error.errors(include_url=False)
            ):
                return describe(error, document(draft), "imported")
        else:
            return ""
    return "imported: too many fields do not fit together"


def _drop_refused(draft: Draft, problem: Any) -> bool:
    location = [*problem["loc"], *str((problem.get("ctx") or {}).get("field", "")).split(".")]
    path = field_path([part for part in location[1:] if part != ""])
    origin = draft.origins.get(path, path)
    if problem["type"] == "missing" or path in _ESSENTIAL or draft.drop(path) is None:
        return False
    draft.note("not translated", origin, f"{path}: {problem['msg']}")
    return True


def document(draft: Draft) -> dict[str, Any]:
    """Return the whole manifest."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": draft.name},
        "spec": draft.spec,
    }


def to_text(draft: Draft, source: str) -> str:
    """Write the manifest as YAML. `source` names what was imported."""
    whole = document(draft)
    with contextlib.suppress(ValidationError):  # in the order of the reference if it is valid
        whole["spec"] = manifest(RLJob.model_validate(whole))["spec"]
    commented = CommentedMap(whole)
    commented["spec"] = _commented(draft, whole["spec"], "")
    yaml = YAML()
    yaml.width = 4096  # a comment must stay on the line of its value
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    yaml.dump(commented, text)
    return _header(draft, source) + text.getvalue()


def _commented(draft: Draft, node: Any, path: str) -> Any:
    if isinstance(node, list):
        return CommentedSeq(
            [_commented(draft, entry, f"{path}[{i}]") for i, entry in enumerate(node)]
        )
    if not isinstance(node, dict):
        return node
    commented = CommentedMap()
    for key, value in node.items():
        inner = f"{path}.{key}" if path else key
        commented[key] = _commented(draft, value, inner)
        origin = draft.origins.get(inner)
        if origin and not isinstance(value, dict | list):
            commented.yaml_add_eol_comment(" ".join(origin.split()), key, column=0)
    return commented


def _header(draft: Draft, source: str) -> str:
    lines = [f"# Imported from {source}. The comment after a field names its origin."]
    for kind, title in _TITLES.items():
        notes = [note for note in draft.notes if note.kind == kind]
        if notes:
            lines += ["#", f"# {title}:"]
        for note in notes:
            line = f" (line {note.line})" if note.line else ""
            text = " ".join(f"{note.subject}{line}: {note.text}".split())
            lines += textwrap.wrap(
                text,
                _WIDTH,
                initial_indent="#   ",
                subsequent_indent="#     ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines) + "\n"
