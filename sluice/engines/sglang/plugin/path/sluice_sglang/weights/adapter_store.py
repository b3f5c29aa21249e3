"""The LoRA adapters of one rank of the engine, in the memory that SGLang computes with.

SGLang has slots for as many adapters as a batch may use, and fills a slot when a request needs its
adapter. Here it gets the tensors that updates have brought, and copies them to their places
(adapter_places.py).
"""

import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import tell_once
from ..adapter_metrics import AdapterMetrics
from .adapter_places import Places, clear
from .adapter_tensors import EMPTY, SCALING, check_fits
from .transfer import memory, unpack

# Begins the names inside SGLang if the engine has one job: sluice@3 is a version. Those of a pool's
# jobs are called NAMESPACE/JOB@3.
NAME = "sluice"
# Layers whose adapters SGLang joins. If one of the first has an adapter, so must the second.
_JOINED = (("q_proj", "v_proj"), ("k_proj", "q_proj"), ("v_proj", "q_proj"))
Tensors = dict[str, torch.Tensor]
# Names and shapes of an adapter's tensors.
Signature = tuple[tuple[str, torch.Size], ...]
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Bucket:
    """Tensors that come together, as views of one piece of memory.

    names, dtypes, shapes: as the trainer names them. data: 1-D uint8.
    """

    names: Sequence[str]
    dtypes: Sequence[Any]
    shapes: Sequence[Any]
    data: torch.Tensor
    tensors: Tensors

    @classmethod
    def of(cls, names: Any, dtypes: Any, shapes: Any, device: Any) -> "Bucket":
        data = memory(dtypes, shapes, device)
        return cls(names, dtypes, shapes, data, dict(unpack(data, names, dtypes, shapes)))

    def fits(self, names: Any, dtypes: Any, shapes: Any) -> bool:
        """Return True if other tensors of these names and shapes can come into the same memory."""
        same = (self.names, self.dtypes, self.shapes) == (names, dtypes, shapes)
        # A tensor that does not begin where its type may is a copy, not a view.
        return same and all(
            tensor.untyped_storage().data_ptr() == self.data.data_ptr()
            for tensor in self.tensors.values()
        )


def spare_bucket(
    coming: list[Bucket], spare: Sequence[Bucket], names: Any, dtypes: Any, shapes: Any
) -> Bucket | None:
    """Return the memory of an older update in which the next bucket fits; None if there is none.

    Empties `coming` if the bucket has come before: it begins a new update, because the trainer of
    the one before has died.
    """
    if any(known.names[0] == names[0] for known in coming):
        coming.clear()
    place = len(coming)
    if place < len(spare) and spare[place].fits(names, dtypes, shapes):
        return spare[place]
    return None


@dataclass(slots=True)
class Version:
    """A version of an adapter: all tensors of an update, by PEFT's names."""

    buckets: list[Bucket] = field(default_factory=list)
    scaling: float = 1.0
    _tensors: Tensors = field(default_factory=dict)
    _signature: Signature = ()

    def settle(self) -> None:
        """Read the scaling, and list the tensors, whose memory may be that of an older version."""
        if not self._tensors:
            named = {name: t for bucket in self.buckets for name, t in bucket.tensors.items()}
            self._tensors = {name: named[name] for name in sorted(named) if name != SCALING}
            self._signature = tuple((name, t.shape) for name, t in self._tensors.items())
        for bucket in self.buckets:
            if SCALING in bucket.tensors:
                self.scaling = float(bucket.tensors[SCALING])

    @property
    def tensors(self) -> Tensors:
        return self._tensors

    @property
    def signature(self) -> Signature:
        return self._signature

    @property
    def rank(self) -> int:
        return max(t.shape[0] for name, t in self._tensors.items() if ".lora_A." in name)


@dataclass(slots=True)
class JobAdapter:
    """The adapter of a job: the versions that are held, and the update that is coming.

    created: when the job was created, which tells jobs of one name apart.
    """

    created: int = 0
    coming: list[Bucket] = field(default_factory=list)
    # Names inside SGLang, the newest last.
    held: list[str] = field(default_factory=list)
    # A version that is not held any more, and whose memory is used for the next one.
    spare: Version | None = None

    def size(self, versions: Mapping[str, Version]) -> int:
        """Return the bytes that the adapter takes. versions: those held, by their names."""
        owners = [versions[name] for name in self.held] + ([self.spare] if self.spare else [])
        return sum(bucket.data.nbytes for version in owners for bucket in version.buckets)


class AdapterStore:
    """The adapters of one rank of the engine.

    Parameters
    ----------
    rank
        Largest rank of an adapter.
    versions
        Number of versions of an adapter that are held, and older ones while requests use them.
    pool
        True if several jobs use the engine.

    """

    def __init__(self, rank: int, versions: int, *, pool: bool = False) -> None:
        self.rank, self.versions, self.pool = rank, versions, pool
        self.manager: Any = None
        # Set in the rank that shows the metrics of all.
        self.metrics: AdapterMetrics | None = None
        self.jobs: dict[str, JobAdapter] = {}
        # Names and adapters of jobs that have ended, while requests use them.
        self._ended: list[tuple[str, JobAdapter]] = []
        # The adapters that SGLang knows, by their names there.
        self._held_versions: dict[str, Version] = {}
        # The last version of each job, and how often a job has sent no later one. Kept when a job
        # is forgotten.
        self._last: dict[str, tuple[int, int]] = {}
        # None: SGLang has such adapters in unknown places.
        self._places: dict[Signature, Places | None] = {}
        self._filled: dict[int, Signature] = {}
        self._load_by_sglang: Any = None
        # GPU work after which the tensors may be read, and after which they may be overwritten.
        self._written: Any = None
        self._read: Any = None

    def attach(self, manager: Any) -> None:
        """Serve requests from the memory of SGLang's manager of adapters."""
        self.manager = manager
        # Otherwise SGLang leaves out layers that it does not adapt, with a line in the log.
        manager.memory_pool.strict_loading = True
        self._load_by_sglang = manager.memory_pool.load_lora_weight_to_buffer
        manager.memory_pool.load_lora_weight_to_buffer = self._load

    def newest(self, job: str) -> str | None:
        """Return the name of a job's newest adapter; None if none has come: the model alone."""
        adapter = self.jobs.get(job)
        return adapter.held[-1] if adapter and adapter.held else None

    def begin(self, job: str) -> None:
        """Begin an update, and drop what has come of one that has not ended."""
        self.jobs.setdefault(job, JobAdapter()).coming = []

    def enter(self, job: str, created: int, scheduler: Any) -> None:
        """Let a job bring an update, and drop the adapter of an older job of its name.

        Raises ValueError if a later job of this name has brought one. The HTTP process refuses such
        a job as well, but its call may have waited there.
        """
        adapter = self.jobs.get(job)
        if adapter is not None and created < adapter.created:
            raise ValueError(f"{job}: a later job of this name has brought its adapter")
        if adapter is not None and created > adapter.created:
            self.forget(job, scheduler)
        self.jobs.setdefault(job, JobAdapter(created))

    def bucket(self, job: str, names: Any, dtypes: Any, shapes: Any) -> Bucket:
        """Return memory for the next bucket of a job's update, which holds whole layers.

        Raises ValueError if the engine cannot serve such tensors.
        """
        adapter = self.jobs.setdefault(job, JobAdapter())
        older = adapter.spare.buckets if adapter.spare else []
        if (spare := spare_bucket(adapter.coming, older, names, dtypes, shapes)) is not None:
            if self._read is not None:
                self._read.synchronize()
            return spare
        self._check(dict(zip(names, shapes, strict=True)))
        return Bucket.of(names, dtypes, shapes, self.manager.device)

    def received(self, job: str, bucket: Bucket) -> None:
        """Note that a bucket has come."""
        self.jobs[job].coming.append(bucket)
        self._written = recorded(self.manager.device)

    def commit(self, job: str, version: str, scheduler: Any) -> None:
        """Serve the adapter whose tensors have come. Raises ValueError if it does not fit."""
        adapter = self.jobs[job]
        new = self._settled(adapter)
        if new.signature not in self._places:
            self._places[new.signature] = self._look_up(new.signature)
        name = self._name(job, version)
        self._register(name, adapter, new)
        self._held_versions[name] = new
        adapter.held.append(name)
        tell_once("each version of an adapter is held until no request uses it")
        if self.metrics is not None:
            self.metrics.loaded(job)
        self._drop_unused(job, adapter, scheduler)
        self._drop_ended(scheduler)
        self._show(job)

    def _name(self, job: str, version: str) -> str:
        """Return a name that no adapter of the job has had, with the version after `@`.

        SGLang's prefix cache goes by it. A trainer that continues from a checkpoint, and another
        run of a job of this name, send a version again, with other tensors.
        """
        number = int(version) if version.isdecimal() else 0
        last, times = self._last.get(job, (-1, 0))
        times += number <= last
        self._last[job] = number, times
        return f"{job or NAME}{f'+{times}' if times else ''}@{version}"

    def _settled(self, adapter: JobAdapter) -> Version:
        """Return the version that has come: a new one, or the spare one whose memory it has."""
        spare, buckets = adapter.spare, adapter.coming
        adapter.coming, adapter.spare = [], None
        same = spare is not None and len(spare.buckets) == len(buckets)
        if spare is not None and same and all(map(operator.is_, spare.buckets, buckets)):
            new = spare
        else:
            new = Version(buckets)
        new.settle()
        if not new.tensors:
            raise ValueError(EMPTY)
        return new

    def forget(self, job: str, scheduler: Any) -> None:
        """Free the memory of a job that has ended, once no request uses it."""
        adapter = self.jobs.pop(job, None)
        if adapter is not None:
            self._ended.append((job, adapter))
        self._drop_ended(scheduler)

    def _check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise ValueError unless the engine has memory for such tensors.

        SGLang itself would only notice when a request needs the adapter, and end.
        """
        from sglang.srt.lora.utils import get_normalized_target_modules

        adapted = self.manager.memory_pool.target_modules
        check_joined(name for name in shapes if name != SCALING)
        check_fits(
            shapes,
            self.rank,
            adapted,
            lambda layer: bool(get_normalized_target_modules([layer]) <= adapted),
        )

    def _look_up(self, signature: Signature) -> Places | None:
        try:
            return Places.of(self.manager, dict(signature))
        except (AttributeError, IndexError, KeyError, RuntimeError) as error:
            log.warning("this SGLang has adapters in unknown places: %r", error)
            return None

    def _register(self, name: str, adapter: JobAdapter, new: Version) -> None:
        """Make the name known to SGLang, with rank and scaling.

        All versions of an adapter share one object of SGLang, which costs milliseconds.
        """
        from sglang.srt.lora.lora_registry import LoRARef

        reference = LoRARef(lora_id=name, lora_name=name, lora_path=name, pinned=False)
        older = next(iter(adapter.held), None)
        if older is not None and self.manager.configs[older].r == new.rank:
            shared = self.manager.loras[older]
            shared.scaling = new.scaling
            self.manager.configs[name] = self.manager.configs[older]
            self.manager.loras[name] = shared
            self.manager.lora_refs[name] = reference
            return
        config = {
            "peft_type": "LORA",
            "r": new.rank,
            "lora_alpha": new.scaling * new.rank,
            "target_modules": sorted({key.split(".")[-3] for key in new.tensors}),
        }
        result = self.manager.load_lora_adapter_from_tensors(reference, {}, config)
        if not result.success:
            raise ValueError(f"SGLang cannot serve the adapter: {result.error_message}")
        self.manager.loras[name].scaling = new.scaling

    def _load(self, name: str | None, slot: int, *args: Any) -> None:
        """Fill a slot, in place of SGLang's function."""
        if name in self._held_versions:
            self._fill(name, slot)
        else:
            self._filled.pop(slot, None)
            self._load_by_sglang(name, slot, *args)

    def _fill(self, name: str, slot: int) -> None:
        version = self._held_versions[name]
        weights, signature = version.tensors, version.signature
        places = self._places[signature]
        _wait_for(self._written)
        if places is not None and places.proven:
            if self._filled.get(slot) != signature:
                clear(self.manager.memory_pool, slot)
            places.copy(weights, slot)
        else:
            self._load_by_sglang(
                name,
                slot,
                self._assembled(name, weights),
                self.manager.lora_modules,
                self.manager.embed_tokens_module,
                self.manager.lm_head_module,
            )
            if places is not None:
                places.proven = places.agree(weights, slot)
                how = "at once" if places.proven else "one by one"
                tell_once(f"an adapter's tensors are loaded in place, {how}")
        self._filled[slot] = signature
        self._read = recorded(self.manager.device)

    def _assembled(self, name: str, weights: Tensors) -> Any:
        """Return the tensors as SGLang has them: those of joined layers joined."""
        from sglang.srt.layers.utils import get_layer_id

        known = self.manager.loras[name]
        adapter = type(known)(
            name,
            known.config,
            known.base_hf_config,
            known.load_config,
            known.lora_backend,
            base_model=self.manager.base_model,
        )
        for key, tensor in weights.items():
            adapter.layers[get_layer_id(key)].weights[key] = tensor
        adapter._normalize_weights()
        return adapter

    def _drop_unused(self, job: str, adapter: JobAdapter, scheduler: Any) -> None:
        used = names_in_use(scheduler)
        for name in adapter.held[: -self.versions]:
            if name not in used:
                adapter.held.remove(name)
                adapter.spare = self._remove(job, name)
                log.info("the adapter %s is not used any more", name)

    def _drop_ended(self, scheduler: Any) -> None:
        used = names_in_use(scheduler) if self._ended else set()
        jobs = {job for job, _ in self._ended}
        for job, adapter in self._ended:
            for name in [name for name in adapter.held if name not in used]:
                adapter.held.remove(name)
                self._remove(job, name)
        self._ended = [(job, adapter) for job, adapter in self._ended if adapter.held]
        for job in jobs:
            self._show(job)

    def _show(self, job: str) -> None:
        """Show what adapters of jobs of this name take, those of deleted jobs among them."""
        if self.metrics is None:
            return
        adapters = [adapter for name, adapter in self._ended if name == job]
        adapters += [self.jobs[job]] if job in self.jobs else []
        size = sum(adapter.size(self._held_versions) for adapter in adapters)
        self.metrics.held(job, sum(len(adapter.held) for adapter in adapters), size)

    def _remove(self, job: str, name: str) -> Version:
        """Forget an adapter, and return it, as its memory may be used again."""
        from sglang.srt.lora.mem_pool import EMPTY_SLOT

        memory = self.manager.memory_pool
        slot = memory.uid_to_buffer_id.pop(name, None)
        if slot is not None:
            memory.buffer_id_to_uid[slot] = EMPTY_SLOT
            memory.eviction_policy.remove(name)
        for known in (self.manager.configs, self.manager.loras, self.manager.lora_refs):
            known.pop(name, None)
        if self.metrics is not None:
            self.metrics.dropped(job)
        return self._held_versions.pop(name)


def names_in_use(scheduler: Any) -> set[str | None]:
    """Return the adapters of all requests that the scheduler has."""
    batches = [scheduler.running_batch, scheduler.last_batch]
    requests = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    requests += [request for batch in batches if batch is not None for request in batch.reqs]
    if scheduler.chunked_req is not None:
        requests.append(scheduler.chunked_req)
    return {request.lora_id for request in requests}


def check_joined(names: Iterable[str]) -> None:
    """Raise ValueError if an adapter lacks layers that SGLang needs with others."""
    layers = {name.split(".")[-3] for name in names}
    for layer, companion in _JOINED:
        if layer in layers and companion not in layers:
            raise ValueError(
                f"SGLang joins q_proj, k_proj and v_proj: an adapter of {layer} needs one of "
                f"{companion}: add it to trainer.lora.targetModules"
            )


def recorded(device: Any) -> Any:
    """Return an event behind the GPU work that is queued now; None on a CPU."""
    return (
        torch.cuda.current_stream().record_event() if torch.device(device).type == "cuda" else None
    )


def _wait_for(event: Any) -> None:
    """Let GPU work that is queued from now on wait for an event."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
