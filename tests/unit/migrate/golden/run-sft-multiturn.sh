#!/bin/bash
set -x
nproc_per_node=4

torchrun --nnodes=1 --nproc_per_node=$nproc_per_node \
    -m verl.trainer.sft_trainer \
    data.train_files=/data/multiturn/train.parquet \
    data.messages_key=messages \
    data.max_length=2048 \
    data.train_batch_size=96 \
    data.max_token_len_per_gpu=8192 \
    model.path=/models/Qwen2.5-3B-Instruct \
    model.use_remove_padding=true \
    engine=megatron \
    optim=megatron \
    optim.lr=1e-5 \
    optim.lr_warmup_steps_ratio=0.2 \
    optim.betas="[0.9,0.95]" \
    engine.tensor_model_parallel_size=2 \
    trainer.project_name=multiturn-sft \
    trainer.experiment_name=qwen2.5-3b \
    trainer.total_epochs=2
