"""The records of a run: what each step, its start and its end write to the run directory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sluice.api import RLJobSpec
from sluice.samples.sample import SampleGroup
from sluice.telemetry import logs
from sluice.telemetry.phases import Laps
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_trainer.batch.image_work import ImageWork, image_metrics
from sluice_trainer.batch.provenance import Provenance
from sluice_trainer.clients.buffer_client import BufferClient
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.model.flops import ModelFlops, utilisation
from sluice_trainer.telemetry import metrics
from sluice_trainer.telemetry.recorder import Recorder, batch_metrics, merge_shards, time_metrics

# Metrics of a step that its log line shows.
_LOGGED = (
    "rollout/raw_reward",
    "train/loss",
    "train/grad_norm",
    "train/train_rollout_logprob_abs_diff_max",
    "perf/step_time",
)


@dataclass(slots=True)
class RunRecords:
    """Collects the metrics of each step; rank 0 writes them down.

    Attributes
    ----------
    recorder
        Writes the run directory; None on ranks other than 0.
    flops
        Operations of the model; None if they are not known.
    image_work
        Counts of what this rank does with images; None if the job has none.
    times
        Seconds and memory of the parts of the current step, under names of metrics.

    """

    spec: RLJobSpec
    ranks: Ranks
    buffer: BufferClient
    recorder: Recorder | None
    flops: ModelFlops | None = None
    image_work: ImageWork | None = None
    times: dict[str, float] = field(default_factory=dict)
    _laps: Laps = field(default_factory=lambda: Laps(metrics.PHASES))

    def batch(
        self, step: int, batch: list[pb.Sequence], groups: list[SampleGroup]
    ) -> dict[str, float]:
        """Record the samples of a trained batch and return its metrics. Collective.

        Parameters
        ----------
        step
            Step that has trained the batch.
        batch
            Metadata of all sequences.
        groups
            Samples of this rank.

        """
        if self.recorder:
            self.recorder.samples(step, groups)
            if self.spec.debug.dump_rollouts:
                size = self.ranks.data_parallel_size
                shards = [self.buffer.shard(step, rank, size) for rank in range(size)]
                self.recorder.dump(step, merge_shards(shards))
        metrics.count_samples(batch)
        colocated, pause = self.spec.trainer.colocate, self.spec.weight_sync.pause_mode
        in_place = pause == "in_place" and not colocated  # nothing runs while GPUs change hands
        # Ranks that share a model hold the same samples, so one entry per data-parallel rank.
        shares = self.ranks.gather((self.ranks.data_parallel_rank, Provenance.of_groups(groups)))
        provenance = Provenance.merge(dict(shares).values())
        images = self.ranks.gather(self.image_work.take()) if self.image_work else []
        return (
            batch_metrics(batch, step, judged=self.spec.judged, in_place=in_place)
            | provenance.metrics()
            | (image_metrics(images) if images else {})
            | self._utilisation(provenance.lengths, sum(rank.tower_flops for rank in images))
        )

    def _utilisation(self, lengths: list[int], tower: float) -> dict[str, float]:
        """Return how well training used the GPUs; empty on CPUs.

        lengths: of all sequences. tower: operations of vision towers.
        """
        if self.flops is None or not torch.cuda.is_available():
            return {}
        trainer = self.spec.trainer
        return utilisation(
            self.flops,
            lengths,
            self.times["perf/actor_train_time"],
            trainer.nodes * trainer.gpus_per_node,
            torch.cuda.get_device_name(),
            tower=tower,
        )

    def commit_step(self, step: int, record: dict[str, float], total_steps: int) -> None:
        """Commit the step to the buffer and write its record down. Only on rank 0."""
        if self.ranks.rank != 0 or self.recorder is None:
            return
        record |= self.times | self.recorder.dropped(self.buffer.counters())
        record |= time_metrics(self._laps.next(), record)
        self.buffer.commit_step(step, record)
        self.recorder.step(step, record)
        metrics.record_step(step, record)
        self.failures()
        shown = {
            name.rpartition("/")[2]: f"{record[name]:.4g}" for name in _LOGGED if name in record
        }
        logs.get().info(f"step {step}/{total_steps}", **shown)

    def non_step_time(self, part: str, step: int) -> None:
        """Write down the seconds since the last record, which belong to no step."""
        if self.recorder:
            self.recorder.record_non_step_time(part, step, self._laps.next())

    def failures(self) -> None:
        """Write down which groups have failed for good since the last step, and why."""
        while self.recorder and (failures := self.buffer.failures(self.recorder.last_failure)):
            self.recorder.failures(failures)

    def totals(self) -> None:
        """Log what happened to all groups; warn if some failed or the sums do not match."""
        if self.ranks.rank != 0:
            return
        totals = self.buffer.totals()
        if self.recorder:
            self.recorder.totals(totals)
        groups = totals.group_counts()
        logs.get().info(f"prompt groups: {groups.text()}")
        for warning in groups.warnings():
            logs.get().warning(warning.text, kind=warning.kind)
