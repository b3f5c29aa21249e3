"""Rules of a run that is slower than it has to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from sluice.api.groups.trainer import MOST_TOKENS
from sluice.telemetry.health_records import Record, Rule, recent, shown, values

_MFU_LEAST, _MFU_STEPS, _TRAINING_SECONDS = 0.1, 3, 1.0
_BUSY_SHARE, _WAITING_SHARE, _BUSY_STEPS = 0.8, 0.5, 3
_TAIL_SHARE, _TAIL_STEPS = 0.3, 3
_LATE_SHARE, _LATE_STEPS = 0.3, 10
_WEIGHTS_SHARE, _WEIGHTS_STEPS, _CHAIN = 0.1, 3, 3
_SLOW_TIMES, _SLOW_STEPS = 1.5, 5


def _small_kernels(history: Sequence[Record]) -> str | None:
    """Of a small model, whose kernels the CPU cannot launch as fast as the GPU runs them."""
    last = recent(history, _MFU_STEPS, "perf/mfu", "perf/actor_train_time")
    if last is None:
        return None
    shares, seconds = last
    if max(shares) >= _MFU_LEAST or min(seconds) < _TRAINING_SECONDS:
        return None
    grown = values(history, "perf/micro_batch_tokens")[-1:]
    if grown and grown[0] < MOST_TOKENS:  # as far as memory and batch let them, or still growing
        return None
    memory = values(history, "perf/gpu_memory/training_gib")[-1:]
    return (
        f"training takes {median(seconds):.1f} s a step and uses {median(shares):.1%} of the GPUs' "
        f"arithmetic{shown(' and {:.0f} GiB of memory', memory)}"
        f"{shown(', with micro-batches that have grown to {:,.0f} tokens', grown)}. Try a higher "
        "trainer.maxTokensPerGpu, for fewer and larger micro-batches, as far as the memory allows"
    )


def _busy_worker(history: Sequence[Record]) -> str | None:
    """Of workers that keep their engines waiting, and so the trainer."""
    names = ("rollout/worker_busy", "perf/train_wait_time", "perf/step_time")
    last = recent(history, _BUSY_STEPS, *names)
    if last is None:
        return None
    busy, waits, steps = last
    waiting = sum(waits) / max(sum(steps), 1e-6)
    if min(busy) < _BUSY_SHARE or waiting < _WAITING_SHARE:
        return None
    return (
        f"the rollout workers compute for {median(busy):.0%} of the time, on one core each, and "
        f"the trainer waits for {waiting:.0%} of a step: what happens between the engine's answers "
        "(the generate function, its client, the reward) takes longer than they do. Try a cheaper "
        "client (episode.gateway.openai()), programs with processes of their own "
        "(rollout.environment), or more engines: each has a worker"
    )


def _long_tail(history: Sequence[Record]) -> str | None:
    """Of a synchronous run whose steps wait for a few long responses. In other modes no step waits
    for the whole of a batch, and workers tell of no tail.
    """
    last = recent(history, _TAIL_STEPS, "rollout/tail_time", "perf/step_time")
    if last is None:
        return None
    tails, steps = last
    if any(t <= _TAIL_SHARE * step for t, step in zip(tails, steps, strict=True)):
        return None
    shared = values([history[-1]], "perf/wake_up_time")
    ways = (
        "rollout.overSampling, which takes what is finished first, or rollout.partial, which goes "
        "on with the rest in the next step"
        if shared
        else "rollout.mode: async, in which they lie beside the next batch's"
    )
    return (
        f"a step waits {sum(tails) / sum(steps):.0%} of its time for the last quarter of a batch's "
        f"responses, with engines that have little else to do. Try {ways}"
    )


def _late_groups(history: Sequence[Record]) -> str | None:
    """Of an asynchronous run whose batches wait for groups that may not become older."""
    last = recent(history, _LATE_STEPS, "perf/train_wait_late_time", "perf/step_time")
    if last is None:
        return None
    late, steps = last
    if sum(late) <= _LATE_SHARE * sum(steps):
        return None
    return (
        f"steps wait {sum(late) / sum(steps):.0%} of their time for a few groups that would be too "
        "old for the next batch: rollout.maxStaleness holds for every sample. Try a larger one, or "
        "rollout.partial with weightSync.pauseMode: in_place, with which the groups that are done "
        "first make the batch, and older ones are trained all the same and counted"
    )


def _weights_in_turn(history: Sequence[Record]) -> str | None:
    """Of trainer ranks that send the weights to many engines, one after another."""
    names = ("perf/update_weights_time", "perf/step_time", "perf/update_weights/engines_in_turn")
    last = recent(history, _WEIGHTS_STEPS, *names)
    if last is None:
        return None
    updates, steps, engines = last
    share = sum(updates) / max(sum(steps), 1e-6)
    if min(engines) < _CHAIN or share < _WEIGHTS_SHARE:
        return None
    return (
        f"weight updates take {share:.0%} of the time: a trainer rank sends to {engines[-1]:.0f} "
        "engines, one after another. Try weightSync.fanOut: chain, in which engines pass the "
        "weights on to each other; where it is set, the trainer's log names those that cannot"
    )


def _slow_engine(history: Sequence[Record]) -> str | None:
    """Of one engine that is slower than the others, step after step but one."""
    names = ("rollout/engine_latency/max", "rollout/engine_latency/p25", "rollout/slowest_engine")
    last = recent(history, _SLOW_STEPS, *names)
    if last is None:
        return None
    slow, fast, engines = last
    times = [own / max(others, 1e-9) for own, others in zip(slow, fast, strict=True)]
    [(engine, steps)] = Counter(engines).most_common(1)
    if steps < _SLOW_STEPS - 1 or min(times) < _SLOW_TIMES:
        return None
    return (
        f"the engine of rollout-{engine:.0f} takes {median(times):.1f} times as long for a "
        f"token as the faster ones ({1000 * median(slow):.3g} ms), for {_SLOW_STEPS} steps: "
        "synchronous steps wait for it, others get less of it. Look what else uses its GPUs, and "
        "whether they are throttled (nvidia-smi -q -d PERFORMANCE). A pod that is deleted starts "
        "again, maybe on another node. Where engines are unequal by their kind, a lower "
        "rollout.concurrency lets the faster ones make more"
    )


RULES: dict[str, Rule] = {
    "small kernels": _small_kernels,
    "busy worker": _busy_worker,
    "long tail": _long_tail,
    "late groups": _late_groups,
    "weights in turn": _weights_in_turn,
    "slow engine": _slow_engine,
}
