"""Verification of proposed tokens on a CPU samples from the policy, whatever is proposed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice.engines.sglang.cpu.path.sgl_kernel import speculative as kernels
from tests.distributions import chi_square_p
from tests.unit.engines.conftest import Plugin

VOCABULARY = 6
# Parents of the nodes 1, 2, ... of each tree, and their tokens after that of node 0.
TREES = {
    "chain": ([0, 1, 2], [3, 1, 0]),
    "siblings": ([0, 0, 0], [0, 2, 5]),
    "tree": ([0, 0, 1, 1, 2], [1, 4, 0, 3, 4]),
}


def mask_of(parents: list[int]) -> Tensor:
    """Return which nodes are ancestors: [nodes, nodes]."""
    mask = torch.eye(len(parents) + 1, dtype=torch.bool)
    for node, parent in enumerate(parents, start=1):
        mask[node] |= mask[parent]
    return mask


def sampled(parents: list[int], tokens: list[int], probs: Tensor, requests: int) -> list[list[int]]:
    """Return the tokens that verification appends to each of some equal requests.

    probs: the policy's distribution at each node, [nodes, vocabulary].
    """
    nodes = len(parents) + 1
    index, next_token, next_sibling = (
        torch.zeros(requests, nodes, dtype=torch.long) for _ in range(3)
    )
    positions = torch.zeros(requests * nodes, dtype=torch.long)
    kernels.reconstruct_indices_from_tree_mask(
        mask_of(parents).repeat(requests, 1, 1),
        torch.full((requests,), 7),
        positions,
        index,
        next_token,
        next_sibling,
        requests,
        nodes,
    )
    predicts = torch.zeros(requests * nodes, dtype=torch.int32)
    accepted = torch.full((requests, nodes), -1, dtype=torch.int32)
    counts = torch.zeros(requests, dtype=torch.int32)
    kernels.tree_speculative_sampling_target_only(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=counts,
        candidates=torch.tensor([[0, *tokens]]).repeat(requests, 1),
        retrive_index=index,
        retrive_next_token=next_token,
        retrive_next_sibling=next_sibling,
        uniform_samples=torch.rand(requests, nodes),
        uniform_samples_for_final_sampling=torch.rand(requests),
        target_probs=probs.repeat(requests, 1, 1),
        draft_probs=torch.zeros(1),
        threshold_single=1.0,
        threshold_acc=1.0,
        deterministic=True,
    )
    return [
        predicts[row[: count + 1].long()].tolist()
        for row, count in zip(accepted, counts.tolist(), strict=True)
    ]


def joint(parents: list[int], tokens: list[int], probs: Tensor, rest: Tensor) -> Tensor:
    """Return the policy's distribution of the next two tokens, with `rest` after others."""
    children = {
        token: node
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True), start=1)
        if parent == 0
    }
    second = [probs[children[t]] if t in children else rest for t in range(VOCABULARY)]
    return probs[0, :, None] * torch.stack(second)


@pytest.mark.parametrize("tree", TREES)
def test_appended_tokens_are_distributed_as_the_policy(tree: str) -> None:
    torch.manual_seed(0)
    parents, tokens = TREES[tree]
    probs = (1.5 * torch.randn(len(parents) + 1, VOCABULARY)).softmax(-1)
    rest = torch.randn(VOCABULARY).softmax(-1)
    counts = torch.zeros(VOCABULARY, VOCABULARY)
    responses = sampled(parents, tokens, probs, 4000)
    for response in responses:
        # Without an accepted token the pass has appended one, and the next pass samples another.
        second = response[1] if len(response) > 1 else int(rest.multinomial(1))
        counts[response[0], second] += 1
    assert max(map(len, responses)) > 1
    assert chi_square_p(counts, joint(parents, tokens, probs, rest)) > 1e-3


def padded(nodes: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return what NGRAM of SGLang proposes if it knows one continuation: [1, nodes]."""
    parents = [0, 1, *[0] * (nodes - 3)]
    return np.array([[2, 3, 4, *[0] * (nodes - 3)]]), mask_of(parents).numpy()[None].astype(int)


def test_tokens_that_fill_up_a_proposal_are_distinct(plugin: Plugin) -> None:
    distinct_padding = plugin("speculation").distinct_padding
    tokens, trees = padded(6)
    [row] = distinct_padding(tokens, trees)
    assert row.tolist() == [2, 3, 4, 0, 1, 2]
    assert distinct_padding(np.array([[2, 3, 4, 0]]), trees[:, :4, :4]).tolist() == [[2, 3, 4, 0]]
    probs = torch.tensor([0.2, 0.1, 0.1, 0.3, 0.2, 0.1]).repeat(6, 1)
    torch.manual_seed(0)
    for proposal, is_exact in ((row.tolist(), True), (tokens[0].tolist(), False)):
        firsts = [r[0] for r in sampled([0, 1, 0, 0, 0], proposal[1:], probs, 2000)]
        counts = torch.bincount(torch.tensor(firsts), minlength=VOCABULARY).float()
        assert (chi_square_p(counts, probs[0]) > 1e-3) is is_exact


def test_both_ways_to_a_tree_agree() -> None:
    """A draft model gives parents, NGRAM a mask of ancestors."""
    # topk 2: candidates 0 and 1 continue node 0; 2 and 3 the first of these, 4 and 5 the second.
    chosen, groups = torch.tensor([[0, 1, 2, 5]]), torch.tensor([[-1, 0, 1]])
    nodes = 5
    outputs = []
    for build in (True, False):
        index, first, sibling = (torch.full((1, nodes), -1) for _ in range(3))
        mask, positions = mask_of([0, 0, 1, 2]).flatten(), torch.zeros(nodes, dtype=torch.long)
        if build:
            mask = torch.ones_like(mask)
            kernels.build_tree_kernel_efficient_cpu(
                groups, chosen, torch.tensor([7]), mask, positions, index, first, sibling, 2, 2,
                nodes, None,
            )  # fmt: skip
        else:
            kernels.reconstruct_indices_from_tree_mask(
                mask, torch.tensor([7]), positions, index, first, sibling, 1, nodes
            )
        outputs.append((mask.tolist(), positions.tolist(), first.tolist(), sibling.tolist()))
    assert outputs[0] == outputs[1]
    assert outputs[0][1:] == ([7, 8, 8, 9, 9], [[1, 3, 4, -1, -1]], [[-1, 2, -1, -1, -1]])


def test_the_most_likely_tokens_are_accepted_without_sampling() -> None:
    predicts, accepted = torch.zeros(4, dtype=torch.int32), torch.full((1, 3), -1)
    count = torch.zeros(1, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=torch.tensor([[9, 3, 5, 6]]),
        retrive_index=torch.arange(4)[None],
        retrive_next_token=torch.tensor([[1, -1, 3, -1]]),
        retrive_next_sibling=torch.tensor([[-1, 2, -1, -1]]),
        target_predict=torch.tensor([[5, 0, 6, 8]]),
    )
    assert (accepted.tolist(), int(count)) == ([[0, 2, 3]], 2)
    assert predicts[[0, 2, 3]].tolist() == [5, 6, 8]


def test_truncated_sampling_keeps_the_most_likely_tokens() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    assert torch.allclose(
        kernels.top_k_renorm_prob(probs, torch.tensor([2])), torch.tensor([[4 / 7, 3 / 7, 0, 0]])
    )
    assert torch.allclose(
        kernels.top_p_renorm_prob(probs, torch.tensor([0.75])),
        torch.tensor([[4 / 9, 3 / 9, 2 / 9, 0]]),
    )
