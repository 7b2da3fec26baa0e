"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors


import enum


class OffloadStateType(enum.Enum):
    model_params = 'model_params'
    optimizer_states = 'optimizer_states'
    other_params = 'other_params'
