"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

from roll.pipeline.agentic.env_manager.base_env_manager import BaseEnvManager


class TrajEnvManager(BaseEnvManager):
    def __init__(self, worker_config, pipeline_config, env_config, tokenizer, generate_scheduler, output_queue, thread_lock, mode='train', *args, **kwargs):
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
