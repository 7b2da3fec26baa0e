"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors


def monkey_patch_torch_reductions():
    raise NotImplementedError('monkey_patch_torch_reductions')


def named_tensors_from_bucket(bucket, tensors_meta):
    raise NotImplementedError('named_tensors_from_bucket')
