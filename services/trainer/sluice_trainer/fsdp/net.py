"""A transformers model that returns values of response tokens instead of logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sluice_trainer.fsdp import mtp, vision
from sluice_trainer.fsdp.families import backbone, can_pack, final_transform
from sluice_trainer.fsdp.row import row
from sluice_trainer.fsdp.row_share import RowShare, check_shareable
from sluice_trainer.step.divergence import TeacherDivergence
from sluice_trainer.step.head import Head, score_tokens
from sluice_trainer.step.logits import TokenNumbers, log_probs_and_entropies
from sluice_trainer.step.packing import MicroBatch

Numbers = Callable[["Net", MicroBatch], Tensor]


class Net(nn.Module):
    """Wrapper of a language model, of a vision-language model, or of one with a value head.

    Everything that reads parameters must run inside a call of this module, because FSDP gathers
    parameters around calls.

    Parameters
    ----------
    model
        A model of transformers.
    share
        This rank's position among those that share rows.

    """

    def __init__(self, model: Any, share: RowShare) -> None:
        super().__init__()
        self.model = model
        self.final = final_transform(model.config.get_text_config())
        # True if a row may hold several sequences.
        self.packs = can_pack(model)
        check_shareable(model, share.size, packs=self.packs)
        self.share = share
        self.tower = vision.Tower(model) if vision.has_vision(model) else None

    def forward(self, batch: MicroBatch, numbers: Numbers) -> Tensor:
        return numbers(self, batch)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Return the states before the output layer that predict this rank's response tokens.

        [r, h], or of the tokens that it has of a shared row.
        """
        return self.states(batch).index_select(0, batch.predicting)

    def states(self, batch: MicroBatch) -> Tensor:
        """Return the states before the output layer of this rank's tokens, [t, h]."""
        attention = self.model.config._attn_implementation
        if self.tower is not None:
            return vision.hidden_states(
                self.model, self.tower, batch.tokens, batch.packing, attention
            )
        output = backbone(self.model)(batch.tokens[None], **batch.packing.arguments(attention))
        states: Tensor = output.last_hidden_state[0]
        return states

    @property
    def mtp(self) -> mtp.Mtp | None:
        """The layer that predicts a further token, if it is trained."""
        return mtp.layer_of(self.model)

    @property
    def head(self) -> nn.Linear:
        layer: nn.Linear = self.model.get_output_embeddings()
        return layer

    def output(self, *, fp32: bool) -> Head:
        """Return the output layer without the family's logit transform. Only inside a call."""
        layer = self.head
        return Head(layer.weight, layer.bias, fp32)


def forward(
    net: Net,
    batch: MicroBatch,
    *,
    temperature: float,
    fp32_head: bool = False,
    numbers: TokenNumbers = log_probs_and_entropies,
    teacher_divergence: TeacherDivergence | None = None,
) -> Tensor:
    """Return [2, r] log-probs and entropies of the response tokens, or other `numbers`.

    Parameters
    ----------
    net
        The sharded model.
    batch
        A row of packed sequences.
    temperature
        Sampling temperature.
    fp32_head
        Compute the output layer in float32.
    numbers
        Function of logits and targets.
    teacher_divergence
        Comparison with a teacher. If the batch has the teacher's hidden states, the result is [4,
        r], with divergence and reverse KL.

    With gradients, a model that trains its layer for further tokens adds two rows (`mtp.scores`).

    """
    scale = 1.0 / temperature

    def score(product: Tensor, targets: Tensor, teacher_hidden: Tensor | None) -> Tensor:
        logits = net.final(product)
        scores = numbers(logits, targets, scale=scale)
        if teacher_divergence is None or teacher_hidden is None:
            return torch.stack(scores)
        words = logits.shape[-1]
        divergences = teacher_divergence(
            logits, teacher_hidden, columns=words, scale=scale, group=None
        )
        return torch.stack((*scores, *divergences))

    def score_targets(net: Net, batch: MicroBatch) -> Tensor:
        teacher_hidden = (
            None if batch.teacher_hidden is None else batch.teacher_hidden.to(batch.targets.device)
        )
        head = net.output(fp32=fp32_head)
        states = net.states(batch)
        hidden = states.index_select(0, batch.predicting)
        scores = score_tokens(score, hidden, head, batch.targets, teacher_hidden)
        if net.mtp is not None and torch.is_grad_enabled():
            further = mtp.scores(net.model, batch, states, head, net.final, scale)
            scores = torch.cat((scores, further))
        return _from_all_shares(net, batch, scores)

    return _by_rows(net, batch, score_targets)


def forward_values(net: Net, batch: MicroBatch) -> Tensor:
    """Return [1, r] values of a critic.

    The value of a token is that of the state in which it was chosen, so it is read at the position
    that predicts the token.
    """
    return _by_rows(net, batch, _values)


def _by_rows(net: Net, batch: MicroBatch, numbers: Numbers) -> Tensor:
    """Return [k, r] numbers of the response tokens."""
    return torch.cat([net(row, numbers) for row in batch.rows or (batch,)], dim=1)


def _values(net: Net, batch: MicroBatch) -> Tensor:
    # A view would lose FSDP's hook on the output in the next in-place operation.
    values: Tensor = net.head(net.hidden(batch)).squeeze(-1)[None].float()
    return _from_all_shares(net, batch, values.clone())


def _from_all_shares(net: Net, batch: MicroBatch, scores: Tensor) -> Tensor:
    """Return [k, r], the scores of all ranks that share the row, on each of them."""
    if batch.local_positions is None:
        return scores
    whole = scores.new_zeros(len(scores), sum(batch.response_lengths))
    return net.share.sum(whole.index_copy(1, batch.local_positions, scores))


def forward_hidden(net: Net, batch: MicroBatch) -> Tensor:
    """Return [r, h] hidden states before the output layer, of this rank's response tokens."""
    result: Tensor = net(batch, Net.hidden)
    return result


def forward_plain(net: Net, batch: MicroBatch, *, sequences: list[Tensor]) -> Tensor:
    """Return [1, r] log-probs of transformers' own logits, one sequence at a time.

    sequences: all tokens of each member of `batch`, [t] int64.
    """
    result: Tensor = net(batch, partial(_plain, sequences=sequences))
    return result


def _plain(net: Net, batch: MicroBatch, *, sequences: list[Tensor]) -> Tensor:
    rows = []
    for tokens, length in zip(sequences, batch.response_lengths, strict=True):
        alone = _alone(tokens[:-1], net.model.config._attn_implementation)
        logits = net.model(tokens[None, :-1], **alone).logits[0]
        log_p = torch.log_softmax(logits.float(), -1)
        rows.append(log_p.gather(-1, tokens[1:, None]).squeeze(-1)[-length:])
    return torch.cat(rows)[None]


def _alone(tokens: Tensor, attention: str) -> dict[str, Any]:
    return row([len(tokens)], tokens.device).arguments(attention)
