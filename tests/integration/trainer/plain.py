"""Reference backend in plain transformers and torch: one process, one sequence, no packing.

Other backends are compared with it. They share only the loss and its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from sluice.api import Optimizer, RLJobSpec
from sluice.engines.protocol import StackName
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.batch.sequences import Sequence, TrainSequence, samples_of
from sluice_trainer.checkpoint.checkpoint_directory import Author
from sluice_trainer.checkpoint.checkpoint_writer import CollectPart
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.fsdp.nf4 import BLOCK, dequantized, packed
from sluice_trainer.lora.initial import initial_a
from sluice_trainer.memory.offload import Offload
from sluice_trainer.policy import critic
from sluice_trainer.policy.learning_policy import LearningPolicy
from sluice_trainer.step.learner import Learner
from sluice_trainer.step.logits import TokenNumbers, energies, log_probs_and_entropies
from sluice_trainer.step.packing import Forward, MicroBatch, packed_row, with_loss
from sluice_trainer.step.results import Loss, StepResult
from tests.integration.trainer import tiny

CPU = torch.device("cpu")


class Lengths:
    """A minimal layout of a row: lengths and positions of its sequences."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = tuple(lengths)
        self.positions = torch.cat([torch.arange(length) for length in lengths])


def forward(model: Any, batch: MicroBatch, *, temperature: float, numbers: TokenNumbers) -> Tensor:
    """Return [k, r] numbers of `PLAIN`, computed from the logits of each sequence."""
    rows, targets = [], list(torch.split(batch.targets, list(batch.response_lengths)))
    for tokens, target in zip(_sequences(batch), targets, strict=True):
        logits = model(input_ids=tokens[None]).logits[0, len(tokens) - len(target) :]
        log_p = torch.log_softmax(logits.float() / temperature, -1)
        rows.append(torch.stack(PLAIN[numbers](log_p, target)))
    return torch.cat(rows, dim=1)


def plain_log_probs_and_entropies(log_p: Tensor, target: Tensor) -> list[Tensor]:
    chosen = log_p.gather(-1, target[:, None]).squeeze(-1)
    return [chosen, -(log_p.exp() * log_p).sum(-1)]


def plain_energies(log_p: Tensor, target: Tensor) -> list[Tensor]:
    """Return the squared norm of the gradient of the target's log-prob by the logits."""
    one_hot = torch.nn.functional.one_hot(target, log_p.shape[-1])
    return [(one_hot - log_p.exp()).square().sum(-1)]


# (log-probs of all words [n, words], targets [n]) -> what the backends compute in one pass.
PLAIN: dict[TokenNumbers, Callable[[Tensor, Tensor], list[Tensor]]] = {
    log_probs_and_entropies: plain_log_probs_and_entropies,
    energies: plain_energies,
}


def forward_values(model: Any, batch: MicroBatch) -> Tensor:
    """Return [1, r] values: a head on the state before each response token."""
    rows = []
    for tokens, length in zip(_sequences(batch), batch.response_lengths, strict=True):
        hidden = model.decoder(input_ids=tokens[None]).last_hidden_state[0]
        rows.append(model.score(hidden).squeeze(-1)[len(tokens) - length :])
    return torch.cat(rows)[None]


def _sequences(batch: MicroBatch) -> list[Tensor]:
    return list(torch.split(batch.tokens, list(batch.packing.lengths)))


class WithValues(torch.nn.Module):
    """A language model's decoder with a value head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        wrapped = hasattr(model, "get_base_model")  # by PEFT
        self.model = model
        self.decoder = (model.get_base_model() if wrapped else model).model
        self.score = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.score.weight)


def base_model(directory: Path, spec: RLJobSpec) -> Any:
    """The model without adapters, with the weights that a quantized base encodes."""
    model = tiny.hf_model(directory)
    lora = spec.trainer.lora
    if lora and lora.quantize_base:
        for layer in model.model.layers.modules():
            if isinstance(layer, torch.nn.Linear) and layer.in_features % BLOCK == 0:
                layer.weight.data = dequantized(packed(layer.weight.data), torch.float32)
    return model


def adapted(model: Any, spec: RLJobSpec) -> Any:
    """The model with PEFT's adapters, if the job trains some."""
    lora = spec.trainer.lora
    if lora is None:
        return model
    import peft

    targets = [name for name in lora.target_modules if name != "experts"]
    initial: Any = lora.initialise if lora.pissa else True
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rank_stabilized,
        target_modules="all-linear" if "all-linear" in targets else targets,
        target_parameters=["experts.gate_up_proj", "experts.down_proj"] if lora.experts else None,
        exclude_modules=lora.exclude_modules or None,
        task_type="CAUSAL_LM",
        init_lora_weights=initial,
    )
    model = peft.get_peft_model(model, config)
    if lora.pissa:
        return model
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
            drawn = initial_a(module, parameter.shape[0], parameter.shape[1], spec.data.seed)
            parameter.data.copy_(drawn)
    return model


class PlainLearner(Learner):
    def __init__(self, model: Any, spec: RLJobSpec, rates: Optimizer, total: int | None) -> None:
        super().__init__(spec, rates, total)
        self.model = model
        betas = (rates.beta1, rates.beta2)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), betas=betas, eps=rates.eps, weight_decay=0.0
        )

    @property
    def modules(self) -> list[torch.nn.Module]:
        return [self.model]

    def micro_batches(self, shard: Seq[TrainSequence], totals: BatchTotals) -> list[MicroBatch]:
        aggregation = self._spec.algorithm.loss_aggregation
        whole = self._spec.algorithm.paired
        units = samples_of(shard) if whole else [[i] for i in range(len(shard))]
        rows = [packed_row(shard, unit, CPU, Lengths) for unit in units]
        return [with_loss(row, shard, totals, aggregation, CPU) for row in rows]

    @torch.no_grad()
    def compute(self, batches: list[MicroBatch], forward: Forward) -> list[list[Tensor]]:
        return [batch.split(forward(self.model, batch)[0]) for batch in batches]

    def score(self, shard: Seq[Sequence], forward: Forward) -> list[Tensor]:
        rows = [packed_row(shard, [i], CPU, Lengths) for i in range(len(shard))]
        return [values for (values,) in self.compute(rows, forward)]

    @torch.no_grad()
    def measure(self, batches: list[MicroBatch], forward: Forward, loss: Loss) -> dict[str, float]:
        raise NotImplementedError

    def _update(self, batches: list[MicroBatch], forward: Forward, loss: Loss) -> StepResult:
        self.optimizer.zero_grad()
        objectives = []
        for batch in batches:
            assert batch.loss is not None
            objectives.append(loss(forward(self.model, batch), batch.loss))
        torch.stack([objective.loss for objective in objectives]).sum().backward()
        limit = self._rates.clip_grad
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        first = objectives[0]
        sums = {name: float(sum(o.sums[name].double() for o in objectives)) for name in first.sums}
        maxima = {name: float(max(o.maxima[name] for o in objectives)) for name in first.maxima}
        return StepResult(sums, maxima, float(norm))


class PlainFrozen:
    def __init__(self, spec: RLJobSpec, model_dir: Path) -> None:
        self._learner = PlainLearner(
            base_model(model_dir, spec), spec, spec.trainer.optimizer, None
        )
        self._forward = partial(
            forward, temperature=spec.temperature, numbers=log_probs_and_entropies
        )

    @property
    def modules(self) -> list[torch.nn.Module]:
        return self._learner.modules

    def log_probs(self, shard: Seq[Sequence]) -> list[Tensor]:
        return self._learner.score(shard, self._forward)

    def with_hidden_states(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        raise NotImplementedError

    def teacher_divergence(self, distillation: object) -> None:
        return None


class Plain(LearningPolicy):
    """transformers' model with AdamW, and the steps that all backends share."""

    def __init__(
        self,
        spec: RLJobSpec,
        *,
        model_dir: Path,
        timeout: timedelta,
        total_steps: int | None = None,
        author: Author | None = None,
    ) -> None:
        super().__init__(spec, model_dir, author)
        self.ranks = Ranks(0, 1, 0, 1, None)
        rates, settings = spec.trainer.optimizer, spec.algorithm.value_model
        self._model = adapted(base_model(model_dir, spec), spec)
        self._learner = PlainLearner(self._model, spec, rates, spec.trainer.steps)
        compares = spec.algorithm.needs_reference
        self._reference = PlainFrozen(spec, model_dir) if compares else None
        self._teacher = None
        self.critic = None
        if settings:
            model = WithValues(adapted(base_model(model_dir, spec), spec))
            values = PlainLearner(model, spec, critic.rates(settings, rates), spec.trainer.steps)
            self.critic = critic.CriticModel(settings, values, forward_values)
        no_memory = dict.fromkeys(("weights", "frozen", "gradients", "optimizer"), tuple)
        self._offload = Offload("none", **no_memory, before=lambda: None)

    @property
    def _forward_values(self) -> Forward:
        return forward_values

    def _forward_of(self, numbers: TokenNumbers) -> Forward:
        return partial(forward, temperature=self.spec.temperature, numbers=numbers)

    def _collectors(self, state: dict[str, Any]) -> dict[str, CollectPart]:
        raise NotImplementedError

    def _load(self, directory: Path, step: int) -> dict[str, Any]:
        raise NotImplementedError

    def adapter_tensors(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def hf_tensors(
        self, stack_name: StackName | None = None, receivers: frozenset[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        model = self._model.merge_and_unload() if self.spec.trainer.lora else self._model
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        yield from revert_weight_conversion(model, tensors).items()
