"""Places tasks on hosts by one of three policies. No side effects.

Where workers of one host add what they push, hosts with several of them and without a server get one for it (`relays`).

`cycle` is launch.py's rule: servers first, then workers, cycling the lines of the hosts file, whatever their slots.
Source: dmlc-core tracker/ssh.py, `for i in range(S + W): host = hosts[i % len(hosts)]`. The local backend cycles its
one host in the same way (launch.py's own local mode had no hosts). `pack` and `spread` respect slots.

A host with `role=` takes only tasks of that role. In every policy the scheduler takes no slot.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from distrun.errors import UsageError
from distrun.formats import grouped
from distrun.hosts import HostSpec, Inventory
from distrun.options import BY_KEY
from distrun.request import JobRequest
from distrun_runtime.contract import facts
from distrun_runtime.contract.plan import SCHEDULER, SERVER, WORKER

CYCLE, PACK, SPREAD = BY_KEY["placement"].choices
SHOWN = 16
"""Hosts that are named in an error, at most."""


class Slot(NamedTuple):
    """Where one task runs."""

    role: str
    rank: int
    """Index in the role, from 0."""
    host: str
    local_rank: int
    """Index among the tasks of the role in this place."""
    local_size: int
    """Number of tasks of the role in this place."""
    at: str = ""
    """`Place.name`; empty: the host has one place, of its own name."""

    @property
    def name(self) -> str:
        """The task's name: role and rank; `scheduler`, of which there is one."""
        return facts.task_name(self.role, self.rank)

    @property
    def place(self) -> str:
        """The name of its place."""
        return self.at or self.host


def place(request: JobRequest, hosts: Inventory) -> tuple[Slot, ...]:
    """Return the slots of a job: the scheduler (if any), the servers, the workers, each role by rank. No side effects.

    The request says

    * `placement`, the policy. `cycle`: one task a line, again and again, servers first; slots do not count. A turn goes
      to the next line whose host takes the role; without any `role=` this is launch.py's rule. `pack`: a host's slots
      are filled before the next one's, servers first. `spread`: one task a host, again and again, as slots allow. In
      both, a role uses the hosts that are its own before those that take any.
    * `scheduler_host`: where the scheduler runs, else on the first host with `role=scheduler`, else on the first host.
    * `oversubscribe`: with `pack` and `spread`, hosts take turns again when all slots are filled, up to `max_slots`.
    * `adds_on_hosts`: each host that gets several workers and no server, while others have servers, gets one more
      server, ranked behind the others, that keeps no values: it adds what the host's workers push. It takes no slot.
    * `gpus_per_worker`: how many GPUs each worker has to itself, for hosts whose slots follow from their GPUs.

    A host that stands twice in the order of `hosts` takes two turns of `cycle`.

    Raises:
        UsageError: no hosts, none that takes a role, too few slots (E115), a scheduler host that is not among them.
    """
    if not hosts.specs:
        raise UsageError("there is no host to run on", "name some with -H FILE or --hosts A,B")
    named = request.scheduler_host
    if named and named not in hosts.names:
        raise UsageError(f"--scheduler-host: {named!r} is none of the job's hosts: {', '.join(hosts.names)}")
    counts = {SERVER: request.servers, WORKER: request.workers}
    for role, count in counts.items():
        if count and not any(takes(spec, role) for spec in hosts.specs):
            raise UsageError(f"no host takes a {role}: all have another role", f"leave role= out, or write role={role}")
    if request.placement == CYCLE:
        turns = itertools.cycle(hosts.order)
        chosen: dict[str, list[str]] = {SERVER: [], WORKER: []}
        for role, count in counts.items():
            while len(chosen[role]) < count:
                name = next(turns)
                if takes(hosts.spec(name), role):
                    chosen[role].append(name)
    else:
        free = _FreeSlots(hosts.specs, sum(counts.values()), request.oversubscribe, request.gpus_per_worker)
        _check_fits(counts, free)
        chosen = _by_slots(counts, free, _pack if request.placement == PACK else _spread)
    if request.adds_on_hosts:
        chosen[SERVER] += _without_server(chosen, hosts)
    tasks = []
    if request.has_servers:
        own = (spec.name for spec in hosts.specs if spec.role == SCHEDULER)
        tasks.append((SCHEDULER, 0, named or next(own, hosts.order[0]), ""))
    for role, names in chosen.items():
        for rank, host in enumerate(names):
            tasks.append((role, rank, host, ""))
    return slots_in(tasks)


def takes(spec: HostSpec, role: str) -> bool:
    """Return whether a host takes tasks of that role. No side effects."""
    return spec.role in ("", role)


def capacity(spec: HostSpec, gpus_per_worker: int = 0) -> int:
    """Return how many tasks fit on a host: its slots, else as many as its GPUs are enough for, else one."""
    return spec.slots or (spec.gpu_count or 0) // max(1, gpus_per_worker) or 1


def notes(hosts: Inventory, policy: str, gpus_per_worker: int = 0) -> tuple[str, ...]:
    """Return what the user is to be told: which hosts say nothing of slots, and how many they are taken to have.

    Nothing for `cycle`, which does not look at slots.
    """
    from distrun.hosts.ranges import fold

    if policy == CYCLE:
        return ()
    guessed = grouped((capacity(spec, gpus_per_worker), spec.name) for spec in hosts.specs if spec.slots is None)
    return tuple(
        f"--placement {policy}: no slots= for {fold(names)}: taken as {count}{' each' if names[1:] else ''}"
        for count, names in guessed.items()
    )


def _without_server(chosen: Mapping[str, Sequence[str]], hosts: Inventory) -> list[str]:
    """Return the hosts with several workers and no server that take one."""
    several = [name for name in dict.fromkeys(chosen[WORKER]) if chosen[WORKER].count(name) > 1]
    return [name for name in several if name not in chosen[SERVER] and takes(hosts.spec(name), SERVER)]


def _by_slots(counts: Mapping[str, int], free: _FreeSlots, fill: _Fill) -> dict[str, list[str]]:
    """Return each role's hosts. There are enough slots. A role's own hosts come first, then those that take any."""
    chosen: dict[str, list[str]] = {role: [] for role in counts}
    for role, count in counts.items():
        found = chosen[role]
        # What later roles must find on the hosts that take any role.
        kept = sum(max(0, counts[other] - free.limit(other)) for other in counts if not chosen[other] and other != role)
        while len(found) < count:
            before = len(found)
            for group in (role, ""):
                most = count - len(found)
                if not group:
                    most = min(most, free.limit("") - kept)
                for name in itertools.islice(fill(free.of(group), free.left), max(0, most)):
                    found.append(name)
                    free.use(name)
            if len(found) == before:
                free.refill(role)
    return chosen


class _FreeSlots:
    """How many tasks hosts still take: `left` of the present turn, and at most. Hosts take turns if oversubscribed."""

    def __init__(self, specs: Sequence[HostSpec], wanted: int, oversubscribe: bool, gpus_per_worker: int) -> None:
        self.specs = [spec for spec in specs if spec.role != SCHEDULER]
        self._turn = {spec.name: capacity(spec, gpus_per_worker) for spec in self.specs}
        self.left = dict(self._turn)
        self.limits = {
            spec.name: (spec.max_slots or wanted) if oversubscribe else self._turn[spec.name] for spec in self.specs
        }
        if oversubscribe:
            self.left = {name: min(left, self.limits[name]) for name, left in self.left.items()}

    def of(self, role: str) -> list[str]:
        """Return the hosts with this `role=`."""
        return [spec.name for spec in self.specs if spec.role == role]

    def limit(self, role: str) -> int:
        """Return how many tasks the hosts with this `role=` take at most."""
        return sum(self.limits[name] for name in self.of(role))

    def use(self, name: str) -> None:
        self.left[name] -= 1
        self.limits[name] -= 1

    def refill(self, role: str) -> None:
        """Begin another turn for the hosts that take a role."""
        for spec in self.specs:
            if takes(spec, role):
                self.left[spec.name] = min(self._turn[spec.name], self.limits[spec.name])


_Fill = Callable[[Sequence[str], Mapping[str, int]], Iterator[str]]
"""Gives host after host while what is left of their slots, which the caller counts down, allows."""


def _pack(group: Sequence[str], left: Mapping[str, int]) -> Iterator[str]:
    for name in group:
        while left[name] > 0:
            yield name


def _spread(group: Sequence[str], left: Mapping[str, int]) -> Iterator[str]:
    while any(left[name] > 0 for name in group):
        for name in group:
            if left[name] > 0:
                yield name


def _check_fits(counts: Mapping[str, int], free: _FreeSlots) -> None:
    """Refuse a job that does not fit, with the arithmetic."""
    over = sum(max(0, count - free.limit(role)) for role, count in counts.items())
    if over <= free.limit(""):
        return
    usable = free.limit("") + sum(min(count, free.limit(role)) for role, count in counts.items())
    offers = [
        f"{spec.name}:{free.limits[spec.name]}{(f' for a {spec.role}' if spec.role else '')}" for spec in free.specs
    ]
    if len(offers) > SHOWN:
        offers[SHOWN:] = [f"... {len(offers) - SHOWN} more"]
    restricted = any(spec.role for spec in free.specs)
    raise UsageError(
        f"E115: {' + '.join(f'{counts[role]} {role}' for role in (WORKER, SERVER) if counts[role])} processes need"
        f" {sum(counts.values())} slots, hosts offer {usable}{' that these roles can use' if restricted else ''}"
        f" ({(', ' if restricted else ' ').join(offers)}). Add hosts, lower -n/-s, or pass --oversubscribe"
    )


def slots_in(tasks: Sequence[tuple[str, int, str, str]]) -> tuple[Slot, ...]:
    """Return the slots of tasks whose places are known: role, rank, host, place (empty: the host's own).

    Local ranks count within a place: its tasks share what the place may use of its node, such as the GPUs.
    """
    sizes: Counter[tuple[str, str]] = Counter()
    slots = []
    for role, rank, host, place in tasks:
        slots.append(Slot(role, rank, host, sizes[role, place or host], 0, place))
        sizes[role, place or host] += 1
    return tuple(slot._replace(local_size=sizes[slot.role, slot.place]) for slot in slots)


def hosts_of(slots: Sequence[Slot], order: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts that have a task, each once, in the order of `order`. No side effects."""
    used = {slot.host for slot in slots}
    return tuple(name for name in dict.fromkeys(order) if name in used)
