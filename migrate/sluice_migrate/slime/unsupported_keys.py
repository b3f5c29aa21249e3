"""Arguments of slime without a field in sluice, and the reasons.

Names are those of slime 0.3 and of its main branch of autumn 2026.
"""

from __future__ import annotations

from typing import Any

from sluice_migrate.translation import PACKED, Covered, Field, Translation, Unsupported, as_boolean

MODEL_SHAPE = Covered("sluice reads the model's shape from its config.json")
NO_ROUTER = Covered("workers pull their prompts, so there is no router")
_KERNELS = Covered("it changes kernels, not results")
_BALANCE = Unsupported(
    "sluice has no loss or bias that balances experts", unless=("0", "0.0", "none")
)
_BUFFER = Covered("the buffer stores samples and moves them to the trainer: buffer")
_HEALTH = Covered(
    "sluice always watches engines; failurePolicy.rolloutBackoffSeconds delays restarts"
)
_OLD_BUFFER = Unsupported("every job has its own buffer; call an agent server in rollout.function")
_DELTA = Covered("weightSync.transport: store has one lossless encoding, with checksums")
_FROZEN = Unsupported("sluice trains all weights")
_FP8 = Unsupported("sluice trains in bf16 or fp32: trainer.precision")
_MTP = Unsupported(
    "trainer.mtp trains the layer for a further token, with backend: fsdp; engines propose with it "
    "with rollout.speculative: {algorithm: mtp}"
)
_PROFILER = Unsupported("debug.profile: [steps] records traces and memory of these steps")
_REPLAY = Unsupported("debug.replay trains on rollouts that sluice saved with debug.dumpRollouts")
_CHECKS = Covered("sluice makes these checks in every run: train/train_rollout_logprob_abs_diff")
_OPTIMIZER = Unsupported("sluice always keeps the optimizer's state")
_CENTERING = Unsupported(
    "it needs probabilities of tokens that were not sampled; sluice stores only those of sampled "
    "tokens"
)


# Without --balance-by-flops slime balances tokens.
def _by_flops(value: Any) -> str:
    return "flops" if as_boolean(value) else "tokens"


def _all(entry: Translation, names: str) -> dict[str, Translation]:
    return dict.fromkeys((f"--{name}" for name in names.split()), entry)


UNSUPPORTED: dict[str, Translation] = {
    **_all(
        Covered("TensorBoard files are in tensorboard/ of the run directory"),
        "tb-project-name tb-experiment-name tensorboard-dir",
    ),
    **_all(
        Covered("samples of every step are in samples/ of the run directory"),
        "log-multi-turn log-correct-samples",
    ),
    "--log-reward-category": Unsupported(
        "named parts of a reward are recorded with the samples, not counted"
    ),
    **_all(
        MODEL_SHAPE,
        "model-name post-self-attn-layernorm post-mlp-layernorm use-gated-attention "
        "padded-vocab-size position-embedding-type no-position-embedding multi-latent-attention "
        "q-lora-rank kv-lora-rank qk-head-dim v-head-dim qk-pos-emb-head-dim no-rope-fusion "
        "rotary-interleaved rotary-scaling-factor mscale mscale-all-dim apply-layernorm-1p "
        "attention-output-gate max-position-embeddings seq-length no-masked-softmax-fusion "
        "moe-shared-expert-gate moe-router-score-function moe-router-pre-softmax "
        "moe-router-enable-expert-bias moe-router-group-topk moe-router-num-groups "
        "moe-router-topk-scaling-factor",
    ),
    **_all(
        _KERNELS,
        "moe-grouped-gemm moe-permute-fusion moe-token-dispatcher-type moe-enable-deepep "
        "moe-router-dtype transformer-impl enable-experimental",
    ),
    "--moe-token-drop-policy": Covered("sluice drops no tokens"),
    **_all(
        _BALANCE,
        "moe-router-load-balancing-type moe-router-bias-update-rate moe-aux-loss-coeff",
    ),
    "--spec": Unsupported("see docs/models.md for the layers that sluice trains"),
    "--ref-micro-batch-size": PACKED,
    "--loss-mask-type": Covered("it only affects supervised fine-tuning"),
    "--qwen-gdn-backend": Unsupported("see docs/models.md for the layers that sluice trains"),
    # processes and hosts
    "--distributed-timeout-minutes": Covered("every wait has its own deadline"),
    "--rollout-external-engine-addrs": Unsupported(
        "the engines are pods of the job: rollout.replicas"
    ),
    "--prefill-num-servers": Unsupported("every engine prefills and decodes"),
    "--sglang-config": Unsupported("all engines have the same rollout.engineArgs"),
    **_all(
        NO_ROUTER,
        "sglang-router-ip sglang-router-port sglang-router-request-timeout-secs",
    ),
    "--train-env-vars": Unsupported("set variables in trainer.template: spec.containers[].env"),
    "--http-proxy": Unsupported("set variables in the pod templates: spec.containers[].env"),
    "--use-distributed-post": Covered("each worker talks to the engine in its own pod"),
    "--release-train": Unsupported("the trainer's processes stay while engines generate"),
    **_all(
        _HEALTH,
        "rollout-health-check-interval rollout-health-check-timeout "
        "rollout-health-check-first-wait rollout-cleanup-timeout rollout-session-id",
    ),
    # transport of samples
    **_all(
        _BUFFER,
        "rollout-data-transport rollout-data-dir rollout-storage-profile "
        "rollout-storage-declaration "
        "rollout-queue-run-id rollout-queue-online-gc rollout-queue-lease-seconds "
        "rollout-queue-segment-mib rollout-io-concurrency data-pad-size-multiplier",
    ),
    **_all(
        _OLD_BUFFER,
        "rollout-buffer-url fetch-trajectory-retry-times min-batch-collection-ratio "
        "rollout-task-type",
    ),
    "--buffer-sort-by-staleness": Unsupported(
        "unfinished groups are generated again in the order of their prompts"
    ),
    "--disable-rollout-global-dataset": Unsupported(
        "data.prompts names files, or a function that yields rows"
    ),
    "--start-rollout-id": Unsupported("a job starts at step 0, or at its own last checkpoint"),
    # transport of weights
    **_all(
        Covered("weightSync.transport: disk uses the checkpoint volume"),
        "update-weight-disk-dir update-weight-disk-keep-files",
    ),
    **_all(
        _DELTA,
        "update-weight-delta-encoding update-weight-delta-checksum "
        "update-weight-local-checkpoint-dir",
    ),
    "--flush-cache-interval": Unsupported(
        "weightSync.pauseMode decides about running requests at every update"
    ),
    "--check-weight-update-equal": Covered("weightSync.verify checks the version of every engine"),
    "--keep-old-actor": Covered("sluice computes the old log-probs before the step"),
    # training
    **_all(_FROZEN, "only-train-params-name-list freeze-params-name-list freeze-indexer"),
    **_all(
        _FP8,
        "force-fp8-ue8m0-scale megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules "
        "megatron-deepgemm-moe-forward-layers megatron-deepgemm-moe-forward-modules "
        "fp8-format fp8-recipe",
    ),
    **_all(_MTP, "mtp-num-layers mtp-loss-scaling-factor enable-mtp-training"),
    "--routing-replay-prefetch-microbatches": _KERNELS,
    **_all(_OPTIMIZER, "reset-optimizer-states use-stateless-adam"),
    **_all(_CENTERING, "use-score-centering score-centering-top-k"),
    "--use-rollout-entropy": Unsupported("the entropy is not known when sluice computes masks"),
    "--megatron-config-path": Unsupported(
        "the critic has the policy's parallelism; algorithm.critic.lr is its learning rate"
    ),
    "--ref-ckpt-step": Unsupported("model.referencePath names one checkpoint, without a step"),
    "--no-save-optim": Unsupported(
        "checkpoints always have the optimizer, so that a run can resume"
    ),
    "--allgather-cp": Covered("sluice uses Megatron's context parallelism"),
    **_all(
        Covered("trainer.maxTokensPerGpu limits memory"),
        "log-probs-chunk-size recompute-loss-function",
    ),
    "--balance-by-flops": Field("trainer.balance", _by_flops),
    # evaluation
    "--eval-max-prompt-len": Unsupported(
        "data.maxPromptTokens is the limit for training and evaluation"
    ),
    "--eval-max-context-len": Unsupported(
        "an engine has a single context length: rollout.engineArgs.context-length"
    ),
    "--eval-min-new-tokens": Unsupported("sluice sets no minimum length"),
    # debugging
    **_all(
        _REPLAY,
        "load-debug-rollout-data load-forge-rollout-data load-debug-rollout-data-subsample "
        "save-debug-train-data dump-details",
    ),
    **_all(
        _PROFILER,
        "memory-snapshot-dir memory-snapshot-num-steps memory-recorder record-memory-history "
        "profile-target use-pytorch-profiler profile-step-start profile-step-end",
    ),
    **_all(
        _CHECKS,
        "ci-test ci-disable-kl-checker ci-train-rollout-logprob-abs-diff-threshold "
        "ci-save-grad-norm ci-load-grad-norm",
    ),
}
