"""Results to what executors read."""

import pytest

from doubles import Letters, openrlhf_params, result
from rose.types import FinishReason
from rose_openrlhf.answers import mark, to_output
from rose_openrlhf.sampling import read_request

EOS = 2


def output(made, **given):
    request = read_request(openrlhf_params(**given), num_prompt_tokens=2, max_model_len=64, codec=Letters())
    return to_output("id", [65, 66], request, made, Letters()).outputs[0]


def test_an_answer_that_ended():
    answer = output(result([97, 98, EOS]))
    assert answer.token_ids == [97, 98, EOS]
    assert isinstance(answer.token_ids, list)  # executors add it to a list
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab", "stop", None)
    assert [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)] == [
        -0.5,
        -1.5,
        -2.5,
    ]


def test_an_answer_that_was_cut_off():
    answer = output(result("abc", FinishReason.LENGTH))
    assert (answer.text, answer.finish_reason) == ("abc", "length")


def test_no_logprobs_are_made_up():
    assert output(result("abc"), logprobs=None).logprobs is None


def test_a_stop_token_is_named_and_not_shown():
    answer = output(result("abc"), stop_token_ids=[ord("c")])
    assert (answer.text, answer.stop_reason, answer.token_ids) == ("ab", ord("c"), [97, 98, 99])
    assert output(result("abc"), stop_token_ids=[ord("c")], include_stop_str_in_output=True).text == "abc"


@pytest.mark.parametrize(("stop", "text", "ids", "reason"), [
    (["cd"], "ab", "abcd", "cd"),
    (["e", "d"], "abc", "abcd", "d"),  # the one that is complete first
    (["a"], "abcdef", "abcdef", None),  # the first token must come
    (["ab"], "", "ab", "ab"),  # reaches beyond it
    (["x"], "abcdef", "abcdef", None),
])  # fmt: skip
def test_stop_texts(stop, text, ids, reason):
    answer = output(result("abcdef", FinishReason.LENGTH), stop=stop)
    assert (answer.text, answer.token_ids, answer.stop_reason) == (text, [ord(char) for char in ids], reason)
    assert answer.finish_reason == ("length" if reason is None else "stop")
    assert len(answer.logprobs) == len(ids)


def test_the_token_that_ended_an_answer_is_no_text_to_look_for_stops_in():
    answer = output(result([97, 98, 99]), stop=["c"], stop_token_ids=[99])
    assert (answer.text, answer.stop_reason) == ("ab", 99)


def test_a_stop_text_at_which_the_engine_ended_is_a_stop_text():
    answer = output(result("abc"), stop=["c"])
    assert (answer.text, answer.stop_reason, answer.token_ids) == ("ab", "c", [97, 98, 99])
    assert output(result("abc"), stop=["c"], include_stop_str_in_output=True).text == "abc"


def test_a_stop_text_may_stay():
    assert output(result("abcdef"), stop=["cd"], include_stop_str_in_output=True).text == "abcd"


def test_special_tokens_in_the_text():
    assert output(result([97, 5, 98], FinishReason.LENGTH)).text == "a<5>b"
    assert output(result([97, 5, 98], FinishReason.LENGTH), skip_special_tokens=True).text == "ab"


def test_half_a_character_at_the_end_is_left_out():
    class Bytes(Letters):
        def decode(self, ids, skips_special):
            return bytes(ids).decode("utf-8", errors="replace")

    request = read_request(openrlhf_params(), num_prompt_tokens=2, max_model_len=64, codec=Bytes())
    made = result([97, 0xC3], FinishReason.LENGTH)
    assert to_output("id", [65], request, made, Bytes()).outputs[0].text == "a"


def test_the_space_before_the_first_word_is_kept():
    class Words(Letters):
        """As sentence pieces decode: a space before each word but the first."""

        def decode(self, ids, skips_special):
            return " ".join(f"w{i}" for i in ids)

    request = read_request(openrlhf_params(), num_prompt_tokens=2, max_model_len=64, codec=Words())
    assert to_output("id", [1, 2], request, result([3, 4], FinishReason.LENGTH), Words()).outputs[0].text == " w3 w4"


def test_notes_go_where_they_do_no_harm():
    assert mark({"extra_logs": {"a": 1}}, {"b": 2.0}) == {"extra_logs": {"a": 1, "b": 2.0}}
    assert mark({"reward": 1}, {"b": 2.0}) == {"reward": 1, "extra_logs": {"b": 2.0}}
    assert mark({"extra_logs": None}, {"b": 2.0}) == {"extra_logs": None}
    assert mark("other", {"b": 2.0}) == "other"
