"""spec.model, spec.data, spec.reward and spec.evaluation."""

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
    split_slice,
)
from sluice.api.schema.rules import Rule, any_set, exactly_one, field, requires, written

# Directory in the buffer's storage with the files of RowSources.
MADE_ROWS = "rows"


def parse_path(text: str) -> tuple[Path, slice]:
    """Split `rows.jsonl@[0:100]` into (rows.jsonl, slice(0, 100)); numbers may be negative."""
    path, part = split_slice(text)
    if not part:
        return Path(path), slice(None)
    start, stop = (int(number) if number else None for number in part[2:-1].split(":"))
    return Path(path), slice(start, stop)


class ModelSource(Model):
    """Model that is trained."""

    path: ModelPath = Field(
        description="Directory of a Hugging Face checkpoint: config.json, tokenizer and "
        "safetensors. With `sluice run` also a URI, such as `hf://org/name`, or `org/name` of the "
        "Hugging Face hub."
    )
    volume: VolumeSource | None = Field(
        None,
        description="Kubernetes volume source with the model. `path`, and every other path "
        "of a model or tokenizer, is then relative to its root.",
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the checkpoint."
    )
    reference_path: ModelPath | None = Field(
        None,
        description="Checkpoint of the reference policy for the KL terms. Default: the model "
        "at step 0.",
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="random: take the shape from config.json and draw the weights, with seed "
        "data.seed.",
    )
    fp32_lm_head: bool = Field(
        False,
        description="Compute logits in float32, in engines and trainer. Weights keep their type.",
    )


class ImageLimits(Model):
    """Limits of the images of a job. A row beyond one is refused, with its file and line."""

    max_per_prompt: PositiveInt = Field(16, description="Most images of a prompt.")
    max_pixels: PositiveInt = Field(
        1_003_520,
        description="Width times height. Larger images are scaled down to it, in proportion, when "
        "they are read.",
    )
    max_bytes: Quantity = Field("20Mi", description="Largest file of an image.")


class RowSource(Model):
    """Rows that user code yields. They are written to a file once, before the buffer starts."""

    function: UserFunction = Field(
        description="Function that gives rows: `package.module.name` or "
        "`path/to/file.py:name`, a generator function, or a class whose objects can be "
        "iterated or indexed."
    )
    args: FreeForm = Field(default_factory=dict, description="Arguments of the function, by name.")
    rows: PositiveInt | None = Field(
        None, description="Stop after this many rows. Needed if the function never ends."
    )

    @property
    def file_name(self) -> str:
        """Name of the file with the rows: another function, argument or count has another."""
        origin = json.dumps([self.function, self.args, self.rows], sort_keys=True)
        digest = hashlib.blake2b(origin.encode(), digest_size=8).hexdigest()
        return f"{self.function_name}-{digest}.jsonl"

    @property
    def function_name(self) -> str:
        return re.split("[:.]", self.function)[-1]


class PromptSource(Model):
    """Prompts, one per row, of a file or of user code.

    Files are JSON Lines, JSON or Parquet, with rows in slime's or verl's form, or tasks of Harbor.
    """

    path: DataPath | None = Field(
        None,
        description="File or directory (.jsonl, .json, .parquet), or a directory of Harbor tasks; "
        "with `sluice run` also by URI, such as `s3://bucket/rows.jsonl`. A slice selects rows: "
        "`file.jsonl@[0:1000]`.",
    )
    source: RowSource | None = Field(None, description="Rows of user code, in place of `path`.")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=63)] | None = (
        Field(
            None,
            description="Name in metrics. Default: the name of the file without its ending, or "
            "of the function.",
        )
    )
    prompt_key: str | None = Field(
        None,
        description="Column of the prompt, text or chat messages. Default: `prompt`, else `input`.",
    )
    label_key: str | None = Field(
        None,
        description="Column of the label. Default: `label`, else verl's "
        "`reward_model.ground_truth`.",
    )
    metadata_key: str = Field(
        "metadata", description="Column of an object with free fields that rewards and filters see."
    )
    tools_key: str = Field(
        "tools", description="Column of the tool definitions for the chat template."
    )
    images_key: str = Field(
        "images",
        description="Column of the images, in the order of the `<image>` placeholders of the "
        "prompt. Read if data.images is set.",
    )
    apply_chat_template: bool = Field(
        False,
        description="Render the prompt with the chat template of the tokenizer. A text "
        "becomes one user message.",
    )
    chat_template_args: FreeForm = Field(
        default_factory=dict,
        description="Variables for the chat template, such as `enable_thinking: false`.",
    )
    weight: PositiveFloat = Field(
        1.0,
        description="Weight of this source relative to the others, as a factor on its number "
        "of rows.",
    )
    function: GenerateFunction | None = Field(
        None,
        description="Own generate function for the prompts of this source. none: one answer "
        "of the model. Default: rollout.function, or rollout.environment.",
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
        """Name in metrics and in prompts of this source: `name`, or that of file or function."""
        return self.name or (
            self.source.function_name if self.source else parse_path(self.path or "")[0].stem
        )

    def file(self, directory: Path) -> str:
        """Return the file with the rows. directory: holds the files that `source` made."""
        return str(directory / self.source.file_name) if self.source else str(self.path)


class Data(Model):
    """Prompts of the training."""

    prompts: Annotated[list[PromptSource], Field(min_length=1, max_length=64)] = Field(
        description="Sources of prompts."
    )
    volume: VolumeSource | None = Field(
        None,
        description="Kubernetes volume source with the prompt files. Paths are then relative "
        "to its root.",
    )
    images: ImageLimits | None = Field(
        None,
        description="Set (`{}` is enough) if rows have images: the model is then trained and "
        "served as a vision-language model.",
    )
    shuffle: bool = Field(
        True,
        description="Draw a new order in every epoch, from `seed` and the number of the epoch.",
    )
    seed: int = Field(
        42,
        ge=0,
        le=2**31 - 1,
        description="Seed of the order, of random weights and of the trainer.",
    )
    max_prompt_tokens: PositiveInt | None = Field(
        None,
        description="Longest prompt in tokens. Longer prompts are left out, and counted. "
        "Default: the context of the engine.",
    )
    truncation: Literal["left", "right"] | None = Field(
        None,
        description="With loss.type sft: cut longer rows on the left or the right instead of "
        "leaving them out.",
    )


class SandboxLimits(Model):
    """Limits of the processes that judge samples.

    They apply to reward functions, to mathematics, and to the sandbox of type `code`.
    """

    processes: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None,
        description="Number of processes that judge in parallel in each rollout pod. "
        "Default: a quarter of its cores, 2 to 16.",
    )
    memory: Quantity = Field(
        "2Gi", description="Address space of a judging process; with `code` of the tested program."
    )
    cpu_seconds: PositiveInt = Field(60, description="CPU time for one sample, in seconds.")
    test_seconds: PositiveFloat = Field(
        6.0,
        description="`code`: time for one test, in seconds. After a test that takes longer, "
        "the rest count as failed.",
    )


class RewardModelSpec(Model):
    """Reward model behind SGLang (`--is-embedding`).

    One request to /classify scores all samples that are ready.
    """

    url: Annotated[str, Field(pattern=r"^https?://", max_length=2048)] = Field(
        description="Address of the server, without path."
    )
    tokenizer: TokenizerPath | None = Field(
        None,
        description="Directory of the tokenizer of the reward model. Its chat template "
        "renders prompt and response. With model.volume: relative to the root of that "
        "volume. Default: prompt and response as plain text, one right after the other.",
    )
    output: NonNegativeInt = Field(0, description="Index of the model's output that is the reward.")


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
    "swe",
]


class Reward(Model):
    """Judgement of responses. Exactly one of `type`, `function`, `url` and `model`."""

    type: RewardType | None = Field(
        None,
        description="Built-in reward. data_source: chosen by the row's data_source, as in "
        "verl. `metadata.rm_type` of a row takes precedence.",
    )
    function: UserFunction | None = Field(
        None,
        description="Own function: `package.module.function` or `path/to/file.py:function`, sync "
        "or async, with sluice's, slime's or verl's parameters.",
    )
    url: Annotated[str, Field(pattern=r"^https?://", max_length=2048)] | None = Field(
        None,
        description="Remote reward in slime's protocol: POST {prompt, response, label}; the "
        "answer is the reward.",
    )
    model: RewardModelSpec | None = Field(None, description="A reward model.")
    key: str | None = Field(
        None,
        description="Key of the reward in a reward that is a dictionary. Default: `score`.",
    )
    group: bool = Field(
        False, description="Pass all samples of a prompt to `function` at once. It returns a list."
    )
    timeout_seconds: PositiveFloat = Field(
        30.0,
        description="Timeout in seconds, after which the sample fails. With `url` and "
        "`model`: of one request; failed requests are repeated with back-off, for at most 4 "
        "times as long in all.",
    )
    sandbox: SandboxLimits = Field(default_factory=SandboxLimits)
    terms: Annotated[list[RewardTerm], Field(max_length=8), Unique("type")] = Field(
        default_factory=list,
        description="Terms added to the rewards of training samples. Evaluations do not "
        "include them.",
    )

    rules = (
        exactly_one("type", "function", "url", "model"),
        requires(field("group").is_true, field("function").is_set, "", "group"),
    )


class EvaluationSampling(Model):
    """Sampling of evaluations. Fields that are not set are as in rollout.sampling."""

    temperature: NonNegativeFloat | None = Field(
        None, description="Temperature. 0: always the most likely token."
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
        None, description="Judgement of this data set. Default: spec.reward."
    )


class Evaluation(Model):
    """Evaluation on held-out rows while training goes on.

    The rollout engines answer the prompts of `datasets`; the trainer computes the loss of
    `heldOut`.
    """

    every_steps: PositiveInt = Field(
        10,
        description="Number of steps between evaluations. The first comes before the first step.",
    )
    datasets: Annotated[list[EvaluationDataset], Field(max_length=64)] = Field(
        default_factory=list, description="Held-out sets of prompts, which engines answer."
    )
    held_out: Annotated[list[PromptSource], Field(max_length=16)] = Field(
        default_factory=list,
        description="With loss.type sft or a loss of preferences: held-out rows, in the form of "
        "data.prompts. The trainer computes their loss and its metrics, without engines.",
    )
    samples_per_prompt: PositiveInt = Field(
        1, description="Number of responses to each held-out prompt."
    )
    pass_at_k: Annotated[list[PositiveInt], Field(max_length=16), Unique()] = Field(
        default_factory=list,
        description="Values of k for the unbiased pass@k and pass^k, each at most the "
        "samplesPerPrompt of some data set. Data sets with fewer samples do not report it.",
    )
    sampling: EvaluationSampling = Field(default_factory=EvaluationSampling)
    before_train: bool = Field(True, description="Evaluate the model at step 0.")

    rules = (
        Rule(
            any_set("datasets", "heldOut"),
            "there is nothing to evaluate: set datasets (prompts that engines answer) or heldOut "
            "(rows whose loss the trainer computes)",
            "datasets",
            reason="FieldValueRequired",
        ),
        Rule(
            written(
                "!has(self.passAtK) || self.passAtK.all(k, has(self.datasets) && "
                "self.datasets.exists(d, k <= "
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
        """Return the number of responses to each prompt of a data set."""
        return dataset.samples_per_prompt or self.samples_per_prompt
