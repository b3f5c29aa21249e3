"""The translation of each of verl's keys.

Names and defaults of verl 0.9 (ppo_trainer, ppo_megatron_trainer).
"""

from __future__ import annotations

from typing import Any

from sluice_migrate.draft import (
    Lost,
    Same,
    To,
    Translation,
    flag,
    integer,
    location,
    real,
    text,
)
from sluice_migrate.recompute import recompute, recompute_modules
from sluice_migrate.verl.engines import SGLANG
from sluice_migrate.verl.unsupported_keys import PREFIXES, REST

_ALWAYS = Same("sluice does it always")
_PACKED = Same("micro-batches are packed by tokens")
_LOGS = Same("metrics go to the run directory, TensorBoard and Prometheus")
_VOLUME = Lost(
    "checkpoints go to spec.checkpoint.volume, or the run directory; a job resumes from its own by "
    "itself"
)
_PROFILE = Lost("debug.profile: [steps] keeps traces of these steps", unless=(None,))
_TURNS = Lost("turns and tools are played by a function of yours: rollout.function")
_MODEL = Lost("the model's code and shape are those of its directory")
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MEGATRON, _OPTIM = f"{_ACTOR}.megatron", f"{_ACTOR}.optim"
_RECOMPUTE = f"{_MEGATRON}.override_transformer_config.recompute"


def kl_type(value: Any) -> str:
    """Names of verl: kl and k1, mse and k2, low_var_kl and k3 (clamped, as our low_var_kl)."""
    name = {"kl": "k1", "mse": "k2", "k3": "low_var_kl"}.get(
        text(value).removesuffix("+"), text(value).removesuffix("+")
    )
    if name not in ("k1", "k2", "low_var_kl"):
        raise ValueError("algorithm.kl.type is k1, k2, k3 or low_var_kl")
    return name


def _schedule(value: Any) -> str:
    if value not in ("constant", "linear", "cosine"):
        raise ValueError("trainer.optimizer.schedule is constant, linear or cosine")
    return str(value)


def _aggregation(value: Any) -> str:
    names = {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sequence_mean",
        "seq-mean-token-sum": "token_sum",
        "seq-mean-token-sum-norm": "token_sum_norm",
    }
    if value not in names:
        raise ValueError(f"algorithm.aggregation is one of {', '.join(names.values())}")
    return names[value]


def _routing(value: Any) -> str:
    names = {"R2": "trainer", "R3": "rollout", "disabled": "none"}
    if value not in names:
        raise ValueError("trainer.routingReplay is none, trainer (R2) or rollout (R3)")
    return names[value]


FSDP = ("fsdp", "fsdp2")


def _backend(value: Any) -> str:
    if value not in (*FSDP, "megatron"):
        raise ValueError("trainer.backend is megatron or fsdp")
    return "fsdp" if value in FSDP else "megatron"


def _every(value: Any) -> int:
    if integer(value) < 1:
        raise ValueError(
            "sluice always checkpoints: every 20 steps, and the last; set checkpoint.everySteps"
        )
    return integer(value)


TABLE: dict[str, Translation] = REST | {
    # model
    "actor_rollout_ref.model.path": To("model.path", location),
    "actor_rollout_ref.model.trust_remote_code": To("model.trustRemoteCode", flag),
    "actor_rollout_ref.model.lora_rank": Lost("sluice trains all weights", unless=(0,)),
    "actor_rollout_ref.model.use_remove_padding": _ALWAYS,
    "actor_rollout_ref.model.custom_chat_template": Lost(
        "the chat template is the tokenizer's", unless=(None,)
    ),
    "actor_rollout_ref.model.external_lib": Lost(
        "no code is imported into the trainer", unless=(None,)
    ),
    "actor_rollout_ref.model.tokenizer_path": Lost(
        "the tokenizer is that of model.path", unless=(None,)
    ),
    f"{_ACTOR}.router_replay.mode": To("trainer.routingReplay", _routing),
    f"{_ACTOR}.megatron.router_replay.mode": To("trainer.routingReplay", _routing),
    # prompts
    "data.shuffle": To("data.shuffle", flag),
    "data.seed": To("data.seed", integer),
    "data.max_prompt_length": To("data.maxPromptTokens", integer),
    "data.max_response_length": To("rollout.sampling.maxResponseTokens", integer),
    "data.train_batch_size": To("rollout.batchSize", integer),
    "data.filter_overlong_prompts": _ALWAYS,
    "data.truncation": Lost(
        "longer prompts are left out and counted, never cut", unless=("error",)
    ),
    "data.reward_fn_key": Lost(
        "reward.type: data_source reads the column data_source", unless=("data_source",)
    ),
    "data.custom_cls.path": Lost(
        "data.prompts[].source takes a function or class that yields rows, not tensors",
        unless=(None,),
    ),
    "data.datagen.path": Lost(
        "rows are made once, before the first step: data.prompts[].source", unless=(None,)
    ),
    "data.sampler.class_path": Lost(
        "the order of prompts is data.shuffle, data.seed and the weights", unless=(None,)
    ),
    "data.tool_config_path": _TURNS,
    "data.dataloader_num_workers": _ALWAYS,
    "data.return_raw_chat": _ALWAYS,
    "data.val_batch_size": _ALWAYS,
    "data.validation_shuffle": _ALWAYS,
    "actor_rollout_ref.hybrid_engine": Same("engines have GPUs of their own"),
    # policy
    f"{_ACTOR}.strategy": To("trainer.backend", _backend),
    f"{_ACTOR}.fsdp_config.strategy": To("trainer.backend", _backend),
    f"{_ACTOR}.clip_ratio_low": To("algorithm.clip.low", real),
    f"{_ACTOR}.clip_ratio_high": To("algorithm.clip.high", real),
    f"{_ACTOR}.entropy_coeff": To("algorithm.entropyCoef", real),
    f"{_ACTOR}.loss_agg_mode": To("algorithm.aggregation", _aggregation),
    f"{_ACTOR}.ppo_epochs": Lost("a batch is trained once", unless=(1,)),
    f"{_ACTOR}.shuffle": _ALWAYS,
    f"{_ACTOR}.use_dynamic_bsz": _ALWAYS,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": To("trainer.maxTokensPerGpu", integer),
    f"{_ACTOR}.ppo_micro_batch_size": _PACKED,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": _PACKED,
    f"{_ACTOR}.use_torch_compile": _ALWAYS,
    f"{_ACTOR}.grad_clip": To("trainer.optimizer.clipGrad", real),
    f"{_ACTOR}.tis_imp_ratio_cap": Lost("algorithm.offPolicy.method: tis, high", unless=(-1, None)),
    f"{_ACTOR}.ulysses_sequence_parallel_size": To(
        "trainer.parallelism.context",
        integer,
        "context parallel in place of Ulysses: ranks that share sequences",
    ),
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": To(
        "trainer.parallelism.context",
        integer,
        "context parallel in place of Ulysses: ranks that share sequences",
    ),
    f"{_ACTOR}.fsdp_config.fsdp_size": Same("the optimizer is spread over all data parallel ranks"),
    f"{_ACTOR}.checkpoint.async_save": To("checkpoint.async", flag),
    # optimizer
    f"{_OPTIM}.lr": To("trainer.optimizer.lr", real),
    f"{_OPTIM}.min_lr": To("trainer.optimizer.minLr", real),
    f"{_OPTIM}.lr_warmup_steps": To(
        "trainer.optimizer.warmupSteps", lambda value: max(0, integer(value))
    ),
    f"{_OPTIM}.lr_warmup_steps_ratio": Lost(
        "set trainer.optimizer.warmupSteps to a number of steps", unless=(0,)
    ),
    f"{_OPTIM}.lr_decay_steps": To("trainer.optimizer.decaySteps", integer),
    f"{_OPTIM}.lr_decay_style": To("trainer.optimizer.schedule", _schedule),
    f"{_OPTIM}.lr_scheduler_type": To("trainer.optimizer.schedule", _schedule),
    f"{_OPTIM}.warmup_style": To("trainer.optimizer.schedule", _schedule),
    f"{_OPTIM}.weight_decay": To("trainer.optimizer.weightDecay", real),
    f"{_OPTIM}.clip_grad": To("trainer.optimizer.clipGrad", real),
    f"{_OPTIM}.optimizer": Lost("sluice has AdamW", unless=("adam", "AdamW", None)),
    f"{_OPTIM}.total_training_steps": Same("the schedule ends with the job"),
    # parallelism
    f"{_MEGATRON}.tensor_model_parallel_size": To("trainer.parallelism.tensor", integer),
    f"{_MEGATRON}.pipeline_model_parallel_size": To("trainer.parallelism.pipeline", integer),
    f"{_MEGATRON}.context_parallel_size": To("trainer.parallelism.context", integer),
    f"{_MEGATRON}.expert_model_parallel_size": To("trainer.parallelism.expert", integer),
    f"{_MEGATRON}.virtual_pipeline_model_parallel_size": To(
        "trainer.parallelism.virtualPipeline", integer
    ),
    f"{_MEGATRON}.expert_tensor_parallel_size": Lost(
        "experts are not split by tensor parallelism", unless=(None, 1)
    ),
    f"{_MEGATRON}.sequence_parallel": _ALWAYS,
    f"{_MEGATRON}.use_distributed_optimizer": _ALWAYS,
    f"{_MEGATRON}.use_mbridge": Same("Hugging Face checkpoints are read directly"),
    f"{_MEGATRON}.vanilla_mbridge": Same("Hugging Face checkpoints are read directly"),
    f"{_MEGATRON}.use_dist_checkpointing": Lost(
        "model.path is a Hugging Face directory", unless=(False,)
    ),
    f"{_MEGATRON}.dist_checkpointing_path": Lost(
        "model.path is a Hugging Face directory", unless=(None,)
    ),
    f"{_RECOMPUTE}_granularity": To("trainer.recompute", recompute),
    f"{_RECOMPUTE}_method": Same("part of recompute"),
    f"{_RECOMPUTE}_num_layers": Same("part of recompute"),
    f"{_RECOMPUTE}_modules": To("trainer.recomputeModules", recompute_modules),
    # rollout
    f"{_ROLLOUT}.mode": Same(
        "verl's way to call its engine; asynchronous training is rollout.mode and maxStaleness"
    ),
    f"{_ROLLOUT}.n": To("rollout.samplesPerPrompt", integer),
    f"{_ROLLOUT}.temperature": To("rollout.sampling.temperature", real),
    f"{_ROLLOUT}.top_p": To("rollout.sampling.topP", real),
    f"{_ROLLOUT}.top_k": To("rollout.sampling.topK", integer),
    **SGLANG,  # of another engine: verl_engines
    f"{_ROLLOUT}.data_parallel_size": Lost("more engines: rollout.replicas", unless=(1,)),
    f"{_ROLLOUT}.ignore_eos": Lost("responses end where the model ends them", unless=(False,)),
    f"{_ROLLOUT}.calculate_log_probs": _ALWAYS,
    f"{_ROLLOUT}.free_cache_engine": Same("engines have GPUs of their own"),
    f"{_ROLLOUT}.load_format": Same("the trainer sends the weights"),
    f"{_ROLLOUT}.dtype": _ALWAYS,
    f"{_ROLLOUT}.prompt_length": Same("data.maxPromptTokens"),
    f"{_ROLLOUT}.response_length": Same("rollout.sampling.maxResponseTokens"),
    f"{_ROLLOUT}.do_sample": Lost("greedy rollouts teach nothing", unless=(True,)),
    f"{_ROLLOUT}.update_weights_bucket_megabytes": To("weightSync.bucketMiB", integer),
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": To(
        "weightSync.bucketMiB", integer
    ),
    f"{_ROLLOUT}.checkpoint_engine.backend": Same("weightSync.transport: nccl"),
    f"{_ROLLOUT}.multi_turn.enable": Lost(
        "turns are played by rollout.function: an agent loop's class, or a ToolLoop",
        unless=(False,),
    ),
    # algorithm
    "algorithm.gamma": To("algorithm.gamma", real),
    "algorithm.lam": To("algorithm.lambda", real),
    "algorithm.norm_adv_by_std_in_grpo": To("algorithm.normalizeStd", flag),
    "algorithm.kl_ctrl.type": Same("without use_kl_in_reward verl does not look at it"),
    "algorithm.kl_ctrl.horizon": Same("of the adaptive controller"),
    "algorithm.kl_ctrl.target_kl": Same("of the adaptive controller"),
    "algorithm.use_pf_ppo": Lost("no PF-PPO", unless=(False,)),
    "algorithm.filter_groups.metric": Same("nonzero_std looks at the reward"),
    "algorithm.filter_groups.max_num_gen_batches": Lost(
        "prompts are drawn until the batch is full", unless=(0, None)
    ),
    "async_training.partial_rollout": To("rollout.partial.enabled", flag),
    # trainer
    "trainer.nnodes": To("trainer.nodes", integer),
    "trainer.n_gpus_per_node": To("trainer.gpusPerNode", integer),
    "trainer.save_freq": To("checkpoint.everySteps", _every),
    "trainer.max_actor_ckpt_to_keep": To("checkpoint.keep", integer),
    "trainer.default_local_dir": _VOLUME,
    "trainer.default_hdfs_dir": Lost(
        "spec.checkpoint.volume is where checkpoints go", unless=(None,)
    ),
    "trainer.resume_mode": Same("a job resumes from its own checkpoints by itself"),
    "trainer.resume_from_path": Lost("a job resumes from its own checkpoints", unless=(None,)),
    "trainer.balance_batch": _ALWAYS,
    "trainer.logger": _LOGS,
    "trainer.project_name": _LOGS,
    "trainer.log_val_generations": Same("samples/ of the run directory has them"),
    "trainer.device": Lost("sluice runs on NVIDIA's GPUs", unless=("cuda", "gpu", None)),
    "trainer.rollout_data_dir": Lost("debug.dumpRollouts: true keeps all samples", unless=(None,)),
    "global_profiler.steps": _PROFILE,
    "trainer.profile_steps": _PROFILE,
    # reward
    "reward_model.launch_reward_fn_async": _ALWAYS,
}

DEFAULTS: tuple[tuple[str, Any, str], ...] = (
    ("rollout.batchSize", 1024, "data.train_batch_size"),
    ("rollout.samplesPerPrompt", 1, "rollout.n"),
    ("rollout.sampling.maxResponseTokens", 512, "data.max_response_length"),
    ("data.maxPromptTokens", 512, "data.max_prompt_length"),
    ("trainer.gpusPerNode", 8, "trainer.n_gpus_per_node"),
    ("trainer.optimizer.weightDecay", 0.01, "actor.optim.weight_decay"),
    ("trainer.optimizer.beta2", 0.999, "actor.optim.betas"),
    ("algorithm.aggregation", "token_mean", "actor.loss_agg_mode"),
)
"""(field, verl's default, its key) where sluice's default is another."""

_QUIET = (
    "actor_rollout_ref.ref.",
    "actor_rollout_ref.nccl",
    "ray_kwargs.",
    "global_profiler.",
    "transfer_queue.",
    "hydra.",
    "critic.",
    f"{_ROLLOUT}.log_prob_",
    f"{_ROLLOUT}.val_kwargs.",
    f"{_ROLLOUT}.trace.",
    f"{_ROLLOUT}.profiler.",
    f"{_ROLLOUT}.prometheus.",
    f"{_ACTOR}.profiler.",
    f"{_ROLLOUT}.layer_name_map.",
    f"{_ROLLOUT}.skip_",
)
"""Keys that mean nothing here: the reference and the critic are laid out as the policy."""


def fallback(name: str) -> Translation:
    """The entry of a key that is not in the table."""
    if name.startswith("data.apply_chat_template_kwargs") or name.startswith(_QUIET):
        return Same("taken with the prompts, or without a meaning")
    if name.startswith(f"{_ROLLOUT}.multi_turn."):
        return _TURNS
    if name.startswith("actor_rollout_ref.model."):
        return _MODEL
    if name.startswith(f"{_MEGATRON}.override_transformer_config."):
        return Lost("the transformer's own settings are those of the checkpoint")
    group = next((entry for prefix, entry in PREFIXES if name.startswith(prefix)), None)
    return group or Lost("sluice knows no such key")
