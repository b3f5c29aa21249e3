"""A second model that only scores: the reference policy, or the teacher of a distillation."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from sluice.api import RLJobSpec
from sluice.api.groups.distillation import Distillation
from sluice_trainer.batch.sequences import Sequence
from sluice_trainer.megatron.model.building import build, load_initial
from sluice_trainer.megatron.step.forward import forward, head, hidden_states
from sluice_trainer.megatron.step.learner import MegatronLearner, model_config, score
from sluice_trainer.model.huggingface_config import ModelShape, read_shape
from sluice_trainer.policy.teacher import check_vocabulary, reference_weights, teacher_directory
from sluice_trainer.step.divergence import TeacherDivergence
from sluice_trainer.step.micro_batch_size import MicroBatchSize
from sluice_trainer.step.packing import MicroBatch


class MegatronFrozenModel:
    """A model with fixed weights, in the policy's parallel layout and precision."""

    def __init__(
        self, spec: RLJobSpec, size: MicroBatchSize, shape: ModelShape, weights: Path | None
    ) -> None:
        """Build the model.

        Parameters
        ----------
        spec
            The job.
        size
            Size of micro-batches.
        shape
            Shape of the model.
        weights
            A Hugging Face checkpoint; None: random weights, drawn as the policy's with `model.init:
            random`.

        """
        self._spec, self._size, self._shape = spec, size, shape
        self.chunks = [
            chunk.requires_grad_(False) for chunk in build(model_config(spec, shape), shape)
        ]
        load_initial(self.chunks, shape, weights, spec.data.seed)

    @property
    def modules(self) -> list[nn.Module]:
        return self.chunks

    def log_probs(self, shard: Seq[Sequence]) -> list[Tensor]:
        """Return log-probs of the response tokens at the job's temperature.

        Per sequence [response] float32, on the CPU.
        """
        scorer = partial(
            forward,
            temperature=self._spec.temperature,
            vocab=self._shape.vocab,
            fp32_head=self._spec.model.fp32_lm_head,
        )
        return score(self.chunks, shard, self._spec.trainer.parallelism, self._size, scorer)

    def with_hidden_states(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with this model's hidden states before its output layer.

        Only the last pipeline stage has them.
        """
        states = hidden_states(self.chunks, batches)
        if not states:
            return batches
        return [
            replace(batch, teacher_hidden=hidden)
            for batch, hidden in zip(batches, states, strict=True)
        ]

    def teacher_divergence(self, distillation: Distillation) -> TeacherDivergence | None:
        """Return how a training pass compares its model with this one.

        None if only sampled tokens are compared.
        """
        if distillation.whole is None:
            return None
        last = head(self.chunks[-1], fp32=self._spec.model.fp32_lm_head)
        return TeacherDivergence(last, distillation.whole, distillation.mixture)


class BaseModel(MegatronFrozenModel):
    """The weights of a policy without its adapters."""

    def __init__(
        self, spec: RLJobSpec, size: MicroBatchSize, shape: ModelShape, policy: MegatronLearner
    ) -> None:
        assert policy.adapters is not None
        self._spec, self._size, self._shape = spec, size, shape
        self.chunks, self._adapters = policy.chunks, policy.adapters

    def log_probs(self, shard: Seq[Sequence]) -> list[Tensor]:
        # Its routers choose the experts, as those of any other reference do.
        shard = [replace(sequence, experts=None) for sequence in shard]
        with self._adapters.disabled():
            return super().log_probs(shard)


def reference(
    spec: RLJobSpec, size: MicroBatchSize, model_dir: Path, policy: MegatronLearner
) -> MegatronFrozenModel | None:
    """Return the reference policy, or None if the algorithm needs none.

    A policy with adapters has it already: it is the model without them.
    """
    weights = reference_weights(spec, model_dir)
    if weights is None:
        return None
    directory, drawn = weights
    if policy.adapters and directory == model_dir:
        return BaseModel(spec, size, read_shape(directory), policy)
    return MegatronFrozenModel(spec, size, read_shape(directory), None if drawn else directory)


def teacher(
    spec: RLJobSpec, size: MicroBatchSize, student: ModelShape, model_dir: Path
) -> MegatronFrozenModel | None:
    """Return the teacher, or None if the trainer does not score with one.

    Raises
    ------
    ConfigurationError
        If its vocabulary is not the student's.

    """
    directory = teacher_directory(spec)
    if directory is None:
        return None
    shape = read_shape(directory)
    check_vocabulary(spec, model_dir, directory, student=student.vocab, teacher=shape.vocab)
    return MegatronFrozenModel(spec, size, shape, directory)
