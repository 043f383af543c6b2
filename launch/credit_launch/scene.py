"""What belongs to one attempt of a supervisor."""

from __future__ import annotations

from dataclasses import dataclass

from credit_launch.cluster import Cluster
from credit_launch.files import AttemptFiles, LaunchFiles
from credit_launch.journal import Journal
from credit_launch.lease import Heartbeat
from credit_launch.plan import Plan
from credit_launch.requests import Requests


class Superseded(Exception):
    """A later attempt has taken over while this supervisor was cut off from the cluster."""


@dataclass(frozen=True)
class Scene:
    """The plan, where it runs, and what was asked for meanwhile."""

    plan: Plan
    cluster: Cluster
    requests: Requests
    journal: Journal
    run: LaunchFiles
    attempt: AttemptFiles
    heartbeat: Heartbeat
    secrets: dict[str, str]
    """Variables of all tasks that no file of the run may show."""
    part: str = ""
    """The role whose array of jobs this job belongs to; empty: the main job."""

    @property
    def needed_nodes(self) -> int:
        """Nodes without which no attempt is made."""
        spare = 0 if self.part else self.plan.spare_nodes
        return self.plan.job_nodes(self.part) - spare

    def look_up(self) -> None:
        """What is due now and then while something is waited for. Raises Superseded."""
        if not self.run.is_current(self.attempt):
            raise Superseded(f"a later attempt than {self.attempt.number} has taken over")
        for name in self.requests.news:
            self.journal.say("got", name)
        self.requests.news.clear()
        if self.plan.hot_spares:
            self.heartbeat.beat()
