"""Does a run look sick? From its metrics, in words, with what to try. Pure; each finding is meant
to be shown once.

The bounds are loose on purpose: a warning should be worth stopping for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from sluice.api.trainer import MOST_TOKENS

Record = Mapping[str, Any]

WINDOW = 20
"""Steps that a look back takes into account."""
FLAT_STEPS = 10
_ENTROPY_SHARE, _ENTROPY_LEAST = 0.05, 1e-3
_KL_LIMIT, _PPO_KL_LIMIT = 1.0, 0.1
_LOGPROB_LIMIT, _AGE_LIMIT = 0.1, 0.05
_TRUNCATED_SHARE, _TRUNCATED_STEPS = 0.5, 3
_SPIKE, _SPIKE_LEAST = 10.0, 1.0
_FAILED_SHARE = 0.2
_MFU_LEAST, _MFU_STEPS, _TRAINING_SECONDS = 0.1, 3, 1.0
_BUSY_SHARE, _WAITING_SHARE, _BUSY_STEPS = 0.8, 0.5, 3
_TAIL_SHARE, _TAIL_STEPS = 0.3, 3
_LATE_SHARE, _LATE_STEPS = 0.3, 10
_FRUITLESS_BATCHES = 4
_TEACHER_FACTOR, _TEACHER_LEAST = 2.0, 0.5


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """kind: one for each sort of trouble. text: what is seen, and what to try."""

    kind: str
    step: int
    text: str


class Watch:
    """Follows a run step by step, and tells of each kind of trouble once."""

    def __init__(self, earlier: Iterable[Record] = ()) -> None:
        """earlier: steps that were told of before."""
        self._history: deque[Record] = deque(maxlen=WINDOW)
        self._told: set[str] = set()
        for record in earlier:
            self.see(record)

    def see(self, record: Record) -> list[HealthFinding]:
        """Faults that this step shows and that were not told before."""
        self._history.append(record)
        fresh = [finding for finding in look(self._history) if finding.kind not in self._told]
        self._told |= {finding.kind for finding in fresh}
        return fresh


class Harvest:
    """Between two steps: tells once that groups come to nothing, so that no step is made of them.

    The buffer starts another group for each that fails or is filtered,
    so such a run would go on in silence.
    """

    def __init__(self, batch_size: int) -> None:
        self._bound = _FRUITLESS_BATCHES * batch_size
        self._step, self._failed, self._filtered = -1, 0, 0
        self._told = False

    def see(self, step: int, failed: int, filtered: int) -> HealthFinding | None:
        """step: the last that was made; failed, filtered: groups so far."""
        if step != self._step:
            self._step, self._failed, self._filtered = step, failed, filtered
        failed, filtered = failed - self._failed, filtered - self._filtered
        if self._told or failed + filtered < self._bound:
            return None
        self._told = True
        parts, advice = list[str](), list[str]()
        if failed:
            parts.append(f"{failed} groups failed")
            advice.append(
                "every sample of theirs failed, and the rollout log says why (sluice logs NAME "
                "rollout)"
            )
        if filtered:
            parts.append(f"{filtered} groups were filtered")
            advice.append(
                "rollout.dynamicFilter keeps too few: easier or harder prompts, more "
                "samplesPerPrompt"
            )
        return HealthFinding(
            "fruitless", step, f"{' and '.join(parts)} without a step: {'; '.join(advice)}"
        )


def findings(records: Iterable[Record]) -> list[HealthFinding]:
    """Faults of a run, each kind where it was first seen. records: of its steps, in their order."""
    watch = Watch()
    return [finding for record in records for finding in watch.see(record)]


def look(history: Sequence[Record]) -> Iterator[HealthFinding]:
    """Faults at the newest of the last WINDOW steps."""
    for kind, rule in _RULES.items():
        text = rule(history)
        if text:
            yield HealthFinding(kind, int(history[-1].get("step", 0)), text)


def _values(history: Sequence[Record], name: str) -> list[float]:
    return [float(record[name]) for record in history if isinstance(record.get(name), int | float)]


def _not_finite(history: Sequence[Record]) -> str | None:
    """JSON has NaN as Python writes it, so that it can be read back."""
    bad = [n for n, v in history[-1].items() if isinstance(v, float) and not math.isfinite(v)]
    if not bad:
        return None
    return (
        f"{', '.join(sorted(bad)[:3])} is not a finite number: lower trainer.optimizer.lr, or look "
        "at the samples"
    )


def _equal_rewards(history: Sequence[Record]) -> str | None:
    ratios = _values(history, "rollout/zero_std/ratio")[-FLAT_STEPS:]
    if len(ratios) < FLAT_STEPS or min(ratios) < 1.0:
        return None
    reward = _values(history, "rollout/raw_reward")[-1:]
    return (
        f"all rewards of each prompt were equal for {FLAT_STEPS} "
        f"steps{_shown(' (reward {:.3g})', reward)}: nothing can be learned from them. Try a "
        "reward that tells bad from worse, easier or harder prompts, more samplesPerPrompt, a "
        "higher temperature; check the reward on samples/"
    )


def _entropy_collapse(history: Sequence[Record]) -> str | None:
    entropies = _values(history, "train/entropy_loss")
    if len(entropies) < FLAT_STEPS or not _values(history, "rollout/raw_reward"):
        return None  # without rewards there is nothing to explore for: the answers are given
    if _values(history, "train/opd_reverse_kl"):
        return None  # a teacher that is sure makes its student sure
    start, now = max(entropies[: len(entropies) // 2]), median(entropies[-3:])
    if now > _ENTROPY_LEAST and now > _ENTROPY_SHARE * start:
        return None
    solved = _values(history, "rollout/raw_reward")[-3:]
    if solved and median(solved) >= 0.95:
        return None  # a policy that has found the answer may well be sure of it
    return (
        f"entropy has collapsed to {now:.2g}: the policy hardly explores any more. Try "
        "algorithm.entropyCoef, a higher "
        "clip.high (0.28), a lower learning rate, or an earlier checkpoint"
    )


def _kl_explosion(history: Sequence[Record]) -> str | None:
    last = history[-1]
    ppo, reference = abs(last.get("train/ppo_kl", 0.0)), last.get("train/kl_loss", 0.0)
    if ppo > _PPO_KL_LIMIT:
        return (
            f"ppo_kl is {ppo:.2g}: within one batch the policy moves far from the one that "
            "generated it. Try a lower "
            "learning rate, fewer trainer.stepsPerBatch, or a smaller rollout.maxStaleness"
        )
    if reference > _KL_LIMIT:
        return (
            f"the KL to the reference is {reference:.2g}: the policy has left it far behind. Try a "
            "higher algorithm.kl coefficient or a lower learning rate, and read samples/ for a "
            "reward that is being gamed"
        )
    return None


def _mismatch(history: Sequence[Record]) -> str | None:
    apart, same_weights = _differences(history)
    if apart < _LOGPROB_LIMIT or (same_weights is not None and same_weights < apart / 2):
        return None
    text = f"log-probs of trainer and engine differ by {apart:.2g} on average"
    if same_weights is not None:
        return (
            f"{text}, with the same weights too: they disagree about the model. See dtype and "
            "engineArgs"
        )
    return (
        f"{text}, and the weights that are trained have sampled no token: it may be the samples' "
        "age, then set algorithm.offPolicy.method: tis; or they disagree about the model, then see "
        "dtype and engineArgs"
    )


def _inexact(history: Sequence[Record]) -> str | None:
    """Of `trainer.deterministic`, which promises that these numbers are equal. Where a batch has
    several optimizer steps, the later ones have other weights than the engine had.
    """
    apart = history[-1].get("train/train_rollout_logprob_abs_diff_on_policy") or 0.0
    moved = history[-1].get("train/ppo_kl", 0.0) != 0.0
    if not history[-1].get("train/deterministic") or moved or apart == 0.0:
        return None
    return (
        f"log-probs of trainer and engine differ by {apart:.2g} though trainer.deterministic is "
        "set: their images need the same torch and Triton, their GPUs must be of one kind, and "
        "responses that go on with an old cache (pauseMode: in_place) cannot agree"
    )


def _old_samples(history: Sequence[Record]) -> str | None:
    """Samples so old that the loss should know.

    A ratio other than 1, or a weight, says that it does.
    """
    apart, same_weights = _differences(history)
    known = "train/tis" in history[-1] or abs(history[-1].get("train/ppo_kl", 0.0)) > 0
    if known or same_weights is None or apart < _AGE_LIMIT or same_weights >= apart / 2:
        return None
    return (
        f"the policy has moved by {apart:.2g} a token since its samples were made "
        f"({same_weights:.2g} where it made them itself), and the loss takes them for its own. Set "
        "algorithm.offPolicy.method: tis, or lower rollout.maxStaleness or the learning rate"
    )


def _differences(history: Sequence[Record]) -> tuple[float, float | None]:
    """Between the log-probs of trainer and engine, of the last steps: all tokens; those of the
    weights trained.
    """
    means = _values(history, "train/train_rollout_logprob_abs_diff")[-3:]
    same_weights = _values(history, "train/train_rollout_logprob_abs_diff_on_policy")[-3:]
    return median(means) if len(means) == 3 else 0.0, median(same_weights) if same_weights else None


def _truncation(history: Sequence[Record]) -> str | None:
    ratios = _values(history, "rollout/truncated_ratio")[-_TRUNCATED_STEPS:]
    if len(ratios) < _TRUNCATED_STEPS or min(ratios) <= _TRUNCATED_SHARE:
        return None
    never_ends = "where the model never ends a turn, check its chat template and end token"
    if _values([history[-1]], "multi_turn/turns/mean"):
        return (
            f"{ratios[-1]:.0%} of the episodes end with a turn that was cut off. That is as it "
            "should be where a turn is to have so many tokens; else try a higher "
            "sampling.maxResponseTokens (of all turns together), rollout.limits.turnTokens, or the "
            f"max_tokens that your program asks for; {never_ends}"
        )
    return (
        f"{ratios[-1]:.0%} of the responses are cut off at their token limit. Try a higher "
        f"sampling.maxResponseTokens; {never_ends}"
    )


def _failures(history: Sequence[Record]) -> str | None:
    ratios = _values(history, "rollout/failed_ratio")[-_TRUNCATED_STEPS:]
    if len(ratios) < _TRUNCATED_STEPS or min(ratios) <= _FAILED_SHARE:
        return None
    return (
        f"{ratios[-1]:.0%} of the samples fail (reward, teacher or generate function): the rollout "
        "log has their errors"
    )


def _leaves_teacher(history: Sequence[Record]) -> str | None:
    gaps = _values(history, "train/opd_reverse_kl")
    if len(gaps) < FLAT_STEPS:
        return None
    before, now = median(gaps[:3]), median(gaps[-3:])
    if now < _TEACHER_LEAST or now < _TEACHER_FACTOR * before:
        return None
    return (
        f"the reverse KL to the teacher has grown from {before:.2g} to {now:.2g}: the student "
        "moves away from it. Try a lower learning rate, a higher algorithm.distillation.coef where "
        "there is a reward too; read samples/"
    )


def _gradient_spike(history: Sequence[Record]) -> str | None:
    norms = _values(history, "train/grad_norm")
    if len(norms) < FLAT_STEPS:
        return None
    usual = median(norms[:-1])
    if norms[-1] < _SPIKE_LEAST or norms[-1] < _SPIKE * usual:
        return None
    return (
        f"the gradient norm jumped to {norms[-1]:.3g}, usual is {usual:.2g}. Clipping "
        "(optimizer.clipGrad) holds it; "
        "if it comes again, lower the learning rate and look at that step's samples"
    )


def _small_kernels(history: Sequence[Record]) -> str | None:
    """Of a small model, whose kernels the CPU cannot launch as fast as the GPU runs them."""
    shares = _values(history, "perf/mfu")[-_MFU_STEPS:]
    seconds = _values(history, "perf/actor_train_time")[-_MFU_STEPS:]
    if len(shares) < _MFU_STEPS or len(seconds) < _MFU_STEPS:
        return None
    if max(shares) >= _MFU_LEAST or min(seconds) < _TRAINING_SECONDS:
        return None
    grown = _values(history, "perf/micro_batch_tokens")[-1:]
    if grown and grown[0] < MOST_TOKENS:  # as far as memory and batch let them, or still growing
        return None
    memory = _values(history, "perf/gpu_memory/training_gib")[-1:]
    return (
        f"training takes {median(seconds):.1f} s a step and uses {median(shares):.1%} of the GPUs' "
        f"arithmetic{_shown(' and {:.0f} GiB of memory', memory)}"
        f"{_shown(', with micro-batches that have grown to {:,.0f} tokens', grown)}. Try a higher "
        "trainer.maxTokensPerGpu, for fewer and larger micro-batches, as far as the memory allows"
    )


def _busy_worker(history: Sequence[Record]) -> str | None:
    """Of workers that keep their engines waiting, and so the trainer."""
    names = ("rollout/worker_busy", "perf/train_wait_time", "perf/step_time")
    busy, waits, steps = (_values(history, name)[-_BUSY_STEPS:] for name in names)
    if min(map(len, (busy, waits, steps))) < _BUSY_STEPS:
        return None
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
    tails = _values(history, "rollout/tail_time")[-_TAIL_STEPS:]
    steps = _values(history, "perf/step_time")[-_TAIL_STEPS:]
    if min(len(tails), len(steps)) < _TAIL_STEPS:
        return None
    if any(t <= _TAIL_SHARE * step for t, step in zip(tails, steps, strict=True)):
        return None
    shared = _values([history[-1]], "perf/wake_up_time")
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
    late = _values(history, "perf/train_wait_late_time")[-_LATE_STEPS:]
    steps = _values(history, "perf/step_time")[-_LATE_STEPS:]
    if min(len(late), len(steps)) < _LATE_STEPS or sum(late) <= _LATE_SHARE * sum(steps):
        return None
    return (
        f"steps wait {sum(late) / sum(steps):.0%} of their time for a few groups that would be too "
        "old for the next batch: rollout.maxStaleness holds for every sample. Try a larger one, or "
        "rollout.partial with weightSync.pauseMode: in_place, with which the groups that are done "
        "first make the batch, and older ones are trained all the same and counted"
    )


def _shown(text: str, values: Sequence[float]) -> str:
    return text.format(values[-1]) if values else ""


_RULES: dict[str, Callable[[Sequence[Record]], str | None]] = {
    "not finite": _not_finite,
    "equal rewards": _equal_rewards,
    "entropy collapse": _entropy_collapse,
    "KL explosion": _kl_explosion,
    "log-prob mismatch": _mismatch,
    "not deterministic": _inexact,
    "old samples": _old_samples,
    "truncation": _truncation,
    "failures": _failures,
    "teacher left": _leaves_teacher,
    "gradient spike": _gradient_spike,
    "small kernels": _small_kernels,
    "busy worker": _busy_worker,
    "long tail": _long_tail,
    "late groups": _late_groups,
}
