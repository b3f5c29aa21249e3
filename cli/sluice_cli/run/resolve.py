"""A manifest as it runs on this machine: paths absolute, files checked before anything
is started.
"""

from __future__ import annotations

import json
from pathlib import Path

from sluice.api import KIND, ManifestError, RLJob, manifest
from sluice.api.groups.data import parse_path
from sluice.api.job import RLJobSpec
from sluice.api.schema.paths import MarkedPath, command_word, marked, rewritten, volume_of
from sluice.data.files import files_of
from sluice.model_files import WEIGHTS, gguf_problem
from sluice.runtime.pod_env import ConfigurationError
from sluice_cli.validate.functions import problem_of

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def resolve(job: RLJob, base: Path) -> RLJob:
    """The job with relative paths taken from `base`, the manifest's directory; those in volumes
    stay as they are.
    """
    document = manifest(job)
    spec = document["spec"]

    def absolute(path: MarkedPath) -> str:
        if path.kind == "word":
            return command_word(path.value, base)
        in_pod = volume_of(path, spec) is not None or (
            path.kind == "function" and ".py:" not in path.value
        )
        return path.value if in_pod else str((base / Path(path.value).expanduser()).resolve())

    document["spec"] = rewritten(RLJobSpec, spec, absolute)
    document["kind"] = KIND
    return RLJob.model_validate(document)


def check_files(job: RLJob) -> None:
    """Raise ManifestError, all problems at once, where a file that the job needs is not there."""
    spec = manifest(job)["spec"]
    # Of volumes the LocalCluster says what is missing: it alone knows their directories.
    here = [path for path in marked(RLJobSpec, spec) if volume_of(path, spec) is None]
    problems = [problem for path in here for problem in _problems(path, job)]
    if problems:
        raise ManifestError("\n".join(problems))


def _problems(path: MarkedPath, job: RLJob) -> list[str]:
    """Faults of the files that a path leads to, each with the field's name."""
    if path.kind == "model":
        return _check_checkpoint(path, job)
    if path.kind == "word":  # the worker looks for the program: it knows its PATH
        return []
    check = {
        "tokenizer": _tokenizer,
        "data": _prompts,
        "rollouts": _rollouts,
        "function": problem_of,
    }[path.kind]
    problem = check(path.value)
    return [f"{path.field}: {problem}"] if problem else []


def _check_checkpoint(path: MarkedPath, job: RLJob) -> list[str]:
    """Say what a Hugging Face checkpoint lacks. Only the trained model may be drawn, and only it
    needs a tokenizer.
    """
    directory, trained = Path(path.value), path.field == "spec.model.path"
    gguf = gguf_problem(directory)
    if not directory.is_dir():
        missing = f"there is no directory {directory}; expected a Hugging Face checkpoint"
        return [f"{path.field}: {gguf or missing}"]
    problems = [_configuration(directory)]
    if trained:
        problems.append(_tokenizer(path.value))
    if not (trained and job.spec.model.init == "random"):
        cure = (
            "add them, or set spec.model.init: random"
            if trained
            else "only a model that was trained is of use here"
        )
        problems.append(_weights(directory, cure))
    if gguf and any(problems):
        return [f"{path.field}: {gguf}"]
    return [f"{path.field}: {problem}" for problem in problems if problem]


def _configuration(directory: Path) -> str | None:
    try:
        json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        return f"{directory} has no config.json; expected a Hugging Face checkpoint"
    except ValueError as error:
        return f"{directory}/config.json is not valid JSON: {error}"
    return None


def _weights(directory: Path, cure: str) -> str | None:
    there = any(True for pattern in WEIGHTS for _ in directory.glob(pattern))
    return None if there else f"{directory} has no weights (*.safetensors); {cure}"


def _tokenizer(directory: str) -> str | None:
    there = any((Path(directory) / name).exists() for name in _TOKENIZER)
    return None if there else f"{directory} has no tokenizer ({', '.join(_TOKENIZER)})"


def _prompts(path: str) -> str | None:
    try:
        files_of(parse_path(path)[0])
    except ConfigurationError as error:
        return str(error)
    return None


def _rollouts(path: str) -> str | None:
    return None if Path(path).exists() else f"there is no file or directory {path}"
