"""Which nodes tasks get, with spares and after losses."""

import json

import pytest
from credit_launch.files import AttemptFiles
from credit_launch.plan import ROLLOUT
from credit_launch.topology import Node, service_variables, split_nodes
from launch.example_plans import PLANS


def nodes(*numbers):
    return [Node(f"n{number}", f"10.0.0.{number}", number) for number in numbers]


def names(task):
    return [node.name for node in task.nodes]


def test_nodes_are_dealt_in_the_order_of_the_roles_and_the_rest_are_spares():
    found = split_nodes(PLANS["large_with_spares"], nodes(*range(64)))
    assert names(found.tasks["trainer"]) == [f"n{number}" for number in range(32)]
    assert [names(found.tasks[f"rollout-{k}"]) for k in (0, 27)] == [["n32"], ["n59"]]
    assert [names(found.tasks[f"judge-{k}"]) for k in (0, 1)] == [["n60"], ["n61"]]
    assert [node.name for node in found.spares] == ["n62", "n63"]


def test_a_bad_node_is_made_up_for_by_a_spare():
    good = [node for node in nodes(*range(64)) if node.name not in ("n0", "n40")]
    found = split_nodes(PLANS["large_with_spares"], good)
    assert names(found.tasks["trainer"])[0] == "n1"
    assert names(found.tasks["judge-1"]) == ["n63"]
    assert found.spares == []
    with pytest.raises(ValueError, match="61 usable nodes, but the tasks need 62"):
        split_nodes(PLANS["large_with_spares"], good[1:])


def test_engines_beside_the_trainer_have_its_node():
    found = split_nodes(PLANS["cpu_one_node"], nodes(4))
    assert names(found.tasks["trainer"]) == names(found.tasks["rollout-0"]) == ["n4"]


def test_jobs_of_the_array_have_one_task_each():
    plan = PLANS["rollout_jobs"]
    assert list(split_nodes(plan, nodes(1, 2, 3, 4)).tasks) == ["trainer"]
    apart = split_nodes(plan, nodes(9), part=ROLLOUT, array_task="5")
    assert {name: names(task) for name, task in apart.tasks.items()} == {"rollout-5": ["n9"]}


def test_a_lost_node_is_replaced_by_a_living_spare():
    found = split_nodes(PLANS["large_with_spares"], nodes(*range(64)))
    alive = {f"n{number}" for number in range(64)} - {"n33", "n62"}
    moved = found.replace_lost(found.tasks["rollout-1"], alive)
    assert [node.name for node in moved] == ["n63"]
    assert found.replace_lost(found.tasks["rollout-1"], alive) is None
    assert found.replace_lost(found.tasks["rollout-2"], alive) == found.tasks["rollout-2"].nodes


def test_the_published_topology(tmp_path):
    plan = PLANS["large_with_spares"]
    found = split_nodes(plan, nodes(*range(64)))
    found.port = 10016
    for task in found.tasks.values():
        task.port = 10030 if task.role.serves else 0
    attempt = AttemptFiles(tmp_path / "attempt-002")
    attempt.root.mkdir()
    found.publish(plan, attempt, job="17", engines=attempt.engines)
    record = json.loads(attempt.topology.read_text())
    assert record["tasks"]["judge-1"] == {
        "role": "judge",
        "nodes": [{"name": "n61", "address": "10.0.0.61"}],
        "port": 10030,
    }
    assert record["tasks"]["rollout-3"]["nodes"] == [{"name": "n35", "address": "10.0.0.35"}]
    assert (record["attempt"], record["job"], record["local"]) == (2, "17", False)
    assert record["port"] == 10016
    assert record["engines"] == str(tmp_path / "attempt-002" / "engines")
    assert service_variables(found) == {"CREDIT_SERVICE_JUDGE": "http://10.0.0.60:10030"}
