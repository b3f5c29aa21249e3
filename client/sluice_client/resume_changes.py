"""Decide which changes of its manifest a run can go on with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sluice.api import ManifestError, RLJob
from sluice.api.schema.mutability import CONTINUED, Change, changes, covers

# Fields that set the length of a run.
LENGTH_FIELDS = ("trainer.steps", "trainer.epochs")
# Why a run cannot change a field, by the field or a field that contains it.
_REASONS = {
    "model": "the weights in its checkpoints started from it",
    "data": "the order of its prompts and its stored samples depend on it",
    "evaluation": "its evaluations could no longer be compared",
    "rollout": "its stored samples were generated with it",
    "reward": "its stored samples were scored with it",
    "algorithm": "its optimizer state and its stored samples belong to this objective",
    "trainer.optimizer": "the optimizer state in its checkpoints depends on it",
    "trainer": "the layout of its checkpoints depends on it",
    "buffer": "the buffer's storage depends on it",
    "weightSync": "its samples record the weights that they come from",
}


def accepted_changes(
    old: dict[str, Any], job: RLJob, new: dict[str, Any], trained: int
) -> list[Change]:
    """Compare two specs and return the changes, if a run can go on with all of them.

    Parameters
    ----------
    old, new
        The specs as manifests write them.
    job
        The job with the new spec.
    trained
        Last trained step of the run.

    Raises
    ------
    ManifestError
        With a line for each change that the run cannot go on with.

    """
    differing = list(changes(old, new))
    refused = [text for change in differing if (text := _refusal(change, job, trained))]
    if refused:
        raise ManifestError("\n".join(f"  {text}" for text in refused))
    return differing


def _refusal(change: Change, job: RLJob, trained: int) -> str:
    """Say why a run cannot go on with a change; empty if it can."""
    if not covers(CONTINUED, change.path):
        return f"{change}: a run that goes on cannot change it, because {_reason(change.path)}"
    steps = job.spec.trainer.steps
    if change.path == "trainer.steps" and steps is not None and steps < trained:
        return f"{change}: {trained} steps are trained already; expected at least as many"
    return ""


def _reason(path: str) -> str:
    parts = path.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next(
        (_REASONS[prefix] for prefix in prefixes if prefix in _REASONS), "it was started with it"
    )


def change_notes(differing: list[Change], job: RLJob) -> Iterator[str]:
    """Describe changes to a user, one line for each change."""
    for change in differing:
        yield f"changed from the last checkpoint on: {change}"
    optimizer = job.spec.trainer.optimizer
    length = next((change for change in differing if change.path in LENGTH_FIELDS), None)
    if length and optimizer.schedule != "constant" and optimizer.decay_steps is None:
        yield (
            "the learning rate now reaches minLr at the new end of the run; to keep the old "
            "schedule, set trainer.optimizer.decaySteps to the old number of steps"
        )
