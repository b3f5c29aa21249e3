"""The training loop: everything that happens in a step, in order.

    generate   wait for the batch of the step; meanwhile update engines that join
    train      rewards -> advantages; loss, gradients, optimizer steps
    update     send the new weights to all engines
    commit     only now may prompts be leased for the next version
    save       if a checkpoint is due, while the engines generate

If trainer and engines share their GPUs (`trainer.colocate`), the engines end their requests and
free their memory before training. A checkpoint is begun before they wake. During the update they
wake step by step: they allocate memory for weights, receive the weights, and allocate the rest once
the trainer has offloaded its memory.

All time is accounted for: the time of a step runs from the record of the step before, so a
checkpoint counts towards the step that it delays. The start (until the first engine has weights, or
a batch has arrived) and the end have separate records.

After a crash the trainer restarts from the last checkpoint, and the buffer serves the later batches
again: the same samples in the same order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sluice.api import RLJobSpec
from sluice.data.vocabulary import embedding_size
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import SampleGroup
from sluice.telemetry import logs, tracing
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_trainer.backend import Weights
from sluice_trainer.checkpoint.checkpoint_store import CheckpointStore
from sluice_trainer.clients.background import Stopped
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.loop.action import Action
from sluice_trainer.loop.checkpoint_schedule import CheckpointSchedule
from sluice_trainer.loop.clients import Clients
from sluice_trainer.loop.evaluations import Evaluations, LastEvaluation
from sluice_trainer.loop.gpu_sharing import GpuSharing
from sluice_trainer.loop.held_out import HeldOut
from sluice_trainer.loop.run_records import RunRecords
from sluice_trainer.loop.weight_update import WeightUpdates
from sluice_trainer.telemetry import metrics
from sluice_trainer.telemetry.profiling import Profiles, region

# (metadata of all sequences of a batch, samples of this rank) -> metrics of the training step.
# Collective.
Learn = Callable[[Sequence[pb.Sequence], Sequence[SampleGroup]], dict[str, float]]

_ACTIONS = {
    pb.TakeBatchResponse.STATE_READY: Action.TRAIN,
    pb.TakeBatchResponse.STATE_WAITING: Action.WAIT,
    pb.TakeBatchResponse.STATE_EXHAUSTED: Action.END,
}


class Loop:
    """The training loop of one rank.

    Parameters
    ----------
    policy
        The weights that are trained and sent to engines.
    learn
        Trains the policy on a batch.
    clients
        Clients of rendezvous, buffer and engines.
    records
        Collects the metrics of steps and writes them down.
    checkpoints
        Directory of the checkpoints.
    total_steps
        Last step of the run.
    stop
        Set when the trainer is to stop.
    profiles
        Steps to profile.
    held_out
        Rows of `evaluation.heldOut`; None: the job has none.

    """

    def __init__(
        self,
        spec: RLJobSpec,
        policy: Weights,
        learn: Learn,
        clients: Clients,
        ranks: Ranks,
        records: RunRecords,
        *,
        checkpoints: Path,
        total_steps: int,
        stop: threading.Event,
        profiles: Profiles | None = None,
        held_out: HeldOut | None = None,
    ) -> None:
        self.spec, self.policy, self.learn = spec, policy, learn
        self.clients, self.ranks, self.records = clients, ranks, records
        self.total_steps, self.stop = total_steps, stop
        self.profiles = profiles or Profiles()
        self.gpus = GpuSharing(policy, clients, ranks, records.times, spec.trainer.colocate)
        self.weights = WeightUpdates(
            spec.weight_sync, policy, clients, ranks, self.gpus, records.times
        )
        self.checkpoints = CheckpointSchedule(
            spec, policy, clients.buffer, ranks.rank, checkpoints, step=policy.step
        )
        self.evaluations = Evaluations(clients.buffer, records.recorder, spec.evaluates)
        self.held_out = held_out
        self.started = False

    def run(self) -> None:
        """Train until the last step or the end of the prompts.

        Raises
        ------
        Stopped
            `stop` was set; everything that is trained is saved.

        """
        step = self._start()
        while step < self.total_steps:
            with self.profiles.profile_step(step + 1):
                if not self._step(step + 1):
                    break
            step += 1
        self._end(step)

    # --- one step

    @tracing.traced("step", root=True)
    def _step(self, step: int) -> bool:
        """Make a step; return False if the prompts have ended before it."""
        tracing.set_attributes(step=step)
        self.records.times.clear()
        batch = self._next_batch(step - 1)
        if batch is None:
            return False
        # Colocated engines must free their memory before the model is trained.
        self.gpus.acquire()
        record = self._train(step, batch)
        save = self.checkpoints.due(step, self.total_steps)
        # Colocated, the update offloads what a checkpoint needs, so copy it before.
        if save and self.gpus.colocated:
            self._begin_checkpoint(step)
        self._update_engines(step)
        self._measure_held_out(step)
        # Prompts that are leased after the commit are generated with the new weights.
        self._commit(step, record)
        # Engines already generate while the checkpoint is written.
        if save:
            self._save(step)
        return True

    @tracing.traced("wait for samples")
    @region("wait for samples")
    def _next_batch(self, step: int) -> list[pb.Sequence] | None:
        """Wait for the batch that follows `step`; return None at the end of the prompts.

        Rank 0 asks the buffer and tells the other ranks what to do at least once a second. Engines
        that join get their weights here, because between two steps the weights do not change.
        """
        self._set_waiting()
        while True:
            self.checkpoints.finish(wait=False)
            action, batch = self._decide(step)
            if action is Action.UPDATE_JOINERS:
                self._update_engines(step, joiners_only=True)
                self._set_waiting()
            elif action is Action.SAVE:
                # The buffer is full and waits for a checkpoint, which lets it delete samples.
                self.checkpoints.warn_early(step)
                self._save(step)
                # The checkpoint took the GPUs, which the engines need for the next batch.
                if self.gpus.colocated and self.gpus.trainer_holds_gpus:
                    self._update_engines(step)
                self._set_waiting()
            elif action is Action.STOP:
                # The next attempt continues from this step instead of the last checkpoint.
                self._save(step)
                self.checkpoints.finish(wait=True)
                self.records.non_step_time("end", step)
                raise Stopped
            elif action is not Action.WAIT:
                self._begin_steps(step)
                return batch if action is Action.TRAIN else None

    def _decide(self, step: int) -> tuple[Action, list[pb.Sequence]]:
        """Agree on the next action, and on the batch that follows `step` if there is one."""
        # Only rank 0 asks the buffer: all ranks must take the same action.
        action, batch = Action.WAIT, b""
        if self.ranks.rank == 0:
            if self.stop.is_set():
                action = Action.STOP
            elif self.weights.joiners():
                action = Action.UPDATE_JOINERS
            else:
                taken = self.clients.buffer.try_take(step + 1, self.ranks.data_parallel_size)
                action = self._action_for(taken, step)
                batch = taken.SerializeToString() if action is Action.TRAIN else b""
        action, batch = self.ranks.broadcast((action, batch))
        taken = pb.TakeBatchResponse.FromString(batch)
        self.checkpoints.buffer_is_full = taken.checkpoint_wanted
        if action is Action.TRAIN and self.spec.rollout.mode == "async":
            self.records.times["perf/train_wait_late_time"] = taken.late_seconds
        return Action(action), list(taken.sequences)

    def _action_for(self, taken: pb.TakeBatchResponse, step: int) -> Action:
        """Return the action after the buffer's answer about the batch that follows `step`."""
        if taken.state == pb.TakeBatchResponse.STATE_FAILED:
            # Write down why groups failed before the process ends.
            self.records.failures()
            raise ConfigurationError(taken.waiting_for)
        action = _ACTIONS[taken.state]
        if action is Action.WAIT and taken.checkpoint_wanted and step != self.checkpoints.step:
            return Action.SAVE
        if action is Action.TRAIN and self.gpus.colocated and self.evaluations.pending(step):
            return Action.WAIT  # engines can evaluate only while they hold the GPUs
        return action

    @tracing.traced("train")
    @region("train")
    def _train(self, step: int, batch: list[pb.Sequence]) -> dict[str, float]:
        """Compute the advantages of the whole batch and train on this rank's share of it."""
        self._set_state("training")
        times, started = self.records.times, time.perf_counter()
        groups = self.clients.buffer.shard(
            step, self.ranks.data_parallel_rank, self.ranks.data_parallel_size
        )
        times["perf/data_preprocess_time"] = time.perf_counter() - started
        started = time.perf_counter()
        learned = self.learn(batch, groups)
        times["perf/actor_train_time"] = time.perf_counter() - started
        self.gpus.record_memory("training")
        return self.records.batch(step, batch, groups) | learned

    def _update_engines(self, version: int, *, joiners_only: bool = False) -> None:
        """Send the weights to the engines. Collective."""
        if self.weights.update(version, joiners_only=joiners_only):
            self._begin_steps(version)

    @tracing.traced("held-out rows")
    @region("held-out rows")
    def _measure_held_out(self, step: int) -> None:
        """Compute the loss of rows that are not trained, if it is due after `step`. Collective."""
        if self.held_out is None or not self.held_out.due(step, self.total_steps):
            return
        self._set_state("evaluating")
        started = time.perf_counter()
        self.held_out.measure(step)
        self.records.times["perf/held_out_time"] = time.perf_counter() - started

    @tracing.traced("commit")
    def _commit(self, step: int, record: dict[str, float]) -> None:
        """Tell the buffer that the step is trained, and write it down."""
        self.records.commit_step(step, record, self.total_steps)
        self.evaluations.record()

    def _save(self, step: int) -> None:
        """Save a checkpoint; with `checkpoint.async` return while it is written."""
        if step != self.checkpoints.step:
            self.gpus.acquire()
            self._begin_checkpoint(step)
        self.checkpoints.finish(wait=not self.spec.checkpoint.async_)

    @tracing.traced("begin checkpoint")
    @region("begin checkpoint")
    def _begin_checkpoint(self, step: int) -> None:
        self._set_state("saving")
        self.checkpoints.begin(step)

    # --- before the first step and after the last

    def _start(self) -> int:
        """Rewind the buffer, give all engines the weights, and return the step to start after."""
        step = self.policy.step
        if self.ranks.rank == 0:
            buffer = self.clients.buffer
            replay = buffer.rewind(step, embedding_size(Path(self.spec.model.path)))
            # The attempt that wrote the checkpoint may have died before it told the buffer, or
            # while the buffer was full.
            if step:
                buffer.commit_checkpoint(step)
            logs.get().info("training starts", step=step, of=self.total_steps, replay_steps=replay)
            metrics.record_start(step, self.total_steps)
        self.checkpoints.reserve_memory()
        # All engines, not only joiners: a trainer that died may have left some in the middle of an
        # update, or at rest.
        self._update_engines(step)
        if step == 0:
            self._measure_held_out(step)
        return step

    def _begin_steps(self, step: int) -> None:
        """Record the time of the start, once; from now on time belongs to a step."""
        if not self.started:
            self.started = True
            self.records.non_step_time("start", step)

    def _end(self, step: int) -> None:
        """Save, wait for the last evaluation, export the model, and record the totals."""
        self._save(step)
        self.checkpoints.finish(wait=True)
        if self.spec.evaluates:
            LastEvaluation(
                self.evaluations, self.clients, self.ranks, self.gpus, self.weights, self.stop
            ).wait(step)
        if self.spec.checkpoint.export_hf:
            # The last evaluation may have left the weights on the host.
            self.gpus.acquire(weights_only=True)
            self._set_state("exporting")
            self._export(self.checkpoints.directory)
        self.records.totals()
        self.records.non_step_time("end", step)

    def _export(self, directory: Path) -> None:
        """Write the trained model, the trained adapter, or both."""
        lora = self.spec.trainer.lora
        if lora is None or lora.export != "adapter":
            self.policy.export_hf(directory / "hf")
        if lora is not None and lora.export != "merged":
            self.policy.export_adapter(directory / "adapter")
        store = CheckpointStore.of(self.spec.checkpoint.to)
        if store is not None and self.ranks.rank == 0:
            for name in ("hf", "adapter"):
                store.put_model(directory / name, name)

    def _set_waiting(self) -> None:
        self._set_state("waiting" if self.started else "starting")

    def _set_state(self, state: str) -> None:
        if self.ranks.rank == 0:
            self.clients.member.set_state(state)
