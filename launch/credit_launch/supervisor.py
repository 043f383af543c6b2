"""One supervisor a job: it makes an attempt, and knows what follows from how it ended."""

from __future__ import annotations

import json
import time
from pathlib import Path

from credit_launch.attempt import run_attempt
from credit_launch.cluster import Cluster
from credit_launch.endings import FAILED, Ending, Outcome, decide, history_of, record_end
from credit_launch.files import LaunchFiles, publish, read_json
from credit_launch.journal import Journal
from credit_launch.lease import Heartbeat
from credit_launch.plan import Plan
from credit_launch.private import read_key, read_secrets
from credit_launch.requests import Requests
from credit_launch.scene import Scene, Superseded

REQUEUE_WAIT_S = 180.0
"""How long Slurm may take to end a job that it queues again."""


class Supervisor:
    """Of the main job, of one job of the rollout array, or of a run on this machine."""

    def __init__(
        self,
        plan: Plan,
        files: LaunchFiles,
        cluster: Cluster,
        requests: Requests,
        journal: Journal,
        *,
        part: str = "",
    ) -> None:
        self._plan = plan
        self._files = files
        self._cluster = cluster
        self._requests = requests
        self._journal = journal
        self._part = part

    def run(self) -> Ending:
        """Attempts until none follows here."""
        earlier = self._files.attempts()
        self._journal.attempt = earlier[-1].number if earlier else 0
        if self._files.done.exists():
            return self._say(Ending("done", "it was done before", 0))
        if self._files.stop.exists():
            return self._say(Ending("stopped", "asked by the user", 0))
        try:
            secrets = self._read_secrets()
        except ValueError as error:
            return self._say(Ending("gave-up", str(error), FAILED))
        while True:
            try:
                outcome, ending = self._attempt(secrets)
            except Superseded as error:
                return self._give_way(str(error))
            if not ending.again:
                self._clean_up(ending)
                return ending
            if self._cluster.job is not None:
                return self._queue_again(outcome, ending)
            self._requests.warned = False  # it was about the attempt that ended

    def _attempt(self, secrets: dict[str, str]) -> tuple[Outcome, Ending]:
        files = self._files.claim()
        self._journal.attempt = files.number
        before = self._files.read_progress()
        scene = Scene(
            plan=self._plan,
            cluster=self._cluster,
            requests=self._requests,
            journal=self._journal,
            run=self._files,
            attempt=files,
            heartbeat=Heartbeat(files),
            secrets=secrets,
            part=self._part,
        )
        outcome = run_attempt(scene)
        after = self._files.read_progress()
        history = history_of(
            self._files, outcome, first=self._plan.first_attempt, before=before, after=after
        )
        ending = decide(outcome, history, self._plan.limits)
        record_end(files, outcome, ending, before=before, after=after)
        return outcome, self._say(ending)

    def _give_way(self, why: str) -> Ending:
        """Says and does nothing more that Slurm could take for the later attempt's; it ends what is
        left here when it reaches this node again."""
        self._journal.say(why)
        time.sleep(REQUEUE_WAIT_S)
        return Ending("superseded", why, FAILED)

    def _queue_again(self, outcome: Outcome, ending: Ending) -> Ending:
        """Hands the job back to Slurm, which ends us."""
        if outcome.bad_nodes:
            bad = sorted({*self._files.read_bad_nodes(), *outcome.bad_nodes})
            publish(self._files.bad_nodes, "\n".join(bad) + "\n")
            return self._send_successor(bad, ending)
        why = self._cluster.requeue()
        if why:
            return self._say(Ending("gave-up", f"it cannot be queued again: {why}", FAILED))
        # Slurm ends this process; an end of its own would complete the job.
        time.sleep(REQUEUE_WAIT_S)
        return Ending(ending.state, ending.why, FAILED)

    def _send_successor(self, bad: list[str], ending: Ending) -> Ending:
        files = self._files
        exclude = sorted({*self._plan.slurm.exclude, *bad})
        script = files.rollout_script if self._part else files.script
        try:
            job = self._cluster.submit_successor(script, exclude)
        except RuntimeError as error:
            return self._say(Ending("gave-up", f"no successor: {error}", FAILED))
        if self._part:
            publish(files.successor, f"{job}\n")
        else:
            record = {**read_json(files.job), "job": job, "submitted": time.time()}
            publish(files.job, json.dumps(record) + "\n")
        self._journal.state("requeued", {"next": job, "exclude": exclude}, why=ending.why)
        return Ending("requeued", ending.why, 0)

    def _clean_up(self, ending: Ending) -> None:
        """The rollout jobs end with the run, not with an attempt of it."""
        if not self._part and ending.state in ("done", "stopped", "gave-up"):
            for job in self._files.rollout_jobs():
                self._cluster.cancel(job)

    def _read_secrets(self) -> dict[str, str]:
        plan = self._plan
        found = read_secrets(Path(plan.secrets)) if plan.secrets else {}
        if plan.key_file:
            found[plan.key_variable] = read_key(Path(plan.key_file))
        return found

    def _say(self, ending: Ending) -> Ending:
        self._journal.state(ending.state, why=ending.why)
        return ending
