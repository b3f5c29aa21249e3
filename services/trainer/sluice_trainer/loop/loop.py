"""The training loop: everything that happens in a step, in order.

    wait for the batch of the step (and meanwhile give engines that join their weights)
    rewards -> advantages; loss, gradients, optimizer steps
    publish the new weights to every engine
    commit the step: only now may prompts of the next version be leased
    checkpoint, where one is due, while the engines generate

Where trainer and engines share their GPUs (`trainer.colocate`) they take turns: before the model is
trained the engines end what is left of their work and give their memory away; a checkpoint is begun
before they wake; with the new weights they wake one after the other: memory for weights, the
weights, and once the trainer has made room the rest.

No second is lost: a step's time is all since the record of the one before it, so that a checkpoint
stands in the step that it held up. Start (until the first engine has its weights, or a batch is
there) and end are written down beside the steps.

A crash anywhere leads back to the last checkpoint: the buffer serves the later batches again, the
same samples in the same order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sluice.api import RLJobSpec
from sluice.data.vocabulary import embedding_size
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import SampleGroup
from sluice.telemetry import logs, tracing
from sluice.telemetry.phases import Laps
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_trainer.backend import Weights
from sluice_trainer.batch.provenance import Provenance
from sluice_trainer.clients.background import Stopped
from sluice_trainer.clients.clients import Peers
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.loop.action import Action
from sluice_trainer.loop.checkpoint_schedule import Saving
from sluice_trainer.loop.evaluations import Evaluations
from sluice_trainer.loop.gpu_sharing import Turns
from sluice_trainer.loop.last_evaluation import LastEvaluation
from sluice_trainer.loop.weight_update import Publishing
from sluice_trainer.model.flops import ModelFlops, utilisation
from sluice_trainer.telemetry import metrics
from sluice_trainer.telemetry.profiling import Profiles, region
from sluice_trainer.telemetry.recorder import Recorder, batch_metrics, merged, time_metrics

Learn = Callable[[Sequence[pb.Sequence], Sequence[SampleGroup]], dict[str, float]]
"""(all sequences of a batch, this rank's samples) -> metrics, once the policy has learned from
them. Collective."""


@dataclass(slots=True)
class Loop:
    spec: RLJobSpec
    policy: Weights
    learn: Learn
    peers: Peers
    ranks: Ranks
    checkpoints: Path
    total_steps: int
    recorder: Recorder | None
    stop: threading.Event
    flops: ModelFlops | None = None
    profiles: Profiles = field(default_factory=Profiles)
    times: dict[str, float] = field(default_factory=dict)
    laps: Laps = field(default_factory=lambda: Laps(metrics.PHASES))
    started: bool = False
    turns: Turns = field(init=False)
    publishing: Publishing = field(init=False)
    saving: Saving = field(init=False)
    evaluations: Evaluations = field(init=False)

    def __post_init__(self) -> None:
        self.turns = Turns(
            self.policy, self.peers, self.ranks, self.times, self.spec.trainer.colocate
        )
        self.publishing = Publishing(
            self.spec.weight_sync, self.policy, self.peers, self.ranks, self.turns, self.times
        )
        self.saving = Saving(
            self.spec, self.policy, self.peers.buffer, self.ranks.rank, self.checkpoints
        )
        self.evaluations = Evaluations(
            self.peers.buffer, self.recorder, self.spec.evaluation is not None
        )

    def run(self) -> None:
        """Train until the last step, the end of the prompts, or `stop` (raises Stopped)."""
        step = self.saving.step = self.policy.step
        if self.ranks.rank == 0:
            vocabulary = embedding_size(Path(self.spec.model.path))
            replay = self.peers.buffer.rewind(step, vocabulary)
            # Whoever wrote the checkpoint may have died before the buffer was told, or while it had
            # no room.
            if step:
                self.peers.buffer.commit_checkpoint(step)
            logs.get().info("training starts", step=step, of=self.total_steps, replay_steps=replay)
            metrics.begin(step, self.total_steps)
        self.saving.prepare()
        # To all: a trainer that died may have left engines in the middle of an update, or at rest.
        self._publish(step)
        more = True
        while more and step < self.total_steps:
            with self.profiles.of(step + 1):
                more = self._step(step + 1)
            step += more
        self._checkpoint(step)
        self.saving.finish(wait=True)
        self._finish(step)
        self._beside("end", step)

    def _begin_steps(self, step: int) -> None:
        """End the start, once: what follows is the step after `step`."""
        if not self.started:
            self.started = True
            self._beside("start", step)

    def _beside(self, part: str, step: int) -> None:
        """Write down the seconds since the last record, which belong to no step."""
        if self.recorder:
            self.recorder.beside(part, step, self.laps.next())

    # --- one step

    @tracing.traced("step", root=True)
    def _step(self, step: int) -> bool:
        """Make a step. False: the prompts have ended before it."""
        tracing.note(step=step)
        self.times.clear()
        batch = self._next_batch(step - 1)
        if batch is None:
            return False
        self.turns.take()
        record = self._train(step, batch)
        due = self.saving.due(step, self.total_steps)
        if due and self.turns.colocated:
            self._begin_checkpoint(step)
        self._publish(step)
        self._commit(step, record)
        if due:
            self._checkpoint(step)
        return True

    @tracing.traced("wait for samples")
    @region("wait for samples")
    def _next_batch(self, step: int) -> list[pb.Sequence] | None:
        """The sequences of the next step's batch; None at the end of the prompts.

        Rank 0 asks the buffer and tells the others what to do, at least once a second: an engine
        that joins gets its weights here, between two steps, when the weights are at rest.
        """
        self._wait()
        while True:
            self.saving.finish(wait=False)
            action, batch = self._decide(step)
            if action is Action.SYNC:
                self._publish(step, joiners_only=True)
                self._wait()
            elif action is Action.SAVE:
                self.saving.tell_early(step)
                self._checkpoint(step)
                if self.turns.colocated and self.turns.ours:
                    self._publish(step)
                self._wait()
            elif action is Action.STOP:
                self._checkpoint(step)
                self.saving.finish(wait=True)
                self._beside("end", step)
                raise Stopped
            elif action is not Action.WAIT:
                self._begin_steps(step)
                return batch if action is Action.TRAIN else None

    def _decide(self, step: int) -> tuple[Action, list[pb.Sequence]]:
        action, batch = Action.WAIT, b""
        if self.ranks.rank == 0:
            if self.stop.is_set():
                action = Action.STOP
            elif self.publishing.joiners():
                action = Action.SYNC
            else:
                taken = self.peers.buffer.try_take(step + 1, self.ranks.data_parallel_size)
                action = self._answered(taken, step)
                batch = taken.SerializeToString() if action is Action.TRAIN else b""
        action, batch = self.ranks.broadcast((action, batch))
        taken = pb.TakeBatchResponse.FromString(batch)
        self.saving.short_of_room = taken.checkpoint_wanted
        if action is Action.TRAIN and self.spec.rollout.mode == "async":
            self.times["perf/train_wait_late_time"] = taken.late_seconds
        return Action(action), list(taken.sequences)

    def _answered(self, taken: pb.TakeBatchResponse, step: int) -> Action:
        """The next thing to do after the buffer's answer about the batch that follows `step`."""
        if taken.state == pb.TakeBatchResponse.STATE_FAILED:
            self._record_failures()
            raise ConfigurationError(taken.waiting_for)
        action = _ACTIONS[taken.state]
        if action is Action.WAIT and taken.checkpoint_wanted and step != self.saving.step:
            return Action.SAVE
        if action is Action.TRAIN and self.turns.colocated and self.evaluations.pending(step):
            return Action.WAIT  # on engines that have memory to do it
        return action

    @tracing.traced("train")
    @region("train")
    def _train(self, step: int, batch: list[pb.Sequence]) -> dict[str, float]:
        """Advantages over the whole batch, then the optimizer steps over this rank's
        share of it.
        """
        self._state("training")
        started = time.perf_counter()
        groups = self.peers.buffer.shard(
            step, self.ranks.data_parallel_rank, self.ranks.data_parallel_size
        )
        self.times["perf/data_preprocess_time"] = time.perf_counter() - started
        started = time.perf_counter()
        learned = self.learn(batch, groups)
        self.times["perf/actor_train_time"] = time.perf_counter() - started
        self.turns.note_memory("training")
        if self.recorder:
            self.recorder.samples(step, groups)
            self._dump(step)
        metrics.count_samples(batch)
        provenance = self._provenance(groups)
        learned |= self._utilisation(provenance.lengths)
        colocated, pause = self.spec.trainer.colocate, self.spec.weight_sync.pause_mode
        in_place = pause == "in_place" and not colocated  # nothing runs while GPUs change hands
        of_batch = batch_metrics(batch, step, judged=self.spec.judged, in_place=in_place)
        return of_batch | provenance.metrics() | learned

    def _provenance(self, groups: list[SampleGroup]) -> Provenance:
        """How the batch was made. groups: this rank's. Collective."""
        of_ranks = self.ranks.gather((self.ranks.data_parallel_rank, Provenance.of(groups)))
        return Provenance.together(dict(of_ranks).values())

    def _utilisation(self, lengths: list[int]) -> dict[str, float]:
        """The use that training made of the GPUs; nothing on CPUs. lengths: of all sequences."""
        if self.flops is None or not torch.cuda.is_available():
            return {}
        trainer = self.spec.trainer
        return utilisation(
            self.flops,
            lengths,
            self.times["perf/actor_train_time"],
            trainer.nodes * trainer.gpus_per_node,
            torch.cuda.get_device_name(),
        )

    def _dump(self, step: int) -> None:
        """`debug.dumpRollouts`: the samples of all ranks, as the buffer hands them out."""
        if self.recorder and self.spec.debug.dump_rollouts:
            size = self.ranks.data_parallel_size
            shards = [self.peers.buffer.shard(step, rank, size) for rank in range(size)]
            self.recorder.dump(step, merged(shards))

    def _publish(self, version: int, *, joiners_only: bool = False) -> None:
        """Bring the weights to the engines. Collective."""
        if self.publishing.publish(version, joiners_only=joiners_only):
            self._begin_steps(version)

    def _checkpoint(self, step: int) -> None:
        """Save; with `checkpoint.async` only begin to, and go on while it is written."""
        if step != self.saving.step:
            self.turns.take()
            self._begin_checkpoint(step)
        self.saving.finish(wait=not self.spec.checkpoint.async_)

    @tracing.traced("begin checkpoint")
    @region("begin checkpoint")
    def _begin_checkpoint(self, step: int) -> None:
        self._state("saving")
        self.saving.begin(step)

    @tracing.traced("commit")
    def _commit(self, step: int, record: dict[str, float]) -> None:
        """Tell the buffer that the step is trained, and write it down."""
        if self.ranks.rank != 0 or self.recorder is None:
            return
        record |= self.times | self.recorder.dropped(self.peers.buffer.counters())
        record |= time_metrics(self.laps.next(), record["rollout/tokens"])
        self.peers.buffer.commit_step(step, record)
        self.recorder.step(step, record)
        metrics.observe(step, record)
        self._record_failures()
        self.evaluations.record()
        shown = {
            name.rpartition("/")[2]: f"{record[name]:.4g}" for name in _LOGGED if name in record
        }
        logs.get().info(f"step {step}/{self.total_steps}", **shown)

    def _finish(self, step: int) -> None:
        """The last evaluation comes after the last step; then the model is exported."""
        if self.spec.evaluation:
            last = LastEvaluation(
                self.evaluations, self.peers, self.ranks, self.turns, self.publishing, self.stop
            )
            last.wait(step)
        if self.spec.checkpoint.export_hf:
            self.turns.take(weights_only=True)
            self._state("exporting")
            self.policy.export_hf(self.checkpoints / "hf")
        self._close_books()

    def _close_books(self) -> None:
        """Say what became of all groups; warn where some failed, or where the sum is wrong."""
        if self.ranks.rank != 0:
            return
        totals = self.peers.buffer.totals()
        if self.recorder:
            self.recorder.totals(totals)
        books = totals.books()
        logs.get().info(f"books: {books.text()}")
        for warning in books.warnings():
            logs.get().warning(warning.text, kind=warning.kind)

    def _record_failures(self) -> None:
        """Write down which groups failed for good since the last step, and why."""
        while self.recorder and (
            failures := self.peers.buffer.failures(self.recorder.last_failure)
        ):
            self.recorder.failures(failures)

    def _wait(self) -> None:
        """Say that the trainer waits: for samples, or until an engine is there, for the start."""
        self._state("waiting" if self.started else "starting")

    def _state(self, word: str) -> None:
        if self.ranks.rank == 0:
            self.peers.member.state(word)


_ACTIONS = {
    pb.TakeBatchResponse.STATE_READY: Action.TRAIN,
    pb.TakeBatchResponse.STATE_WAITING: Action.WAIT,
    pb.TakeBatchResponse.STATE_EXHAUSTED: Action.END,
}
_LOGGED = (
    "rollout/raw_reward",
    "train/loss",
    "train/grad_norm",
    "train/train_rollout_logprob_abs_diff_max",
    "perf/step_time",
)
