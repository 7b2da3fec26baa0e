"""Plans of leases."""

from __future__ import annotations

from rose.policies.lending import DeviceUse, Lease, LendingConfig, plan_expiry, plan_grants
from rose.types import DeviceId, JobId

CONFIG = LendingConfig(ttl_s=5.0, quota=2, quotas={"big": 9})


def use(name: str, fraction: float | None, *, token: int = 0, lease: Lease | None = None) -> DeviceUse:
    return DeviceUse(device_id=DeviceId(name), kv_use_fraction=fraction, last_token=token, lease=lease)


DEVICES = [use("a", 0.9), use("b", 0.2, token=7), use("c", 0.1), use("d", None), use("e", 0.2)]


def test_lowest_use_first_then_by_name() -> None:
    leases = plan_grants(CONFIG, DEVICES, JobId("big"), 9, now_s=1.0)
    assert [lease.device_id for lease in leases] == ["c", "b", "e"], "a is too full, d says nothing"
    assert [lease.fencing_token for lease in leases] == [1, 8, 1]
    assert {lease.expires_s for lease in leases} == {6.0}
    assert len({lease.lease_id for lease in leases}) == 3


def test_quotas_count_what_is_held() -> None:
    (first,) = plan_grants(CONFIG, DEVICES, JobId("j"), 1, now_s=0.0)
    devices = [use("c", 0.1, token=1, lease=first), *DEVICES[:2], DEVICES[4]]
    assert [lease.device_id for lease in plan_grants(CONFIG, devices, JobId("j"), 9, now_s=0.0)] == ["b"]
    assert plan_grants(CONFIG, devices, JobId("j"), 0, now_s=0.0) == ()
    assert [lease.device_id for lease in plan_grants(CONFIG, devices, JobId("k"), 9, now_s=0.0)] == ["b", "e"]


def test_expiry_is_exact() -> None:
    (lease,) = plan_grants(CONFIG, DEVICES, JobId("j"), 1, now_s=0.0)
    held = [use("c", 0.1, lease=lease), use("b", 0.1)]
    assert plan_expiry(held, 4.999) == ()
    assert plan_expiry(held, 5.0) == (lease,)
