"""What an SGLang server's descriptions of itself mean."""

from __future__ import annotations

import json

import attrs
import pytest
from test_sglang_requests import INFO

from rose.backends.sglang.answers import plain, refused_request, told_in_stream
from rose.backends.sglang.facts import (
    VOCABULARY_PROBE,
    ServerLoad,
    read_facts,
    read_label,
    read_load,
    read_rose_state,
    read_vocabulary,
    vocabulary_of_checkpoint,
)
from rose.backends.sglang.loads import combined
from rose.errors import EngineBusyError, EngineError, EngineLostError, EngineUnsupportedError, RequestRefusedError
from rose.interfaces.serving import PauseMode
from rose.types import WeightVersion


def test_facts_of_a_server():
    found = read_facts({**INFO, "internal_states": [{}, {}]})
    assert found.max_context_tokens == 506
    assert found.kv_total_tokens == 2 * 4096
    assert found.num_ranks == 2


def test_a_server_has_seeds_by_itself_or_by_roses_package():
    assert not read_facts(INFO).has_seeds
    assert read_facts({**INFO, "enable_deterministic_inference": True}).has_seeds
    assert read_facts({**INFO, "internal_states": [{"rose_has_seeds": True}]}).has_seeds


def test_another_start_has_another_name():
    again = read_facts({**INFO, "startup_time": {"tokenizer_e2e": 10.6}})
    assert read_facts(INFO).start == read_facts(dict(INFO)).start != again.start


@pytest.mark.parametrize("broken", [{}, {**INFO, "tp_size": None}, {**INFO, "internal_states": None}])
def test_another_server_is_told_apart(broken):
    with pytest.raises(EngineError, match="is not what SGLang"):
        read_facts(broken)


def test_loads_are_summed_over_replicas():
    one = {"num_running_reqs": 1, "num_waiting_reqs": 2, "num_used_tokens": 30}
    assert read_load({"loads": [one, one]}) == ServerLoad(num_running=2, num_waiting=4, kv_used_tokens=60)
    with pytest.raises(EngineError, match="/v1/loads"):
        read_load({"loads": [{}]})


def test_labels():
    labels = {"default": WeightVersion("grpo", 0)}
    assert read_label("grpo:7", {}) == WeightVersion("grpo", 7)
    assert read_label("default", labels) == WeightVersion("grpo", 0)
    assert [read_label(text, {}) for text in ("default", "rose-fenced", None, 3)] == [None] * 4


def test_the_vocabulary_is_read_from_a_refusal():
    assert read_vocabulary("logit_bias must has keys in [0, 319], got 2147483647.") == 320
    assert read_vocabulary("something else") is None
    assert list(VOCABULARY_PROBE["sampling_params"]["logit_bias"]) == [str(2**31 - 1)]


def test_the_vocabulary_is_read_from_a_checkpoint(tmp_path):
    assert vocabulary_of_checkpoint(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 77}}))
    assert vocabulary_of_checkpoint(str(tmp_path)) == 77
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 78}))
    assert vocabulary_of_checkpoint(str(tmp_path)) == 78


def test_answers_to_commands():
    assert plain("/a", 200, b'{"x": 1}') == {"x": 1}
    assert plain("/a", 200, b"[true]") == {"answer": [True]}
    assert plain("/a", 200, b"Cache flushed.\n") == {"answer": "Cache flushed."}
    assert plain("/a", 200, b"") == {"answer": None}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, EngineError),
        (404, EngineUnsupportedError),
        (429, EngineBusyError),
        (500, EngineError),
        (502, EngineLostError),
        (503, EngineLostError),
    ],
)
def test_refused_commands(status, kind):
    with pytest.raises(EngineError) as caught:
        plain("/a", status, b'{"error": {"message": "why\\n\\n  File ..."}}')
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"SGLang answered /a with status {status}: why")
    assert "File" not in str(caught.value)


def test_refused_requests():
    kinds = {
        400: RequestRefusedError,
        429: EngineBusyError,
        503: EngineBusyError,
        502: EngineLostError,
        500: EngineError,
    }
    assert {status: type(refused_request(status, b"")) for status in kinds} == kinds


def test_errors_in_a_stream():
    assert type(told_in_stream({"message": "long", "code": 400})) is RequestRefusedError
    assert type(told_in_stream({"message": "full", "code": 503})) is EngineBusyError
    assert type(told_in_stream({"message": "odd", "code": None})) is EngineError
    assert str(told_in_stream("a word")) == "a word"


def test_a_load_that_is_old_is_filled_up_with_what_is_known_here():
    old = ServerLoad(num_running=0, num_waiting=0, kv_used_tokens=0)
    assert combined(old, [(5, True), (0, False)], paused=None) == ServerLoad(
        num_running=1, num_waiting=1, kv_used_tokens=5
    )


def test_other_clients_requests_are_counted():
    theirs = ServerLoad(num_running=3, num_waiting=4, kv_used_tokens=90)
    assert combined(theirs, [(5, True)], paused=None) == theirs
    assert combined(theirs, [], paused=None) == theirs


def test_a_fresh_load_is_believed_but_for_what_the_front_holds():
    fresh = ServerLoad(num_running=1, num_waiting=0, kv_used_tokens=9, is_fresh=True)
    assert combined(fresh, [(5, True), (0, False)], paused=PauseMode.ABORT) == attrs.evolve(fresh, num_waiting=1)
    assert combined(fresh, [], paused=None) == fresh


def test_what_the_package_says():
    said = {"num_running": 1, "num_waiting": 2, "kv_used_tokens": 3}
    flags = {"is_paused": True, "is_asleep": False}
    state = {"rose": {"rose_snapshot": said | flags}}
    found = read_rose_state(read_facts({**INFO, "internal_states": [state]}))
    assert found.load == ServerLoad(num_running=1, num_waiting=2, kv_used_tokens=3, is_fresh=True)
    assert (found.is_paused, found.is_asleep) == (True, False)
    assert read_rose_state(read_facts(INFO)) is None
    with pytest.raises(EngineError, match="one release in both places"):
        read_rose_state(read_facts({**INFO, "internal_states": [{"rose": {"rose_snapshot": said}}]}))


def test_while_paused_only_what_is_known_here_counts():
    before = ServerLoad(num_running=3, num_waiting=0, kv_used_tokens=90)
    own = [(5, True), (0, False)]
    assert combined(before, own, paused=PauseMode.KEEP) == ServerLoad(num_running=1, num_waiting=1, kv_used_tokens=90)
    assert combined(before, own, paused=PauseMode.ABORT) == ServerLoad(num_running=0, num_waiting=2, kv_used_tokens=0)
