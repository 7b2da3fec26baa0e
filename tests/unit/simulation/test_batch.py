"""Continuous batching: order, counts, memory; runs of steps equal to single steps."""

from __future__ import annotations

from hypothesis import given, settings
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


class Ledger:
    """Every job that was ever added, and a batch's counts beside a plain recount of them."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.jobs: list[Job] = []
        self.num_ended = 0
        self.dropped: list[Job] = []

    def add(self, prompt: int, output: int, slack: int) -> None:
        name = f"j{len(self.jobs)}"
        keys = (("g", min(prompt, 5)), (f"t{len(self.jobs) % 3}", 1 << 40))
        self.jobs.append(job(name, prompt, output, most=output + slack, prefix_keys=keys))
        self.batch.add(self.jobs[-1])

    def drop(self, place: int) -> None:
        here = [each for each in self.jobs if not each.is_gone]
        if here:
            gone = here[place % len(here)]
            self.batch.drop(gone)
            self.dropped.append(gone)

    def cut(self, kv_tokens: int) -> None:
        for victim in self.batch.cut(kv_tokens):
            self.batch.drop(victim)
            self.dropped.append(victim)
        assert self.batch.kv_tokens_used <= kv_tokens

    def step(self, chunk: int, num_steps: int) -> None:
        batch = self.batch
        batch.relieve()
        batch.admit()
        plan = batch.plan_step(chunk) if batch.has_prefill else None
        if plan is not None and plan.num_tokens:
            self.num_ended += len(batch.finish_step(plan)[1])
        elif batch.num_decodes:
            self.num_ended += len(batch.advance(min(num_steps, batch.steps_to_change())))

    def check(self) -> None:
        batch = self.batch
        here = [each for each in self.jobs if not each.is_gone]
        decoding, waiting = batch.decoding(), list(batch.waiting)
        prefilling = [each for each in batch.everybody() if each not in decoding and each not in waiting]
        assert sorted(each.job_id for each in batch.everybody()) == sorted(each.job_id for each in here)
        assert len(self.jobs) == len(here) + len(self.dropped) + self.num_ended
        assert batch.num_decodes == len(decoding)
        held = [each.computed_tokens + batch.num_steps - each.joined_step for each in decoding]
        assert batch.decode_context_tokens == sum(held)
        assert batch.kv_tokens_used == sum(held) + sum(each.computed_tokens for each in prefilling)
        assert batch._reserved_tokens == sum(each.reserved_tokens for each in (*decoding, *prefilling))
        assert all(each.computed_tokens == 0 for each in waiting)
        assert all(batch.made_tokens(each) < each.output_tokens for each in here)
        is_lone = batch.num_running <= 1
        assert is_lone or batch.kv_tokens_used + batch.cache.num_tokens <= batch.kv_tokens


OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 60), st.integers(1, 30), st.integers(0, 20)),
    st.tuples(st.just("drop"), st.integers(0, 50)),
    st.tuples(st.just("cut"), st.integers(0, 200)),
    st.tuples(st.just("preempt_all")),
    st.tuples(st.just("step"), st.integers(1, 40), st.integers(1, 50)),
)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(OPERATIONS, max_size=60),
    st.fixed_dictionaries({"reserves_growth": st.booleans(), "has_cache": st.booleans()}),
)
def test_counts_never_drift_and_no_job_is_lost(operations: list[tuple[object, ...]], options: dict[str, bool]) -> None:
    batch = Batch(max_seqs=4, kv_tokens=150, **options)
    ledger = Ledger(batch)
    for name, *numbers in operations:
        if name == "preempt_all":
            batch.preempt_all()
        else:
            getattr(ledger, str(name))(*numbers)
        ledger.check()
    ledger.cut(1000)
    for _ in range(3000):
        if not len(batch):
            break
        ledger.step(40, 50)
        ledger.check()
    assert len(batch) == 0
    assert (batch.kv_tokens_used, batch._reserved_tokens, batch._prefill_tokens) == (0, 0, 0)
    assert all(each.made_tokens == each.output_tokens for each in ledger.jobs if each not in ledger.dropped)
