"""Keys of verl without a field in sluice, and the reasons.

Names are those of verl 0.9 and of its main branch of autumn 2026.
"""

from __future__ import annotations

from sluice_migrate.megatron import OPTIMIZER_ENTRIES
from sluice_migrate.translation import ALWAYS, Covered, Translation, Unsupported

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_CHECKPOINT = Covered(
    "a checkpoint has everything that a run resumes from, and is verified when it is read"
)
_ENGINE = Covered("the engine chooses it; pass its arguments in rollout.engineArgs")
_KERNELS = Covered("it changes kernels, not results")
_PRECISION = Unsupported(
    "sluice trains in bf16 or fp32: trainer.precision",
    unless=("bfloat16", "bf16", None, False),
)
_REWARD_MODEL = Covered(
    "it belongs to a reward model, which is a server behind reward.model.url in sluice"
)
_SCHEDULE = Unsupported(
    "trainer.optimizer.schedule is constant, linear or cosine",
    unless=(None, 0, 0.0, "constant", False),
)
_OFF_VALUES = (None, False, "disabled", "", 0)


def _off(why: str) -> Unsupported:
    """Make an entry that is reported only if the key is switched on."""
    return Unsupported(why, unless=_OFF_VALUES)


def _all(entry: Translation, parent: str, names: str) -> dict[str, Translation]:
    return dict.fromkeys((f"{parent}.{name}" for name in names.split()), entry)


_QAT = _off("trainer.fakeQuantize trains with the 8 bits of rollout.precision")
_ROUTING = _off("trainer.routingReplay selects whose experts are replayed")
_OTHER = _off("sluice trains with Megatron or FSDP2: trainer.backend, trainer.parallelism")
_ENGINES = Unsupported("trainer.backend is megatron or fsdp", unless=("megatron", "fsdp", "fsdp2"))
_REDUCED = Unsupported("sluice sums gradients in fp32", unless=("fp32", "float32", None))
_MIN_RATE = Unsupported("set a learning rate in trainer.optimizer.minLr", unless=(None, 0, 0.0))
_WARMUP = Covered("rollout.maxStaleness is the number of batches ahead")

UNSUPPORTED: dict[str, Translation] = {
    # policy
    **_all(Covered("the same as rollout.samplesPerPrompt"), _ACTOR, "rollout_n"),
    **_all(_KERNELS, _ACTOR, "use_fused_kernels use_prefix_grouper"),
    **_all(
        _KERNELS,
        _ACTOR,
        "entropy_from_logits_with_chunking entropy_checkpointing pad_to_length "
        "fsdp_config.entropy_from_logits_with_chunking fsdp_config.entropy_checkpointing "
        "fsdp_config.forward_prefetch fsdp_config.reshard_after_forward "
        "fsdp_config.use_orig_params fsdp_config.use_torch_compile",
    ),
    f"{_ACTOR}.fsdp_config.seed": Covered("data.seed is the only seed"),
    f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype": _PRECISION,
    f"{_ACTOR}.fsdp_config.mixed_precision.buffer_dtype": _REDUCED,
    f"{_ACTOR}.fsdp_config.mixed_precision.reduce_dtype": _REDUCED,
    f"{_ACTOR}.model_engine": _ENGINES,
    "actor@actor_rollout_ref.actor": _ENGINES,
    f"{_ACTOR}.optim.min_lr_factor": _MIN_RATE,
    f"{_ACTOR}.megatron.use_megatron_fsdp": _off("trainer.backend is megatron or fsdp"),
    **_all(
        Covered("data.shuffle and data.seed set the order of prompts"),
        _ACTOR,
        "data_loader_seed",
    ),
    **_all(_CHECKPOINT, f"{_ACTOR}.checkpoint", "save_contents load_contents strict"),
    **_all(Covered("model.init selects the weights that a run starts from"), _ACTOR, "load_weight"),
    **_all(Covered("sluice always reports the entropy"), _ACTOR, "calculate_entropy"),
    f"{_ACTOR}.calculate_sum_pi_squared": _off(
        "no estimator of sluice uses the sum of squared probabilities"
    ),
    f"{_ACTOR}.loss_scale_factor": Unsupported(
        "aggregation token_sum_norm divides by rollout.sampling.maxResponseTokens", unless=(None,)
    ),
    # optimizer and Megatron
    **_all(
        _SCHEDULE,
        f"{_ACTOR}.optim",
        "lr_warmup_init lr_wsd_decay_steps weight_decay_incr_style "
        "use_checkpoint_opt_param_scheduler",
    ),
    f"{_ACTOR}.optim.lr_wsd_decay_style": Covered("it belongs to the schedule WSD"),
    **{
        f"{_ACTOR}.optim.override_optimizer_config.{name}": entry
        for name, entry in OPTIMIZER_ENTRIES.items()
    },
    f"{_ACTOR}.optim.optimizer_impl": Covered("sluice uses Megatron's AdamW"),
    f"{_ACTOR}.megatron.seed": Covered("data.seed is the only seed"),
    f"{_ACTOR}.megatron.use_remove_padding": ALWAYS,
    f"{_ACTOR}.megatron.forward_only": ALWAYS,
    f"{_ACTOR}.megatron.dist_checkpointing_prefix": Covered(
        "sluice reads Hugging Face checkpoints directly"
    ),
    f"{_ACTOR}.megatron.dtype": _PRECISION,
    f"{_ACTOR}.megatron.quantization": _off("sluice trains in bf16 or fp32"),
    f"{_ACTOR}.megatron.enable_qat": _QAT,
    f"{_ACTOR}.fsdp_config.model_dtype": _PRECISION,
    # rollout
    **_all(
        _ENGINE,
        _ROLLOUT,
        "cudagraph_capture_sizes logprobs_mode scheduling_policy disable_log_stats "
        "multi_stage_wake_up layered_summon cast_to_rollout_dtype mtp "
        "enable_sleep_mode standalone_gpu_memory_utilization",
    ),
    f"{_ROLLOUT}.moe_tensor_parallel_size": Unsupported(
        "an engine splits all layers alike; pass its own arguments in rollout.engineArgs",
        unless=(None, 1),
    ),
    f"{_ROLLOUT}.single_turn_response_length": Unsupported(
        "write turns as a function: rollout.function", unless=(None,)
    ),
    f"{_ROLLOUT}.sampling_kwargs": Unsupported(
        "sluice has only the parameters of rollout.sampling", unless=(None,)
    ),
    f"{_ROLLOUT}.pipeline_model_parallel_size": Unsupported(
        "sluice splits an engine by tensor parallelism only", unless=(1,)
    ),
    f"{_ROLLOUT}.over_sample_rate": _off(
        "rollout.overSampling generates more prompts, and drops whole groups"
    ),
    f"{_ROLLOUT}.enable_rollout_routing_replay": Covered("trainer.routingReplay sets both sides"),
    f"{_ROLLOUT}.quantization_config_file": _off("rollout.precision names the forms"),
    f"{_ROLLOUT}.full_determinism": _off("set trainer.deterministic for trainer and engine"),
    f"{_ROLLOUT}.seed": Covered("sluice does not seed sampling"),
    # data
    **_all(
        Covered("sluice uses the tokenizer of model.path"), "data", "tokenizer trust_remote_code"
    ),
    **_all(
        ALWAYS,
        "data",
        "use_shm return_raw_input_ids return_full_prompt filter_overlong_prompts_workers",
    ),
    **_all(
        Covered("it only affects images, sound and video; see data.images"),
        "data",
        "image_patch_size image_key video_key audio_key "
        "return_multi_modal_inputs mm_processor_kwargs",
    ),
    **_all(
        Covered("reported with its path"), "data", "custom_cls.name sampler.class_name datagen.name"
    ),
    # rewards
    **_all(Covered("the same as reward.sandbox.processes"), "reward", "num_workers"),
    **_all(_REWARD_MODEL, "reward_model", "num_workers use_reward_loop reward_loop_source"),
    "reward.compute_score_kwargs": Unsupported(
        "built-in rewards take no arguments; write a reward.function", unless=({}, None)
    ),
    "reward.reward_model.enable": _off(
        "start the reward model as an SGLang server: reward.model.url"
    ),
    "reward.sandbox_fusion.url": _off("reward.type: code has its own sandbox"),
    "reward.reward_manager.module.path": _off("write the reward as a function: reward.function"),
    "reward_manager.module.path": _off("write the reward as a function: reward.function"),
    "reward_model.reward_loop_module_path": _off("write the reward as a function: reward.function"),
    # algorithm
    "algorithm.rollout_correction.debug_rollout_actor_probs": Covered(
        "sluice reports the difference at every step"
    ),
    "algorithm.gdpo_reward_keys": Covered("it belongs to gdpo"),
    "algorithm.gdpo_reward_weights": Covered("it belongs to gdpo"),
    # trainer
    "trainer.esi_redundant_time": Covered(
        "a pod that is terminated saves first: terminationGracePeriodSeconds"
    ),
    "trainer.del_local_ckpt_after_load": Covered(
        "checkpoint.keep is the number of checkpoints to keep"
    ),
    "trainer.max_critic_ckpt_to_keep": Covered("the policy's checkpoints contain the critic"),
    "trainer.ray_wait_register_center_timeout": Covered("sluice does not use Ray"),
    "trainer.validation_data_dir": Covered("evaluations are in samples/ of the run directory"),
    "trainer.val_only": _off(
        "sluice evaluates in a training run; `--set trainer.steps=1` makes it short"
    ),
    "trainer.use_legacy_worker_impl": Covered("it only affects verl's processes"),
    "trainer.use_v1": Covered("it only affects verl's processes"),
    "model_engine": Unsupported("trainer.backend selects the backend", unless=("megatron",)),
    # asynchronous training
    "async_training.use_trainer_do_validate": Covered("the engines always evaluate"),
    "async_training.concurrent_samples_per_replica": Covered("rollout.concurrency limits requests"),
    "trainer.v1.separate_async.num_warmup_batches": _WARMUP,
    "trainer.v1.colocate_async.num_warmup_batches": _WARMUP,
    "rollout.total_rollout_steps": Covered(
        "trainer.steps or trainer.epochs is the length of the run"
    ),
}

# Groups of keys of trainers that are neither Megatron nor FSDP2.
OTHER_TRAINERS = tuple(
    f"{_ACTOR}.{name}."
    for name in (
        "veomni", "engine", "torchtitan", "automodel", "mindspeed", "fsdp_config.turbo_config",
    )
)  # fmt: skip

# Groups of keys by prefix; the first that fits counts.
PREFIXES: tuple[tuple[str, Translation], ...] = (
    (
        f"{_ACTOR}.router_replay.",
        _ROUTING,
    ),
    (f"{_ACTOR}.megatron.router_replay.", _ROUTING),
    (f"{_ACTOR}.veomni.router_replay.", _ROUTING),
    *((prefix, _OTHER) for prefix in OTHER_TRAINERS),
    (
        "async_training.",
        _off("sluice does not move GPUs between trainer and engines while a job runs"),
    ),
    (
        "trainer.v1.",
        _off("it belongs to verl's new trainer; see rollout.mode and rollout.maxStaleness"),
    ),
    (
        "trainer.worker_env.",
        Unsupported("set variables in trainer.template: spec.containers[].env"),
    ),
    ("skip.", _off("train on the rollouts of an earlier run with debug.replay")),
    (f"{_ACTOR}.qat.", _QAT),
    (
        f"{_ACTOR}.optim.override_optimizer_config",
        _off("sluice has the options of trainer.optimizer only"),
    ),
    (
        f"{_ACTOR}.megatron.override_",
        Unsupported("sluice chooses Megatron's settings", unless=(*_OFF_VALUES, {})),
    ),
    (f"{_ROLLOUT}.disaggregation.", _off("every engine prefills and decodes")),
    (f"{_ROLLOUT}.checkpoint_engine.engine_kwargs", Covered("it belongs to verl's transport")),
    ("reward.reward_model.", _REWARD_MODEL),
    ("reward_model.", _REWARD_MODEL),
    (
        "reward.reward_manager.",
        Covered("it belongs to a reward manager; in sluice rewards are functions"),
    ),
    ("reward_manager.", Covered("it belongs to a reward manager; in sluice rewards are functions")),
    ("algorithm.f_grpo_", Covered("it belongs to the estimator f_grpo")),
    ("algorithm.pf_ppo.", Covered("it belongs to PF-PPO")),
    (
        "algorithm.mopd.",
        _off("a row's data source selects its teacher; sluice has no weights of teachers"),
    ),
)
