"""The control side of the `nccl` backend over several engines; NCCL itself needs GPUs.

The group and the broadcast are replaced, everything else is ours and vLLM's own trainer engine.
"""

import base64
import threading
import time

import pytest
import torch
from rollouts.stub_engine import KEY, StubEngine

from megatron_credit.rollouts import nccl_sender
from megatron_credit.rollouts.buckets import Piece
from megatron_credit.rollouts.client import EngineClient
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.participants import Participants

CONFIG = EngineConfig(max_model_len=8, tensor_parallel=2, bucket_mib=4, weight_backend="nccl")
TENSORS = [("a.weight", torch.ones(2, 3)), ("b.weight", torch.zeros(4, dtype=torch.bfloat16))]
PIECES = [Piece(name, one.dtype, tuple(one.shape)) for name, one in TENSORS]


class FakeGroup:
    def __init__(self):
        self.is_destroyed = threading.Event()

    def destroy(self):
        self.is_destroyed.set()


@pytest.fixture
def nccl(monkeypatch):
    """What reached the broadcasts, and the groups that were joined with their sizes."""
    sent, joined = [], []

    def join(group_id, size, device):
        joined.append((group_id, size, FakeGroup()))
        return joined[-1][2]

    def broadcast(engine, source, meta):
        sent.append([name for name, _ in engine._checked_iter(source, meta)])

    monkeypatch.setattr(nccl_sender, "new_group_id", lambda: bytes([len(joined)] * 128))
    monkeypatch.setattr(nccl_sender, "join_group", join)
    monkeypatch.setattr(nccl_sender.NCCLTrainerWeightTransferEngine, "_broadcast", broadcast)
    return sent, joined


@pytest.fixture
def engines():
    started = [StubEngine("a"), StubEngine("b")]
    for engine in started:
        engine.start()
    yield started
    for engine in started:
        engine.die()


def clients_of(engines):
    return [EngineClient(one.address, request_timeout_s=5, api_key=KEY) for one in engines]


def send(sender, clients, version, tensors=TENSORS, timeout_s=10):
    taking_part = Participants(clients, timeout_s=timeout_s)
    sender.send(taking_part, PIECES, iter(tensors), version=version)
    return taking_part


def test_two_engines_make_one_group(nccl, engines):
    sent, joined = nccl
    sender, clients = nccl_sender.NcclSender(CONFIG), clients_of(engines)
    assert not send(sender, clients, 3).failed
    assert not send(sender, clients, 4).failed
    assert [size for _, size, _ in joined] == [5]  # ours, and two of each engine
    assert sent == [["a.weight", "b.weight"]] * 2
    for engine, offset in zip(engines, (1, 3), strict=True):
        paths = [path for path, _ in engine.asked]
        update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
        connection = ["/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"]
        assert paths == connection + update + update
        assert engine.asked[1][1]["init_info"] == {
            "rank_offset": offset,
            "world_size": 5,
            "nccl_unique_id_b64": base64.b64encode(bytes(128)).decode(),
            "packed": True,
            "packed_buffer_size_bytes": 4 << 20,
        }
        assert engine.asked[3][1]["update_info"] == {
            "names": ["a.weight", "b.weight"],
            "dtype_names": ["float32", "bfloat16"],
            "shapes": [[2, 3], [4]],
        }
        assert engine.version == "4"


def test_a_newcomer_gets_a_group_of_its_own_first(nccl, engines):
    _, joined = nccl
    sender, (first, second) = nccl_sender.NcclSender(CONFIG), clients_of(engines)
    send(sender, [first], 1)
    send(sender, [second], 1)
    send(sender, [first, second], 2)
    assert [size for _, size, _ in joined] == [3, 3, 5]
    assert [group.is_destroyed.is_set() for _, _, group in joined] == [True, True, False]
    assert [engine.version for engine in engines] == ["2", "2"]


def test_an_engine_that_fails_takes_the_group_with_it(nccl, engines):
    """The broadcast, which would wait for it for ever, is freed by the end of the group."""
    _, joined = nccl
    sender, clients = nccl_sender.NcclSender(CONFIG), clients_of(engines)
    send(sender, clients, 1)
    waits = joined[0][2].is_destroyed

    def stuck(engine, source, meta):
        assert waits.wait(20)
        raise RuntimeError("NCCL error: unhandled")

    engines[1].refusals["/update_weights"] = 500
    nccl_sender.NCCLTrainerWeightTransferEngine._broadcast = stuck
    stream = iter(TENSORS)
    taking_part = Participants(clients, timeout_s=10)
    start = time.monotonic()
    sender.send(taking_part, PIECES, stream, version=2)
    assert time.monotonic() - start < 15
    assert not taking_part.live and next(stream, None) is None
    assert "answered 500" in taking_part.failed[clients[1]].problem
    assert "lost its weight group" in taking_part.failed[clients[0]].problem
    assert engines[0].version == "1"


def test_an_engine_that_cannot_join_is_found_while_we_wait(nccl, engines, monkeypatch):
    sender, clients = nccl_sender.NcclSender(CONFIG), clients_of(engines)
    monkeypatch.setattr(nccl_sender, "join_group", lambda *_: threading.Event().wait(60))
    engines[0].refusals["/init_weight_transfer_engine"] = 500
    start = time.monotonic()
    taking_part = send(sender, clients, 1)
    assert time.monotonic() - start < 15
    assert "weight sync, connection" in taking_part.failed[clients[0]].problem
    assert not taking_part.live


def test_weights_that_were_not_announced_are_our_own_mistake(nccl, engines):
    sender = nccl_sender.NcclSender(CONFIG)
    with pytest.raises(ValueError, match="yielded more parameters"):
        send(sender, clients_of(engines), 1, [*TENSORS, ("c.weight", torch.ones(1))])
