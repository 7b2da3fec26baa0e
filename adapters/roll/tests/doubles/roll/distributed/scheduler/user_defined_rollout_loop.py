"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors


class UserDefinedRolloutLoop:
    def __init__(self):
        raise NotImplementedError('__init__')

    async def process_new_prompt(self, context):
        raise NotImplementedError('process_new_prompt')

    async def _generate_and_reward(self, context, req, domain):
        raise NotImplementedError('_generate_and_reward')

    async def _generate_and_reward_impl(self, context, req, domain):
        raise NotImplementedError('_generate_and_reward_impl')
