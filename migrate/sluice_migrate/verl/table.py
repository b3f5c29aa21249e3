"""Translates each key of verl.

Names and defaults are those of verl 0.9 (ppo_trainer, ppo_megatron_trainer).
"""

from __future__ import annotations

from typing import Any

from sluice_migrate.megatron import recompute, recompute_modules
from sluice_migrate.translation import (
    ALWAYS,
    PACKED,
    Covered,
    Field,
    Table,
    Translation,
    Unsupported,
    as_boolean,
    as_integer,
    as_number,
    as_path,
    as_text,
)
from sluice_migrate.verl.engines import SGLANG
from sluice_migrate.verl.unsupported_keys import PREFIXES, UNSUPPORTED

_VOLUME = Unsupported(
    "checkpoints go to checkpoint.volume, or to the run directory; a job resumes from its own "
    "checkpoint"
)
_PROFILE = Unsupported("debug.profile: [steps] records traces of these steps", unless=(None,))
_TURNS = Unsupported("write turns and tools as a function: rollout.function")
_MTP_TRAINING = Unsupported(
    "trainer.mtp trains the layer for a further token, with backend: fsdp",
    unless=(None, False),
)
_MODEL = Unsupported("sluice reads the model's code and shape from its directory")
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MEGATRON, _OPTIM = f"{_ACTOR}.megatron", f"{_ACTOR}.optim"
_RECOMPUTE = f"{_MEGATRON}.override_transformer_config.recompute"


def kl_type(value: Any) -> str:
    """Convert verl's names: kl or k1, mse or k2, low_var_kl or k3 (which verl clamps)."""
    name = {"kl": "k1", "mse": "k2", "k3": "low_var_kl"}.get(
        as_text(value).removesuffix("+"), as_text(value).removesuffix("+")
    )
    if name not in ("k1", "k2", "low_var_kl"):
        raise ValueError("algorithm.kl.type is k1, k2, k3 or low_var_kl")
    return name


def schedule(value: Any) -> str:
    """Convert to `trainer.optimizer.schedule`. Raises ValueError."""
    if value not in ("constant", "linear", "cosine"):
        raise ValueError("trainer.optimizer.schedule is constant, linear or cosine")
    return str(value)


def _precision(value: Any) -> str:
    """Convert to `rollout.precision`: verl's fp8 has a scale for each block. Raises ValueError."""
    if value in (None, ""):
        return "bf16"
    if value != "fp8":
        raise ValueError("rollout.precision is bf16, fp8, fp8_block or int8")
    return "fp8_block"


def _mtp(value: Any) -> str:
    """Convert to `rollout.speculative.algorithm`. Raises ValueError."""
    if not as_boolean(value):
        raise ValueError("speculative decoding is off: leave rollout.speculative out")
    return "mtp"


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
    if as_integer(value) < 1:
        raise ValueError(
            "sluice always saves, every 20 steps and after the last one; see checkpoint.everySteps"
        )
    return as_integer(value)


_ENTRIES: dict[str, Translation] = UNSUPPORTED | {
    # model
    "actor_rollout_ref.model.path": Field("model.path", as_path),
    "actor_rollout_ref.model.trust_remote_code": Field("model.trustRemoteCode", as_boolean),
    "actor_rollout_ref.model.use_remove_padding": ALWAYS,
    "actor_rollout_ref.model.mtp.enable": Covered(
        "mtp.enable_rollout selects speculative decoding"
    ),
    "actor_rollout_ref.model.mtp.enable_train": _MTP_TRAINING,
    "actor_rollout_ref.model.mtp.enable_rollout": Field("rollout.speculative.algorithm", _mtp),
    "actor_rollout_ref.model.mtp.speculative_num_steps": Field(
        "rollout.speculative.steps", as_integer
    ),
    "actor_rollout_ref.model.mtp.speculative_eagle_topk": Field(
        "rollout.speculative.topK", as_integer
    ),
    "actor_rollout_ref.model.mtp.speculative_num_draft_tokens": Covered(
        "steps x topK proposed tokens are verified"
    ),
    "actor_rollout_ref.model.mtp.speculative_algorithm": Covered("the same as mtp.enable_rollout"),
    "actor_rollout_ref.model.custom_chat_template": Unsupported(
        "sluice uses the tokenizer's chat template", unless=(None,)
    ),
    "actor_rollout_ref.model.external_lib": Unsupported(
        "the trainer imports no user code", unless=(None,)
    ),
    "actor_rollout_ref.model.tokenizer_path": Unsupported(
        "sluice uses the tokenizer of model.path", unless=(None,)
    ),
    f"{_ACTOR}.router_replay.mode": Field("trainer.routingReplay", _routing),
    f"{_ACTOR}.megatron.router_replay.mode": Field("trainer.routingReplay", _routing),
    # prompts
    "data.shuffle": Field("data.shuffle", as_boolean),
    "data.seed": Field("data.seed", as_integer),
    "data.max_prompt_length": Field("data.maxPromptTokens", as_integer),
    "data.max_response_length": Field("rollout.sampling.maxResponseTokens", as_integer),
    "data.train_batch_size": Field("rollout.batchSize", as_integer),
    "data.filter_overlong_prompts": ALWAYS,
    "data.truncation": Unsupported(
        "sluice skips and counts longer prompts; it never cuts them", unless=("error",)
    ),
    "data.reward_fn_key": Unsupported(
        "reward.type: data_source always reads the column data_source", unless=("data_source",)
    ),
    "data.custom_cls.path": Unsupported(
        "write a function or class that yields rows, not tensors: data.prompts[].source",
        unless=(None,),
    ),
    "data.datagen.path": Unsupported(
        "sluice makes rows once, before the first step: data.prompts[].source", unless=(None,)
    ),
    "data.sampler.class_path": Unsupported(
        "data.shuffle, data.seed and data.prompts[].weight set the order of prompts", unless=(None,)
    ),
    "data.tool_config_path": _TURNS,
    "data.dataloader_num_workers": ALWAYS,
    "data.return_raw_chat": ALWAYS,
    "data.val_batch_size": ALWAYS,
    "data.validation_shuffle": ALWAYS,
    "actor_rollout_ref.hybrid_engine": Covered(
        "trainer.colocate decides if engines share GPUs with the trainer"
    ),
    # policy
    f"{_ACTOR}.strategy": Field("trainer.backend", _backend),
    f"{_ACTOR}.fsdp_config.strategy": Field("trainer.backend", _backend),
    f"{_ACTOR}.clip_ratio_low": Field("algorithm.loss.clip.low", as_number),
    f"{_ACTOR}.clip_ratio_high": Field("algorithm.loss.clip.high", as_number),
    f"{_ACTOR}.entropy_coeff": Field("algorithm.entropyCoef", as_number),
    f"{_ACTOR}.loss_agg_mode": Field("algorithm.aggregation", _aggregation),
    f"{_ACTOR}.ppo_epochs": Unsupported("sluice trains each batch once", unless=(1,)),
    f"{_ACTOR}.shuffle": ALWAYS,
    f"{_ACTOR}.use_dynamic_bsz": ALWAYS,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": Field("trainer.maxTokensPerGpu", as_integer),
    f"{_ACTOR}.ppo_micro_batch_size": PACKED,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": PACKED,
    f"{_ACTOR}.use_torch_compile": ALWAYS,
    f"{_ACTOR}.grad_clip": Field("trainer.optimizer.clipGrad", as_number),
    f"{_ACTOR}.tis_imp_ratio_cap": Unsupported(
        "set algorithm.offPolicy.method: tis and high", unless=(-1, None)
    ),
    f"{_ACTOR}.ulysses_sequence_parallel_size": Field("trainer.parallelism.context", as_integer),
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": Field(
        "trainer.parallelism.context", as_integer
    ),
    f"{_ACTOR}.fsdp_config.fsdp_size": Covered(
        "the optimizer is spread over all data parallel ranks"
    ),
    f"{_ACTOR}.checkpoint.async_save": Field("checkpoint.async", as_boolean),
    # optimizer
    f"{_OPTIM}.lr": Field("trainer.optimizer.lr", as_number),
    f"{_OPTIM}.min_lr": Field("trainer.optimizer.minLr", as_number),
    f"{_OPTIM}.lr_warmup_steps": Field(
        "trainer.optimizer.warmupSteps", lambda value: max(0, as_integer(value))
    ),
    f"{_OPTIM}.lr_warmup_steps_ratio": Unsupported(
        "set a number of steps in trainer.optimizer.warmupSteps", unless=(0,)
    ),
    f"{_OPTIM}.lr_decay_steps": Field("trainer.optimizer.decaySteps", as_integer),
    f"{_OPTIM}.lr_decay_style": Field("trainer.optimizer.schedule", schedule),
    f"{_OPTIM}.lr_scheduler_type": Field("trainer.optimizer.schedule", schedule),
    f"{_OPTIM}.warmup_style": Field("trainer.optimizer.schedule", schedule),
    f"{_OPTIM}.weight_decay": Field("trainer.optimizer.weightDecay", as_number),
    f"{_OPTIM}.clip_grad": Field("trainer.optimizer.clipGrad", as_number),
    f"{_OPTIM}.optimizer": Unsupported("sluice trains with AdamW", unless=("adam", "AdamW", None)),
    f"{_OPTIM}.total_training_steps": Covered("the schedule always ends with the job"),
    # parallelism
    f"{_MEGATRON}.tensor_model_parallel_size": Field("trainer.parallelism.tensor", as_integer),
    f"{_MEGATRON}.pipeline_model_parallel_size": Field("trainer.parallelism.pipeline", as_integer),
    f"{_MEGATRON}.context_parallel_size": Field("trainer.parallelism.context", as_integer),
    f"{_MEGATRON}.expert_model_parallel_size": Field("trainer.parallelism.expert", as_integer),
    f"{_MEGATRON}.virtual_pipeline_model_parallel_size": Field(
        "trainer.parallelism.virtualPipeline", as_integer
    ),
    f"{_MEGATRON}.expert_tensor_parallel_size": Unsupported(
        "sluice does not split experts by tensor parallelism", unless=(None, 1)
    ),
    f"{_MEGATRON}.sequence_parallel": ALWAYS,
    f"{_MEGATRON}.use_distributed_optimizer": ALWAYS,
    f"{_MEGATRON}.use_mbridge": Covered("sluice reads Hugging Face checkpoints directly"),
    f"{_MEGATRON}.vanilla_mbridge": Covered("sluice reads Hugging Face checkpoints directly"),
    f"{_MEGATRON}.use_dist_checkpointing": Unsupported(
        "model.path is a Hugging Face directory", unless=(False,)
    ),
    f"{_MEGATRON}.dist_checkpointing_path": Unsupported(
        "model.path is a Hugging Face directory", unless=(None,)
    ),
    f"{_RECOMPUTE}_granularity": Field("trainer.recompute", recompute),
    f"{_RECOMPUTE}_method": Covered("part of trainer.recompute"),
    f"{_RECOMPUTE}_num_layers": Covered("part of trainer.recompute"),
    f"{_RECOMPUTE}_modules": Field("trainer.recomputeModules", recompute_modules),
    # rollout
    f"{_ROLLOUT}.mode": Covered(
        "it is how verl calls its engine; rollout.mode and maxStaleness make training asynchronous"
    ),
    f"{_ROLLOUT}.n": Field("rollout.samplesPerPrompt", as_integer),
    f"{_ROLLOUT}.temperature": Field("rollout.sampling.temperature", as_number),
    f"{_ROLLOUT}.top_p": Field("rollout.sampling.topP", as_number),
    f"{_ROLLOUT}.top_k": Field("rollout.sampling.topK", as_integer),
    **SGLANG,  # `engines.with_engine` replaces them for vLLM
    f"{_ROLLOUT}.data_parallel_size": Unsupported("set rollout.replicas", unless=(1,)),
    f"{_ROLLOUT}.ignore_eos": Unsupported(
        "sluice ends responses at the model's end tokens", unless=(False,)
    ),
    f"{_ROLLOUT}.calculate_log_probs": ALWAYS,
    f"{_ROLLOUT}.free_cache_engine": Covered(
        "trainer.colocate decides if engines share GPUs with the trainer"
    ),
    f"{_ROLLOUT}.load_format": Covered("the trainer sends the weights"),
    f"{_ROLLOUT}.dtype": ALWAYS,
    f"{_ROLLOUT}.quantization": Field("rollout.precision", _precision),
    f"{_ROLLOUT}.prompt_length": Covered("the same as data.maxPromptTokens"),
    f"{_ROLLOUT}.response_length": Covered("the same as rollout.sampling.maxResponseTokens"),
    f"{_ROLLOUT}.do_sample": Unsupported(
        "sluice always samples: with greedy rollouts all samples of a prompt are equal",
        unless=(True,),
    ),
    f"{_ROLLOUT}.update_weights_bucket_megabytes": Field("weightSync.bucketMiB", as_integer),
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": Field(
        "weightSync.bucketMiB", as_integer
    ),
    f"{_ROLLOUT}.checkpoint_engine.backend": Covered("weightSync.transport selects it"),
    f"{_ROLLOUT}.multi_turn.enable": Unsupported(
        "set rollout.function to an agent loop's class, or to a ToolLoop",
        unless=(False,),
    ),
    # algorithm
    "algorithm.gamma": Field("algorithm.gamma", as_number),
    "algorithm.lam": Field("algorithm.lambda", as_number),
    "algorithm.norm_adv_by_std_in_grpo": Field("algorithm.normalizeStd", as_boolean),
    "algorithm.kl_ctrl.type": Covered("verl ignores it without use_kl_in_reward"),
    "algorithm.kl_ctrl.horizon": Covered("it belongs to the adaptive controller"),
    "algorithm.kl_ctrl.target_kl": Covered("it belongs to the adaptive controller"),
    "algorithm.use_pf_ppo": Unsupported("sluice does not have PF-PPO", unless=(False,)),
    "algorithm.filter_groups.metric": Covered("nonzero_std uses the reward"),
    "algorithm.filter_groups.max_num_gen_batches": Unsupported(
        "sluice draws prompts until the batch is full", unless=(0, None)
    ),
    "async_training.partial_rollout": Field("rollout.partial.enabled", as_boolean),
    # trainer
    "trainer.nnodes": Field("trainer.nodes", as_integer),
    "trainer.n_gpus_per_node": Field("trainer.gpusPerNode", as_integer),
    "trainer.save_freq": Field("checkpoint.everySteps", _every),
    "trainer.max_actor_ckpt_to_keep": Field("checkpoint.keep", as_integer),
    "trainer.default_local_dir": _VOLUME,
    "trainer.default_hdfs_dir": Unsupported("checkpoints go to checkpoint.volume", unless=(None,)),
    "trainer.resume_mode": Covered("a job always resumes from its own checkpoints"),
    "trainer.resume_from_path": Unsupported(
        "a job resumes from its own checkpoints", unless=(None,)
    ),
    "trainer.balance_batch": ALWAYS,
    "trainer.log_val_generations": Covered("they are in samples/ of the run directory"),
    "trainer.device": Unsupported("sluice runs on NVIDIA GPUs", unless=("cuda", "gpu", None)),
    "trainer.rollout_data_dir": Unsupported(
        "set debug.dumpRollouts: true to keep all samples", unless=(None,)
    ),
    "global_profiler.steps": _PROFILE,
    "trainer.profile_steps": _PROFILE,
    # reward
    "reward_model.launch_reward_fn_async": ALWAYS,
}

# (field, verl's default, its key) if sluice has another default.
_DEFAULTS = (
    ("rollout.batchSize", 1024, "data.train_batch_size"),
    ("rollout.samplesPerPrompt", 1, "rollout.n"),
    ("rollout.sampling.maxResponseTokens", 512, "data.max_response_length"),
    ("data.maxPromptTokens", 512, "data.max_prompt_length"),
    ("trainer.gpusPerNode", 8, "trainer.n_gpus_per_node"),
    ("trainer.optimizer.weightDecay", 0.01, "actor.optim.weight_decay"),
    ("trainer.optimizer.beta2", 0.999, "actor.optim.betas"),
    ("algorithm.aggregation", "token_mean", "actor.loss_agg_mode"),
)

# Groups of keys that sluice does not need. The reference and the critic have the policy's
# parallelism.
_UNUSED_GROUPS = (
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

VERL = Table(
    "verl",
    _ENTRIES,
    prefixes=(
        *(
            (prefix, Covered("translated with the prompts, or not needed"))
            for prefix in ("data.apply_chat_template_kwargs", *_UNUSED_GROUPS)
        ),
        (f"{_ROLLOUT}.multi_turn.", _TURNS),
        ("actor_rollout_ref.model.", _MODEL),
        (
            f"{_MEGATRON}.override_transformer_config.",
            Unsupported("sluice reads the transformer's settings from the checkpoint"),
        ),
        *PREFIXES,
    ),
    defaults=_DEFAULTS,
)
