"""Additions with which an environment without GPUs serves SGLang.

`python -m sluice.engines.sglang.cpu` makes them.
"""
