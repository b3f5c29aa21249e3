"""A manifest as it runs on this machine: paths absolute, files checked before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sluice.api import KIND, ManifestError, RLJob, manifest
from sluice.api.data import parse_path
from sluice.cli.functions import problem_of
from sluice.data.files import files_of
from sluice.environment import ConfigurationError

_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def _functions(spec: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Fields that name a function of the user's: (path of their group, the group, field)."""
    rollout, algorithm = spec.get("rollout", {}), spec.get("algorithm", {})
    yield "spec.reward", spec.get("reward", {}), "function"
    for position, source in enumerate(spec["data"]["prompts"]):
        yield f"spec.data.prompts[{position}].source", source.get("source", {}), "function"
        yield f"spec.data.prompts[{position}]", source, "function"
    for position, dataset in enumerate(spec.get("evaluation", {}).get("datasets", [])):
        yield f"spec.evaluation.datasets[{position}].reward", dataset.get("reward", {}), "function"
        yield f"spec.evaluation.datasets[{position}].source", dataset.get("source", {}), "function"
        yield f"spec.evaluation.datasets[{position}]", dataset, "function"
    yield "spec.rollout", rollout, "dynamicFilter"
    yield "spec.rollout", rollout, "function"
    yield "spec.rollout.hooks", rollout.get("hooks", {}), "beforeReward"
    yield "spec.rollout.hooks", rollout.get("hooks", {}), "afterReward"
    yield "spec.algorithm", algorithm, "function"
    yield "spec.algorithm", algorithm, "lossFunction"


def resolve(job: RLJob, base: Path) -> RLJob:
    """The job with relative paths taken from `base`, the manifest's directory."""
    document = manifest(job)
    spec = document["spec"]
    _absolute(spec["model"], "path", base)
    _absolute(spec["model"], "referencePath", base)
    datasets = spec.get("evaluation", {}).get("datasets", [])
    for source in [*spec["data"]["prompts"], *datasets]:
        _absolute(source, "path", base)
    algorithm = spec.get("algorithm", {})
    _absolute(algorithm.get("critic", {}), "modelPath", base)
    _absolute(algorithm.get("distillation", {}).get("teacher", {}), "path", base)
    _absolute(spec.get("debug", {}), "replay", base)
    for _, group, field in _functions(spec):
        if ".py:" in str(group.get(field, "")):
            _absolute(group, field, base)
    for reward in [spec.get("reward", {}), *(dataset.get("reward", {}) for dataset in datasets)]:
        _absolute(reward.get("model", {}), "tokenizer", base)
    document["kind"] = KIND
    return RLJob.model_validate(document)


def _absolute(group: dict[str, Any], field: str, base: Path) -> None:
    if group.get(field):
        group[field] = str((base / group[field]).expanduser().resolve())


def check_files(job: RLJob) -> None:
    """Raise ManifestError, all problems at once, where a file that the job needs is not there."""
    problems = [*_check_model(job), *_check_data(job), *_check_functions(job)]
    if problems:
        raise ManifestError("\n".join(problems))


def _check_model(job: RLJob) -> list[str]:
    source, distillation = job.spec.model, job.spec.algorithm.distillation
    hint = "add them, or set spec.model.init: random"
    problems = _check_checkpoint("spec.model.path", source.path, hint if source.init == "pretrained" else None)
    if distillation and distillation.teacher.path:
        field = "spec.algorithm.distillation.teacher.path"
        problems += _check_checkpoint(field, distillation.teacher.path, "only a model that was trained can teach")
    return problems


def _check_checkpoint(field: str, directory: str, hint: str | None) -> list[str]:
    """What a Hugging Face checkpoint lacks. hint: what to do where it has no weights; None: it needs none."""
    path = Path(directory)
    if not path.is_dir():
        return [f"{field}: there is no directory {path}; expected a Hugging Face checkpoint"]
    problems = []
    try:
        json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        problems.append(f"{field}: {path} has no config.json; expected a Hugging Face checkpoint")
    except ValueError as error:
        problems.append(f"{field}: {path}/config.json is not valid JSON: {error}")
    if not any((path / name).exists() for name in _TOKENIZER):
        problems.append(f"{field}: {path} has no tokenizer ({', '.join(_TOKENIZER)})")
    if hint and not any(True for pattern in _WEIGHTS for _ in path.glob(pattern)):
        problems.append(f"{field}: {path} has no weights (*.safetensors); {hint}")
    return problems


def _check_data(job: RLJob) -> list[str]:
    named = [(f"spec.data.prompts[{i}].path", s.path) for i, s in enumerate(job.spec.data.prompts)]
    if job.spec.evaluation:
        named += [(f"spec.evaluation.datasets[{i}].path", s.path) for i, s in enumerate(job.spec.evaluation.datasets)]
    problems = []
    for field, path in named:
        try:
            if path:
                files_of(parse_path(path)[0])
        except ConfigurationError as error:
            problems.append(f"{field}: {error}")
    replay = job.spec.debug.replay
    if replay and not Path(replay).exists():
        problems.append(f"spec.debug.replay: there is no file or directory {replay}")
    return problems


def _check_functions(job: RLJob) -> list[str]:
    functions = [(f"{name}.{field}", group.get(field)) for name, group, field in _functions(manifest(job)["spec"])]
    found = [(field, problem_of(dotted)) for field, dotted in functions if dotted]
    return [f"{field}: {problem}" for field, problem in found if problem]
