"""The fake trainer, and the record of one, keep the trainer contract."""

from __future__ import annotations

import pickle

from rose.testing import FakeTrainer, TrainerContract, TrainerRecord


class TestFakeTrainer(TrainerContract):
    def make_trainers(self):
        return FakeTrainer.group(4)

    def step(self, trainers):
        for trainer in trainers:
            trainer.step(0.5)
        return trainers


class TestOneRank(TestFakeTrainer):
    def make_trainers(self):
        return FakeTrainer.group(1)


class TestMoreRanksThanRows(TestFakeTrainer):
    def make_trainers(self):
        return FakeTrainer.group(24)


class TestTrainerRecord(TrainerContract):
    def make_trainers(self):
        return [pickle.loads(pickle.dumps(TrainerRecord.of(rank))) for rank in FakeTrainer.group(4)]  # noqa: S301 - own bytes
