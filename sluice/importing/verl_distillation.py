"""verl's distillation group -> algorithm.distillation."""

from __future__ import annotations

from sluice.importing.draft import Draft, Settings, location, put, real

_LOSS = "distillation.distillation_loss"
_TEACHERS = "distillation.teacher_models."


def distillation(draft: Draft, settings: Settings) -> None:
    """One teacher whose opinion of the sampled token is an advantage. verl's other losses have no counterpart."""
    settings.seen |= {name for name in settings if name.startswith("distillation.")}
    if not settings.on("distillation.enabled"):
        return
    mode = settings.get(f"{_LOSS}.loss_mode")
    if not settings.on(f"{_LOSS}.use_policy_gradient") or mode is None or mode.value not in ("kl", "k1"):
        why = "sluice has the policy gradient of the sampled token's k1: use_policy_gradient with loss_mode k1"
        draft.note("not translated", "distillation.enabled", why)
        return
    paths = [settings[name] for name in settings if name.startswith(_TEACHERS) and name.endswith(".model_path")]
    if len(paths) != 1:
        draft.note("not translated", "distillation.teacher_models", f"sluice has one teacher, not {len(paths)}")
        return
    put(draft, "algorithm.distillation.teacher.path", paths[0], location, "scored by the trainer; or teacher.url")
    put(draft, "algorithm.distillation.coef", settings.get(f"{_LOSS}.distillation_loss_coef"), real)
    rewards = settings.get(f"{_LOSS}.use_task_rewards")
    if rewards and rewards.value is False:
        _without_reward(draft)


def _without_reward(draft: Draft) -> None:
    """Learn from the teacher alone; evaluations are still judged."""
    reward = draft.spec.pop("reward", None)
    for dataset in draft.get("evaluation.datasets") or []:
        dataset["reward"] = reward
