"""Check the contents of a job's files: rows of prompts, models, lengths, user functions.

The pods check the same, but up to half a minute after the start of a run.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from sluice import model_support
from sluice.api import ManifestError, RLJob, RLJobSpec, manifest
from sluice.api.groups.data import PromptSource
from sluice.api.schema.paths import MarkedPath, marked, volume_of
from sluice.data import chat
from sluice.data.checking import check_rows, check_sources, reader_of, without_template
from sluice.data.files import read_source
from sluice.data.rows import RowReader, prompt_reader
from sluice.data.vocabulary import embedding_size, surplus
from sluice.model_parts import is_mtp, kept_parts_of
from sluice.runtime.pod_env import ConfigurationError
from sluice_cli.validate.task_checks import task_notes
from sluice_rollout import prompts

IMPORT_SECONDS = 60
# Prompts of each source whose length is measured.
MEASURED_PROMPTS = 100


@dataclass(slots=True)
class Findings:
    """Problems that would end a run, and notes that a user should know."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def raise_problems(self) -> None:
        """Raise ManifestError with all problems, if there are any."""
        if self.problems:
            raise ManifestError("\n".join(dict.fromkeys(self.problems)))


def check_contents(job: RLJob, *, rows: int | None = None, run_code: bool = False) -> Findings:
    """Check the files of a resolved job, except files in volumes of a cluster.

    Parameters
    ----------
    job
        A job whose paths are absolute.
    rows
        Number of rows of each prompt file to check. Default: all.
    run_code
        Also make checks that take seconds: import the user functions, in a separate process, and
        look for the model's architecture in transformers.

    """
    spec, findings = job.spec, Findings()
    paths = [p for p in marked(RLJobSpec, manifest(job)["spec"]) if _on_this_machine(p, job)]
    held_out = spec.evaluation.held_out if spec.evaluation else []
    _try(findings, "", lambda: check_sources(spec.data.prompts, _datasets(spec), held_out))
    for where, source, training in _sources(spec):
        read = reader_of(spec) if training else prompt_reader(spec.data.images)
        read = read if _has_template(spec) else without_template(read)
        check = partial(_check_source, findings, spec, where, source, read, rows)
        _try(findings, f"{where}.path: ", check)
    trained = [path for path in paths if path.kind == "model" and not spec.debug.rollout_only]
    for model in trained:
        _try(findings, f"{model.field}: ", lambda: _check_family(job, model, not run_code))  # noqa: B023
    if spec.model.volume is None:
        _check_support(findings, spec)
        _try(findings, "", lambda: _check_vocabulary(findings, Path(spec.model.path)))
        if trained and spec.model.init == "pretrained":
            _note_kept_parts(findings, spec)
    # Lengths say little about files that have other problems.
    if spec.model.volume is None and spec.generates and not findings.problems:
        _check_lengths(findings, spec)
    if run_code:
        functions = [path for path in paths if path.kind == "function"]
        _check_functions(
            findings, [path for path in functions if not _in_other_interpreter(path, spec)]
        )
    return findings


def _check_source(
    findings: Findings,
    spec: RLJobSpec,
    where: str,
    source: PromptSource,
    read: RowReader,
    rows: int | None,
) -> None:
    """Check the rows of a source, and add notes if they are tasks. Raises ConfigurationError."""
    path = source.path or ""
    check_rows(source, path, read, rows, spec.data.images)
    findings.notes += [f"{where}.path: {note}" for note in task_notes(spec, path, rows)]


def _has_template(spec: RLJobSpec) -> bool:
    """Return False only if the model's tokenizer surely has no chat template.

    The template may be in a volume, or in code that comes with the model.
    """
    unknown = spec.model.volume is not None or spec.model.trust_remote_code
    return unknown or chat.has_template(Path(spec.model.path))


def _in_other_interpreter(path: MarkedPath, spec: RLJobSpec) -> bool:
    """Tell whether a function runs in another interpreter; then only the worker can check it."""
    gym = spec.rollout.environment.gym if spec.rollout.environment else None
    return bool(gym and gym.python) and path.field.startswith("spec.rollout.environment.gym.")


def _on_this_machine(path: MarkedPath, job: RLJob) -> bool:
    return volume_of(path, manifest(job)["spec"]) is None


def _try(findings: Findings, prefix: str, check: Callable[[], None]) -> None:
    try:
        check()
    except ConfigurationError as error:
        findings.problems.append(f"{prefix}{error}")
    except ModuleNotFoundError as error:
        findings.notes.append(f"{prefix}not checked: {error.name} is not installed here")


def _datasets(spec: RLJobSpec) -> list[PromptSource]:
    return list(spec.evaluation.datasets) if spec.evaluation else []


def _sources(spec: RLJobSpec) -> Iterator[tuple[str, PromptSource, bool]]:
    """Yield field, source, and whether it is training data, for the prompt files of this machine.

    Sources without a path are functions, and are left out.
    """
    if spec.data.volume is not None or spec.debug.replay:
        return
    for i, source in enumerate(spec.data.prompts):
        if source.path:
            yield f"spec.data.prompts[{i}]", source, True
    for i, dataset in enumerate(_datasets(spec)):
        if dataset.path:
            yield f"spec.evaluation.datasets[{i}]", dataset, False
    for i, source in enumerate(spec.evaluation.held_out if spec.evaluation else []):
        if source.path:
            yield f"spec.evaluation.heldOut[{i}]", source, True


def _check_family(job: RLJob, model: MarkedPath, quickly: bool) -> None:
    from sluice_trainer.model.families import check_family

    check_family(job.spec, Path(model.value), quickly=quickly)


def _check_support(findings: Findings, spec: RLJobSpec) -> None:
    """Add what tests say of the model with the job's backend and engine."""
    try:
        config = json.loads((Path(spec.model.path) / "config.json").read_text())
    except (OSError, ValueError):  # loading the model reports the error
        return
    if isinstance(config, dict):
        problems, notes = model_support.findings(spec, config)
        findings.problems += [f"spec.model.path: {problem}" for problem in problems]
        findings.notes += [f"spec.model.path: {note}" for note in notes]


def _note_kept_parts(findings: Findings, spec: RLJobSpec) -> None:
    """Add a note on parts of the checkpoint that the job does not train.

    A damaged file is a problem.
    """
    try:
        trained = spec.trainer.trained_parts if spec.data.images else ()
        parts = kept_parts_of(Path(spec.model.path), trained)
        if spec.trainer.mtp:
            parts = {part: number for part, number in parts.items() if not is_mtp(part)}
    except ValueError as error:
        findings.problems.append(f"spec.model.path: {error}")
        return
    if not parts:
        return
    counts = ", ".join(
        f"{part} ({number} tensor{'s' * (number > 1)})" for part, number in sorted(parts.items())
    )
    note = (
        f"spec.model.path: {spec.model.path}: the language model is trained; kept and exported as "
        f"they are: {counts}"
    )
    if not spec.weight_sync.engine_plugin:
        note += "; with weightSync.enginePlugin: false set rollout.engineArgs.load-format: auto, "
        note += "else engines do not read them"
    findings.notes.append(note)


# --- vocabulary and lengths


def _check_vocabulary(findings: Findings, directory: Path) -> None:
    """Add a note if the tokenizer has more tokens than the model's embedding."""
    tokenizer = _tokenizer(directory)
    if tokenizer is None:
        return
    tokens = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if warning := surplus(tokens, embedding_size(directory)):
        findings.notes.append(f"spec.model.path: {directory}: {warning}")


def _check_lengths(findings: Findings, spec: RLJobSpec) -> None:
    """Check that the context has room for the longest response and for the prompts."""
    directory = Path(spec.model.path)
    try:
        size = prompts.context_of_model(spec, directory)
        prompts.check_context(spec, size)
        count = _counter(directory)
    except ConfigurationError as error:
        findings.problems.append(str(error))
        return
    if count is None:
        return
    # Tokens that are left for a prompt.
    room = size.tokens - spec.rollout.sampling.max_response_tokens
    room = min(spec.data.max_prompt_tokens or room, room)
    for where, source, training in _sources(spec):
        if training and not spec.algorithm.offline:
            read = prompt_reader(spec.data.images)
            rows = read_source(source.path or "")
            lengths = (count(_text(read(located.row, source).prompt)) for located in rows)
            _check_room(findings, where, lengths, room)


def _check_room(findings: Findings, where: str, lengths: Iterator[int], room: int) -> None:
    sizes = list(islice(lengths, MEASURED_PROMPTS))
    longer = sum(size > room for size in sizes)
    if not longer:
        return
    text = (
        f"{where}: {longer} of the first {len(sizes)} prompts have more than {room} tokens (up to "
        f"{max(sizes)}), the most that data.maxPromptTokens allows or that maxResponseTokens "
        "leaves in the context"
    )
    # Only if all measured prompts are too long, the others are measured too.
    if longer == len(sizes) and all(size > room for size in lengths):
        findings.problems.append(f"{text}; the source has no usable prompt")
    else:
        findings.notes.append(f"{text}; such prompts are skipped")


def _counter(directory: Path) -> Callable[[str], int] | None:
    """Return a function that counts a text's tokens, or None if there is no fast tokenizer."""
    tokenizer = _tokenizer(directory)
    if tokenizer is None:
        return None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _tokenizer(directory: Path) -> Any:
    """Return the model's tokenizer if it loads without transformers, which takes seconds; or None.

    Raises ConfigurationError if the file is not a tokenizer.
    """
    file = directory / "tokenizer.json"
    if importlib.util.find_spec("tokenizers") is None or not file.exists():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain exceptions from Rust
        raise ConfigurationError(f"spec.model.path: {file}: not a tokenizer: {error}") from error


def _text(prompt: str | list[dict[str, object]]) -> str:
    if isinstance(prompt, str):
        return prompt
    contents = (message.get("content") for message in prompt)
    return "\n".join(content for content in contents if isinstance(content, str))


# --- user functions


def _check_functions(findings: Findings, paths: list[MarkedPath]) -> None:
    """Import user functions as a pod would. A missing package may be in the pods' image."""
    functions = [path for path in paths if ":" in path.value or "." in path.value]
    installed = []
    for path in functions:
        package = path.value.replace(":", ".").partition(".")[0]
        if ".py:" in path.value or importlib.util.find_spec(package) is not None:
            installed.append(path)
        else:
            findings.notes.append(
                f"{path.field}: not checked: package {package} is not installed here; the pods' "
                "image must have it"
            )
    problems = _import_problems([path.value for path in installed])
    for path, problem in zip(installed, problems, strict=True):
        if problem:
            findings.problems.append(f"{path.field}: {problem}")


def _import_problems(functions: list[str]) -> list[str]:
    """Import functions in a separate process; return a problem, or an empty text, for each."""
    if not functions:
        return []
    command = [sys.executable, "-m", "sluice.runtime.user_code", *functions]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return [f"the import took more than {IMPORT_SECONDS} s"] * len(functions)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        problem = f"the import ended Python with exit code {done.returncode}: {last}"
        return [problem] * len(functions)
    # User code may print while it is imported, so the result is the last line.
    problems: list[str] = json.loads(lines[-1])
    return problems
