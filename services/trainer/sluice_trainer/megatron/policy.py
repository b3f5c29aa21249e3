"""The Megatron `Backend`.

Model, optimizer, reference, teacher and critic of one trainer process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from sluice.api import RLJobSpec
from sluice.api.groups.algorithm import Critic as CriticSettings
from sluice.engines import engine_of
from sluice.engines.protocol import StackName
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.checkpoint import checkpoint_writer
from sluice_trainer.checkpoint.checkpoint_directory import Author
from sluice_trainer.checkpoint.checkpoint_writer import CollectPart
from sluice_trainer.lora.checkpoint import AdapterPart, read_part
from sluice_trainer.lora.pissa import joined
from sluice_trainer.megatron import frozen_model, parallel
from sluice_trainer.megatron.adaptations import checkpoint_writer_in_process
from sluice_trainer.megatron.checkpoints import checkpoint
from sluice_trainer.megatron.checkpoints.adapter_state import adapter_state, set_adapter_state
from sluice_trainer.megatron.huggingface import mapping
from sluice_trainer.megatron.lora import Adapters
from sluice_trainer.megatron.model import replay
from sluice_trainer.megatron.model.building import build, load_initial
from sluice_trainer.megatron.model.config import check_mixture
from sluice_trainer.megatron.step.forward import forward, forward_values
from sluice_trainer.megatron.step.host_optimizer import HostOptimizer
from sluice_trainer.megatron.step.learner import MegatronLearner, model_config
from sluice_trainer.megatron.step.optimizer import gradients, parts
from sluice_trainer.megatron.step.routing_recorder import RoutingRecorder
from sluice_trainer.memory.offload import Offload
from sluice_trainer.memory.staging import Staging
from sluice_trainer.model import deterministic
from sluice_trainer.model.huggingface_config import ModelShape, read_shape
from sluice_trainer.model.unsupported import check_tied
from sluice_trainer.policy import critic
from sluice_trainer.policy.learning_policy import LearningPolicy
from sluice_trainer.step.logits import TokenNumbers
from sluice_trainer.step.micro_batch_size import MicroBatchSize
from sluice_trainer.step.packing import Forward
from sluice_trainer.step.rates import steps_of_policy


class MegatronPolicy(LearningPolicy):
    """A Megatron model that computes log-probs and learns.

    Each process creates one, which joins the process group.
    """

    _learner: MegatronLearner

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
        if spec.trainer.deterministic:
            deterministic.enable()
        parallel.initialize(spec.trainer.parallelism, seed=spec.data.seed, timeout=timeout)
        self.ranks = parallel.ranks(timeout)
        self._call_init_hook()
        self.shape = read_shape(model_dir)
        if spec.algorithm.trains_reward_model:
            self.shape = replace(self.shape, tied=False, value_head=True)
        check_tied(
            self.shape.tied,
            self.shape.model_type,
            engine_of(spec).layout.untied,
            spec.rollout.engine,
        )
        config = model_config(spec, self.shape)
        chunks = build(config, self.shape)
        if spec.trainer.routing_replay != "none":
            check_mixture(self.shape)
            replay.install(chunks, spec.trainer.routing_replay)
        base = None if spec.model.init == "random" else model_dir
        load_initial(chunks, self.shape, base, spec.data.seed)
        total_steps, critic = total_steps or spec.trainer.steps, spec.algorithm.value_model
        # The schedule excludes the steps in which only the critic learns.
        own_steps = steps_of_policy(total_steps, critic)
        size, rates = self._micro_batch_size, spec.trainer.optimizer
        adapters = _adapters(spec, chunks, self.shape, base)
        self._adapter = adapters.config(model_dir) if adapters else None
        self._learner = MegatronLearner(chunks, config, spec, size, rates, own_steps, adapters)
        self._reference = frozen_model.reference(spec, size, model_dir, self._learner)
        self._teacher = frozen_model.teacher(spec, size, self.shape, model_dir)
        self.critic = _critic(spec, size, critic, model_dir, total_steps) if critic else None
        scorers = [model.chunks for model in (self._reference, self._teacher) if model]
        frozen = [chunks for chunks in scorers if chunks is not self._learner.chunks]
        self._offload = _offload(
            spec.trainer.offloaded, list(self._parts.values()), list(chain(*frozen))
        )
        self._staging = {name: Staging() for name in self._learners}
        # Megatron collects garbage at every save, and would search everything that imports have
        # left: 0.25 s.
        gc.freeze()

    def _forward_of(self, numbers: TokenNumbers) -> Forward:
        return partial(
            forward,
            temperature=self.spec.temperature,
            vocab=self.shape.vocab,
            fp32_head=self.spec.model.fp32_lm_head,
            numbers=numbers,
            teacher_divergence=self._teacher_divergence,
        )

    @property
    def _forward_values(self) -> Forward:
        return forward_values

    def _with_old_log_probs(self, shard: Seq[TrainSequence]) -> list[TrainSequence]:
        """Also keep the experts that this pass chooses, with `routingReplay: trainer`."""
        if self.spec.trainer.routing_replay != "trainer" or self.shape.experts is None:
            return super()._with_old_log_probs(shard)
        self._before_log_probs("policy")
        recorder = RoutingRecorder(self._forward, self.shape.experts.count)
        old = self._learner.score(shard, recorder)
        return [
            replace(s, old_log_probs=log_probs, experts=experts)
            for s, log_probs, experts in zip(shard, old, recorder.experts(len(shard)), strict=True)
        ]

    def hf_tensors(
        self, stack_name: StackName | None = None, receivers: frozenset[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        chunks = [chunk.module for chunk in self._learner.chunks]
        adapters = self._learner.adapters
        merged = adapters.merged if adapters else None
        return mapping.hf_tensors(chunks, self.shape, stack_name, receivers, merged)

    def adapter_tensors(self) -> dict[str, Tensor]:
        assert self._learner.adapters is not None
        adapters = self._learner.adapters
        return joined(adapters.tensors(), adapters.initial())

    @property
    def _parts(self) -> dict[str, MegatronLearner]:
        return {
            name: learner
            for name, learner in self._learners.items()
            if isinstance(learner, MegatronLearner)
        }

    @property
    def _whole_models(self) -> checkpoint.Parts:
        return {name: (part.chunks, part.optimizer) for name, part in self._parts.items()}

    def _collectors(self, state: dict[str, Any]) -> dict[str, CollectPart]:
        if self._adapter is None:
            return checkpoint.collectors(self._whole_models, state, self._staging)
        return {name: partial(self._collect_adapter, name, state) for name in self._parts}

    def _collect_adapter(self, name: str, state: dict[str, Any], directory: Path) -> AdapterPart:
        part = self._parts[name]
        assert self._adapter is not None
        assert part.adapters is not None
        trained = adapter_state(part.adapters, part.optimizer, self.ranks)
        return AdapterPart(trained, self._adapter, state, directory, self.ranks)

    def _writer_messages(self) -> AbstractContextManager[list[str]]:
        return checkpoint_writer_in_process()

    def _load(self, directory: Path, step: int) -> dict[str, Any]:
        if self._adapter is None:
            return checkpoint.load(directory, step, self._whole_models, self.ranks)
        final = checkpoint_writer.verified(directory, step, self._parts, self.ranks)
        states = [self._load_adapter(final / name, part) for name, part in self._parts.items()]
        return states[0]

    def _load_adapter(self, directory: Path, part: MegatronLearner) -> dict[str, Any]:
        assert self._adapter is not None
        assert part.adapters is not None
        adapters = part.adapters
        state, user_state = read_part(
            directory, self._adapter, adapters.shapes, adapters.initial_names
        )
        set_adapter_state(adapters, part.optimizer, state)
        return user_state


def _adapters(
    spec: RLJobSpec, chunks: list[Any], shape: ModelShape, base: Path | None
) -> Adapters | None:
    """Add the adapters of `trainer.lora` to a model with its initial weights, if there are any.

    base: checkpoint of these weights; None: they are drawn.
    """
    lora = spec.trainer.lora
    return Adapters(chunks, shape, lora, spec.data.seed, base) if lora else None


def _critic(
    spec: RLJobSpec,
    size: MicroBatchSize,
    settings: CriticSettings,
    model_dir: Path,
    total_steps: int | None,
) -> critic.CriticModel:
    """Return the critic at version 0: from `critic.modelPath`, or with the policy's first weights.

    A checkpoint of a language model has no value head, which then starts at 0, and so do all
    values.
    """
    directory = Path(settings.model_path) if settings.model_path else model_dir
    shape = replace(read_shape(directory), tied=False, value_head=True)
    config = model_config(spec, shape)
    chunks = build(config, shape)
    drawn = settings.model_path is None and spec.model.init == "random"
    base = None if drawn else directory
    load_initial(chunks, shape, base, spec.data.seed)
    rates = critic.rates(settings, spec.trainer.optimizer)
    adapters = _adapters(spec, chunks, shape, base)
    learner = MegatronLearner(chunks, config, spec, size, rates, total_steps, adapters)
    return critic.CriticModel(settings, learner, forward_values)


def _offload(
    what: Literal["none", "optimizer", "all"],
    learners: Sequence[MegatronLearner],
    frozen: list[Any],
) -> Offload:
    """Return the memory that `trainer.offload` may move to the host.

    frozen: chunks of models that only score (reference, teacher).
    """

    def let_go() -> None:
        for learner in learners:
            learner.optimizer.zero_grad()  # the optimizer's copies of gradients

    return Offload(
        what,
        weights=partial(_weights, learners),
        frozen=partial(_tensors_of, frozen),
        gradients=partial(_gradients, learners),
        optimizer=partial(_optimizer_state, learners),
        before=let_go,
    )


def _weights(learners: Iterable[MegatronLearner]) -> Iterator[Tensor]:
    for learner in learners:
        yield from _tensors_of([chunk.module for chunk in learner.chunks])


def _tensors_of(models: Iterable[Any]) -> Iterator[Tensor]:
    for model in models:
        yield from model.parameters()
        yield from model.buffers()


def _gradients(learners: Iterable[MegatronLearner]) -> Iterator[Tensor]:
    for learner in learners:
        yield from gradients(learner.chunks)


def _optimizer_state(learners: Iterable[MegatronLearner]) -> Iterator[Tensor]:
    """Yield moments and, in bf16, float32 weights, except those already in host memory.

    In float32 the optimizer's weights are views of the model's.
    """
    learners = list(learners)
    weights = {tensor.untyped_storage()._cdata for tensor in _weights(learners)}
    for learner in learners:
        for part in parts(learner.optimizer):
            masters = [p for group in part.optimizer.param_groups for p in group["params"]]
            if isinstance(part, HostOptimizer):
                masters = [master for master in masters if not part.on_host(master)]
            states = [part.optimizer.state.get(master, {}).values() for master in masters]
            held = [tensor for tensor in (*chain(*states), *masters) if isinstance(tensor, Tensor)]
            # Adam's step is a single number and stays.
            large = [tensor for tensor in held if tensor.dim()]
            yield from (t for t in large if t.untyped_storage()._cdata not in weights)
