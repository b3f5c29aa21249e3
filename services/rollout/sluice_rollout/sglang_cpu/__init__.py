"""What an environment without GPUs needs for a real SGLang server; `python -m sluice_rollout.sglang_cpu` adds it."""
