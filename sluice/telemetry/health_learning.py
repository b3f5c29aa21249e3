"""Rules of a run that does not learn as it should."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from sluice.telemetry.health_records import Record, Rule, shown, values

FLAT_STEPS = 10
_ENTROPY_SHARE, _ENTROPY_LEAST = 0.05, 1e-3
_KL_LIMIT, _PPO_KL_LIMIT = 1.0, 0.1
_LOGPROB_LIMIT, _AGE_LIMIT = 0.1, 0.05
_TRUNCATED_SHARE, _TRUNCATED_STEPS = 0.5, 3
_SPIKE, _SPIKE_LEAST = 10.0, 1.0
_FAILED_SHARE = 0.2
_TEACHER_FACTOR, _TEACHER_LEAST = 2.0, 0.5


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
    ratios = values(history, "rollout/zero_std/ratio")[-FLAT_STEPS:]
    if len(ratios) < FLAT_STEPS or min(ratios) < 1.0:
        return None
    reward = values(history, "rollout/raw_reward")[-1:]
    return (
        f"all rewards of each prompt were equal for {FLAT_STEPS} "
        f"steps{shown(' (reward {:.3g})', reward)}: nothing can be learned from them. Try a "
        "reward that tells bad from worse, easier or harder prompts, more samplesPerPrompt, a "
        "higher temperature; check the reward on samples/"
    )


def _entropy_collapse(history: Sequence[Record]) -> str | None:
    entropies = values(history, "train/entropy_loss")
    if len(entropies) < FLAT_STEPS or not values(history, "rollout/raw_reward"):
        return None  # without rewards there is nothing to explore for: the answers are given
    if values(history, "train/opd_reverse_kl"):
        return None  # a teacher that is sure makes its student sure
    start, now = max(entropies[: len(entropies) // 2]), median(entropies[-3:])
    if now > _ENTROPY_LEAST and now > _ENTROPY_SHARE * start:
        return None
    solved = values(history, "rollout/raw_reward")[-3:]
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
    old_cache = history[-1].get("rollout/old_cache_ratio", 0.0)
    if same_weights is not None and old_cache > 0:
        if "train/tis" in history[-1]:
            return None  # the weights of the loss correct for it
        return (
            f"{text}, with the same weights too, and {old_cache:.0%} of the samples went on with "
            "a cache that older weights had computed (weightSync.pauseMode: in_place), which can "
            "explain it. Try pauseMode: retract, or algorithm.offPolicy.method: tis. If they "
            "differ as much with retract, they disagree about the model: see dtype and engineArgs"
        )
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
    means = values(history, "train/train_rollout_logprob_abs_diff")[-3:]
    same_weights = values(history, "train/train_rollout_logprob_abs_diff_on_policy")[-3:]
    return median(means) if len(means) == 3 else 0.0, median(same_weights) if same_weights else None


def _truncation(history: Sequence[Record]) -> str | None:
    ratios = values(history, "rollout/truncated_ratio")[-_TRUNCATED_STEPS:]
    if len(ratios) < _TRUNCATED_STEPS or min(ratios) <= _TRUNCATED_SHARE:
        return None
    never_ends = "where the model never ends a turn, check its chat template and end token"
    if values([history[-1]], "multi_turn/turns/mean"):
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
    ratios = values(history, "rollout/failed_ratio")[-_TRUNCATED_STEPS:]
    if len(ratios) < _TRUNCATED_STEPS or min(ratios) <= _FAILED_SHARE:
        return None
    return (
        f"{ratios[-1]:.0%} of the samples fail (reward, teacher or generate function): the rollout "
        "log has their errors"
    )


def _leaves_teacher(history: Sequence[Record]) -> str | None:
    gaps = values(history, "train/opd_reverse_kl")
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
    norms = values(history, "train/grad_norm")
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


RULES: dict[str, Rule] = {
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
}
