"""Specs that make no sense, and some that do: for pydantic's rules, and for the same
rules in CEL.
"""

from __future__ import annotations

from typing import Any

CRITIC = {"warmupSteps": 2}


def manifest(algorithm: dict[str, Any], groups: dict[str, Any]) -> dict[str, Any]:
    """Return a spec with this algorithm. `groups` replaces other groups; None removes a group."""
    spec = {
        "model": {"path": "m"},
        "data": {"prompts": [{"path": "p"}]},
        "reward": {"type": "f1"},
        "trainer": {"steps": 4},
        "algorithm": algorithm,
        **groups,
    }
    return {name: group for name, group in spec.items() if group is not None}


ALONE: list[tuple[dict[str, Any], str, str]] = [
    ({"distillation": {"teacher": {}}}, "", "exactly one of path"),
    ({"distillation": {"teacher": {"path": "t", "url": "http://t"}}}, "", "exactly one of path"),
    (
        {"distillation": {"divergence": "jsd", "teacher": {"url": "http://t"}}},
        "divergence",
        "needs a teacher that the trainer scores with",
    ),
    (
        {"distillation": {"divergence": "forward_kl", "beta": 0.5, "teacher": {"path": "t"}}},
        "beta",
        "only the div",
    ),
    (
        {"distillation": {"beta": 0.5, "teacher": {"path": "t"}}},
        "beta",
        "only the divergence jsd has a beta",
    ),
    (
        {
            "distillation": {
                "teacher": {"path": "t"},
                "teachers": [{"dataSource": "a", "url": "http://a"}],
            }
        },
        "teachers",
        "the one for all other rows",
    ),
    ({"estimator": "custom"}, "function", "belong together"),
    ({"function": "a.b"}, "function", "belong together"),
    ({"critic": CRITIC}, "critic", "only estimator: ppo has a critic"),
    ({"estimator": "rloo", "critic": {}}, "critic", "only estimator: ppo has a critic"),
    (
        {"estimator": "reinforce_plus_plus", "normalizeAdvantages": False},
        "normalizeAdvantages",
        "always whiten",
    ),
    ({"estimator": "ppo", "turnAdvantage": {}}, "turnAdvantage", "turnAdvantage needs grpo"),
    ({"estimator": "gspo", "turnAdvantage": {}}, "turnAdvantage", "turnAdvantage needs grpo"),
    ({"gamma": 0.9}, "gamma", "only ppo and reinforce_plus_plus discount"),
    ({"estimator": "reinforce_plus_plus", "lambda": 0.9}, "lambda", "only ppo has a lambda"),
    ({"loss": {"type": "ppo", "function": "a.b"}}, "function", "cannot both be set"),
    ({"estimator": "cispo", "loss": {"clip": {"dual": 3.0}}}, "loss.clip.dual", "nothing to bound"),
    ({"loss": {"type": "reinforce", "clip": {"dual": 3.0}}}, "clip", "clip needs one of"),
    ({"kl": {"unbiased": True}}, "unbiased", "unbiased needs lossCoef"),
    ({"estimator": "gdpo"}, "rewardParts", "gdpo needs rewardParts"),
    ({"rewardParts": [{"name": "a"}]}, "rewardParts", "gdpo needs rewardParts"),
    (
        {"estimator": "gdpo", "rewardParts": [{"name": "a"}], "overlong": {"buffer": 9}},
        "overlong",
        "overlong lowers the whole reward",
    ),
    ({"kl": {"adaptive": {}}}, "adaptive", "adaptive needs coef"),
    ({"offPolicy": {"method": "tis", "oldLogProbs": "rollout"}}, "oldLogProbs", "leave method out"),
    ({"offPolicy": {"level": "sequence"}}, "level", "no effect without method"),
    ({"offPolicy": {"method": "tis", "low": 3.0}}, "low", "low must not exceed high"),
    ({"loss": {"gate": {"positive": 2.0}}}, "gate", "gate needs type: sapo"),
    ({"offPolicy": {"normalize": True}}, "normalize", "no effect without method"),
    ({"loss": {"covariance": {"ratio": 0.1}}}, "covariance", "needs type: clip_cov or kl_cov"),
    (
        {"loss": {"type": "kl_cov", "covariance": {"upper": 9.0}}},
        "covariance",
        "covariance.upper need type: clip_cov",
    ),
    (
        {"loss": {"type": "clip_cov", "covariance": {"lower": 5.0}}},
        "lower",
        "no token lies between",
    ),
    ({"loss": {"type": "clip_cov", "clip": {"dual": 3.0}}}, "loss.clip.dual", "nothing to bound"),
    (
        {"loss": {"type": "sft", "covariance": {}}},
        "covariance",
        "needs type: clip_cov or kl_cov",
    ),
    (
        {"offPolicy": {"reject": [{"measure": "k3", "low": 0.5, "high": 2.0}]}},
        "low",
        "only k1 has a lower bound",
    ),
    ({"offPolicy": {"reject": [{"low": 3.0, "high": 2.0}]}}, "high", "low must not exceed high"),
    ({"offPolicy": {"reject": [{"high": 0.5}]}}, "high", "high must be at least 1"),
    ({"offPolicy": {"reject": [{"over": "sequence_max", "high": 2.0}]}}, "over", "veto bounds"),
    (
        {"offPolicy": {"reject": [{"measure": "binary_kl", "over": "sequence_sum", "high": 2.0}]}},
        "over",
        "looks at single tokens",
    ),
    (
        {"loss": {"type": "sft"}, "estimator": "rloo"},
        "loss.type",
        "leave out what belongs to these",
    ),
    (
        {"loss": {"type": "sft", "clip": {"low": 0.1}}},
        "clip",
        "clip needs one of",
    ),
    ({"loss": {"type": "sft"}, "kl": {"coef": 0.1}}, "kl.coef", "given answers have none"),
    (
        {"loss": {"type": "dpo"}, "entropyCoef": 0.1},
        "loss.type",
        "compares whole answers, and has no terms of tokens",
    ),
    (
        {"loss": {"type": "simpo"}, "aggregation": "token_mean", "kl": {"lossCoef": 0.1}},
        "loss.type",
        "compares whole answers, and has no terms of tokens",
    ),
    (
        {"loss": {"type": "ipo"}, "estimator": "rloo"},
        "loss.type",
        "leave out what belongs to these",
    ),
    (
        {"loss": {"type": "sft", "preference": {"beta": 0.5}}},
        "preference",
        "preference needs one of the types",
    ),
    (
        {"loss": {"type": "ipo", "preference": {"labelSmoothing": 0.1}}},
        "preference.labelSmoothing",
        "labelSmoothing needs type: dpo or simpo",
    ),
    (
        {"loss": {"type": "orpo", "preference": {"lengthNormalized": True}}},
        "preference.lengthNormalized",
        "lengthNormalized needs type: dpo or ipo",
    ),
    (
        {"loss": {"type": "dpo", "preference": {"margin": 0.5}}},
        "preference.margin",
        "margin needs type: simpo",
    ),
    (
        {"loss": {"type": "reward_model", "preference": {"beta": 0.5}}},
        "preference.beta",
        "beta needs type: dpo or ipo or kto",
    ),
    (
        {"loss": {"type": "dpo", "preference": {"desirableWeight": 2.0}}},
        "preference.desirableWeight",
        "desirableWeight needs type: kto",
    ),
    (
        {"loss": {"type": "dpo", "preference": {"undesirableWeight": 2.0}}},
        "preference.undesirableWeight",
        "undesirableWeight needs type: kto",
    ),
    (
        {"loss": {"type": "kto", "preference": {"centering": 0.01}}},
        "preference.centering",
        "centering needs type: reward_model",
    ),
]
SEATS = {"function": "play.py:play", "seats": [{"name": "white"}, {"name": "black"}]}
TOGETHER: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"estimator": "remax"}, {"rollout": SEATS}, "algorithm.estimator", "one for each seat"),
    (
        {},
        {"rollout": SEATS, "reward": {"function": "a.b", "group": True}},
        "reward.group",
        "judges each seat for itself",
    ),
    ({}, {"rollout": {"samplesPerPrompt": 1}}, "algorithm.estimator", "nothing would be learned"),
    (
        {"estimator": "rloo"},
        {"rollout": {"samplesPerPrompt": 1}},
        "algorithm.estimator",
        "nothing would be learned",
    ),
    (
        {"estimator": "remax"},
        {"reward": {"function": "a.b", "group": True}},
        "reward.group",
        "greedy response alone",
    ),
    (
        {"estimator": "ppo", "critic": {"warmupSteps": 4}},
        {},
        "algorithm.critic.warmupSteps",
        "never be trained",
    ),
    (
        {"offPolicy": {"opsmDelta": 0.1}},
        {},
        "algorithm.offPolicy.opsmDelta",
        "no sequence is ever masked",
    ),
    ({"loss": {"type": "kl_cov"}}, {}, "algorithm.loss.type", "holds nothing back"),
    (
        {},
        {"trainer": {"steps": 4, "routingReplay": "trainer"}},
        "routingReplay",
        "there is no log-prob pass before it",
    ),
    (
        {"loss": {"type": "sft"}},
        {
            "reward": None,
            "trainer": {"steps": 4, "routingReplay": "trainer", "stepsPerBatch": 2},
        },
        "trainer.routingReplay",
        "given answers were sent to no experts before",
    ),
    ({}, {"debug": {"replay": "rollouts"}}, "rollout.replicas", "set rollout.replicas: 0"),
    (
        {},
        {"debug": {"replay": "r", "rolloutOnly": True}, "rollout": {"replicas": 0}},
        "replay",
        "exclude each",
    ),
    (
        {},
        {"debug": {"rolloutOnly": True}, "model": {"path": "m", "init": "random"}},
        "debug.rolloutOnly",
        "on disk",
    ),
    (
        {},
        {"evaluation": {"passAtK": [2], "datasets": [{"path": "e"}]}},
        "passAtK",
        "of some data set",
    ),
    (
        {},
        {
            "evaluation": {
                "passAtK": [1, 9],
                "samplesPerPrompt": 8,
                "datasets": [{"path": "e", "samplesPerPrompt": 4}],
            }
        },
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
TAUGHT = {"distillation": {"teacher": {"path": "t"}}}
BY_URL = {"distillation": {"teacher": {"url": "http://t"}}}
TOGETHER += [
    ({}, {"reward": None}, "reward", "there is nothing to learn from"),
    (
        BY_URL,
        {"rollout": {"sampling": {"temperature": 0.7}}},
        "algorithm.distillation.teacher.url",
        "temperature 1",
    ),
    (
        {**TAUGHT, "estimator": "ppo"},
        {"reward": None},
        "algorithm.estimator",
        "without spec.reward",
    ),
    (
        {**TAUGHT, "estimator": "remax"},
        {"reward": None},
        "algorithm.estimator",
        "without spec.reward",
    ),
    (
        TAUGHT,
        {"rollout": {"dynamicFilter": "nonzero_std"}, "reward": None},
        "rollout.dynamicFilter",
        "every group",
    ),
    (
        TAUGHT,
        {"rollout": {"samplesPerPrompt": 1}},
        "algorithm.estimator",
        "nothing would be learned",
    ),
    (
        TAUGHT,
        {"reward": None, "evaluation": {"datasets": [{"path": "e"}]}},
        "evaluation.datasets",
        "of its own",
    ),
]
SFT = {"loss": {"type": "sft"}}
TOGETHER += [
    (
        {"loss": {"type": "simpo"}},
        {"model": {"path": "m", "referencePath": "r"}},
        "model.referencePath",
        "only dpo, ipo, kto compare the policy with a reference",
    ),
    (
        {"loss": {"type": "reward_model"}},
        {"reward": {"type": "f1"}, "evaluation": {"datasets": [{"path": "e"}]}},
        "evaluation.datasets",
        "generates nothing that an evaluation could judge",
    ),
    (
        {},
        {"evaluation": {"heldOut": [{"path": "h"}]}},
        "evaluation.heldOut",
        "heldOut has rows with given answers, which this job does not learn from",
    ),
    (
        {"loss": {"type": "sft"}},
        {
            "reward": None,
            "data": {"prompts": [{"path": "p"}], "images": {}},
            "evaluation": {"heldOut": [{"path": "h"}]},
        },
        "evaluation.heldOut",
        "with data.images leave heldOut out",
    ),
    (
        {"loss": {"type": "reward_model"}},
        {"trainer": {"steps": 1, "lora": {"from": "adapter"}}},
        "trainer.lora.from",
        "a reward model starts a new adapter",
    ),
    (
        {"loss": {"type": "dpo"}},
        {"rollout": {"samplesPerPrompt": 4}},
        "rollout.samplesPerPrompt",
        "each row is one sample",
    ),
    (
        SFT,
        {"rollout": {"mode": "async", "maxStaleness": 1}},
        "algorithm.loss.type",
        "about generated samples",
    ),
    (
        SFT,
        {"rollout": {"dynamicFilter": "nonzero_std"}},
        "algorithm.loss.type",
        "about generated samples",
    ),
    (
        SFT,
        {"rollout": {"samplesPerPrompt": 4}},
        "rollout.samplesPerPrompt",
        "each row is one sample",
    ),
    (SFT, {"debug": {"rolloutOnly": True}}, "debug", "about generated samples"),
    (SFT, {"trainer": {"steps": 4, "colocate": True}}, "trainer.colocate", "takes turns"),
    (
        SFT,
        {"rollout": {"batchSize": 6}, "trainer": {"steps": 4, "stepsPerBatch": 4}},
        "trainer.stepsPerBatch",
        "equal steps",
    ),
    (
        SFT,
        {"reward": None, "evaluation": {"datasets": [{"path": "e"}]}},
        "evaluation.datasets",
        "of its own",
    ),
]
LONG = {"sampling": {"maxResponseTokens": 1_000_000}}
TOGETHER += [
    (
        {},
        {"rollout": {"batchSize": 512, "samplesPerPrompt": 16, **LONG}},
        "buffer.storage.size",
        "does not fit",
    ),
    (
        {},
        {"rollout": {"samplesPerPrompt": 4, **LONG}, "buffer": {"storage": {"size": "500M"}}},
        "buffer.storage.size",
        "does not fit",
    ),
    (
        {},
        {"rollout": {"batchSize": 1, "samplesPerPrompt": 128, **LONG}},
        "buffer.memory",
        "with this memory",
    ),
    ({}, {"rollout": LONG, "buffer": {"memory": "400Mi"}}, "buffer.memory", "with this memory"),
]
# (algorithm, other groups) that are accepted.
SENSIBLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {},
        {
            "reward": None,
            "rollout": {"environment": {"command": ["a"], "verifier": {"command": ["v"]}}},
        },
    ),
    ({"estimator": "cispo", "turnAdvantage": {"gamma": 0.9}}, {"rollout": SEATS}),
    ({}, {"rollout": {"batchSize": 64, **LONG}}),
    ({}, {"rollout": {"replicas": 2, "minReplicas": 2}}),
    ({}, {"rollout": {"replicas": 0, "minReplicas": 2}}),
    ({}, {"rollout": {"replicas": 1, "minReplicas": 2}}),
    ({}, {"rollout": {"minReplicas": 2}}),
    (
        {},
        {"rollout": {"batchSize": 1, "samplesPerPrompt": 3, **LONG}, "buffer": {"memory": "64Mi"}},
    ),
    ({}, {"rollout": LONG, "buffer": {"memory": 4294967296, "storage": {"size": "100Gi"}}}),
    ({"estimator": "custom", "function": "mine.py:advantages", "gamma": 0.9, "lambda": 0.9}, {}),
    ({"estimator": "ppo", "gamma": 0.99, "lambda": 0.95, "critic": CRITIC}, {}),
    ({"estimator": "ppo"}, {"rollout": {"samplesPerPrompt": 1}}),
    ({"estimator": "cispo", "loss": {"function": "a.b", "clip": {"dual": 3.0}}}, {}),
    ({"estimator": "cispo", "loss": {"type": "ppo", "clip": {"dual": 3.0}}}, {}),
    ({"loss": {"type": "dppo_tv", "clip": {"dual": 20.0, "low": 0.15}}}, {}),
    ({"loss": {"type": "sapo", "gate": {"negative": 2.0}}}, {}),
    ({"loss": {"type": "clip_cov", "covariance": {"ratio": 0.02, "lower": 6.0, "upper": 7.0}}}, {}),
    (
        {"loss": {"type": "kl_cov"}},
        {"trainer": {"steps": 4, "stepsPerBatch": 2}},
    ),
    ({"offPolicy": {"oldLogProbs": "rollout"}, "loss": {"type": "kl_cov"}}, {}),
    ({"loss": {"function": "a.b", "covariance": {}}}, {}),
    ({"offPolicy": {"method": "icepop", "normalize": True}}, {}),
    (
        {
            "offPolicy": {
                "oldLogProbs": "rollout",
                "veto": 1e-4,
                "reject": [{"high": 2.0}, {"measure": "k3", "over": "sequence_max", "high": 0.1}],
            }
        },
        {},
    ),
    ({"offPolicy": {"opsmDelta": 0.1}}, {"trainer": {"steps": 4, "stepsPerBatch": 2}}),
    ({"offPolicy": {"opsmDelta": 0.1, "oldLogProbs": "rollout"}}, {}),
    ({"estimator": "ppo", "critic": {"warmupSteps": 9}}, {"trainer": {"epochs": 1}}),
    ({}, {"debug": {"replay": "rollouts"}, "rollout": {"replicas": 0}}),
    ({}, {"debug": {"rolloutOnly": True}}),
    (
        TAUGHT,
        {"reward": None, "rollout": {"samplesPerPrompt": 1, "sampling": {"temperature": 0.7}}},
    ),
    (TAUGHT, {"rollout": {"dynamicFilter": "nonzero_std"}}),
    ({**TAUGHT, "estimator": "ppo"}, {}),
    (
        {"distillation": {"divergence": "jsd", "beta": 0.1, "teacher": {"path": "t"}}},
        {"reward": None},
    ),
    ({"distillation": {"divergence": "token", "teacher": {"url": "http://t"}}}, {"reward": None}),
    (
        {
            "distillation": {
                "teacher": {"url": "http://t"},
                "teachers": [
                    {"dataSource": "a", "url": "http://a"},
                    {"dataSource": "b", "url": "http://a"},
                ],
            }
        },
        {"reward": None},
    ),
    (
        BY_URL,
        {
            "reward": None,
            "rollout": {"sampling": {"temperature": 1.0}, "dynamicFilter": "mine.py:keep"},
        },
    ),
    (
        BY_URL,
        {"reward": None, "evaluation": {"datasets": [{"path": "e", "reward": {"type": "f1"}}]}},
    ),
    (SFT, {"reward": None}),
    (
        SFT,
        {
            "reward": None,
            "rollout": {"samplesPerPrompt": 1, "batchSize": 4, "hooks": {"afterReward": "c.py:d"}},
        },
    ),
    (SFT, {"reward": None, "evaluation": {"datasets": [{"path": "e", "reward": {"type": "f1"}}]}}),
    (
        SFT,
        {"evaluation": {"datasets": [{"path": "e"}]}, "trainer": {"steps": 4, "stepsPerBatch": 2}},
    ),
    (
        {**SFT, "kl": {"lossCoef": 0.1}, "aggregation": "sequence_mean", "entropyCoef": 0.01},
        {"reward": None},
    ),
    (
        {"loss": {"type": "dpo", "preference": {"labelSmoothing": 0.1, "lengthNormalized": True}}},
        {"reward": None, "model": {"path": "m", "referencePath": "r"}},
    ),
    ({"loss": {"type": "simpo", "preference": {"margin": 1, "beta": 2.5}}}, {"reward": None}),
    ({"loss": {"type": "orpo"}}, {"reward": None}),
    ({"loss": {"type": "kto", "preference": {"desirableWeight": 1.5}}}, {"reward": None}),
    ({"loss": {"type": "reward_model", "preference": {"centering": 0.01}}}, {"reward": None}),
    (
        {},
        {
            "rollout": {
                "function": "game.py:play",
                "hooks": {"beforeReward": "a.b", "afterReward": "c.py:d"},
            }
        },
    ),
    (
        {},
        {
            "evaluation": {
                "passAtK": [1, 16],
                "datasets": [
                    {"path": "e"},
                    {"path": "f", "samplesPerPrompt": 16, "reward": {"type": "f1"}},
                ],
            }
        },
    ),
]

TOGETHER += [
    (
        {},
        {"data": {"prompts": [{"path": "p"}], "truncation": "left"}},
        "data.truncation",
        "only rows with given answers are cut",
    ),
    (
        {"overlong": {"buffer": 101}},
        {"rollout": {"sampling": {"maxResponseTokens": 100}}},
        "algorithm.overlong.buffer",
        "cannot exceed",
    ),
]
TOGETHER += [
    ({}, {"reward": {"type": "f1", "terms": [term]}}, field, reason)
    for term, field, reason in (
        ({"type": "length"}, "longest", "longest belongs to the term length"),
        ({"type": "repetition", "opened": True}, "tags", "only the term format looks at tags"),
        ({"type": "format", "ngram": 3}, "ngram", "only the term repetition has n-grams"),
    )
]
SENSIBLE += [
    ({"estimator": "max_rl"}, {}),
    ({"estimator": "gdpo", "rewardParts": [{"name": "a"}, {"name": "b", "weight": 2.0}]}, {}),
    (SFT, {"reward": None, "data": {"prompts": [{"path": "p"}], "truncation": "right"}}),
    (
        {},
        {
            "reward": {
                "type": "f1",
                "terms": [
                    {"type": "format", "tags": ["think", "answer"], "opened": True},
                    {"type": "repetition", "ngram": 20, "weight": 0.1},
                    {"type": "length", "longest": 100},
                ],
            }
        },
    ),
    ({"kl": {"coef": 0.01, "adaptive": {"target": 0.5, "horizon": 100}}}, {}),
    (
        {"overlong": {"buffer": 100, "penalty": 0.5}},
        {"rollout": {"sampling": {"maxResponseTokens": 100}}},
    ),
]
ONE = {"steps": 1, "colocate": True}
TOGETHER += [
    (
        {},
        {"trainer": ONE, "rollout": {"mode": "async", "maxStaleness": 1}},
        "trainer.colocate",
        "take turns",
    ),
    (
        {},
        {"trainer": ONE, "weightSync": {"transport": "nccl"}},
        "weightSync.transport",
        "cannot connect two processes",
    ),
    ({}, {"weightSync": {"transport": "ipc"}}, "weightSync.transport", "needs trainer.colocate"),
    (
        {},
        {"trainer": ONE, "rollout": {"nodesPerReplica": 2}},
        "rollout.nodesPerReplica",
        "one machine",
    ),
    (
        {},
        {"trainer": {**ONE, "gpusPerNode": 4}, "rollout": {"gpusPerReplica": 3}},
        "rollout.gpusPerReplica",
        "divide",
    ),
    ({}, {"trainer": {**ONE, "gpusPerNode": 0}}, "rollout.gpusPerReplica", "must divide"),
    (
        {},
        {"trainer": ONE, "rollout": {"gpusPerReplica": 0}},
        "rollout.gpusPerReplica",
        "must divide",
    ),
    (
        {},
        {"trainer": {**ONE, "nodes": 2}, "rollout": {"replicas": 3}},
        "rollout.replicas",
        "leave replicas out",
    ),
    (
        {},
        {"trainer": {**ONE, "gpusPerNode": 2, "processesPerNode": 1}},
        "trainer.processesPerNode",
        "one trainer process",
    ),
    (
        {},
        {"trainer": ONE, "debug": {"rolloutOnly": True}},
        "trainer.colocate",
        "nothing that could take turns",
    ),
]
SENSIBLE += [
    ({}, {"trainer": ONE}),
    (
        {},
        {
            "trainer": {**ONE, "nodes": 2, "gpusPerNode": 8, "offload": "optimizer"},
            "rollout": {"gpusPerReplica": 4, "replicas": 4},
            "weightSync": {"transport": "disk"},
        },
    ),
    (
        {},
        {
            "trainer": {**ONE, "gpusPerNode": 0, "processesPerNode": 2, "offload": "all"},
            "rollout": {"gpusPerReplica": 0, "replicas": 3},
            "weightSync": {"transport": "ipc"},
        },
    ),
    ({}, {"trainer": {"steps": 1, "offload": "none"}}),
]

ONCE = {"storage": {"accessModes": ["ReadWriteOnce"]}}
EPHEMERAL = {"ephemeral": True}
TWO_NODES = {"steps": 4, "nodes": 2}
TOGETHER += [
    (
        {},
        {"checkpoint": {"volume": {"emptyDir": {}}, "storage": {"size": "1Gi"}}},
        "",
        "at most one of volume",
    ),
    ({}, {"checkpoint": {"storage": {}, **EPHEMERAL}}, "", "at most one of volume"),
    (
        {},
        {"trainer": TWO_NODES, "checkpoint": ONCE},
        "checkpoint.storage.accessModes",
        "needs ReadWriteMany",
    ),
    (
        {},
        {"trainer": TWO_NODES, "checkpoint": EPHEMERAL},
        "checkpoint.ephemeral",
        "the directory of a single pod",
    ),
    ({}, {"trainer": ONE, "checkpoint": EPHEMERAL}, "checkpoint.ephemeral", "belongs to one pod"),
    (
        {},
        {"weightSync": {"transport": "disk"}, "checkpoint": EPHEMERAL},
        "checkpoint.ephemeral",
        "belongs to one pod",
    ),
]
SENSIBLE += [
    (
        {},
        {
            "checkpoint": {
                "storage": {"size": "1Ti", "storageClassName": "fast", "whenDeleted": "Delete"}
            }
        },
    ),
    ({}, {"checkpoint": EPHEMERAL}),
    ({}, {"checkpoint": {"volume": {"emptyDir": {}}, "ephemeral": False}}),
    ({}, {"trainer": TWO_NODES}),
    ({}, {"trainer": TWO_NODES, "checkpoint": {"storage": {"accessModes": ["ReadWriteMany"]}}}),
    ({}, {"weightSync": {"transport": "disk"}, "checkpoint": ONCE}),
]

POOLED: dict[str, Any] = {
    "trainer": {"steps": 1, "lora": {}},
    "weightSync": {"lora": "adapter", "pauseMode": "versions"},
    "rollout": {"pool": "shared"},
}


def _pooled(**groups: Any) -> dict[str, Any]:
    """Return the groups of a job with a pool; fields of `groups` are added to them."""
    return {name: POOLED.get(name, {}) | groups.get(name, {}) for name in POOLED | groups}


SENSIBLE += [({}, POOLED), ({}, _pooled(rollout={"poolWeight": 3, "replicas": 1}))]
TOGETHER += [
    ({}, {"rollout": {"pool": "shared"}}, "rollout.pool", "bring an adapter each"),
    (
        {},
        _pooled(weightSync={"pauseMode": "in_place"}),
        "rollout.pool",
        "{lora: adapter, pauseMode: versions}",
    ),
    ({}, _pooled(rollout={"engine": "vllm"}), "rollout.engine", "of a pool are SGLang"),
    ({}, _pooled(weightSync={"fanOut": "chain"}), "weightSync.fanOut", "to each engine of a pool"),
    (
        {},
        _pooled(weightSync={"transport": "disk"}),
        "weightSync.transport",
        "engines of a pool have no directory of the job's",
    ),
    (
        {},
        _pooled(trainer={"colocate": True}),
        "trainer.colocate",
        "do not share the trainer's GPUs",
    ),
    (
        {},
        _pooled(rollout={"nodesPerReplica": 2}),
        "rollout.nodesPerReplica",
        "engine of a pool is one pod",
    ),
    (
        {},
        _pooled(trainer={"routingReplay": "rollout"}),
        "trainer.routingReplay",
        "do not report their routing",
    ),
    (
        {},
        _pooled(rollout={"engineArgs": {"memFractionStatic": 0.8}}),
        "rollout.engineArgs",
        "write engineArgs in the RLEnginePool",
    ),
    (
        {},
        _pooled(rollout={"kvCacheDtype": "fp8_e4m3"}),
        "rollout.precision",
        "started by the pool, in its precision",
    ),
    (
        {},
        _pooled(debug={"rolloutOnly": True}),
        "rollout.pool",
        "which engines of a pool serve alone",
    ),
    ({}, {"rollout": {"poolWeight": 2}}, "poolWeight", "share of a pool"),
]
