"""A run that goes on with a changed manifest: what is accepted, and in which words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sluice.api import ManifestError, RLJob
from sluice.api.schema.mutability import CONTINUED, Change, changes, covers

LENGTH = ("trainer.steps", "trainer.epochs")
_REASONS = {
    "model": "the weights of its checkpoints began there",
    "data": "the order of its prompts, and the samples that it has stored, hang on it",
    "evaluation": "its evaluations could not be compared any more",
    "rollout": "the samples that it has stored were made with it",
    "reward": "the samples that it has stored were judged with it",
    "algorithm": "its optimizer and its stored samples belong to this objective",
    "trainer.optimizer": "the optimizer's state in its checkpoints was made with it",
    "trainer": "its checkpoints were written by trainers of this kind",
    "buffer": "the buffer's storage was made with it",
    "weightSync": "its samples say which weights they come from",
}


def accepted(old: dict[str, Any], job: RLJob, new: dict[str, Any], trained: int) -> list[Change]:
    """The changes with which a run goes on. old, new: specs as manifests; trained: its last step.

    Raises ManifestError, with a line for each change that a run does not survive.
    """
    differing = list(changes(old, new))
    refused = [text for change in differing if (text := _refusal(change, job, trained))]
    if refused:
        raise ManifestError("\n".join(f"  {text}" for text in refused))
    return differing


def _refusal(change: Change, job: RLJob, trained: int) -> str:
    """Why a run cannot go on so; empty: it can."""
    if not covers(CONTINUED, change.path):
        return f"{change}: it cannot change in a run that goes on, because {_reason(change.path)}"
    steps = job.spec.trainer.steps
    if change.path == "trainer.steps" and steps is not None and steps < trained:
        return f"{change}: {trained} steps are trained already; expected at least as many"
    return ""


def _reason(path: str) -> str:
    parts = path.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((_REASONS[each] for each in prefixes if each in _REASONS), "it was started with it")


def words(differing: list[Change], job: RLJob) -> Iterator[str]:
    """The changes in words, a line each."""
    for change in differing:
        yield f"changed, from the last checkpoint on: {change}"
    optimizer = job.spec.trainer.optimizer
    length = next((change for change in differing if change.path in LENGTH), None)
    if length and optimizer.schedule != "constant" and optimizer.decay_steps is None:
        yield (
            "the learning rate now reaches minLr at the new end of the run; to keep its course, "
            "set trainer.optimizer.decaySteps to the steps that it was made for"
        )
