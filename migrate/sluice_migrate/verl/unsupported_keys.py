"""verl's keys that have no field here: why, or why nothing is lost.

Names of verl 0.9 and its main branch.
"""

from __future__ import annotations

from sluice_migrate.megatron import OPTIMIZER_ENTRIES
from sluice_migrate.translation import ALWAYS, Covered, Translation, Unsupported

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_CHECKPOINT = Covered(
    "a checkpoint has all that a run goes on from, and is checked when it is read"
)
_ENGINE = Covered("the engine's own choice; rollout.engineArgs has its arguments")
_KERNELS = Covered("a matter of kernels, not of results")
_PRECISION = Unsupported(
    "the trainer computes in bf16 or fp32: trainer.precision",
    unless=("bfloat16", "bf16", None, False),
)
_REWARD_MODEL = Covered("of a reward model; ours is a server behind reward.model.url")
_SCHEDULE = Unsupported(
    "trainer.optimizer.schedule is constant, linear or cosine",
    unless=(None, 0, 0.0, "constant", False),
)
_SWITCHED = (None, False, "disabled", "", 0)


def _off(why: str) -> Unsupported:
    """An entry that is a loss only where it is switched on."""
    return Unsupported(why, unless=_SWITCHED)


def _all(entry: Translation, parent: str, names: str) -> dict[str, Translation]:
    return dict.fromkeys((f"{parent}.{name}" for name in names.split()), entry)


_ROUTING = _off("trainer.routingReplay says whose experts are replayed")
_OTHER = _off("the trainer is Megatron or FSDP2: trainer.backend, trainer.parallelism")
_ENGINES = Unsupported("trainer.backend is megatron or fsdp", unless=("megatron", "fsdp", "fsdp2"))
_REDUCED = Unsupported("gradients are summed in fp32", unless=("fp32", "float32", None))
_LEAST = Unsupported("set trainer.optimizer.minLr to a rate", unless=(None, 0, 0.0))
_WARMUP = Covered("maxStaleness says how many batches may be ahead")

UNSUPPORTED: dict[str, Translation] = {
    # policy
    **_all(Covered("as rollout.samplesPerPrompt"), _ACTOR, "rollout_n"),
    **_all(_KERNELS, _ACTOR, "use_fused_kernels use_prefix_grouper"),
    **_all(
        _KERNELS,
        _ACTOR,
        "entropy_from_logits_with_chunking entropy_checkpointing pad_to_length "
        "fsdp_config.entropy_from_logits_with_chunking fsdp_config.entropy_checkpointing "
        "fsdp_config.forward_prefetch fsdp_config.reshard_after_forward "
        "fsdp_config.use_orig_params fsdp_config.use_torch_compile",
    ),
    f"{_ACTOR}.fsdp_config.seed": Covered("one seed for all: data.seed"),
    f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype": _PRECISION,
    f"{_ACTOR}.fsdp_config.mixed_precision.buffer_dtype": _REDUCED,
    f"{_ACTOR}.fsdp_config.mixed_precision.reduce_dtype": _REDUCED,
    f"{_ACTOR}.model_engine": _ENGINES,
    "actor@actor_rollout_ref.actor": _ENGINES,
    f"{_ACTOR}.optim.min_lr_factor": _LEAST,
    f"{_ACTOR}.megatron.use_megatron_fsdp": _off("trainer.backend is megatron or fsdp"),
    f"{_ACTOR}.freeze_vision_tower": Covered("of pictures"),
    **_all(
        Covered("order and seed of prompts are data.shuffle and data.seed"),
        _ACTOR,
        "data_loader_seed",
    ),
    **_all(_CHECKPOINT, f"{_ACTOR}.checkpoint", "save_contents load_contents strict"),
    **_all(Covered("model.init says which weights a run starts from"), _ACTOR, "load_weight"),
    **_all(Covered("the entropy is always reported"), _ACTOR, "calculate_entropy"),
    f"{_ACTOR}.calculate_sum_pi_squared": _off(
        "no estimator uses the sum of squared probabilities"
    ),
    f"{_ACTOR}.loss_scale_factor": Unsupported(
        "token_sum_norm divides by rollout.sampling.maxResponseTokens", unless=(None,)
    ),
    # optimizer and Megatron
    **_all(
        _SCHEDULE,
        f"{_ACTOR}.optim",
        "lr_warmup_init lr_wsd_decay_steps weight_decay_incr_style "
        "use_checkpoint_opt_param_scheduler",
    ),
    f"{_ACTOR}.optim.lr_wsd_decay_style": Covered("of the schedule WSD"),
    **{
        f"{_ACTOR}.optim.override_optimizer_config.{name}": entry
        for name, entry in OPTIMIZER_ENTRIES.items()
    },
    f"{_ACTOR}.optim.optimizer_impl": Covered("Megatron's AdamW"),
    f"{_ACTOR}.megatron.seed": Covered("one seed for all: data.seed"),
    f"{_ACTOR}.megatron.use_remove_padding": ALWAYS,
    f"{_ACTOR}.megatron.forward_only": ALWAYS,
    f"{_ACTOR}.megatron.dist_checkpointing_prefix": Covered(
        "Hugging Face checkpoints are read directly"
    ),
    f"{_ACTOR}.megatron.dtype": _PRECISION,
    f"{_ACTOR}.megatron.quantization": _off("the trainer computes in bf16 or fp32"),
    f"{_ACTOR}.megatron.enable_qat": _off("the trainer computes in bf16 or fp32"),
    f"{_ACTOR}.fsdp_config.model_dtype": _PRECISION,
    # rollout
    **_all(
        _ENGINE,
        _ROLLOUT,
        "cudagraph_capture_sizes logprobs_mode scheduling_policy disable_log_stats "
        "multi_stage_wake_up layered_summon cast_to_rollout_dtype limit_images mtp "
        "enable_sleep_mode standalone_gpu_memory_utilization",
    ),
    f"{_ROLLOUT}.moe_tensor_parallel_size": Unsupported(
        "an engine splits all layers alike; rollout.engineArgs has its own arguments",
        unless=(None, 1),
    ),
    f"{_ROLLOUT}.single_turn_response_length": Unsupported(
        "turns are played by a function of yours: rollout.function", unless=(None,)
    ),
    f"{_ROLLOUT}.sampling_kwargs": Unsupported(
        "rollout.sampling has no further parameters", unless=(None,)
    ),
    f"{_ROLLOUT}.pipeline_model_parallel_size": Unsupported(
        "an engine is split by tensor parallelism", unless=(1,)
    ),
    f"{_ROLLOUT}.over_sample_rate": _off(
        "rollout.overSampling starts more prompts, and drops whole groups"
    ),
    f"{_ROLLOUT}.enable_rollout_routing_replay": Covered("trainer.routingReplay is for both sides"),
    f"{_ROLLOUT}.quantization": _off("engines serve the trainer's precision"),
    f"{_ROLLOUT}.quantization_config_file": _off("engines serve the trainer's precision"),
    f"{_ROLLOUT}.full_determinism": _off("of trainer and engine: trainer.deterministic"),
    f"{_ROLLOUT}.seed": Covered("sampling is not seeded"),
    # data
    **_all(Covered("the tokenizer is that of model.path"), "data", "tokenizer trust_remote_code"),
    **_all(
        ALWAYS,
        "data",
        "use_shm return_raw_input_ids return_full_prompt filter_overlong_prompts_workers",
    ),
    **_all(
        Covered("of pictures, which a row must not have"),
        "data",
        "image_patch_size image_key video_key audio_key "
        "return_multi_modal_inputs mm_processor_kwargs",
    ),
    **_all(
        Covered("named with its path"), "data", "custom_cls.name sampler.class_name datagen.name"
    ),
    # rewards
    **_all(Covered("reward.sandbox.processes"), "reward", "num_workers"),
    **_all(_REWARD_MODEL, "reward_model", "num_workers use_reward_loop reward_loop_source"),
    "reward.compute_score_kwargs": Unsupported(
        "built-in rewards take no arguments; write a function", unless=({}, None)
    ),
    "reward.reward_model.enable": _off(
        "a reward model is a server of yours behind SGLang: reward.model.url"
    ),
    "reward.sandbox_fusion.url": _off("reward.type: code has a sandbox of its own"),
    "reward.reward_manager.module.path": _off("rewards are functions: reward.function"),
    "reward_manager.module.path": _off("rewards are functions: reward.function"),
    "reward_model.reward_loop_module_path": _off("rewards are functions: reward.function"),
    # algorithm
    "algorithm.rollout_correction.debug_rollout_actor_probs": Covered(
        "the difference is reported at every step"
    ),
    "algorithm.gdpo_reward_keys": Covered("of gdpo alone"),
    "algorithm.gdpo_reward_weights": Covered("of gdpo alone"),
    # trainer
    "trainer.esi_redundant_time": Covered(
        "a pod that is to end saves before it goes: terminationGracePeriodSeconds"
    ),
    "trainer.del_local_ckpt_after_load": Covered("checkpoint.keep says how many are kept"),
    "trainer.max_critic_ckpt_to_keep": Covered("the critic is part of the policy's checkpoint"),
    "trainer.ray_wait_register_center_timeout": Covered("there is no Ray"),
    "trainer.validation_data_dir": Covered("samples/ of the run directory has evaluations"),
    "trainer.val_only": _off(
        "an evaluation is part of a training run; `--set trainer.steps=1` makes it short"
    ),
    "trainer.use_legacy_worker_impl": Covered("of verl's processes"),
    "trainer.use_v1": Covered("of verl's processes"),
    "model_engine": Unsupported("trainer.backend says what trains", unless=("megatron",)),
    # asynchronous training
    "async_training.use_trainer_do_validate": Covered("engines evaluate"),
    "async_training.concurrent_samples_per_replica": Covered("rollout.concurrency, of requests"),
    "trainer.v1.separate_async.num_warmup_batches": _WARMUP,
    "trainer.v1.colocate_async.num_warmup_batches": _WARMUP,
    "rollout.total_rollout_steps": Covered(
        "trainer.steps or trainer.epochs is the length of the run"
    ),
}

OTHER_TRAINERS = tuple(
    f"{_ACTOR}.{name}."
    for name in (
        "veomni", "engine", "torchtitan", "automodel", "mindspeed", "fsdp_config.turbo_config",
    )
)  # fmt: skip
"""Groups of keys of trainers that are neither Megatron nor FSDP2."""

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
        _off("GPUs of trainer and engines are not lent to each other while a job runs"),
    ),
    ("trainer.v1.", _off("of verl's new trainer; rollout.mode and maxStaleness say what is async")),
    ("trainer.worker_env.", Unsupported("trainer.template has them: spec.containers[].env")),
    ("skip.", _off("debug.replay trains on the rollouts of an earlier run")),
    (f"{_ACTOR}.qat.", _off("the trainer computes in bf16 or fp32")),
    (
        f"{_ACTOR}.optim.override_optimizer_config",
        _off("trainer.optimizer has all that can be set"),
    ),
    (
        f"{_ACTOR}.megatron.override_",
        Unsupported("Megatron's settings are sluice's own", unless=(*_SWITCHED, {})),
    ),
    (f"{_ROLLOUT}.disaggregation.", _off("an engine prefills and decodes")),
    (f"{_ROLLOUT}.checkpoint_engine.engine_kwargs", Covered("of verl's transport")),
    ("reward.reward_model.", _REWARD_MODEL),
    ("reward_model.", _REWARD_MODEL),
    ("reward.reward_manager.", Covered("of a reward manager; rewards are functions")),
    ("reward_manager.", Covered("of a reward manager; rewards are functions")),
    ("algorithm.f_grpo_", Covered("of the estimator f_grpo")),
    ("algorithm.pf_ppo.", Covered("of PF-PPO")),
    (
        "algorithm.mopd.",
        _off("algorithm.distillation.teachers are chosen by data source, and none is weighed"),
    ),
)
"""Groups of keys, the first that fits."""
