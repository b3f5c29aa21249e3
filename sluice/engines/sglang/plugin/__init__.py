"""The plugin of SGLang's image, which the trainer needs.

`path` is a directory that goes on the engine's Python path. It imports only what SGLang itself
imports, so it can be copied into any image: `python -m sluice.engines.sglang.plugin TARGET` does
so, as the rollout pod's init container.
"""
