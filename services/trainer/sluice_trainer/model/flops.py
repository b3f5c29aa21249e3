"""The floating-point operations of training a batch, and the utilisation of GPUs.

The count follows PaLM's appendix B and slime: each weight of a matrix that a token passes costs 2
operations forward and 4 backward, plus attention's two products over the causal half of the
sequence. Experts that are not chosen, embedding look-ups, recomputed activations and log-prob
passes do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Dense bf16 TFLOP/s without sparsity from NVIDIA's data sheets, by a part of the device's name.
_PEAK_TFLOPS = {
    "B300": 2250.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "H200": 989.0,
    "H100 PCIE": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
}


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The operations of a forward pass.

    Attributes
    ----------
    per_token
        Operations of all matrices for a token.
    per_pair
        Operations of attention for each pair of a token and a token that it attends to.

    """

    per_token: float
    per_pair: float

    @property
    def balance_tokens(self) -> float:
        """The length at which attention costs as much as all matrices."""
        return 2.0 * self.per_token / self.per_pair

    def training(self, lengths: Sequence[int]) -> float:
        """Return the operations of forward and backward pass over sequences of these lengths."""
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        return 3.0 * (self.per_token * sum(lengths) + self.per_pair * pairs)


def model_flops(config: Mapping[str, Any]) -> ModelFlops | None:
    """Count the operations of a model from its Hugging Face config.json.

    Returns
    -------
    None unless all layers have standard or grouped attention, and a gated feed-forward part or
    experts of one size.

    """
    config = config.get("text_config", config)
    # These keys may indicate layers of other kinds, whose operations are not known here.
    if {"kv_lora_rank", "linear_num_key_heads", "layer_types", "ssm_cfg"} & set(config):
        kinds = set(config.get("layer_types") or ["linear"])
        if not kinds <= {"full_attention", "sliding_attention"} or "kv_lora_rank" in config:
            return None
    try:
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
        groups = config.get("num_key_value_heads") or heads
        size = config.get("head_dim") or hidden // heads
        attention = hidden * size * (2 * heads + 2 * groups)
        matrices = layers * (attention + _feed_forward(config)) + hidden * vocabulary
    except KeyError:
        return None
    return ModelFlops(2.0 * matrices, 4.0 * layers * heads * size)


def _feed_forward(config: Mapping[str, Any]) -> float:
    """Return the weights per token of a layer's feed-forward part, averaged over layers."""
    hidden = float(config["hidden_size"])
    dense = 3.0 * hidden * float(config.get("intermediate_size") or 0)
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    if not experts:
        return dense
    size = float(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = float(config.get("shared_expert_intermediate_size") or 0)
    # A token passes its chosen experts and the shared expert; the router is added below.
    passed = size * int(config["num_experts_per_tok"]) + shared
    chosen = 3.0 * hidden * passed + hidden * int(experts)
    dense_layers = len(config.get("mlp_only_layers") or ())
    layers = int(config["num_hidden_layers"])
    return (dense * dense_layers + chosen * (layers - dense_layers)) / layers


def peak_tflops(device: str) -> float | None:
    """Return the peak of a GPU by its name, such as `NVIDIA H200`; None: unknown."""
    name = device.upper()
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)


def utilisation(
    flops: ModelFlops | None, lengths: Sequence[int], seconds: float, gpus: int, device: str
) -> dict[str, float]:
    """Return `perf/actor_train_tflops` (slime's name) and `perf/mfu` of each GPU.

    Empty on CPUs, or if the model's operations are not known; without `perf/mfu` if the GPU's peak
    is not known.

    Parameters
    ----------
    flops
        Operations of the model.
    lengths
        Tokens of all sequences.
    seconds
        Time of the training step.
    gpus
        GPUs of all ranks.
    device
        Name of the GPU.

    """
    if flops is None or not gpus or not device or seconds <= 0:
        return {}
    tflops = flops.training(lengths) / seconds / gpus / 1e12
    peak = peak_tflops(device)
    return {"perf/actor_train_tflops": tflops} | ({"perf/mfu": tflops / peak} if peak else {})
