"""Find out whether a job can judge its Harbor tasks: images, hidden tests, time and network."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from sluice.api import RLJobSpec
from sluice.api.groups.data import parse_path
from sluice.api.groups.environment import RolloutEnvironment
from sluice.container_images import RowImageError, image_of_row, is_from_row
from sluice.data import harbor
from sluice.data.files import read_source

# Programs with which tests of terminal-bench install what they need.
_DOWNLOADS = re.compile(r"\b(?:apt|apt-get|apk|curl|git clone|pip3? install|uvx?|wget)\b")
Metadata = Mapping[str, Any]


def task_notes(spec: RLJobSpec, source: str, rows: int | None = None) -> list[str]:
    """Return notes on a source, none if it is no directory of Harbor tasks.

    `rows` is the number of tasks to look at; None means all.
    """
    path = parse_path(source)[0]
    if not path.is_dir() or not harbor.holds_tasks(path):
        return []
    located = islice(read_source(source), rows)
    tasks = {str(task.file.parent): task.row["metadata"] for task in located}
    environment = spec.rollout.environment
    if environment is None or environment.verifier is None:
        return ["nothing runs the tests of the tasks: set rollout.environment with a verifier"]
    return list(_notes(environment, tasks))


def _notes(environment: RolloutEnvironment, tasks: Mapping[str, Metadata]) -> Iterator[str]:
    verifier = environment.verifier
    assert verifier is not None
    visible = {"test_files", "verifier_env"} - set(verifier.hidden_metadata)
    if shown := sorted(key for key in visible if any(key in task for task in tasks.values())):
        yield f"the agent sees {' and '.join(shown)}: name them in verifier.hiddenMetadata"
    for image in dict.fromkeys((environment.image, environment.verifier_image)):
        if image and is_from_row(image):
            yield from _image_notes(image, environment.allowed_images, tasks)
    yield from _counted(
        tasks,
        lambda task: task["verifier_timeout_sec"] > verifier.timeout_seconds,
        f"have a verifier.timeout_sec above verifier.timeoutSeconds ({verifier.timeout_seconds:g}),"
        " after which the sample fails instead of getting 0: raise it",
    )
    if environment.image:
        yield from _counted(
            tasks,
            lambda task: _DOWNLOADS.search(task["test_files"][harbor.SCRIPT].get("text", "")),
            "have a tests/test.sh that seems to download packages, and pods of verifiers have no "
            "network: install the packages in the image",
        )


def _image_notes(image: str, allowed: list[str], tasks: Mapping[str, Metadata]) -> Iterator[str]:
    problems = {}
    for folder, task in tasks.items():
        try:
            image_of_row(image, task, allowed)
        except RowImageError as error:
            problems[folder] = str(error)
    if problems:
        folder, problem = next(iter(problems.items()))
        yield (
            f"{len(problems)} of {len(tasks)} tasks have no image that {image} allows, such as "
            f"{folder} ({problem}); build it (docker build -t IMAGE {folder}/environment) and "
            "set environment.docker_image of task.toml, or name images by a rule, such as "
            "ghcr.io/me/tasks/{metadata.instance_id}:1"
        )


def _counted(
    tasks: Mapping[str, Metadata], applies: Callable[[Metadata], object], text: str
) -> Iterable[str]:
    """Return a note with the number of tasks that it applies to, none if there are none."""
    found = [folder for folder, task in tasks.items() if applies(task)]
    return [f"{len(found)} of {len(tasks)} tasks, such as {found[0]}, {text}"] if found else []
