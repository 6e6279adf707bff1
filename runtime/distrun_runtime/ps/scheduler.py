"""The scheduler's decisions: who is in the job and who died. No side effects.

The scheduler never sees a value. It collects the nodes (`Roster`), passes on what the workers have to agree on
(`agreement`; `Checkpoints` for saved states), and tells all nodes when one is lost or has left. When all workers have
ended, it tells the servers to stop, and ends. A scheduler that an agent started (`Config.stays`) has the servers forget
everything instead and waits for the workers of the job's next script, until the agent stops it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from distrun_runtime.contract.facts import duration
from distrun_runtime.errors import KVError
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import Common, Kind, Message, SharedBody
from distrun_runtime.ps import role
from distrun_runtime.ps.agreement import (
    ALIVE,
    LEFT,
    LOST,
    AgreedStore,
    Answers,
    Call,
    CollectiveCalls,
    Member,
    Queries,
    Rules,
    Then,
    rule_of,
    spec_json,
)
from distrun_runtime.ps.replies import answer, refusal
from distrun_runtime.ps.role import Config, listed, tasks_of
from distrun_runtime.ps.statefile import FORMAT, worker_file, worker_files

REPORT_S = 5.0
"""How often the scheduler says whom it waits for."""
DENIED_KEPT = 4
"""How many reasons for refusing nodes are remembered, for the error at the deadline."""

LOSSES_TOLD = 16
"""So many losses are told to all nodes. The first one fails every call of a store of all workers; as a rule later ones
come of it. Of those that are workers', only the workers that share a group's store with the lost one are told, and the
servers: all they do without it ends."""

FOREIGN = (
    "a program at %s speaks ZeroMQ, but not as a node of distrun does: this looks like ps-lite (MXNet, BytePS), which"
    " runs its own servers and scheduler. fix: distrun launch --ps command ..."
)


# Saving and loading a store's states, when all workers have asked.
#
# Save: every server writes its shards to a file of its own and answers with what is in it; the sum of that is the
# manifest, which rank 0 writes last. Load: the workers are told first what is there (`look`), so that each reads its
# own file before anything changes. Then every server reads and checks what its shards need (`stage`); only when all
# could, the store gets the saved rule if it has none, and the servers put the values in their places (`commit`). The
# formats are in docs/states.md.


class Checkpoints:
    """What is saved and loaded at the moment."""

    def __init__(self, config: Config, queries: Queries, rules: Rules) -> None:
        self._config = config
        self._queries = queries
        self._rules = rules

    def save(self, store: AgreedStore, calls: Mapping[int, Call]) -> list[role.Action]:
        """Have all servers write their files, then tell the workers what they wrote."""
        first = calls[store.members.first].message.body
        part = str(first["part"])
        body = {"folder": first["folder"], "part": part, "names": store.keys.names}

        def written(answers: Answers) -> list[role.Action]:
            if answers.errors:
                store.saving = ("", 0)
                return _refuse(calls, answers)
            manifest = self._manifest(store, part, calls, answers)
            return [role.Send(call.link, answer(call.message, {"manifest": manifest})) for call in calls.values()]

        return self._tell(Kind.SAVE, store, body, written)

    def load(self, store: AgreedStore, calls: Mapping[int, Call]) -> list[role.Action]:
        """Have all servers read what they need, then take it over; tell the workers what they have to know."""
        first = calls[store.members.first].message.body
        manifest = first["manifest"]
        try:
            wrong = self._against(store, manifest)
        except (KVError, LookupError, TypeError, ValueError, AttributeError) as err:
            wrong = f"the manifest is malformed: {type(err).__name__}: {err}"
        if wrong:
            return _refuse(calls, Answers(errors=[wrong]))
        if first.get("look"):
            return self._tell_workers(store, calls, manifest)
        saved = store.keys.saved_as(manifest["keys"])
        body = {
            "action": "stage",
            "folder": first["folder"],
            "manifest": manifest,
            "numbers": saved,
            "spec": spec_json(self._rules.spec(store.number) or rule_of(manifest)),
        }
        return self._tell(Kind.LOAD, store, body, lambda answers: self._staged(store, calls, manifest, answers))

    def _against(self, store: AgreedStore, manifest: Mapping[str, Any]) -> str:
        if manifest.get("format") != FORMAT:
            return f"saved states of format {manifest.get('format')!r}; this version reads {FORMAT}"
        wrong = store.keys.differ_from(manifest, self._rules.spec(store.number))
        if not wrong:
            # All that the workers are told later is read once now: a manifest without it must change nothing.
            self._facts(store, manifest)
        return wrong

    def _staged(
        self, store: AgreedStore, calls: Mapping[int, Call], manifest: Mapping[str, Any], answers: Answers
    ) -> list[role.Action]:
        def ruled(refused: Answers | None) -> list[role.Action]:
            if refused is not None:
                return self._drop(store, calls, refused)
            body = {"action": "commit", "rounds": self._rounds(store, manifest)}
            return self._tell(Kind.LOAD, store, body, committed)

        def committed(answers: Answers) -> list[role.Action]:
            if answers.errors:
                return self._drop(store, calls, answers)
            return self._tell_workers(store, calls, manifest)

        if answers.errors:
            return self._drop(store, calls, answers)
        return self._rules.restore(store.number, rule_of(manifest), ruled)

    def _drop(self, store: AgreedStore, calls: Mapping[int, Call], answers: Answers) -> list[role.Action]:
        return self._tell(Kind.LOAD, store, {"action": "drop"}, lambda _: _refuse(calls, answers))

    def _manifest(self, store: AgreedStore, part: str, calls: Mapping[int, Call], answers: Answers) -> dict[str, Any]:
        rounds: dict[int, int] = {}
        for body in answers.bodies.values():
            for number, done in body["rounds"]:
                rounds[number] = max(rounds.get(number, 0), done)
        return {
            "format": FORMAT,
            "type": store.type,
            "data": part,
            "keys": store.keys.to_json(),
            "rule": self._rules.to_json(store.number),
            "workers": len(store.members.ranks),
            "servers": self._config.servers + self._config.relays,
            "rounds": sorted(rounds.items()),
            "files": {
                **{body["file"]: body["holds"] for body in answers.bodies.values()},
                **{
                    worker_file(rank): {}
                    for rank, worker in enumerate(store.members.ranks)
                    if worker in calls and calls[worker].message.body.get("residuals")
                },
            },
        }

    def _facts(self, store: AgreedStore, manifest: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "part": manifest["data"],
            "workers": manifest["workers"],
            "residuals": worker_files(manifest),
            "numbers": [[number, old] for number, old, _ in store.keys.saved_as(manifest["keys"])],
            "rounds": self._rounds(store, manifest),
            "rule": self._rules.to_json(store.number),
        }

    def _rounds(self, store: AgreedStore, manifest: Mapping[str, Any]) -> list[list[int]]:
        """Return (number, round) of the keys whose rounds go on where the saved ones ended."""
        rounds = {int(old): int(done) for old, done in manifest["rounds"]} if store.is_sync else {}
        return [[number, rounds[old]] for number, old, _ in store.keys.saved_as(manifest["keys"]) if old in rounds]

    def _tell_workers(
        self, store: AgreedStore, calls: Mapping[int, Call], manifest: Mapping[str, Any]
    ) -> list[role.Action]:
        facts = self._facts(store, manifest)
        return [role.Send(call.link, answer(call.message, facts)) for call in calls.values()]

    def _tell(self, kind: Kind, store: AgreedStore, body: Mapping[str, Any], then: Then) -> list[role.Action]:
        return self._queries.send(Message(kind, store=store.number, body=body), then)


def _refuse(calls: Mapping[int, Call], answers: Answers) -> list[role.Action]:
    return [role.Send(call.link, answers.refusal(call.message)) for call in calls.values()]


# Who is in the job


class Roster:
    """The workers and servers of a job.

    What is asked at every message takes the same time however many there are.
    """

    def __init__(self, workers: int, servers: int, relays: int = 0) -> None:
        self._told = {"worker": workers, "server": servers}
        """What every node is told of the job's size."""
        self.expected = {"worker": workers, "server": servers + relays}
        self.members: dict[str, Member] = {}
        self._by_rank: dict[tuple[str, int], Member] = {}
        self._in_order: dict[str, list[Member]] = {}
        """`of_role`, until a member comes, goes or gets a rank."""
        self._counts: Counter[str] = Counter()
        """Members of each role."""
        self._counts_over: Counter[str] = Counter()
        """How many of those are lost or have left."""

    def against(self, peer: NodeIdentity) -> str:
        """Return why `peer` may not join; empty: it may."""
        if peer.role not in self.expected:
            return f"{peer}: this job has its scheduler already"
        theirs = {"worker": peer.workers, "server": peer.servers}
        if theirs != self._told:
            expects = f"{peer} expects {_count(peer.workers, 'worker')} and {_count(peer.servers, 'server')}"
            return f"{expects}; the scheduler was started for {self._told['worker']} and {self._told['server']}"
        count = self.expected[peer.role]
        if peer.rank >= count:
            return f"{peer}: ranks of {peer.role}s go from 0 to {count - 1}"
        taken = self.of_rank(peer.role, peer.rank)
        if taken is not None:
            return f"rank {peer.rank} is taken: {taken.who} registered as {taken.who.name}"
        if self._counts[peer.role] >= count:
            return f"all {count} {peer.role}s have registered: {_names(self.of_role(peer.role))}"
        return ""

    def add(self, link: str, peer: NodeIdentity) -> None:
        """Add a node that `against` said nothing about."""
        self.members[link] = member = Member(link, peer)
        self._counts[peer.role] += 1
        self._in_order.pop(peer.role, None)
        if peer.rank >= 0:
            self._by_rank[peer.role, peer.rank] = member

    def remove(self, link: str) -> None:
        """Remove a node, before the roster is complete."""
        member = self.members.pop(link)
        self._counts[member.who.role] -= 1
        self._in_order.pop(member.who.role, None)
        self._by_rank.pop((member.who.role, member.who.rank), None)
        self._counts_over[member.who.role] -= member.state != ALIVE

    def end(self, member: Member, state: str) -> None:
        """Note that a member that was alive is LOST or LEFT."""
        member.state = state
        self._counts_over[member.who.role] += 1

    @property
    def is_complete(self) -> bool:
        """Whether everybody is here."""
        return all(self._counts[role] == count for role, count in self.expected.items())

    def count(self, role: str) -> int:
        """Return how many members of a role there are."""
        return self._counts[role]

    def count_alive(self, role: str) -> int:
        """Return how many members of a role are neither lost nor have left."""
        return self._counts[role] - self._counts_over[role]

    def of_rank(self, role: str, rank: int) -> Member | None:
        """Return the member that has a rank; None if it is free, or none is given (-1)."""
        return self._by_rank.get((role, rank))

    def of_role(self, role: str) -> list[Member]:
        """Return the members of a role in the order of rank, those without one last."""
        if role not in self._in_order:
            found = [member for member in self.members.values() if member.who.role == role]
            self._in_order[role] = sorted(found, key=lambda member: (member.who.rank < 0, member.who.rank))
        return list(self._in_order[role])

    def alive(self, role: str) -> list[Member]:
        """Return the members of a role that are neither lost nor have left."""
        return [member for member in self.of_role(role) if member.state == ALIVE]

    def assign(self) -> None:
        """Give each node without a rank the lowest that is free, in the order of registration."""
        for kind, count in self.expected.items():
            members = [member for member in self.members.values() if member.who.role == kind]
            free = iter(sorted(set(range(count)) - {member.who.rank for member in members}))
            for member in members:
                if member.who.rank < 0:
                    member.who = replace(member.who, rank=next(free))
                    self._by_rank[kind, member.who.rank] = member
        self._in_order.clear()

    def to_json(self) -> list[dict[str, Any]]:
        """Return all members for a ROSTER message."""
        return [asdict(member.who) for member in self.members.values()]

    def missing(self) -> list[str]:
        """Return the names of the nodes that have not registered; [] while a node has no rank: they are unknown."""
        if any(member.who.rank < 0 for member in self.members.values()):
            return []
        present = {member.who.name for member in self.members.values()}
        every = [f"{role}-{rank}" for role, count in self.expected.items() for rank in range(count)]
        return [name for name in every if name not in present]

    def waiting_text(self) -> str:
        """Return who is missing, for people: `waiting for 1 of 2 workers: have worker-0@d1`."""
        parts = []
        for kind, count in self.expected.items():
            present = self.of_role(kind)
            if len(present) < count:
                have = _names(present) or "none"
                parts.append(f"{count - len(present)} of {count} {kind}s: have {have}")
        return "waiting for " + "; ".join(parts)


def _names(members: Sequence[Member]) -> str:
    return listed([f"{member.who.name}@{member.who.host}" for member in members])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


class Scheduler:
    """The scheduler's decisions."""

    def __init__(self, config: Config, endpoint: str) -> None:
        self.me = config.identity(endpoint)
        self._config = config
        self._counts = f"workers={config.workers} servers={config.servers}"
        self._roster = Roster(config.workers, config.servers, config.relays)
        self._deadline = role.Deadline()
        self._report = role.Deadline()
        self._early: list[tuple[str, NodeIdentity]] = []
        """Workers of the job's next script, which came while others still run the present one."""
        self._is_clearing = False
        self._broken = ""
        """Why the job is ending: the node that was lost first; empty: it is not."""
        self._lost: dict[str, tuple[int | None, str]] = {}
        """Nodes that were lost, by name: the rank if it is a worker, and the reason."""
        self._finished = False
        self._denied: list[str] = []
        """Why others were turned away: the first few reasons."""
        self._foreign = ""
        """What to say of a foreign program of this job's; empty: none was seen."""
        self._foreign_hosts: set[str] = set()
        """Addresses of hosts with workers from which such a program came."""
        self._foreign_deadline = role.Deadline()
        self._has_opened = False
        """All nodes were here once, so a foreign program is none of this job's."""
        self._now = 0.0
        self._queries = Queries(lambda: self._roster.alive("server"))
        self._barriers = 0
        """Of the scripts that are over."""
        self._forget()

    def _forget(self) -> None:
        self._is_open = False
        self._deadline.at = None
        self._queries.forget()
        self._rules = Rules(self._queries)
        checkpoints = Checkpoints(self._config, self._queries, self._rules)
        placed_on = self._config.servers if self._config.partition == "size" else 0
        states = {Kind.SAVE: checkpoints.save, Kind.LOAD: checkpoints.load}
        self._calls = CollectiveCalls(self._config.workers, self._queries, states, placed_on, forget=self._rules.forget)

    def start(self, now: float) -> list[role.Action]:
        """Publish the address for the launcher, and say what is expected."""
        host, _, port = self.me.endpoint.removeprefix("tcp://").rpartition(":")
        self._wait_anew(now)
        self._report.set(now + REPORT_S)
        return [
            role.Publish({"address": host.strip("[]"), "port": port}),
            role.Log("INFO", f"event=listening endpoint={self.me.endpoint} {self._counts}"),
        ]

    def admit(self, peer: NodeIdentity) -> str:
        """Return why `peer` may not join the job."""
        if self._broken:
            return f"the job is ending: {self._broken}"
        if peer.job != self.me.job:
            return f"{peer} belongs to job {peer.job!r}, this is job {self.me.job!r}"
        early = [other for _, other in self._early if other.rank == peer.rank and peer.role == "worker"]
        if early:
            return f"rank {peer.rank} is taken: {early[0]} registered as {early[0].name}, for the next script"
        if self._is_successor(peer):
            return ""
        return self._roster.against(peer)

    def handle(self, event: role.Event, now: float) -> list[role.Action]:
        """Take in one event."""
        self._now = now
        if self._finished:
            return []
        match event:
            case role.Welcomed(link, NodeIdentity() as peer):
                return self._register(link, peer, now)
            case role.Broken(link, reason):
                return self._ended(link, reason)
            case role.Denied():
                return self._note_denied(event, now)
            case role.SignalReceived(number):
                # Servers first: they would take our end for a death.
                name = role.signal_name(number)
                stops = self._stop_servers(0, f"the scheduler was told to end by {name}", self.me.name)
                return [role.Publish({"told": name}), *stops, *self._finish(0, f"signal {number}")]
            case role.MessageReceived(link, message) if link in self._roster.members:
                return self._heard(self._roster.members[link], message)
        return []

    def tick(self, now: float) -> list[role.Action]:
        """Say whom we wait for; give up on the roster at its deadline."""
        if self._is_open and not self._finished:
            return self._calls.remind(now)
        if self._finished:
            return []
        if self._deadline.is_due(now):
            after = duration(self._config.start_timeout_s)
            reason = f"registration ended after {after}, {self._roster.waiting_text()}"
            reason = "; ".join(["; turned away: ".join([reason, *self._denied[:1]]), *self._denied[1:]])
            return self._give_up(reason, next(iter(self._roster.missing()), "job"))
        if self._foreign_deadline.is_due(now) and not self._roster.of_role("worker"):
            waited = f"no worker has opened a store for {duration(self._config.start_timeout_s)}, and "
            return self._give_up(waited + self._foreign, "job")
        if not self._report.is_due(now):
            return []
        self._report.set(now + REPORT_S)
        return [role.Log("WARNING", self._roster.waiting_text())] if self._roster.of_role("worker") else []

    def counters(self) -> dict[str, float]:
        """Return what the agent is told (`metrics`)."""
        members = self._roster.count_alive("worker") + self._roster.count_alive("server")
        barriers = self._barriers + self._calls.barriers
        return {"members": members, "barriers": barriers, "barrier_waiting": self._calls.barrier_waiting()}

    # Who was turned away

    def _note_denied(self, denied: role.Denied, now: float) -> list[role.Action]:
        is_ours = denied.is_foreign and not self._has_opened and self._may_be_ours(denied)
        text = FOREIGN % denied.address if is_ours else denied.reason
        if denied.address and not is_ours:
            text = f"{denied.address}: {text}"
        if text not in self._denied and len(self._denied) < DENIED_KEPT:
            self._denied.append(text)
        if not is_ours:
            return []
        self._foreign_hosts.add(denied.address)
        is_certain = denied.is_same_user or self._foreign_hosts.issuperset(self._config.worker_addresses)
        if self._config.stays and is_certain:
            self._foreign_deadline.set(now + self._config.start_timeout_s)
        if self._foreign:
            return []
        self._foreign = text
        return [role.Log("WARNING", text)]

    def _may_be_ours(self, denied: role.Denied) -> bool:
        """Whether a foreign program can be one of this job's, which it warns of.

        Strangers must not end a job. So it ends only if such a program runs on this host as the same user, which the
        kernel knows, or came from every host with workers: of other hosts only the address is known. A scheduler that
        was started by hand knows no hosts, and ends at its deadline in any case.
        """
        if denied.is_same_user is not None:
            return denied.is_same_user
        return not self._config.stays or denied.address in self._config.worker_addresses

    # Registration

    def _wait_anew(self, now: float) -> None:
        """No node has registered: by when one must.

        Under an agent, none must: a job whose script opens no store is none of the scheduler's business, and the
        clock starts with the first worker. One that was started by hand would wait for ever.
        """
        self._deadline.at = None if self._config.stays else now + self._config.start_timeout_s

    def _is_successor(self, peer: NodeIdentity) -> bool:
        """Whether the worker of that rank has ended its script, so that this is the rank's next one."""
        before = self._roster.of_rank("worker", peer.rank)
        is_over = before is not None and before.state == LEFT
        return self._config.stays and peer.role == "worker" and is_over

    def _register(self, link: str, peer: NodeIdentity, now: float) -> list[role.Action]:
        if self._is_successor(peer):
            self._early.append((link, peer))
            return [role.Log("INFO", f"event=early node={peer.name} pid={peer.pid}")]
        self._roster.add(link, peer)
        actions: list[role.Action] = [_line("registered", peer)]
        if peer.role == "worker" and self._roster.count("worker") == 1:
            self._deadline.at = now + self._config.start_timeout_s
        return [*actions, *self._open_when_complete()]

    def _open_when_complete(self) -> list[role.Action]:
        if self._is_open or self._is_clearing or not self._roster.is_complete:
            return []
        self._roster.assign()
        self._is_open = self._has_opened = True
        self._foreign_deadline.at = None
        servers, workers = self._roster.of_role("server"), self._roster.of_role("worker")
        actions: list[role.Action] = [role.Log("INFO", f"event=complete {self._counts}")]
        actions += [_line("assigned", member.who) for member in [*servers, *workers]]
        common = Common({"nodes": self._roster.to_json(), "host_sums": self._config.host_sums})

        def roster(member: Member) -> Message:
            return Message(Kind.ROSTER, body=SharedBody(common, {"rank": member.who.rank}))

        def tell_workers(_: Answers) -> list[role.Action]:
            return [role.Send(member.link, roster(member)) for member in workers]

        # Each on a connection of its own: a worker that had it before a server would find one that knows none.
        return [*actions, *self._queries.send(roster, tell_workers)]

    # Leaving and dying

    def _ended(self, link: str, reason: str) -> list[role.Action]:
        self._early = [(other, peer) for other, peer in self._early if other != link]
        member = self._roster.members.get(link)
        if member is None or member.state != ALIVE:
            return []
        if not self._is_open and not (self._config.stays and member.who.role == "server"):
            self._roster.remove(link)
            if not self._roster.count("worker"):
                self._wait_anew(self._now)  # the next first worker has the whole time again
            return [role.Log("WARNING", f"{member.who} went away before all had registered: {reason}")]
        return self._lose(member, f"{member.who} is lost: {reason}")

    def _lose(self, member: Member, reason: str) -> list[role.Action]:
        self._roster.end(member, LOST)
        # What is lost after the first is, most likely, its consequence.
        level = "INFO" if self._broken else "ERROR"
        self._broken = self._broken or reason
        self._lost.setdefault(member.who.name, (role.worker_rank(member.who.name), reason))
        body = {"who": member.who.name, "host": member.who.host, "reason": reason}
        # All of them to all would be a million messages for a thousand nodes that end by one error.
        told, ended = list(self._roster.members.values()), list[role.Action]()
        if member.who.role == "worker":
            beside = self._calls.beside(member.who.rank)
            if len(self._lost) > LOSSES_TOLD:
                told = [each for each in told if each.who.role == "server" or each.who.rank in beside]
            ended = self._calls.lose(member.who.rank)
        return [
            role.Log(level, reason),
            role.Publish({"lost_peer": member.who.name, "message": reason}),
            *self._tell(told, Kind.LOST, body),
            *ended,
            *self._finish_when_done(),
        ]

    def _lost_by_other(self, message: Message) -> list[role.Action]:
        """A node has lost its connection to a server, which may live, or may have died or left before."""
        who = str(message.body["who"])
        lost = [server for server in self._roster.alive("server") if server.who.name == who]
        return [action for server in lost for action in self._lose(server, str(message.body["reason"]))]

    def _leave(self, member: Member) -> list[role.Action]:
        self._roster.end(member, LEFT)
        actions: list[role.Action] = [role.Log("INFO", f"event=bye node={member.who.name}")]
        if member.who.role == "worker":
            body = {"rank": member.who.rank, "who": str(member.who)}
            actions += [
                role.Send(server.link, Message(Kind.LEFT, body=body)) for server in self._roster.alive("server")
            ]
            actions += self._calls.ended(member)
        return [*actions, *self._finish_when_done()]

    def _finish_when_done(self) -> list[role.Action]:
        if self._roster.count_alive("worker") or not self._is_open:
            return []
        if self._config.stays:
            # Broken: the agent knows more of who died than we do, and stops us; an exit of ours would only confuse.
            return [] if self._broken else self._begin_anew()
        code, reason = (1, self._broken) if self._broken else (0, "all workers have ended")
        return [*self._stop_servers(code, reason), *self._finish(code, reason)]

    def _stop_servers(self, code: int, reason: str, who: str = "") -> list[role.Action]:
        """Tell the servers to end. `who`: the node that is the reason, where that comes before the job's end."""
        stop = Message(Kind.STOP, body={"code": code, "reason": reason, **({"who": who} if who else {})})
        return [role.Send(server.link, stop) for server in self._roster.alive("server")]

    def _begin_anew(self) -> list[role.Action]:
        for member in self._roster.of_role("worker"):
            self._roster.remove(member.link)
        self._barriers += self._calls.barriers
        self._forget()
        # No worker of the next script hears of the servers before they have forgotten the last one.
        self._is_clearing = True
        told = Message(Kind.STOP, body={"stay": True})
        log = role.Log("INFO", "event=anew reason=all workers have ended their script")
        return [log, *self._queries.send(told, lambda _: self._cleared())]

    def _cleared(self) -> list[role.Action]:
        self._is_clearing = False
        early, self._early = self._early, []
        actions = [action for link, peer in early for action in self._register(link, peer, self._now)]
        # All of them may have come while the servers were still forgetting.
        return [*actions, *self._open_when_complete()]

    def _give_up(self, reason: str, who: str) -> list[role.Action]:
        """Registration failed because of `who`, or of the job as a whole: tell those who are here, and end."""
        facts = {"failed": reason} if who == "job" else {"lost_peer": who, "message": reason}
        lost = {"reason": reason, "who": who}
        return [
            role.Publish(facts),
            *self._tell(self._roster.members.values(), Kind.LOST, lost),
            *self._finish(1, reason),
        ]

    def _finish(self, code: int, reason: str) -> list[role.Action]:
        self._finished = True
        return [role.Finish(code, reason)]

    def _tell(self, members: Iterable[Member], kind: Kind, body: Mapping[str, Any]) -> list[role.Action]:
        return [role.Send(member.link, Message(kind, body=body)) for member in members if member.state == ALIVE]

    # Messages

    def _heard(self, member: Member, message: Message) -> list[role.Action]:
        link, call = member.link, Call(member.who.rank, member.link, message)
        match message.kind:
            case _ if message.is_reply:
                return self._queries.answered(member, message)
            case Kind.BYE:
                return [role.Send(link, answer(message)), *self._leave(member)]
            case Kind.ABORT:
                reason = f"{member.who} failed: {message.body.get('reason', 'no reason given')}"
                return [role.Send(link, answer(message)), *self._lose(member, reason)]
            case Kind.LOST:
                return self._lost_by_other(message)
            case kind if member.who.role != "worker":
                return [role.Log("WARNING", f"{member.who} sent {kind.name}, which only workers send")]
            case _ if member.who.rank not in (members := self._calls.members_of(message)):
                shared = f"this store of {self._calls.whose(message)}; its members are {listed(tasks_of(members))}"
                text = f"{member.who.name} does not share {shared}; fix: let only these call it"
                return [role.Send(link, refusal(message, text))]
            case _ if self._broken and message.kind is not Kind.CLOSE and (lost := self._lost_to(members)):
                return [role.Send(link, refusal(message, lost[1], "PeerLost", who=lost[0]))]
            case _ if wrong := self._calls.against(call):
                return [role.Send(link, refusal(message, wrong))]
            case Kind.OPEN | Kind.KEYS | Kind.BARRIER | Kind.SAVE | Kind.LOAD:
                return self._calls.gather(call)
            case Kind.INIT:
                return self._calls.inited(call)
            case Kind.RULE:
                return self._rules.ask(call)
            case Kind.JOIN:
                return self._calls.join(call)
            case Kind.LEFT:
                return self._calls.leave(call)
            case Kind.CLOSE:
                return self._calls.close(call)
            case kind:
                return [role.Send(link, refusal(message, f"the scheduler knows no {kind.name}"))]

    def _lost_to(self, members: Collection[int]) -> tuple[str, str] | None:
        """Return the first lost node that the workers of a store cannot do without, and the reason; None: none is."""
        for name, (rank, reason) in self._lost.items():
            if rank is None or rank in members:
                return name, reason
        return None


def _line(event: str, who: NodeIdentity) -> role.Action:
    return role.Log("INFO", f"event={event} node={who.name} host={who.host} pid={who.pid} endpoint={who.endpoint}")
