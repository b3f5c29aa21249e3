"""Models that only score: which of them a job has, and whether a teacher fits its student."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Protocol

from torch import Tensor

from sluice.api import RLJobSpec
from sluice.api.groups.distillation import Distillation
from sluice.data.vocabulary import check_teacher
from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.batch.sequences import Sequence
from sluice_trainer.step.divergence import TeacherDivergence
from sluice_trainer.step.packing import MicroBatch

TEACHER = "spec.algorithm.distillation.teacher.path"


class FrozenModel(Protocol):
    """Weights that stay as they are, laid out as the policy's. Calls are collective.

    They come from files or from the seed, never from the current weights, so they are the same
    after a resume.
    """

    def log_probs(self, shard: Seq[Sequence]) -> list[Tensor]:
        """Log-probs of each response token at the job's temperature: [response] float32, CPU."""

    def with_hidden_states(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with what the last layer sees of them, where there is one here."""

    def teacher_divergence(self, distillation: Distillation) -> TeacherDivergence | None:
        """How a training forward pass compares its model with this one.

        None: only by the sampled token.
        """


def reference_weights(spec: RLJobSpec, model_dir: Path) -> tuple[Path, bool] | None:
    """(directory, drawn) of the reference policy, only where a KL term asks for it.

    `model.referencePath`, else the model at version 0; drawn: its weights come from the seed.
    """
    if not (spec.algorithm.kl.coef > 0 or spec.algorithm.kl.loss_coef > 0):
        return None
    if spec.model.reference_path:
        return Path(spec.model.reference_path), False
    return model_dir, spec.model.init == "random"


def teacher_directory(spec: RLJobSpec) -> Path | None:
    """The directory of the teacher that the trainer scores with."""
    distillation = spec.algorithm.distillation
    if distillation is None or distillation.teacher.path is None:
        return None
    return Path(distillation.teacher.path)


def check_vocabulary(
    spec: RLJobSpec, model_dir: Path, directory: Path, *, student: int, teacher: int
) -> None:
    """Raise ConfigurationError where the teacher's tokens are not the student's.

    student, teacher: their vocab_size.
    """
    if teacher < student:
        raise ConfigurationError(
            f"{TEACHER}: {directory}/config.json has a vocab_size of {teacher}, the student's is "
            f"{student}: some of its tokens would have no log-prob"
        )
    try:
        check_teacher(model_dir, directory, trust_remote_code=spec.model.trust_remote_code)
    except ConfigurationError as error:
        raise ConfigurationError(f"{TEACHER}: {error}") from error
