"""A second model that only scores: the reference policy, or the teacher of a distillation."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from sluice.api import RLJobSpec
from sluice.api.groups.distillation import Distillation
from sluice_trainer.batch.sequences import Sequence
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.fsdp.learner import score
from sluice_trainer.fsdp.loading import Recipe
from sluice_trainer.fsdp.lora import without_adapter
from sluice_trainer.fsdp.net import Net, forward, forward_hidden
from sluice_trainer.fsdp.row_share import RowShare
from sluice_trainer.fsdp.sharding import build, reshard
from sluice_trainer.policy.teacher import (
    check_images,
    check_vocabulary,
    reference_weights,
    teacher_directory,
)
from sluice_trainer.step.divergence import TeacherDivergence
from sluice_trainer.step.micro_batch_size import MicroBatchSize
from sluice_trainer.step.packing import MicroBatch


class ShardedFrozenModel:
    """A model with fixed weights, sharded over all ranks, in the precision of computation."""

    def __init__(
        self, spec: RLJobSpec, size: MicroBatchSize, recipe: Recipe, ranks: Ranks, share: RowShare
    ) -> None:
        recipe = replace(recipe, lora=None, mtp=False)
        self.net: Net = build(recipe, ranks, share, spec.trainer, learns=False)
        self._spec, self._size, self._ranks = spec, size, ranks

    @property
    def modules(self) -> list[nn.Module]:
        return [self.net.model]

    def log_probs(self, shard: Seq[Sequence]) -> list[Tensor]:
        """Return log-probs of the response tokens at the job's temperature.

        Per sequence [response] float32, on the CPU.
        """
        model = self._spec.model
        scorer = partial(forward, temperature=self._spec.temperature, fp32_head=model.fp32_lm_head)
        return score(self.net, shard, self._size, self._ranks, scorer)

    @torch.no_grad()
    def with_hidden_states(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with this model's hidden states before its output layer."""
        states = [forward_hidden(self.net, batch).cpu() for batch in batches]
        reshard(self.net)
        return [replace(batch, teacher_hidden=s) for batch, s in zip(batches, states, strict=True)]

    def teacher_divergence(self, distillation: Distillation) -> TeacherDivergence | None:
        """Return how a training pass compares its model with this one.

        None if only sampled tokens are compared.
        """
        if distillation.whole is None:
            return None
        return TeacherDivergence(self._logits, distillation.whole, distillation.mixture)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Apply the output layer outside of a forward pass; its weights stay gathered."""
        assert isinstance(self.net, FSDPModule)
        self.net.unshard()
        return self.net.final(self.net.output(fp32=self._spec.model.fp32_lm_head)(hidden))


class BaseModel(ShardedFrozenModel):
    """The weights of a policy without its adapters."""

    def __init__(self, spec: RLJobSpec, size: MicroBatchSize, net: Net, ranks: Ranks) -> None:
        self.net = net
        self._spec, self._size, self._ranks = spec, size, ranks

    def log_probs(self, shard: Seq[Sequence]) -> list[Tensor]:
        with without_adapter(self.net.model):
            return super().log_probs(shard)


def reference(
    spec: RLJobSpec, size: MicroBatchSize, policy: Recipe, ranks: Ranks, net: Net
) -> ShardedFrozenModel | None:
    """Return the reference policy if the algorithm needs it.

    A policy with adapters has it already: it is `net` without them.
    """
    weights = reference_weights(spec, policy.directory)
    if weights is None:
        return None
    directory, drawn = weights
    if policy.lora and directory == policy.directory:
        return BaseModel(spec, size, net, ranks)
    recipe = replace(policy, directory=directory, drawn=drawn)
    return ShardedFrozenModel(spec, size, recipe, ranks, net.share)


def teacher(
    spec: RLJobSpec, size: MicroBatchSize, policy: Recipe, ranks: Ranks, share: RowShare
) -> ShardedFrozenModel | None:
    """Return the teacher, or None if the trainer does not score with one.

    Raises
    ------
    ConfigurationError
        If its vocabulary, or with images its image processor, is not the student's.

    """
    directory = teacher_directory(spec)
    if directory is None:
        return None
    recipe = replace(policy, directory=directory, drawn=False)
    if policy.vision is not None:
        check_images(policy.directory, directory)
    student_words, teacher_words = _words(policy.config()), _words(recipe.config())
    check_vocabulary(
        spec, policy.directory, directory, student=student_words, teacher=teacher_words
    )
    return ShardedFrozenModel(spec, size, recipe, ranks, share)


def _words(config: object) -> int:
    size: int = config.get_text_config().vocab_size  # type: ignore[attr-defined]
    return size
