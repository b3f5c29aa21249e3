"""The floating-point operations of training a batch, and the utilisation of GPUs.

The count follows PaLM's appendix B and slime: each weight of a matrix that a token passes costs 2
operations forward and 4 backward, plus attention's two products over the causal half of the
sequence. Experts that are not chosen, embedding look-ups, recomputed activations and log-prob
passes do not count. A vision tower is counted separately, by the patches of its images.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.api.groups.trainer import VisionPart

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


@dataclass(frozen=True, slots=True)
class TowerFlops:
    """The operations of a vision tower and its projector in a forward pass.

    Attributes
    ----------
    per_patch
        Operations of all matrices of the tower for a patch.
    embedding
        Those of the first one, which gets pixels, and so passes no gradients on.
    per_pair
        Operations of attention for each pair of patches, in layers that see the whole image.
    per_window_pair
        Likewise in layers that see a window.
    window
        Side of a window in tokens; 0: no layer has windows.
    per_token
        Operations of the projector for a token.
    merge
        Patches of a token in height, and in width.

    """

    per_patch: float
    embedding: float
    per_pair: float
    per_window_pair: float
    window: int
    per_token: float
    merge: int

    def forward(self, rows: int, columns: int) -> float:
        """Return the operations of a forward pass over an image of rows x columns tokens."""
        return self._tower(rows, columns) + self.per_token * rows * columns

    def training(self, rows: int, columns: int, trained: Collection[VisionPart]) -> float:
        """Return the operations of forward and backward pass if these parts are trained.

        A frozen projector passes gradients on to a tower that is trained; nothing behind trained
        parts gets gradients.
        """
        projector = self.per_token * rows * columns
        if "vision" in trained:
            first = self.embedding * rows * columns * self.merge**2
            tower = 3.0 * self._tower(rows, columns) - first
            return tower + projector * (3 if "projector" in trained else 2)
        return self._tower(rows, columns) + projector * (3 if "projector" in trained else 1)

    def _tower(self, rows: int, columns: int) -> float:
        patches = rows * columns * self.merge**2
        matrices = self.per_patch * patches + self.per_pair * patches**2
        if not self.window:
            return matrices
        # Windows at the lower and the right edge are smaller.
        sides = (_squares(side, self.window) for side in (rows, columns))
        return matrices + self.per_window_pair * next(sides) * next(sides) * self.merge**4


def _squares(side: int, part: int) -> int:
    """Return the sum of squares of the parts into which a side is cut."""
    whole, rest = divmod(side, part)
    return whole * part**2 + rest**2


def tower_flops(config: Mapping[str, Any]) -> TowerFlops | None:
    """Count the operations of a Qwen-VL tower from the model's Hugging Face config.json.

    Returns
    -------
    None if the model has no tower, or one of another form.

    """
    config = config.get("vision_config") or {}
    try:
        hidden, depth, merge = config["hidden_size"], config["depth"], config["spatial_merge_size"]
        colours = config.get("in_channels") or config["in_chans"]
        patch = colours * config["temporal_patch_size"] * config["patch_size"] ** 2
        windowed = depth - len(config["fullatt_block_indexes"]) if "window_size" in config else 0
        # Layers with windows have a gated feed-forward part, those of later towers have not.
        feed_forward = (3 if "window_size" in config else 2) * hidden * config["intermediate_size"]
        projectors = 1 + len(config.get("deepstack_visual_indexes") or ())
        merged = hidden * merge**2
        projector = projectors * merged * (merged + config["out_hidden_size"])
    except KeyError:
        return None
    window = config.get("window_size", 0) // config["patch_size"] // merge
    return TowerFlops(
        embedding=2.0 * patch * hidden,
        per_patch=2.0 * (patch * hidden + depth * (4 * hidden**2 + feed_forward)),
        per_pair=4.0 * (depth - windowed) * hidden,
        per_window_pair=4.0 * windowed * hidden,
        window=window,
        per_token=2.0 * projector,
        merge=merge,
    )


# Tokens of the image, a square of some 450 pixels, by which `image_cost` measures attention.
_SIDE = 16


def image_cost(
    config: Mapping[str, Any],
    flops: ModelFlops,
    trained: Collection[VisionPart],
    samples_per_prompt: int,
) -> float:
    """Return what a token of an image costs in the tower, in units of training on a token.

    A frozen tower sees an image once for all samples of its prompt. 0 if the tower's operations are
    not known.
    """
    tower = tower_flops(config)
    if tower is None:
        return 0.0
    cost = tower.training(_SIDE, _SIDE, trained) / _SIDE**2 / (3.0 * flops.per_token)
    return cost if trained else cost / samples_per_prompt


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
    flops: ModelFlops | None,
    lengths: Sequence[int],
    seconds: float,
    gpus: int,
    device: str,
    *,
    tower: float = 0.0,
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
    tower
        Operations of vision towers.

    """
    if flops is None or not gpus or not device or seconds <= 0:
        return {}
    tflops = (flops.training(lengths) + tower) / seconds / gpus / 1e12
    peak = peak_tflops(device)
    return {"perf/actor_train_tflops": tflops} | ({"perf/mfu": tflops / peak} if peak else {})
