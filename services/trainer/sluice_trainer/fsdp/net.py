"""A model of transformers that gives numbers of response tokens instead of logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sluice_trainer.fsdp.families import backbone, can_pack, final_transform
from sluice_trainer.fsdp.row import row
from sluice_trainer.step.divergence import TeacherDivergence
from sluice_trainer.step.head import Head, score_tokens
from sluice_trainer.step.logits import TokenNumbers, log_probs_and_entropies
from sluice_trainer.step.packing import MicroBatch

Numbers = Callable[["Net", MicroBatch], Tensor]


class Net(nn.Module):
    """model: an `AutoModelForCausalLM`, or with a head of one number.

    All that touches parameters goes through a call, for FSDP gathers them around it.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.final = final_transform(model.config.get_text_config())
        self.packs = can_pack(model)
        """True where several sequences may lie in one row."""

    def forward(self, batch: MicroBatch, numbers: Numbers) -> Tensor:
        return numbers(self, batch)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[r, h] states before the output layer, at the places that predict response tokens."""
        attention = self.model.config._attn_implementation
        output = backbone(self.model)(batch.tokens[None], **batch.packing.arguments(attention))
        states: Tensor = output.last_hidden_state[0]
        return states.index_select(0, batch.predicting)

    @property
    def head(self) -> nn.Linear:
        layer: nn.Linear = self.model.get_output_embeddings()
        return layer

    def output(self, *, fp32: bool) -> Head:
        """The output layer, without what the family does to its logits. Inside of a call."""
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
    """[2, r] log-probs and entropies of the response tokens, or other `numbers`.

    With `teacher_divergence`, and a batch that has a teacher's hidden states, [4, r]: divergence
    and reverse KL as well. fp32_head: as `Head.float32`.
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

    def of_targets(net: Net, batch: MicroBatch) -> Tensor:
        teacher_hidden = (
            None if batch.teacher_hidden is None else batch.teacher_hidden.to(batch.targets.device)
        )
        head = net.output(fp32=fp32_head)
        return score_tokens(score, net.hidden(batch), head, batch.targets, teacher_hidden)

    result: Tensor = net(batch, of_targets)
    return result


def forward_values(net: Net, batch: MicroBatch) -> Tensor:
    """[1, r] values of a critic.

    A token's value is that of the state in which it was chosen: it comes from the place that
    predicts the token.
    """
    result: Tensor = net(batch, _values)
    return result


def _values(net: Net, batch: MicroBatch) -> Tensor:
    # No view: FSDP's hook on the output would be lost with the next operation in place.
    values: Tensor = net.head(net.hidden(batch)).squeeze(-1)[None].float()
    return values.clone()


def forward_hidden(net: Net, batch: MicroBatch) -> Tensor:
    """[r, h] hidden states before the output layer."""
    result: Tensor = net(batch, Net.hidden)
    return result


def forward_plain(net: Net, batch: MicroBatch, *, sequences: list[Tensor]) -> Tensor:
    """[1, r] log-probs by transformers alone: its own logits, one sequence at a time.

    sequences: the members of `batch`, all tokens of each, [t] int64.
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
