"""`trainer.deterministic`: the engine computes each token as the trainer does, to the bit.

SGLang's deterministic modes make an engine agree with itself. This plugin replaces functions of
dense models by those that the trainer calls too (`invariant`). Written for 0.5.17 to 0.5.21.
"""

import os
from collections.abc import Callable
from typing import Any

VARIABLE = "SLUICE_DETERMINISTIC"
_LAYERS = "sglang.srt.layers"
_ROTARY = f"{_LAYERS}.rotary_embedding.base.RotaryEmbedding"
_ATTENTION = f"{_LAYERS}.attention.triton_backend.TritonAttnBackend"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not os.environ.get(VARIABLE):
        return
    replaced: dict[str, Callable[..., Any]] = {
        f"{_LAYERS}.quantization.unquant.UnquantizedLinearMethod.apply": linear,
        f"{_LAYERS}.layernorm.RMSNorm.forward_cuda": rms_norm,
        f"{_LAYERS}.activation.SiluAndMul.forward_cuda": silu_and_multiply,
        f"{_LAYERS}.logits_processor.LogitsProcessor._compute_lm_head": compute_logits,
        f"{_ROTARY}.forward_cuda": rotate,
        f"{_ATTENTION}.forward_extend": extend,
        f"{_ATTENTION}.forward_decode": decode,
        "sglang.srt.models.utils.apply_qk_norm": norm_heads,
    }
    for target, function in replaced.items():
        HookRegistry.register(target, function, HookType.REPLACE)
    HookRegistry.register(f"{_ROTARY}.__init__", set_frequencies, HookType.AFTER)
    HookRegistry.register(f"{_LAYERS}.sampler.Sampler.forward", sample, HookType.AROUND)


def linear(method: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    from . import invariant

    return invariant.linear(x, layer.weight, bias)


def compute_logits(processor: Any, hidden: Any, lm_head: Any, embedding_bias: Any = None) -> Any:
    """Return logits, in float32 if `model.fp32LmHead` is set."""
    import torch

    from . import invariant

    dtype = torch.float32 if processor.use_fp32_lm_head else None
    return invariant.linear(hidden, lm_head.weight, embedding_bias, dtype)


def rms_norm(layer: Any, x: Any, residual: Any = None, addition: Any = None) -> Any:
    from . import invariant

    if addition is not None:
        residual = residual + addition
    if residual is None:
        return invariant.rms_norm(x, layer.weight, layer.variance_epsilon)
    residual = x + residual
    return invariant.rms_norm(residual, layer.weight, layer.variance_epsilon), residual


def norm_heads(
    q: Any, k: Any, q_norm: Any, k_norm: Any, head_dim: int, *_: Any, **__: Any
) -> tuple[Any, Any]:
    """Normalize queries and keys of each head, [t, heads * d]."""
    return tuple(
        layer(x.reshape(-1, head_dim)).view(x.shape) for x, layer in ((q, q_norm), (k, k_norm))
    )


def silu_and_multiply(layer: Any, x: Any) -> Any:
    from . import invariant

    return invariant.silu_and_multiply(x)


def set_frequencies(result: Any, layer: Any, *_: Any, **__: Any) -> None:
    """Compute frequencies on the CPU, as the trainer does: a GPU's powers differ in the last bit.

    They are kept in a buffer. SGLang keeps no other tensors when an engine releases its memory.
    """
    import torch

    steps = torch.arange(0, layer.rotary_dim, 2, dtype=torch.int64, device="cpu").float()
    inverse = 1.0 / (layer.base ** (steps / layer.rotary_dim))
    layer.register_buffer(
        "sluice_inverse", inverse.to(layer.cos_sin_cache.device), persistent=False
    )


def rotate(
    layer: Any, positions: Any, query: Any, key: Any, offsets: Any = None, fused: Any = None
) -> tuple[Any, Any]:
    from . import invariant

    if type(layer).__name__ != "RotaryEmbedding" or fused is not None:
        raise NotImplementedError(
            f"trainer.deterministic: {type(layer).__name__}: trainer and engine compute such "
            "rotary positions differently"
        )
    positions = positions if offsets is None else positions + offsets
    angles = positions.flatten().float()[:, None] * layer.sluice_inverse
    cos, sin = angles.cos(), angles.sin()
    rotated = [
        invariant.rotate(
            x.view(len(cos), -1, layer.head_size), cos, sin, not layer.is_neox_style
        ).view(x.shape)
        for x in (query, key)
    ]
    return rotated[0], rotated[1]


def extend(
    backend: Any,
    q: Any,
    k: Any,
    v: Any,
    layer: Any,
    batch: Any,
    save_kv_cache: bool = True,
    **_: Any,
) -> Any:
    """Attention of the tokens of prompts, or of what a cut-off response had already."""
    metadata = backend.forward_metadata
    starts = metadata.qo_indptr
    return _attend(
        backend,
        q,
        (k, v) if save_kv_cache else None,
        layer,
        batch,
        starts[:-1],
        starts[1:] - starts[:-1],
        int(metadata.max_extend_len),
    )


def decode(
    backend: Any,
    q: Any,
    k: Any,
    v: Any,
    layer: Any,
    batch: Any,
    save_kv_cache: bool = True,
    **_: Any,
) -> Any:
    """Attention of one new token of each request."""
    import torch

    count = len(batch.seq_lens)
    starts = torch.arange(count, dtype=torch.int32, device=q.device)
    ones = torch.ones(count, dtype=torch.int32, device=q.device)
    return _attend(
        backend, q, (k, v) if save_kv_cache else None, layer, batch, starts, ones, longest=1
    )


def _attend(
    backend: Any,
    q: Any,
    new: tuple[Any, Any] | None,
    layer: Any,
    batch: Any,
    starts: Any,
    lengths: Any,
    longest: int,
) -> Any:
    """Write the new tokens' keys and values to the cache, and attend to the cache."""
    from . import invariant

    pool = backend.token_to_kv_pool
    if new is not None:
        k, v = (x.view(-1, layer.tp_k_head_num, layer.qk_head_dim) for x in new)
        pool.set_kv_buffer(layer, _write(batch), k, v)
    keys, values = pool.get_kv_buffer(layer.layer_id)
    queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    out = invariant.attention(
        queries,
        keys,
        values,
        starts=starts,
        lengths=lengths,
        key_lengths=batch.seq_lens,
        rows=batch.req_pool_indices,
        table=backend.req_to_token_pool.req_to_token,
        longest=longest,
        scale=layer.scaling,
    )
    return out.view(len(queries), -1)


def _write(batch: Any) -> Any:
    """Return the cache locations of new tokens, in the type of this release."""
    try:
        from sglang.srt.layers.attention.triton_backend import KVWriteLoc
    except ImportError:
        return batch.out_cache_loc
    return KVWriteLoc(batch.out_cache_loc, None)


def sample(
    original: Callable[..., Any], sampler: Any, output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Compute log-probs of sampled tokens, from the logits before sampling overwrites them."""
    from . import invariant

    logits, info = output.next_token_logits.clone(), args[0]
    tokens = original(sampler, output, *args, **kwargs)
    if output.next_token_logprobs is not None:
        scales = (1.0 / info.temperatures.double()).float().view(-1)
        output.next_token_logprobs = invariant.log_probs(logits, tokens.long(), scales)
    return tokens
