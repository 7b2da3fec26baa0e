"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors


import enum


class Dispatch(enum.Enum):
    ONE_TO_ALL = 'ONE_TO_ALL'
    ONE_TO_ALL_ONE = 'ONE_TO_ALL_ONE'
    ALL_TO_ALL = 'ALL_TO_ALL'
    DP_MP_COMPUTE = 'DP_MP_COMPUTE'
    DP_MP_DISPATCH_FIRST = 'DP_MP_DISPATCH_FIRST'
    DP_MP_DISPATCH_FIRST_COLLECT_ALL = 'DP_MP_DISPATCH_FIRST_COLLECT_ALL'


def register(dispatch_mode=None, execute_mode=None, clear_cache=True, trace=False, prefetch=False, to_remote=False):
    raise NotImplementedError('register')
