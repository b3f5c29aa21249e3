"""The policy under Megatron: model, optimizer, reference, teacher and critic of one trainer
process. A `Backend`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sluice.api import RLJobSpec
from sluice.engines import engine_of
from sluice.engines.base import StackName
from sluice_trainer import custom
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.algorithms.kl import kl_estimate
from sluice_trainer.algorithms.objective import (
    DIFFERENCE_ON_POLICY,
    ON_POLICY,
    Divergence,
    LossInputs,
    Objective,
    policy_objective,
)
from sluice_trainer.algorithms.sft import sft_objective
from sluice_trainer.checkpoint_directory import Author, claim, latest, prune
from sluice_trainer.megatron import frozen, parallel
from sluice_trainer.megatron.checkpoints import checkpoint
from sluice_trainer.megatron.critic import Critic
from sluice_trainer.megatron.huggingface import mapping
from sluice_trainer.megatron.huggingface.config import check_tied, read_shape
from sluice_trainer.megatron.huggingface.files import save_hf
from sluice_trainer.megatron.model.building import build, load_initial
from sluice_trainer.megatron.offload import Offload, memory_used
from sluice_trainer.megatron.step.forward import Forward, compute, forward
from sluice_trainer.megatron.step.learner import Learner, means, model_config, score
from sluice_trainer.megatron.step.optimizer import steps_of_policy
from sluice_trainer.megatron.step.packing import MicroBatch
from sluice_trainer.megatron.step.survey import OptimizerStep, survey
from sluice_trainer.sequences import Sequence, TrainSequence

_LARGEST_LOG = 700.0
"""Of a perplexity that is still a number."""


class Policy:
    """A model that generates log-probs and learns. One per process; joins the process group when it
    is made.
    """

    def __init__(
        self,
        spec: RLJobSpec,
        *,
        model_dir: Path,
        timeout: timedelta,
        total_steps: int | None = None,
        author: Author | None = None,
    ) -> None:
        self.spec = spec
        self.model_dir = model_dir
        self.step = 0
        self._author = author or Author()
        self._claimed: set[Path] = set()
        self._writing: checkpoint.Writing | None = None
        parallel.initialize(spec.trainer.parallelism, seed=spec.data.seed, timeout=timeout)
        self.ranks = parallel.ranks(timeout)
        self.shape = read_shape(model_dir)
        check_tied(self.shape, engine_of(spec).layout.untied, spec.rollout.engine)
        config = model_config(spec, self.shape)
        chunks = build(config, self.shape)
        load_initial(
            chunks, self.shape, None if spec.model.init == "random" else model_dir, spec.data.seed
        )
        total_steps, critic = total_steps or spec.trainer.steps, spec.algorithm.value_model
        own_steps = steps_of_policy(total_steps, critic)
        self._learner = Learner(chunks, config, spec, spec.trainer.optimizer, own_steps)
        self._custom_loss = custom.loss(spec.algorithm)
        self._reference = frozen.reference(spec, model_dir)
        self._teacher, distillation = (
            frozen.teacher(spec, self.shape, model_dir),
            spec.algorithm.distillation,
        )
        self._teaching = (
            self._teacher.teaching(distillation) if self._teacher and distillation else None
        )
        self.critic = Critic(spec, critic, model_dir, total_steps) if critic else None
        asked = [each.chunks for each in (self._reference, self._teacher) if each]
        self._offload = Offload(
            spec.trainer.offloaded,
            self._learners.values(),
            [chunk for chunks in asked for chunk in chunks],
        )
        # Megatron collects garbage at every save. All that imports have left would be looked
        # through: 0.25 s.
        gc.freeze()

    def log_probs(self, shard: Seq[Sequence]) -> list[Tensor]:
        """Log-probs of each response token under the current weights: per sequence [response]
        float32, on the CPU.
        """
        return score(self._learner.chunks, shard, self.spec, self._forward)

    def reference_log_probs(self, shard: Seq[Sequence]) -> list[Tensor] | None:
        """The same under the reference policy; None where no KL term is on."""
        return self._reference.log_probs(shard) if self._reference else None

    def with_kl(self, shard: Seq[TrainSequence]) -> tuple[list[TrainSequence], list[Tensor] | None]:
        kl = self.spec.algorithm.kl
        if not kl.coef > 0:
            return list(shard), None
        current, reference = self.log_probs(shard), self.reference_log_probs(shard)
        assert reference is not None
        found = [
            kl_estimate(log_probs, ref, kl.type)
            for log_probs, ref in zip(current, reference, strict=True)
        ]
        if self.spec.trainer.steps_per_batch > 1:
            shard = [replace(s, old_log_probs=v) for s, v in zip(shard, current, strict=True)]
        return list(shard), found

    @property
    def _forward(self) -> Forward:
        return partial(
            forward,
            temperature=self.spec.temperature,
            vocab=self.shape.vocab,
            teaching=self._teaching,
        )

    def train(
        self, shard_by_optimizer_step: Seq[Seq[TrainSequence]], totals: Seq[BatchTotals]
    ) -> dict[str, float]:
        if len(shard_by_optimizer_step) != len(totals):
            raise ValueError(
                f"{len(shard_by_optimizer_step)} optimizer steps but {len(totals)} totals"
            )
        metrics = self.critic.train(shard_by_optimizer_step, totals) if self.critic else {}
        if not self.critic or self.step >= self.critic.settings.warmup_steps:
            metrics |= self._train(shard_by_optimizer_step, totals)
        self.step += 1
        return metrics

    def _train(
        self, shard_by_optimizer_step: Seq[Seq[TrainSequence]], totals: Seq[BatchTotals]
    ) -> dict[str, float]:
        parts = self._with_log_probs(shard_by_optimizer_step)
        results = []
        for number, (shard, total) in enumerate(zip(parts, totals, strict=True)):
            batches = self._surveyed(number, self._learner.micro_batches(shard, total), shard)
            results.append(self._learner.step(batches, self._forward, self._objective))
        metrics = means(results) | {"lr": self._learner.rate}
        if "nll" in metrics:
            metrics["ppl"] = math.exp(min(metrics.pop("nll"), _LARGEST_LOG))
        if DIFFERENCE_ON_POLICY in metrics:  # a mean over these tokens alone, where there are any
            tokens = metrics.pop(DIFFERENCE_ON_POLICY)
            metrics |= (
                {DIFFERENCE_ON_POLICY: tokens / metrics[ON_POLICY]} if metrics[ON_POLICY] else {}
            )
        return {
            f"train/{'lr-pg_0' if name == 'lr' else name}": value for name, value in metrics.items()
        }

    def _surveyed(
        self, number: int, batches: list[MicroBatch], shard: Seq[TrainSequence]
    ) -> list[MicroBatch]:
        """The micro-batches with what their losses must know of the whole optimizer step."""

        def score(batches: list[MicroBatch]) -> list[Tensor]:
            return [
                torch.cat([torch.empty(0), *parts])
                for parts in compute(self._learner.chunks, batches, self._forward)
            ]

        step = OptimizerStep(number, self._learner.optimizer_steps, shard)
        batches = survey(batches, step, self.spec, self.ranks, score)
        if self._teacher and self._teaching:
            batches = self._teacher.with_hidden_states(batches)
        return batches

    def _objective(self, output: Tensor, inputs: LossInputs) -> Objective:
        log_probs, entropy, *taught = output
        if self.spec.algorithm.sft:
            return sft_objective(log_probs, entropy, inputs, self.spec.algorithm)
        divergence = Divergence(*taught) if taught else None
        return policy_objective(
            log_probs, entropy, inputs, self.spec.algorithm, self._custom_loss, divergence
        )

    def _with_log_probs(self, parts: Seq[Seq[TrainSequence]]) -> list[list[TrainSequence]]:
        """Add old log-probs where there are several optimizer steps, the reference's for a KL loss,
        the teacher's.

        With one optimizer step the old policy is the current one, so the step's own forward pass
        has its log-probs.
        """
        shard = [sequence for part in parts for sequence in part]
        of_ratios = len(parts) > 1 and not self.spec.algorithm.sft
        if of_ratios and parallel.any_rank(
            any(sequence.old_log_probs is None for sequence in shard)
        ):
            old = self.log_probs(shard)
            shard = [replace(s, old_log_probs=v) for s, v in zip(shard, old, strict=True)]
        in_loss = self.spec.algorithm.kl.loss_coef > 0
        if in_loss and parallel.any_rank(any(sequence.ref_log_probs is None for sequence in shard)):
            reference = self.reference_log_probs(shard) or []
            shard = [replace(s, ref_log_probs=v) for s, v in zip(shard, reference, strict=True)]
        if self._teacher and not self._teaching:
            taught = self._teacher.log_probs(shard)
            shard = [replace(s, teacher_log_probs=v) for s, v in zip(shard, taught, strict=True)]
        remaining = iter(shard)
        return [[next(remaining) for _ in part] for part in parts]

    def hf_tensors(self, stack_name: StackName | None = None) -> Iterator[tuple[str, Tensor]]:
        return mapping.hf_tensors(
            [chunk.module for chunk in self._learner.chunks], self.shape, stack_name
        )

    def values(self, shard: Seq[TrainSequence]) -> list[Tensor] | None:
        return self.critic.values(shard) if self.critic else None

    def make_room(self, *, weights: bool) -> None:
        self._offload.leave(weights=weights)

    def come_back(self, *, weights_only: bool = False) -> None:
        self._offload.come_back(weights_only=weights_only)

    def begin_save(self, directory: Path, step: int, *, beside: bool = False) -> None:
        """One that is under way is completed first."""
        self.finish_save(directory, wait=True)
        self._claim(directory)
        state: dict[str, Any] = {"step": self.step}
        state["optimizer_steps"] = {
            name: learner.optimizer_steps for name, learner in self._learners.items()
        }
        self._writing = checkpoint.Writing(
            directory, step, self._parts, state, author=self._author, beside=beside
        )

    def finish_save(self, directory: Path, *, wait: bool) -> int | None:
        """All but the newest `checkpoint.keep` then go."""
        writing = self._writing
        if writing is None or not (wait or writing.ready()):
            return None
        self._writing = None
        writing.complete()
        if dist.get_rank() == 0:
            prune(directory, self.spec.checkpoint.keep, self._author)
        return writing.step

    def load_latest(self, directory: Path) -> int | None:
        self._claim(directory)
        step: int | None = checkpoint.agreed(latest(directory))
        if step is None:
            return None
        state = checkpoint.load(directory, step, self._parts)
        self.step = state["step"]
        for name, learner in self._learners.items():
            learner.optimizer_steps = state["optimizer_steps"][name]
        return step

    def _claim(self, directory: Path) -> None:
        """Make the directory ours, once: an attempt that has lost it must not take it back."""
        if dist.get_rank() == 0 and directory not in self._claimed:
            claim(directory, self._author)
        self._claimed.add(directory)

    def memory_used(self) -> int:
        return memory_used()

    @property
    def _learners(self) -> dict[str, Learner]:
        """The learners, by their directories in a checkpoint."""
        return {".": self._learner} | ({"critic": self.critic.learner} if self.critic else {})

    @property
    def _parts(self) -> checkpoint.Parts:
        return {
            name: (learner.chunks, learner.optimizer) for name, learner in self._learners.items()
        }

    def export_hf(self, directory: Path) -> None:
        """Every rank gathers, rank 0 writes."""
        tensors = self.hf_tensors()
        if dist.get_rank() == 0:
            save_hf(tensors, directory, self.model_dir)
        else:
            for _ in tensors:
                pass
        dist.barrier()
