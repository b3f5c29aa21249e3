"""Health rules about speed: runs that are slower than necessary."""

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
    """Warn if a small model's kernels finish faster than the CPU can launch them."""
    last = recent(history, _MFU_STEPS, "perf/mfu", "perf/actor_train_time")
    if last is None:
        return None
    shares, seconds = last
    if max(shares) >= _MFU_LEAST or min(seconds) < _TRAINING_SECONDS:
        return None
    grown = values(history, "perf/micro_batch_tokens")[-1:]
    if grown and grown[0] < MOST_TOKENS:  # limited by memory or batch, or still growing
        return None
    memory = values(history, "perf/gpu_memory/training_gib")[-1:]
    return (
        f"training takes {median(seconds):.1f} s a step and uses {median(shares):.1%} of the GPUs' "
        f"arithmetic{shown(' and {:.0f} GiB of memory', memory)}"
        f"{shown(', with micro-batches that have grown to {:,.0f} tokens', grown)}. Try a higher "
        "trainer.maxTokensPerGpu, for fewer and larger micro-batches, as far as the memory allows"
    )


def _busy_worker(history: Sequence[Record]) -> str | None:
    """Warn if workers, busy with their own computations, keep engines and trainer waiting."""
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
        f"the trainer waits for {waiting:.0%} of a step: the work between the engine's answers "
        "(generate function, client, reward) takes longer than the answers. Try a cheaper client "
        "(episode.gateway.openai()), programs in separate processes (rollout.environment), or more "
        "engines, each of which has a worker"
    )


def _long_tail(history: Sequence[Record]) -> str | None:
    """Warn if steps of a synchronous run wait for a few long responses.

    In other modes no step waits for a whole batch, and workers report no tail.
    """
    last = recent(history, _TAIL_STEPS, "rollout/tail_time", "perf/step_time")
    if last is None:
        return None
    tails, steps = last
    if any(t <= _TAIL_SHARE * step for t, step in zip(tails, steps, strict=True)):
        return None
    shared = values([history[-1]], "perf/wake_up_time")
    ways = (
        "rollout.overSampling, which takes what finishes first, or rollout.partial, which "
        "continues the rest in the next step"
        if shared
        else "rollout.mode: async, in which they overlap with the next batch"
    )
    return (
        f"a step waits {sum(tails) / sum(steps):.0%} of its time for the last quarter of a batch's "
        f"responses, while the engines are nearly idle. Try {ways}"
    )


def _late_groups(history: Sequence[Record]) -> str | None:
    """Warn if batches of an asynchronous run wait for groups that are about to become too old."""
    last = recent(history, _LATE_STEPS, "perf/train_wait_late_time", "perf/step_time")
    if last is None:
        return None
    late, steps = last
    if sum(late) <= _LATE_SHARE * sum(steps):
        return None
    return (
        f"steps wait {sum(late) / sum(steps):.0%} of their time for a few groups that would be too "
        "old for the next batch: rollout.maxStaleness applies to every sample. Try a larger one, "
        "or rollout.partial with weightSync.pauseMode: in_place, where the groups that finish "
        "first make the batch, and older groups are trained as well and counted"
    )


def _weights_in_turn(history: Sequence[Record]) -> str | None:
    """Warn if trainer ranks send weights to many engines, one after another."""
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
        "weights on to each other; if it is set, the trainer's log names the engines that cannot"
    )


def _slow_engine(history: Sequence[Record]) -> str | None:
    """Warn if the same engine is slower than the others in all but one of the last steps."""
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
        "synchronous steps wait for it, others get less from it. Check what else uses its GPUs, "
        "and whether they are throttled (nvidia-smi -q -d PERFORMANCE). If you delete the pod, it "
        "restarts, perhaps on another node. If the engines run on different GPUs, a lower "
        "rollout.concurrency lets the faster ones do more"
    )


RULES: dict[str, Rule] = {
    "small kernels": _small_kernels,
    "busy worker": _busy_worker,
    "long tail": _long_tail,
    "late groups": _late_groups,
    "weights in turn": _weights_in_turn,
    "slow engine": _slow_engine,
}
