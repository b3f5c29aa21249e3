#!/bin/bash
set -ex
MODEL_ARGS=(--swiglu --num-layers 36 --hidden-size 2560)

CKPT_ARGS=(
   --hf-checkpoint /models/Qwen3-4B-Base
   --load /ckpt/sft
   --save /ckpt/sft
   --save-interval 1000
)

SFT_ARGS=(
   --rollout-function-path slime.rollout.sft_rollout.generate_rollout
   --prompt-data /data/chats.parquet
   --input-key messages
   --rollout-shuffle
   --num-epoch 3
   --rollout-batch-size 128
   --global-batch-size 128
   --loss-type sft_loss
   --loss-mask-type qwen3
   --calculate-per-token-loss
   --disable-compute-advantages-and-returns
   --debug-train-only
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-5
   --min-lr 1e-6
   --lr-decay-style cosine
   --lr-warmup-fraction 0.1
   --weight-decay 0.1
   --adam-beta2 0.95
)

ray job submit --address="http://127.0.0.1:8265" -- python3 train_async.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node 8 \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${SFT_ARGS[@]} ${OPTIMIZER_ARGS[@]} \
   --use-dynamic-batch-size --max-tokens-per-gpu 9216 --recompute-granularity full
