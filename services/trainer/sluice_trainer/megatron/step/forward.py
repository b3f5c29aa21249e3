"""Log-probs and entropies of response tokens, or a critic's values, straight from hidden states.

Only places that predict a response token reach the output layer, and only a chunk of them at a
time: the logits of a whole row (16k tokens x 152k words x 4 bytes = 10 GB) never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sluice_trainer.megatron.adaptations import megatron_device
from sluice_trainer.megatron.compiled import compiled
from sluice_trainer.megatron.parallel import from_last_stage
from sluice_trainer.megatron.step.divergence import Teaching
from sluice_trainer.megatron.step.packing import MicroBatch

Forward = Callable[[Any, MicroBatch], Tensor]
"""(model, micro-batch) -> [k, r] numbers of the response tokens on the last pipeline stage, hidden
states before it."""
CHUNK_ELEMENTS = 2**27
"""Logits that exist at a time (512 MiB in float32). Larger micro-batches recompute theirs in the
backward pass."""


@compiled
def _statistics(
    logits: Tensor, place: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of z = logits x scale, in one pass: largest z, sum of exp(z - largest), sum of that times (z
    - largest), z at `place`. [n] float32 each.
    """
    z = logits.float() * scale
    largest = z.amax(-1)
    shifted = z - largest[:, None]
    exponentials = shifted.exp()
    target = z.gather(-1, place[:, None]).squeeze(-1)
    return largest, exponentials.sum(-1), (exponentials * shifted).sum(-1), target


@compiled
def _gradient(
    logits: Tensor,
    place: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    at_target: Tensor,
    of: Tensor,
    scale: float,
) -> Tensor:
    """Gradient of the logits, [n, local vocab], in their precision; see `_LogProbEntropy`.

    at_target: gradient of the log-probs where this rank has the target, else 0. of: [2, n], of
    log-probs and entropies.
    """
    log_p = logits.float() * scale - log_total[:, None]
    result = -log_p.exp() * (of[0][:, None] + (log_p + entropy[:, None]) * of[1][:, None])
    columns = torch.arange(logits.shape[-1], device=logits.device)
    result = result + torch.where(columns == place[:, None], at_target[:, None], 0.0)
    return (result * scale).to(logits.dtype)


class _LogProbEntropy(torch.autograd.Function):
    """Log-prob of a target and entropy of a softmax whose vocabulary is spread over tensor-parallel
    ranks.

    logits [n, local vocab], targets [n] global ids -> log-probs [n], entropies [n], float32. With p
    the softmax of z: d logp / d z = 1[target] - p; d H / d z = -p (log p + H). The logits are all
    that is kept, and all that is read, of [n, vocab]: passes over them cost more here than
    arithmetic.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        start: int,
        scale: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        here = (targets >= start) & (targets < start + logits.shape[-1])
        place = torch.where(here, targets - start, 0)
        largest, total, mean, target = _statistics(logits, place, scale)
        if group is not None:
            largest, total, mean = _over_ranks(largest, total, mean, group)
            target = _all_reduce(torch.where(here, target, 0.0), dist.ReduceOp.SUM, group)
        log_total = total.log()
        entropy = log_total - mean / total
        ctx.save_for_backward(logits, place, here, largest + log_total, entropy)
        ctx.scale = scale
        return target - largest - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, place, here, log_total, entropy = ctx.saved_tensors
        at_target = gradients[0] * here
        result = _gradient(
            logits, place, log_total, entropy, at_target, torch.stack(gradients), ctx.scale
        )
        return result, None, None, None, None


def _over_ranks(
    largest: Tensor, total: Tensor, mean: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics of all ranks' shares of the vocabulary, from those of this one's."""
    highest = _all_reduce(largest.clone(), dist.ReduceOp.MAX, group)
    down = largest - highest
    both = torch.stack((total, mean + down * total)) * down.exp()
    total, mean = _all_reduce(both, dist.ReduceOp.SUM, group)
    return highest, total, mean


_apply: Callable[..., tuple[Tensor, Tensor]] = _LogProbEntropy.apply


def _all_reduce(
    values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> Tensor:
    if group is not None:
        dist.all_reduce(values, op, group=group)
    return values


@dataclass(frozen=True, slots=True)
class Request:
    """The micro-batch under way, as the output hook must know it. teaching: to compare it with a
    teacher.
    """

    batch: MicroBatch
    temperature: float
    vocab: int
    teaching: Teaching | None = None


def statistics(
    logits: Tensor, targets: Tensor, taught: Tensor | None, request: Request
) -> tuple[Tensor, ...]:
    """Log-probs and entropies, each [n] float32, of softmax(logits / temperature); and what
    `teaching` says of it.

    logits: [n, local vocab], this tensor-parallel rank's share, padded columns included; targets:
    [n] int64; taught: the teacher's hidden states at the same places, [n, 1, h].
    """
    group = parallel_state.get_tensor_model_parallel_group()
    shared = group if group.size() > 1 else None
    columns, scale = logits.shape[-1], 1.0 / request.temperature
    start = group.rank() * columns
    held = max(min(columns, request.vocab - start), 1)
    local = logits if held == columns else logits[:, :held]
    found = _apply(local, targets, start, scale, shared)
    if request.teaching is None or taught is None:
        return found
    return *found, *request.teaching(local, taught, columns=columns, scale=scale, group=shared)


def _score(
    hidden: Tensor,
    targets: Tensor,
    taught: Tensor | None,
    output_layer: Any,
    weight: Tensor | None,
    request: Request,
) -> Tensor:
    """[k, n]: the statistics of one chunk. hidden: [n, 1, h]."""
    logits, _ = output_layer(hidden, weight=weight)
    return torch.stack(statistics(logits.squeeze(1), targets, taught, request))


def _output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: Request,
    **_: Any,
) -> Tensor:
    """GPTModel's hook after the last layer: [k, r] statistics instead of logits."""
    hidden = _predicting(hidden_states, output_layer.sequence_parallel, context.batch)
    layer = partial(_without_sequence_parallel, output_layer)
    score = partial(_score, output_layer=layer, weight=output_weight, request=context)
    targets, taught = context.batch.targets, context.batch.taught
    if taught is not None:
        taught = taught.to(hidden.device)
    spread = partial(_from_all_shares, batch=context.batch)
    columns = (output_weight if output_weight is not None else output_layer.weight).shape[0]
    chunk = max(CHUNK_ELEMENTS // columns, 1)
    if len(targets) <= chunk:
        return spread(score(hidden, targets, taught))
    hiddens, wanted = torch.split(hidden, chunk), torch.split(targets, chunk)
    teachers = [None] * len(wanted) if taught is None else torch.split(taught, chunk)
    pieces = zip(hiddens, wanted, teachers, strict=True)
    return spread(
        torch.cat([checkpoint(score, *piece, use_reentrant=False) for piece in pieces], dim=1)
    )


def _from_all_shares(scores: Tensor, *, batch: MicroBatch) -> Tensor:
    """[k, r]: what all context-parallel ranks have scored, on each of them. scores: [k, own].

    A sum over ranks, each with zeros where others have values. Its gradient is each rank's own: the
    loss is computed on every rank, alike, and gradients of weights are summed over ranks
    afterwards.
    """
    if batch.own is None:
        return scores
    everywhere = scores.new_zeros(len(scores), sum(batch.response_lengths)).index_copy(
        1, batch.own, scores
    )
    group = parallel_state.get_context_parallel_group()
    result: Tensor = reduce_from_tensor_model_parallel_region(everywhere, group=group)
    return result


def _predicting(hidden_states: Tensor, sequence_parallel: bool, batch: MicroBatch) -> Tensor:
    """[r, 1, h] hidden states of the places that predict the response tokens, whole on every
    tensor-parallel rank.
    """
    if sequence_parallel:
        # What follows, told that its input is whole, gives each rank the whole gradient: only split
        # it here.
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False
        )
    return hidden_states.index_select(0, batch.predicting)


def _value_processor(
    *, hidden_states: Tensor, output_layer: Any, context: MicroBatch, **_: Any
) -> Tensor:
    """GPTModel's hook after the last layer of a critic: [1, r] values."""
    hidden = _predicting(hidden_states, output_layer.sequence_parallel, context)
    return _from_all_shares(output_layer(hidden).float().view(1, -1), batch=context)


def _without_sequence_parallel(output_layer: Any, hidden: Tensor, weight: Tensor | None) -> Any:
    """The output layer on hidden states that are gathered already: rows are picked before it, not
    after.
    """
    before = output_layer.sequence_parallel
    output_layer.sequence_parallel = False
    try:
        return output_layer(hidden, weight=weight)
    finally:
        output_layer.sequence_parallel = before


def forward(
    model: Any,
    batch: MicroBatch,
    *,
    temperature: float,
    vocab: int,
    teaching: Teaching | None = None,
) -> Tensor:
    """[2, r] log-probs and entropies of the response tokens on the last pipeline stage, hidden
    states before it.

    With `teaching`, and a batch that has a teacher's hidden states, [4, r]: divergence and reverse
    KL as well.
    """
    request = Request(batch, temperature, vocab, teaching)
    return _forward(model, batch, _output_processor, request)


def forward_values(model: Any, batch: MicroBatch) -> Tensor:
    """[1, r] values of a critic on the last pipeline stage, hidden states before it.

    A token's value is that of the state in which it was chosen: it comes from the place that
    predicts the token.
    """
    return _forward(model, batch, _value_processor, batch)


def _forward(model: Any, batch: MicroBatch, processor: Any, context: Any) -> Tensor:
    result: Tensor = model(
        batch.tokens[None],
        batch.packing.positions[None],
        None,
        packed_seq_params=batch.packing,
        output_processor=processor,
        output_processor_context=context,
    )
    return result


def _hidden_processor(
    *, hidden_states: Tensor, output_layer: Any, context: MicroBatch, **_: Any
) -> Tensor:
    """GPTModel's hook after the last layer of a teacher: [own, 1, h] hidden states."""
    return _predicting(hidden_states, output_layer.sequence_parallel, context)


def head(model: Any, hidden: Tensor) -> Tensor:
    """The last layer of a model, [n, 1, h] -> [n, local vocab] logits. Only on the last pipeline
    stage.
    """
    weight = (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else None
    )
    logits: Tensor = _without_sequence_parallel(model.output_layer, hidden, weight)[0].squeeze(1)
    return logits


@megatron_device()
@torch.no_grad()
def compute(chunks: list[Any], batches: list[MicroBatch], forward: Forward) -> list[list[Tensor]]:
    """The first of the forward pass's numbers, per micro-batch and member: [response] float32 on
    the CPU. No gradients.

    Collective over the model-parallel group.
    """

    def step(data: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Any]:
        batch = next(data)
        return forward(module, batch), lambda output, non_loss_data=False: batch.split(
            output[0].cpu()
        )

    results: list[list[Tensor]] = from_last_stage(
        run_schedule(step, chunks, batches, forward_only=True)
    )
    return results


@megatron_device()
@torch.no_grad()
def hidden_states(chunks: list[Any], batches: list[MicroBatch]) -> list[Tensor]:
    """Hidden states before a model's last layer, at the places that predict response tokens: [own,
    1, h], on the CPU.

    With context parallelism of this rank's share. Only on the last pipeline stage; before it, none.
    Collective.
    """

    def step(data: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Any]:
        batch = next(data)
        return _forward(
            module, batch, _hidden_processor, batch
        ), lambda output, non_loss_data=False: output.cpu()

    found: list[Tensor] = run_schedule(step, chunks, batches, forward_only=True)
    return found


def run_schedule(
    step: Any, chunks: list[Any], batches: Iterable[MicroBatch], *, forward_only: bool
) -> Any:
    """Megatron's forward-backward schedule over the micro-batches; returns what the step functions
    reported.

    Each chunk of the model (one, or several with `virtualPipeline`) sees every micro-batch once.
    """
    batches = list(batches)
    longest = max(len(batch.tokens) for batch in batches)
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(batches),
        seq_length=longest,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
