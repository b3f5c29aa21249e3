"""What our trainer needs inside of SGLang's own image: one plugin, and nothing else of ours.

`path` is a directory that goes on the engine's Python path. It imports only what SGLang itself imports, so it can be
copied into any image: `python -m sluice.engines.sglang.plugin TARGET` does that, as the rollout pod's init container.
"""
