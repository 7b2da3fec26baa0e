"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors


class DataProto:
    def __init__(self, batch=None, non_tensor_batch=None, remote_batch=None, meta_info=None):
        raise NotImplementedError('__init__')

    @property
    def batch(self):
        raise NotImplementedError('batch')

    @batch.setter
    def batch(self, value):
        raise NotImplementedError('batch')

    @property
    def non_tensor_batch(self):
        raise NotImplementedError('non_tensor_batch')

    @non_tensor_batch.setter
    def non_tensor_batch(self, value):
        raise NotImplementedError('non_tensor_batch')

    def __post_init__(self):
        raise NotImplementedError('__post_init__')

    def __repr__(self):
        raise NotImplementedError('__repr__')

    def __len__(self):
        raise NotImplementedError('__len__')

    def __getitem__(self, item):
        raise NotImplementedError('__getitem__')

    def __setitem__(self, key, value):
        raise NotImplementedError('__setitem__')

    def __delitem__(self, key):
        raise NotImplementedError('__delitem__')

    def __getstate__(self):
        raise NotImplementedError('__getstate__')

    def __setstate__(self, data):
        raise NotImplementedError('__setstate__')

    def check_consistency(self):
        raise NotImplementedError('check_consistency')

    @classmethod
    def from_single_dict(cls, data, meta_info=None):
        raise NotImplementedError('from_single_dict')

    @classmethod
    def from_dict(cls, tensors, non_tensors=None, meta_info=None, num_batch_dims=1):
        raise NotImplementedError('from_dict')

    def to(self, device):
        raise NotImplementedError('to')

    def clone(self):
        raise NotImplementedError('clone')

    def update(self, other):
        raise NotImplementedError('update')

    def select(self, batch_keys=None, non_tensor_batch_keys=None, meta_info_keys=None, deepcopy=False):
        raise NotImplementedError('select')

    def select_idxs(self, idxs):
        raise NotImplementedError('select_idxs')

    def slice(self, start=None, end=None, step=None):
        raise NotImplementedError('slice')

    def pop(self, batch_keys=None, non_tensor_batch_keys=None, meta_info_keys=None):
        raise NotImplementedError('pop')

    @staticmethod
    def validate_input(keys):
        raise NotImplementedError('validate_input')

    def rename(self, old_keys=None, new_keys=None):
        raise NotImplementedError('rename')

    def union(self, other):
        raise NotImplementedError('union')

    def make_iterator(self, mini_batch_size, epochs, seed=None, dataloader_kwargs=None):
        raise NotImplementedError('make_iterator')

    def chunk(self, chunks):
        raise NotImplementedError('chunk')

    @staticmethod
    def concat(data, *, global_keys=None):
        raise NotImplementedError('concat')

    def reorder(self, indices):
        raise NotImplementedError('reorder')

    def group_by(self, keys):
        raise NotImplementedError('group_by')

    def repeat(self, repeat_times=2, interleave=True):
        raise NotImplementedError('repeat')

    @staticmethod
    def materialize_concat(data_refs, *, global_keys=None):
        raise NotImplementedError('materialize_concat')

    @classmethod
    def to_remote(cls, data, partition='train_eval', *, ref_data=None):
        raise NotImplementedError('to_remote')

    def prefetch(self, keys=None):
        raise NotImplementedError('prefetch')

    @classmethod
    def drop(cls, data):
        raise NotImplementedError('drop')
