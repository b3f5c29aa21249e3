"""All of a user's code that runs in a worker, loaded and tried before the engine has started:
mistakes show at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice.api import Reward, RLJobSpec
from sluice.rewards import RewardError
from sluice.rewards.judging.judge import Judge
from sluice.runtime.pod_env import ConfigurationError
from sluice_rollout.environments.pods import EpisodePods
from sluice_rollout.user_functions import filters, hooks, runner


@dataclass(frozen=True, slots=True)
class Code:
    """judge: of training, and of evaluation data sets without a reward of their own; judges: of
    those with one.

    Without a spec.reward there is no judge.
    """

    judge: Judge | None
    judges: dict[str, Judge]
    keep: filters.Filter
    plays: runner.EpisodeFunctions
    hooks: hooks.Hooks
    fields: dict[str, Judge]
    """Every judge, by the field that tells of it."""

    @classmethod
    def of(cls, spec: RLJobSpec, pods: EpisodePods | None = None) -> Code:
        """Load what the job names. pods: play its episodes, where those are pods.

        Raises ConfigurationError. (The judges load nothing before `check`.)
        """
        keep, plays = filters.load(spec.rollout.dynamic_filter), runner.load_all(spec, pods)
        job_hooks = hooks.load_all(spec.rollout.hooks)
        datasets = spec.evaluation.datasets if spec.evaluation else []
        judges = {one.source_name: Judge(one.reward) for one in datasets if one.reward}
        judge = Judge(spec.reward) if spec.reward else None
        fields = {_field("spec.reward", spec.reward): judge} if spec.reward and judge else {}
        for position, one in enumerate(datasets):
            if one.reward:
                fields[_field(f"spec.evaluation.datasets[{position}].reward", one.reward)] = judges[
                    one.source_name
                ]
        return cls(judge, judges, keep, plays, job_hooks, fields)

    async def check(self) -> None:
        """Try the rewards, and the program of episodes. Raises ConfigurationError."""
        if self.plays.program:
            await self.plays.program.check()
        for field, judge in self.fields.items():
            try:
                await judge.check()
            except RewardError as error:
                raise ConfigurationError(f"{field}: {error}") from error

    async def close(self) -> None:
        if self.plays.program:
            self.plays.program.close()
        for judge in self.fields.values():
            await judge.close()


def _field(name: str, reward: Reward) -> str:
    return f"{name}.function" if reward.function else name
