"""Where trainer and engine come apart in bf16: the same tokens through both and float32.

    python benchmarks/exactness.py --model DIR [--sequences 16] [--tokens 128] [--inside 4]
        [--engine NAME=ARGUMENTS ...] [--engine-args ARGUMENTS]

SGLang answers prompts with the sampled tokens' log-probs, and scores its answers again in one pass
each. The trainers (Megatron and FSDP2; bf16 with and without `model.fp32LmHead`; fp32) score the
same tokens, and so does transformers in float32 out of the same weights, which is the reference.
Then the stages of trainers and engine are followed layer by layer; and each kind of part is
computed in bf16 in an otherwise exact model: what it alone adds. The model is dense and of
transformers' Llama layout. Without --model a tiny one is made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import tempfile
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks import stages
from benchmarks.processes import small_engine
from sluice.api import RLJobSpec
from sluice.engines.sglang.client import Client
from sluice.runtime.pod_env import free_port
from sluice_trainer.backend_registry import backend_class
from sluice_trainer.batch.sequences import Sequence
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.megatron import parallel
from sluice_trainer.policy.learning_policy import LearningPolicy

GPUS = torch.cuda.device_count()
ENGINES = ["plain=", "fp32 head=--enable-fp32-lm-head"]
TRAINERS: dict[str, dict[str, Any]] = {
    f"{backend}, {name}": {"backend": backend, "precision": precision, "fp32_head": fp32_head}
    for backend in ("megatron", "fsdp")
    for name, precision, fp32_head in (
        ("bf16", "bf16", False),
        ("bf16, fp32 head", "bf16", True),
        ("fp32", "fp32", False),
    )
}
READY_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: prompt and response. sampled, scored: the engine's log-probs of the response, as it
    generated it and in one pass over all."""

    tokens: list[int]
    response: int
    sampled: Tensor
    scored: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="Hugging Face directory, bf16 weights")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="longest response")
    parser.add_argument("--inside", type=int, default=4, help="sequences followed layer by layer")
    parser.add_argument("--engine", action="append", help=f"default: {ENGINES}")
    parser.add_argument("--engine-args", default="", help="more arguments of every engine")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or tiny(Path(scratch) / "model")
        prompt_ids, common = prompts(model, options.sequences), shlex.split(options.engine_args)
        answers = {}
        for entry in options.engine or ENGINES:
            name, _, arguments = entry.partition("=")
            answers[name] = generated(
                model, prompt_ids, options.tokens, common + shlex.split(arguments)
            )
        first = next(iter(answers.values()))
        followed = [a.tokens[:-1] for a in first[: options.inside]]
        dumped = dumps(model, followed, Path(scratch) / "dump", common)
        end_to_end(model, answers)
        inside(model, followed, dumped)
        alone(model, first)
        parallel.shutdown()


# --- the engine


def prompts(model: Path, count: int) -> list[list[int]]:
    """Sums to do, as a chat where the tokenizer knows chats; random tokens without a tokenizer."""
    if not has_tokenizer(model):
        generator = torch.Generator().manual_seed(5)
        return torch.randint(3, 500, (count, 24), generator=generator).tolist()
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [f"What is {17 + 3 * i} + {5 * i + 8}? Think step by step." for i in range(count)]
    if not tokenizer.chat_template:
        return [tokenizer(text)["input_ids"] for text in texts]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]


def has_tokenizer(model: Path) -> bool:
    return (model / "tokenizer_config.json").exists()


class Engine:
    """SGLang in bf16, on one GPU or a CPU, for as long as this is open."""

    def __init__(self, model: Path, *arguments: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        settings = ["--dtype", "bfloat16", "--disable-radix-cache", *arguments]
        settings += [] if has_tokenizer(model) else ["--skip-tokenizer-init"]
        self._process = small_engine(model, port, *settings, cpu=not GPUS)

    def __enter__(self) -> Engine:
        asyncio.run(self._ready())
        return self

    async def _ready(self) -> None:
        async with Client(self.url) as engine:
            await self._process.ready(engine, READY_SECONDS)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def ask(self, prompts: list[list[int]], tokens: int, **changes: Any) -> list[dict[str, Any]]:
        """meta_info of each answer."""
        sampling = {"temperature": 1.0, "max_new_tokens": tokens}
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True} | changes
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + "/generate", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return [response["meta_info"] for response in json.loads(answer.read())]


def generated(
    model: Path, prompt_ids: list[list[int]], tokens: int, arguments: list[str]
) -> list[Answer]:
    """An answer to each prompt, of 8 tokens or more."""
    with Engine(model, *arguments) as engine:
        said = [meta["output_token_logprobs"] for meta in engine.ask(prompt_ids, tokens)]
        whole = [p + [e[1] for e in entries] for p, entries in zip(prompt_ids, said, strict=True)]
        scored = engine.ask(whole, 0, logprob_start_len=0)
    return [
        Answer(
            tokens=sequence,
            response=len(entries),
            sampled=torch.tensor([e[0] for e in entries]),
            scored=torch.tensor([e[0] for e in meta["input_token_logprobs"][-len(entries) :]]),
        )
        for sequence, entries, meta in zip(whole, said, scored, strict=True)
        if len(entries) >= 8
    ]


def dumps(
    model: Path, sequences: list[list[int]], directory: Path, arguments: list[str]
) -> list[stages.Stages]:
    """The engine's stages of each sequence, by its own dump of tensors."""
    settings = [*arguments, "--debug-tensor-dump-output-folder", str(directory)]
    settings += ["--disable-cuda-graph"] if GPUS else []
    with Engine(model, *settings) as engine:
        for tokens in sequences:
            engine.ask([tokens], 2)  # a pass is written by the next one
    return [stages.of_sglang(directory, tokens) for tokens in sequences]


# --- reference and trainers


def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).to(DEVICE)


@torch.no_grad()
def exact(reference: Any, answer: Answer) -> Tensor:
    """Log-probs of the response by transformers, [response]."""
    ids = torch.tensor([answer.tokens], device=DEVICE)
    log_p = reference(ids).logits[0, :-1].float().log_softmax(-1)
    return log_p.gather(-1, ids[0, 1:, None])[-answer.response :, 0].cpu()


def policy(model: Path, *, backend: str, precision: str, fp32_head: bool) -> LearningPolicy:
    spec = RLJobSpec.model_validate(
        {
            "model": {"path": str(model), "fp32LmHead": fp32_head},
            "data": {"prompts": [{"path": "none.jsonl"}]},
            "reward": {"type": "random"},
            "trainer": {
                "gpusPerNode": min(GPUS, 1),
                "steps": 1,
                "backend": backend,
                "precision": precision,
            },
        }
    )
    learning_policy = backend_class(spec)(spec, model_dir=model, timeout=timedelta(seconds=300))
    assert isinstance(learning_policy, LearningPolicy)
    return learning_policy


def sequence(tokens: list[int], response: int) -> Sequence:
    import numpy as np

    return Sequence(np.array(tokens, np.int32), response)


# --- the three tables


def end_to_end(model: Path, answers: dict[str, list[Answer]]) -> None:
    exact_model = reference(model)
    truth = {name: [exact(exact_model, a) for a in said] for name, said in answers.items()}
    del exact_model
    rows: dict[str, dict[str, list[Tensor]]] = {name: {} for name in TRAINERS}
    for trainer, settings in TRAINERS.items():
        learner = policy(model, **settings)
        for name, said in answers.items():
            rows[trainer][name] = learner.log_probs([sequence(a.tokens, a.response) for a in said])
        del learner
    for name, said in answers.items():
        sampled = [a.sampled for a in said]
        print(f"\nlog-probs of {sum(a.response for a in said)} tokens of SGLang, bf16, {name}")
        print(f"{'':34} {'against float32':>22} {'against the engine':>22}")
        line("engine, as it sampled", sampled, truth[name], sampled)
        line("engine, in one pass", [a.scored for a in said], truth[name], sampled)
        for trainer in TRAINERS:
            line(f"trainer, {trainer}", rows[trainer][name], truth[name], sampled)


def line(who: str, values: list[Tensor], truth: list[Tensor], sampled: list[Tensor]) -> None:
    distances = [(torch.cat(values) - torch.cat(other)).abs() for other in (truth, sampled)]
    shown = [f"{d.mean():10.6f} (max {d.max():.3f})" for d in distances]
    print(f"{who:34} {shown[0]:>22} {shown[1]:>22}")


def inside(model: Path, sequences: list[list[int]], dumped: list[stages.Stages]) -> None:
    """Distances of every stage from the reference, as shares of its size; means over sequences."""
    exact_model = reference(model)
    truth = [
        _recorded(stages.of_transformers(exact_model.model), exact_model, s) for s in sequences
    ]
    del exact_model
    columns = {"SGLang": dumped}
    for backend in ("megatron", "fsdp"):
        learner = policy(model, backend=backend, precision="bf16", fp32_head=False)
        modules = _modules(learner, backend)
        columns[backend] = []
        for tokens in sequences:
            with stages.recorded(modules) as kept:
                learner.log_probs([sequence([*tokens, 0], 1)])
            columns[backend].append(kept)
        del learner
    layers = 1 + max(int(n.split(".")[0]) for n in truth[0] if n[0].isdigit())
    shown = sorted({0, layers // 4, layers // 2, 3 * layers // 4, layers - 1})
    names = [f"{i}.{part}" for i in shown for part in (*stages.WITHIN, "out")]
    print("\nstages in bf16, distance from float32 as a share of the stage's size")
    print(f"{'':16}" + "".join(f"{who:>12}" for who in columns))
    for name in ("embedding", *names, "final norm"):
        cells = [_mean_off(name, kept, truth) for kept in columns.values()]
        print(f"{name:16}" + "".join(f"{cell:>12}" for cell in cells))


def _mean_off(name: str, kept: list[stages.Stages], truth: list[stages.Stages]) -> str:
    """A dash where a release of the engine does not dump the stage under the name we know."""
    if any(name not in replay for replay in kept):
        return "-"
    pairs = zip(kept, truth, strict=True)
    return f"{sum(stages.off(k[name], t[name]) for k, t in pairs) / len(truth):.5f}"


def _modules(learning_policy: Any, backend: str) -> dict[str, torch.nn.Module]:
    learner = learning_policy._learner
    if backend == "fsdp":
        return stages.of_transformers(learner.net.model.model)
    return stages.of_megatron(learner.chunks[0].module)


@torch.no_grad()
def _recorded(modules: dict[str, torch.nn.Module], model: Any, tokens: list[int]) -> stages.Stages:
    with stages.recorded(modules) as kept:
        model(torch.tensor([tokens], device=DEVICE))
    return kept


def alone(model: Path, answers: list[Answer]) -> None:
    """Distances of log-probs from the reference where one kind of part is in bf16."""
    exact_model = reference(model)
    truth = torch.cat([exact(exact_model, a) for a in answers])
    print("\none kind of part in bf16, all others in float32: log-probs off by")
    for kind in stages.KINDS:
        changed = reference(model)
        with stages.in_bf16(kind, changed):
            d = (torch.cat([exact(changed, a) for a in answers]) - truth).abs()
        print(f"{kind:38} {d.mean():10.6f} (max {d.max():.3f})")


def tiny(directory: Path) -> Path:
    """A Llama of four layers whose logits are as large as a trained model's, in bf16."""
    torch.manual_seed(2)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data *= 5
    model.bfloat16().save_pretrained(directory)
    return directory


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
