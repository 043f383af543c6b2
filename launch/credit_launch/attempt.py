"""One attempt: the nodes are checked, the tasks started and watched until the trainer ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

from credit_launch import preflight
from credit_launch.cluster import Running, Step
from credit_launch.crew import POLL_S, Crew
from credit_launch.endings import Outcome, num_bad_nodes_before
from credit_launch.failures import end_of_log
from credit_launch.scene import Scene, Superseded
from credit_launch.topology import Node, split_nodes
from credit_launch.watch import Watch

MAX_LONE_NODES = 3
"""A job of one node tries so many before it takes the fault for its own."""
ANSWERS_S = 10.0
"""Beyond the time limit of the checks: until a step has started, and its answers are seen."""


def run_attempt(scene: Scene) -> Outcome:
    """How it ended; nothing of it runs any more, but for what Slurm ends with the job."""
    nodes = scene.cluster.nodes()
    scene.journal.state("starting", {"nodes": [node.name for node in nodes]})
    scene.look_up()
    verdict = check_nodes(scene, nodes)
    if scene.requests.anything:
        return asked_before_start(scene)
    if verdict.bad:
        scene.journal.say("checks failed:", preflight.describe(verdict))
    if len(verdict.good) < scene.needed_nodes:
        return too_few(scene, verdict)
    return start_and_watch(scene, verdict.good)


def start_and_watch(scene: Scene, nodes: Sequence[Node]) -> Outcome:
    """How it ended, with all tasks ended."""
    plan, cluster = scene.plan, scene.cluster
    topology = split_nodes(plan, nodes, part=scene.part, array_task=cluster.array_task)
    topology.port = cluster.first_port(plan.base_port)
    crew = Crew(scene, topology)
    lease = start_lease(scene, nodes)
    outcome = None
    try:
        crew.start_all()
        tasks = {name: [node.name for node in task.nodes] for name, task in topology.tasks.items()}
        scene.journal.state("running", {"tasks": tasks, "port": topology.port})
        outcome = Watch(scene, crew).until_end()
        return outcome
    except Superseded:
        crew.abandon_all()
        if lease is not None:
            lease.abandon()
            lease = None
        raise
    finally:
        if outcome is None or not must_hurry(scene, outcome):
            crew.end_all()
            if lease is not None:
                lease.kill()


def must_hurry(scene: Scene, outcome: Outcome) -> bool:
    """Whether the job has to be queued again before its time is over; that ends its steps too."""
    return scene.cluster.job is not None and outcome.was_warned and not outcome.was_stopped


def start_lease(scene: Scene, nodes: Sequence[Node]) -> Running | None:
    """With hot spares, a step that queues the job again when this supervisor falls silent."""
    job, limits = scene.cluster.job, scene.plan.limits
    if not scene.plan.hot_spares or job is None:
        return None
    heartbeat = str(scene.attempt.heartbeat)
    command = [scene.plan.python, str(scene.run.package), "watch-lease"]
    step = Step(
        name="lease",
        nodes=nodes,
        command=[*command, heartbeat, str(limits.lease_seconds), job],
        variables={},
        logs=scene.attempt.logs,
        ends_together=False,
        one_log=True,
        outside_container=True,
    )
    return scene.cluster.start(step)


def check_nodes(scene: Scene, nodes: Sequence[Node]) -> preflight.Verdict:
    """What the checks found, on all nodes at once."""
    scene.journal.state("preflight")
    preflight.prepare(scene.attempt)
    running = scene.cluster.start(check_step(scene, nodes))
    deadline = time.monotonic() + scene.plan.limits.preflight_seconds + ANSWERS_S
    while running.poll() is None:
        if time.monotonic() > deadline or scene.requests.anything:
            running.kill()
            return preflight.collect(scene.attempt, nodes)
        scene.look_up()
        time.sleep(POLL_S)
    deadline = time.monotonic() + ANSWERS_S / 2
    while True:
        # A network file system may show an answer later than its writer's end.
        verdict = preflight.collect(scene.attempt, nodes)
        if preflight.SILENT not in verdict.bad.values() or time.monotonic() > deadline:
            return verdict
        scene.look_up()
        time.sleep(POLL_S)


def check_step(scene: Scene, nodes: Sequence[Node]) -> Step:
    """The step that runs the checks."""
    plan, run = scene.plan, scene.run
    return Step(
        name="preflight",
        nodes=nodes,
        command=preflight.command(plan, run.package, run.plan, scene.attempt),
        variables=dict(plan.environment),
        logs=scene.attempt.logs,
        gpus=plan.gpus_per_node,
        cpus=plan.cpus_per_node,
        ends_together=False,
        one_log=True,
    )


def asked_before_start(scene: Scene) -> Outcome:
    """The outcome where the attempt is to end before anything was started."""
    requests = scene.requests
    if requests.terminated:
        return Outcome(was_terminated=True)
    return Outcome(was_stopped=requests.wants_stop, was_warned=True, has_saved=True)


def may_be_the_node(scene: Scene, verdict: preflight.Verdict) -> bool:
    """Whether the only node of a job may be to blame: not where it is the third in a row."""
    if scene.cluster.job is None or len(verdict.bad) > 1:
        return False
    earlier = [attempt for attempt in scene.run.attempts() if attempt.number < scene.attempt.number]
    return num_bad_nodes_before(earlier) + 1 < MAX_LONE_NODES


def too_few(scene: Scene, verdict: preflight.Verdict) -> Outcome:
    """The outcome where too few nodes pass the checks."""
    why = preflight.describe(verdict)
    if verdict.all_refused and not may_be_the_node(scene, verdict):
        return Outcome(reason=f"no node passes the checks: {why}", may_retry=False)
    if not verdict.good and not verdict.all_refused:
        log = end_of_log([scene.attempt.logs / "preflight.log"])
        return Outcome(reason=f"the checks of the nodes did not run: {why}; {log}")
    return Outcome(
        reason=f"too few nodes pass the checks: {why}",
        bad_nodes=tuple(verdict.bad),
        may_retry=scene.cluster.job is not None,
    )
