"""Speculative decoding (`rollout.speculative`) that samples from the policy, update after update.

SGLang loads every tensor of an update into the draft model too. A smaller model has tensors of the
same names with other shapes, and an EAGLE head may have some of the same shape. So updates leave
such a draft as it is. Embedding and output layer are the policy's in a head, which shares them. No
tensor of the policy has the name of one in the checkpoint's layer for further tokens (mtp), so that
layer changes only if the trainer sends it (`trainer.mtp`).

If NGRAM finds fewer tokens than it may propose, SGLang adds token 0 several times as a child of the
last token. Verification adds up the probabilities of the children, and would accept token 0 several
times as often as the policy samples it. So the added tokens are made distinct.
"""

import os
from typing import Any

import numpy as np
import numpy.typing as npt

# Read by the plugin and the launch script: `rollout.speculative.algorithm`.
VARIABLE = "SLUICE_SPECULATIVE"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
CORPUS = "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus"


def register() -> None:
    algorithm = os.environ.get(VARIABLE)
    if not algorithm:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if algorithm != "mtp":
        HookRegistry.register(f"{MANAGER}._select_runners", only_target, HookType.AROUND)
    if algorithm == "ngram":
        HookRegistry.register(f"{CORPUS}.batch_get", with_distinct_padding, HookType.AROUND)


def only_target(original: Any, manager: Any, *_: Any, **__: Any) -> Any:
    """Replace SGLang's choice of the models that an update is loaded into."""
    return original(manager, "target")


def with_distinct_padding(original: Any, corpus: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap SGLang's look-up of proposals: trees of tokens, and which nodes are ancestors."""
    tokens, mask = original(corpus, *args, **kwargs)
    nodes = corpus.draft_token_num
    trees = np.asarray(mask).reshape(-1, nodes, nodes)
    return distinct_padding(np.asarray(tokens).reshape(-1, nodes), trees).reshape(-1), mask


def distinct_padding(tokens: npt.NDArray[Any], trees: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return proposals in which no two children of the first node are the same token.

    Parameters
    ----------
    tokens
        Proposed tokens: [requests, nodes].
    trees
        trees[r, i, j] is nonzero if node j is i or an ancestor of i: [requests, nodes, nodes].

    """
    distinct = tokens.copy()
    # A child of the first node has one ancestor, and counts as its own.
    children = (trees != 0).sum(-1) == 2
    for request in np.flatnonzero((children & (tokens == 0)).sum(-1) > 1):
        row, own = distinct[request], np.flatnonzero(children[request])
        zeros = own[row[own] == 0]
        # The first may be a proposal. A vocabulary has more tokens than a tree has nodes.
        free = np.setdiff1d(np.arange(1, 2 * len(row)), row[own])
        row[zeros[1:]] = free[: len(zeros) - 1]
    return distinct
