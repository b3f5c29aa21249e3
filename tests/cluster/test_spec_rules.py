"""The API server refuses what pydantic refuses, group by group: the CEL of a rule and its Python
say the same.

Rules of the algorithm are in test_algorithm_rules.py.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

import pytest
from pydantic import ValidationError

from sluice.api.job import RLJobSpec
from sluice.api.pool import RLEnginePoolSpec
from sluice.api.schema.base import API_VERSION, Model
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from tests.algorithm_cases import ALONE, TOGETHER, manifest

JOBS = f"/apis/{API_VERSION}/namespaces/default/rljobs"
NFS = {"nfs": {"server": "s", "path": "/"}}
ONE_NODE = {"storage": {"accessModes": ["ReadWriteOnce"]}}
STORE = {"uri": "/store"}
FSDP_LORA = {"backend": "fsdp", "lora": {}}
PASS_AT = {"datasets": [{"path": "e"}, {"path": "f", "samplesPerPrompt": 4}]}
IMAGES: dict[str, Any] = {
    "data": {"prompts": [{"path": "p.jsonl"}], "images": {}},
    "trainer": {"steps": 1, "backend": "fsdp"},
}
SPECULATIVE = {"algorithm": "ngram"}
# Groups that a job with images cannot have.
WITHOUT_IMAGES: list[tuple[dict[str, Any], str]] = [
    ({"rollout": {"engine": "vllm"}}, "data.images needs an engine that gets images"),
    ({"rollout": {"engine": "transformers"}}, "data.images needs an engine that gets images"),
    (
        {
            "rollout": {"pool": "shared"},
            "trainer": {"steps": 1, **FSDP_LORA},
            "weightSync": {"lora": "adapter", "pauseMode": "versions"},
        },
        "engines of a pool get no images",
    ),
    ({"reward": {"model": {"url": "http://judge"}}}, "a reward model gets no images"),
    ({"algorithm": {"loss": {"type": "dpo"}}}, "preferences cannot have images yet"),
    ({"debug": {"replay": "runs/rollouts"}}, "dumped rollouts name their images"),
    (
        {
            "trainer": {
                "steps": 1,
                "backend": "fsdp",
                "gpusPerNode": 2,
                "parallelism": {"context": 2},
            }
        },
        "ranks cannot share sequences with images yet",
    ),
    ({"trainer": {"steps": 1}}, "Megatron trains language models alone"),
    (
        {"trainer": {"steps": 1, **FSDP_LORA, "freeze": []}},
        "adapters are added to the language model",
    ),
]
NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"telemetry": {"trackers": [{}]}}, "exactly one of type and function"),
    (
        {"telemetry": {"trackers": [{"type": "wandb", "function": "a.b"}]}},
        "exactly one of type and function",
    ),
    (
        {"trainer": {"steps": 4, "resources": {"limits": {"nvidia.com/gpu": 1}}}},
        "nvidia.com/gpu is what",
    ),
    (
        {"rollout": {"workerResources": {"requests": {"nvidia.com/gpu": 1}}}},
        "nvidia.com/gpu is what",
    ),
    ({"rollout": {"maxStaleness": 1}}, "maxStaleness above 0 needs mode: async"),
    ({"rollout": {"mode": "async"}}, "mode: async needs maxStaleness"),
    ({"rollout": {"engine": "vllm", "nodesPerReplica": 2}}, "a vLLM engine is one pod"),
    (
        {"rollout": {"engine": "vllm", "sampling": {"temperature": 0.7, "topK": 5}}},
        "vLLM gives log-probs of all",
    ),
    ({"rollout": {"engine": "transformers", "gpusPerReplica": 2}}, "on a CPU or on one GPU"),
    (
        {"rollout": {"engine": "transformers"}, "trainer": {"steps": 1, "colocate": True}},
        "cannot give its memory to the trainer",
    ),
    *((IMAGES | groups, reason) for groups, reason in WITHOUT_IMAGES),
    (
        {"trainer": {"steps": 1, "backend": "fsdp", "freeze": ["vision"]}},
        "freeze names parts of a vision-language model",
    ),
    *(
        ({"rollout": {"engineArgs": arguments}}, "set rollout.speculative")
        for arguments in (
            {"speculativeAlgorithm": "EAGLE"},
            {"speculative_algorithm": "NGRAM"},
            {"speculative-draft-model-path": "m"},
            {"speculativeConfig": "{}"},
            {"speculativeNumSteps": "2"},
        )
    ),
    (
        {"rollout": {"engineArgs": {"speculative-accept-threshold-single": "0.5"}}},
        "no samples of the policy",
    ),
    *(
        ({"trainer": {"steps": 4, "mtp": {}, "backend": "fsdp", **trainer}, **groups}, reason)
        for trainer, groups, reason in (
            ({"backend": "megatron"}, {}, "only backend: fsdp, without lora"),
            ({"lora": {"rank": 4}}, {}, "only backend: fsdp, without lora"),
            ({"parallelism": {"context": 2}}, {}, "only backend: fsdp, without lora"),
            (
                {"fakeQuantize": True},
                {"rollout": {"precision": "fp8"}},
                "engines do not quantize the layer",
            ),
            ({}, {"model": {"path": "/m", "init": "random"}}, "is read from the checkpoint"),
            ({}, {"data": IMAGES["data"]}, "is read from the checkpoint"),
            ({}, {"algorithm": {"loss": {"type": "reward_model"}}}, "generates nothing"),
        )
    ),
    *(
        ({**groups, "rollout": {"speculative": SPECULATIVE, **rollout}}, reason)
        for groups, rollout, reason in (
            ({}, {"engine": "vllm"}, "only SGLang has been shown to sample from the policy"),
            ({}, {"speculative": {"algorithm": "eagle3"}}, "eagle3 and draft need a checkpoint"),
            ({}, {"speculative": SPECULATIVE | {"model": "d"}}, "leave model out"),
            (
                {},
                {"precision": "fp8", "speculative": {"algorithm": "draft", "model": "d"}},
                "a draft would have to be quantized",
            ),
            (
                {"weightSync": {"enginePlugin": False}},
                {},
                "loads each update into the draft model too",
            ),
            (
                {"trainer": {"steps": 4, **FSDP_LORA}, "weightSync": {"lora": "adapter"}},
                {},
                "has not been shown to verify with them",
            ),
            (
                {
                    "trainer": {"steps": 4, **FSDP_LORA},
                    "weightSync": {"lora": "adapter", "pauseMode": "versions"},
                },
                {"pool": "shared"},
                "the engines are started by the pool: leave speculative out",
            ),
            (
                {"trainer": {"steps": 4, "routingReplay": "rollout"}},
                {},
                "tokens that were proposed and refused",
            ),
            (
                {"trainer": {"steps": 4, "deterministic": True}},
                {},
                "verification computes several in one pass",
            ),
            (IMAGES, {}, "has not been shown to work with images"),
            (
                {"model": {"path": "m", "init": "random"}},
                {"speculative": {"algorithm": "mtp"}},
                "model.init: random draws no layers",
            ),
        )
    ),
    *(
        ({"rollout": {"engineArgs": arguments}}, "an engine serves the model that is trained")
        for arguments in ({"enableLora": True}, {"lora-paths": ["a"]}, {"lora_modules": ["a=b"]})
    ),
    *(
        ({"rollout": {"engineArgs": arguments}}, reason)
        for arguments, reason in (
            ({"quantization": "fp8"}, "set rollout.precision"),
            ({"kv-cache-dtype": "fp8_e4m3"}, "set rollout.kvCacheDtype"),
        )
    ),
    ({"rollout": {"engine": "vllm", "precision": "fp8"}}, "only SGLang has been shown"),
    (
        {"rollout": {"engine": "transformers", "kvCacheDtype": "fp8_e4m3"}},
        "only sglang and vllm on GPUs have a KV cache in FP8",
    ),
    (
        {"rollout": {"gpusPerReplica": 0, "kvCacheDtype": "fp8_e4m3"}},
        "only sglang and vllm on GPUs have a KV cache in FP8",
    ),
    *(
        ({**groups, "rollout": {"precision": "fp8_block"}}, reason)
        for groups, reason in (
            ({"weightSync": {"enginePlugin": False}}, "through sluice's plugin alone"),
            (
                {
                    "trainer": {"steps": 4, **FSDP_LORA},
                    "weightSync": {"lora": "adapter"},
                },
                "in the precision that it has there",
            ),
            ({"debug": {"rolloutOnly": True}}, "name one that `sluice convert quantize` has"),
            ({"trainer": {"steps": 4, "deterministic": True}}, "bit for bit"),
        )
    ),
    *(
        ({"trainer": {"steps": 4, "fakeQuantize": True, **trainer}, "rollout": rollout}, reason)
        for trainer, rollout, reason in (
            ({}, {"precision": "int8"}, "only backend: fsdp computes with quantized weights"),
            ({"backend": "fsdp"}, {}, "computes with the weights of quantized engines"),
            (FSDP_LORA, {"precision": "int8"}, "quantize the sum of base and adapter"),
        )
    ),
    (
        {**IMAGES, "rollout": {"precision": "fp8"}},
        "have not been shown to work with quantized weights",
    ),
    *(
        ({"rollout": {"engineArgs": arguments}}, "updates come in the trainer's precision")
        for arguments in (
            {"torchao-config": "int8wo"},
            {"loadFormat": "gguf"},
        )
    ),
    *(
        ({"rollout": {"engineArgs": arguments}}, "it would outlive the weights")
        for arguments in ({"enable_lmcache": True}, {"hicacheStorageBackend": "file"})
    ),
    *(
        ({**groups, "rollout": {"engineArgs": arguments}}, "prefills and decodes by itself")
        for groups in ({}, {"debug": {"rolloutOnly": True}})
        for arguments in ({"disaggregationMode": "prefill"}, {"kvTransferConfig": "{}"})
    ),
    (
        {"rollout": {"engine": "vllm"}, "weightSync": {"enginePlugin": False}},
        "through sluice's plugin alone",
    ),
    ({"weightSync": {"lora": "adapter"}}, "without trainer.lora all weights train"),
    *(
        (
            {
                "trainer": {"steps": 4, "backend": "fsdp", "lora": lora},
                "rollout": {"engine": "vllm"},
                "weightSync": {"lora": "adapter"},
            },
            "vLLM has memory for adapters of rank 512 at most",
        )
        for lora in ({"rank": 513}, {"rank": 257, "initialise": "pissa"})
    ),
    ({"weightSync": {"pauseMode": "versions"}}, "an engine keeps several versions of an adapter"),
    *(
        ({"trainer": {"steps": 4, **FSDP_LORA}, **group}, message)
        for group, message in (
            (
                {"rollout": {"engine": "transformers"}, "weightSync": {"lora": "adapter"}},
                "only sglang and vllm take adapters, with weightSync.enginePlugin",
            ),
            (
                {"weightSync": {"lora": "adapter", "enginePlugin": False}},
                "only sglang and vllm take adapters, with weightSync.enginePlugin",
            ),
            (
                {"weightSync": {"lora": "adapter"}, "model": {"path": "m", "init": "random"}},
                "engines read the model from its checkpoint",
            ),
        )
    ),
    (
        {"trainer": {"steps": 4, "parallelism": {"firstStageLayers": 2}}},
        "firstStageLayers and lastStageLayers need pipeline",
    ),
    (
        {"trainer": {"steps": 4, "parallelism": {"virtualPipeline": 2}}},
        "virtualPipeline needs pipeline",
    ),
    (
        {"rollout": {"function": "play.py:play", "environment": {"command": ["agent"]}}},
        "environment and function both play the episodes",
    ),
    ({"rollout": {"limits": {"summary": {"most": 2}}}}, "summary needs overflow: summarise"),
    ({"rollout": {"limits": {"onTimeout": "fail"}}}, "onTimeout needs seconds"),
    ({"rollout": {"limits": {"seconds": 60}}}, "limits.seconds is of episodes"),
    (
        {
            "rollout": {
                "limits": {"overflow": "summarise"},
                "sampling": {"maxResponseTokens": 512},
            }
        },
        "a summary and a turn have to fit",
    ),
    ({"rollout": {"seats": [{"name": "white"}]}}, "seats are of episodes that a program plays"),
    (
        {
            "rollout": {
                "function": "play.py:play",
                "seats": [{"name": "judge"}],
                "models": [{"name": "judge", "url": "http://judge:30000/v1"}],
            }
        },
        "has the name of one of models",
    ),
    (
        {
            "rollout": {
                "environment": {"verifiers": {"name": "sums"}},
                "seats": [{"name": "white"}],
            }
        },
        "ask for one model and no seats",
    ),
    (
        {"rollout": {"environment": {"command": ["agent"], "template": {"metadata": {}}}}},
        "template, egressTo and sandbox are of pods",
    ),
    (
        {"rollout": {"environment": {"command": ["agent"], "sandbox": {}}}},
        "template, egressTo and sandbox are of pods",
    ),
    (
        {"rollout": {"environment": {"verifiers": {"name": "sums"}, "image": "me/agent:1"}}},
        "verifiers and gym run in the worker's container",
    ),
    (
        {"rollout": {"environment": {"gym": {"id": "Taxi-v4"}, "image": "me/agent:1"}}},
        "verifiers and gym run in the worker's container",
    ),
    ({"rollout": {"environment": {"gym": {}}}}, "exactly one of id and make"),
    (
        {"rollout": {"environment": {"gym": {"id": "Taxi-v4", "make": "taxi.py:Taxi"}}}},
        "exactly one of id and make",
    ),
    (
        {"rollout": {"environment": {"gym": {"id": "Taxi-v4"}, "openenv": {"url": "http://w:1"}}}},
        "exactly one of command, verifiers, openenv and gym",
    ),
    (
        {
            "rollout": {
                "environment": {"gym": {"id": "Taxi-v4"}, "verifier": {"command": ["judge"]}}
            }
        },
        "verifier judges what command has left",
    ),
    (
        {"rollout": {"environment": {"gym": {"id": "Taxi-v4"}}, "seats": [{"name": "white"}]}},
        "ask for one model and no seats",
    ),
    ({"rollout": {"environment": {}}}, "exactly one of command, verifiers, openenv and gym"),
    (
        {"rollout": {"environment": {"openenv": {"url": "http://w:1"}, "image": "me/agent:1"}}},
        "openenv starts no program",
    ),
    ({"rollout": {"environment": {"openenv": {}}}}, "expected either url or image"),
    (
        {"rollout": {"environment": {"openenv": {"url": "http://w:1", "image": "me/wordle:1"}}}},
        "expected either url or image",
    ),
    (
        {
            "rollout": {
                "environment": {
                    "openenv": {"url": "http://w:1", "action": "text", "function": "a.b"}
                }
            }
        },
        "action and function both say",
    ),
    (
        {
            "rollout": {
                "environment": {"verifiers": {"name": "sums"}, "verifier": {"command": ["judge"]}}
            }
        },
        "verifier judges what command has left",
    ),
    (
        {
            "rollout": {
                "environment": {
                    "command": ["agent"],
                    "verifier": {"command": ["judge"], "image": "me/judge:1"},
                }
            }
        },
        "verifier.image and verifier.template are of pods",
    ),
    (
        {"rollout": {"environment": {"command": ["agent"], "image": "{metadata.image}"}}},
        "image refers to the row, which is input from outside",
    ),
    (
        {
            "rollout": {
                "environment": {
                    "command": ["agent"],
                    "image": "me/agent:1",
                    "verifier": {"command": ["judge"], "image": "me/{metadata.image}"},
                }
            }
        },
        "image refers to the row, which is input from outside",
    ),
    (
        {"rollout": {"environment": {"command": ["agent"], "verifiers": {"name": "sums"}}}},
        "exactly one of command, verifiers, openenv and gym",
    ),
    *(
        (
            {"rollout": {"environment": {"command": ["agent"], "env": {name: "x"}}}},
            "env: expected names of variables",
        )
        for name in ("SLUICE_TOKEN", "OPENAI_API_KEY", "A=B", "")
    ),
    ({"trainer": {}}, "exactly one of steps and epochs"),
    ({"trainer": {"steps": 4, "epochs": 1}}, "exactly one of steps and epochs"),
    *(
        (
            {"trainer": {"steps": 4, "backend": "fsdp", "parallelism": {kind: 2}}},
            f"backend: fsdp has no parallelism.{kind}",
        )
        for kind in ("tensor", "pipeline", "expert")
    ),
    ({"trainer": {"steps": 4, "offload": "all"}}, "only a trainer that shares its GPUs offloads"),
    (
        {"trainer": {"steps": 4, "backend": "fsdp", "recompute": "selective"}},
        "backend: fsdp recomputes whole layers",
    ),
    (
        {"trainer": {"steps": 4, "backend": "fsdp", "routingReplay": "rollout"}},
        "only backend: megatron replays routing",
    ),
    (
        {"trainer": {"steps": 4, "routingReplay": "rollout"}, "rollout": {"engine": "vllm"}},
        "routingReplay: rollout needs an engine that reports its routing",
    ),
    *(
        ({"trainer": {"steps": 4, "deterministic": True, **more}}, "deterministic needs backend")
        for more in ({"backend": "fsdp"}, {"gpusPerNode": 2, "parallelism": {"tensor": 2}})
    ),
    (
        {"trainer": {"steps": 4, "deterministic": True, "precision": "fp32"}},
        "deterministic needs precision: bf16",
    ),
    *(
        ({"trainer": {"steps": 4, "deterministic": True}, **more}, "computes as the trainer does")
        for more in ({"rollout": {"gpusPerReplica": 2}}, {"weightSync": {"enginePlugin": False}})
    ),
    ({"trainer": {"steps": 4, "cpuOffload": "all"}}, "only backend: fsdp trains from host memory"),
    (
        {"trainer": {"steps": 4, "lora": {}, "cpuOffload": "optimizer"}},
        "the optimizer of an adapter has megabytes",
    ),
    ({"trainer": {"steps": 4, "lora": {}, "deterministic": True}}, "which rounds differently"),
    (
        {"trainer": {"steps": 4, "lora": {"initialise": "eva"}}},
        "set initialise: pissa_niter_16, which needs the weights alone",
    ),
    (
        {"trainer": {"steps": 4, "lora": {"from": "a", "initialise": "pissa"}}},
        "the first weights are those of the adapter in from",
    ),
    (
        {
            "trainer": {
                "steps": 4,
                "backend": "fsdp",
                "lora": {"quantizeBase": "nf4", "initialise": "pissa"},
            }
        },
        "pissa decomposes the weights before they are quantized",
    ),
    (
        {"trainer": {"steps": 4, "lora": {"targetModules": ["experts"]}}},
        "only backend: fsdp trains adapters of experts",
    ),
    *(
        (
            {
                "trainer": {
                    "steps": 4,
                    "backend": "fsdp",
                    "lora": {"targetModules": ["experts"], **settings},
                }
            },
            "adapters of experts have neither dropout nor",
        )
        for settings in ({"dropout": 0.1}, {"initialise": "pissa"})
    ),
    (
        {
            "trainer": {"steps": 4, "backend": "fsdp", "lora": {"targetModules": ["experts"]}},
            "weightSync": {"lora": "adapter"},
        },
        "engines take no adapters of experts",
    ),
    (
        {"trainer": {"steps": 4, "lora": {"quantizeBase": "nf4"}}},
        "only backend: fsdp trains adapters of a quantized base",
    ),
    (
        {
            "trainer": {"steps": 4, "backend": "fsdp", "lora": {"quantizeBase": "nf4"}},
            "weightSync": {"lora": "adapter"},
        },
        "an engine would add the adapter to the weights on disk",
    ),
    (
        {"trainer": {"steps": 4, "backend": "fsdp", "cpuOffload": "optimizer"}},
        "backend: fsdp has all in host memory or nothing",
    ),
    (
        {"trainer": {"steps": 4, "backend": "fsdp", "optimizer": {"expAvgSqDtype": "bf16"}}},
        "backend: fsdp keeps Adam's moments in fp32",
    ),
    (
        {"trainer": {"steps": 4, "cpuOffloadFraction": 0.5}},
        "cpuOffloadFraction needs cpuOffload: optimizer",
    ),
    ({"reward": {}}, "exactly one of type, function, url and model"),
    ({"reward": {"type": "f1", "url": "http://r"}}, "exactly one of type, function, url and model"),
    ({"reward": {"type": "f1", "group": True}}, "group: true needs function"),
    ({"data": {"prompts": [{}]}}, "exactly one of path (a file) and source"),
    ({"evaluation": {**PASS_AT, "passAtK": [2, 8]}}, "every k must be at most"),
    ({"evaluation": {"everySteps": 2}}, "there is nothing to evaluate"),
    ({"evaluation": {"heldOut": [{"path": "h"}]}}, "heldOut has rows with given answers"),
    (
        {
            "reward": None,
            "algorithm": {"loss": {"type": "sft"}},
            "evaluation": {"heldOut": [{"path": "h"}]},
            "trainer": {"steps": 1, "backend": "fsdp"},
            "data": {"prompts": [{"path": "p"}], "images": {}},
        },
        "held-out rows cannot have images yet",
    ),
    (
        {
            "reward": None,
            "algorithm": {"loss": {"type": "reward_model"}},
            "evaluation": {"datasets": [{"path": "e", "reward": {"type": "f1"}}]},
        },
        "a reward model generates nothing that an evaluation could judge",
    ),
    ({"topology": {}}, "exactly one of required and preferred"),
    ({"podGroupPolicy": {}}, "exactly one of kueue, volcano and native"),
    ({"podGroupPolicy": {"volcano": {}, "native": {}}}, "exactly one of kueue, volcano and native"),
    (
        {"debug": {"replay": "r", "rolloutOnly": True}, "rollout": {"replicas": 0}},
        "replay and rolloutOnly exclude",
    ),
    (
        {"debug": {"profile": [2], "rolloutOnly": True}},
        "profile records steps of the trainer, and rolloutOnly trains nothing",
    ),
    ({"debug": {"replay": "r"}}, "debug.replay trains on dumped rollouts"),
    (
        {"debug": {"rolloutOnly": True}, "model": {"path": "m", "init": "random"}},
        "debug.rolloutOnly needs weights",
    ),
    (
        {"checkpoint": {"volume": NFS, "ephemeral": True}},
        "at most one of volume, storage and ephemeral",
    ),
    (
        {"checkpoint": {"volume": NFS, "storage": {}}},
        "at most one of volume, storage and ephemeral",
    ),
    (
        {"trainer": {"steps": 4, "nodes": 2}, "checkpoint": ONE_NODE},
        "trainer.nodes > 1 needs ReadWriteMany",
    ),
    (
        {"trainer": {"steps": 4, "nodes": 2}, "checkpoint": {"ephemeral": True}},
        "which the directory of a single pod",
    ),
    ({"checkpoint": {"secretRef": {"name": "bucket"}}}, "secretRef needs to"),
    (
        {"weightSync": {"transport": "disk"}, "checkpoint": {"ephemeral": True}},
        "engines read the weights",
    ),
    (
        {"trainer": {"steps": 4, "colocate": True}, "checkpoint": {"ephemeral": True}},
        "engines read the weights",
    ),
    ({"trainer": {"steps": 4, "stepsPerBatch": 3}}, "batchSize x samplesPerPrompt sequences"),
    (
        {"trainer": {"steps": 4, "parallelism": {"tensor": 2}}},
        "nodes x processes of a node must be a multiple of tensor",
    ),
    (
        {"trainer": {"steps": 4, "processesPerNode": 3, "parallelism": {"context": 2}}},
        "must be a multiple of tensor",
    ),
    (
        {"trainer": {"steps": 4, "parallelism": {"expert": 2}}},
        "nodes x processes of a node / pipeline",
    ),
    (
        {"trainer": {"steps": 4, "gpusPerNode": 0}, "weightSync": {"transport": "nccl"}},
        "transport nccl needs GPUs",
    ),
    ({"weightSync": {"transport": "store"}}, "transport store needs a place"),
    ({"weightSync": {"store": STORE}}, "the store is used with weightSync.transport: store alone"),
    (
        {
            "trainer": {"steps": 4, "colocate": True},
            "weightSync": {"transport": "store", "store": STORE},
        },
        "with colocate leave weightSync.transport out",
    ),
    (
        {
            "rollout": {"pool": "shared"},
            "trainer": {"steps": 1, **FSDP_LORA},
            "weightSync": {
                "lora": "adapter",
                "pauseMode": "versions",
                "transport": "store",
                "store": STORE,
            },
        },
        "that engines of a pool do not see",
    ),
    (
        {
            "rollout": {"nodesPerReplica": 2, "gpusPerReplica": 2},
            "weightSync": {"transport": "store", "store": STORE},
        },
        "an engine of several pods would",
    ),
    (
        {"weightSync": {"transport": "store", "store": STORE, "fanOut": "chain"}},
        "engines fetch weights from the store themselves",
    ),
    ({"reward": None}, "there is nothing to learn from"),
    (
        {"reward": None, "rollout": {"environment": {"command": ["agent"]}}},
        "there is nothing to learn from",
    ),
    (
        {
            "reward": None,
            "rollout": {"environment": {"gym": {"id": "Taxi-v4"}}, "samplesPerPrompt": 1},
        },
        "this estimator compares the responses to a prompt",
    ),
    (
        {
            "reward": None,
            "algorithm": {"distillation": {"teacher": {"path": "t"}}},
            "evaluation": PASS_AT,
        },
        "without spec.reward each data set",
    ),
]
SENSIBLE: list[dict[str, Any]] = [
    IMAGES,
    IMAGES | {"trainer": {"steps": 1, "backend": "fsdp", "freeze": []}},
    {"rollout": {"engine": "transformers", "gpusPerReplica": 1}},
    {"rollout": {"engine": "vllm", "sampling": {"temperature": 0.7}}},
    {"rollout": {"engine": "vllm", "sampling": {"topP": 0.9}}},
    {"rollout": {"mode": "async", "maxStaleness": 1}},
    {
        "trainer": {
            "epochs": 1,
            "gpusPerNode": 4,
            "parallelism": {"tensor": 2, "pipeline": 2, "virtualPipeline": 2},
        }
    },
    {"trainer": {"steps": 4, "nodes": 2, "colocate": True, "offload": "all"}},
    {"trainer": {"steps": 4, "gpusPerNode": 4, "backend": "fsdp", "recompute": "full"}},
    {"trainer": {"steps": 4, "backend": "fsdp", "cpuOffload": "all"}},
    {"trainer": {"steps": 4, "cpuOffload": "optimizer", "cpuOffloadFraction": 0.5}},
    {"trainer": {"steps": 4, "optimizer": {"expAvgDtype": "bf16", "expAvgSqDtype": "bf16"}}},
    {"trainer": {"steps": 4, "routingReplay": "rollout"}},
    {
        "trainer": {"steps": 4, "routingReplay": "trainer", "stepsPerBatch": 2},
        "rollout": {"engine": "vllm"},
    },
    {"trainer": {"steps": 4, "recompute": "selective", "recomputeModules": ["mlp", "moe"]}},
    {
        "trainer": {"steps": 4, "nodes": 2},
        "checkpoint": {"storage": {"accessModes": ["ReadWriteMany"]}},
    },
    {"trainer": {"steps": 4, "nodes": 2}, "checkpoint": {"volume": NFS}},
    {"trainer": {"steps": 4, "nodes": 2}, "checkpoint": {"to": "s3://bucket/a", **ONE_NODE}},
    {"trainer": {"steps": 4, "nodes": 2}, "checkpoint": {"to": "gs://b1/a", "ephemeral": True}},
    {"weightSync": {"transport": "gloo"}, "checkpoint": {"ephemeral": True}},
    {"weightSync": {"transport": "store", "store": STORE}, "checkpoint": {"ephemeral": True}},
    *(
        {
            "trainer": {"steps": 4, "backend": "fsdp", "lora": lora},
            "rollout": {"engine": "vllm"},
            "weightSync": {"lora": "adapter"},
        }
        for lora in ({"targetModules": ["k_proj"]}, {"rank": 256, "initialise": "pissa"})
    ),
    {"trainer": {"steps": 4, **FSDP_LORA}, "weightSync": {"lora": "adapter"}},
    {
        "trainer": {"steps": 4, **FSDP_LORA},
        "weightSync": {"lora": "adapter", "pauseMode": "versions"},
    },
    {"startupDeadlineSeconds": 0, "weightSync": {"lateSeconds": 0.5}},
    {"rollout": {"health": {"periodSeconds": 1, "timeoutSeconds": 0.5, "failureThreshold": 1}}},
    {"evaluation": {**PASS_AT, "passAtK": [1, 4]}},
    {
        "reward": None,
        "algorithm": {"loss": {"type": "reward_model"}},
        "rollout": {"samplesPerPrompt": 1},
        "evaluation": {"heldOut": [{"path": "h"}]},
    },
    {"debug": {"replay": "r"}, "rollout": {"replicas": 0}},
    {"reward": {"function": "a.b", "group": True}},
    {
        "rollout": {
            "engineArgs": {
                "enableLora": False,
                "disaggregationMode": "null",
                "quantization": "unquant",
                "loadFormat": "auto",
                "cudaGraphBs": [1, 2],
            }
        }
    },
    {"rollout": {"speculative": {"algorithm": "draft", "model": "d", "steps": 4, "topK": 2}}},
    {"rollout": {"speculative": SPECULATIVE, "precision": "fp8"}},
    {
        "rollout": {"precision": "fp8_block"},
        "trainer": {"steps": 4, "backend": "fsdp", "fakeQuantize": True},
    },
    {
        "debug": {"rolloutOnly": True},
        "rollout": {"engineArgs": {"quantization": "fp8", "speculativeAlgorithm": "NGRAM"}},
    },
    {
        "reward": None,
        "rollout": {"environment": {"gym": {"id": "Taxi-v4"}}, "dynamicFilter": "nonzero_std"},
        "evaluation": {"datasets": [{"path": "e"}]},
    },
    {"reward": None, "rollout": {"environment": {"openenv": {"url": "http://w:1"}}}},
    {
        "rollout": {
            "environment": {
                "command": ["agent"],
                "image": "ghcr.io/me/{metadata.name}:{metadata.tag}",
                "allowedImages": ["ghcr.io/me/", "python"],
            }
        }
    },
    {
        "podGroupPolicy": {"kueue": {"queueName": "q"}},
        "failurePolicy": {"rolloutBackoffSeconds": 300},
    },
]


def spec_of(groups: dict[str, Any]) -> dict[str, Any]:
    groups = dict(groups)
    return manifest(groups.pop("algorithm", {}), groups)


async def create(api: Api, groups: dict[str, Any]) -> None:
    """Check that no object stays behind."""
    name = f"rules-{uuid.uuid4().hex[:8]}"
    metadata = {"name": name, "namespace": "default"}
    body = {
        "apiVersion": API_VERSION,
        "kind": "RLJob",
        "metadata": metadata,
        "spec": spec_of(groups),
    }
    await api.create(JOBS, body)
    await api.delete(f"{JOBS}/{name}", {})


async def test_python_and_the_api_server_refuse_an_invalid_spec_alike(rules: Api) -> None:
    for groups, reason in NONSENSE:
        with pytest.raises(ValidationError) as python:
            RLJobSpec.model_validate(spec_of(groups))
        assert any(reason in without_values(error["msg"]) for error in python.value.errors()), (
            groups
        )
        with pytest.raises(errors.InvalidError) as server:
            await create(rules, groups)
        assert reason in str(server.value), groups


async def test_python_and_the_api_server_accept_a_valid_spec(rules: Api) -> None:
    for groups in SENSIBLE:
        RLJobSpec.model_validate(spec_of(groups))
        await create(rules, groups)


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"model": {"path": "s3a://bucket/model"}}, "model.path"),
    ({"managedBy": "foo"}, "managedBy"),
    ({"managedBy": "Acme.io/x"}, "managedBy"),
    ({"managedBy": f"acme.io/{'x' * 56}"}, "managedBy"),
    ({"podGroupPolicy": {"kueue": {"queueName": "Bad Queue"}}}, "podGroupPolicy.kueue.queueName"),
    ({"podGroupPolicy": {"kueue": {"queueName": "q" * 64}}}, "podGroupPolicy.kueue.queueName"),
    (
        {"podGroupPolicy": {"kueue": {"queueName": "q", "priorityClass": "High"}}},
        "podGroupPolicy.kueue.priorityClass",
    ),
    ({"podGroupPolicy": {"volcano": {"queue": "a b"}}}, "podGroupPolicy.volcano.queue"),
    ({"buffer": {"storage": {"size": "abc"}}}, "buffer.storage.size"),
    ({"buffer": {"storage": {"size": "20 Gi"}}}, "buffer.storage.size"),
    ({"buffer": {"storage": {"size": -1}}}, "buffer.storage.size"),
    ({"buffer": {"storage": {"storageClassName": "Fast"}}}, "buffer.storage.storageClassName"),
    ({"buffer": {"memory": "2GiB"}}, "buffer.memory"),
    ({"checkpoint": {"to": "/mnt/checkpoints"}}, "checkpoint.to"),
    ({"checkpoint": {"to": "hf://org/name"}}, "checkpoint.to"),
    (
        {"rollout": {"resources": {"limits": {"memory": "much"}}}},
        "rollout.resources.limits.memory",
    ),
    (
        {"rollout": {"environment": {"command": ["agent"], "image": "{label}"}}},
        "rollout.environment.image",
    ),
    ({"secrets": {"wandb": {"name": "W&B", "key": "k"}}}, "secrets.wandb.name"),
    ({"secrets": {"wandb": {"name": "w", "key": "a/b"}}}, "secrets.wandb.key"),
]
WELL_FORMED: list[dict[str, Any]] = [
    {"managedBy": "kueue.x-k8s.io/multikueue"},
    {"model": {"path": "hf://org/name@main"}},
    {"podGroupPolicy": {"kueue": {"queueName": "team-a.batch"}}},
    {"buffer": {"storage": {"size": "1.5Ti", "storageClassName": ""}, "memory": 4e9}},
    {"buffer": {"storage": {"size": 10**12}, "memory": "4e9"}},
    {"checkpoint": {"to": "az://container/runs/gsm8k/"}},
]


@pytest.mark.parametrize(("groups", "field"), MALFORMED, ids=str)
async def test_both_refuse_malformed_text_by_its_field(
    rules: Api, groups: dict[str, Any], field: str
) -> None:
    """No other rule refuses it: a rule that reads the text does not apply."""
    with pytest.raises(ValidationError) as python:
        RLJobSpec.model_validate(spec_of(groups))
    (problem,) = {at(error["loc"]) for error in python.value.errors()}
    assert problem == field
    with pytest.raises(errors.InvalidError) as server:
        await create(rules, groups)
    assert set(re.findall(r"spec(?:\.\w+)+(?=: )", str(server.value))) == {f"spec.{field}"}


def at(location: tuple[str | int, ...]) -> str:
    """Without the words that pydantic adds for the members of a union."""
    words = [str(part) for part in location]
    while words[-1] in ("str", "int") or words[-1].startswith("function-"):
        words.pop()
    return ".".join(words)


@pytest.mark.parametrize("groups", WELL_FORMED, ids=str)
async def test_both_take_well_formed_text(rules: Api, groups: dict[str, Any]) -> None:
    RLJobSpec.model_validate(spec_of(groups))
    await create(rules, groups)


@pytest.mark.parametrize("name", ["a" * 41, "1st", "a.b"], ids=["too long", "digit", "dot"])
async def test_a_name_that_pods_cannot_carry_is_refused(rules: Api, name: str) -> None:
    body = {"apiVersion": API_VERSION, "kind": "RLJob", "metadata": {"name": name}}
    with pytest.raises(errors.InvalidError, match=r"metadata\.name"):
        await rules.create(JOBS, body | {"spec": spec_of({})})


def test_every_rule_has_a_case_here_or_with_those_of_the_algorithm() -> None:
    reasons = [reason for *_, reason in NONSENSE] + [reason for *_, reason in ALONE]
    reasons += [reason for *_, reason in TOGETHER]
    # Those of pools: test_pools.py.
    for model in set(models(Model)) - {RLEnginePoolSpec}:
        for rule in model.rules:
            text = rule.message.replace("{} ", "")
            assert any(reason in text for reason in reasons), text


def models(base: type[Model]) -> list[type[Model]]:
    return [model for direct in base.__subclasses__() for model in (direct, *models(direct))]


def without_values(message: str) -> str:
    """Python's message without the numbers in brackets, which CEL does not show."""
    return re.sub(r"\([^()]*\d[^()]*\) (?=must|cannot)", "", message)


OLD_NAMES: list[tuple[dict[str, Any], str]] = [
    (
        {"algorithm": {"lossFunction": "sft"}},
        "spec.algorithm.lossFunction is spec.algorithm.loss.function since v0.2",
    ),
    (
        {"algorithm": {"clip": {"low": 0.1}}},
        "spec.algorithm.clip is spec.algorithm.loss.clip since v0.2",
    ),
    (
        {"trainer": {"steps": 4, "deviceClass": "gpu.example.com"}},
        "spec.trainer.deviceClass was dropped in v0.2",
    ),
    (
        {"failurePolicy": {"rolloutBackoff": {"baseSeconds": 5}}},
        "spec.failurePolicy.rolloutBackoff.baseSeconds is spec.failurePolicy.rolloutBackoffSeconds",
    ),
    ({"trainer": {"steps": 4, "balance": {"by": "flops"}}}, "spec.trainer.balance"),
    ({"algorithm": {"loss": "cispo"}}, "spec.algorithm.loss"),
]


async def test_an_old_name_is_refused_with_the_new_one(rules: Api) -> None:
    for groups, sentence in OLD_NAMES:
        with pytest.raises(errors.InvalidError) as refused:
            await create(rules, groups)
        assert sentence in str(refused.value), groups
