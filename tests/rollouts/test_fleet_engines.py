"""Two real engines on a node: one dies, hangs or is killed in a sync, and comes back.

What was sampled is what would have been sampled otherwise. The tests stand in order and share the
engines.
"""

import signal

import httpx
import psutil
import pytest
from rollouts.engine_checks import (
    announced,
    checkpoint_tensors,
    dense_model,
    perturb,
    reference_logprobs,
    request,
)
from rollouts.node_checks import (
    KEY,
    core_of,
    fleet_of,
    generate_with_newcomers,
    give_newcomers,
    started_node,
    tree_of,
    wait_complete,
)
from rollouts.starving import out_of_memory, refuse_memory
from rollouts.stub_engine import wait_for

from megatron_credit.rollouts.errors import EngineError

REQUESTS = [
    request([20, 30, 40 + k], num_samples=4, seed=17 * k, max_new_tokens=200, stop_token_ids=(383,))
    for k in range(40)
]


@pytest.fixture(scope="module")
def model():
    return dense_model(intermediate_size=512)


@pytest.fixture(scope="module")
def node(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    model.save_pretrained(path / "model")
    perturb(model, 1)  # the engines load other weights than they are sent
    with started_node(path) as node:
        yield node


@pytest.fixture(scope="module")
def fleet(model, node):
    with fleet_of(node, checkpoint_tensors(model)) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def undisturbed(fleet, model):
    answers = fleet.generate(REQUESTS)
    assert fleet.num_lost == 0
    require_samples_of(model, answers, version=1)
    return answers


def require_samples_of(model, answers, *, version):
    for one, samples in list(zip(REQUESTS, answers, strict=True))[::8]:
        for sample in samples:
            assert sample.versions == [(version, 0, len(sample.token_ids))]
            expected = reference_logprobs(model, one.prompt_ids, sample).tolist()
            assert sample.logprobs == pytest.approx(expected, abs=1e-4)


def test_every_endpoint_wants_the_key(fleet, undisturbed):
    """Also one with a wrong key, and whatever vLLM's next release adds to the list."""
    address = fleet.current()[0].entry.address
    right = {"Authorization": f"Bearer {KEY}"}
    listed = httpx.get(address + "/openapi.json", headers=right, timeout=60).json()["paths"]
    assert {"/pause", "/update_weights", "/collective_rpc", "/sleep", "/wake_up"} <= set(listed)
    for path, methods in listed.items():
        for method in methods:
            for headers in ({}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": KEY}):
                answer = httpx.request(method, address + path, headers=headers, timeout=60)
                assert answer.status_code == (200 if path == "/health" else 401), path
    for path in ("/openapi.json", "/docs", "/metrics", "/resume/", "//pause"):
        assert httpx.get(address + path, timeout=60).status_code == 401


def test_nothing_listens_beyond_the_given_address(fleet, undisturbed):
    """Neither the engines, with their weight groups, nor our end of these."""
    members = fleet.current()
    processes = [one for member in members for one in tree_of(member.entry)]
    listening = [
        connection.laddr
        for process in [psutil.Process(), *processes]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or connection.type == 2
    ]
    assert len(listening) >= 2
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_pickles_are_refused(fleet, undisturbed):
    _, server, *_ = tree_of(fleet.current()[0].entry)
    environment = server.environ()
    assert environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"


def test_killed_while_generating(fleet, model, undisturbed):
    victim = fleet.current()[0]

    def kill():
        wait_for(lambda: is_computing(victim.entry))
        core_of(victim.entry).kill()

    lost, reissued = fleet.num_lost, fleet.num_reissued
    tensors = checkpoint_tensors(model)
    assert generate_with_newcomers(fleet, REQUESTS, tensors, kill) == undisturbed
    assert fleet.num_lost == lost + 1
    assert 1 <= fleet.num_reissued - reissued <= 8  # 32 sequences an engine, 4 a request
    wait_complete(fleet, tensors)
    assert fleet.generate(REQUESTS) == undisturbed
    names = [member.entry.name for member in fleet.current()]
    assert sorted(names) == ["rollout-0.0", "rollout-0.1"]
    assert victim.entry.incarnation not in {one.entry.incarnation for one in fleet.current()}


def test_hangs_while_generating(fleet, model, node, undisturbed):
    victim = fleet.current()[0]
    below = tree_of(victim.entry)

    def stop():
        wait_for(lambda: is_computing(victim.entry))
        core_of(victim.entry).send_signal(signal.SIGSTOP)

    tensors = checkpoint_tensors(model)
    assert generate_with_newcomers(fleet, REQUESTS, tensors, stop) == undisturbed
    assert "no sign of life for 20 s" in str(fleet.last_loss)
    wait_complete(fleet, tensors)
    assert not any(one.is_running() and one.status() != "zombie" for one in below)
    assert "the trainer gave rollout-0." in node.log.read_text()
    assert fleet.generate(REQUESTS) == undisturbed


def test_no_memory_for_a_step(fleet, model, undisturbed):
    """Which of its parts fails first, and what that says, is not known."""
    victim = fleet.current()[0]

    def starve():
        wait_for(lambda: is_computing(victim.entry))
        refuse_memory(core_of(victim.entry))

    tensors = checkpoint_tensors(model)
    assert generate_with_newcomers(fleet, REQUESTS, tensors, starve) == undisturbed
    require_end_of(victim, fleet, tensors, undisturbed)
    wait_complete(fleet, tensors)


def test_ended_by_the_kernel_for_its_memory(fleet, model, node, undisturbed):
    victim = fleet.current()[0]
    tensors = checkpoint_tensors(model)
    wait_complete(fleet, tensors)
    with out_of_memory(core_of(victim.entry)) as by_kernel:
        require_end_of(victim, fleet, tensors, undisturbed)
    wait_complete(fleet, tensors)
    if not by_kernel:
        pytest.skip("no cgroup with a limit of memory can be made here")
    # Trainer and node say it, also when the engine was started again since.
    for text in (str(victim.loss), node.log.read_text().rpartition(" is lost, ")[2]):
        assert "ran out of memory: engine.kv_cache_mib" in text, text


def require_end_of(victim, fleet, tensors, undisturbed):
    """It finds memory among its own for a while; nobody sees a difference."""
    for _ in range(20):
        if victim.loss is not None:
            return
        assert generate_with_newcomers(fleet, REQUESTS, tensors) == undisturbed
    pytest.fail(f"{victim} lives without memory")


def test_killed_in_a_sync(fleet, model, undisturbed):
    """The other engine has the new weights; the whole stream was read, as the other ranks do."""
    victim = fleet.current()[0]
    perturb(model, 2)
    tensors = checkpoint_tensors(model)
    read = []

    def dying():
        for number, pair in enumerate(tensors):
            if number == len(tensors) // 2:
                core_of(victim.entry).kill()
            read.append(pair[0])
            yield pair

    fleet.send(announced(tensors), dying(), 2)
    assert len(read) == len(tensors)
    assert "weight sync, transfer" in str(fleet.last_loss)
    assert len(fleet.current()) == 1
    answers = generate_with_newcomers(fleet, REQUESTS, tensors)
    require_samples_of(model, answers, version=2)
    wait_complete(fleet, tensors)
    assert fleet.generate(REQUESTS) == answers != undisturbed


def test_none_is_left(fleet, model, node, monkeypatch):
    """Last: the node is told to end."""
    entries = [member.entry for member in fleet.current()]
    below = [one for entry in entries for one in tree_of(entry)]
    node.process.terminate()
    assert node.process.wait(60) == 0
    assert node.registry.entries() == []
    assert not any(one.is_running() and one.status() != "zombie" for one in below)
    short = fleet.config.model_copy(update={"startup_timeout_s": 3.0})
    monkeypatch.setattr(fleet, "config", short)
    with pytest.raises(EngineError, match=r"no engine has served for 3 s; of the last one"):
        fleet.generate(REQUESTS[:1])
    give_newcomers(fleet, checkpoint_tensors(model))


def is_computing(entry):
    """Whether the engine spends its time on more than waiting."""
    return core_of(entry).cpu_percent(0.1) > 20
