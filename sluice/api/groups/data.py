"""spec.model, spec.data, spec.reward, spec.evaluation: what is trained, on what, judged how."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sluice.api.groups.reward_terms import RewardTerm
from sluice.api.schema.base import (
    FreeForm,
    Model,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Quantity,
    Unique,
)
from sluice.api.schema.kubernetes_fields import VolumeSource
from sluice.api.schema.paths import (
    DataPath,
    GenerateFunction,
    ModelPath,
    TokenizerPath,
    UserFunction,
)
from sluice.api.schema.rules import Rule, exactly_one, field, requires, written

MADE_ROWS = "rows"
"""Directory in the buffer's storage with the files that RowSources made."""
_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>(-?\d+)?):(?P<stop>(-?\d+)?)\]$")


def parse_path(text: str) -> tuple[Path, slice]:
    """`rows.jsonl@[0:100]` -> (rows.jsonl, slice(0, 100)),
    with Python's meaning of negative numbers.
    """
    match = _SLICE.match(text)
    if not match:
        return Path(text), slice(None)
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return Path(match["path"]), slice(start, stop)


class ModelSource(Model):
    """The model that is trained."""

    path: ModelPath = Field(
        description="Hugging Face checkpoint directory: config.json, tokenizer and safetensors."
    )
    volume: VolumeSource | None = Field(
        None,
        description="Kubernetes volume source that holds the model; `path`, and every other path "
        "of a model or a tokenizer, is then relative to its root.",
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the checkpoint."
    )
    reference_path: ModelPath | None = Field(
        None,
        description="Checkpoint of the reference policy for the KL terms. Default: the model as it "
        "is at step 0.",
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="`random`: take the shape from config.json and draw the weights (data.seed).",
    )
    fp32_lm_head: bool = Field(
        False,
        description="Compute logits in float32, in engines and trainer; weights stay as they are.",
    )


class RowSource(Model):
    """Rows that your own code yields. They are written to a file once, before the buffer starts."""

    function: UserFunction = Field(
        description="What gives rows when it is called: `package.module.name` or "
        "`path/to/file.py:name`, a generator "
        "function, or a class whose objects one can iterate over or index."
    )
    args: FreeForm = Field(default_factory=dict, description="Its arguments, by name.")
    rows: PositiveInt | None = Field(
        None, description="Stop after so many rows; needed where it never ends."
    )

    @property
    def file_name(self) -> str:
        """Names function, arguments and number of rows: a file of other ones is never taken for
        this one's.
        """
        origin = json.dumps([self.function, self.args, self.rows], sort_keys=True)
        digest = hashlib.blake2b(origin.encode(), digest_size=8).hexdigest()
        return f"{self.function_name}-{digest}.jsonl"

    @property
    def function_name(self) -> str:
        return re.split("[:.]", self.function)[-1]


class PromptSource(Model):
    """Prompts, one row each: a file of JSON Lines, JSON or Parquet, or your own code's; slime's or
    verl's rows.
    """

    path: DataPath | None = Field(
        None,
        description="File or directory (.jsonl, .json, .parquet). A slice picks rows: "
        "`file.jsonl@[0:1000]`.",
    )
    source: RowSource | None = Field(None, description="Rows of your own code, in place of `path`.")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=63)] | None = (
        Field(
            None,
            description="Name in metrics. Default: the file's name without its ending; the "
            "function's name.",
        )
    )
    prompt_key: str | None = Field(
        None,
        description="Column of the prompt (text or chat messages). Default: `prompt`, else "
        "`input`.",
    )
    label_key: str | None = Field(
        None,
        description="Column of the label. Default: `label`, else verl's "
        "`reward_model.ground_truth`.",
    )
    metadata_key: str = Field(
        "metadata", description="Column of a free object that rewards and filters see."
    )
    tools_key: str = Field(
        "tools", description="Column of the tool definitions for the chat template."
    )
    apply_chat_template: bool = Field(
        False,
        description="Render the prompt with the tokenizer's chat template; a text becomes one user "
        "message.",
    )
    chat_template_args: FreeForm = Field(
        default_factory=dict,
        description="Further variables of the chat template, such as `enable_thinking: false`.",
    )
    weight: PositiveFloat = Field(
        1.0, description="Share of this source among all sources, relative to its number of rows."
    )
    function: GenerateFunction | None = Field(
        None,
        description="Own generate function for the prompts of this source. `none`: one answer of "
        "the model. Default: rollout.function, or rollout.environment.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        exactly_one(
            "path",
            "source",
            message="exactly one of path (a file) and source (your own code) must be set",
        ),
    )

    @property
    def source_name(self) -> str:
        """The name in metrics, and in every prompt of this source: as given, or the file's without
        its ending.
        """
        return self.name or (
            self.source.function_name if self.source else parse_path(self.path or "")[0].stem
        )

    def file(self, directory: Path) -> str:
        """Where its rows lie. directory: of those that `source` made."""
        return str(directory / self.source.file_name) if self.source else str(self.path)


class Data(Model):
    """The prompts."""

    prompts: Annotated[list[PromptSource], Field(min_length=1, max_length=64)] = Field(
        description="Sources of prompts."
    )
    volume: VolumeSource | None = Field(
        None,
        description="Kubernetes volume source that holds the prompt files; paths are then relative "
        "to its root.",
    )
    shuffle: bool = Field(True, description="New order in every epoch, from `seed` and the epoch.")
    seed: int = Field(
        42, ge=0, le=2**31 - 1, description="Seed of order, of random weights and of the trainer."
    )
    max_prompt_tokens: PositiveInt | None = Field(
        None,
        description="Longer prompts are left out, and counted. Default: what fits the engine's "
        "context.",
    )
    truncation: Literal["left", "right"] | None = Field(
        None,
        description="loss.type: sft: longer rows lose their first (left) or last (right) "
        "tokens, and are not left out.",
    )


class SandboxLimits(Model):
    """Limits of the processes that judge: those of functions and of mathematics, and the sandbox of
    type `code`.
    """

    processes: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None,
        description="Processes that judge side by side in each rollout pod. Default: a quarter of "
        "its cores, 2 to 16.",
    )
    memory: Quantity = Field(
        "2Gi", description="Address space of a judging process; `code`: of the tested program."
    )
    cpu_seconds: PositiveInt = Field(60, description="Processor time for one sample.")
    test_seconds: PositiveFloat = Field(
        6.0,
        description="`code`: time for one test; after one that takes longer the rest counts as "
        "failed.",
    )


class RewardModelSpec(Model):
    """A reward model behind SGLang (`--is-embedding`): a request to /classify scores all samples
    that are ready.
    """

    url: Annotated[str, Field(pattern=r"^https?://", max_length=2048)] = Field(
        description="Address of the server, without path."
    )
    tokenizer: TokenizerPath | None = Field(
        None,
        description="Directory of the reward model's tokenizer: its chat template renders prompt "
        "and response. With model.volume: relative to that volume's root. Default: the prompt and, "
        "right behind it, the response, as plain text.",
    )
    output: NonNegativeInt = Field(0, description="Which of the model's outputs is the reward.")


RewardType = Literal[
    "boxed_exact_match",
    "boxed_f1",
    "boxed_gpqa",
    "code",
    "contains",
    "dapo",
    "data_source",
    "deepscaler",
    "exact_match",
    "f1",
    "gpqa",
    "gsm8k",
    "ifbench",
    "math",
    "math_prm800k",
    "multiple_choice",
    "random",
]


class Reward(Model):
    """How a response is judged. Exactly one of `type`, `function`, `url` and `model`."""

    type: RewardType | None = Field(
        None,
        description="A built-in reward. `data_source`: the row's data_source picks it, as in verl. "
        "A row's `metadata.rm_type` goes before whatever is set here.",
    )
    function: UserFunction | None = Field(
        None,
        description="Own function: `package.module.function` or `path/to/file.py:function`, sync "
        "or async, with sluice's, slime's or verl's parameters.",
    )
    url: Annotated[str, Field(pattern=r"^https?://", max_length=2048)] | None = Field(
        None,
        description="Remote reward in slime's protocol: POST {prompt, response, label}, the answer "
        "is the reward.",
    )
    model: RewardModelSpec | None = Field(None, description="A reward model.")
    key: str | None = Field(
        None,
        description="Which entry is the reward, where a reward is a dictionary. Default: `score`.",
    )
    group: bool = Field(
        False, description="`function` takes all samples of a prompt at once and returns a list."
    )
    timeout_seconds: PositiveFloat = Field(
        30.0,
        description="A reward that takes longer fails its sample. `url`, `model`: of one request; "
        "failed requests are repeated with back-off, for at most 4 times as long in all.",
    )
    sandbox: SandboxLimits = Field(default_factory=SandboxLimits)
    terms: Annotated[list[RewardTerm], Field(max_length=8), Unique("type")] = Field(
        default_factory=list,
        description="Added to the rewards of training samples, not to those of evaluations.",
    )

    rules = (
        exactly_one("type", "function", "url", "model"),
        requires(field("group").is_true, field("function").given, "", "group"),
    )


class EvaluationSampling(Model):
    """Sampling of evaluation; what is not set is as in rollout.sampling."""

    temperature: NonNegativeFloat | None = Field(
        None, description="0: the likeliest token each time."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="As rollout.sampling.topP."
    )
    top_k: int | None = Field(None, description="As rollout.sampling.topK.")
    max_response_tokens: PositiveInt | None = Field(
        None, description="As rollout.sampling.maxResponseTokens."
    )


class EvaluationDataset(PromptSource):
    """A held-out set of prompts."""

    sampling: EvaluationSampling | None = None
    samples_per_prompt: PositiveInt | None = Field(
        None, description="Default: evaluation.samplesPerPrompt."
    )
    reward: Reward | None = Field(
        None, description="How this data set is judged. Default: as spec.reward says."
    )


class Evaluation(Model):
    """Evaluation on held-out prompts, by the rollout engines, beside training."""

    every_steps: PositiveInt = Field(
        10, description="Steps between evaluations; one comes before the first step."
    )
    datasets: Annotated[list[EvaluationDataset], Field(min_length=1, max_length=64)] = Field(
        description="Held-out sets of prompts."
    )
    samples_per_prompt: PositiveInt = Field(1, description="Responses of one held-out prompt.")
    pass_at_k: Annotated[list[PositiveInt], Field(max_length=16), Unique()] = Field(
        default_factory=list,
        description="k of the unbiased pass@k and pass^k, each at most the samplesPerPrompt of "
        "some data set; data sets with fewer samples have no such figure.",
    )
    sampling: EvaluationSampling = Field(default_factory=EvaluationSampling)
    before_train: bool = Field(True, description="Evaluate the model as it is at step 0.")

    rules = (
        Rule(
            written(
                "!has(self.passAtK) || self.passAtK.all(k, self.datasets.exists(d, k <= "
                "d.?samplesPerPrompt.orValue(self.samplesPerPrompt)))",
                lambda e: all(
                    k <= max(d.samples_per_prompt or e.samples_per_prompt for d in e.datasets)
                    for k in e.pass_at_k
                ),
            ),
            "every k must be at most the samplesPerPrompt of some data set",
            "passAtK",
        ),
    )

    def samples_of(self, dataset: EvaluationDataset) -> int:
        """Responses to each prompt of a data set."""
        return dataset.samples_per_prompt or self.samples_per_prompt
