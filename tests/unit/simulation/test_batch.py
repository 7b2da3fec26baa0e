"""Continuous batching: order, counts, memory; runs of steps equal to single steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rose.simulation.batch import Batch, Job


def job(name: str, prompt: int = 10, output: int = 5, **more: object) -> Job:
    return Job(
        job_id=name,
        prompt_tokens=prompt,
        output_tokens=output,
        max_output_tokens=more.pop("most", output),  # type: ignore[arg-type]
        arrived_s=0.0,
        **more,  # type: ignore[arg-type]
    )


def step(batch: Batch, chunk: int = 1000) -> tuple[list[str], list[str]]:
    batch.relieve()
    batch.admit()
    started, ended = batch.finish_step(batch.plan_step(chunk))
    return [each.job_id for each in started], [each.job_id for each in ended]


def test_a_job_prefills_in_chunks_and_ends_with_its_last_token() -> None:
    batch = Batch(max_seqs=4, kv_tokens=1000)
    batch.add(job("a", prompt=25, output=3))
    assert [step(batch, chunk=10) for _ in range(5)] == [([], []), ([], []), (["a"], []), ([], []), ([], ["a"])]
    assert len(batch) == 0
    assert batch.kv_tokens_used == 0


def test_an_answer_of_one_token_ends_with_its_prefill() -> None:
    batch = Batch(max_seqs=4, kv_tokens=1000)
    batch.add(job("a", output=1))
    assert step(batch) == (["a"], ["a"])


def test_positions_are_those_that_new_tokens_attend_to() -> None:
    batch = Batch(max_seqs=4, kv_tokens=1000)
    batch.add(job("a", prompt=30))
    batch.admit()
    batch.finish_step(batch.plan_step(10))
    plan = batch.plan_step(10)
    assert (plan.num_tokens, plan.positions) == (10, 10 * 15)


def test_slots_and_memory_bound_admission_first_come_first_served() -> None:
    batch = Batch(max_seqs=2, kv_tokens=40)
    for name in "abc":
        batch.add(job(name))
    step(batch)
    assert [each.job_id for each in batch.waiting] == ["c"]
    full = Batch(max_seqs=9, kv_tokens=25)
    for name, prompt in (("a", 10), ("b", 20), ("c", 1)):
        full.add(job(name, prompt=prompt))
    step(full)
    assert [each.job_id for each in full.waiting] == ["b", "c"]


def test_reserving_admission_counts_what_jobs_may_come_to_hold() -> None:
    batch = Batch(max_seqs=9, kv_tokens=40, reserves_growth=True)
    batch.add(job("a", prompt=10, output=2, most=20))
    batch.add(job("b", prompt=5, output=2, most=6))
    step(batch)
    assert [each.job_id for each in batch.waiting] == ["b"]
    step(batch)  # a has ended
    step(batch)
    assert not batch.waiting


def test_without_memory_the_youngest_computes_its_prefix_again() -> None:
    batch = Batch(max_seqs=9, kv_tokens=30, has_cache=False)
    batch.add(job("a", prompt=10, output=12))
    batch.add(job("b", prompt=10, output=12))
    names: list[str] = []
    for _ in range(100):
        names += step(batch)[1]
        if not len(batch):
            break
    assert names == ["a", "b"]
    assert batch.num_preempted >= 1
    assert batch.num_prefilled_tokens > 20


def test_a_job_finds_its_own_prefix_and_its_groups() -> None:
    batch = Batch(max_seqs=9, kv_tokens=1000)
    keys = (("group", 8), ("t1", 1000))
    batch.add(job("a1", prompt=10, output=5, prefix_keys=keys))
    for _ in range(5):
        step(batch)
    again = job("a2", prompt=20, output=5, prefix_keys=keys)
    other = job("b1", prompt=20, output=5, prefix_keys=(("group", 8), ("t2", 1000)))
    batch.add(again)
    batch.add(other)
    batch.admit()
    assert (again.cached_tokens, other.cached_tokens) == (14, 8)


def test_the_cache_gives_way_to_jobs_and_is_dropped_on_command() -> None:
    batch = Batch(max_seqs=9, kv_tokens=30)
    batch.add(job("a", prompt=20, output=2, prefix_keys=(("t1", 99),)))
    step(batch)
    step(batch)
    assert batch.cache.num_tokens == 21
    batch.add(job("b", prompt=20, output=2))
    step(batch)
    assert batch.cache.num_tokens == 0
    batch.cache.put("x", 5)
    batch.cache.clear()
    assert batch.cache.take("x") == 0


def test_a_cut_names_the_youngest_that_have_to_go() -> None:
    batch = Batch(max_seqs=9, kv_tokens=100)
    for name in "abc":
        batch.add(job(name, prompt=20, output=50))
    step(batch)
    assert [each.job_id for each in batch.cut(45)] == ["c"]
    assert [each.job_id for each in batch.cut(25)] == ["c", "b"]


def test_a_dropped_job_leaves_nothing() -> None:
    batch = Batch(max_seqs=2, kv_tokens=100)
    jobs = [job(name, prompt=20, output=50) for name in "abc"]
    for each in jobs:
        batch.add(each)
    step(batch)
    for each in jobs:
        batch.drop(each)
        batch.drop(each)
    assert (len(batch), batch.kv_tokens_used, batch.num_decodes) == (0, 0, 0)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(60, 400),
    st.integers(1, 64),
)
def test_a_run_of_steps_is_the_same_as_single_steps(shapes: list[tuple[int, int]], kv_tokens: int, chunk: int) -> None:
    def play(*, in_runs: bool) -> list[tuple[int, str]]:
        batch = Batch(max_seqs=4, kv_tokens=kv_tokens)
        for i, (prompt, output) in enumerate(shapes):
            batch.add(job(f"j{i}", prompt=prompt, output=output))
        ends = []
        while len(batch):
            batch.relieve()
            batch.admit()
            plan = batch.plan_step(chunk)
            if plan.num_tokens:
                ended = batch.finish_step(plan)[1]
            else:
                ended = batch.advance(batch.steps_to_change() if in_runs else 1)
            ends += [(batch.num_steps, each.job_id) for each in ended]
            assert batch.num_running <= 1 or batch.kv_tokens_used <= kv_tokens
            assert batch.decode_context_tokens == sum(
                each.computed_tokens + batch.num_steps - each.joined_step for each in batch.decoding()
            )
        assert batch.kv_tokens_used == 0
        return ends

    runs, singles = play(in_runs=True), play(in_runs=False)
    assert runs == singles
    assert sorted(name for _, name in runs) == sorted(f"j{i}" for i in range(len(shapes)))
