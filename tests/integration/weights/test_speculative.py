"""Engines that verify proposed tokens sample from the policy, update after update.

The judge is transformers: of the distribution of responses, and of the log-probs of their tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice.api import RLJobSpec
from sluice.engines import engine_of
from sluice.engines.protocol import ServerPlacement
from sluice.model_parts import trained_names
from sluice_trainer.weights.disk import Disk, VersionDirectories
from sluice_trainer.weights.sender import WeightSender
from tests.algorithm_cases import manifest
from tests.distributions import chi_square_p
from tests.integration.engines import Sglang, _load, call, distance, gpus, log_probs, save_model
from tests.integration.trainer import tiny
from tests.integration.weights.tools import on_device, publish, serving

MakeSender = Callable[..., WeightSender]
JoinEngine = Callable[..., Any]
VARIABLE = "SLUICE_SPECULATIVE"
VOCABULARY = 16
PROMPT = [3, 4, 5, 6]
TOKENS = 3
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.3}
MIXTURE: dict[str, Any] = {
    **SMALL,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}
pytestmark = pytest.mark.skipif(gpus() > 0, reason="the arguments are those of a CPU")


def add_next_token_layer(directory: Path) -> None:
    """Add GLM-4.5's layer that predicts a further token, with the weights of its last layer."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    number = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    last, added = f"model.layers.{number - 1}.", f"model.layers.{number}."
    layer = {
        name.replace(last, added): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    norm, head = tensors["model.norm.weight"], tensors["lm_head.weight"]
    hidden = len(norm)
    layer |= {f"{added}{name}.weight": norm.clone() for name in ("enorm", "hnorm")}
    layer |= {
        f"{added}shared_head.norm.weight": norm.clone(),
        f"{added}shared_head.head.weight": head.clone(),
        f"{added}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{added}eh_proj.weight": torch.cat((torch.zeros(hidden, hidden), torch.eye(hidden)), 1),
    }
    save_file(tensors | layer, file, {"format": "pt"})


def arguments(speculative: dict[str, Any], model: str = "/m") -> tuple[list[str], dict[str, str]]:
    """Return arguments and variables of speculation, as a pod gets them."""
    spec = RLJobSpec.model_validate(
        manifest({}, {"rollout": {"speculative": speculative, "gpusPerReplica": 0}})
    )
    place = ServerPlacement(
        model=model, bind="b", port="1", index="0", draft=speculative.get("model")
    )
    launch = engine_of(spec).launch
    words = launch.args(spec, place)
    first, end = words.index("--speculative-algorithm"), words.index("--device")
    return words[first:end], {VARIABLE: launch.env(spec)[VARIABLE]}


def responses(engine: Sglang, count: int, **sampling: Any) -> list[dict[str, Any]]:
    """Return `meta_info` of that many responses to the prompt, with the tokens."""
    body = {
        "input_ids": [PROMPT] * count,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True, **sampling},
    }
    status, answers = call(f"{engine.url}/generate", body, timeout=300)
    assert status == 200, answers
    return [answer["meta_info"] | {"tokens": answer["output_ids"]} for answer in answers]


def policy(model: Path) -> Tensor:
    """Return the probability of each response of three tokens, by transformers."""
    pairs = torch.cartesian_prod(torch.arange(VOCABULARY), torch.arange(VOCABULARY))
    prompts = torch.tensor(PROMPT).repeat(len(pairs), 1)
    with torch.no_grad():
        probs = _load(model)(torch.cat((prompts, pairs), 1)).logits.softmax(-1)
    at = len(PROMPT) - 1
    first, second = probs[0, at], probs[::VOCABULARY, at + 1]
    third = probs[:, at + 2].view(VOCABULARY, VOCABULARY, VOCABULARY)
    return first[:, None, None] * second[:, :, None] * third


def check(engine: Sglang, model: Path, version: int, count: int = 400) -> None:
    """Check that an engine samples from the policy and reports its log-probs."""
    answers = responses(engine, count)
    counts, expected = torch.zeros((VOCABULARY,) * TOKENS), policy(model)
    for answer in answers:
        counts[tuple(answer["tokens"])] += 1
    for other in ((1, 2), (0, 2), (0, 1), (0,), (2,)):
        assert chi_square_p(counts.sum(other), expected.sum(other)) > 1e-6, other
    for answer in answers[:16]:
        entries = answer["output_token_logprobs"]
        assert [entry[1] for entry in entries] == answer["tokens"]
        assert answer["weight_versions"] == [{"version": str(version), "start": 0, "end": TOKENS}]
        judged = log_probs(model, PROMPT + answer["tokens"], TOKENS)
        assert distance([entry[0] for entry in entries], judged) < 1e-4
    passes = sum(answer["spec_verify_ct"] for answer in answers)
    assert count < passes < count * (TOKENS - 1), "some proposed tokens are accepted"


def save_eagle3_head(directory: Path, model: Path) -> Path:
    """Save an EAGLE-3 head with random weights for a model, in the form of SpecForge."""
    shape = json.loads((model / "config.json").read_text())
    hidden, heads, pairs = 64, shape["num_attention_heads"], shape["num_key_value_heads"]
    directory.mkdir()
    config = {
        name: shape[name]
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
        )
    }  # fmt: skip
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "hidden_act": "silu",
    }
    (directory / "config.json").write_text(json.dumps(config))
    size, inner = shape["head_dim"], shape["intermediate_size"]
    shapes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (VOCABULARY, hidden),
        "midlayer.self_attn.q_proj": (heads * size, 2 * hidden),
        "midlayer.self_attn.k_proj": (pairs * size, 2 * hidden),
        "midlayer.self_attn.v_proj": (pairs * size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * size),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    norms = ("norm", *(f"midlayer.{n}" for n in (
        "hidden_norm", "input_layernorm", "post_attention_layernorm",
    )))  # fmt: skip
    tensors = {f"{name}.weight": 0.1 * torch.randn(*of) for name, of in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    tensors["d2t"] = torch.zeros(VOCABULARY, dtype=torch.long)
    tensors["t2d"] = torch.ones(VOCABULARY, dtype=torch.bool)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def acceptance(engine: Sglang) -> float:
    """Return the tokens that a pass yields for the most likely responses to long prompts.

    SGLang's draft model does not see the first token of a prompt.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCABULARY, (16, 200), generator=generator).tolist()
    body = {"input_ids": prompts, "sampling_params": {"max_new_tokens": 24, "temperature": 0}}
    status, answers = call(f"{engine.url}/generate", body, timeout=300)
    assert status == 200, answers
    metas = [answer["meta_info"] for answer in answers]
    tokens = sum(meta["completion_tokens"] for meta in metas)
    return float(tokens / sum(meta["spec_verify_ct"] for meta in metas))


async def check_interrupted(engine: Sglang, sender: WeightSender, older: Path, newer: Path) -> None:
    """Check that a response that an update interrupts has the log-probs of both policies."""
    length = 400
    request = asyncio.to_thread(responses, engine, 1, max_new_tokens=length)
    running = asyncio.ensure_future(request)
    await engine.generated(40)
    await publish(sender, 2, newer)
    [answer] = await running
    before, after = answer["weight_versions"]
    assert (before["version"], after["version"]) == ("1", "2")
    assert 0 < before["end"] == after["start"] < length == after["end"]
    reported = [entry[0] for entry in answer["output_token_logprobs"]]
    tokens = PROMPT + answer["tokens"]
    for span, model in ((before, older), (after, newer)):
        part = slice(span["start"], span["end"])
        assert distance(reported[part], log_probs(model, tokens, length)[part]) < 1e-4
    assert answer["spec_verify_ct"] < length


@pytest.mark.timeout(600)
async def test_ngram_samples_from_the_policy_of_each_update(
    join_engine: JoinEngine, make_sender: MakeSender, tmp_path: Path
) -> None:
    first, second = (save_model(tmp_path / str(seed), seed, **SMALL) for seed in (1, 2))
    words, variables = arguments({"algorithm": "ngram", "steps": 4, "topK": 2})
    with serving(first, tmp_path / "log", *words, **variables) as engine:
        await join_engine("rollout-0", engine.address)
        sender = make_sender()
        for version, model in enumerate((first, second)):
            update = await publish(sender, version, model)
            assert (list(update.engines), update.failed) == (["rollout-0"], {})
            await asyncio.to_thread(check, engine, model, version)
        await check_interrupted(engine, sender, second, first)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("top_k", [1, 2])
async def test_updates_leave_the_draft_model_as_it_is(
    join_engine: JoinEngine, make_sender: MakeSender, tmp_path: Path, top_k: int
) -> None:
    """The draft has the first model's tensors: names and shapes that every update has too."""
    first, second = (save_model(tmp_path / str(seed), seed, **SMALL) for seed in (1, 2))
    draft = {"algorithm": "draft", "model": str(first), "steps": 3, "topK": top_k}
    words, variables = arguments(draft)
    disk = Disk(VersionDirectories(tmp_path / "versions", 1), first, drawn=False)
    with serving(first, tmp_path / "log", *words, **variables) as engine:
        await join_engine("rollout-0", engine.address)
        over_gloo, over_disk = make_sender(), make_sender(disk, attempt=2, transport="disk")
        updates = [(over_gloo, first), (over_gloo, second), (over_disk, first), (over_disk, second)]
        for version, (sender, model) in enumerate(updates):
            update = await publish(sender, version, model)
            assert (list(update.engines), update.failed) == (["rollout-0"], {})
            await asyncio.to_thread(check, engine, model, version)
            if model == first:
                assert await asyncio.to_thread(acceptance, engine) > 2.5, (
                    "what an equal draft proposes is accepted"
                )
            else:
                assert await asyncio.to_thread(acceptance, engine) < 2, (
                    "the draft is the first model still"
                )


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", ["mtp", "eagle3"])
async def test_heads_of_a_model_propose_for_the_policy_of_each_update(
    join_engine: JoinEngine, make_sender: MakeSender, tmp_path: Path, algorithm: str
) -> None:
    if algorithm == "mtp":
        models = [save_model(tmp_path / str(seed), seed, "Glm4Moe", **MIXTURE) for seed in (1, 2)]
        add_next_token_layer(models[0])
        head = None
    else:
        shape = {**SMALL, "num_hidden_layers": 8, "initializer_range": 0.2}
        models = [save_model(tmp_path / str(seed), seed, **shape) for seed in (1, 2)]
        head = str(save_eagle3_head(tmp_path / "head", models[0]))
    # Of more candidates of a random head one is accepted now and then.
    top_k = 4 if head else 1
    speculative = {"algorithm": algorithm, "model": head, "steps": 2, "topK": top_k}
    words, variables = arguments(speculative, str(models[0]))
    # The engine reads what no update brings: the layer that predicts a further token.
    with serving(models[0], tmp_path / "log", *words, **variables) as engine:
        await join_engine("rollout-0", engine.address)
        sender = make_sender()
        for version, weights in enumerate((1, 0)):
            config = json.loads((models[0] / "config.json").read_text())
            sent = dict(on_device(models[weights]))
            tensors = [(name, sent[name]) for name in trained_names(config, sent)]
            update = await publish(sender, version, tensors)
            assert (list(update.engines), update.failed) == (["rollout-0"], {})
            await asyncio.to_thread(check, engine, models[weights], version)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_layer_that_learns_proposes_more(
    join_engine: JoinEngine, make_sender: MakeSender, tmp_path: Path
) -> None:
    """`trainer.mtp`: the layer learns from responses of the engine, and comes with an update."""
    model = save_model(tmp_path / "model", 1, "Glm4Moe", **MIXTURE)
    add_next_token_layer(model)
    file = model / "model.safetensors"
    tensors = load_file(file)
    torch.manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith("eh_proj.weight"):
            tensor.normal_(0, 0.1)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    policy = dict(on_device(model))
    words, variables = arguments({"algorithm": "mtp", "steps": 2, "topK": 1}, str(model))
    with serving(model, tmp_path / "log", *words, **variables) as engine:
        await join_engine("rollout-0", engine.address)
        sender = make_sender()
        first = [(name, policy[name]) for name in trained_names(config, policy)]
        update = await publish(sender, 0, first)
        assert (list(update.engines), update.failed) == (["rollout-0"], {})
        before = await asyncio.to_thread(acceptance, engine)
        answers = await asyncio.to_thread(responses, engine, 64, max_new_tokens=48)
        job = {"model": str(model), "prompt": PROMPT, "steps": 40, "out": str(tmp_path / "hf")}
        job["responses"] = [answer["tokens"] for answer in answers]
        [learned] = await asyncio.to_thread(tiny.run, "train_mtp.py", json.dumps(job))
        assert learned["losses"][-1] < learned["losses"][0] - 0.3
        exported = dict(on_device(tmp_path / "hf"))
        assert all(torch.equal(exported[name], tensor) for name, tensor in first)
        copies = ("embed_tokens", "shared_head.head")
        layer = [n for n in exported if n not in dict(first) and not any(c in n for c in copies)]
        update = await publish(sender, 1, [*first, *((name, exported[name]) for name in layer)])
        assert (list(update.engines), update.failed) == (["rollout-0"], {})
        await asyncio.to_thread(check, engine, model, 1)
        assert await asyncio.to_thread(acceptance, engine) > before + 0.1
