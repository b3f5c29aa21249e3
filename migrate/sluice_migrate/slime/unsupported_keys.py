"""slime's arguments that have no field here: why, or why nothing is lost. Names of slime 0.3 and
its main branch.
"""

from __future__ import annotations

from typing import Any

from sluice_migrate.translation import PACKED, Covered, Field, Translation, Unsupported, as_boolean

_LOGS = Unsupported(
    "metrics go to the run directory, TensorBoard and Prometheus; W&B wants a key: "
    "spec.secrets.wandb"
)
MODEL_SHAPE = Covered("the model's shape is read from its config.json")
NO_ROUTER = Covered("workers pull their prompts: there is no router")
_KERNELS = Covered("a matter of kernels, not of results")
_BALANCE = Unsupported("no loss and no bias balances the experts", unless=("0", "0.0", "none"))
_BUFFER = Covered(
    "the buffer moves samples between rollout and trainer, and keeps them: spec.buffer"
)
_HEALTH = Covered(
    "engines are watched always; failurePolicy.rolloutBackoffSeconds is the pause before one that "
    "died is replaced"
)
_OLD_BUFFER = Unsupported(
    "every job has a buffer of its own; an agent server is called by rollout.function"
)
_DELTA = Unsupported("weights are sent whole")
_FROZEN = Unsupported("sluice trains all weights")
_FP8 = Unsupported("the trainer computes in bf16 or fp32")
_MTP = Unsupported(
    "layers that predict several tokens are not trained; engines take theirs by rollout.engineArgs"
)
_PROFILER = Unsupported(
    "debug.profile: [steps] keeps traces and the history of memory of these steps"
)
_REPLAY = Unsupported("debug.replay trains on rollouts that sluice dumped: debug.dumpRollouts")
_CHECKS = Covered(
    "the first step's checks are made in every run: train/train_rollout_logprob_abs_diff"
)
_OPTIMIZER = Unsupported("the optimizer's state is kept from step to step")
_CENTERING = Unsupported(
    "needs the engine's probabilities of words that were not sampled; of a place only the sampled "
    "one is kept"
)


def _by_flops(value: Any) -> str:
    return "flops" if as_boolean(value) else "tokens"


def _all(entry: Translation, names: str) -> dict[str, Translation]:
    return dict.fromkeys((f"--{name}" for name in names.split()), entry)


UNSUPPORTED: dict[str, Translation] = {
    **_all(
        _LOGS,
        "use-wandb wandb-project wandb-group wandb-key wandb-team wandb-mode wandb-dir wandb-host "
        "wandb-run-id disable-wandb-random-suffix wandb-always-use-train-step",
    ),
    **_all(
        Covered("tensorboard/ of the run directory"),
        "tb-project-name tb-experiment-name tensorboard-dir",
    ),
    **_all(
        Covered("samples/ of the run directory has every step's"),
        "log-multi-turn log-correct-samples",
    ),
    "--log-reward-category": Unsupported(
        "a reward's named numbers are recorded with the samples, not counted by name"
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
    "--moe-token-drop-policy": Covered("no token is dropped"),
    **_all(
        _BALANCE,
        "moe-router-load-balancing-type moe-router-bias-update-rate moe-aux-loss-coeff",
    ),
    "--spec": Unsupported("docs/models.md lists the layers that sluice trains"),
    "--ref-micro-batch-size": PACKED,
    "--loss-mask-type": Covered("of supervised fine-tuning"),
    "--qwen-gdn-backend": Unsupported("docs/models.md lists the layers that sluice trains"),
    # processes and places
    "--distributed-timeout-minutes": Covered("every wait has a deadline of its own"),
    "--rollout-external-engine-addrs": Unsupported("engines are pods of the job: rollout.replicas"),
    "--prefill-num-servers": Unsupported("an engine prefills and decodes"),
    "--sglang-config": Unsupported("engines are all alike: rollout.engineArgs"),
    **_all(
        NO_ROUTER,
        "sglang-router-ip sglang-router-port sglang-router-request-timeout-secs",
    ),
    "--train-env-vars": Unsupported("trainer.template has them: spec.containers[].env"),
    "--http-proxy": Unsupported("templates have variables: spec.containers[].env"),
    "--use-distributed-post": Covered("each worker talks to the engine beside it"),
    "--release-train": Unsupported("the trainer keeps its processes while engines generate"),
    **_all(
        _HEALTH,
        "rollout-health-check-interval rollout-health-check-timeout "
        "rollout-health-check-first-wait rollout-cleanup-timeout rollout-session-id",
    ),
    # samples on their way
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
        "unfinished groups go out again in the order of their prompts"
    ),
    "--disable-rollout-global-dataset": Unsupported(
        "data.prompts names files, or own code that yields rows"
    ),
    "--start-rollout-id": Unsupported(
        "a job begins at step 0, and goes on at its own last checkpoint"
    ),
    # weights on their way
    **_all(
        Covered("transport disk goes over spec.checkpoint.volume"),
        "update-weight-disk-dir update-weight-disk-keep-files",
    ),
    **_all(
        _DELTA,
        "update-weight-delta-encoding update-weight-delta-checksum "
        "update-weight-local-checkpoint-dir",
    ),
    "--flush-cache-interval": Unsupported(
        "weightSync.pauseMode says what becomes of running requests, at every update"
    ),
    "--check-weight-update-equal": Covered("weightSync.verify asks every engine for its version"),
    "--keep-old-actor": Covered("log-probs before the step are computed before the step"),
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
    "--use-rollout-entropy": Unsupported(
        "the entropy is a term of the loss, not known when masks are made"
    ),
    "--megatron-config-path": Unsupported(
        "the critic is laid out as the policy; algorithm.critic has its rate"
    ),
    "--ref-ckpt-step": Unsupported("model.referencePath names one checkpoint"),
    "--no-save-optim": Unsupported("a checkpoint is whole, so that a run can go on from it"),
    "--allgather-cp": Covered("context parallelism is Megatron's own"),
    **_all(
        Covered("trainer.maxTokensPerGpu is what bounds memory"),
        "log-probs-chunk-size recompute-loss-function",
    ),
    "--balance-by-flops": Field("trainer.balance", _by_flops),
    # evaluation
    "--eval-max-prompt-len": Unsupported("data.maxPromptTokens is for training and evaluation"),
    "--eval-max-context-len": Unsupported(
        "an engine has one context length: rollout.engineArgs.context-length"
    ),
    "--eval-min-new-tokens": Unsupported("responses end where the model ends them"),
    # looking into it
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
