"""A plugin for vLLM 0.32: what a weight update from our trainer needs inside of an engine.

This package runs in vLLM's image, with nothing of ours beside it. `worker.Weights` is its
`--worker-extension-cls`; `attempts.Fence` and `pauses.Pauses` are `--middleware`.
"""
