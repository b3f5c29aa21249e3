"""Protocols of an inference engine: launch, client, control of its weights, layout of its tensors.

The operator uses the launch, the rollout worker the client, the trainer the control and the layout.
None of them knows which engine it is: `sluice.engines.engine_of` returns the one that a job names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from sluice.api import RLEnginePoolSpec, RLJobSpec
from sluice.engines.plugin_common import adapter_tensors

if TYPE_CHECKING:
    import aiohttp

    from sluice.images.image import Image
    from sluice.samples.sample import Experts, WeightSpan

T = TypeVar("T")

# Names that an engine that shares its GPUs gives its weights: while its memory is the trainer's,
# and once it has allocated the memory of its weights again. The engine keeps the name, so a new
# trainer and the worker can ask for it.
RESTING, WAKING = "resting", "waking"
# Prefix of the names of an adapter's tensors, as PEFT has it in its files.
ADAPTER_PREFIX = adapter_tensors.PREFIX
# Tensor of one element that comes with an adapter: the factor of B A.
ADAPTER_SCALING = adapter_tensors.SCALING
# Version of weights that no trainer of sluice has sent, such as those of the engine's start.
UNKNOWN_VERSION = -1


class EngineError(Exception):
    """The engine did not do what it was asked. The message says what and why."""


class RequestTimeoutError(EngineError):
    """A request was given up, because it had no answer in time."""


class PromptRefusedError(EngineError):
    """The engine will never take this prompt, which is too long, for example. No retry helps."""


class WeightsLostError(EngineError):
    """The engine has lost this job's weights. They come again once the worker has joined again."""


class ScoringError(Exception):
    """A server could not score the given tokens.

    The message says why, for people; the reason, for metrics: `timeout`, `refused` or `invalid`.
    """

    def __init__(self, message: str, reason: str = "refused") -> None:
        super().__init__(message)
        self.reason = reason


class EngineRefusedError(Exception):
    """The engine refused a control call, or is gone. The message says which call, and why."""

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        # True if the engine itself answered that it does not do what was asked.
        self.answered = answered


@dataclass(frozen=True, slots=True)
class ServerPlacement:
    """The address and the model of a server, as its command line names them.

    A value `$(NAME)` stands for a variable of the container.
    """

    # Directory of the model.
    model: str
    # Address and port of the HTTP server.
    bind: str
    port: str
    # Number of the pod within its engine.
    index: str
    # Directory of the draft model (`rollout.speculative`); None without one.
    draft: str | None = None
    # host:port at which the pods of one engine meet. None: the engine has one pod.
    head: str | None = None


@dataclass(frozen=True, slots=True)
class Plugin:
    """Files of sluice that an engine's image lacks.

    An init container of the worker's image copies them to a volume.
    """

    # Name of the volume.
    name: str
    # Directory that the volume is mounted at.
    directory: str
    # Command that fills the volume.
    command: tuple[str, ...]


class Launch(Protocol):
    """The start of a server. Every method is a pure function of the spec."""

    @property
    def health(self) -> str:
        """HTTP path that says at once whether the server lives, also while it is paused."""

    @property
    def undecided(self) -> Mapping[str, str]:
        """Variables for which the environment decides, with the value that says so."""

    def missing(self) -> str:
        """Return in one sentence what this machine lacks to start the server without an image.

        Empty if the server can be started.
        """

    def plugin(self, spec: RLJobSpec) -> Plugin | None: ...
    def command(self, spec: RLJobSpec) -> list[str]: ...
    def args(self, spec: RLJobSpec, place: ServerPlacement) -> list[str]: ...
    def env(self, spec: RLJobSpec) -> dict[str, str]: ...
    def caches(self, directory: str) -> dict[str, str]:
        """Return variables that make the engine keep compiled kernels in this directory."""


class PoolLaunch(Protocol):
    """The start of a server of an RLEnginePool. Every method is a pure function of the spec.

    Such a server always has sluice's plugin.
    """

    @property
    def health(self) -> str:
        """HTTP path that says at once whether the server lives, without a credential."""

    def pool_plugin(self) -> Plugin: ...
    def pool_command(self) -> list[str]: ...
    def pool_args(self, spec: RLEnginePoolSpec, place: ServerPlacement) -> list[str]: ...
    def pool_env(self, spec: RLEnginePoolSpec) -> dict[str, str]:
        """Return variables of the server, but for the pool's key."""

    def caches(self, directory: str) -> dict[str, str]:
        """Return variables that make the engine keep compiled kernels in this directory."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Facts that a server reports about itself."""

    # Processes that hold weights.
    ranks: int
    # Tokens of prompt and response together. None: as the model says.
    context_tokens: int | None


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to one request."""

    tokens: list[int]
    log_probs: list[float]
    # Weight versions of the tokens. Positions count from the first new token.
    spans: list[WeightSpan]
    # `stop`, `length` or `abort`.
    finish: str
    matched_stop: str | None
    # Experts of all tokens of request and answer but the last. None: not requested.
    experts: Experts | None = None
    # Passes of the model in which it verified proposed tokens; 0 without speculative decoding.
    speculative_passes: int = 0
    # Tokens of the request that the engine found in its prefix cache. None: not reported.
    cached_tokens: int | None = None


# Gets a part of an answer: tokens that follow those of the parts before, `finish` being empty.
OnPart = Callable[[Generation], None]


class Client(Protocol):
    """A server, as a rollout worker uses it, inside `async with`. Methods raise EngineError."""

    url: str
    # Valid once `wait_ready` has returned.
    info: ServerInfo

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...

    async def wait_ready(self, seconds: float) -> None:
        """Wait until the server answers, and learn how it was started."""

    async def health(self, timeout: float, *, generate: bool = False) -> tuple[bool, str]:
        """Return (healthy, reason).

        With `generate` the engine has to make a token, which a hung scheduler does not.
        """

    async def rests(self) -> bool:
        """Return True if the engine has given its memory to the trainer.

        It then answers no request, and is healthy.
        """

    async def paused_seconds(self) -> float:
        """Return how long the engine has been seen paused for a weight update; 0 if it is not."""

    async def answers(self) -> bool:
        """Return True if the server's scheduler answers, which it does in a pause too."""

    async def generate(
        self,
        rid: str,
        input_ids: list[int],
        sampling: Mapping[str, Any],
        *,
        cache: str = "",
        images: Sequence[Image] = (),
        on_part: OnPart | None = None,
    ) -> Generation:
        """Generate from token ids. An aborted request returns the tokens that it has.

        Parameters
        ----------
        rid
            Name of the request, for `abort`.
        input_ids
            Tokens of the prompt, and of the response so far.
        sampling
            Sampling parameters by SGLang's names, whatever the engine.
        cache
            Name of the prefix cache: requests with different names share no prefixes.
        images
            Images of the placeholders in `input_ids`, in their order. Each placeholder is one
            token: the engine makes it as long as its image.
        on_part
            Gets the answer's tokens as they come. What it has got stays sampled if the request
            fails. The whole answer begins with it. An engine that answers only whole never calls
            it.

        """

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all. They answer with the tokens that they have."""

    async def leave(self) -> None:
        """Tell an engine of a pool that this job does not need it any more."""


class Scorer(Protocol):
    """A server of the user's, which scores given tokens. Methods raise ScoringError."""

    async def close(self) -> None: ...

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token.

        Raises aiohttp.ClientError, OSError or TimeoutError if the server does not answer, and
        ConfigurationError if it is another kind of server.
        """

    async def log_probs(
        self, tokens: list[int], count: int, images: Sequence[Image] = ()
    ) -> list[float]:
        """Return the log-probs of the last `count` tokens at temperature 1; nan if unknown.

        `images` are those of the placeholders in `tokens`, one token each.
        """


@dataclass(frozen=True, slots=True)
class CallParser:
    """A parser of tool calls.

    Parameters
    ----------
    parse
        Takes a text and the tools. Returns the text without its calls, and (name, arguments as
        JSON) of each call.
    start
        Text with which the first call of a turn begins. Empty: a call may begin anywhere.

    """

    parse: Callable[[str, list[dict[str, Any]]], tuple[str, list[tuple[str, str]]]]
    start: str = ""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model to which an adapter is added: its directory, and the digest of its tensors."""

    path: str
    digest: str


class Control(Protocol):
    """A server, as a weight update uses it. Methods raise EngineRefusedError."""

    # host:port
    address: str
    # True if the engine can pass a bucket on to another engine. Valid once `learn` has returned.
    passes_on: bool

    @property
    def in_order(self) -> bool:
        """True if the engine takes buckets in the order of the requests for them.

        The next bucket may then be requested while others are on their way. Valid once `learn` has
        returned.
        """

    async def learn(self) -> None:
        """Learn which interface the server has, as releases differ."""

    async def base_model(self) -> BaseModel:
        """Return the model that the engine has read from its files, once its digest is known."""

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
        """Join a communicator of `world_size` ranks; return once all have joined.

        With `first_rank` 1 the ranks of the engine follow a sender. With 0 the engine is the sender
        of a link, over which it passes weights on; a link is made after the answer.
        """

    async def pause(self, mode: str) -> None: ...
    async def resume(self) -> None: ...

    async def begin(self) -> None:
        """Open an update over `receive` or `open`.

        An update that is open already belongs to a trainer that has died, and is closed.
        """

    async def end(self) -> None: ...

    def may_flush(self, pause_mode: str) -> bool:
        """Return True if emptying the prefix cache inside the update is always safe."""

    async def try_flush(self) -> bool:
        """Empty the prefix cache, whose entries were computed with the old weights.

        Returns False if requests are running.
        """

    async def rest(self) -> None:
        """End running requests, and release the memory of weights and cache."""

    async def wake(self) -> None:
        """Allocate the memory of the weights again. Its content is undefined."""

    async def wake_cache(self) -> None:
        """Allocate the rest of the memory again."""

    async def open(self, handles: list[str], *, version: int | None, flush: bool) -> None:
        """Load a bucket from the trainer's memory, by one handle for each rank of the engine."""

    async def receive(
        self, group: str, names: Any, dtypes: Any, shapes: Any, *, version: int | None, flush: bool
    ) -> None:
        """Take part in one broadcast of a bucket. Only the last bucket has a version.

        `group` names a communicator or, if the engine passes weights on, the route of the bucket.
        """

    async def load_from_disk(self, path: str, version: int, *, flush: bool) -> None:
        """Load a Hugging Face checkpoint, or the file with the tensors of an adapter."""

    async def name_version(self, version: int | str) -> None:
        """Rename the version of the engine's weights."""

    async def version(self) -> str: ...


class StackName(Protocol):
    """A function that names the stacked weights of a layer's experts."""

    def __call__(self, experts: str, *, gated: bool) -> str:
        """Return the engine's name of all experts' first projections, or of their second ones.

        `experts` names the module, such as `model.layers.3.mlp.experts`. `gated` selects the first
        projections, which have gate above up.
        """


class Layout(Protocol):
    """The form in which an engine wants the tensors of a model."""

    @property
    def untied(self) -> Sequence[str]:
        """The `model_type` of families whose embedding is never the engine's output layer."""

    def takes_stacks(self, spec: RLJobSpec) -> bool:
        """Return True if the engine takes all experts of a layer as one tensor."""

    def stack_name(self, experts: str, *, gated: bool) -> str:
        """Return the name of stacked experts, as a StackName does."""

    def inseparable(self, tensors: Iterable[tuple[str, T]]) -> Iterator[list[tuple[str, T]]]:
        """Yield the tensors in order, in lists that must not be split between buckets."""

    def in_parts(self, tensors: Iterable[tuple[str, T]], max_bytes: int) -> Iterator[tuple[str, T]]:
        """Yield the tensors, with those that fit into no bucket in parts.

        The engine joins the parts.
        """


class Engine(Protocol):
    """A kind of engine."""

    @property
    def launch(self) -> Launch: ...
    @property
    def layout(self) -> Layout: ...

    def client(self, url: str) -> Client: ...

    def scorer(self, url: str, seconds: float) -> Scorer:
        """Return a scorer. `seconds` limits one request."""

    def call_parser(self, name: str) -> CallParser:
        """Return the engine's parser of tool calls.

        Raises ImportError if it is not available in this process, and ValueError if there is no
        such parser.
        """

    def control(
        self, address: str, session: aiohttp.ClientSession, timeout: float, source: str
    ) -> Control:
        """Return the control of one server.

        `source` is the name and attempt of the trainer that calls, such as `trainer-0/3`; `timeout`
        limits each call, in seconds.
        """

    def session(self) -> aiohttp.ClientSession:
        """Return connections for any number of controls."""
