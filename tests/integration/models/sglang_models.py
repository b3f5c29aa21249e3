"""SGLang's models on this machine's CPU, without its server: one process imports it for all.

    python -m tests.integration.models.sglang_models REQUESTS

REQUESTS: a JSON list of {"model": directory, "weights": safetensors file, "tokens": [...]}. A fork
of the process loads the model, computes the log-probs of the tokens after the first `PROMPT`
tokens, loads the weights as an update does, and computes them again. Each request prints a line:
{"before": [...], "after": [...]}, with {"error": its message} for what failed.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from array import array
from pathlib import Path
from typing import Any

PROMPT = 10
_ARGUMENTS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "disable_radix_cache": True,
}


def main(requests: list[dict[str, Any]]) -> None:
    from sglang.srt.plugins import load_plugins

    from sluice.engines.sglang.plugin.__main__ import PATH

    sys.path.append(str(PATH))
    load_plugins()
    from sglang.benchmark import one_batch  # noqa: F401 - imported once, before the forks

    for request in requests:
        print(json.dumps(_in_a_fork(request)), flush=True)


def _in_a_fork(request: dict[str, Any]) -> dict[str, Any]:
    receiver, sender = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(receiver)
        with os.fdopen(sender, "w") as answer:
            _try(request, answer)
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as answer:
        lines = answer.read().splitlines()
    os.waitpid(process, 0)
    result: dict[str, Any] = {}
    for line in lines or ['{"error": "the process ended"}']:
        result |= json.loads(line)
    return result


def _try(request: dict[str, Any], answer: Any) -> None:
    """Write each result as soon as it is there."""
    try:
        runner = _runner(request["model"])
        print(
            json.dumps({"before": _log_probs(runner, request["tokens"])}), file=answer, flush=True
        )
        _load(runner, Path(request["weights"]))
        print(json.dumps({"after": _log_probs(runner, request["tokens"])}), file=answer, flush=True)
    except BaseException as error:  # the result of the family
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answer, flush=True)


def _runner(model: str) -> Any:
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs

    args = ServerArgs(model_path=model, **_ARGUMENTS)
    args.resolve_once()
    one_batch._set_envs_and_config(args)
    rank = one_batch.spawn_world_rank(args, tp_rank=0, pp_rank=0)
    one_batch.publish(args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=rank, gpu_id=0))
    one_batch.initialize_moe_config()
    return one_batch.load_model(args, PortArgs.init_new(args), 0, 0)[0]


def _load(runner: Any, weights: Path) -> None:
    from safetensors.torch import load_file

    runner.torch_runner.model.load_weights(list(load_file(weights).items()))


def _log_probs(runner: Any, tokens: list[int]) -> list[float]:
    """Return the log-probs of the tokens after the prompt, one decoding step for each."""
    import torch
    from sglang.benchmark.one_batch import Req, SamplingParams

    runner.clear()
    request = Req(
        rid=0,
        origin_input_text="",
        origin_input_ids=array("q", tokens[:PROMPT]),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=len(tokens)),
    )
    request.full_untruncated_fill_ids = request.origin_input_ids
    request.logprob_start_len = -1
    request.set_extend_range(0, PROMPT)
    _, logits, batch = runner.extend([request])
    values = []
    for token in tokens[PROMPT:]:
        values.append(logits[0].float().log_softmax(-1)[token].item())
        _, logits = runner.decode(torch.tensor([token]), batch)
    return values


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
