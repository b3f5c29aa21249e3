"""A plugin for vLLM 0.32, which a weight update from a sluice trainer needs.

This package runs in vLLM's image and cannot import sluice. `worker.Weights` is the server's
`--worker-extension-cls`; `attempt_fence.Fence`, `pauses.Pauses` and
`adapters.Adapters` are `--middleware`.
"""
