"""Rules of `rollout.precision` and `rollout.kvCacheDtype`: engines that compute in few bits."""

from __future__ import annotations

from sluice.api.schema.rules import field, requires

_QUANTIZED = field("rollout.precision") != "bf16"
_SMALL_CACHE = field("rollout.kvCacheDtype") != "auto"

# Rules of a job's spec.
QUANTIZED_ENGINES = (
    requires(
        _QUANTIZED,
        field("weightSync.enginePlugin").is_true,
        "SGLang takes quantized weights a second time through sluice's plugin alone: leave "
        "weightSync.enginePlugin out",
        "rollout.precision",
    ),
    requires(
        _QUANTIZED | _SMALL_CACHE,
        ~field("rollout.pool").is_set,
        "the engines are started by the pool, in its precision: leave precision and kvCacheDtype "
        "out",
        "rollout.precision",
    ),
    requires(
        _QUANTIZED,
        field("weightSync.lora") == "merged",
        "with weightSync.lora: adapter engines read the model from its checkpoint, in the "
        "precision that it has there: set weightSync.lora: merged, or leave precision out",
        "rollout.precision",
    ),
    requires(
        _QUANTIZED,
        field("debug.rolloutOnly").is_false,
        "with debug.rolloutOnly engines read the checkpoint: name one that `sluice convert "
        "quantize` has written, and leave precision out",
        "rollout.precision",
    ),
    requires(
        _QUANTIZED,
        ~field("data.images").is_set,
        "vision-language models have not been shown to work with quantized weights: leave "
        "precision out",
        "rollout.precision",
    ),
    requires(
        field("trainer.fakeQuantize").is_true,
        _QUANTIZED,
        "fakeQuantize computes with the weights of quantized engines: set rollout.precision, or "
        "leave it out",
        "trainer.fakeQuantize",
    ),
    requires(
        _QUANTIZED | _SMALL_CACHE,
        field("trainer.deterministic").is_false,
        "deterministic needs an engine that computes as the trainer does, bit for bit: leave "
        "rollout.precision and rollout.kvCacheDtype out",
        "trainer.deterministic",
    ),
)
