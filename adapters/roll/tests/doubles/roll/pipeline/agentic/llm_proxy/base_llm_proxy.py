"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors


class BaseLLMProxy:
    def __init__(self, generate_scheduler, llm_proxy_config, tokenizer, env):
        raise NotImplementedError('__init__')

    def generate(self, messages, lm_input, generation_config):
        raise NotImplementedError('generate')


def register_llm_proxy(name):
    raise NotImplementedError('register_llm_proxy')
