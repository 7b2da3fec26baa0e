"""Plans of leases."""

from __future__ import annotations

import itertools

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.policies.fair_shares import water_fill
from rose.policies.lending import (
    Ask,
    DeviceUse,
    JobTerms,
    Lease,
    LendingConfig,
    plan_expiry,
    plan_grants,
)
from rose.policies.recalls import plan_recalls, plan_shares
from rose.types import DeviceId, JobId

CONFIG = LendingConfig(ttl_s=5.0, quota=2, jobs={"big": JobTerms(quota=9)})


def use(name: str, fraction: float | None, *, token: int = 0, lease: Lease | None = None) -> DeviceUse:
    return DeviceUse(device_id=DeviceId(name), kv_use_fraction=fraction, last_token=token, lease=lease)


def ask(job: str, number: int) -> Ask:
    return Ask(job=JobId(job), num_devices=number)


DEVICES = [use("a", 0.9), use("b", 0.2, token=7), use("c", 0.1), use("d", None), use("e", 0.2)]


def test_lowest_use_first_then_by_name() -> None:
    leases = plan_grants(CONFIG, DEVICES, [ask("big", 9)], now_s=1.0)
    assert [lease.device_id for lease in leases] == ["c", "b", "e"], "a is too full, d says nothing"
    assert [lease.fencing_token for lease in leases] == [1, 8, 1]
    assert {lease.expires_s for lease in leases} == {6.0}
    assert len({lease.lease_id for lease in leases}) == 3


def test_quotas_count_what_is_held() -> None:
    (first,) = plan_grants(CONFIG, DEVICES, [ask("j", 1)], now_s=0.0)
    devices = [use("c", 0.1, token=1, lease=first), *DEVICES[:2], DEVICES[4]]
    assert [lease.device_id for lease in plan_grants(CONFIG, devices, [ask("j", 9)], now_s=0.0)] == ["b"]
    assert plan_grants(CONFIG, devices, [ask("j", 0)], now_s=0.0) == ()
    assert [lease.device_id for lease in plan_grants(CONFIG, devices, [ask("k", 9)], now_s=0.0)] == ["b", "e"]


def test_expiry_is_exact() -> None:
    (lease,) = plan_grants(CONFIG, DEVICES, [ask("j", 1)], now_s=0.0)
    held = [use("c", 0.1, lease=lease), use("b", 0.1)]
    assert plan_expiry(held, 4.999) == ()
    assert plan_expiry(held, 5.0) == (lease,)


def free(*names: str, models: str = "") -> list[DeviceUse]:
    known = frozenset(models.split()) or None
    return [
        DeviceUse(device_id=DeviceId(name), kv_use_fraction=i / 100, last_token=0, models=known)
        for i, name in enumerate(names)
    ]


def jobs_of(leases: tuple[Lease, ...]) -> str:
    return "".join(lease.job for lease in sorted(leases, key=lambda lease: lease.device_id))


def test_asks_planned_together_share_by_weight_and_tenants_come_before_their_jobs() -> None:
    devices = free(*"abcdef")
    assert jobs_of(plan_grants(LendingConfig(), devices, [ask("y", 6), ask("x", 6)], 0.0)) == "xyxyxy"
    heavy = LendingConfig(jobs={"x": JobTerms(weight=2.0)})
    assert sorted(jobs_of(plan_grants(heavy, devices, [ask("x", 6), ask("y", 6)], 0.0))) == list("xxxxyy")
    tenants = LendingConfig(jobs={name: JobTerms(tenant="t") for name in "xy"}, tenants={"t": 1.0, "z": 2.0})
    three = [ask("x", 6), ask("y", 6), ask("z", 6)]
    assert sorted(jobs_of(plan_grants(tenants, devices, three, 0.0))) == list("xyzzzz")
    assert plan_shares(tenants, devices, three) == {"x": 1.0, "y": 1.0, "z": 4.0}


def test_what_another_job_still_waits_for_is_kept_for_it_up_to_its_share() -> None:
    leases = plan_grants(LendingConfig(), free(*"abcd"), [ask("x", 4)], 0.0, wishes=[ask("y", 1)])
    assert [lease.device_id for lease in leases] == ["a", "b", "c"], "the lowest use goes to who asks now"


def test_models_and_engines_decide_which_devices_are_of_use() -> None:
    devices = [*free("a", "b", models="m n"), *free("c", models="n"), *free("d")]
    wanted = Ask(job=JobId("j"), num_devices=9, model="m", devices=frozenset(map(DeviceId, "bcd")))
    assert [lease.device_id for lease in plan_grants(LendingConfig(), devices, [wanted], 0.0)] == ["d", "b"]
    (only,) = plan_grants(LendingConfig(), free("c", models="n"), [ask("j", 1)], 0.0)
    assert only.model == "n"


def test_an_engine_over_several_devices_gets_all_of_them_or_none() -> None:
    whole = Ask(job=JobId("w"), num_devices=2, devices=frozenset(map(DeviceId, "bd")), is_whole=True)
    assert [lease.device_id for lease in plan_grants(LendingConfig(), free(*"abcd"), [whole], 0.0)] == ["b", "d"]
    assert plan_grants(LendingConfig(), free(*"abc"), [whole], 0.0) == ()
    assert plan_grants(LendingConfig(quota=1), free(*"abcd"), [whole], 0.0) == ()


@given(
    uses=st.lists(st.one_of(st.none(), st.integers(0, 100)), min_size=1, max_size=12),
    wanted=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    quota=st.integers(0, 8),
)
def test_grants_are_the_brute_force_choice_of_lowest_use_one_job_a_device(uses, wanted, quota) -> None:
    devices = [use(f"d{i:02}", None if value is None else value / 100) for i, value in enumerate(uses)]
    config = LendingConfig(quota=quota)
    leases = plan_grants(config, devices, [ask(f"j{i}", number) for i, number in enumerate(wanted)], 0.0)
    lendable = [each for each in devices if each.kv_use_fraction is not None and each.kv_use_fraction <= 0.8]
    number = min(len(lendable), sum(min(each, quota) for each in wanted))
    best = min(
        itertools.combinations(lendable, number),
        key=lambda chosen: (sum(each.kv_use_fraction for each in chosen), [each.device_id for each in chosen]),
    )
    assert sorted(lease.device_id for lease in leases) == sorted(each.device_id for each in best)
    for index, each in enumerate(wanted):
        assert sum(lease.job == f"j{index}" for lease in leases) <= min(each, quota)


def lent(names: str, job: str, *, granted_s: float = 0.0) -> list[DeviceUse]:
    return [
        use(
            name,
            None,
            lease=Lease(
                lease_id=f"{name}#1", job=job, device_id=name, fencing_token=1, expires_s=9e9, granted_s=granted_s
            ),
        )
        for name in names
    ]


def recalled(
    devices: list[DeviceUse], deficit_s: float, now_s: float = 100.0, *, number: int = 9, ahead_s: float = 1.0
) -> str:
    config = LendingConfig(min_hold_s=60.0)
    wishes = [ask("y", number)]
    shares = plan_shares(config, devices, wishes)
    leases = plan_recalls(config, devices, wishes, shares, {JobId("y"): deficit_s, JobId("x"): -ahead_s}, now_s)
    return "".join(lease.device_id for lease in leases)


def test_a_job_above_its_share_is_asked_back_what_another_waits_for() -> None:
    assert recalled(lent("abcd", "x"), 0.0) == "dc", "two of four, those it got last"
    assert recalled(lent("abcd", "x", granted_s=50.0), 60.0) == "", "nobody loses a device that it has just got"
    assert recalled(lent("abcd", "x"), 0.0, number=1) == "d"
    assert recalled([*lent("abcd", "x"), use("e", 0.1)], 0.0, number=2) == "d", "what is free counts first"
    revoking = [attrs.evolve(each, lease=attrs.evolve(each.lease, is_revoking=True)) for each in lent("cd", "x")]
    assert recalled([*lent("ab", "x"), *revoking], 0.0) == "", "what comes back anyway counts first"


def test_who_is_behind_gets_the_odd_device_or_one_more_than_its_share() -> None:
    odd, even = [*lent("abc", "x"), *lent("de", "y")], [*lent("ab", "x"), *lent("de", "y")]
    assert recalled(odd, 59.0) == "", "the odd device stays until the other is behind"
    assert recalled(odd, 60.0) == "c"
    assert recalled(even, 59.0) == ""
    assert recalled(even, 60.0) == "b", "until it has caught up"
    assert recalled(even, 60.0, ahead_s=0.0) == "", "from who is ahead"
    assert recalled(odd, 60.0, ahead_s=-1.0) == "", "nobody who is behind gives"


def recalled_whole(devices: list[DeviceUse], now_s: float, deficit_s: float = 0.0) -> str:
    """Return what is asked back for an engine of job y over devices a and b."""
    config = LendingConfig(min_hold_s=60.0)
    pair = frozenset({DeviceId("a"), DeviceId("b")})
    wishes = [Ask(job=JobId("y"), num_devices=2, devices=pair, is_whole=True)]
    shares = plan_shares(config, devices, wishes)
    leases = plan_recalls(config, devices, wishes, shares, {JobId("y"): deficit_s, JobId("x"): -deficit_s}, now_s)
    return "".join(sorted(lease.device_id for lease in leases))


def test_for_an_engine_over_several_devices_all_that_it_lacks_is_asked_back_or_nothing() -> None:
    assert recalled_whole(lent("abcd", "x"), 60.0) == "ab"
    assert recalled_whole([*lent("acd", "x"), use("b", 0.1)], 60.0) == "a", "the other one is free"
    fresh = [*lent("acd", "x"), *lent("b", "x", granted_s=50.0)]
    assert recalled_whole(fresh, 60.0) == "", "half of it would help nobody"
    assert recalled_whole(lent("ab", "x"), 60.0) == "", "its share is one device"
    assert recalled_whole(lent("ab", "x"), 60.0, deficit_s=60.0) == "ab", "it has its turn when it is behind"


def test_weights_must_be_positive() -> None:
    with pytest.raises(ValueError, match="weights must be > 0 and finite, which those of t are not"):
        LendingConfig(tenants={"t": 0.0, "u": 1.0})


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 9), st.floats(1e-20, 1e20)), min_size=1))
def test_shares_add_up_whatever_the_weights(wants: dict[str, tuple[int, float]]) -> None:
    demands = {name: float(demand) for name, (demand, _) in wants.items()}
    shares = water_fill(demands, {name: weight for name, (_, weight) in wants.items()}, 7.0)
    assert sum(shares.values()) == pytest.approx(min(7.0, sum(demands.values())))
    assert all(-1e-9 <= shares[name] <= demands[name] for name in demands)
