"""An agent loop of two turns with an observation between them, in the way that veRL's documentation has users write theirs."""

from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

OBSERVATION = "go on !"


@register("two_turns")
class TwoTurns(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        request_id = uuid4().hex
        start = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        limit = self.rollout_config.response_length
        seen = self.tokenizer.encode(OBSERVATION)
        params = {**sampling_params, "max_tokens": (limit - len(seen)) // 2}
        first = await self.server_manager.generate(request_id=request_id, prompt_ids=start, sampling_params=params)
        again = start + list(first.token_ids) + seen
        second = await self.server_manager.generate(request_id=request_id, prompt_ids=again, sampling_params=params)
        response = list(first.token_ids) + seen + list(second.token_ids)
        mask = [1] * len(first.token_ids) + [0] * len(seen) + [1] * len(second.token_ids)
        logprobs = list(first.log_probs) + [0.0] * len(seen) + list(second.log_probs)
        fields = dict(first.extra_fields)
        fields["max_global_steps"] = second.extra_fields["max_global_steps"]
        return AgentLoopOutput(
            prompt_ids=start,
            response_ids=response[:limit],
            response_mask=mask[:limit],
            response_logprobs=logprobs[:limit],
            num_turns=4,
            metrics={"num_preempted": first.num_preempted + second.num_preempted},
            extra_fields={**fields, "turn_scores": [], "tool_rewards": []},
        )
