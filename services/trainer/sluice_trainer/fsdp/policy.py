"""The FSDP2 `Backend`: model, optimizer, reference, teacher and critic of one trainer process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from transformers import __version__

from sluice.api import RLJobSpec
from sluice.api.groups.algorithm import Critic as CriticSettings
from sluice.engines import engine_of
from sluice.engines.protocol import StackName
from sluice_trainer.checkpoint import checkpoint_writer
from sluice_trainer.checkpoint.checkpoint_directory import Author
from sluice_trainer.checkpoint.checkpoint_writer import CheckpointPart, CollectPart
from sluice_trainer.distributed.device import compute_dtype
from sluice_trainer.distributed.process_group import join
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.fsdp import checkpoint, export, frozen_model
from sluice_trainer.fsdp.fake_quantize import fake_quantize
from sluice_trainer.fsdp.learner import ShardedLearner
from sluice_trainer.fsdp.loading import Recipe
from sluice_trainer.fsdp.log_prob_check import check_log_probs
from sluice_trainer.fsdp.lora import adapter_config, initial_parameters, trained_parameters
from sluice_trainer.fsdp.net import Net, forward, forward_values
from sluice_trainer.fsdp.row_share import RowShare
from sluice_trainer.fsdp.sharding import build, gathered, local_shard, reshard
from sluice_trainer.fsdp.vision import check_positions
from sluice_trainer.lora.checkpoint import AdapterPart, read_part
from sluice_trainer.lora.files import shapes
from sluice_trainer.lora.pissa import joined
from sluice_trainer.memory.offload import Offload
from sluice_trainer.memory.staging import Staging
from sluice_trainer.model.huggingface_files import HEAD, Config, stored
from sluice_trainer.model.unsupported import UnsupportedModelError, check_tied
from sluice_trainer.policy import critic
from sluice_trainer.policy.learning_policy import LearningPolicy
from sluice_trainer.step.logits import TokenNumbers
from sluice_trainer.step.packing import Forward
from sluice_trainer.step.rates import steps_of_policy


class ShardedPolicy(LearningPolicy):
    """A transformers model that computes log-probs and learns.

    Each process creates one, which joins the process group.
    """

    _learner: ShardedLearner

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
        join(timeout)
        self._share = RowShare.of_process(spec.trainer.parallelism.context, timeout)
        self.ranks = Ranks.of_process(
            timeout,
            data_parallel_rank=dist.get_rank() // self._share.size,
            data_parallel_size=dist.get_world_size() // self._share.size,
        )
        self._call_init_hook()
        recipe = Recipe(
            model_dir,
            drawn=spec.model.init == "random",
            seed=spec.data.seed,
            compute=compute_dtype(spec.trainer.precision),
            trust_remote_code=spec.model.trust_remote_code,
            lora=spec.trainer.lora,
            vision=spec.trainer.trained_parts if spec.data.images else None,
            shares_rows=self._share.size > 1,
            values=spec.algorithm.trains_reward_model,
            mtp=spec.trainer.mtp is not None,
        )
        config = recipe.config()
        # The setting of the model that is built: of the whole, or of its language model alone.
        own = config.get_text_config() if recipe.vision is None else config
        tied = bool(own.tie_word_embeddings)
        check_tied(tied, config.model_type, engine_of(spec).layout.untied, spec.rollout.engine)
        self._compute = recipe.compute
        total_steps, settings = total_steps or spec.trainer.steps, spec.algorithm.value_model
        net = build(recipe, self.ranks, self._share, spec.trainer, learns=True)
        if not recipe.drawn:
            self._check_names(net.model)
        if spec.trainer.fake_quantize:
            fake_quantize(net.model, spec.rollout.precision)
        self._adapter = adapter_config(net.model, model_dir) if recipe.lora else None
        if not recipe.values:
            check_log_probs(net, recipe.compute, spec.data.seed)
        if net.tower is not None:
            check_positions(net.model)
        own_steps = steps_of_policy(total_steps, settings)
        size, rates = self._micro_batch_size, spec.trainer.optimizer
        self._learner = ShardedLearner(net, spec, size, self.ranks, rates, own_steps)
        self._reference = frozen_model.reference(spec, size, recipe, self.ranks, net)
        self._teacher = frozen_model.teacher(spec, size, recipe, self.ranks, self._share)
        self.critic = self._critic(settings, recipe, total_steps) if settings else None
        scorers = [model.net for model in (self._reference, self._teacher) if model]
        frozen = [scorer for scorer in scorers if scorer is not net]
        self._offload = _offload(spec.trainer.offloaded, list(self._parts.values()), frozen)
        self._staging = {name: Staging() for name in self._parts}

    def _check_names(self, model: Any) -> None:
        """Check that the checkpoint has the trained tensors, under the names of an export.

        Otherwise transformers has drawn them, or an export would have them twice. Only rank 0 reads
        a checkpoint. Collective.

        Raises
        ------
        UnsupportedModelError
            A tensor is missing, or transformers cannot restore its name.

        """
        problem = ""
        if self.ranks.rank == 0:
            with stored(self.model_dir) as source:
                strange = export.exported_names(model) - {*source.names, HEAD}
            if strange:
                problem = (
                    f"{self.model_dir} has no tensor {min(strange)}, which the model of "
                    f"transformers {__version__} has: fetch the checkpoint again; if it has older "
                    "names, load it with transformers, and train what save_pretrained writes"
                )
        if problem := self.ranks.broadcast(problem):
            raise UnsupportedModelError(problem)

    def _critic(
        self, settings: CriticSettings, policy: Recipe, total_steps: int | None
    ) -> critic.CriticModel:
        """Return the critic at version 0.

        From `critic.modelPath`, or with the policy's initial weights.
        """
        recipe = replace(policy, values=True, mtp=False)
        if settings.model_path:
            recipe = replace(recipe, directory=Path(settings.model_path), drawn=False)
        spec, size = self.spec, self._micro_batch_size
        net = build(recipe, self.ranks, self._share, spec.trainer, learns=True)
        rates = critic.rates(settings, spec.trainer.optimizer)
        learner = ShardedLearner(net, spec, size, self.ranks, rates, total_steps)
        return critic.CriticModel(settings, learner, forward_values)

    def _forward_of(self, numbers: TokenNumbers) -> Forward:
        return partial(
            forward,
            temperature=self.spec.temperature,
            fp32_head=self.spec.model.fp32_lm_head,
            numbers=numbers,
            teacher_divergence=self._teacher_divergence,
        )

    @property
    def _forward_values(self) -> Forward:
        return forward_values

    def hf_tensors(
        self, stack_name: StackName | None = None, receivers: frozenset[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors on all ranks, because FSDP2 gathers to all; `receivers` is ignored."""
        # Engines of a vision job have read a frozen tower from the checkpoint, unless there is none
        # or they have lost it with their memory while the trainer had the GPUs.
        lack_tower = self.spec.model.init == "random" or self.spec.trainer.colocate
        model, sees = self._learner.net.model, self._learner.net.tower is not None
        speculative = self.spec.rollout.speculative
        return export.hf_tensors(
            model,
            self._compute,
            stack_name,
            whole=sees and lack_tower,
            further=speculative is not None and speculative.algorithm == "mtp",
        )

    def _own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        # With drawn weights there is no checkpoint to copy the other parts from.
        drawn = self.spec.model.init == "random"
        return export.hf_tensors(self._learner.net.model, self._compute, whole=drawn)

    def _own_config(self) -> Config:
        return export.own_config(self._learner.net.model, self.model_dir)

    @property
    def _parts(self) -> dict[str, ShardedLearner]:
        return {
            name: learner
            for name, learner in self._learners.items()
            if isinstance(learner, ShardedLearner)
        }

    def _collectors(self, state: dict[str, Any]) -> dict[str, CollectPart]:
        def collect(name: str, directory: Path) -> CheckpointPart:
            learner = self._parts[name]
            if self._adapter:
                trained = checkpoint.adapter_state(learner)
                return AdapterPart(trained, self._adapter, state, directory, self.ranks)
            content = checkpoint.state_of(learner, state)
            return checkpoint.ShardedPart(content, directory, self.ranks, self._staging[name])

        return {name: partial(collect, name) for name in self._parts}

    def _load(self, directory: Path, step: int) -> dict[str, Any]:
        final = checkpoint_writer.verified(directory, step, self._parts, self.ranks)
        load = self._load_adapter if self._adapter else checkpoint.load
        states = [load(final / name, learner) for name, learner in self._parts.items()]
        return states[0]

    def _load_adapter(self, directory: Path, learner: ShardedLearner) -> dict[str, Any]:
        assert self._adapter
        model = learner.net.model
        trained, initial = shapes(trained_parameters(model)), initial_parameters(model)
        state, user_state = read_part(directory, self._adapter, trained, initial)
        checkpoint.set_adapter_state(learner, state)
        return user_state

    def adapter_tensors(self) -> dict[str, Tensor]:
        model = self._learner.net.model
        trained, initial = (
            {name: gathered(parameter) for name, parameter in parameters.items()}
            for parameters in (trained_parameters(model), initial_parameters(model))
        )
        return joined(trained, initial)


def _offload(
    what: Literal["none", "optimizer", "all"],
    learners: Sequence[ShardedLearner],
    frozen: Sequence[Net],
) -> Offload:
    """Return the memory that `trainer.offload` may move to the host.

    frozen: models that only score (reference, teacher).
    """

    def let_go() -> None:
        for learner in learners:
            learner.optimizer.zero_grad()
        for net in (*(learner.net for learner in learners), *frozen):
            reshard(net)

    return Offload(
        what,
        weights=partial(_tensors_of, [learner.net for learner in learners]),
        frozen=partial(_tensors_of, frozen),
        gradients=tuple,  # freed by `let_go`
        optimizer=partial(_optimizer_state, learners),
        before=let_go,
    )


def _tensors_of(nets: Iterable[nn.Module]) -> Iterator[Tensor]:
    for net in nets:
        yield from (local_shard(tensor) for tensor in net.parameters())
        yield from (local_shard(tensor) for tensor in net.buffers())


def _optimizer_state(learners: Iterable[ShardedLearner]) -> Iterator[Tensor]:
    for learner in learners:
        for state in learner.optimizer.state.values():
            yield from (local_shard(value) for value in state.values() if isinstance(value, Tensor))
