"""The trainer backend: a model that learns, spread over many processes, behind a dozen calls.

The loop, the sharing of GPUs with engines and the preparation of batches use only these protocols.
Every rank makes the same calls in the same order, each with its share of a batch:

    policy = backend_class(spec)(spec, model_dir=..., timeout=..., total_steps=..., author=...)
    policy.load_latest(checkpoints)                   # -> step, or None: start at version 0
    for _ in range(policy.step, steps):
        batch = ...                                   # same metadata on all ranks, tokens of one
        metrics = learn(policy, None, batch, groups)  # rewards -> advantages -> policy.train
        for name, tensor in policy.engine_tensors(): ...  # to the engines
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
    """A model at a version, which engines receive and checkpoints store.

    All calls are collective.
    """

    # Version of the weights: training steps done.
    step: int

    def engine_tensors(
        self, stack_name: StackName | None = None, receivers: frozenset[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield what an update sends: all weights by their names in a Hugging Face checkpoint.

        With `weightSync.lora: adapter`, an adapter by its names in PEFT's files. All ranks must
        iterate to the end.

        Parameters
        ----------
        stack_name
            Name of all experts of a layer as one tensor; None: each expert has its tensor.
        receivers
            Ranks that get the tensors; the others may get none. None: all ranks.

        Yields
        ------
        (name, full tensor).

        """

    def reserve_copies(self) -> None:
        """Begin to allocate the host memory of the first checkpoint's copies, in the background.

        Everything that learns must be on the device.
        """

    def begin_save(self, directory: Path, step: int, *, background: bool = False) -> None:
        """Begin to write checkpoint `step`, which is valid once `finish_save` returns it.

        With `background`, training may go on while the files are written.
        """

    def finish_save(self, directory: Path, *, wait: bool) -> int | None:
        """Complete the checkpoint in progress if its files are written.

        Parameters
        ----------
        directory
            Directory of all checkpoints.
        wait
            Wait until the files are written.

        Returns
        -------
        Step of the checkpoint that is now durable; None if there is none, or not yet.

        """

    def export_hf(self, directory: Path) -> None:
        """Write the model as a Hugging Face checkpoint.

        Config and tokenizer are those of the checkpoint that the model started from.
        """

    def export_adapter(self, directory: Path) -> None:
        """Write the adapter of `trainer.lora` in PEFT's format."""

    def offload(self, *, weights: bool) -> None:
        """Move to host memory what `trainer.offload` names.

        Parameters
        ----------
        weights
            True: everything; False: everything but what `engine_tensors` needs.

        """

    def restore(self, *, weights_only: bool = False) -> None:
        """Undo `offload`; with `weights_only`, only as far as `engine_tensors` needs it."""

    def memory_used(self) -> int:
        """Return the used bytes of this process's GPU, by all processes; 0 on a CPU."""


class Backend(Weights, Protocol):
    """The policy of a job with the models that it is compared with: reference, teacher, critic.

    All calls are collective.
    """

    spec: RLJobSpec
    ranks: Ranks
    # Coefficient of the KL penalty in the next step; checkpoints store it.
    kl_coef: float

    def load_latest(self, directory: Path) -> int | None:
        """Claim the directory for this attempt and restore its newest checkpoint.

        Returns
        -------
        Step of the checkpoint; None if there is none.

        """

    def with_kl(
        self, shard: Sequence[TrainSequence]
    ) -> tuple[list[TrainSequence], list[Tensor] | None]:
        """Compute the KL from the reference at each response token.

        Returns
        -------
        The sequences, with the log-probs computed on the way if the step would compute them again;
        and the KL of each sequence, [response], or None if `kl.coef` is 0.

        """

    def energies(self, shard: Sequence[TrainSequence]) -> list[Tensor]:
        """Compute 1 - 2 p(token) + sum of p^2 at each response token, in one more forward pass.

        Returns
        -------
        Each [response] float32, CPU.

        """

    def values(self, shard: Sequence[TrainSequence]) -> list[Tensor] | None:
        """Compute the critic's value of the state before each response token.

        Returns
        -------
        Each [response] float32, CPU; None without a critic.

        """

    def train(
        self,
        shard_by_optimizer_step: Sequence[Sequence[TrainSequence]],
        totals: Sequence[BatchTotals],
    ) -> dict[str, float]:
        """Make one training step, with an optimizer step on each part of the shard.

        Afterwards `step` is one higher. A critic is trained first, and alone in its `warmupSteps`.

        Parameters
        ----------
        shard_by_optimizer_step
            This rank's sequences in `stepsPerBatch` parts, as many on every rank; a part may be
            empty.
        totals
            Totals of each part over all ranks.

        Returns
        -------
        Metrics under slime's names (a critic's under verl's), equal on all ranks: means over the
        optimizer steps, and the largest value for names that end with `_max`.

        """

    def with_reference(self, shard: Sequence[TrainSequence]) -> list[TrainSequence]:
        """Return the sequences with the reference's log-probs, if the loss compares with them."""

    def measure(self, shard: Sequence[TrainSequence], totals: BatchTotals) -> dict[str, float]:
        """Compute the loss and its metrics, without training.

        Parameters
        ----------
        shard
            This rank's sequences, which may be a part of a data set.
        totals
            Totals of the whole data set over all ranks.

        Returns
        -------
        Sums over the sequences of all ranks, weighted so that those of all parts of the data set
        add up to its means.

        """


class BackendClass(Protocol):
    """The class of a backend."""

    def __call__(
        self,
        spec: RLJobSpec,
        *,
        model_dir: Path,
        timeout: timedelta,
        total_steps: int | None = None,
        author: Author | None = None,
    ) -> Backend:
        """Build the model at version 0 on this process's device and join the process group.

        Parameters
        ----------
        spec
            Spec of the job.
        model_dir
            Hugging Face checkpoint; with `model.init: random` only its config is used.
        timeout
            Timeout of every collective.
        total_steps
            Training steps of the run, for the learning-rate schedules. Default: `trainer.steps`.
        author
            This attempt of the trainer, for its checkpoints.

        """
