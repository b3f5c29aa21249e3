"""Prepare a job that a user submits from Python, with its functions and rows as files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap

from sluice.api import ManifestError, RLJob, manifest, parse_documents, parse_job
from sluice.api.job import KIND
from sluice.api.schema.base import API_VERSION
from sluice.api.schema.load import one_job
from sluice_client.errors import ClientError
from sluice_client.function_source import file_of, source_of
from sluice_client.resolve import resolve

REWARD_FILE, PROMPTS_FILE = "reward.py", "prompts.jsonl"
JobLike = RLJob | Mapping[str, Any] | str | Path


@dataclass(slots=True)
class Submission:
    """A job, and the files that it needs, by name.

    The job names these files without a directory: `placed` adds the directory that they get.
    """

    job: RLJob
    files: dict[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the manifest of the job."""
        return manifest(self.job)

    def placed(self, directory: str) -> RLJob:
        """Return the job with its files in a directory."""
        document = self.document()
        spec = document["spec"]
        if REWARD_FILE in self.files:
            spec["reward"]["function"] = f"{directory}/{spec['reward']['function']}"
        if PROMPTS_FILE in self.files:
            spec["data"]["prompts"] = [{"path": f"{directory}/{PROMPTS_FILE}"}]
        return RLJob.model_validate(document)


def prepare_submission(
    job: JobLike,
    *,
    name: str | None,
    overrides: Mapping[str, Any],
    reward: Callable[..., Any] | str | None,
    prompts: Iterable[Mapping[str, Any]] | None,
    local: bool,
) -> Submission:
    """Validate a job and put the functions and rows that come with it into files.

    Parameters
    ----------
    job, name, overrides, reward, prompts
        As in `Client.submit`.
    local
        Make relative paths absolute: they are relative to the manifest's directory, or to the
        working directory if the job is no file.

    Raises
    ------
    ClientError
        If the job is not valid, with every problem.

    """
    files: dict[str, str] = {}
    try:
        document, source, base = _document(job)
        if name:
            document.setdefault("metadata", {})["name"] = name
        spec = document.setdefault("spec", {})
        if reward is not None:
            spec["reward"] = {**(spec.get("reward") or {}), "function": _function(reward, files)}
        if prompts is not None:
            rows = [json.dumps(row, ensure_ascii=False) for row in prompts]
            files[PROMPTS_FILE] = "\n".join(rows) + "\n"
            spec.setdefault("data", {})["prompts"] = [{"path": PROMPTS_FILE}]
        # Overrides go through the same parser as `sluice run --set`.
        changes = [f"{path}={json.dumps(value)}" for path, value in overrides.items()]
        parsed = parse_job(document, source, changes)
        return Submission(_resolved(parsed, base, files) if local else parsed, files)
    except ManifestError as error:
        raise ClientError(str(error)) from error


def _resolved(job: RLJob, base: Path, files: Mapping[str, str]) -> RLJob:
    """Make the job's paths absolute, except the names of the submission's files."""
    document = manifest(resolve(job, base))
    spec, before = document["spec"], manifest(job)["spec"]
    if REWARD_FILE in files:
        spec["reward"]["function"] = before["reward"]["function"]
    if PROMPTS_FILE in files:
        spec["data"]["prompts"] = before["data"]["prompts"]
    return RLJob.model_validate(document)


def _document(job: JobLike) -> tuple[CommentedMap, str, Path]:
    """Return the job as a document, its name in messages, and the base of its relative paths."""
    if isinstance(job, str | Path):
        path = Path(job)
        return one_job(path), str(path), path.resolve().parent
    plain = (
        {"apiVersion": API_VERSION, "kind": KIND, **manifest(job)}
        if isinstance(job, RLJob)
        else job
    )
    return parse_documents(json.dumps(plain), "job")[0], "job", Path.cwd()


def _function(reward: Callable[..., Any] | str, files: dict[str, str]) -> str:
    """Return the function as `PATH.py:NAME`; add it to `files` if it is in no file."""
    if isinstance(reward, str):
        return reward
    path = file_of(reward)
    if path is not None:
        return f"{path}:{reward.__name__}"
    files[REWARD_FILE] = source_of(reward)
    return f"{REWARD_FILE}:{reward.__name__}"
