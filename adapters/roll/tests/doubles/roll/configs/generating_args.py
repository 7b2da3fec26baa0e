"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors


class GeneratingArguments:
    do_sample = True
    temperature = 0.95
    top_p = 0.7
    top_k = 50
    num_beams = 1
    max_length = 8192
    max_new_tokens = 8192
    repetition_penalty = 1.0
    length_penalty = 1.0
    num_return_sequences = 1
    stop_strings = None
    include_stop_str_in_output = None
    logprobs = 0
    def to_dict(self):
        raise NotImplementedError('to_dict')

    def __post_init__(self):
        raise NotImplementedError('__post_init__')
