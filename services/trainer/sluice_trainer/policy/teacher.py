"""The frozen models of a job, reference and teacher, which only score."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from sluice.api import RLJobSpec
from sluice.api.groups.distillation import Distillation
from sluice.data.vocabulary import check_teacher
from sluice.images.processor import ImageProcessor
from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.batch.sequences import Sequence
from sluice_trainer.step.divergence import TeacherDivergence
from sluice_trainer.step.packing import MicroBatch

TEACHER = "spec.algorithm.distillation.teacher.path"


class FrozenModel(Protocol):
    """A model whose weights do not change, with the policy's layout. Calls are collective.

    Its weights come from files or from the seed, never from the current weights, so they are the
    same after a resume.
    """

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of this rank."""

    def log_probs(self, shard: Seq[Sequence]) -> list[Tensor]:
        """Return log-probs of response tokens at the job's temperature: [response] float32, CPU."""

    def with_hidden_states(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with the hidden states before the last layer.

        Only ranks that have the last layer add them.
        """

    def teacher_divergence(self, distillation: Distillation) -> TeacherDivergence | None:
        """Return how a training forward pass compares its model with this one.

        None: it compares only the log-probs of sampled tokens.
        """


def reference_weights(spec: RLJobSpec, model_dir: Path) -> tuple[Path, bool] | None:
    """Return the directory of the reference policy, and whether its weights come from the seed.

    It is `model.referencePath`, else the model at version 0. None if the algorithm needs none.
    """
    if not spec.algorithm.needs_reference:
        return None
    if spec.model.reference_path:
        return Path(spec.model.reference_path), False
    return model_dir, spec.model.init == "random"


def teacher_directory(spec: RLJobSpec) -> Path | None:
    """Return the directory of the teacher that the trainer scores with; None: there is none."""
    distillation = spec.algorithm.distillation
    if distillation is None or distillation.teacher.path is None:
        return None
    return Path(distillation.teacher.path)


def check_vocabulary(
    spec: RLJobSpec, model_dir: Path, directory: Path, *, student: int, teacher: int
) -> None:
    """Check that the teacher has the student's tokens.

    Parameters
    ----------
    spec
        Spec of the job.
    model_dir
        Directory of the student.
    directory
        Directory of the teacher.
    student, teacher
        Their vocab_size.

    Raises
    ------
    ConfigurationError
        The tokens differ.

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


def check_images(model_dir: Path, directory: Path) -> None:
    """Check that the teacher sees images as the student does: they are processed once for both.

    Raises
    ------
    ConfigurationError
        The settings of their image processors differ.

    """
    try:
        student, teacher = (ImageProcessor(path).settings for path in (model_dir, directory))
    except ConfigurationError as error:
        raise ConfigurationError(f"{TEACHER}: {error}") from error
    names = sorted(student.keys() | teacher.keys())
    differing = [name for name in names if student.get(name) != teacher.get(name)]
    if differing:
        raise ConfigurationError(
            f"{TEACHER}: images of {directory} differ in {', '.join(differing)} from those of "
            f"{model_dir}: choose a teacher of the student's family"
        )
