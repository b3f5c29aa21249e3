"""What an environment without GPUs needs for a real SGLang server; `python -m sluice.engines.sglang.cpu` adds it."""
