"""The files of a lab: what slurmctld, slurmd and a node's shell read."""

import shlex
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GPUS_PER_NODE = 8
CPUS_PER_NODE = 64

COMMON = """
SlurmUser=root
SlurmdUser=root
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
EnforcePartLimits=ALL
"""

# cred_expire is how long a requeued job waits, 120 s where nothing is said. A lost node is noticed
# after about 10 s (SlurmdTimeout and TCPTimeout), on sites after 5 minutes.
LAB = """ClusterName=lab
SlurmctldHost={controller}({network}.1)
SlurmctldPort={port}
SlurmdPort={node_port}
AuthInfo=socket={directory}/munge.socket,cred_expire=5
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd-%n.log
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=5
MessageTimeout=5
TCPTimeout=1
KillWait=5
MinJobAge=86400
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=DEFAULT CPUs={cpus} Boards=1 SocketsPerBoard=2 CoresPerSocket={cores} \
ThreadsPerCore=1 RealMemory=16000 Gres=gpu:h100:{gpus}
NodeName=n[1-{nodes}] NodeAddr={network}.[11-{last}]
PartitionName=batch Nodes=ALL Default=YES MaxTime=7-0 DefaultTime=10
PartitionName=low Nodes=ALL MaxTime=7-0 DefaultTime=10 PriorityTier=0 PreemptMode=REQUEUE \
GraceTime=20
PartitionName=high Nodes=ALL MaxTime=7-0 DefaultTime=10 PriorityTier=9
"""

# Only State=CLOUD nodes count as available though no slurmd ever answers; PrivateData shows them.
BIG = """ClusterName=big
SlurmctldHost={controller}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={node_port}
AuthInfo=socket={directory}/munge.socket
SlurmctldPidFile={directory}/big.pid
StateSaveLocation={directory}/big-state
SlurmdSpoolDir={directory}/big-spool
SlurmctldLogFile={directory}/log/big.log
SelectTypeParameters=CR_Core_Memory
SlurmdTimeout=0
TreeWidth=65533
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=60
PrivateData=cloud
NodeName=gpu[0001-2048] CPUs=192 Boards=1 SocketsPerBoard=2 CoresPerSocket=96 \
ThreadsPerCore=1 RealMemory=2000000 Gres=gpu:h100:8 State=CLOUD NodeAddr=127.0.0.1
NodeName=cpu[001-256] CPUs=128 Boards=1 SocketsPerBoard=2 CoresPerSocket=64 \
ThreadsPerCore=1 RealMemory=1000000 State=CLOUD NodeAddr=127.0.0.1
PartitionName=gpu Nodes=gpu[0001-2048] Default=YES MaxTime=7-0 State=UP
PartitionName=cpu Nodes=cpu[001-256] MaxTime=7-0 State=UP
"""

# This shell is the node's init: it reaps orphans, and when it dies the kernel ends all that ran on
# the node. The hosts file is the node's own, so that the machine's stays as it is.
NODE = """
set -e
{mounts}
read -r address
mount --bind {directory}/hosts /etc/hosts
hostname "$0"
ip link set lo up
ip address add "$address/24" dev eth0
ip link set eth0 up
export SLURM_CONF={directory}/slurm.conf
slurmd -D -N "$0" < /dev/null &
wait $!
"""

# Where the lab's user types commands: the machine itself, but for what the user may see of it.
LOGIN = """
set -e
{mounts}
echo ready
read -r end
"""


@dataclass(frozen=True)
class Site:
    """Where one lab lives on this machine; labs of other slots share nothing with it."""

    slot: int
    """Number of the lab on this machine."""
    num_nodes: int
    """Nodes n1, n2, .. of it."""

    @property
    def directory(self) -> Path:
        """Its configuration, sockets, states and logs."""
        return Path(f"/run/megatron-credit-lab-{self.slot}")

    @property
    def network(self) -> str:
        """First three numbers of its addresses; .1 is the controller, .10+i node i."""
        return f"10.213.{self.slot}"

    @property
    def bridge(self) -> str:
        """The interface that the nodes' cables lead to."""
        return f"mclab{self.slot}"

    @property
    def user(self) -> str:
        """Name of the ordinary user who runs jobs."""
        return f"mclab{self.slot}"

    @property
    def home(self) -> Path:
        """The user's home, where run directories go too; the nodes share it."""
        return Path("/home") / self.user

    @property
    def port(self) -> int:
        """First of its four ports, none of them Slurm's own (6817 ..)."""
        return 16810 + 10 * self.slot

    def address(self, node: str) -> str:
        """The address of a node."""
        return f"{self.network}.{10 + int(node[1:])}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return tuple(f"n{k + 1}" for k in range(self.num_nodes))


def slurm_conf(site: Site, controller: str) -> str:
    """slurm.conf of the lab whose controller runs on the host of this name."""
    return COMMON + LAB.format(
        controller=controller,
        network=site.network,
        directory=site.directory,
        port=site.port,
        node_port=site.port + 1,
        cpus=CPUS_PER_NODE,
        cores=CPUS_PER_NODE // 2,
        gpus=GPUS_PER_NODE,
        nodes=site.num_nodes,
        last=10 + site.num_nodes,
    )


def big_conf(site: Site, controller: str) -> str:
    """slurm.conf of 2048 GPU nodes and 256 others that never answer, for `sbatch --test-only`."""
    return COMMON + BIG.format(
        controller=controller, directory=site.directory, port=site.port + 2, node_port=site.port + 3
    )


def gres_conf(site: Site) -> str:
    """gres.conf: which device files are GPUs."""
    return f"Name=gpu Type=h100 File={site.directory}/gpu/gpu[0-{GPUS_PER_NODE - 1}]\n"


def hosts_file(site: Site) -> str:
    """/etc/hosts of each node."""
    lines = [f"{site.address(node)} {node}" for node in site.nodes]
    return "\n".join(["127.0.0.1 localhost", *lines, ""])


def node_script(site: Site) -> str:
    """What a node's init runs; its name is $0, its address comes on stdin."""
    return NODE.format(directory=site.directory, mounts=mounts(site))


def login_script(site: Site) -> str:
    """What holds the login node's view of the files until its stdin ends."""
    return LOGIN.format(mounts=mounts(site))


def mounts(site: Site) -> str:
    """Shell lines that let anybody reach the checkout and the interpreter in a mount namespace:
    a closed directory above them, such as root's home, gets an open one in its place."""
    closed: dict[Path, list[Path]] = {}
    for path in {ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}:
        for above in reversed(path.parents):
            if not above.stat().st_mode & stat.S_IXOTH:
                closed.setdefault(above, []).append(path)
                break
    lines = []
    for above, paths in closed.items():
        for number, path in enumerate(paths):
            held = shlex.quote(f"{site.directory}/seen{number}")
            lines += [f"mkdir -p {held}", f"mount --bind {shlex.quote(str(path))} {held}"]
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(above))}")
        for number, path in enumerate(paths):
            shown = shlex.quote(str(path))
            lines += [f"mkdir -p {shown}", f"mount --move {site.directory}/seen{number} {shown}"]
    return "\n".join(lines)
