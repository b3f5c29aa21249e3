"""The same model on the same rows with the same settings, in sluice, in TRL's GRPOTrainer and in
verl: what they learn in as many steps, and seconds a step.

    make trl        # TRL 1.16.0 in an environment of its own, .venv-trl
    make verl       # verl 0.9.1 likewise, .venv-verl
    python benchmarks/peers.py [--case quickstart] [--peers trl,verl] [--seeds 3] [--steps 60]
        [--out DIR] [--at-once] [--set FIELD=VALUE ...]

Runs alternate: sluice and its peers with the first seed, then with the next; or all seeds of
the one at once, then those of the other: that saves time where curves are asked for and not
seconds. A seed gives the order of the prompts, which is sluice's in all, and the initial weights
where the case has none: they are drawn once and loaded by all. The peers' settings are all from the
job's spec (benchmarks/peers_settings.py, peers_settings_verl.py): group size, batch, temperature,
longest response, clip, KL, entropy bonus, aggregation, division by the group's deviation, AdamW's
betas, epsilon and weight decay (none for norms and biases), gradient clip, precision, and the
learning rate of every single step. Not settable: TRL adds 1e-4 to the group's deviation, sluice and
verl 1e-6; TRL generates with transformers (no vLLM), sluice and verl with SGLang.

Curves agree where the two means over seeds differ by no more than Student's t-test allows (95 %).
The steps go to DIR/CASE.jsonl; runs that are in there are not done again, so that an interrupted
comparison goes on. What sluice and verl say of their steps themselves is kept beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks import peers_table
from benchmarks.end_to_end import make_data
from benchmarks.peers_settings import Setting, trl_settings
from benchmarks.peers_settings_verl import OF_A_RUN, verl_settings
from benchmarks.peers_table import (
    FEWEST_STEPS,
    MOST_SEEDS,
    SLUICE,
    TRL,
    VERL,
    Step,
    by_run,
)
from benchmarks.peers_trl_run import trl_run
from benchmarks.peers_verl_run import handicap, verl_run
from benchmarks.processes import sluice_run
from sluice.api import RLJob, load_job
from sluice.api.groups.data import MADE_ROWS
from sluice.data.make import make
from sluice.telemetry import run_directory
from sluice_buffer.sources.prompts import prompts_of
from sluice_client.resolve import resolve

ROOT = Path(__file__).parents[1]
# Names of the other systems in --peers and the Makefile, and in the tables.
PEERS = {"trl": TRL, "verl": VERL}
# The longest that one run may take.
SECONDS = 7200.0


@dataclass(frozen=True, slots=True)
class Case:
    """An example that all train. overrides: what all are told beside the manifest; micro_batches:
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
    parser.add_argument("--peers", default="trl", help="some of trl,verl")
    parser.add_argument("--seeds", type=int, choices=range(1, MOST_SEEDS + 1), default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/peers")
    parser.add_argument("--at-once", action="store_true", help="all seeds of a system")
    parser.add_argument("--set", action="append", default=[], help="of the job, for all")
    options = parser.parse_args()
    if unknown := set(options.peers.split(",")) - PEERS.keys():
        parser.error(f"--peers: {', '.join(sorted(unknown))}; expected some of {', '.join(PEERS)}")
    if options.steps < FEWEST_STEPS:
        parser.error(f"--steps: expected {FEWEST_STEPS} at least: times count from the fourth on")
    for name in options.peers.split(","):
        if not python_of(name).exists():
            sys.exit(f"{python_of(name)}: not there; expected its environment: run `make {name}`")
    systems = (SLUICE, *(PEERS[name] for name in options.peers.split(",")))
    case, lines = CASES[options.case], options.out / f"{options.case}.jsonl"
    case = replace(case, overrides=(*case.overrides, *options.set))
    options.out.mkdir(parents=True, exist_ok=True)
    missing = [
        (system, seed)
        for seed in range(options.seeds)
        for system in systems
        if (system, seed) not in by_run(read(lines))
    ]

    def add(system: str, seed: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            try:
                steps = run(system, case, seed, options.steps, Path(directory))
            finally:  # also of a run that did not come to its end
                keep_own(Path(directory), options.out / f"{options.case}-{system}-{seed}.jsonl")
        write(lines, steps)
        print(f"{system}, seed {seed}: {len(steps)} steps", file=sys.stderr, flush=True)

    by_system = [[run for run in missing if run[0] == system] for system in systems]
    for together in by_system if options.at_once else [[run] for run in missing]:
        with ThreadPoolExecutor(MOST_SEEDS) as pool:
            list(pool.map(lambda run: add(*run), together))
    print(report(options.case, case, read(lines), systems[1:]))
    if VERL in systems:
        print(handicap(python_of(VERL)))


def keep_own(directory: Path, target: Path) -> None:
    """Copy what a system itself says of each step."""
    for own in (directory / "verl.jsonl", directory / "run" / run_directory.METRICS):
        if own.exists():
            shutil.copy(own, target)


def python_of(peer: str) -> Path:
    return ROOT / f".venv-{peer}/bin/python"


def run(system: str, case: Case, seed: int, steps: int, directory: Path) -> list[Step]:
    """One run of one of the systems. directory: an empty one."""
    job, overrides = prepared(case, seed, steps, directory)
    if system == SLUICE:
        records: Iterable[dict[str, Any]]
        code, output = sluice_run(case.manifest, directory / "run", overrides, SECONDS)
        records = sluice_steps(directory / "run")
    else:
        write_rows(job, (job.spec.trainer.steps or 0) * job.spec.rollout.batch_size, directory)
        if system == VERL:
            code, output, records = verl_run(job, directory, python_of("verl"), SECONDS)
        else:
            code, output = trl_run(job, case.micro_batches, directory, python_of("trl"), SECONDS)
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


def report(name: str, case: Case, steps: list[Step], peers: Sequence[str]) -> str:
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{os.cpu_count()} cores of {platform.machine()}"
    )
    head = (
        f"{name}; {device}, {time.strftime('%Y-%m-%d')}, "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}, torch "
        f"{version('torch')}, SGLang {version('sglang')}. Means ± standard deviations over seeds."
    )
    return "\n\n".join([head, *(report_of(peer, case, steps) for peer in peers)])


def report_of(peer: str, case: Case, steps: list[Step]) -> str:
    runs = peers_table.with_peer(by_run(steps), peer)
    seeds = peers_table.seeds_of(runs, peer)
    curves = []
    if len(seeds) > 1:  # one has no spread
        entropies = peers_table.first_entropies(runs, peer)
        curves = [peers_table.rewards(runs, peer), f"Entropy of the first step: {entropies}."]
    settings = settings_of(peer, case, min(map(len, runs.values())))
    return "\n\n".join(
        (
            f"sluice and {peer}, seeds {', '.join(map(str, seeds))}.",
            *curves,
            peers_table.seconds(runs, peer),
            peers_table.table(
                ("sluice", peer, "value"),
                (
                    (setting.field, f"`{setting.name}`", setting.value)
                    for setting in settings
                    if setting.name != "seed"
                ),
            ),
        )
    )


def settings_of(peer: str, case: Case, steps: int) -> list[Setting]:
    """Settings of a peer, but for those that a single run's rows decide."""
    spec = load_job(case.manifest, [*case.overrides, f"trainer.steps={steps}"]).spec
    if peer == TRL:
        return trl_settings(spec, micro_batches=case.micro_batches)
    settings = verl_settings(spec, prompt_tokens=0, rates=[], chat=True)
    return [setting for setting in settings if setting.name not in OF_A_RUN]


if __name__ == "__main__":
    main()
