#!/bin/bash
# PPO with a critic on four nodes, engines on machines of their own, an own reward: slime's train_async.py.
set -euo pipefail
: "${MODEL_DIR:=/models}"
MODEL_DIR=/models
DATA=/data
if [[ "${DEBUG:-0}" == "1" ]]; then
  STEPS=10
else
  STEPS=500
fi

ARGS=(
   --hf-checkpoint "$MODEL_DIR/glm-9b"
   --prompt-data "$DATA/agent.parquet"
   --input-key messages
   --tool-key tools
   --metadata-key meta
   --apply-chat-template
   --num-rollout $STEPS
   --rollout-batch-size 64
   --n-samples-per-prompt 4
   --num-steps-per-rollout 4
   --rollout-max-prompt-len 4096
   --rollout-max-response-len $((16 * 1024))
   --rollout-temperature 1.0
   --rollout-top-p 0.95
   --custom-rm-path agents.reward.score
   --custom-generate-function-path agents.play.generate
   --reward-key score
)
ARGS+=(--advantage-estimator ppo --gamma 0.99 --lambd 0.95 --kl-coef 1e-3 --kl-loss-type k2)
ARGS+=(--num-critic-only-steps 5 --value-clip 0.3 --eps-clip 0.2 --eps-clip-c 3.0)
ARGS+=(--use-rollout-logprobs --calculate-per-token-loss)
ARGS+=(--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --expert-tensor-parallel-size 1)
ARGS+=(--num-virtual-stages-per-pipeline-rank 2 --recompute-granularity selective --max-tokens-per-gpu 16384)
ARGS+=(--lr 1e-6 --lr-decay-style cosine --lr-warmup-iters 10 --clip-grad 0.5)

exec python3 -u /opt/slime/train_async.py \
   --actor-num-nodes 4 --actor-num-gpus-per-node 8 \
   --rollout-num-gpus 32 --rollout-num-gpus-per-engine 16 \
   --sglang-context-length=32768 --sglang-mem-fraction-static 0.8 --sglang-server-concurrency 1024 \
   --update-weight-buffer-size $((1024 * 1024 * 1024)) \
   "${ARGS[@]}" "$@"
