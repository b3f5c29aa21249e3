"""verl's half of benchmarks/peers.py: one run of `verl.trainer.main_ppo`, and its steps."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.peers_settings import Setting
from benchmarks.peers_settings_verl import override, verl_settings
from sluice.api import RLJob
from sluice_trainer.step.rates import learning_rate

ROOT = Path(__file__).parents[1]
# Of a step here, and in verl's own log.
FIELDS = {
    "reward": "critic/rewards/mean",
    "entropy": "actor/entropy",
    "tokens": "response_length/mean",
}
BETWEEN_LOOKS = 0.05
_CROSS_ENTROPY = "flash_attn.ops.triton.cross_entropy"


def handicap(python: Path) -> str:
    """One sentence for a comparison with verl: whether it has the kernel for log-probs that its
    users have. python: of its environment.
    """
    importing = subprocess.run([python, "-c", f"import {_CROSS_ENTROPY}"], capture_output=True)
    if not importing.returncode:
        return f"verl has {_CROSS_ENTROPY} for its log-probs."
    return (
        f"verl has no {_CROSS_ENTROPY}, and takes log-probs row by row in Python, on padded rows "
        "one for each token: by its code and its times most of its step on a GPU. Its users have "
        "that kernel: compare generation and weights, not steps."
    )


def verl_run(
    job: RLJob, directory: Path, python: Path, seconds: float
) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, output and steps of verl's training. directory: has rows.jsonl, and gets the rest;
    python: of verl's environment.
    """
    spec, log = job.spec, directory / "verl.jsonl"
    rows = [json.loads(line) for line in (directory / "rows.jsonl").read_text().splitlines()]
    (directory / "verl-rows.jsonl").write_text(
        "".join(json.dumps(verl_row(row)) + "\n" for row in rows)
    )
    chat = not isinstance(rows[0]["prompt"], str)
    tokenizer = AutoTokenizer.from_pretrained(str(spec.model.path))
    steps = spec.trainer.steps or 0
    settings = verl_settings(
        spec,
        prompt_tokens=max(prompt_tokens(tokenizer, row["prompt"]) for row in rows),
        rates=[learning_rate(step, spec.trainer.optimizer, steps) for step in range(steps)],
        chat=chat,
    )
    overrides = [override(setting) for setting in (*settings, *_files(job, directory), *_ray(spec))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(directory / "hf"),
        "RAY_AUTH_MODE": "disabled",
        "VERL_FILE_LOGGER_PATH": str(log),
    }
    if not spec.trainer.gpus_per_node:
        environment |= {
            "VERL_USE_EXTERNAL_MODULES": "benchmarks.peers_verl_cpu",
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",  # the name that its FSDP engine is registered for
            "SGLANG_USE_CPU_ENGINE": "1",
        }
    with (directory / "verl.log").open("w") as output:
        process = subprocess.Popen(
            [python, "-m", "verl.trainer.main_ppo", *overrides],
            cwd=directory,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        lines = list(_followed(process, log, time.monotonic() + seconds))
    records = [step_record(*line) for line in lines]
    return process.wait(), (directory / "verl.log").read_text(errors="replace"), records


def verl_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row in verl's format. All that the reward needs travels as text: a table has one type for a
    column, and metadata may have many.
    """
    prompt = row["prompt"]
    return {
        "data_source": "sluice",
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "reward_model": {"style": "rule", "ground_truth": str(row["label"])},
        "extra_info": {"row": json.dumps(row)},
    }


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]]) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return len(tokenizer(str(text), add_special_tokens=False)["input_ids"])


def step_record(arrived: float, line: str) -> dict[str, Any]:
    """A step as peers.py has it. verl's line has no time: its arrival is the end of the step."""
    entry = json.loads(line)
    return {
        "step": entry["step"],
        "time": arrived,
        **{name: entry["data"][theirs] for name, theirs in FIELDS.items()},
    }


def _followed(
    process: subprocess.Popen[bytes], log: Path, deadline: float
) -> Iterator[tuple[float, str]]:
    """Each line of a log with the time of its arrival, until the process ends."""
    read = 0
    while True:
        ended = process.poll() is not None
        text = log.read_text() if log.exists() else ""
        whole = text[read : text.rfind("\n") + 1]
        yield from ((time.time(), line) for line in whole.splitlines())
        read += len(whole)
        if ended:
            return
        if time.monotonic() > deadline:
            process.kill()
        time.sleep(BETWEEN_LOOKS)


def _files(job: RLJob, directory: Path) -> list[Setting]:
    file, _, name = str(job.spec.reward and job.spec.reward.function).rpartition(":")
    rows = [str(directory / "verl-rows.jsonl")]
    return [
        Setting("actor_rollout_ref.model.path", str(job.spec.model.path)),
        Setting("data.train_files", rows),
        Setting("data.val_files", rows),
        Setting("data.dataloader_num_workers", 0),
        Setting("reward.custom_reward_function.path", file),
        Setting("reward.custom_reward_function.name", name),
        Setting("reward.reward_manager.source", "importlib"),
        Setting("reward.reward_manager.module.path", str(ROOT / "benchmarks/peers_verl.py")),
        Setting("reward.reward_manager.name", "Rewards"),
        Setting("trainer.logger", ["file"]),
        Setting("trainer.val_before_train", False),
        Setting("trainer.resume_mode", "disable"),
        Setting("trainer.default_local_dir", str(directory / "checkpoints")),
        Setting("hydra.run.dir", str(directory / "hydra")),
    ]


def _ray(spec: Any) -> list[Setting]:
    """verl starts more workers than a small machine has cores: they are counted, not given."""
    pretended = [] if spec.trainer.gpus_per_node else [Setting("+ray_kwargs.ray_init.num_gpus", 1)]
    return [
        Setting("ray_kwargs.ray_init.num_cpus", 64),
        Setting("+ray_kwargs.ray_init.include_dashboard", False),
        Setting("transfer_queue.backend.SimpleStorage.num_data_storage_units", 1),
        Setting("actor_rollout_ref.rollout.agent.num_workers", 1 if pretended else 8),
        Setting("reward.num_workers", 1 if pretended else 8),
        *pretended,
    ]
