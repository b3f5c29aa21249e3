"""Check that the files which a job names exist, and that its functions are in them.

Functions are looked for in the syntax tree: importing them here would run user code.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from sluice.api import ManifestError, RLJob, manifest
from sluice.api.groups.data import parse_path
from sluice.api.job import RLJobSpec
from sluice.api.schema.paths import MarkedPath, marked, uri_of, volume_of
from sluice.api.schema.suggestions import suggestion
from sluice.data.files import files_of
from sluice.model_files import WEIGHTS, gguf_problem
from sluice.runtime.pod_env import ConfigurationError

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def check_files(job: RLJob) -> None:
    """Raise ManifestError, with all problems, if files that a resolved job needs do not exist."""
    spec = manifest(job)["spec"]
    # The LocalCluster checks volumes: only it knows their directories.
    paths = [
        path
        for path in marked(RLJobSpec, spec)
        if volume_of(path, spec) is None and uri_of(path) is None
    ]
    problems = [problem for path in paths for problem in _problems(path, job)]
    if problems:
        raise ManifestError("\n".join(problems))


def _problems(path: MarkedPath, job: RLJob) -> list[str]:
    """Describe what is wrong with the files at a path; each text begins with the field."""
    if path.kind in ("model", "draft"):
        return _check_checkpoint(path, job)
    if path.kind == "word":  # the worker looks for the program on its own PATH
        return []
    check = {
        "adapter": _adapter,
        "tokenizer": _tokenizer,
        "data": _prompts,
        "rollouts": _rollouts,
        "function": function_problem,
    }[path.kind]
    problem = check(path.value)
    return [f"{path.field}: {problem}"] if problem else []


def _check_checkpoint(path: MarkedPath, job: RLJob) -> list[str]:
    """Describe what a Hugging Face checkpoint lacks.

    Only the trained model may have random weights, and only it needs a tokenizer.
    """
    trained, cure = path.field == "spec.model.path", None
    if not (trained and job.spec.model.init == "random"):
        cure = (
            "add them, or set spec.model.init: random"
            if trained
            else "this field needs a model with trained weights"
        )
    problems = checkpoint_problems(Path(path.value), tokenizer=trained, cure=cure)
    return [f"{path.field}: {problem}" for problem in problems]


def checkpoint_problems(directory: Path, *, tokenizer: bool, cure: str | None) -> list[str]:
    """Describe what a Hugging Face checkpoint lacks.

    Parameters
    ----------
    directory
        Its directory.
    tokenizer
        Whether it needs a tokenizer.
    cure
        What to do if it has no weights; None if it needs none.

    """
    gguf = gguf_problem(directory)
    if not directory.is_dir():
        return [gguf or f"there is no directory {directory}; expected a Hugging Face checkpoint"]
    problems = [_configuration(directory)]
    if tokenizer:
        problems.append(_tokenizer(str(directory)))
    if cure is not None:
        problems.append(_weights(directory, cure))
    lacking = [problem for problem in problems if problem]
    return [gguf] if gguf and lacking else lacking


def _configuration(directory: Path) -> str | None:
    try:
        json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        return f"{directory} has no config.json; expected a Hugging Face checkpoint"
    except ValueError as error:
        return f"{directory}/config.json is not valid JSON: {error}"
    return None


def _weights(directory: Path, cure: str) -> str | None:
    exist = any(True for pattern in WEIGHTS for _ in directory.glob(pattern))
    return None if exist else f"{directory} has no weights (*.safetensors); {cure}"


def _tokenizer(directory: str) -> str | None:
    exists = any((Path(directory) / name).exists() for name in _TOKENIZER)
    return None if exists else f"{directory} has no tokenizer ({', '.join(_TOKENIZER)})"


def _adapter(directory: str) -> str | None:
    missing = [name for name in _ADAPTER if not (Path(directory) / name).is_file()]
    return f"{directory} has no {missing[0]}; expected a PEFT adapter" if missing else None


def _prompts(path: str) -> str | None:
    try:
        files_of(parse_path(path)[0])
    except ConfigurationError as error:
        return str(error)
    return None


def _rollouts(path: str) -> str | None:
    return None if Path(path).exists() else f"there is no file or directory {path}"


# --- user functions


def function_problem(dotted: str) -> str | None:
    """Describe what is wrong with `path/to/file.py:name`; None if the function is there.

    A function named by its package is not checked: only the pods may have the package.
    """
    name_of_file, _, name = dotted.rpartition(":")
    if not name_of_file:
        return (
            f"{dotted} names no function; expected {dotted}:name"
            if dotted.endswith(".py")
            else None
        )
    path = Path(name_of_file)
    if path.suffix != ".py":
        return None
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        return (
            f"there is no file {path}"
            if isinstance(error, FileNotFoundError)
            else f"{path}: {error.strerror}"
        )
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        return f"{path}{line}: not valid Python: {getattr(error, 'msg', error)}"
    names = set(_names(tree))
    return (
        None
        if name in names or "*" in names
        else f"{path} has no function {name!r}; {suggestion(name, names)}"
    )


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a module binds at its top level, and `*` if its code may bind others."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield "*" if child.name == "__getattr__" else child.name
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in child.names)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif isinstance(child, ast.Name) and child.id in ("globals", "exec", "setattr"):
            yield "*"
        elif not isinstance(child, ast.Lambda):
            yield from _names(child)
