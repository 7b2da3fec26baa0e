"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors


import enum


class GenerateStopReason(enum.Enum):
    FINISH = 'FINISH'
    ABORT = 'ABORT'
    MAX_LENGTH = 'MAX_LENGTH'
    NO_SYSTEM_PROMPT = 'NO_SYSTEM_PROMPT'
