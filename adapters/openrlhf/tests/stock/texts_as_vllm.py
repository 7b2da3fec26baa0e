"""Runs in the engines' environment: random answers, their texts by vLLM's own detokenizer and by the adapter. Prints how many differ.

``python texts_as_vllm.py MODEL NUM``
"""

from __future__ import annotations

import inspect
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parent / "unit")]

from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from doubles import result
from rose.types import FinishReason
from rose_openrlhf.answers import to_output
from rose_openrlhf.codec import HfCodec
from rose_openrlhf.sampling import read_request

PROMPTS = ("what is the answer ?", "hello", "one two  three: ")
STOPS = (None, ["e"], ["an", "1"], [" t"], ["th", "e "])


def by_vllm(tokenizer, prompt, params, ids, *, is_ended):
    """Feed vLLM's detokenizer one token after another, as an engine does; returns tokens, text and the stop text that it found."""
    known = inspect.signature(EngineCoreRequest).parameters
    fields = {"request_id": "a", "prompt_token_ids": prompt, "sampling_params": params, "arrival_time": 0.0}
    request = EngineCoreRequest(
        **{
            name: fields.get(name)
            for name, parameter in known.items()
            if parameter.default is parameter.empty or name in fields
        }
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    for number, token in enumerate(ids, 1):
        stop = detokenizer.update([token], is_ended and number == len(ids))
        if stop:
            return ids[:number], detokenizer.get_next_output_text(finished=True, delta=False), stop
    return ids, detokenizer.get_next_output_text(finished=True, delta=False), None


def main(model, num_cases):
    tokenizer, rng = AutoTokenizer.from_pretrained(model), random.Random(0)
    codec, num_different, num_stopped = HfCodec(tokenizer), 0, 0
    for _ in range(num_cases):
        prompt = codec.encode(rng.choice(PROMPTS))
        params = SamplingParams(
            max_tokens=64,
            min_tokens=rng.choice([0, 1]),
            stop=rng.choice(STOPS),
            include_stop_str_in_output=rng.random() < 0.3,
            skip_special_tokens=rng.random() < 0.5,
            logprobs=1,
        )
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 20))]
        is_ended = rng.random() < 0.4
        if is_ended:
            ids = [token for token in ids if token != tokenizer.eos_token_id] + [tokenizer.eos_token_id]
        wanted = by_vllm(tokenizer, prompt, params, ids, is_ended=is_ended)
        request = read_request(params, num_prompt_tokens=len(prompt), max_model_len=512, codec=codec)
        made = result(ids, FinishReason.STOP if is_ended else FinishReason.LENGTH)
        answer = to_output("a", prompt, request, made, codec).outputs[0]
        stop = answer.stop_reason if isinstance(answer.stop_reason, str) else None
        num_stopped += wanted[2] is not None
        if (answer.token_ids, answer.text, stop) != wanted:
            num_different += 1
            print(f"vLLM: {wanted}; here: {(answer.token_ids, answer.text, stop)}; {params}", file=sys.stderr)
    print(f"{num_cases} {num_stopped} {num_different}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
