"""`sluice validate`."""

from __future__ import annotations

from pathlib import Path

from sluice.api import load_job
from sluice_cli.resolve import check_files, resolve


def validate_file(path: Path, overrides: list[str]) -> str:
    """One line that says what the job is. Raises ManifestError."""
    job = load_job(path, overrides)
    spec = job.spec
    if spec.model.volume is None and spec.data.volume is None:  # else the files are in the cluster
        check_files(resolve(job, path.parent))
    length = (
        f"{spec.trainer.steps} steps" if spec.trainer.steps else f"{spec.trainer.epochs} epochs"
    )
    method = "sft" if spec.algorithm.sft else spec.algorithm.estimator
    return (
        f"{path}: RLJob {job.key} is valid: {method}, {length} of {spec.rollout.batch_size} x "
        f"{spec.samples_per_prompt} samples, {spec.trainer.world_size} trainer rank(s), "
        f"{1 if spec.replicas is None else spec.replicas} engine(s)"
    )
