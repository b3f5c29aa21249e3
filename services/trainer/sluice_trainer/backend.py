"""A trainer backend: a model that learns in one process of many, behind a dozen calls.

The loop, its turns with the engines and the preparation of batches know this and no more. Every
rank makes the same calls in the same order, each with its own share of a batch:

    policy = backend_of(spec)(spec, model_dir=..., timeout=..., total_steps=..., author=...)
    policy.load_latest(checkpoints)                   # -> step, or None: start at version 0
    for _ in range(policy.step, steps):
        batch = ...                                   # same metadata on all ranks, tokens of one
        metrics = learn(policy, None, batch, groups)  # rewards -> advantages -> policy.train
        for name, tensor in policy.hf_tensors(): ...  # to the engines
        policy.begin_save(checkpoints, policy.step)
    policy.export_hf(checkpoints / "hf")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from torch import Tensor

from sluice.api import RLJobSpec
from sluice.engines.protocol import StackName
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.checkpoint.checkpoint_directory import Author
from sluice_trainer.distributed.ranks import Ranks


class Weights(Protocol):
    """A model at a version, which engines are given and checkpoints keep. All calls are
    collective.
    """

    step: int
    """Version held: training steps done."""

    def hf_tensors(
        self, stack_name: StackName | None = None, receivers: frozenset[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all weights as a Hugging Face checkpoint holds them.

        stack_name: all experts of a layer come as one tensor, under this name. receivers: ranks
        that get the tensors, where others may get none; None: all. All ranks must iterate to the
        end.
        """

    def reserve_copies(self) -> None:
        """Begin to get the host memory of the first checkpoint's copies, beside what goes on.

        Call it while all that learns is on the device.
        """

    def begin_save(self, directory: Path, step: int, *, beside: bool = False) -> None:
        """Begin to write checkpoint `step`; with `beside`, training may go on. It counts once
        `finish_save` says so.
        """

    def finish_save(self, directory: Path, *, wait: bool) -> int | None:
        """Complete the checkpoint that is under way once its files are written; with `wait`, wait
        for that.

        Returns its step when it is durable; None where there is none, or not yet.
        """

    def export_hf(self, directory: Path) -> None:
        """Write the model as a Hugging Face checkpoint, with config and tokenizer of the one it
        started from.
        """

    def make_room(self, *, weights: bool) -> None:
        """Move to host memory what `trainer.offload` says, or only what the next steps need but
        hf_tensors does not.
        """

    def come_back(self, *, weights_only: bool = False) -> None:
        """Undo `make_room`; weights_only: as far as hf_tensors needs it."""

    def memory_used(self) -> int:
        """Bytes of this process's GPU that are taken, by whomever. 0 on the CPU."""


class Backend(Weights, Protocol):
    """The policy of a job, and what it is compared with: reference, teacher, critic. All calls are
    collective.
    """

    spec: RLJobSpec
    ranks: Ranks
    kl_coef: float
    """Of the next step; checkpoints have it."""

    def load_latest(self, directory: Path) -> int | None:
        """Claim the directory for this attempt, and restore its newest checkpoint: its step; None:
        there is none.
        """

    def with_kl(
        self, shard: Sequence[TrainSequence]
    ) -> tuple[list[TrainSequence], list[Tensor] | None]:
        """The KL of each response token from the reference, per sequence [response]; None where
        `kl.coef` is 0.

        Also the sequences, with the log-probs that this took, where the step would ask for them
        once more.
        """

    def energies(self, shard: Sequence[TrainSequence]) -> list[Tensor]:
        """1 - 2 p(token) + sum of p^2 of each response token, [response] float32, CPU: one more
        forward pass.
        """

    def values(self, shard: Sequence[TrainSequence]) -> list[Tensor] | None:
        """The critic's value of the state before each response token, [response] float32, CPU;
        None: no critic.
        """

    def train(
        self,
        shard_by_optimizer_step: Sequence[Sequence[TrainSequence]],
        totals: Sequence[BatchTotals],
    ) -> dict[str, float]:
        """One training step: an optimizer step on each part of this rank's shard. `step` is then
        one up.

        shard_by_optimizer_step: `stepsPerBatch` parts, equally many on every rank, empty ones
        allowed. totals: of each part over all ranks. A critic is trained first, and alone in its
        `warmupSteps`. Returns metrics under slime's names (a critic's under verl's), equal on all
        ranks; with several optimizer steps their mean (the largest for `_max`).
        """


class MakeBackend(Protocol):
    def __call__(
        self,
        spec: RLJobSpec,
        *,
        model_dir: Path,
        timeout: timedelta,
        total_steps: int | None = None,
        author: Author | None = None,
    ) -> Backend:
        """Build the model on this process's device at version 0, and join the process group.

        model_dir: Hugging Face checkpoint; with `model.init: random` only its config is used.
        timeout: of every collective. total_steps: training steps of the run, for the learning-rate
        schedules (default: `trainer.steps`). author: this attempt of the trainer, for its
        checkpoints.
        """


def backend_of(spec: RLJobSpec) -> MakeBackend:
    """The backend that `trainer.backend` names. Imported here, because each takes seconds and
    libraries of its own.
    """
    match spec.trainer.backend:
        case "megatron":
            from sluice_trainer.megatron import policy as megatron

            return megatron.MegatronPolicy
        case "fsdp":
            from sluice_trainer.fsdp import policy as fsdp

            return fsdp.ShardedPolicy
