"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors


class BaseEnvManager:
    def __init__(self, *args, **kwargs):
        raise NotImplementedError('__init__')

    def run_rollout_loop(self, data):
        raise NotImplementedError('run_rollout_loop')

    def reset(self):
        raise NotImplementedError('reset')

    def step(self, llm_output):
        raise NotImplementedError('step')

    def make_decision(self, rollout_cache):
        raise NotImplementedError('make_decision')

    def format_messages(self, history):
        raise NotImplementedError('format_messages')

    def formulate_rollouts(self, rollout_cache):
        raise NotImplementedError('formulate_rollouts')

    def update_step(self, global_step, trace_meta=None):
        raise NotImplementedError('update_step')

    def stop(self):
        raise NotImplementedError('stop')


class RolloutCache:
    env_id = None
    group_id = None
    tag = None
    history = None
    frames = None
    truncated = False
    terminated = False
    step = 0
