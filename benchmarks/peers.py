"""The same model on the same rows with the same settings, in sluice and in TRL's GRPOTrainer: what
they learn in as many steps, and seconds a step.

    make trl        # TRL 1.16.0 in an environment of its own, .venv-trl
    python benchmarks/peers.py [--case quickstart] [--seeds 3] [--steps 60] [--out DIR]
        [--at-once] [--set FIELD=VALUE ...]

Runs of the two alternate: sluice and TRL with the first seed, then with the next; or all seeds of
the one at once, then those of the other: that saves time where curves are asked for and not
seconds. A seed gives the
order of the prompts, which is sluice's in both, and the initial weights where the case has none:
they are drawn once and loaded by both. TRL's settings are all from the job's spec
(benchmarks/peers_settings.py): group size, batch, temperature, longest response, clip, KL
(`beta`), entropy bonus, aggregation (`loss_type`), division by the group's deviation
(`scale_rewards`), AdamW's betas, epsilon and weight decay (none for norms and biases in both),
gradient clip, precision, and the learning rate of every single step. Not settable: TRL adds 1e-4 to
the group's deviation, sluice 1e-6; TRL generates with transformers (no vLLM), sluice with SGLang.

Curves agree where the two means over seeds differ by no more than Student's t-test allows (95 %).
The steps go to DIR/CASE.jsonl; runs that are in there are not done again, so that an interrupted
comparison goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks import peers_table
from benchmarks.end_to_end import make_data
from benchmarks.peers_settings import trl_settings
from benchmarks.peers_table import MOST_SEEDS, SLUICE, SYSTEMS, Step, by_run
from benchmarks.processes import sluice_run
from sluice.api import RLJob, load_job
from sluice.api.data import MADE_ROWS
from sluice.data.make import make
from sluice.telemetry import run_directory
from sluice_buffer.sources.prompts import prompts_of
from sluice_cli.resolve import resolve
from sluice_trainer.step.rates import learning_rate

ROOT = Path(__file__).parents[1]
TRL_PYTHON = ROOT / ".venv-trl/bin/python"
SECONDS = 7200.0
"""The longest that one run may take."""


@dataclass(frozen=True, slots=True)
class Case:
    """An example that both train. overrides: what both are told beside the manifest; micro_batches:
    parts of a step that fit TRL's memory; endless: no response ends before it is as long as it may
    be, so that both generate the same number of tokens.
    """

    manifest: Path
    overrides: tuple[str, ...] = ()
    micro_batches: int = 1
    endless: bool = False


CASES = {
    # TRL's entropy bonus is a mean over tokens, and so is the whole loss here.
    "quickstart": Case(
        ROOT / "examples/quickstart/job.yaml", ("algorithm.aggregation=token_mean",)
    ),
    "reasoning": Case(ROOT / "examples/reasoning/one-gpu.yaml", micro_batches=8),
    "long": Case(
        ROOT / "examples/reasoning/one-gpu.yaml",
        ("rollout.sampling.maxResponseTokens=512",),
        micro_batches=16,
        endless=True,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, default="quickstart")
    parser.add_argument("--seeds", type=int, choices=range(1, MOST_SEEDS + 1), default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/peers")
    parser.add_argument("--at-once", action="store_true", help="all seeds of a system")
    parser.add_argument("--set", action="append", default=[], help="of the job, for both")
    options = parser.parse_args()
    if not TRL_PYTHON.exists():
        sys.exit(f"{TRL_PYTHON}: not there; expected TRL's environment: run `make trl`")
    case, lines = CASES[options.case], options.out / f"{options.case}.jsonl"
    case = replace(case, overrides=(*case.overrides, *options.set))
    options.out.mkdir(parents=True, exist_ok=True)
    missing = [
        (system, seed)
        for seed in range(options.seeds)
        for system in SYSTEMS
        if (system, seed) not in by_run(read(lines))
    ]

    def add(system: str, seed: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            steps = run(system, case, seed, options.steps, Path(directory))
        write(lines, steps)
        print(f"{system}, seed {seed}: {len(steps)} steps", file=sys.stderr, flush=True)

    by_system = [[one for one in missing if one[0] == system] for system in SYSTEMS]
    for together in by_system if options.at_once else [[one] for one in missing]:
        with ThreadPoolExecutor(MOST_SEEDS) as pool:
            list(pool.map(lambda one: add(*one), together))
    print(report(options.case, case, read(lines)))


def run(system: str, case: Case, seed: int, steps: int, directory: Path) -> list[Step]:
    """One run of one of the systems. directory: an empty one."""
    job, overrides = prepared(case, seed, steps, directory)
    if system == SLUICE:
        code, output = sluice_run(case.manifest, directory / "run", overrides, SECONDS)
        records = sluice_steps(directory / "run")
    else:
        code, output = trl_run(job, case.micro_batches, directory)
        records = run_directory.records(directory / "steps.jsonl")
    whole = [Step(system=system, seed=seed, **record) for record in records]
    if code or len(whole) != steps:
        sys.exit(f"{output[-3000:]}\n{system}: {len(whole)} steps, exit code {code}")
    return whole


def prepared(case: Case, seed: int, steps: int, directory: Path) -> tuple[RLJob, list[str]]:
    """The job of a seed with absolute paths, and the overrides that make it of the manifest."""
    overrides = [
        *case.overrides,
        f"data.seed={seed}",
        f"trainer.steps={steps}",
        f"checkpoint.everySteps={steps}",
        "evaluation=null",
    ]
    make_data(case.manifest, load_job(case.manifest, overrides))
    job = resolve(load_job(case.manifest, overrides), case.manifest.parent)
    if job.spec.model.init == "random":
        draw(Path(str(job.spec.model.path)), seed, directory / "model")
        overrides += [f"model.path={directory / 'model'}", "model.init=pretrained"]
        job = resolve(load_job(case.manifest, overrides), case.manifest.parent)
    if case.endless:
        unend(Path(str(job.spec.model.path)), directory / "endless")
        overrides.append(f"model.path={directory / 'endless'}")
        job = resolve(load_job(case.manifest, overrides), case.manifest.parent)
    return job, overrides


def draw(source: Path, seed: int, target: Path) -> None:
    """Write a checkpoint with transformers' own random weights for a config. It has the source's
    tokenizer.
    """
    shutil.copytree(source, target)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(target)


def unend(source: Path, target: Path) -> None:
    """Copy a checkpoint and call a token that nobody says, the last of the vocabulary, its end of a
    response.
    """
    shutil.copytree(source, target)
    tokenizer = AutoTokenizer.from_pretrained(source)
    end = len(tokenizer) - 1
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.save_pretrained(target)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((target / name).read_text())
        (target / name).write_text(json.dumps(settings | {"eos_token_id": end}))


def sluice_steps(directory: Path) -> Iterator[dict[str, Any]]:
    for number, metrics in run_directory.by_step(directory / run_directory.METRICS).items():
        yield {
            "step": number,
            "time": metrics["time"],
            "reward": metrics["rollout/raw_reward"],
            "entropy": metrics["train/entropy_loss"],
            "tokens": metrics["rollout/response_len/mean"],
        }


def trl_run(job: RLJob, micro_batches: int, directory: Path) -> tuple[int, str]:
    """Exit code and output of TRL's half."""
    spec = job.spec
    steps, reward = spec.trainer.steps or 0, spec.reward
    settings = trl_settings(spec, micro_batches=micro_batches)
    write_rows(job, steps * spec.rollout.batch_size, directory)
    task = {
        "model": spec.model.path,
        "rows": str(directory / "rows.jsonl"),
        "reward": reward and reward.function,
        "settings": {one.name: one.value for one in settings},
        "rates": [learning_rate(step, spec.trainer.optimizer, steps) for step in range(steps)],
        "out": str(directory / "steps.jsonl"),
    }
    (directory / "task.json").write_text(json.dumps(task))
    process = subprocess.run(
        [TRL_PYTHON, ROOT / "benchmarks/peers_trl.py", directory / "task.json"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    return process.returncode, process.stdout


def write_rows(job: RLJob, count: int, directory: Path) -> None:
    """rows.jsonl: the first rows of sluice's order of prompts."""
    (directory / MADE_ROWS).mkdir()
    make(job.spec, directory / MADE_ROWS)
    prompts = prompts_of(job, directory)
    try:
        rows = [prompts.training(group)[1] for group in range(count)]
    finally:
        prompts.close()
    (directory / "rows.jsonl").write_text(
        "".join(
            json.dumps({"prompt": row.prompt, "label": row.label, "metadata": row.metadata or {}})
            + "\n"
            for row in rows
        )
    )


def read(lines: Path) -> list[Step]:
    return [Step(**record) for record in run_directory.records(lines)]


def write(lines: Path, steps: list[Step]) -> None:
    with lines.open("a") as file:
        file.write("".join(json.dumps(asdict(step)) + "\n" for step in steps))


def report(name: str, case: Case, steps: list[Step]) -> str:
    runs = by_run(steps)
    seeds = peers_table.seeds_of(runs)
    length = min(map(len, runs.values()))
    spec = load_job(case.manifest, [*case.overrides, f"trainer.steps={length}"]).spec
    settings = trl_settings(spec, micro_batches=case.micro_batches)
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{os.cpu_count()} cores of {platform.machine()}"
    )
    head = (
        f"{name}, seeds {', '.join(map(str, seeds))}; {device}, {time.strftime('%Y-%m-%d')}, "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}, torch "
        f"{version('torch')}, SGLang {version('sglang')}. Means ± standard deviations over seeds."
    )
    curves = []
    if len(seeds) > 1:  # one has no spread
        entropies = peers_table.first_entropies(runs)
        curves = [peers_table.rewards(runs), f"Entropy of the first step: {entropies}."]
    return "\n\n".join(
        (
            head,
            *curves,
            peers_table.seconds(runs),
            peers_table.table(
                ("sluice", "TRL", "value"),
                ((one.field, f"`{one.name}`", one.value) for one in settings if one.name != "seed"),
            ),
        )
    )


if __name__ == "__main__":
    main()
