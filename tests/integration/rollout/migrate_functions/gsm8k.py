"""An agent loop of verl: arithmetic over several turns, with a tool between them."""

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.replica import TokenOutput


@register("gsm8k_agent")
class Gsm8kLoop(AgentLoopBase):
    """Generates a turn, calls its tools and shows their result, a few times."""

    def __init__(self, *args: Any, turn_tokens: int = 8, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.turn_tokens = turn_tokens
        turns = self.rollout_config.multi_turn
        self.turns, self.response_length = (
            turns.max_assistant_turns,
            self.rollout_config.response_length,
        )
        self.parser = ToolParser.get_tool_parser(turns.format, self.tokenizer)

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Play a sample; the row's `reward_model` has its answer."""
        messages = list(kwargs["raw_prompt"])
        metrics: dict[str, Any] = {}
        ids = await self.ct_build_initial_tokens(messages, tools=None)
        mask: list[int] = []
        calls = 0
        for _ in range(self.turns):
            with simple_timer("generate_sequences", metrics):
                output: TokenOutput = await self.server_manager.generate(
                    request_id=uuid4().hex,
                    prompt_ids=ids,
                    sampling_params=sampling_params | {"max_tokens": self.turn_tokens},
                )
            merged, mask, _ = await self.ct_merge_assistant_token(ids, output.token_ids, mask)
            ids = merged.token_ids
            text, called = await self.parser.extract_tool_calls(output.token_ids)
            calls += len(called)
            before = [*messages, {"role": "assistant", "content": text}]
            messages = [*before, {"role": "tool", "content": "w0002"}]
            merged, mask, _ = await self.ct_merge_non_assistant_msg(before, messages, ids, mask)
            ids = merged.token_ids
        return AgentLoopOutput(
            prompt_ids=ids[: len(ids) - len(mask)],
            response_ids=ids[len(ids) - len(mask) :][: self.response_length],
            response_mask=mask[: self.response_length],
            reward_score=float(kwargs["reward_model"]["ground_truth"]),
            num_turns=self.turns,
            metrics=metrics,
            extra_fields={"calls": calls},
        )
