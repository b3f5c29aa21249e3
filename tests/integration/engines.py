"""A real SGLang server, the tiny model that it serves, and transformers as the judge of its
numbers.

It runs on the CPU; if there are GPUs, on the last one of them, and weights come to it over NCCL
from the first.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from sluice.engines.sglang import Sglang as SglangEngine
from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.runtime.pod_env import free_port
from sluice_operator.cluster.local.translate import NVLINK

WORDS = 2040
CONTEXT = 4096
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{% for t in tools or [] "
    "%}{{ t.name }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_READY_SECONDS = 240.0


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def device() -> str:
    """The device on which the sender of weights holds them."""
    return "cuda" if gpus() else "cpu"


def backend() -> str:
    return "nccl" if gpus() else "gloo"


def tolerance() -> float:
    """Tolerance of log-probs against transformers in float32: the engine computes in float32 too,
    on GPUs in bfloat16."""
    return 0.1 if gpus() else 1e-4


if gpus():  # before NCCL reads them, as a job's processes on one machine have them
    for name, value in NVLINK.items():
        os.environ.setdefault(name, value)


def engine_environment() -> dict[str, str]:
    """Environment of a process that takes an engine's place."""
    if gpus():
        return {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpus() - 1)}
    # As `sluice run` starts one; nothing is compiled, and the compiler is not imported.
    on_cpu = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    return {**os.environ, **on_cpu}


_CPU_ARGUMENTS = (
    "--device cpu --attention-backend torch_native --max-total-tokens 32768 --sleep-on-idle "
    "--dtype float32 --enable-metrics"
)
_GPU_ARGUMENTS = (
    "--attention-backend triton --sampling-backend pytorch --grammar-backend none "
    "--disable-cuda-graph --mem-fraction-static 0.3 --dtype bfloat16 --enable-metrics"
)


def save_model(directory: Path, seed: int, family: str = "Qwen3", **changes: Any) -> Path:
    """Qwen3-shaped, float32, random weights, and a tokenizer of 2048 words (`w0000` ...). No word
    ends a response.

    family: of transformers' classes; changes: of its config.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<c>", "<user>", "<assistant>", "<unused>", "<a>", "<b>"]
    vocabulary = {word: i for i, word in enumerate([*words, *(f"w{i:04d}" for i in range(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unused>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    settings = {
        "architectures": [f"{family}ForCausalLM"],
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "dtype": "float32",
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{family}Config")(**{**settings, **changes})
    torch.manual_seed(seed)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(directory)
    return directory


@cache
def _load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory, dtype="float32", attn_implementation="eager"
    ).eval()


def log_probs(
    directory: Path, tokens: Iterable[int], response: int, temperature: float = 1.0
) -> list[float]:
    """Log-probabilities of the last `response` tokens, by transformers."""
    import torch

    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        logits = _load(directory)(ids).logits[0, -response - 1 : -1] / temperature
    values: list[float] = logits.log_softmax(-1).gather(1, ids[0, -response:, None])[:, 0].tolist()
    return values


def tensors(directory: Path) -> list[tuple[str, Any]]:
    """The checkpoint's tensors by their Hugging Face names."""
    from safetensors.torch import load_file

    return sorted(load_file(directory / "model.safetensors").items())


def distance(actual: Iterable[float], expected: Iterable[float]) -> float:
    pairs = list(zip(actual, expected, strict=True))
    assert pairs
    return max(abs(a - b) for a, b in pairs)


def call(url: str, body: Any = None, timeout: float = 60.0) -> tuple[int, Any]:
    """(status, answer) of a GET, or of a POST if there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    return status, json.loads(text) if text[:1] in (b"{", b"[") else text.decode()


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The value that `condition` returns as soon as it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}")


_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def with_us(*command: object) -> list[str]:
    """The command, for a process that the kernel kills when this one ends, however it ends.

    Not by a preexec_fn: it runs between fork and exec, in a copy of a process whose other threads
    (gRPC's) may hold locks, and such a child now and then hangs or dies without a word.
    """
    return [sys.executable, "-I", "-S", "-c", _WITH_PARENT, *map(str, command)]


class Sglang:
    """SGLang with our plugin, as a rollout pod starts it, with all its processes in a session of
    their own."""

    script = PATH / "launch_server.py"

    def __init__(self, model: Path, log: Path, *arguments: str, **variables: str) -> None:
        self.model, self.log, self.port = model, log, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.address = f"127.0.0.1:{self.port}"
        environment = engine_environment() | {
            "HF_HUB_OFFLINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", **variables,
        }  # fmt: skip
        command = (
            f"{sys.executable} {self.script} --model-path {model} --host 127.0.0.1 "
            f"--port {self.port} "
            f"--skip-server-warmup {_GPU_ARGUMENTS if gpus() else _CPU_ARGUMENTS}"
        )
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                with_us(*command.split(), *arguments),
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"SGLang ended:\n{self.log.read_text()[-3000:]}"
            try:
                return call(self.url + "/health", timeout=5)[0] == 200
            except OSError:
                return False

        until(ready, _READY_SECONDS, "SGLang is ready")

    engine = SglangEngine()

    def load_weights(self, model: Path, version: str, *, flush: bool = True) -> None:
        body = {"model_path": str(model), "weight_version": version, "flush_cache": flush}
        status, answer = call(self.url + "/update_weights_from_disk", body)
        assert status == 200, answer

    def update(self, mode: str, model: Path, version: str) -> None:
        """Pause, bring other weights, continue: what a trainer does to an engine."""
        assert call(self.url + "/pause_generation", {"mode": mode})[0] == 200
        self.load_weights(model, version)
        assert call(self.url + "/continue_generation", {})[0] == 200

    def reset(self, version: str = "0") -> None:
        """Idle, not paused, no update open, the first weights, under this name."""
        call(self.url + "/abort_request", {"abort_all": True})
        call(self.url + "/continue_generation", {})
        call(self.url + "/end_weight_update", {})
        self.load_weights(self.model, version)

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def part(self, name: str) -> psutil.Process:
        """Return one of the engine's processes: scheduler, detokenizer."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if f"sglang::{name}" in " ".join(child.cmdline()))

    def load(self, name: str) -> int:
        """num_running_reqs, num_used_tokens, ... as the scheduler sees them now."""
        return sum(int(rank[name]) for rank in call(self.url + "/v1/loads")[1]["loads"])

    def metric(self, name: str) -> float | None:
        """Of all ranks, as it was told last: every so many passes. None: not told yet."""
        lines = call(self.url + "/metrics")[1].splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith(f"sglang:{name}{{")]
        return sum(values) if values else None

    async def generated(self, tokens: int) -> None:
        """Wait until running requests hold so many tokens."""
        await asyncio.to_thread(
            until, lambda: self.load("num_used_tokens") >= tokens, 20.0, f"{tokens} tokens"
        )

    async def running(self, requests: int) -> None:
        """Wait until the scheduler runs so many requests.

        One that waits in front of it, as all do in a pause, cannot be taken back: SGLang 0.5.21
        sends the scheduler one abort for a request, which does not know it yet.
        """
        await asyncio.to_thread(
            until,
            lambda: self.load("num_running_reqs") >= requests,
            20.0,
            f"{requests} requests run",
        )

    async def idle(self, seconds: float) -> None:
        await asyncio.to_thread(
            until, lambda: self.load("num_running_reqs") == 0, seconds, "the engine is idle"
        )

    def kill(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.process.wait(20)
