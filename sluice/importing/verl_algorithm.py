"""verl's algorithm and critic groups -> spec.algorithm: what needs more than one key."""

from __future__ import annotations

from typing import Any

from sluice.importing.draft import Draft, Setting, Settings, integer, location, put, real, text
from sluice.importing.verl_table import kl_type

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_ESTIMATORS = {
    "gae": "ppo", "grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce_plus_plus", "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}  # fmt: skip


def policy(draft: Draft, settings: Settings) -> None:
    given = settings.take("algorithm.adv_estimator")
    if given is None:
        draft.note("other default", "algorithm.estimator", "ppo (verl: gae, algorithm.adv_estimator)")
    estimator = _ESTIMATORS.get(str(given.value) if given else "gae")
    mode = settings.take(f"{_ACTOR}.policy_loss.loss_mode")
    loss = str(mode.value) if mode else "vanilla"
    if given and estimator is None:
        why = f"algorithm.estimator has {', '.join(sorted(set(_ESTIMATORS.values())))}; another one is a function"
        draft.note("not translated", given.shown, why, given.line)
    elif loss in ("gspo", "cispo") and estimator == "grpo":
        draft.set("algorithm.estimator", loss, f"{_ACTOR}.policy_loss.loss_mode")
    else:
        draft.set("algorithm.estimator", estimator, given.name if given else "default of algorithm.adv_estimator")
        losses = {"gspo": "gspo", "cispo": "cispo", "gpg": "reinforce"}
        if loss in losses:
            draft.set("algorithm.loss", losses[loss], f"{_ACTOR}.policy_loss.loss_mode")
        elif mode and loss != "vanilla":
            draft.note("not translated", mode.shown, "algorithm.loss is clip, gspo, cispo or reinforce", mode.line)
    settings.seen |= {name for name in settings if name.startswith(f"{_ACTOR}.policy_loss.")}
    _clip(draft, settings, vanilla=loss not in ("gspo", "cispo", "gpg"))
    betas = settings.take(f"{_ACTOR}.optim.betas")
    put(draft, "trainer.optimizer.beta1", betas, lambda value: _pair(value)[0])
    put(draft, "trainer.optimizer.beta2", betas, lambda value: _pair(value)[1])
    if settings.on("algorithm.filter_groups.enable"):
        draft.set("rollout.dynamicFilter", "nonzero_std", "algorithm.filter_groups.enable")
    checkpointing = settings.take("actor_rollout_ref.model.enable_gradient_checkpointing")
    if checkpointing and checkpointing.value is True:
        draft.set("trainer.recompute", "full", checkpointing.name)


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"expected two numbers, found {value!r}")
    return real(value[0]), real(value[1])


def _clip(draft: Draft, settings: Settings, *, vanilla: bool) -> None:
    put(draft, "algorithm.clip.low", settings.take(f"{_ACTOR}.clip_ratio"), real)
    dual = settings.take(f"{_ACTOR}.clip_ratio_c")
    if vanilla and not put(draft, "algorithm.clip.dual", dual, real):
        draft.set("algorithm.clip.dual", 3.0, "default of actor.clip_ratio_c")
        draft.note("other default", "algorithm.clip.dual", "3.0 (verl, actor.clip_ratio_c); sluice has none")


def kl(draft: Draft, settings: Settings) -> None:
    default = Setting("default of kl_loss_coef and kl_ctrl.kl_coef", (0.001,))
    coef, kind = settings.take(f"{_ACTOR}.kl_loss_coef"), settings.take(f"{_ACTOR}.kl_loss_type")
    if settings.on(f"{_ACTOR}.use_kl_loss"):
        put(draft, "algorithm.kl.lossCoef", coef or default, real)
        put(draft, "algorithm.kl.type", kind or Setting("default of kl_loss_type", ("low_var_kl",)), kl_type)
    coef, kind = settings.take("algorithm.kl_ctrl.kl_coef"), settings.take("algorithm.kl_penalty")
    if settings.on("algorithm.use_kl_in_reward"):
        put(draft, "algorithm.kl.coef", coef or default, real)
        if draft.get("algorithm.kl.type") is None:
            put(draft, "algorithm.kl.type", kind or Setting("default of kl_penalty", ("kl",)), kl_type)


def corrections(draft: Draft, settings: Settings) -> None:
    weights, most = settings.take(f"{_CORRECTION}.rollout_is"), settings.take(f"{_CORRECTION}.rollout_is_threshold")
    if weights and weights.value not in (None, False):
        draft.set("algorithm.offPolicy.method", "tis", weights.name)
        put(draft, "algorithm.offPolicy.level", weights, text)
        put(draft, "algorithm.offPolicy.high", most, real)
    for name in (f"{_CORRECTION}.bypass_mode", f"{_ACTOR}.use_rollout_log_probs"):
        if settings.on(name):
            draft.set("algorithm.offPolicy.oldLogProbs", "rollout", name)
    rejection = settings.take(f"{_CORRECTION}.rollout_rs")
    if rejection and rejection.value is not None:
        why = "samples are weighed, not rejected: algorithm.offPolicy.method: icepop leaves tokens out"
        draft.note("not translated", rejection.shown, why, rejection.line)
    else:
        settings.seen |= {name for name in settings if name.startswith(f"{_CORRECTION}.rollout_rs")}


def critic(draft: Draft, settings: Settings) -> None:
    if draft.get("algorithm.estimator") != "ppo":
        return
    put(draft, "algorithm.critic.modelPath", settings.get("critic.model.path"), location)
    put(draft, "algorithm.critic.lr", settings.get("critic.optim.lr"), real)
    put(draft, "algorithm.critic.warmupSteps", settings.get("trainer.critic_warmup"), integer)
    if not put(draft, "algorithm.critic.clip", settings.get("critic.cliprange_value"), real):
        draft.set("algorithm.critic.clip", 0.5, "default of critic.cliprange_value")
        draft.note("other default", "algorithm.critic.clip", "0.5 (verl, critic.cliprange_value)")
