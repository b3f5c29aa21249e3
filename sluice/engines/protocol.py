"""The parts of every inference engine: a launch, a client, a control of its weights, a layout of
its tensors.

The operator knows the launch, the rollout worker the client, the trainer control and layout; none
of them knows which engine it is. `sluice.engines.engine_of` has the one that a job names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from sluice.api import RLJobSpec

if TYPE_CHECKING:
    import aiohttp

    from sluice.samples.sample import Experts, WeightSpan

T = TypeVar("T")

RESTING, WAKING = "resting", "waking"
"""Names that an engine that shares its GPUs gives its weights when its memory is the
trainer's, and when it has taken back the part that its weights need. It keeps the name, so that
whoever comes next knows: a new trainer, the worker beside it.
"""
UNKNOWN_VERSION = -1
"""Weights that are none of ours: what the engine had at its start."""


class EngineError(Exception):
    """The engine did not do what it was asked. The message says what and why."""


class RequestTimeoutError(EngineError):
    """A request has no answer in time, and is given up."""


class PromptRefusedError(EngineError):
    """The engine will never take this prompt (too long, ...): no retry helps."""


class ScoringError(Exception):
    """A server could not score the given tokens.

    The message says why, for people; the reason, for metrics: `timeout`, `refused` or `invalid`.
    """

    def __init__(self, message: str, reason: str = "refused") -> None:
        super().__init__(message)
        self.reason = reason


class EngineRefusedError(Exception):
    """The engine refused a control call, or is gone. The message says to which call, and why.

    answered: True if the engine itself answered that it does not do what was asked.
    """

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


@dataclass(frozen=True, slots=True)
class ServerPlacement:
    """Where a server runs, as its command line says it; `$(NAME)` stands for a variable of its
    container.

    model: directory of the model. bind, port: of its HTTP server. index: number of its pod. head:
    host:port at which the pods of an engine of several meet; None: it has one.
    """

    model: str
    bind: str
    port: str
    index: str
    head: str | None = None


@dataclass(frozen=True, slots=True)
class Plugin:
    """Files of ours that an engine's image does not have. An init container of the worker's image
    brings them.

    name: of the volume. directory: where it is mounted. command: what fills it.
    """

    name: str
    directory: str
    command: tuple[str, ...]


class Launch(Protocol):
    """How a server is started. Every method is a pure function of the spec."""

    @property
    def health(self) -> str:
        """HTTP path that says whether the server lives, at once, also while it is paused."""

    @property
    def undecided(self) -> Mapping[str, str]:
        """Variables with a value that leaves it to the place what they say."""

    def missing(self) -> str:
        """One sentence on what this machine lacks to start it out of no image; empty: nothing."""

    def plugin(self, spec: RLJobSpec) -> Plugin | None: ...
    def command(self, spec: RLJobSpec) -> list[str]: ...
    def args(self, spec: RLJobSpec, place: ServerPlacement) -> list[str]: ...
    def env(self, spec: RLJobSpec) -> dict[str, str]: ...
    def caches(self, directory: str) -> dict[str, str]:
        """Variables with which it keeps the kernels that it compiles in this directory."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's word about itself. ranks: processes that hold weights. context_tokens: None: the
    model's own.
    """

    ranks: int
    context_tokens: int | None


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to one request. finish: stop, length or abort. spans: positions count from the
    first new token. experts: of all tokens of request and answer but the last, where the engine was
    started to tell.
    """

    tokens: list[int]
    log_probs: list[float]
    spans: list[WeightSpan]
    finish: str
    matched_stop: str | None
    experts: Experts | None = None


class Client(Protocol):
    """One server, as a worker asks it. Used inside of `async with`. Methods raise EngineError."""

    url: str
    info: ServerInfo
    """Known once `wait_ready` has returned."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...

    async def wait_ready(self, seconds: float) -> None:
        """Wait until the server answers, and learn how it was started."""

    async def health(self, timeout: float, *, generate: bool = False) -> tuple[bool, str]:
        """(healthy, reason). `generate`: let the engine make a token, which a hung scheduler does
        not.
        """

    async def rests(self) -> bool:
        """True where it has given its memory to the trainer, whose turn it is: it answers nothing,
        and is well.
        """

    async def paused_seconds(self) -> float:
        """Seconds for which it has been seen paused, as it is for a weight update; 0: it is not."""

    async def answers(self) -> bool:
        """True where the server's scheduler answers, which it does in a pause too."""

    async def generate(
        self, rid: str, input_ids: list[int], sampling: Mapping[str, Any], *, cache: str = ""
    ) -> Generation:
        """Generate from token ids. An aborted request returns what it has.

        sampling: by the names of SGLang's sampling parameters, whatever the engine.
        cache: requests with different ones share no prefixes in the engine's cache.
        """

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all. They answer with what they have."""


class Scorer(Protocol):
    """A server that somebody runs, asked about tokens that others wrote. Methods raise
    ScoringError.
    """

    async def close(self) -> None: ...

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token.

        Raises aiohttp.ClientError, OSError or TimeoutError: nobody answers; ConfigurationError: it
        is no such server.
        """

    async def log_probs(self, tokens: list[int], count: int) -> list[float]:
        """Log-probs of the last `count` of these tokens at temperature 1; nan where the server has
        none.
        """


class CallParser(Protocol):
    def __call__(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        """The text of a turn without its tool calls, and (name, arguments as JSON) of each."""


class Control(Protocol):
    """One server, as a weight update treats it. Methods raise EngineRefusedError."""

    address: str
    """host:port"""
    passes_on: bool
    """True where the engine can pass a bucket on to another one, once `learn` has returned."""

    @property
    def in_order(self) -> bool:
        """True where it takes buckets in the order in which they were asked of it, so that one may
        be asked for while others are on their way. Known once `learn` has returned.
        """

    async def learn(self) -> None:
        """Learn which interface the server has, where releases differ."""

    async def init_group(
        self,
        group: str,
        host: str,
        port: int,
        world_size: int,
        backend: str,
        *,
        first_rank: int = 1,
    ) -> None:
        """Join a communicator of `world_size` ranks; returns once all have joined.

        first_rank: 1: the ranks of the engine follow a sender. 0: the engine is the sender, of a
        link, over which it passes weights on. A link is made after the answer.
        """

    async def pause(self, mode: str) -> None: ...
    async def resume(self) -> None: ...

    async def begin(self) -> None:
        """Open an update over `receive` or `open`. One that is open already was left by who has
        died.
        """

    async def end(self) -> None: ...

    def may_flush(self, pause_mode: str) -> bool:
        """True where emptying the prefix cache inside the update is safe, whatever is running."""

    async def try_flush(self) -> bool:
        """Empty the prefix cache, whose entries were computed with the old weights. False: requests
        are running.
        """

    async def rest(self) -> None:
        """End what is running, and give the memory of weights and cache away."""

    async def wake(self) -> None:
        """Take the memory of the weights back, with nothing in it."""

    async def wake_cache(self) -> None:
        """Take the rest of the memory back."""

    async def open(self, handles: list[str], *, version: int | None, flush: bool) -> None:
        """Load a bucket out of the trainer's memory: a handle for each rank of the engine."""

    async def receive(
        self, group: str, names: Any, dtypes: Any, shapes: Any, *, version: int | None, flush: bool
    ) -> None:
        """Take part in one broadcast of a bucket. The version goes with the last bucket only.

        group: of a communicator; or, where the engine passes weights on, the bucket's route.
        """

    async def load_from_disk(self, path: str, version: int, *, flush: bool) -> None:
        """Load a Hugging Face checkpoint."""

    async def name_version(self, version: int | str) -> None:
        """Give the weights that the engine has another name."""

    async def version(self) -> str: ...


class StackName(Protocol):
    def __call__(self, experts: str, *, gated: bool) -> str:
        """The engine's name for all experts' first projections (gated: gate above up), or their
        second.

        experts: name of the module, as `model.layers.3.mlp.experts`.
        """


class Layout(Protocol):
    """How an engine wants the tensors of a model."""

    @property
    def untied(self) -> Sequence[str]:
        """model_type of families whose embedding the engine never shares with its output layer."""

    def takes_stacks(self, spec: RLJobSpec) -> bool:
        """True where it takes all experts of a layer as one tensor."""

    def stack_name(self, experts: str, *, gated: bool) -> str:
        """A StackName."""

    def inseparable(self, tensors: Iterable[tuple[str, T]]) -> Iterator[list[tuple[str, T]]]:
        """The tensors in their order, those together that must not come in two buckets."""

    def in_parts(self, tensors: Iterable[tuple[str, T]], max_bytes: int) -> Iterator[tuple[str, T]]:
        """The same tensors; those that no bucket can hold in parts which the engine
        puts together.
        """


class Engine(Protocol):
    """A kind of engine."""

    @property
    def launch(self) -> Launch: ...
    @property
    def layout(self) -> Layout: ...

    def client(self, url: str) -> Client: ...

    def scorer(self, url: str, seconds: float) -> Scorer:
        """seconds: of one request."""

    def call_parser(self, name: str) -> CallParser:
        """The engine's own parser of tool calls.

        Raises ImportError: not to be had in this process; ValueError: there is none of this name.
        """

    def control(
        self, address: str, session: aiohttp.ClientSession, timeout: float, source: str
    ) -> Control:
        """source: name and attempt of the trainer that calls, as `trainer-0/3`. timeout: seconds of
        each call.
        """

    def session(self) -> aiohttp.ClientSession:
        """Connections for controls, any number of them."""
