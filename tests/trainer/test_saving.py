"""When a run saves, and what it says of it."""

from types import SimpleNamespace

import pytest

from megatron_credit.mcore.saving import Saver, SaveSeconds
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.metric_names import is_known
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.training_policy import TrainingPolicy


class RecordingSaver(Saver):
    """Completes a checkpoint at once, and says how it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def save(self, directory, state, owner, *, asynchronous=False, after=None):
        directory.mkdir()
        after()
        self.saved = directory
        self.calls.append((directory.name, state, owner, asynchronous))


@pytest.fixture
def saver():
    return RecordingSaver()


def make(tmp_path, saver, *, asynchronous):
    directory = RunDirectory(tmp_path)
    directory.create()
    directory.write_data({"fingerprint": "f"})
    directory.launch.mkdir()
    section = {"asynchronous": asynchronous, "keep_last": 1, "keep_every": 4}
    config = RunConfig.model_validate(
        {
            "run": {"directory": tmp_path},
            "task": {},
            "policy": {"model": tmp_path},
            "sampling": {"max_new_tokens": 8},
            "trainer": {"steps": 8},
            "checkpoint": section,
        }
    )
    policy = SimpleNamespace(
        saver=saver, training_state=lambda: "state", owner=lambda data: {"data": data}
    )
    return directory, TrainingPolicy(policy, config=config, directory=directory, is_writer=True)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_all_but_the_last_save_may_go_on_meanwhile(tmp_path, saver, asynchronous):
    directory, policy = make(tmp_path, saver, asynchronous=asynchronous)
    assert policy.saved_step() is None
    for step in (2, 4, 6, 8):
        policy.save(step)
        assert policy.saved_step() == step
        assert (directory.launch / "progress").read_text() == str(step)
    assert saver.calls == [
        (f"step-00000{step}", "state", {"data": "f"}, asynchronous and step < 8)
        for step in (2, 4, 6, 8)
    ]
    assert directory.checkpoint_steps() == [4, 8]


@pytest.mark.parametrize(
    ("seconds", "metrics"),
    [
        (None, {}),
        (SaveSeconds(2.0, None), {"timing/checkpoint_s": 2.0}),
        (
            SaveSeconds(2.0, 5.0),
            {"timing/checkpoint_s": 2.0, "timing/checkpoint_write_s": 5.0},
        ),
    ],
)
def test_what_a_save_took_is_a_metric(tmp_path, saver, monkeypatch, seconds, metrics):
    _, policy = make(tmp_path, saver, asynchronous=True)
    monkeypatch.setattr(saver, "take_seconds", lambda: seconds)
    assert policy.save_metrics() == metrics
    assert all(map(is_known, metrics))
