"""What a fleet makes of engines that die, hang, lie and come; the engines are stubs over HTTP."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rollouts.stub_engine import CONFIG, KEY, POISON, StubEngine, stub_fleet, wait_for

from megatron_credit.rollouts.client import GenerateRequest
from megatron_credit.rollouts.engine_log import EngineLog
from megatron_credit.rollouts.errors import EngineError, RequestRefused
from megatron_credit.rollouts.fleet import Fleet
from megatron_credit.rollouts.registry import Entry, FixedEngine, Registry


def request(first, *, num_samples=2):
    return GenerateRequest(
        prompt_ids=[first, 1, 2],
        num_samples=num_samples,
        temperature=1.0,
        max_new_tokens=4,
        stop_token_ids=(),
        seed=1000 + first,
    )


def firsts(answers):
    """The first token of each request's samples, which is that of its prompt."""
    assert all(len(samples) == 2 for samples in answers)
    return [samples[0].token_ids[0] for samples in answers]


def answered(engines):
    """Requests that got an answer, of all engines."""
    return [first for engine in engines.values() for first, _ in engine.answered]


def send_to_newcomers(fleet):
    """Once there are some, as the trainer's main thread does."""
    wait_for(fleet.newcomers)
    fleet.send_to_newcomers([], iter([]))


def test_requests_are_spread_and_keep_their_order(tmp_path):
    with stub_fleet(tmp_path, ["a", "b", "c"]) as (fleet, engines):
        for engine in engines.values():
            engine.delay_s = 0.05
        assert firsts(fleet.generate([request(k) for k in range(60)])) == list(range(60))
        shares = [len(engine.answered) for engine in engines.values()]
        assert sum(shares) == 60 and min(shares) >= 10
        assert fleet.num_lost == fleet.num_reissued == 0


def test_an_engine_dies_and_its_requests_are_asked_of_another(tmp_path):
    with stub_fleet(tmp_path, ["a", "b"]) as (fleet, engines):
        for engine in engines.values():
            engine.delay_s = 0.3
        threading.Timer(0.45, engines["a"].die).start()
        assert firsts(fleet.generate([request(k) for k in range(24)])) == list(range(24))
        assert sorted(answered(engines)) == list(range(24))  # each was answered once
        assert fleet.num_lost == 1 and 1 <= fleet.num_reissued <= 4
        assert Registry(tmp_path / "engines").condemned(engines["a"].entry) is not None


def test_an_engine_hangs_and_its_late_answers_do_not_count(tmp_path):
    config = CONFIG.model_copy(update={"hang_timeout_s": 1.0})
    with stub_fleet(tmp_path, ["a", "b"], config) as (fleet, engines):
        engines["a"].is_hanging = True
        answers = fleet.generate([request(k) for k in range(12)])
        assert firsts(answers) == list(range(12))
        assert "no sign of life for 1 s" in str(fleet.last_loss)
        engines["a"].is_hanging = False
        assert [one.entry.name for one in fleet.current()] == ["b"]
        assert firsts(fleet.generate([request(5)])) == [5]
        assert engines["b"].answered[-1] == (5, 1005)


def test_an_engine_with_other_weights_than_it_was_given_is_not_believed(tmp_path):
    with stub_fleet(tmp_path, ["a", "b"]) as (fleet, engines):
        engines["a"].version = "default"  # as after a restart behind our back
        assert firsts(fleet.generate([request(k) for k in range(8)])) == list(range(8))
        assert re.search(r"sampled with weights \[-1\], but was given 1", str(fleet.last_loss))
        assert sorted(first for first, _ in engines["b"].answered) == list(range(8))


def test_a_newcomer_is_asked_nothing_before_it_has_the_weights(tmp_path):
    with stub_fleet(tmp_path, ["a", "b"]) as (fleet, engines), ThreadPoolExecutor(1) as pool:
        engines["a"].die()
        engines["b"].delay_s = 0.2
        asked = pool.submit(fleet.generate, [request(k) for k in range(60)])
        wait_for(lambda: fleet.num_lost == 1)
        engines["a"].answered.clear()
        engines["a"].start()
        wait_for(fleet.newcomers)
        assert engines["a"].answered == []
        fleet.send_to_newcomers([], iter([]))
        assert firsts(asked.result(60)) == list(range(60))
        assert len(engines["a"].answered) >= 5  # it took its share of what was left


def test_none_is_left_until_one_comes(tmp_path):
    with stub_fleet(tmp_path, ["a"]) as (fleet, engines), ThreadPoolExecutor(1) as pool:
        engines["a"].delay_s = 0.3
        asked = pool.submit(fleet.generate, [request(k) for k in range(4)])
        time.sleep(0.1)
        engines["a"].die()
        wait_for(lambda: fleet.num_lost == 1)
        engines["a"].start()
        send_to_newcomers(fleet)
        assert firsts(asked.result(60)) == list(range(4))
        assert sorted(answered(engines)) == list(range(4))


def test_none_is_left_and_none_comes(tmp_path):
    config = CONFIG.model_copy(update={"startup_timeout_s": 2.0})
    with stub_fleet(tmp_path, ["a"], config) as (fleet, engines):
        (tmp_path / "engine-a.log").write_text("the last words of a\n")
        engines["a"].die()
        start = time.monotonic()
        with pytest.raises(EngineError, match=r"no engine has served for 2 s(.|\n)*last words"):
            fleet.generate([request(1)])
        assert 2 <= time.monotonic() - start < 30


def test_a_request_that_ends_three_engines_is_named(tmp_path):
    """The others, which were beside it twice, are not blamed: the third time it runs alone among
    suspects."""
    with stub_fleet(tmp_path, ["a", "b", "c", "d"]) as (fleet, engines):
        for engine in engines.values():
            engine.delay_s = 0.05
        requests = [request(k) for k in range(6)] + [request(POISON)]
        with pytest.raises(EngineError, match=r"engine number 3 .* prompt of 3 tokens \[666, 1, 2"):
            fleet.generate(requests)
        assert fleet.num_lost == 3
        assert [one.entry.name for one in fleet.current()] != []
        assert firsts(fleet.generate(requests[:6])) == list(range(6))


def test_a_wrong_request_costs_no_engine(tmp_path, monkeypatch):
    with stub_fleet(tmp_path, ["a", "b"]) as (fleet, _):
        monkeypatch.setattr(
            "rollouts.stub_engine.Handler.generate",
            lambda self, engine, body: self.answer({"error": "too long"}, 400),
        )
        with pytest.raises(RequestRefused, match="answered 400"):
            fleet.generate([request(1)])
        assert len(fleet.current()) == 2


def test_engines_that_fail_in_a_sync_are_lost_and_the_others_go_on(tmp_path):
    with stub_fleet(tmp_path, ["a", "b"]) as (fleet, engines):
        engines["a"].refusals["/finish_weight_update"] = 500
        read = []
        fleet.send([], iter(read.append(k) or (str(k), None) for k in range(3)), 2)
        assert [one.entry.name for one in fleet.current()] == ["b"]
        assert "weight sync, finish" in str(fleet.last_loss) and read == [0, 1, 2]
        engines["b"].die()
        fleet.send([], iter([]), 3)  # another may come
        assert fleet.current() == [] and fleet.weight_version() == 3
        engines["b"].start()
        send_to_newcomers(fleet)
        assert engines["b"].version == "3"
        assert firsts(fleet.generate([request(7)])) == [7]


def test_the_only_engine_is_lost_where_no_other_can_come():
    engine = StubEngine("only")
    engine.start()
    fleet = Fleet(FixedEngine(engine.address), CONFIG, api_key=KEY)
    fleet.wait_ready(20)
    assert firsts(fleet.generate([request(1)])) == [1]
    engine.die()
    start = time.monotonic()
    with pytest.raises(EngineError, match=f"generation: the engine at {engine.address}"):
        fleet.generate([request(1)])
    with pytest.raises(EngineError, match=f"the engine at {engine.address}"):
        fleet.send([], iter([]), 1)
    assert time.monotonic() - start < 10
    fleet.close()


def test_generation_can_be_stopped(tmp_path):
    with stub_fleet(tmp_path, ["a"]) as (fleet, engines), ThreadPoolExecutor(1) as pool:
        engines["a"].delay_s = 60
        asked = pool.submit(fleet.generate, [request(1)])
        time.sleep(0.1)
        fleet.stop()
        with pytest.raises(EngineError, match="stopped"):
            asked.result(10)


def test_engines_of_another_run_are_left_alone(tmp_path):
    registry = Registry(tmp_path)
    engine = StubEngine("a", registry)
    engine.start()
    fleet = Fleet(registry, CONFIG, api_key="another key")
    fleet.wait_ready(20)  # the stub says to all who ask that it is there
    fleet.send([], iter([]), 1)
    assert fleet.current() == [] and "answered 401" in str(fleet.last_loss)
    fleet.close()
    engine.die()


def test_the_registry_shows_whole_entries_only(tmp_path):
    registry = Registry(tmp_path / "engines", logs=tmp_path)
    first = Entry(name="r-0.0", address="http://10.0.0.1:1", incarnation="x", node="n1", pid=3)
    second = Entry(name="r-0.0", address="http://10.0.0.1:1", incarnation="y", node="n1", pid=4)
    assert registry.entries() == []
    registry.publish(first)
    registry.publish(second)
    (tmp_path / "engines" / "half.json").write_text('{"name": "ha')
    (tmp_path / "engines" / "other.json").write_text('{"something": "else"}')
    assert registry.entries() == [second]
    registry.withdraw(first)  # it was replaced already
    assert registry.entries() == [second]
    registry.condemn(first, "slow")
    assert (registry.condemned(first), registry.condemned(second)) == ("slow", None)
    registry.withdraw(second)
    assert registry.entries() == []
    assert registry.log_of(second) == EngineLog(tmp_path / "engine-r-0.0.log", keeper=4)
