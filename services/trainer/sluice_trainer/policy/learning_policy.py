"""The policy of any backend: its training steps and its checkpoints.

A backend adds how the model is built, split over ranks, computed and written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sluice.api import RLJobSpec
from sluice.engines.protocol import ADAPTER_PREFIX, ADAPTER_SCALING, StackName
from sluice.stores import StoreError
from sluice.telemetry import logs
from sluice_trainer.algorithms import custom
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
from sluice_trainer.algorithms.preference import (
    preference_objective,
    reward_model_objective,
    with_means_by_label,
)
from sluice_trainer.algorithms.sft import sft_objective, with_perplexity
from sluice_trainer.batch.sequences import Sequence, TrainSequence
from sluice_trainer.checkpoint import checkpoint_writer
from sluice_trainer.checkpoint.background_deletion import BackgroundDeletion
from sluice_trainer.checkpoint.checkpoint_directory import (
    Author,
    DamagedError,
    claim,
    latest_step,
    path_of,
    prune,
)
from sluice_trainer.checkpoint.checkpoint_store import CheckpointStore
from sluice_trainer.checkpoint.checkpoint_writer import (
    CheckpointError,
    CheckpointWriter,
    CollectPart,
)
from sluice_trainer.distributed.device import compute_dtype
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.lora.checkpoint import kind_problem
from sluice_trainer.lora.files import save_adapter
from sluice_trainer.memory.offload import Offload, memory_used
from sluice_trainer.model import deterministic
from sluice_trainer.model.complete_checkpoint import save_complete
from sluice_trainer.model.huggingface_files import Config, read_config, save_hf, sequence_classifier
from sluice_trainer.policy.critic import CriticModel
from sluice_trainer.policy.hooks import HookContext, ModelName, TrainerHooks
from sluice_trainer.policy.teacher import FrozenModel
from sluice_trainer.step.batch_statistics import (
    OptimizerStep,
    reference_kl,
    with_step_statistics,
)
from sluice_trainer.step.divergence import TeacherDivergence
from sluice_trainer.step.learner import Learner
from sluice_trainer.step.logits import TokenNumbers, energies, log_probs_and_entropies
from sluice_trainer.step.micro_batch_size import MicroBatchSize
from sluice_trainer.step.packing import Forward, MicroBatch
from sluice_trainer.step.results import means

if TYPE_CHECKING:
    from peft import LoraConfig


@contextmanager
def _checkpoint_errors() -> Iterator[None]:
    """Raise errors of a store as CheckpointError, which ends the trainer with one sentence."""
    try:
        yield
    except (StoreError, DamagedError) as error:
        raise CheckpointError(str(error)) from error


class LearningPolicy(ABC):
    """A `Backend`: a model that scores sequences and learns from them. One per process.

    Parameters
    ----------
    spec
        Spec of the job.
    model_dir
        Hugging Face checkpoint that the model started from.
    author
        This attempt of the trainer, for its checkpoints.

    """

    ranks: Ranks
    _learner: Learner
    _reference: FrozenModel | None
    _teacher: FrozenModel | None
    critic: CriticModel | None
    _offload: Offload
    _adapter: LoraConfig | None = None  # PEFT's configuration of `trainer.lora`

    def __init__(self, spec: RLJobSpec, model_dir: Path, author: Author | None) -> None:
        self.spec = spec
        self.model_dir = model_dir
        self.step = 0
        self.kl_coef = spec.algorithm.kl.coef
        self._author = author or Author()
        self._store = CheckpointStore.of(spec.checkpoint.to, self._author)
        self._claimed: set[Path] = set()
        self._writing: CheckpointWriter | None = None
        self._removals = BackgroundDeletion()
        self._custom_loss = custom.loss(spec.algorithm)
        self._hooks = TrainerHooks.load(spec)
        self._micro_batch_size = MicroBatchSize.for_trainer(spec.trainer)

    @property
    def _teacher_divergence(self) -> TeacherDivergence | None:
        """The divergence that a training forward pass also computes; None: none."""
        distillation = self.spec.algorithm.distillation
        return (
            self._teacher.teacher_divergence(distillation)
            if self._teacher and distillation
            else None
        )

    @abstractmethod
    def _forward_of(self, numbers: TokenNumbers) -> Forward:
        """Return the forward pass that computes [k, r] `numbers` of the response tokens.

        The rows of `_teacher_divergence` follow below.
        """

    @property
    @abstractmethod
    def _forward_values(self) -> Forward:
        """The forward pass of a model with a head of one number: [1, r]."""

    @property
    def _forward(self) -> Forward:
        """The forward pass of training.

        Its first rows are log-probs and entropies, or the rewards of a reward model.
        """
        if self.spec.algorithm.trains_reward_model:
            return self._forward_values
        return self._forward_of(log_probs_and_entropies)

    @abstractmethod
    def _collectors(self, state: dict[str, Any]) -> dict[str, CollectPart]:
        """Return how to collect the checkpoint of each of `_learners`.

        `state` is stored with them and equal on all ranks.
        """

    def _writer_messages(self) -> AbstractContextManager[list[str]]:
        """Collect errors that the backend's library only logs; see `CheckpointWriter`."""
        return nullcontext([])

    @abstractmethod
    def _load(self, directory: Path, step: int) -> dict[str, Any]:
        """Restore checkpoint `step` into all `_learners` and return its state."""

    @abstractmethod
    def hf_tensors(
        self, stack_name: StackName | None = None, receivers: frozenset[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]: ...

    def engine_tensors(
        self, stack_name: StackName | None = None, receivers: frozenset[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        if self.spec.weight_sync.lora == "merged":
            yield from self.hf_tensors(stack_name, receivers)
            return
        # In the precision that the trainer computes in; sorted, so that layers stay together.
        dtype = compute_dtype(self.spec.trainer.precision)
        tensors = sorted(self.adapter_tensors().items())
        lora = self.spec.trainer.lora
        assert lora is not None
        yield ADAPTER_SCALING, torch.tensor([lora.scaling], device=tensors[0][1].device)
        for name, tensor in tensors:
            yield ADAPTER_PREFIX + name, tensor.to(dtype)

    @abstractmethod
    def adapter_tensors(self) -> dict[str, Tensor]:
        """Return the adapter's whole tensors in float32, by PEFT's names. Collective."""

    @property
    def _learners(self) -> Mapping[str, Learner]:
        """The learners by their directory in a checkpoint."""
        return {".": self._learner} | ({"critic": self.critic.learner} if self.critic else {})

    # --- hooks of the user

    def _call_init_hook(self) -> None:
        """Call `trainer.hooks.init`, before the model is built."""
        self._hooks.init(HookContext(self.spec, self.ranks.rank, self.ranks.world_size))

    def _before_log_probs(self, model: ModelName) -> None:
        """Call `trainer.hooks.beforeLogProbs`, before this model computes without gradients."""
        self._hooks.before_log_probs(self._hook_context(model))

    def _hook_context(self, model: ModelName = "policy", optimizer_step: int = 0) -> HookContext:
        frozen = {"policy": None, "reference": self._reference, "teacher": self._teacher}[model]
        return HookContext(
            self.spec,
            self.ranks.rank,
            self.ranks.world_size,
            step=self.step + 1,
            optimizer_step=optimizer_step,
            model=model,
            modules=(frozen or self._learner).modules,
            optimizer=self._learner.optimizer,
        )

    # --- log-probs

    def log_probs(self, shard: Seq[Sequence]) -> list[Tensor]:
        """Return log-probs of response tokens under the current weights, [response] float32."""
        self._before_log_probs("policy")
        return self._learner.score(shard, self._forward)

    def reference_log_probs(self, shard: Seq[Sequence]) -> list[Tensor] | None:
        """Return log-probs of response tokens under the reference; None if the job has none."""
        if self._reference is None:
            return None
        self._before_log_probs("reference")
        return self._reference.log_probs(shard)

    def with_kl(self, shard: Seq[TrainSequence]) -> tuple[list[TrainSequence], list[Tensor] | None]:
        kl = self.spec.algorithm.kl
        # The manifest's coefficient, because an adaptive one may rise again from 0.
        if not kl.coef > 0:
            return list(shard), None
        scored, reference = self._with_old_log_probs(shard), self.reference_log_probs(shard)
        assert reference is not None
        current = [s.old_log_probs for s in scored if s.old_log_probs is not None]
        pairs = zip(current, reference, strict=True)
        divergences = [kl_estimate(log_probs, ref, kl.type) for log_probs, ref in pairs]
        return scored if self.spec.trainer.steps_per_batch > 1 else list(shard), divergences

    def _with_old_log_probs(self, shard: Seq[TrainSequence]) -> list[TrainSequence]:
        """Return the sequences with log-probs of the weights before the step. Collective."""
        old = self.log_probs(shard)
        return [replace(s, old_log_probs=v) for s, v in zip(shard, old, strict=True)]

    def energies(self, shard: Seq[Sequence]) -> list[Tensor]:
        return self._learner.score(shard, self._forward_of(energies))

    def values(self, shard: Seq[TrainSequence]) -> list[Tensor] | None:
        return self.critic.values(shard) if self.critic else None

    # --- a training step

    def train(
        self, shard_by_optimizer_step: Seq[Seq[TrainSequence]], totals: Seq[BatchTotals]
    ) -> dict[str, float]:
        parts = shard_by_optimizer_step
        if len(parts) != len(totals):
            raise ValueError(f"{len(parts)} optimizer steps but {len(totals)} totals")
        size = self._micro_batch_size
        size.begin_step()
        metrics = self.critic.train(parts, totals) if self.critic else {}
        if not self.critic or self.step >= self.critic.settings.warmup_steps:
            metrics |= self._train(parts, totals)
            # Steps of a critic alone are no evidence for the memory of the policy's steps.
            metrics |= size.end_step(self.ranks)
        self.step += 1
        return metrics

    def _train(self, parts: Seq[Seq[TrainSequence]], totals: Seq[BatchTotals]) -> dict[str, float]:
        parts = self._with_log_probs(parts)
        results = []
        for number, (shard, total) in enumerate(zip(parts, totals, strict=True)):
            batches = self._micro_batches(shard, total)
            batches = self._with_step_statistics(number, batches, shard)
            self._micro_batch_size.record(batches)
            self._hooks.before_train_step(self._hook_context(optimizer_step=number))
            results.append(self._learner.step(batches, self._forward, self._objective))
        metrics = with_perplexity(with_means_by_label(means(results)))
        metrics["lr"] = self._learner.rate
        if DIFFERENCE_ON_POLICY in metrics:  # turn it into a mean over on-policy tokens alone
            tokens, share = metrics.pop(DIFFERENCE_ON_POLICY), metrics[ON_POLICY]
            metrics |= {DIFFERENCE_ON_POLICY: tokens / share} if share else {}
        named = {"lr-pg_0" if name == "lr" else name: value for name, value in metrics.items()}
        if deterministic.enabled():
            named["deterministic"] = 1.0
        return {f"train/{name}": value for name, value in named.items()}

    def _micro_batches(self, shard: Seq[TrainSequence], total: BatchTotals) -> list[MicroBatch]:
        if self.spec.algorithm.loss.type == "kto":
            return self._batches_of_kto(shard, total)
        return self._learner.micro_batches(shard, total)

    def with_reference(self, shard: Seq[TrainSequence]) -> list[TrainSequence]:
        """Add the reference's log-probs if the loss compares with them. Collective."""
        # A KL penalty inside the reward has compared the policy with the reference before.
        in_loss = self.spec.algorithm.needs_reference and not self.spec.algorithm.kl.coef > 0
        if not in_loss or not self._any_rank(any(s.ref_log_probs is None for s in shard)):
            return list(shard)
        reference = self.reference_log_probs(shard) or []
        return [replace(s, ref_log_probs=v) for s, v in zip(shard, reference, strict=True)]

    def measure(self, shard: Seq[TrainSequence], totals: BatchTotals) -> dict[str, float]:
        batches = self._micro_batches(shard, totals)
        return self._learner.measure(batches, self._forward, self._objective)

    def _batches_of_kto(self, shard: Seq[TrainSequence], total: BatchTotals) -> list[MicroBatch]:
        """Return the micro-batches of the answers, with the KL of the others. Collective.

        The branch of a sample is its prompt with another answer (`reference_kl`).
        """
        mismatched = [s for s in shard if s.branch]
        kl = reference_kl(mismatched, self.log_probs(mismatched), self.ranks)
        batches = self._learner.micro_batches([s for s in shard if not s.branch], total)
        return [
            replace(b, loss=replace(b.loss, reference_kl=kl)) for b in batches if b.loss is not None
        ]

    def _with_step_statistics(
        self, number: int, batches: list[MicroBatch], shard: Seq[TrainSequence]
    ) -> list[MicroBatch]:
        """Add what the losses of micro-batches need to know of the whole optimizer step."""

        def score(batches: list[MicroBatch]) -> list[Tensor]:
            values = self._learner.compute(batches, self._forward)
            return [torch.cat([torch.empty(0), *parts]) for parts in values]

        step = OptimizerStep(number, self._learner.optimizer_steps, shard)
        batches = with_step_statistics(batches, step, self.spec, self.ranks, score)
        if self._teacher and self._teacher_divergence:
            self._before_log_probs("teacher")
            batches = self._teacher.with_hidden_states(batches)
        return batches

    def _objective(self, output: Tensor, inputs: LossInputs) -> Objective:
        algorithm = self.spec.algorithm
        if algorithm.trains_reward_model:
            return reward_model_objective(output[0], inputs, algorithm.loss.preferences)
        log_probs, entropy, *divergences = output
        if algorithm.prefers:
            return preference_objective(log_probs, entropy, inputs, algorithm.loss)
        if algorithm.offline:
            return sft_objective(log_probs, entropy, inputs, algorithm)
        divergence = Divergence(*divergences) if divergences else None
        return policy_objective(
            log_probs, entropy, inputs, algorithm, self._custom_loss, divergence
        )

    def _with_log_probs(self, parts: Seq[Seq[TrainSequence]]) -> list[list[TrainSequence]]:
        """Add the log-probs that a step needs beforehand.

        They are the reference's for a loss that needs them, the teacher's, and with several
        optimizer steps those of the old policy. With one optimizer step the old policy is the
        current one, whose log-probs the training forward pass computes.
        """
        shard = [sequence for part in parts for sequence in part]
        needs_old = len(parts) > 1 and not self.spec.algorithm.offline
        if needs_old and self._any_rank(any(s.old_log_probs is None for s in shard)):
            shard = self._with_old_log_probs(shard)
        shard = self.with_reference(shard)
        if self._teacher and not self._teacher_divergence:
            self._before_log_probs("teacher")
            teacher = self._teacher.log_probs(shard)
            shard = [replace(s, teacher_log_probs=v) for s, v in zip(shard, teacher, strict=True)]
        # Restore the split into optimizer steps.
        remaining = iter(shard)
        return [[next(remaining) for _ in part] for part in parts]

    def _any_rank(self, fact: bool) -> bool:
        """Return whether a fact holds on any rank, so that all ranks decide alike. Collective."""
        return any(self.ranks.gather(fact))

    # --- memory

    def offload(self, *, weights: bool) -> None:
        self._offload.offload(weights=weights)

    def restore(self, *, weights_only: bool = False) -> None:
        self._offload.restore(weights_only=weights_only)

    def memory_used(self) -> int:
        return memory_used()

    # --- checkpoints

    def reserve_copies(self) -> None:
        with self._writer_messages():
            checkpoint_writer.reserve(self._collectors(self._state()))

    def begin_save(self, directory: Path, step: int, *, background: bool = False) -> None:
        """Begin to write checkpoint `step`, after completing one that is in progress."""
        self.finish_save(directory, wait=True)
        self._claim(directory)
        self._writing = CheckpointWriter(
            directory,
            step,
            self._collectors(self._state()),
            ranks=self.ranks,
            author=self._author,
            store=self._store,
            in_background=background,
            messages=self._writer_messages(),
        )

    def _state(self) -> dict[str, Any]:
        """The content of a checkpoint besides its learners, equal on all ranks."""
        counts = {name: learner.optimizer_steps for name, learner in self._learners.items()}
        return {"step": self.step, "optimizer_steps": counts, "kl_coef": self.kl_coef}

    def finish_save(self, directory: Path, *, wait: bool) -> int | None:
        """Complete a checkpoint; then delete all but the newest `checkpoint.keep` in a thread."""
        writing = self._writing
        if writing is None or not (wait or writing.ready()):
            return None
        self._writing = None
        writing.complete()
        if self.ranks.rank == 0:
            self._prune(directory)
        return writing.step

    def _prune(self, directory: Path) -> None:
        keep = self.spec.checkpoint.keep
        if self._store is None:
            prune(directory, keep, self._author, self._removals.add)
            return
        try:
            for step in self._store.prune(keep):
                name = str(self._store.uri_of(step))
                self._removals.submit(partial(self._store.delete, step), name)
        except StoreError as error:  # the new checkpoint is durable all the same
            logs.get().warning(f"old checkpoints were not deleted: {error}")

    def load_latest(self, directory: Path) -> int | None:
        self._claim(directory)
        if self._store is None:
            # Rank 0 decides: a shared file system may show other ranks an older directory.
            step = self.ranks.broadcast(latest_step(directory))
            return step if step is None else self._load_step(directory, step)
        with _checkpoint_errors():
            step = self._store.latest() if self.ranks.rank == 0 else None
        step = self.ranks.broadcast(step)
        if step is None:
            return None
        # Each rank fetches the small files; it reads of the shards what it needs.
        with TemporaryDirectory(dir=directory) as fetched:
            with _checkpoint_errors():
                self._store.fetch(step, Path(fetched))
            try:
                return self._load_step(Path(fetched), step)
            except CheckpointError as error:
                message = str(error).replace(fetched, str(self._store.uri))
                raise CheckpointError(message) from error

    def _load_step(self, directory: Path, step: int) -> int:
        trains_adapter = self._adapter is not None
        problem = kind_problem(path_of(directory, step), adapter=trains_adapter)
        if problem := self.ranks.broadcast(problem):
            raise CheckpointError(problem)
        state = self._load(directory, step)
        self.step = state["step"]
        if self.spec.algorithm.kl.adaptive:
            self.kl_coef = state.get("kl_coef", self.kl_coef)
        for name, learner in self._learners.items():
            learner.optimizer_steps = state["optimizer_steps"][name]
        return step

    def _claim(self, directory: Path) -> None:
        """Claim the directory once: an attempt that has lost it must not take it back."""
        if self.ranks.rank == 0 and directory not in self._claimed:
            claim(directory, self._author)
            if self._store is not None:
                with _checkpoint_errors():
                    self._store.claim()
        if self._store is not None:  # the nodes need not share it
            directory.mkdir(parents=True, exist_ok=True)
        self._claimed.add(directory)

    def export_adapter(self, directory: Path) -> None:
        """Gather the adapter on every rank; rank 0 writes it."""
        assert self._adapter is not None
        tensors = self.adapter_tensors()
        if self.ranks.rank == 0:
            config = self._adapter
            if self.spec.algorithm.trains_reward_model:
                # Its head is trained whole.
                config = replace(config, task_type="SEQ_CLS", modules_to_save=["score"])
            save_adapter(tensors, directory, config)
        dist.barrier()

    def _own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that an export takes from the model, on rank 0. Collective."""
        return self.hf_tensors(receivers=frozenset({0}))

    def _own_config(self) -> Config:
        """Return the config.json of the tensors that the model holds."""
        return read_config(self.model_dir)

    def export_hf(self, directory: Path) -> None:
        """Gather the weights on every rank and write them on rank 0.

        Tensors of `model.path` that are not trained are copied from there, unless the weights were
        drawn.
        """
        tensors = self._own_tensors()
        if self.ranks.rank == 0:
            if self.spec.algorithm.trains_reward_model:
                # The output layer of `model.path` is no part of it.
                config = sequence_classifier(self._own_config())
                save_hf(tensors, directory, self.model_dir, config=config)
            elif self.spec.model.init == "random":
                save_hf(tensors, directory, self.model_dir, config=self._own_config())
            else:
                save_complete(tensors, directory, self.model_dir)
        else:
            # Iterating is collective: the other ranks contribute their parts.
            for _ in tensors:
                pass
        dist.barrier()
