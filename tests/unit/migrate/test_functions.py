"""Functions of slime and verl are recognized and run; what sluice does not support is reported."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice_migrate.functions import slime_generate, verl_agent_loop
from sluice_migrate.stubs import import_hooks
from sluice_rollout.user_functions import loading
from tests.unit.buffer.buffer_tools import make_job
from tests.unit.gateway.gateway_tools import open_registry, token_ids
from tests.unit.rollout.scripted_engine import PARAMS, Script, scripted_runner

SLIME = """
from slime.utils.http_utils import post
from slime.utils.types import Sample

async def ask_engine(args, sample, params, **more):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"text": sample.prompt, "sampling_params": params | more})
    entries = output["meta_info"]["output_token_logprobs"]
    sample.tokens = args.tokenizer.encode(sample.prompt, add_special_tokens=False)
    sample.append_response_tokens(
        args, tokens=[e[1] for e in entries], log_probs=[e[0] for e in entries],
        meta_info=output["meta_info"], text=output["text"],
    )
    return sample

async def plain(args, sample, sampling_params):
    return await ask_engine(args, sample, sampling_params)

async def removed(args, sample, sampling_params):
    sample = await ask_engine(args, sample, sampling_params)
    sample.remove_sample = True
    return sample

async def several(args, sample, sampling_params):
    return [await ask_engine(args, sample, sampling_params), sample]

async def failed(args, sample, sampling_params):
    sample = await ask_engine(args, sample, sampling_params)
    sample.status = Sample.Status.FAILED
    return sample

async def invented(args, sample, sampling_params):
    sample = await ask_engine(args, sample, sampling_params)
    sample.append_response_tokens(args, tokens=[7], log_probs=[-0.1])
    return sample

async def argument(args, sample, sampling_params):
    return args.max_turns

async def nothing(args, sample, sampling_params):
    await ask_engine(args, sample, sampling_params)

async def picture(args, sample, sampling_params):
    await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
               {"text": "x", "image_data": ["x"]})

async def stranger(args, sample, sampling_params):
    await post(f"http://sk-0.0.0-x@127.0.0.1:{args.sglang_router_port}/generate", {"text": "x"})

def late(args, sample, sampling_params):
    return sample

async def short(args, sample, sampling_params):
    return await ask_engine(args, sample, sampling_params, max_new_tokens=0)
"""
VERL = """
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput

class Loop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        ids = await self.apply_chat_template(kwargs["raw_prompt"])
        out = await self.server_manager.generate(
            "r", prompt_ids=ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(prompt_ids=ids, response_ids=out.token_ids,
                               response_mask=[1] * len(out.token_ids), metrics={})

class Asks(Loop):
    async def run(self, sampling_params, **kwargs):
        return self.config.trainer.n_gpus_per_node

class Pictures(Loop):
    async def run(self, sampling_params, **kwargs):
        await self.server_manager.generate(
            "r", prompt_ids=[1], sampling_params={}, image_data=["x"]
        )

class Uneven(Loop):
    async def run(self, sampling_params, **kwargs):
        return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[], metrics={})
"""


async def run(code: str, name: str, directory: Path, **changes: Any) -> Sample:
    """Play a sample with a function of this code."""
    path = directory / f"function_{name}.py"
    path.write_text(code)
    async with open_registry(directory, **changes) as registry:
        loaded = loading.load_function(f"{path}:{name}", registry.spec)
        assert loaded
        runner = scripted_runner(loaded[1], Script(token_ids("one two")))
        runner.open_gateway, runner.tokenizer = registry.open_gateway, registry.encoder.tokenizer
        runner.generator.decode = registry.encoder.decode
        params = PARAMS | {"max_new_tokens": 50, "top_p": 1.0, "top_k": -1, "stop": None}
        return await runner(Prompt(3, "hi"), [1], Sample(0), params)


@pytest.mark.parametrize(
    ("code", "name"), [(SLIME, "plain"), (VERL, "Loop")], ids=["slime", "verl"]
)
async def test_a_function_of_another_project_is_recognized(
    code: str, name: str, tmp_path: Path
) -> None:
    sample = await run(code, name, tmp_path)
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, "")
    assert sample.tokens[sample.prompt_length :].tolist() == token_ids("one two")
    assert sample.trainable_tokens == len(token_ids("one two"))


async def test_a_removed_sample_trains_nothing(tmp_path: Path) -> None:
    sample = await run(SLIME, "removed", tmp_path)
    assert (sample.status, sample.trainable_tokens) == (SampleStatus.COMPLETED, 0)
    assert sample.response_length == len(token_ids("one two"))


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        (SLIME, "several", "returned 2 samples, but an episode has one"),
        (SLIME, "failed", "the status 'failed'"),
        (SLIME, "invented", "the engine has not sampled it there"),
        (SLIME, "argument", "args.max_turns: sluice does not set this argument of slime"),
        (SLIME, "nothing", "returned NoneType: expected slime's Sample"),
        (SLIME, "picture", "image_data: not supported"),
        (SLIME, "stranger", "the key does not belong to an episode"),
        (SLIME, "short", "before the model generated a token"),
        (VERL, "Asks", "config.trainer: sluice does not set this key of verl"),
        (VERL, "Pictures", "sluice does not support images, sound and video"),
        (VERL, "Uneven", "response_mask has 0 entries for 1 response_ids"),
    ],
    ids=[
        "slime: several samples", "slime: failed status", "slime: tokens not sampled",
        "slime: unknown argument", "slime: no sample", "slime: image", "slime: unknown key",
        "slime: no token", "verl: unknown key", "verl: image", "verl: mask of another length",
    ],
)  # fmt: skip
async def test_a_function_that_is_not_supported_fails_its_sample_with_a_reason(
    code: str, name: str, message: str, tmp_path: Path
) -> None:
    sample = await run(code, name, tmp_path)
    assert sample.status is SampleStatus.FAILED
    assert message in sample.error.splitlines()[0]
    assert not sample.trainable_tokens


async def test_arguments_of_the_job_reach_the_function(tmp_path: Path) -> None:
    sample = await run(SLIME, "argument", tmp_path, rollout__functionArgs={"max_turns": 3})
    assert "returned int: expected slime's Sample" in sample.error


async def test_arguments_of_the_job_reach_a_function_of_sluice(tmp_path: Path) -> None:
    code = """
async def play(episode, *, answer):
    await episode.generate()
    episode.reward(answer)
"""
    sample = await run(code, "play", tmp_path, rollout__functionArgs={"answer": 0.5})
    assert sample.reward == 0.5
    with pytest.raises(ConfigurationError, match="does not take what spec"):
        await run(code, "play", tmp_path, rollout__functionArgs={"question": 1})


def test_a_function_that_is_not_async_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs.py"
    path.write_text(SLIME)
    with pytest.raises(ConfigurationError, match="late is not async: expected"):
        loading.load_function(f"{path}:late", make_job(tmp_path).spec)


def test_other_functions_are_not_mistaken_for_those_of_slime_and_verl() -> None:
    async def play(episode: Any) -> None: ...

    async def two(args: Any, sample: Any) -> None: ...

    class AgentLoopBase: ...

    assert not slime_generate.is_generate(play)
    assert not slime_generate.is_generate(two)
    assert not slime_generate.is_generate(print)
    assert not verl_agent_loop.is_agent_loop(play)
    assert not verl_agent_loop.is_agent_loop(AgentLoopBase)


def test_a_module_without_a_stub_is_named() -> None:
    import_hooks.install()
    with pytest.raises(
        ImportError, match=r"slime\.rollout\.data_source is not installed, and sluice has no stub"
    ):
        importlib.import_module("slime.rollout.data_source")


def test_other_modules_of_an_installed_project_are_used(tmp_path: Path) -> None:
    """Run in a new process, in which `slime` is the package of this directory."""
    package = tmp_path / "slime" / "utils"
    package.mkdir(parents=True)
    for path in (package.parent, package):
        (path / "__init__.py").write_text("")
    (package / "types.py").write_text("raise ImportError('it wants Ray')")
    (package / "words.py").write_text("WORD = 'theirs'")
    code = """
from sluice_migrate.stubs import import_hooks
import_hooks.install()
import slime, slime.utils.words
from slime.utils.types import Sample
print(slime.__file__ is not None, slime.utils.words.WORD, Sample.__module__)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["True", "theirs", "sluice_migrate.stubs.slime.types"]
