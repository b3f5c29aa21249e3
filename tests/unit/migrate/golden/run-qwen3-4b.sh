#!/bin/bash
# An 8-GPU run as slime's users write it: arrays of arguments, colocated engines, a Ray job.
pkill -9 sglang
ray stop --force
set -ex

export PYTHONUNBUFFERED=1
BASE_DIR=${BASE_DIR:-"/data"}
NVLINKS=$(nvidia-smi topo -m | grep -c 'NV[0-9]')
if [ "$NVLINKS" -gt 0 ]; then
   HAS_NVLINK=1
else
   HAS_NVLINK=0
fi
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
source "${HERE}/models/qwen3-4B.sh"

CKPT_ARGS=(
   --hf-checkpoint ${BASE_DIR}/Qwen3-4B
   #--hf-checkpoint ${BASE_DIR}/Qwen3-4B-FP8
   --ref-load ${BASE_DIR}/Qwen3-4B_torch_dist
   --load ${BASE_DIR}/ckpt/
   --save ${BASE_DIR}/ckpt/
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data ${BASE_DIR}/math/train.jsonl@[0:4096]
   --input-key prompt
   --label-key label
   --apply-chat-template
   --apply-chat-template-kwargs '{"enable_thinking":false}'
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 0.8
   --rollout-stop "</answer>" "<|end|>"
   --rollout-stop-token-ids 151645
   --over-sampling-batch-size 64
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --partial-rollout

   --global-batch-size 128
   --balance-data
)
EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime ${BASE_DIR}/aime-2024.jsonl amc ${BASE_DIR}/amc.jsonl
   --n-samples-per-eval-prompt 16
   --eval-max-response-len 16384
   --eval-top-p 0.7
)
PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 2
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   # --micro-batch-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu $((1024 * 9))
)
GRPO_ARGS=(
   --advantage-estimator gspo
   --use-kl-loss
   --kl-loss-coef 0.001
   --kl-loss-type low_var_kl
   --entropy-coef 0.00
   --eps-clip 3e-4
   --eps-clip-high 4e-4
   --use-tis
   --tis-clip 3.0
)
OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
   --optimizer-cpu-offload
)
WANDB_ARGS=(
   # --use-wandb
   --wandb-key ${WANDB_KEY}
)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
   --sglang-enable-dp-attention
   --use-fault-tolerance
)
ray start --head --num-gpus 8 --disable-usage-stats
RUNTIME_ENV_JSON="{\"env_vars\": {\"NCCL_NVLS_ENABLE\": \"${HAS_NVLINK}\"}}"
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 8 \
   --colocate \
   --some-new-flag 3 \
   ${MODEL_ARGS[@]} \
   "${CKPT_ARGS[@]}" \
   ${ROLLOUT_ARGS[@]} \
   ${OPTIMIZER_ARGS[@]} \
   ${GRPO_ARGS[@]} \
   ${WANDB_ARGS[@]} \
   ${PERF_ARGS[@]} \
   ${EVAL_ARGS[@]} \
   ${SGLANG_ARGS[@]} 2>&1 | tee train.log
