"""The policy: model, optimizer and reference of one trainer process, behind a handful of calls.

Every data-parallel rank makes the same calls in the same order, each with its own shard:

    policy = Policy(job.spec, model_dir=Path(job.spec.model.path), timeout=timedelta(minutes=10))
    policy.load_latest(checkpoints)                      # -> step, or None: start at version 0
    for _ in range(policy.step, steps):
        batch = ...                                      # the same metadata on every rank, tokens of the own shard
        advantages = group_advantages(rewards, groups, normalize_std=True)
        shard = [TrainSequence(tokens, response_length, loss_mask, rollout_log_probs, advantage), ...]
        metrics = policy.train([shard], [BatchTotals(sequences=256, tokens=4096)])
        for name, tensor in policy.hf_tensors(): ...     # to the engines
        policy.save(checkpoints, policy.step)
    policy.export_hf(checkpoints / "hf")
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sluice.api import RLJobSpec
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.algorithms.kl import reward_penalty
from sluice_trainer.megatron import checkpoint, mapping, parallel
from sluice_trainer.megatron.adaptations import DEVICE
from sluice_trainer.megatron.forward import compute_log_probs
from sluice_trainer.megatron.hf_config import read_shape, transformer_config
from sluice_trainer.megatron.model import build, distribute, load_hf, load_random, save_hf
from sluice_trainer.megatron.optimizer import build_optimizer, learning_rate, set_learning_rate
from sluice_trainer.megatron.packing import (
    MicroBatch,
    Sequence,
    TrainSequence,
    equalise,
    micro_batch,
    pack,
    train_micro_batch,
)
from sluice_trainer.megatron.step import StepResult, train_step
from sluice_trainer.ranks import Ranks

__all__ = ["BatchTotals", "Policy", "Sequence", "TrainSequence"]


class Policy:
    """A model that generates log-probs and learns. One per process; joins the process group when it is made."""

    def __init__(
        self,
        spec: RLJobSpec,
        *,
        model_dir: Path,
        timeout: timedelta,
        reference_dir: Path | None = None,
        total_steps: int | None = None,
    ) -> None:
        """Build the model on this process's device at version 0.

        model_dir: Hugging Face checkpoint; with `model.init: random` only its config is used. reference_dir: the
        reference policy's (default: `model.referencePath`, else the model at version 0). timeout: of every collective.
        total_steps: training steps of the run, for the learning-rate schedule (default: `trainer.steps`).
        """
        self.spec = spec
        self.model_dir = model_dir
        self.step = 0
        """Version held: training steps done."""
        self.user_state: dict[str, Any] = {}
        """What the last loaded checkpoint carried for its owner."""
        self._optimizer_steps = 0
        self._total_steps = total_steps or spec.trainer.steps
        parallel.initialize(spec.trainer.parallelism, seed=spec.data.seed, timeout=timeout)
        self.ranks = Ranks.here(timeout)
        self.shape = read_shape(model_dir)
        self._config = self._transformer_config(self.shape)
        model = build(self._config, self.shape)
        self._load_initial(model)
        self.model = distribute(model, self._config)
        self._optimizer = build_optimizer(self.model, self._config, spec.trainer.optimizer)
        self._reference = self._build_reference(reference_dir)
        # Megatron collects garbage at every save. All that imports have left would be looked through: 0.25 s.
        gc.freeze()

    def _transformer_config(self, shape: Any) -> Any:
        trainer = self.spec.trainer
        precision = trainer.precision or ("bf16" if DEVICE.type == "cuda" else "fp32")
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        return transformer_config(shape, trainer.parallelism, dtype=dtype, recompute=trainer.recompute == "full")

    def _load_initial(self, model: Any) -> None:
        if self.spec.model.init == "random":
            load_random(model, self.shape, self.spec.data.seed)
        else:
            load_hf(model, self.shape, self.model_dir)

    def _build_reference(self, directory: Path | None) -> Any:
        """A frozen second model, only where a KL term asks for it.

        It is made from files or from the seed, never from the current weights, so it is the same after a resume.
        """
        kl = self.spec.algorithm.kl
        if not (kl.coef > 0 or kl.loss_coef > 0):
            return None
        if directory is None and self.spec.model.reference_path:
            directory = Path(self.spec.model.reference_path)
        self._reference_shape = self.shape if directory is None else read_shape(directory)
        config = self._transformer_config(self._reference_shape)
        reference = build(config, self._reference_shape).requires_grad_(False)
        if directory is None:
            self._load_initial(reference)
        else:
            load_hf(reference, self._reference_shape, directory)
        return reference

    def log_probs(self, shard: Seq[Sequence]) -> list[Tensor]:
        """Log-probs of each response token under the current weights: per sequence [response] float32, on the CPU."""
        return self._score(self.model, shard, self.shape.vocab)

    def reference_log_probs(self, shard: Seq[Sequence]) -> list[Tensor] | None:
        """The same under the reference policy; None where no KL term is on."""
        if self._reference is None:
            return None
        return self._score(self._reference, shard, self._reference_shape.vocab)

    def kl_penalties(self, shard: Seq[TrainSequence]) -> list[float] | None:
        """`kl.coef` times each response's KL from the reference; None where `kl.coef` is 0.

        Take it off the rewards, over the whole batch, before `group_advantages`: see `algorithms.kl.reward_penalty`.
        """
        kl = self.spec.algorithm.kl
        if not kl.coef > 0:
            return None
        reference = self.reference_log_probs(shard)
        assert reference is not None
        return [
            kl.coef * float(reward_penalty(current, ref, torch.from_numpy(sequence.loss_mask), kl.type))
            for current, ref, sequence in zip(self.log_probs(shard), reference, shard, strict=True)
        ]

    def _score(self, model: Any, shard: Seq[Sequence], vocab: int) -> list[Tensor]:
        if not shard:
            return []
        bins = pack([len(s.tokens) for s in shard], self.spec.trainer.max_tokens_per_gpu)
        batches = [micro_batch(shard, members, DEVICE, multiple=self._row_multiple) for members in bins]
        scores = compute_log_probs(model, batches, temperature=self._temperature, vocab=vocab)
        result: list[Tensor] = [torch.empty(0)] * len(shard)
        for batch, values in zip(batches, scores, strict=True):
            for index, value in zip(batch.members, values, strict=True):
                result[index] = value
        return result

    @property
    def _temperature(self) -> float:
        return self.spec.rollout.sampling.temperature

    @property
    def _row_multiple(self) -> int:
        return self.spec.trainer.parallelism.tensor

    def train(self, shard_by_optimizer_step: Seq[Seq[TrainSequence]], totals: Seq[BatchTotals]) -> dict[str, float]:
        """One training step: an optimizer step on each part of this rank's shard. Collective. `step` is then one up.

        shard_by_optimizer_step: `stepsPerBatch` parts, equally many on every rank, empty ones allowed. totals: of each
        part over all ranks. Returns metrics under slime's names, equal on all ranks; with several optimizer steps their
        mean (the largest for `_max`).
        """
        if len(shard_by_optimizer_step) != len(totals):
            raise ValueError(f"{len(shard_by_optimizer_step)} optimizer steps but {len(totals)} totals")
        parts = self._with_log_probs(shard_by_optimizer_step)
        results = []
        for shard, total in zip(parts, totals, strict=True):
            rate = learning_rate(self._optimizer_steps, self.spec.trainer.optimizer, self._all_optimizer_steps)
            set_learning_rate(self._optimizer, rate)
            results.append(
                train_step(
                    self.model,
                    self._optimizer,
                    self._micro_batches(shard, total),
                    self.spec.algorithm,
                    temperature=self._temperature,
                    vocab=self.shape.vocab,
                )
            )
            self._optimizer_steps += 1
        self.step += 1
        return _metrics(results, rate)

    @property
    def _all_optimizer_steps(self) -> int | None:
        return self._total_steps and self._total_steps * self.spec.trainer.steps_per_batch

    def _with_log_probs(self, parts: Seq[Seq[TrainSequence]]) -> list[list[TrainSequence]]:
        """Add old log-probs where there are several optimizer steps, reference log-probs where there is a KL loss.

        With one optimizer step the old policy is the current one, so the step's own forward pass has its log-probs.
        """
        shard = [sequence for part in parts for sequence in part]
        if len(parts) > 1 and any(sequence.old_log_probs is None for sequence in shard):
            old = self.log_probs(shard)
            shard = [replace(s, old_log_probs=v) for s, v in zip(shard, old, strict=True)]
        if self.spec.algorithm.kl.loss_coef > 0 and any(sequence.ref_log_probs is None for sequence in shard):
            reference = self.reference_log_probs(shard) or []
            shard = [replace(s, ref_log_probs=v) for s, v in zip(shard, reference, strict=True)]
        remaining = iter(shard)
        return [[next(remaining) for _ in part] for part in parts]

    def _micro_batches(self, shard: list[TrainSequence], totals: BatchTotals) -> list[MicroBatch]:
        bins = pack([len(s.tokens) for s in shard], self.spec.trainer.max_tokens_per_gpu)
        bins = equalise(bins, max(parallel.largest_over_data_parallel(len(bins)), 1))
        aggregation = self.spec.algorithm.aggregation
        return [
            train_micro_batch(shard, members, totals, aggregation, DEVICE, multiple=self._row_multiple)
            for members in bins
        ]

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all weights as a Hugging Face checkpoint holds them; see `mapping.hf_tensors`."""
        return mapping.hf_tensors(self.model.module, self.shape)

    def save(
        self, directory: Path, step: int, *, keep: int | None = None, user_state: dict[str, Any] | None = None
    ) -> None:
        """Write checkpoint `step`, then delete all but the newest `keep` (default: `checkpoint.keep`). Collective.

        user_state: anything picklable of the caller's, equal on all ranks; `load_latest` puts it into `user_state`.
        """
        state = {"step": self.step, "optimizer_steps": self._optimizer_steps, "user": user_state or {}}
        checkpoint.save(directory, step, self.model, self._optimizer, state)
        if dist.get_rank() == 0:
            checkpoint.prune(directory, keep or self.spec.checkpoint.keep)

    def load_latest(self, directory: Path) -> int | None:
        """Restore the newest complete checkpoint; returns its step, or None where there is none. Collective."""
        step: int | None = checkpoint.agreed(checkpoint.latest(directory))
        if step is None:
            return None
        state = checkpoint.load(directory, step, self.model, self._optimizer)
        self.step, self._optimizer_steps = state["step"], state["optimizer_steps"]
        self.user_state = state["user"]
        return step

    def export_hf(self, directory: Path) -> None:
        """Write the model as a Hugging Face checkpoint, with config and tokenizer of the one it started from.

        Collective: every rank gathers, rank 0 writes.
        """
        tensors = self.hf_tensors()
        if dist.get_rank() == 0:
            save_hf(tensors, directory, self.model_dir)
        else:
            for _ in tensors:
                pass
        dist.barrier()


def _metrics(results: list[StepResult], rate: float) -> dict[str, float]:
    count = len(results)
    sums = {name: sum(r.sums[name] for r in results) / count for name in results[0].sums}
    maxima = {name: max(r.maxima[name] for r in results) for name in results[0].maxima}
    norm = sum(r.grad_norm for r in results) / count
    values = {**sums, **maxima, "grad_norm": norm, "lr-pg_0": rate}
    return {f"train/{name}": value for name, value in values.items()}
