"""Shared parts of the trainer's tests: tiny models, specs, batches and child processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from sluice.api import RLJobSpec
from sluice.runtime.pod_env import free_port
from sluice.samples.sample import Experts
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.backend import Backend
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.model.huggingface_config import read_shape

ROOT = Path(__file__).parents[3]

VOCAB = 131
TIMEOUT = 150
# Adam's epsilon. With 1e-8 a gradient that is only rounding error moves its weight by the full
# learning rate.
EPS = 1e-5
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MLA_YARN = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
_MIXTURE = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_SIGMOID = {
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "pad_token_id": 0,
}
_LATENT = {
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True, "num_hidden_layers": 4}),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {"rope_parameters": _LLAMA3}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": _YARN}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"head_dim": 32, **_MIXTURE, "num_experts": 4, "norm_topk_prob": True},
    ),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            **_MIXTURE,
            "num_experts": 4,
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
        },
    ),
    "glm4": ("Glm4", {"head_dim": 32, "attention_bias": True, "pad_token_id": 0}),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 32,
            **_MIXTURE,
            **_SIGMOID,
            "n_routed_experts": 4,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**_MIXTURE, **_SIGMOID, **_LATENT, "q_lora_rank": 32, "rope_parameters": _MLA_YARN},
    ),
    "moonlight": (
        "DeepseekV3",
        {**_MIXTURE, **_SIGMOID, **_LATENT, "q_lora_rank": None, "n_group": 1},
    ),
}
# Families that Megatron computes in another order than transformers: equal up to rounding.
REORDERED = ("qwen3-yarn", "qwen3-moe", "qwen3-moe-mixed", "glm4-moe", "deepseek-v3", "moonlight")
MIXTURES = ("qwen3-moe", "qwen3-moe-mixed", "glm4-moe", "deepseek-v3", "moonlight")


# Families that only FSDP2 trains.
GATED_DELTA = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOWED = {"head_dim": 32, "sliding_window": 8}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WINDOW_AND_ALL = {"layer_types": ["sliding_attention", "full_attention"]}
_GLM_LATENT = {
    **_MIXTURE,
    **_LATENT,
    "n_routed_experts": 4,
    "n_group": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 32,
    "mlp_layer_types": ["dense", "sparse"],
    "pad_token_id": 0,
}
# With few heads many keys have the score 0, and which of them are chosen depends on their number.
_INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 32}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "Qwen3Next",
        {**GATED_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 48},
    ),
    "qwen3.5": ("Qwen3_5Text", GATED_DELTA),
    "qwen3.5-moe": (
        "Qwen3_5MoeText",
        {**GATED_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 48},
    ),
    "gpt-oss": (
        "GptOss",
        {
            **_WINDOWED,
            **_LOCAL_EXPERTS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "glm4-moe-lite": ("Glm4MoeLite", _GLM_LATENT),
    "glm-moe-dsa": ("GlmMoeDsa", {**_GLM_LATENT, **_INDEXER}),
    "deepseek-v3.2": ("DeepseekV32", {**_GLM_LATENT, **_INDEXER, "num_experts": 4}),
    "minimax-m2": ("MiniMaxM2", {**_LOCAL_EXPERTS, **_TOKENS, "head_dim": 32}),
    "gemma2": ("Gemma2", {**_WINDOWED, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3Text", {**_WINDOWED, **_WINDOW_AND_ALL}),
    "gemma4": (
        "Gemma4Text",
        {
            **_WINDOWED,
            **_WINDOW_AND_ALL,
            **_TOKENS,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "gemma4-moe": (
        "Gemma4Text",
        {
            **_WINDOWED,
            **_WINDOW_AND_ALL,
            **_TOKENS,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "phi4": ("Phi3", {**_TOKENS, "sliding_window": 16}),
    "mistral": ("Mistral", _WINDOWED),
    "mixtral": ("Mixtral", {**_LOCAL_EXPERTS, **_TOKENS}),
    "granite": ("Granite", {"logits_scaling": 8.0}),
    "cohere": ("Cohere", {**_TOKENS, "logit_scale": 0.5}),
    "seed-oss": ("SeedOss", {**_TOKENS, "head_dim": 32}),
    "olmo3": ("Olmo3", {**_TOKENS, **_WINDOW_AND_ALL, "sliding_window": 8}),
    "smollm3": ("SmolLM3", _TOKENS),
}
# transformers computes these wrong without packages that are not installed.
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron-h": (
        "NemotronH",
        {
            **_TOKENS,
            "head_dim": 16,
            "layers_block_type": ["mamba", "mlp", "attention", "moe"],
            "num_hidden_layers": 4,
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "chunk_size": 4,  # states of earlier chunks have not decayed
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 48,
        },
    ),
}


def save_model(family: str, directory: Path) -> Path:
    """Save a checkpoint of one of the `FAMILIES`."""
    return save_kind(*FAMILIES[family], directory)


def save_kind(
    kind: str,
    changes: dict[str, Any],
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Save a checkpoint whose norms are not 1 and biases not 0, so that a mix-up shows.

    kind: prefix of transformers' `...Config`. dtype: of all but biases for the choice of experts.
    """
    import transformers  # takes seconds, and child processes do not need it

    config = getattr(transformers, f"{kind}Config")(**{**_SHAPE, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        else:
            parameter.data.normal_(0, 0.08)
    model.to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.empty_like(buffer, dtype=torch.float32).normal_(0, 0.05)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    _add_settings(directory / "config.json")
    return directory


def _add_settings(file: Path) -> None:
    """Add settings that SGLang reads and released files have; transformers does not write them."""
    config = json.loads(file.read_text())
    if "linear_num_key_heads" in config:
        config["full_attention_interval"] = 4
    if "kv_lora_rank" in config:
        config |= {"first_k_dense_replace": 1, "moe_layer_freq": 1}
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    if config["model_type"] == "gemma2":
        config["hidden_act"] = config["hidden_activation"]
    if config["model_type"] == "minimax_m2":
        config |= {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}
        config |= {"qk_norm_type": "per_layer", "rotary_dim": 32}
    file.write_text(json.dumps(config))


def save_reward_model(directory: Path) -> Path:
    """Save a reward model as transformers writes it: a decoder with a value head."""
    import transformers

    torch.manual_seed(1)
    model = transformers.Qwen3ForSequenceClassification(
        transformers.Qwen3Config(**_SHAPE, head_dim=32, num_labels=1)
    )
    for parameter in model.parameters():
        parameter.data.normal_(0.2 if parameter.dim() == 1 else 0.0, 0.1)
    model.save_pretrained(directory)
    return directory


def hf_reward_model(directory: Path) -> Any:
    import transformers

    kind = transformers.Qwen3ForSequenceClassification
    return kind.from_pretrained(directory, attn_implementation="sdpa").eval()


def hf_values(model: Any, sequence: TrainSequence) -> torch.Tensor:
    """Return transformers' values of the states before each response token, [response]."""
    tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
    hidden = model.model(input_ids=tokens[None]).last_hidden_state[0, :-1]
    values: torch.Tensor = model.score(hidden).squeeze(-1)[-sequence.response_length :]
    return values


def hf_model(directory: Path, attention: str = "sdpa") -> Any:
    import transformers

    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(directory, attn_implementation=attention).eval()


def spec(
    directory: Path, /, *, algorithm: dict[str, Any] | None = None, **changes: Any
) -> RLJobSpec:
    """Return the spec of a job for a CPU trainer.

    changes: groups of the spec; `trainer` is merged.
    """
    trainer = {
        "gpusPerNode": 0,
        "steps": 20,
        "optimizer": {"lr": 1e-3, "eps": EPS},
        "maxTokensPerGpu": 64,
    }
    manifest = {
        "model": {"path": str(directory)},
        "data": {"prompts": [{"path": "prompts.jsonl"}], "seed": 1},
        "reward": {"type": "exact_match"},
        "algorithm": algorithm or {},
        **changes,
        "trainer": {**trainer, **changes.get("trainer", {})},
    }
    return RLJobSpec.model_validate(manifest)


def batch(count: int, seed: int, *, longest: int = 40) -> list[TrainSequence]:
    """Draw sequences of uneven lengths with some masked tokens; one has no trainable token."""
    random = np.random.default_rng(seed)
    sequences = []
    for index in range(count):
        length = int(random.integers(3, longest))
        response = int(random.integers(1, length))
        mask = (random.random(response) > 0.2).astype(np.uint8) * (index != 1)
        sequences.append(
            TrainSequence(
                tokens=random.integers(0, VOCAB, length).astype(np.int32),
                response_length=response,
                loss_mask=mask.astype(np.uint8),
                rollout_log_probs=(-5 - random.random(response)).astype(np.float32),
                advantage=float(random.normal()),
                group_id=index // 4,
                index=index % 4,
            )
        )
    return sequences


def with_experts(sequences: list[TrainSequence], model: Path) -> list[TrainSequence]:
    """Add experts to all tokens, except the last one of every second sequence."""
    shape = read_shape(model)
    assert shape.experts
    count, topk, layers = shape.experts.count, shape.experts.per_token, shape.layers
    random = np.random.default_rng(len(sequences))

    def experts(sequence: TrainSequence) -> Experts:
        rows = len(sequence.tokens) - 1 - sequence.index % 2
        drawn = [random.permutation(count)[:topk] for _ in range(rows * layers)]
        return np.array(drawn, np.uint8).reshape(rows, layers * topk)

    return [replace(s, experts=experts(s)) for s in sequences]


def totals(sequences: list[TrainSequence]) -> BatchTotals:
    return BatchTotals(len(sequences), sum(int(s.loss_mask.sum()) for s in sequences))


def _module(script: str) -> str:
    return f"{__package__}.{script.removesuffix('.py')}"


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a trainer process that runs `script` of this directory."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", _module(script), *map(str, arguments)]
    return subprocess.Popen(
        command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# Importing torch and Megatron takes longer than what ranks do, so ranks are forked from a process
# that has imported them.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "sluice_trainer.megatron.policy",
        "sluice_trainer.fsdp.policy",
        "sluice_trainer.batch.preparation",
        "transformers.models.qwen3.modeling_qwen3",
    ]
)


def run(script: str, *arguments: object, world: int = 1) -> list[Any]:
    """Run `script` on `world` ranks, and return the last line that each printed, parsed as JSON."""
    # The server of forks has the environment of the first caller.
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    if world > 1:
        env |= {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
    with TemporaryDirectory() as name, ExitStack() as cleanup:
        outputs = [Path(name, str(rank)) for rank in range(world)]
        words = [str(argument) for argument in arguments]
        ranks = [
            _FORKS.Process(
                target=_rank,
                args=(
                    _module(script),
                    words,
                    env | {"RANK": str(rank)} if world > 1 else env,
                    output,
                ),
            )
            for rank, output in enumerate(outputs)
        ]
        for process in ranks:
            process.start()
            cleanup.callback(process.kill)
        return [_result(process, output) for process, output in zip(ranks, outputs, strict=True)]


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the process of `sluice convert` with these arguments."""
    with TemporaryDirectory() as name:
        output, words = Path(name, "0"), [str(argument) for argument in arguments]
        process = _FORKS.Process(
            target=_rank, args=("sluice_trainer.convert", words, dict(os.environ), output)
        )
        process.start()
        process.join(TIMEOUT)
        process.kill()  # if it has not ended
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(
            words, process.exitcode, output.read_text(), output.with_suffix(".err").read_text()
        )


def _rank(module: str, arguments: list[str], env: dict[str, str], output: Path) -> None:
    os.environ.update(env)
    with output.open("w") as out, output.with_suffix(".err").open("w") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
    warnings.simplefilter("ignore")  # as `-W ignore`
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")


def _result(process: Any, output: Path) -> Any:
    process.join(TIMEOUT)
    err = output.with_suffix(".err")
    assert process.exitcode == 0, (
        f"exit code {process.exitcode}\n{err.read_text()[-4000:] if err.exists() else ''}"
    )
    return json.loads(output.read_text().splitlines()[-1])


def hf_log_probs(
    model: Any, sequence: TrainSequence, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return transformers' log-probs and entropies of the response tokens, [response] each."""
    tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0, :-1].float() / temperature
    log_p = torch.log_softmax(logits, -1)
    chosen = log_p.gather(-1, tokens[1:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return chosen[-sequence.response_length :], entropy[-sequence.response_length :]


def chunks(values: list[Any], count: int) -> Iterator[list[Any]]:
    """Return `count` equal parts, in order."""
    size = len(values) // count
    return (values[i * size : (i + 1) * size] for i in range(count))


def plain_loss(
    model: Any, shard: list[TrainSequence], totals: BatchTotals, frozen: Any = None
) -> torch.Tensor:
    """Return the on-policy GRPO loss, computed one sequence at a time.

    The ratio is 1 in value and carries the gradient. frozen: the reference policy; if it is given,
    all optional terms are on: token mean, tis up to 1.5, entropy 0.01, low_var_kl 0.1.
    """
    total = torch.zeros(())
    for sequence in shard:
        log_probs, entropy = hf_log_probs(model, sequence)
        mask = torch.from_numpy(sequence.loss_mask).float()
        ratio = (log_probs - log_probs.detach()).exp()
        terms = -ratio * sequence.advantage
        if frozen is None:
            total = total + (terms * mask).sum() / mask.sum().clamp(min=1) / totals.sequences
            continue
        rollout = torch.from_numpy(sequence.rollout_log_probs)
        terms = terms * (log_probs.detach() - rollout).exp().clamp(0, 1.5)
        with torch.no_grad():
            reference, _ = hf_log_probs(frozen, sequence)
        gap = reference - log_probs
        terms = terms - 0.01 * entropy + 0.1 * (gap.exp() - 1 - gap).clamp(-10, 10)
        total = total + (terms * mask).sum() / totals.tokens
    return total


def save(policy: Backend, directory: Path, step: int) -> None:
    """Save a whole checkpoint and wait for it."""
    policy.begin_save(directory, step)
    policy.finish_save(directory, wait=True)
