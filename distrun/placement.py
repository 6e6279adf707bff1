"""Which task runs on which host: launch.py's rule, servers first, then workers, cycling the hosts. Pure.

Source: dmlc-core tracker/ssh.py, `for i in range(S + W): host = hosts[i % len(hosts)]`. The local backend cycles its
one host in the same way (launch.py's own local mode had no hosts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distrun.errors import UsageError
from distrun_runtime.contract.plan import SCHEDULER, SERVER, WORKER


@dataclass(frozen=True)
class Slot:
    """One place for one task."""

    role: str
    rank: int
    """Index in the role, from 0."""
    host: str
    local_rank: int
    """Index among the tasks of the role on this host."""
    local_size: int
    """Number of tasks of the role on this host."""

    @property
    def name(self) -> str:
        """The task's name: role and rank; `scheduler`, of which there is one."""
        return self.role if self.role == SCHEDULER else "%s-%d" % (self.role, self.rank)


def place(
    workers: int, servers: int, hosts: Sequence[str], scheduler: bool = True, scheduler_host: str = ""
) -> tuple[Slot, ...]:
    """Return the slots of a job: the scheduler (if any), the servers, the workers, each role by rank. Pure.

    Arguments:
        workers, servers: how many of each; not negative.
        hosts: names in file order; a host that stands twice takes two turns.
        scheduler: whether there is one; it runs on `scheduler_host`, or on the first host.

    Raises:
        UsageError: no hosts, or a scheduler host that is not among them.
    """
    if not hosts:
        raise UsageError("there is no host to run on", "name some with -H FILE or --hosts A,B")
    if scheduler_host and scheduler_host not in hosts:
        raise UsageError(
            "--scheduler-host: %r is none of the job's hosts: %s" % (scheduler_host, ", ".join(dict.fromkeys(hosts)))
        )
    wanted = [(SERVER, rank) for rank in range(servers)] + [(WORKER, rank) for rank in range(workers)]
    places = [(role, rank, hosts[index % len(hosts)]) for index, (role, rank) in enumerate(wanted)]
    if scheduler:
        places.insert(0, (SCHEDULER, 0, scheduler_host or hosts[0]))
    return _slots(places)


def _slots(places: Sequence[tuple[str, int, str]]) -> tuple[Slot, ...]:
    sizes: dict[tuple[str, str], int] = {}
    local_ranks = []
    for role, _, host in places:
        local_ranks.append(sizes.get((role, host), 0))
        sizes[role, host] = local_ranks[-1] + 1
    return tuple(
        Slot(role, rank, host, local_rank, sizes[role, host])
        for (role, rank, host), local_rank in zip(places, local_ranks, strict=True)
    )


def hosts_of(slots: Sequence[Slot], order: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts that have a task, each once, in the order of `order`. Pure."""
    used = {slot.host for slot in slots}
    return tuple(name for name in dict.fromkeys(order) if name in used)


def worker_hosts(slots: Sequence[Slot]) -> tuple[str, ...]:
    """Return the hosts that have workers, the host of worker 0 first, as torch numbers its groups. Pure."""
    return tuple(dict.fromkeys(slot.host for slot in slots if slot.role == WORKER))
