"""Specs that make no sense, and some that do: for pydantic's rules, and for the same rules in CEL."""

from __future__ import annotations

from typing import Any

CRITIC = {"warmupSteps": 2}


def manifest(algorithm: dict[str, Any], groups: dict[str, Any]) -> dict[str, Any]:
    """A spec with this algorithm; groups stand in for those of the rest."""
    return {
        "model": {"path": "m"},
        "data": {"prompts": [{"path": "p"}]},
        "reward": {"type": "f1"},
        "trainer": {"steps": 4},
        "algorithm": algorithm,
        **groups,
    }


ALONE = [
    ({"estimator": "custom"}, "function", "belong together"),
    ({"function": "a.b"}, "function", "belong together"),
    ({"critic": CRITIC}, "critic", "only estimator: ppo has a critic"),
    ({"estimator": "rloo", "critic": {}}, "critic", "only estimator: ppo has a critic"),
    ({"estimator": "reinforce_plus_plus", "normalizeAdvantages": False}, "normalizeAdvantages", "by definition"),
    ({"gamma": 0.9}, "gamma", "only ppo and reinforce_plus_plus discount"),
    ({"estimator": "reinforce_plus_plus", "lambda": 0.9}, "lambda", "only ppo has a lambda"),
    ({"loss": "clip", "lossFunction": "a.b"}, "lossFunction", "cannot both be set"),
    ({"estimator": "cispo", "clip": {"dual": 3.0}}, "clip.dual", "nothing to bound"),
    ({"loss": "reinforce", "clip": {"dual": 3.0}}, "clip.dual", "nothing to bound"),
    ({"kl": {"unbiased": True}}, "unbiased", "unbiased needs lossCoef"),
    ({"offPolicy": {"method": "tis", "oldLogProbs": "rollout"}}, "oldLogProbs", "leave method out"),
    ({"offPolicy": {"level": "sequence"}}, "level", "no effect without method"),
    ({"offPolicy": {"method": "tis", "low": 3.0}}, "low", "low must not exceed high"),
]
TOGETHER: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"rollout": {"samplesPerPrompt": 1}}, "algorithm.estimator", "nothing would be learned"),
    ({"estimator": "rloo"}, {"rollout": {"samplesPerPrompt": 1}}, "algorithm.estimator", "nothing would be learned"),
    ({"estimator": "remax"}, {"reward": {"function": "a.b", "group": True}}, "reward.group", "greedy response alone"),
    ({"estimator": "ppo", "critic": {"warmupSteps": 4}}, {}, "algorithm.critic.warmupSteps", "never be trained"),
    ({"offPolicy": {"opsmDelta": 0.1}}, {}, "algorithm.offPolicy.opsmDelta", "no sequence is ever masked"),
    ({}, {"debug": {"replay": "rollouts"}}, "rollout.replicas", "set rollout.replicas: 0"),
    ({}, {"debug": {"replay": "r", "rolloutOnly": True}, "rollout": {"replicas": 0}}, "replay", "exclude each"),
    ({}, {"debug": {"rolloutOnly": True}, "model": {"path": "m", "init": "random"}}, "debug.rolloutOnly", "on disk"),
    ({}, {"evaluation": {"passAtK": [2], "datasets": [{"path": "e"}]}}, "passAtK", "of some data set"),
    (
        {},
        {"evaluation": {"passAtK": [1, 9], "samplesPerPrompt": 8, "datasets": [{"path": "e", "samplesPerPrompt": 4}]}},
        "passAtK",
        "of some data set",
    ),
    (
        {},
        {"evaluation": {"datasets": [{"path": "e", "reward": {"type": "f1", "url": "http://x"}}]}},
        "",
        "exactly one of type",
    ),
]
SENSIBLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"estimator": "custom", "function": "mine.py:advantages", "gamma": 0.9, "lambda": 0.9}, {}),
    ({"estimator": "ppo", "gamma": 0.99, "lambda": 0.95, "critic": CRITIC}, {}),
    ({"estimator": "ppo"}, {"rollout": {"samplesPerPrompt": 1}}),
    ({"estimator": "cispo", "clip": {"dual": 3.0}, "lossFunction": "a.b"}, {}),
    ({"estimator": "cispo", "clip": {"dual": 3.0}, "loss": "clip"}, {}),
    ({"offPolicy": {"opsmDelta": 0.1}}, {"trainer": {"steps": 4, "stepsPerBatch": 2}}),
    ({"offPolicy": {"opsmDelta": 0.1, "oldLogProbs": "rollout"}}, {}),
    ({"estimator": "ppo", "critic": {"warmupSteps": 9}}, {"trainer": {"epochs": 1}}),
    ({}, {"debug": {"replay": "rollouts"}, "rollout": {"replicas": 0}}),
    ({}, {"debug": {"rolloutOnly": True}}),
    ({}, {"rollout": {"function": "game.py:play", "hooks": {"beforeReward": "a.b", "afterReward": "c.py:d"}}}),
    (
        {},
        {
            "evaluation": {
                "passAtK": [1, 16],
                "datasets": [{"path": "e"}, {"path": "f", "samplesPerPrompt": 16, "reward": {"type": "f1"}}],
            }
        },
    ),
]
"""(algorithm, other groups) that are accepted."""
