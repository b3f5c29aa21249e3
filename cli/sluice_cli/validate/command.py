"""`sluice validate`: check jobs and pools as far as possible before they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from ruamel.yaml.comments import CommentedMap

from sluice.api import (
    KIND,
    ManifestError,
    RLEnginePool,
    RLJob,
    load_job,
    parse_pool,
    read_documents,
)
from sluice.api.pool import KIND as POOL
from sluice.stores.cache import hold
from sluice.stores.sources import sources_of
from sluice_cli.models.fetching import cached, local, not_fetched
from sluice_cli.options import say
from sluice_cli.output import Format, written
from sluice_cli.validate import file_checks, footprint
from sluice_cli.validate.missing_files import check_files, checkpoint_problems
from sluice_client.resolve import resolve, resolve_pool
from sluice_operator.cluster.local import pools

if TYPE_CHECKING:
    from sluice_cli.validate.deep_checks import Trial

LORA_LR = 5e-6  # below it an adapter of a language model hardly learns


@dataclass(slots=True)
class Validation:
    """The result for one manifest, which is valid if there are no problems."""

    file: Path
    # Both None if the manifest cannot be read.
    job: RLJob | None = None
    pool: RLEnginePool | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trial: Trial | None = None

    def facts(self) -> dict[str, Any]:
        """Return the entry of `sluice validate -o json` (docs/reference/cli.md)."""
        return {
            "file": str(self.file),
            "valid": not self.problems,
            "job": _facts(self.job) if self.job else None,
            "enginePool": _pool_facts(self.pool) if self.pool else None,
            "problems": self.problems,
            "notes": self.notes,
            "trial": self.trial.facts() if self.trial else None,
        }

    def show(self) -> None:
        """Print the summary of a valid job or pool, the notes and the trial."""
        if self.job and not self.problems:
            typer.echo(_summary(self.file, self.job))
        if self.pool and not self.problems:
            typer.echo(_pool_summary(self.file, self.pool))
        for note in self.notes:
            typer.echo(f"note: {note}")
        if self.trial:
            typer.echo(self.trial.text())

    def show_problems(self, *, with_file: bool) -> None:
        """Print the problems to standard error; `with_file` puts the file before each."""
        for problem in self.problems:
            file = f"{self.file}: " if with_file and str(self.file) not in problem else ""
            typer.echo(f"error: {file}{problem}", err=True)


def validate_all(paths: list[Path], overrides: list[str], *, deep: bool, form: Format) -> bool:
    """Validate manifests and print the results; return True if all are valid."""
    validations = []
    for path in paths:
        for validation in _validate(path, overrides, deep):
            validations.append(validation)
            if form is Format.TEXT:
                validation.show()
    if form is Format.TEXT:
        # Problems come last, so that they are in sight when the command ends.
        for validation in validations:
            validation.show_problems(with_file=len(paths) > 1)
    else:
        say(written([validation.facts() for validation in validations], form))
    return not any(validation.problems for validation in validations)


def _validate(path: Path, overrides: list[str], deep: bool) -> Iterator[Validation]:
    """Validate the pools and the job of a file.

    What cannot be read does not end the command. Overrides are for the job, if there is one.
    """
    try:
        documents = read_documents(path)
    except ManifestError as error:
        yield Validation(path, problems=str(error).splitlines())
        return
    shared = [document for document in documents if document.get("kind") == POOL]
    has_job = not shared or any(document.get("kind") == KIND for document in documents)
    for document in shared:
        yield _validated(
            path, partial(_validate_pool, document, path, [] if has_job else overrides)
        )
    if has_job:
        yield _validated(path, partial(validate_file, path, overrides, deep=deep))


def _validated(path: Path, validate: Callable[[], Validation]) -> Validation:
    try:
        return validate()
    except ManifestError as error:
        return Validation(path, problems=str(error).splitlines())


def _validate_pool(document: CommentedMap, path: Path, overrides: list[str]) -> Validation:
    engines = parse_pool(document, str(path), overrides)
    validation, model = Validation(path, pool=engines), engines.spec.model
    if model.volume is not None:
        validation.notes.append("files in volumes of a cluster were not checked")
    elif sources := sources_of(resolve_pool(engines, path.parent)):
        validation.notes += not_fetched(sources, "sluice pool up")
    else:
        directory = (path.parent / Path(model.path).expanduser()).resolve()
        cure = "the engines of a pool read them from it"
        problems = checkpoint_problems(directory, tokenizer=True, cure=cure)
        validation.problems = [f"spec.model.path: {problem}" for problem in problems]
    return validation


def validate_file(path: Path, overrides: list[str], *, deep: bool = False) -> Validation:
    """Check a manifest and the files that it names.

    Files in volumes of a cluster are not checked.

    Parameters
    ----------
    path, overrides
        The manifest, and fields to set as `PATH=VALUE`.
    deep
        Also fetch URIs, render prompts and compute rewards. Otherwise files of URIs are checked
        as the cache has them.

    Raises
    ------
    ManifestError
        If the manifest is not valid, or files are missing.

    """
    job = load_job(path, overrides)
    validation = Validation(path, job, notes=_learning_rate_notes(job) + _pool_notes(job))
    spec = job.spec
    if spec.adapter_problem:
        validation.problems = [f"spec.trainer.lora.targetModules: {spec.adapter_problem}"]
    if spec.model.volume is not None or spec.data.volume is not None:
        validation.notes.append("files in volumes of a cluster were not checked")
        return validation
    resolved = resolve(job, path.parent)
    check_files(resolved)
    here = local(resolved) if deep else cached(resolved)
    missing = [source for source in sources_of(resolved) if str(source.uri) not in here.fetched]
    if missing:
        validation.notes += not_fetched(missing)
        return validation
    if not deep:
        validation.notes += [
            f"{source.field}: checked as the cache has {source.uri}; its store was not asked"
            for source in sources_of(resolved)
        ]
    with hold(*here.fetched.values()):
        _check_contents(validation, here.job, deep=deep)
    return validation


def _check_contents(validation: Validation, resolved: RLJob, *, deep: bool) -> None:
    """Add what is wrong with the files of a job, which are on this machine."""
    check_files(resolved)
    findings = file_checks.check_contents(resolved, run_code=True)
    validation.problems = validation.problems + findings.problems
    validation.notes = validation.notes + findings.notes
    if problem := _refusal(resolved):
        validation.notes.append(f"sluice run would refuse this job on this machine: {problem}")
    if deep and not findings.problems:
        from sluice_cli.validate import deep_checks

        validation.trial = deep_checks.try_prompts(resolved)
        validation.problems += validation.trial.problems


def _learning_rate_notes(job: RLJob) -> list[str]:
    """Return a note if the learning rate is low for an adapter.

    About ten times that of full training is best (Schulman et al. 2025, "LoRA Without Regret").
    """
    trainer = job.spec.trainer
    if trainer.lora is None or trainer.optimizer.lr >= LORA_LR:
        return []
    return [
        f"spec.trainer.optimizer.lr: {trainer.optimizer.lr:g} is low for an adapter, which learns "
        "best at about ten times the rate of full training"
    ]


def _pool_notes(job: RLJob) -> list[str]:
    """Return a note about the pool that a job needs."""
    pool = job.spec.rollout.pool
    if pool is None:
        return []
    return [
        f"spec.rollout.pool: the engines are those of the RLEnginePool {pool}: it has to exist in "
        f"the namespace {job.metadata.namespace} of the cluster, or run on this machine for sluice "
        "run"
    ]


def _refusal(job: RLJob) -> str:
    """Return why this machine cannot run a resolved job; empty if it may."""
    pool = pools.facts(job)
    return footprint.shortage(job) or (pool.problem if pool else "")


def _facts(job: RLJob) -> dict[str, Any]:
    spec = job.spec
    return {
        "name": job.metadata.name,
        "namespace": job.metadata.namespace,
        "method": spec.algorithm.loss.type if spec.algorithm.offline else spec.algorithm.estimator,
        "steps": spec.trainer.steps,
        "epochs": spec.trainer.epochs,
        "batchSize": spec.rollout.batch_size,
        "samplesPerPrompt": spec.samples_per_prompt,
        "trainerRanks": spec.trainer.world_size,
        "engines": spec.own_engines,
        "pool": spec.rollout.pool,
    }


def _pool_facts(engines: RLEnginePool) -> dict[str, Any]:
    spec = engines.spec
    return {
        "name": engines.metadata.name,
        "namespace": engines.metadata.namespace,
        "engines": spec.replicas,
        "gpusPerReplica": spec.gpus_per_replica,
        "maxAdapters": spec.max_adapters,
        "maxRank": spec.max_rank,
    }


def _pool_summary(path: Path, engines: RLEnginePool) -> str:
    facts = _pool_facts(engines)
    return (
        f"{path}: RLEnginePool {engines.key} is valid: {facts['engines']} engine(s) of "
        f"{facts['gpusPerReplica']} GPU(s), {facts['maxAdapters']} adapters up to rank "
        f"{facts['maxRank']}"
    )


def _summary(path: Path, job: RLJob) -> str:
    facts = _facts(job)
    length = f"{facts['steps']} steps" if facts["steps"] else f"{facts['epochs']} epochs"
    pool = facts["pool"]
    engines = f"engines of the pool {pool}" if pool else f"{facts['engines']} engine(s)"
    return (
        f"{path}: RLJob {job.key} is valid: {facts['method']}, {length} of {facts['batchSize']} x "
        f"{facts['samplesPerPrompt']} samples, {facts['trainerRanks']} trainer rank(s), "
        f"{engines}"
    )
