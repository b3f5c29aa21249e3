"""Kernels of speculative decoding in plain torch.

SGLang has them for GPUs, and those that need no sampling also for CPUs with AMX: on a CPU it
accepts the most likely token whatever the temperature. Here it samples on a CPU as on GPUs.

The tokens that are proposed for a request form a tree, in flat arrays of [requests, nodes]. Node 0
is the last token of the response. `next_token` of a node is its first child, `next_sibling` the
next child of its parent; -1 ends both.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# --- places in the cache


def assign_extend_cache_locs_cpu(
    requests: Tensor, table: Tensor, start: Tensor, end: Tensor, out: Tensor, _: int
) -> None:
    """Write the places of the tokens [start, end) of all requests, one after the other."""
    rows = zip(requests.tolist(), start.tolist(), end.tolist(), strict=True)
    places = torch.cat([table[row, first:last] for row, first, last in rows])
    out[: len(places)] = places


def assign_req_to_token_pool_cpu(
    requests: Tensor, table: Tensor, start: Tensor, end: Tensor, places: Tensor, _: int
) -> None:
    """Note the places of the tokens [start, end) of all requests, given one after the other."""
    begin = 0
    rows = zip(requests.tolist(), start.tolist(), end.tolist(), strict=True)
    for row, first, last in rows:
        table[row, first:last] = places[begin : begin + last - first]
        begin += last - first


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, table: Tensor, lengths: Tensor, out: Tensor, width: int, topk: int, steps: int
) -> None:
    """Write the places of the next topk * steps tokens of all requests."""
    assign_extend_cache_locs_cpu(requests, table, lengths, lengths + topk * steps, out, width)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, places: Tensor, out: Tensor) -> None:
    """Write the places of the accepted nodes without gaps."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted >= 0].long()
    out[: len(accepted)] = places[accepted]


def fill_bonus_tokens_cpu(tokens: Tensor, lengths: Tensor, out: Tensor, stride: int) -> None:
    """Write the last accepted token of each request."""
    rows = torch.arange(len(lengths)) * stride
    out.copy_(tokens.reshape(-1)[rows + lengths.long() - 1])


def _move_cache(pool: Any, target: Tensor, source: Tensor) -> None:
    """Move tokens of a key-value cache. The kernel gets addresses of memory in place of tensors."""
    for buffers in (pool.k_buffer, pool.v_buffer):
        for buffer in buffers:
            buffer[target.long()] = buffer[source.long()]


# --- trees


def _link(parents: list[int], next_token: Tensor, next_sibling: Tensor) -> None:
    """Write the links of one tree. parents: of the nodes 1, 2, ..."""
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for node in range(len(parents), 0, -1):
        parent = parents[node - 1]
        next_sibling[node] = next_token[parent]
        next_token[parent] = node


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    _depth: int,
    nodes: int,
    _mode: Any,
) -> None:
    """Build the trees of a draft model, with a mask of ancestors [requests, nodes, nodes].

    selected: of each node but the first, its number among all candidates. `parent_list` has the
    number of the candidate that group number // topk continues; group 0 continues node 0.
    """
    batch = len(lengths)
    mask, positions = mask.view(-1)[: batch * nodes * nodes], positions.view(batch, nodes)
    index.copy_(torch.arange(batch * nodes).view(batch, nodes))
    for request, tree in enumerate(mask.view(batch, nodes, nodes)):
        numbers, groups = selected[request].tolist(), parent_list[request].tolist()
        parents = [
            0 if (group := number // topk) == 0 else numbers.index(groups[group]) + 1
            for number in numbers
        ]
        _link(parents, next_token[request], next_sibling[request])
        tree.copy_(torch.eye(nodes))
        for node, parent in enumerate(parents, start=1):
            tree[node] |= tree[parent]
        positions[request] = lengths[request] + tree.sum(-1) - 1


def reconstruct_indices_from_tree_mask(
    mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    batch: int,
    nodes: int,
) -> None:
    """Build trees from their masks: mask[r, i, j] is true if node j is i or an ancestor of i."""
    trees = mask.view(batch, nodes, nodes).bool()
    positions.view(batch, nodes).copy_(lengths[:, None] + trees.sum(-1) - 1)
    index.copy_(torch.arange(batch * nodes).view(batch, nodes))
    for request, tree in enumerate(trees):
        ancestors = tree.tril(-1).int()
        # The nearest ancestor is the one with the largest number.
        parents = (nodes - 1 - ancestors.flip(-1).argmax(-1))[1:].tolist()
        _link(parents, next_token[request], next_sibling[request])


# --- verification


def _children(first: int, next_sibling: list[int]) -> Iterator[int]:
    while first != -1:
        yield first
        first = next_sibling[first]


def _verify_tree(
    accept_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    offset: int,
    choose: Callable[[int, list[int]], int],
) -> tuple[list[int], int]:
    """Walk down one tree. Return the accepted nodes, and the number of proposed ones among them.

    choose: returns the child of a node that is accepted, or -1.
    """
    first, sibling = next_token.tolist(), next_sibling.tolist()
    path = [0]
    while len(path) < len(accept_index):
        children = list(_children(first[path[-1]], sibling))
        accepted = choose(path[-1], children) if children else -1
        if accepted == -1:
            break
        path.append(accepted)
    accept_index[: len(path)] = torch.tensor(path) + offset
    return path, len(path) - 1


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept the nodes that are the most likely tokens."""
    batch, nodes = candidates.shape
    for request in range(batch):
        tokens, likely = candidates[request].tolist(), target_predict[request].tolist()

        def choose(
            node: int, children: list[int], tokens: Any = tokens, likely: Any = likely
        ) -> int:
            return next((child for child in children if tokens[child] == likely[node]), -1)

        path, accepted = _verify_tree(
            accept_index[request],
            retrive_next_token[request],
            retrive_next_sibling[request],
            request * nodes,
            choose,
        )
        accept_token_num[request] = accepted
        for node in path:
            predicts[request * nodes + node] = likely[node]


def tree_speculative_sampling_target_only(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool,
) -> None:
    """Sample from the target's distribution, by accepting nodes of the tree if they are drawn.

    A child is accepted with its probability. If none is, the token comes from the rest of the
    distribution.
    """
    batch, nodes = candidates.shape
    for request in range(batch):
        tokens, coins = candidates[request].tolist(), uniform_samples[request].tolist()
        probs = target_probs[request].clone()

        def choose(
            node: int,
            children: list[int],
            tokens: Any = tokens,
            coins: Any = coins,
            probs: Any = probs,
        ) -> int:
            total = 0.0
            for child in children:
                single = float(probs[node, tokens[child]])
                total += single
                if single > 0 and (
                    coins[node] < total / threshold_acc or single >= threshold_single
                ):
                    return child
            probs[node, [tokens[child] for child in children]] = 0
            return -1

        path, accepted = _verify_tree(
            accept_index[request],
            retrive_next_token[request],
            retrive_next_sibling[request],
            request * nodes,
            choose,
        )
        accept_token_num[request] = accepted
        for node, child in itertools.pairwise(path):
            predicts[request * nodes + node] = tokens[child]
        cumulative = probs[path[-1]].cumsum(-1)
        draw = uniform_samples_for_final_sampling[request] * cumulative[-1]
        token = torch.searchsorted(cumulative, draw, right=True).clamp(max=len(cumulative) - 1)
        predicts[request * nodes + path[-1]] = token


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Keep the k most likely tokens of each row."""
    ordered = probs.sort(-1, descending=True).values
    last = (top_ks.long().clamp(max=probs.shape[-1]) - 1)[:, None]
    kept = probs.masked_fill(probs < ordered.gather(-1, last), 0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Keep the fewest most likely tokens of each row that have this probability together."""
    ordered, order = probs.sort(-1, descending=True)
    kept = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_ps[:, None], 0)
    kept = torch.zeros_like(probs).scatter(-1, order, kept)
    return kept / kept.sum(-1, keepdim=True)


# --- attention


def _attend(backend: Any, layer: Any, query: Tensor, places: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the attention of one request: query [tokens, heads, size] over cached places."""
    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)[places]
    values = backend.token_to_kv_pool.get_value_buffer(layer.layer_id)[places]
    output = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None].to(query.dtype),
        values.transpose(0, 1)[None].to(query.dtype),
        attn_mask=mask,
        scale=layer.scaling,
        enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
    )
    return output[0].transpose(0, 1).flatten(1)


def _store(backend: Any, layer: Any, places: Tensor, k: Tensor, v: Tensor) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    backend.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(places, None), k, v)


def _verify_attention(
    backend: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save: bool
) -> Tensor:
    """Let each node see the response and its ancestors."""
    if save:
        _store(backend, layer, batch.out_cache_loc, k, v)
    nodes = batch.spec_info.draft_token_num
    trees = batch.spec_info.custom_mask.view(-1)[: batch.batch_size * nodes * nodes].bool()
    table = backend.req_to_token_pool.req_to_token
    queries = q.view(batch.batch_size, nodes, layer.tp_q_head_num, layer.qk_head_dim)
    outputs = []
    for request, tree in enumerate(trees.view(batch.batch_size, nodes, nodes)):
        length = int(batch.seq_lens[request])
        places = table[batch.req_pool_indices[request], : length + nodes].long()
        mask = functional.pad(tree, (length, 0), value=True)
        outputs.append(_attend(backend, layer, queries[request], places, mask))
    return torch.cat(outputs)


class MultiStepDraft:
    """Attention of the steps in which a draft model proposes tokens."""

    def __init__(self, runner: Any, topk: int, steps: int) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        self.topk, self.steps = topk, steps
        self.attn_backends = [_DraftStep(TorchNativeAttnBackend(runner)) for _ in range(steps - 1)]

    def init_forward_metadata(self, batch: Any) -> None:
        """Note the places that each candidate sees: the response, and its own tokens so far."""
        table = self.attn_backends[0].backend.req_to_token_pool.req_to_token
        places: list[tuple[Tensor, Tensor]] = []
        for request, length in zip(
            batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True
        ):
            row = table[request].long()
            own = row[length : length + self.topk * self.steps].view(self.topk, self.steps)
            places += [(row[:length], candidate) for candidate in own]
        for step, backend in enumerate(self.attn_backends, start=1):
            backend.places = [torch.cat((seen, own[:step])) for seen, own in places]


class _DraftStep:
    """Attention of one such step."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.places: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        batch: Any,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> Tensor:
        if save_kv_cache:
            _store(self.backend, layer, batch.out_cache_loc, k, v)
        queries = q.view(-1, 1, layer.tp_q_head_num, layer.qk_head_dim)
        return torch.cat(
            [
                _attend(self.backend, layer, query, places, None)
                for query, places in zip(queries, self.places, strict=True)
            ]
        )


# --- changes of SGLang's modules


def _change_attention(module: Any) -> None:
    backend = module.TorchNativeAttnBackend
    extend = backend.forward_extend

    def forward_extend(
        self: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Any:
        if batch.forward_mode.is_target_verify():
            return _verify_attention(self, q, k, v, layer, batch, save_kv_cache)
        return extend(self, q, k, v, layer, batch, save_kv_cache, **more)

    backend.forward_extend = forward_extend


def _change_drafts(module: Any) -> None:
    """Let a draft model compute with this attention."""
    factory = module.DraftBackendFactory

    def decode(self: Any) -> Any:
        return "torch_native", MultiStepDraft(
            self.draft_model_runner, self.topk, self.speculative_num_steps
        )

    def extend(self: Any) -> Any:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        return "torch_native", TorchNativeAttnBackend(self.draft_model_runner)

    # The server's arguments have no name for this attention, so it takes that of AMX.
    factory._create_intel_amx_decode_backend = decode
    factory._create_intel_amx_prefill_backend = extend
    create = factory._create_backend

    def create_backend(self: Any, name: str, backends: Any, *args: Any, **kwargs: Any) -> Any:
        return create(
            self, name, backends | {"torch_native": backends["intel_amx"]}, *args, **kwargs
        )

    factory._create_backend = create_backend


def _change_verification(module: Any) -> None:
    """Sample, unless all requests want the most likely token."""

    def uses_greedy(*, is_all_greedy: bool, **_: Any) -> bool:
        return is_all_greedy

    module._verify_uses_greedy = uses_greedy


def _change_head(module: Any) -> None:
    """Let a head take the model's embedding and output layer without waiting for a GPU."""

    def set_embed_and_head(self: Any, embed: Tensor, head: Tensor) -> None:
        self.model.embed_tokens.weight = embed
        self.lm_head.weight = head

    module.Glm4MoeForCausalLM.set_embed_and_head = set_embed_and_head


def _change_cache(module: Any) -> None:
    def move_kv_cache(self: Any, target: Tensor, source: Tensor) -> None:
        _move_cache(self, target, source)

    module.MHATokenToKVPool.move_kv_cache = move_kv_cache
    module.MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: None


CHANGES: dict[str, Callable[[Any], None]] = {
    "sglang.srt.layers.attention.torch_native_backend": _change_attention,
    "sglang.srt.mem_cache.memory_pool": _change_cache,
    "sglang.srt.models.glm4_moe": _change_head,
    "sglang.srt.speculative.draft_utils": _change_drafts,
    "sglang.srt.speculative.eagle_utils": _change_verification,
}
