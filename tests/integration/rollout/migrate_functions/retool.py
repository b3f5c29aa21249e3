"""A generate function of slime: a Python tool, and turns requested by token ids (retool)."""

from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(  # type: ignore[no-untyped-def]
    args, sample: Sample, sampling_params, evaluation=False
) -> Sample:
    """Use another prompt, and build the sample from tokens."""
    tokenizer = GenerateState(args).tokenizer
    prompt_ids = tokenizer("<user> w0005 <assistant>", add_special_tokens=False)["input_ids"]
    ids: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    tools = 0
    for _ in range(args.max_tool_calls):
        payload = {
            "input_ids": prompt_ids + ids,
            "sampling_params": sampling_params | {"max_new_tokens": 8},
            "return_logprob": True,
        }
        output = await post(get_model_url(args), payload)
        entries = output["meta_info"]["output_token_logprobs"]
        ids += [entry[1] for entry in entries]
        log_probs += [entry[0] for entry in entries]
        mask += [1] * len(entries)
        observed = tokenizer(f"<c> w{tools:04d}", add_special_tokens=False)["input_ids"]
        ids, mask, log_probs = ids + observed, mask + [0] * len(observed), log_probs + [0.0] * 2
        tools += 1
    sample.tokens, sample.response_length = prompt_ids + ids, len(ids)
    sample.loss_mask, sample.rollout_log_probs = mask, log_probs
    sample.response = tokenizer.decode(ids)
    sample.status = Sample.Status.TRUNCATED
    sample.reward = {"score": 0.5, "tools": tools}
    sample.metadata["evaluation"] = evaluation
    return sample
