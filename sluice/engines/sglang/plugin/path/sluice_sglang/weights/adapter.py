"""Serves LoRA adapters whose tensors come with weight updates.

SGLang's own calls load an adapter from files, or from tensors that one process of an engine can
open, and only under a new name. Here an update brings an adapter's tensors in buckets, as it brings
all weights of a model otherwise. So versions, chains and replaced trainers work as with all
weights. The engine reads the model itself from its checkpoint.

An engine of one job adds its adapter to the weights of the model (added_adapter.py), or holds
several versions and lets each request end with its own. An engine of a pool has the adapters of
several jobs (pool_jobs.py), and a request says whose it uses.
"""

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from .. import fair_shares
from ..adapter_metrics import AdapterMetrics
from ..fair_shares import FairShares
from ..pool_credential import created_of, job_of, tag_of
from .adapter_store import AdapterStore
from .adapter_tensors import is_adapter
from .added_adapter import AddedAdapter
from .receive import failed_link, failure_on_any_rank, receive_data
from .relay import route
from .transfer import GROUP_PREFIX

MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
REQUEST = "sglang.srt.managers.schedule_batch.Req"
TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
# Passes of the scheduler from one count of requests and tokens to the next.
COUNTED_PASSES = 32
log = logging.getLogger(__name__)


def settings() -> dict[str, Any] | None:
    """Return how this engine serves adapters; None if it serves none.

    rank: largest rank of an adapter. versions: number of versions that are held at least; 0: an
    update adds its adapter to the model's weights. layers: names of the layers that may have an
    adapter then. jobs: number of jobs that may use the engine, if it is of a pool. silent_seconds:
    time after which a job of a pool that does not call has ended.
    """
    text = os.environ.get("SLUICE_LORA")
    return json.loads(text) if text else None


def register() -> None:
    chosen = settings()
    if chosen is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not chosen["versions"]:
        added = AddedAdapter(chosen["layers"])
        HookRegistry.register(f"{RUNNER}.load_model", added.attach, HookType.AFTER)
        register_updates(Updates(added))
        return
    jobs = chosen.get("jobs", 0)
    adapters = Adapters(AdapterStore(chosen["rank"], chosen["versions"], pool=jobs > 0))
    HookRegistry.register(f"{MANAGER}.init_lora_shapes", linear_layers_only, HookType.AFTER)
    HookRegistry.register(f"{RUNNER}.init_lora_manager", adapters.attach, HookType.AFTER)
    HookRegistry.register(f"{SCHEDULER}.handle_generate_request", adapters.use, HookType.BEFORE)
    register_updates(adapters)
    HookRegistry.register(f"{REQUEST}.__init__", pin_version)
    HookRegistry.register(f"{TOKENIZER}.__init__", without_lock)
    if jobs:
        HookRegistry.register(f"{SCHEDULER}.unload_lora_adapter", adapters.forget, HookType.AROUND)
        HookRegistry.register(f"{SCHEDULER}.abort_request", adapters.abort, HookType.AROUND)
        HookRegistry.register(f"{fair_shares.POLICY}.calc_priority", adapters.shares.order)
        HookRegistry.register(f"{SCHEDULER}.get_next_batch_to_run", adapters.count, HookType.AFTER)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        allow_unpinned_memory()


def register_updates(updates: "Updates") -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for way, hook in (
        ("distributed", updates.update),
        ("disk", updates.load),
        ("tensor", updates.open),
    ):
        HookRegistry.register(f"{UPDATER}.update_weights_from_{way}", hook, HookType.AROUND)


def linear_layers_only(_: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Make no room for adapters that a trainer does not have, which SGLang's `all` includes.

    They are those of the embedding, of the output layer and, in a mixture, of the experts.
    """
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    manager.target_modules -= {"embed_tokens", "lm_head"}
    if any(isinstance(module, FusedMoE) for module in manager.base_model.modules()):
        manager.target_modules -= {"gate_up_proj", "down_proj"}


def pin_version(_: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Note that all tokens of a request come from the version of its adapter.

    SGLang notes how many tokens a request had when the version changed. Before 0.5.21 it does not:
    see versions.py.
    """
    version = version_of(request)
    if version is None or not hasattr(request, "weight_version_events"):
        return
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    whole = WeightVersionEvent(old_version=version, num_output_tokens=sys.maxsize)
    request.weight_version_events = [whole]


def version_of(request: Any) -> str | None:
    """Return the weight version of a request that keeps it; None for other requests."""
    _, _, version = (request.lora_id or "").partition("@")
    return version or None


class Updates:
    """Brings updates of adapters to one rank of the engine.

    Parameters
    ----------
    store
        What uses the adapters that have come.

    """

    def __init__(self, store: AdapterStore | AddedAdapter) -> None:
        self.store = store

    def update(self, original: Any, updater: Any, request: Any) -> Any:
        """Receive a bucket, and use the adapter once its last bucket has come.

        Buckets of adapters come into memory that is kept, outside of SGLang's update session, which
        one job at a time could have.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput

        if not is_adapter(request.names):
            return original(updater, request)
        group = request.group_name.removeprefix(GROUP_PREFIX)
        job = self.job_of(group)
        try:
            if isinstance(self.store, AdapterStore):
                self.store.enter(job, created_of(tag_of(group)), updater.scheduler)
            self._receive(updater.tp_worker.model_runner.weight_updater, job, request)
            if request.weight_version is not None:
                self.store.commit(job, request.weight_version, updater.scheduler)
        except Exception as error:  # as SGLang: one bad update must not end the engine
            log.exception("an adapter has not come")
            return UpdateWeightsFromDistributedReqOutput(success=False, message=str(error))
        self._conclude(updater, request)
        return UpdateWeightsFromDistributedReqOutput(success=True, message="It has come.")

    def load(self, original: Any, updater: Any, request: Any) -> Any:
        """Load an adapter from a file that the trainer has written, and use it.

        The file has all tensors of an update. SGLang itself loads a directory with a model.
        """
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

        file = Path(request.model_path)
        if file.suffix != ".safetensors":
            return original(updater, request)
        message = self._take(lambda: self._read(file), updater, request)
        return UpdateWeightFromDiskReqOutput(
            success=not message, message=message or "It has been read.", num_paused_requests=0
        )

    def open(self, _: Any, updater: Any, request: Any) -> Any:
        """Copy a bucket from the memory of a trainer that shares this rank's GPU.

        An engine that serves adapters gets nothing else so.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

        message = self._take(lambda: self._copy(updater, request), updater, request)
        return UpdateWeightsFromTensorReqOutput(
            success=not message, message=message or "It has come."
        )

    def _take(self, read: Callable[[], None], updater: Any, request: Any) -> str:
        """Take tensors that each rank reads, and use the adapter once all have come.

        Returns what is wrong; empty if nothing is. No rank returns before all have read.
        """
        failure = ""
        try:
            read()
        except Exception as error:  # as SGLang: one bad update must not end the engine
            log.exception("an adapter has not come")
            failure = str(error) or type(error).__name__
        if failure := failure_on_any_rank(failure):
            return failure
        try:
            if request.weight_version is not None:
                self.store.commit("", request.weight_version, updater.scheduler)
        except Exception as error:
            log.exception("an adapter does not fit")
            return str(error)
        self._conclude(updater, request)
        return ""

    def _read(self, file: Path) -> None:
        from safetensors.torch import load_file

        tensors = load_file(file)
        names = list(tensors)
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
        shapes = [list(tensor.shape) for tensor in tensors.values()]
        self.store.begin("")
        bucket = self.store.bucket("", names, dtypes, shapes)
        for name, tensor in tensors.items():
            bucket.tensors[name].copy_(tensor)
        self.store.received("", bucket)

    def _copy(self, updater: Any, request: Any) -> None:
        flat = flat_bucket(updater.tp_worker, request.serialized_named_tensors)
        names = [entry.name for entry in flat["metadata"]]
        dtypes = [str(entry.dtype).removeprefix("torch.") for entry in flat["metadata"]]
        shapes = [list(entry.shape) for entry in flat["metadata"]]
        if not is_adapter(names):
            raise ValueError("this engine takes adapters, and these are tensors of a model")
        bucket = self.store.bucket("", names, dtypes, shapes)
        bucket.data.copy_(flat["flattened_tensor"])
        if bucket.data.is_cuda:  # the trainer uses its memory again after the answer
            torch.cuda.current_stream(bucket.data.device).synchronize()
        self.store.received("", bucket)

    def _conclude(self, updater: Any, request: Any) -> None:
        """Do what SGLang does after an update; with several versions no request is interrupted."""
        if not self.store.versions:
            updater.flush_cache_after_weight_update(request)
            if hasattr(updater, "record_weight_version_after_update"):  # from 0.5.21 on
                updater.record_weight_version_after_update(request.weight_version)

    def job_of(self, name: str) -> str:
        """Return the job that gave this name; empty if the engine has one job."""
        return job_of(tag_of(name)) if self.store.pool else ""

    def _receive(self, updater: Any, job: str, request: Any) -> None:
        """Receive a bucket. Raises RuntimeError if it has not come whole, ValueError if unfit."""
        bucket = self.store.bucket(job, request.names, request.dtypes, request.shapes)
        receive_data(updater, route(request.group_name), lambda: bucket.data)
        if failure := failed_link():
            raise RuntimeError(failure)
        self.store.received(job, bucket)


class Adapters(Updates):
    """Also brings requests to their adapter, if an engine holds several."""

    store: AdapterStore

    def __init__(self, store: AdapterStore) -> None:
        super().__init__(store)
        self.shares = FairShares()
        self._passes = 0

    def attach(self, _: Any, runner: Any) -> None:
        """Serve adapters from the memory of this rank."""
        if runner.lora_manager.tp_rank == 0:
            metrics = self.store.metrics = AdapterMetrics(pool=self.store.pool)
            if self.store.pool:
                self.shares.account = metrics.had
        self.store.attach(runner.lora_manager)

    def count(self, _: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Count tokens and waiting requests, also while no request may begin.

        Ranks do this in the same passes, because they have to agree on the order of requests.
        """
        self._passes += 1
        if self._passes % COUNTED_PASSES:
            return
        self.shares.count(scheduler.waiting_queue)
        if self.store.metrics is not None:
            waiting = Counter(job_of(tag_of(request.rid)) for request in scheduler.waiting_queue)
            self.store.metrics.wait(waiting, self.shares.weights)

    def abort(self, original: Any, scheduler: Any, request: Any) -> Any:
        """Abort requests, and count nothing of those that have not begun."""
        before = list(scheduler.waiting_queue)
        result = original(scheduler, request)
        kept = set(map(id, scheduler.waiting_queue))
        self.shares.forget(waited for waited in before if id(waited) not in kept)
        return result

    def use(self, scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
        """Let a request use the newest adapter of its job, whatever its sender says."""
        request.lora_id = self.store.newest(self.job_of(request.rid))

    def forget(self, original: Any, scheduler: Any, request: Any) -> Any:
        """Drop the adapter of a job that has ended (pool_jobs.py)."""
        self.store.forget(request.lora_id, scheduler)
        return self.store.manager.create_lora_update_result(success=True)


def flat_bucket(worker: Any, handles: Sequence[Any]) -> dict[str, Any]:
    """Open the trainer's memory by this rank's handle. torch counts how often each is opened."""
    if hasattr(worker, "deserialize_own_rank"):
        opened: dict[str, Any] = worker.deserialize_own_rank(handles)
        return opened
    # SGLang before 0.5.21
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()
    opened = MultiprocessingSerializer.deserialize(
        handles[worker.model_runner.weight_updater.tp_rank]
    )
    return opened


class NoLock:
    """A lock that nobody holds and that everybody gets at once."""

    reader_lock = writer_lock = nullcontext()

    async def is_locked(self) -> bool:
        return False


def without_lock(_: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Let updates and requests run at the same time.

    By its lock SGLang's HTTP process makes an update wait until no request runs. Here an update
    adds a version, which no running request uses.
    """
    manager.model_update_lock = NoLock()


class Unpinned:
    """torch for a module that asks for pinned memory, which a CPU without a GPU does not have."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(torch, name)
        if name not in ("arange", "empty", "tensor", "zeros"):
            return attribute

        def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = attribute(*args, **kwargs)
            return tensor

        return unpinned


def allow_unpinned_memory() -> None:
    """Let SGLang's LoRA run on a CPU, where torch refuses to pin memory."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    for module in (layers, torch_backend):
        module.torch = Unpinned()
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
