"""A generate function of slime: a model that may search before it answers (search-R1).

It imports no module of sluice.
"""

from neighbour import passages  # type: ignore[import-not-found]
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

TURNS = 3


async def generate(args, sample: Sample, sampling_params) -> Sample:  # type: ignore[no-untyped-def]
    """Send the whole text each turn, and keep the tokens of the response."""
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens, sample.loss_mask = list(prompt_ids), []
    params = sampling_params | {"max_new_tokens": args.turn_tokens}
    for _ in range(TURNS):
        payload = {"text": sample.prompt + sample.response, "sampling_params": params}
        output = await post(url, payload | {"return_logprob": True})
        entries = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[entry[1] for entry in entries],
            log_probs=[entry[0] for entry in entries],
            meta_info=output["meta_info"],
            text=output["text"],
        )
        text = " " + passages(output["text"])
        ids = state.tokenizer(text, add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=ids, trainable=False, text=text)
    sample.status = Sample.Status.COMPLETED
    sample.searches = TURNS
    return sample


async def reward_func(args, sample, **kwargs):  # type: ignore[no-untyped-def]
    """Return the number of searches, an attribute that `generate` set."""
    if not isinstance(sample, Sample):
        raise TypeError("expected slime's Sample")
    return float(getattr(sample, "searches", 0))
