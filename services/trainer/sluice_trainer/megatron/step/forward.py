"""Forward passes of Megatron's model and schedule: log-probs and entropies, or values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from sluice_trainer.megatron.adaptations import megatron_device
from sluice_trainer.megatron.parallel import from_last_stage
from sluice_trainer.step.divergence import TeacherDivergence
from sluice_trainer.step.head import Head, score_tokens
from sluice_trainer.step.logits import TokenNumbers, log_probs_and_entropies
from sluice_trainer.step.packing import Forward, MicroBatch


@dataclass(frozen=True, slots=True)
class OutputContext:
    """The current micro-batch and settings for the output hook.

    Attributes
    ----------
    batch
        The micro-batch.
    temperature
        Sampling temperature.
    vocab
        Size of the vocabulary without padding.
    fp32_head
        Compute the output layer in float32.
    numbers
        Function of logits and targets.
    teacher_divergence
        Comparison with a teacher; None: no comparison.

    """

    batch: MicroBatch
    temperature: float
    vocab: int
    fp32_head: bool = False
    numbers: TokenNumbers = log_probs_and_entropies
    teacher_divergence: TeacherDivergence | None = None


def statistics(
    logits: Tensor, targets: Tensor, teacher_hidden: Tensor | None, request: OutputContext
) -> Tensor:
    """Return the `numbers` of softmax(logits / temperature), [2, n] float32.

    With a teacher also the results of `teacher_divergence`: [4, n].

    Parameters
    ----------
    logits
        [n, local vocab], this tensor-parallel rank's share, with padded columns.
    targets
        [n] int64.
    teacher_hidden
        The teacher's hidden states at the same positions, [n, h].
    request
        Micro-batch and settings.

    """
    group = parallel_state.get_tensor_model_parallel_group()
    shared = group if group.size() > 1 else None
    columns, scale = logits.shape[-1], 1.0 / request.temperature
    start = group.rank() * columns
    held = max(min(columns, request.vocab - start), 1)
    local = logits if held == columns else logits[:, :held]
    scores = request.numbers(local, targets, scale=scale, start=start, group=shared)
    if request.teacher_divergence is None or teacher_hidden is None:
        return torch.stack(scores)
    teacher_scores = request.teacher_divergence(
        local, teacher_hidden, columns=columns, scale=scale, group=shared
    )
    return torch.stack((*scores, *teacher_scores))


def _output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: OutputContext,
    **_: Any,
) -> Tensor:
    """GPTModel's hook after the last layer: [k, r] statistics instead of logits."""
    batch = context.batch
    hidden = _predicting_states(hidden_states, output_layer.sequence_parallel, batch).squeeze(1)
    # Each rank's part of the vocabulary yields a part of the gradient of the hidden states, which
    # all ranks share.
    hidden = copy_to_tensor_model_parallel_region(hidden)
    weight = output_weight if output_weight is not None else output_layer.weight
    layer = Head(weight, float32=context.fp32_head)
    score = partial(statistics, request=context)
    teacher_hidden = (
        None if batch.teacher_hidden is None else batch.teacher_hidden.to(hidden.device)
    )
    return _from_all_shares(
        score_tokens(score, hidden, layer, batch.targets, teacher_hidden), batch=batch
    )


def _from_all_shares(scores: Tensor, *, batch: MicroBatch) -> Tensor:
    """Return [k, r], the scores of all context-parallel ranks, on each of them.

    It sums over ranks, each with zeros at the positions of the others. Each rank's gradient is its
    own part: every rank computes the same loss, and gradients of weights are summed over ranks
    afterwards. scores: [k, own].
    """
    if batch.local_positions is None:
        return scores
    everywhere = scores.new_zeros(len(scores), sum(batch.response_lengths)).index_copy(
        1, batch.local_positions, scores
    )
    group = parallel_state.get_context_parallel_group()
    result: Tensor = reduce_from_tensor_model_parallel_region(everywhere, group=group)
    return result


def _predicting_states(hidden_states: Tensor, sequence_parallel: bool, batch: MicroBatch) -> Tensor:
    """Return the hidden states that predict response tokens, [r, 1, h], on all tensor ranks."""
    if sequence_parallel:
        # The next operation treats its input as complete, so each rank gets the whole gradient:
        # only split it here.
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False
        )
    return hidden_states.index_select(0, batch.predicting)


def _value_processor(
    *, hidden_states: Tensor, output_layer: Any, context: MicroBatch, **_: Any
) -> Tensor:
    """GPTModel's hook after the last layer of a critic: [1, r] values."""
    hidden = _predicting_states(hidden_states, output_layer.sequence_parallel, context)
    return _from_all_shares(output_layer(hidden).float().view(1, -1), batch=context)


def forward(
    model: Any,
    batch: MicroBatch,
    *,
    temperature: float,
    vocab: int,
    fp32_head: bool = False,
    numbers: TokenNumbers = log_probs_and_entropies,
    teacher_divergence: TeacherDivergence | None = None,
) -> Tensor:
    """Return [2, r] log-probs and entropies of the response tokens, or other `numbers`.

    With `teacher_divergence`, and a batch with the teacher's hidden states, [4, r]: divergence and
    reverse KL as well. Before the last pipeline stage the result is hidden states.

    Parameters
    ----------
    model
        A chunk of the model.
    batch
        The micro-batch.
    temperature
        Sampling temperature.
    vocab
        Size of the vocabulary without padding.
    fp32_head
        Compute the output layer in float32.
    numbers
        Function of logits and targets.
    teacher_divergence
        Comparison with a teacher; None: no comparison.

    """
    request = OutputContext(batch, temperature, vocab, fp32_head, numbers, teacher_divergence)
    return _forward(model, batch, _output_processor, request)


def forward_values(model: Any, batch: MicroBatch) -> Tensor:
    """Return [1, r] values of a critic on the last pipeline stage, hidden states before it.

    The value of a token is that of the state in which it was chosen, so it is read at the position
    that predicts the token.
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
    """GPTModel's hook after the last layer of a teacher: [own, h] hidden states."""
    return _predicting_states(hidden_states, output_layer.sequence_parallel, context).squeeze(1)


def head(model: Any, *, fp32: bool) -> Head:
    """Return a model's output layer with this tensor-parallel rank's share of the vocabulary.

    Only on the last pipeline stage.
    """
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return Head(weight, float32=fp32)


@megatron_device()
@torch.no_grad()
def compute(chunks: list[Any], batches: list[MicroBatch], forward: Forward) -> list[list[Tensor]]:
    """Return the first value of the forward pass, per micro-batch and member, without gradients.

    [response] float32 on the CPU. Collective over the model-parallel group.
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
    """Return the hidden states that predict response tokens, [own, h] on the CPU. Collective.

    With context parallelism they are those of this rank's share. Empty before the last pipeline
    stage.
    """

    def step(data: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Any]:
        batch = next(data)
        return _forward(
            module, batch, _hidden_processor, batch
        ), lambda output, non_loss_data=False: output.cpu()

    states: list[Tensor] = run_schedule(step, chunks, batches, forward_only=True)
    return states


def run_schedule(
    step: Any, chunks: list[Any], batches: Iterable[MicroBatch], *, forward_only: bool
) -> Any:
    """Run Megatron's forward-backward schedule over micro-batches; returns the steps' reports.

    Each chunk of the model (one, or several with `virtualPipeline`) processes every micro-batch
    once.
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
