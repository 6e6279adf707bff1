"""One store's side of this process's connection to the job: what it asks of the scheduler and of the servers.

Calls that all workers make together are numbered, and call i of all workers must be the same. So a number must not be
used up by a call that was not made in the end:

* A call whose caller stops waiting (Ctrl-C, time limit) is taken back, and the next one has its number. If it is too
  late for that, since all have made the call, the same call made again has its result.
* A `create` is answered with a store that this process created before if no call has succeeded in that one yet and the
  other workers wait there: the process has started over, as when a notebook cell is run again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import field
from typing import Any

from distrun_runtime.arrays.dtypes import Buffer, work_dtype
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import KVError, PeerLost, RuntimeFault, StoreClosed
from distrun_runtime.protocol.message import Kind, Membership, Message, encode
from distrun_runtime.ps.role import SCHEDULER_LINK, NodeRequest, listed, ranks_text, tasks_of
from distrun_runtime.ps.session import Asked, Commitment, NodeSession, PlannedSend, PlannedSends
from distrun_runtime.ps.worker import EntriesOf
from distrun_runtime.store.keys import KeyRecord
from distrun_runtime.transport.direct import form_of

TAKE_BACK_S = 10.0
"""How long a call that is left waiting for the other workers waits for the scheduler's word that it is taken back."""


_NOTHING = nullcontext()


@dataclass(frozen=True)
class CollectiveCall:
    """A call that all workers make together."""

    kind: Kind
    number: int
    body: Mapping[str, Any]
    request: NodeRequest


class StoreLink:
    """Asks in the name of one store.

    Arguments:
        facts: what `create` says of the store, alike on all its workers.
        unused: numbers of the stores that this process has created before and not used.
        group: those who share the store; None: all workers do.

    Threads: any.
    """

    def __init__(
        self, node: NodeSession, facts: Mapping[str, Any], unused: Sequence[int] = (), group: Group | None = None
    ) -> None:
        self.node = node
        self._group = group
        self._shared_by = None if group is None else group.members
        self.members = self._shared_by or Membership(range(node.config.workers))
        """The workers that share the store."""
        self.workers = len(self.members.ranks)
        """Their number."""
        self.rank = self.members.ranks.index(node.rank)
        """This worker's rank among them."""
        self.relays, self.relays_of_hosts = node.worker.relays, node.worker.relays_of_hosts
        """Those of the job's that serve several of the store's workers (`ps.relay`)."""
        if group is not None:
            self.relays, self.relays_of_hosts = node.worker.relays_among(group.members)
        self.facts = facts
        self.unused = list(unused)
        self.is_on_devices = False
        """Whether this worker has said that the store is of a kind `dist_device_*`. A call that is made again has to
        say the same, so it stays if the store is then created with the other kind."""
        self.told: Mapping[str, Any] = {}
        """What servers have to know of the store, and is only known when all workers have created it."""
        self.number = node.next_store(group.name if group is not None else "")
        """Which store of its workers it is, from 1 in order of creation."""
        self.store = self.number
        """The store's number in messages; of a group's, once `create` was answered."""
        self.epoch = 0
        """The epoch of its members, which all messages to servers name."""
        self._naming = {} if group is None else {"group": group.name}
        """What tells the scheduler until then which store is meant."""
        self.replaced: Callable[[], None] = lambda: None
        """Told when a later `create` takes the store's place."""
        self.unanswered: set[NodeRequest] = set()
        """What was asked and is not answered. The node's thread removes it."""
        self._lock = threading.Lock()
        self._calls = 0
        self._failed: set[int] = set()
        """Numbers of calls that failed for all workers."""
        self._is_used = False
        self.held: CollectiveCall | None = None
        """A call whose caller has stopped waiting for it, and which could not be taken back."""

    @property
    def limit_s(self) -> float:
        """How long a call may wait for living nodes."""
        return self.node.config.op_timeout_s

    def span(self, name: str, **args: object) -> AbstractContextManager[None]:
        """Return what records how long a block takes, while the store is profiled."""
        recorder = self.node.recorder
        return recorder.span(name, "store", **args) if recorder.is_on else _NOTHING

    def stage(self, stage: str) -> AbstractContextManager[None]:
        """Return what measures how long a stage of a data call takes, where that is asked for."""
        stages = self.node.stages
        return stages.span(stage) if stages.is_on else self.span(stage)

    @property
    def plans(self) -> bool:
        """Whether calls may be made by plans: the store is that of all workers, and nothing is measured."""
        return self._group is None and not self.node.recorder.is_on and not self.node.stages.is_on

    @property
    def is_unused(self) -> bool:
        """Whether no call that all workers make together has succeeded here or is under way, but for `create`."""
        with self._lock:
            return not self._is_used and self._calls == 1 + len(self._failed)

    @property
    def is_new(self) -> bool:
        """Whether not even `create` was called here, or it was taken back."""
        return self._calls == 0

    def next_call(self) -> int:
        """Return the number of this worker's next call that all workers of the store make together."""
        with self._lock:
            self._calls += 1
            return self._calls

    def call(self, what: str, kind: Kind, body: dict[str, Any], after: Sequence[NodeRequest] = ()) -> NodeRequest:
        """Ask the scheduler, once `after` are done."""
        naming = self._naming  # Read first: it is emptied after `store` has got its number.
        message = Message(kind, store=self.number if naming else self.store, body={**body, **naming})
        return self.ask(what, [(SCHEDULER_LINK, message)], after=after)

    def ask(
        self,
        what: str,
        messages: Sequence[tuple[str, Message]],
        after: Sequence[NodeRequest] = (),
        entries_of: EntriesOf | None = None,
        commitment: Commitment | None = None,
    ) -> NodeRequest:
        """Send messages of this store; the arguments are those of `NodeSession.ask`."""
        whose = self._shared_by
        return self.node.ask(
            what, messages, after=after, entries_of=entries_of, members=whose, commitment=commitment, begun=self._begun
        )

    def begun(self, requests: list[NodeRequest], request: NodeRequest) -> None:
        """A call that a thread made by itself has become a request: add it to a list, and to what is under way."""
        self._begun(request)
        if request not in requests:
            requests.append(request)

    def _begun(self, request: NodeRequest) -> None:
        self.unanswered.add(request)
        request.then(lambda error: self.unanswered.discard(request))

    def close(self) -> None:
        """Say that this worker has closed the store, once all that it has asked for is answered.

        When all have, the servers forget it.
        """
        self.replaced = lambda: None  # What was to be told is let go.
        with suppress(StoreClosed):  # The process has left the job.
            self.call("close", Kind.CLOSE, {}, after=list(self.unanswered))

    def scheduler(self, what: str, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the scheduler and return what it answers."""
        with self.span(what):
            (reply,) = self.call(what, kind, body).wait(self.limit_s)
        return dict(reply.body)

    def together(self, what: str, kind: Kind, **body: object) -> dict[str, Any]:
        """Make a call that all workers make, and return what the scheduler answers to all."""
        return self.agree(what, kind, self.next_call(), body)[1]

    def agree(self, what: str, kind: Kind, number: int, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Make the call that all workers make; return its number, and what the scheduler answers.

        Arguments:
            number: as `next_call` gave it.
        """
        with self.span(what):
            call = self.begin(what, kind, number, body)
            try:
                (reply,) = call.request.wait(self.limit_s)
            except BaseException:
                self.leave(call)
                raise
        return call.number, dict(reply.body)

    def begin(
        self, what: str, kind: Kind, number: int, body: Mapping[str, Any], after: Sequence[NodeRequest] = ()
    ) -> CollectiveCall:
        """As `agree`, but without waiting for the answer; the call is made once `after` are done."""
        held = self._left_waiting(kind, number, body)
        return held or self._made(kind, number, body, self.call(what, kind, {**body, "number": number}, after))

    def meet(self, what: str, kind: Kind, number: int) -> CollectiveCall | None:
        """As `begin`, but receive the answer in this thread if nothing else is in flight. None: it has come."""
        if held := self._left_waiting(kind, number, {}):
            return held
        message = Message(kind, store=self.store, body={"number": number})
        head, text = encode(message, self.node.sender)
        frames: list[Buffer] = [bytearray(head), text]
        sends = PlannedSends([PlannedSend(SCHEDULER_LINK, frames, form_of(frames))])
        begun: list[CollectiveCall] = []

        def follow(request: NodeRequest) -> None:
            self._begun(request)
            begun.append(self._made(kind, number, {}, request))

        try:
            answers = self.node.exchange(sends, lambda: Asked(what, [(SCHEDULER_LINK, message)]), follow)
        except BaseException:
            for call in begun:
                self.leave(call)
            raise
        if isinstance(answers, list):
            self.settled(number, True)
            return None
        return begun[0]

    def _left_waiting(self, kind: Kind, number: int, body: Mapping[str, Any]) -> CollectiveCall | None:
        """Return the same call, if its caller has stopped waiting for it before."""
        with self._lock:
            held, self.held = self.held, None
            if held is not None and (held.kind is Kind.JOIN or (held.kind, held.body) == (kind, body)):
                self._calls -= number == self._calls
                if (held.kind, held.body) == (kind, body):
                    return held
                self.held = held
                raise KVError("join was left waiting and cannot be taken back, as others count on it; call join again")
        return None

    def _made(self, kind: Kind, number: int, body: Mapping[str, Any], request: NodeRequest) -> CollectiveCall:
        request.then(lambda error: self._answered(kind, number, request, error))
        return CollectiveCall(kind, number, body, request)

    def leave(self, call: CollectiveCall) -> None:
        """Take back a call whose caller stops waiting, if that can be."""
        if call.number in self._failed:
            return
        self.held = call
        if call.kind is Kind.JOIN:
            return
        # The process may have lost the job: then no call waits for it any more.
        with suppress(RuntimeFault):
            request = self.call("taking back a call", call.kind, {"number": call.number, "take_back": True})
            (reply,) = request.wait(TAKE_BACK_S)
            if reply.body.get("failed"):
                self.held = None
                self.settled(call.number, False)
            elif reply.body.get("is_taken"):
                self.held = None
                self.free(call.kind, call.number)

    def take_back(self) -> None:
        """Give the store's own number to the next one: it was not made."""
        self.node.take_back_store(self.number, self._group.name if self._group is not None else "")

    def free(self, kind: Kind, number: int) -> None:
        """Give the number of a call that is not made to the next one; if that has another, fail it for all workers."""
        with self._lock:
            is_last = self._calls == number
            if is_last:
                self._calls -= 1
                self._failed.discard(number)
        if not is_last:
            self._fail(kind, number, "it was left waiting, and other calls were made since")

    def give_up(self, reason: str, kind: Kind = Kind.KEYS) -> None:
        """Fail the next call on all workers: this one will not make it."""
        self._fail(kind, self.next_call(), reason)

    def settled(self, number: int, is_good: bool) -> None:
        """Note that a call has succeeded, or failed for all workers."""
        with self._lock:
            if is_good:
                self._is_used = True
            else:
                self._failed.add(number)

    def _fail(self, kind: Kind, number: int, reason: str) -> None:
        self.call("giving up a call", kind, {"number": number, "error": reason[:2000]})

    def _answered(self, kind: Kind, number: int, request: NodeRequest, error: RuntimeFault | None) -> None:
        if kind is Kind.OPEN and error is None and "store" in request.replies[0].body:
            body = request.replies[0].body
            self.epoch, self.store, self._naming = int(body["epoch"]), int(body["store"]), {}
        # `create` uses nothing. Keys are declared when the servers have rank 0's values, which it still has to send.
        if error is not None or not (kind is Kind.OPEN or (kind is Kind.KEYS and self.rank == 0)):
            self.settled(number, error is None)

    def servers(
        self, what: str, kind: Kind, body: dict[str, Any] | None = None, ranks: Iterable[int] | None = None
    ) -> list[dict[str, Any]]:
        """Ask servers - all, or those of these ranks - and return what each answers, in order."""
        replies = self.ask_servers(what, kind, body, ranks).wait(self.limit_s)
        return [dict(reply.body) for reply in replies]

    def ask_servers(
        self,
        what: str,
        kind: Kind,
        body: dict[str, Any] | None = None,
        ranks: Iterable[int] | None = None,
        after: Sequence[NodeRequest] = (),
        *,
        priority: int = 0,
    ) -> NodeRequest:
        """As `servers`, but once `after` are done, and without waiting for the answers."""
        message = Message(kind, store=self.store, epoch=self.epoch, priority=priority, body=body or {})
        links = [f"server-{rank}" for rank in (range(len(self.node.worker.servers)) if ranks is None else ranks)]
        return self.ask(what, [(link, message) for link in links], after=after)


def is_added_on_hosts(facts: Mapping[str, Any], record: KeyRecord) -> bool:
    """Whether workers of one host may add what they push of a key: the sum is the same then, and travels as it is.

    Arguments:
        facts: what servers know of the store.
    """
    is_reduced = not record.call or record.call.startswith("allreduce")
    if "async" in facts["type"] or facts.get("deterministic") or record.is_sparse or not is_reduced:
        return False
    if record.op != "sum":
        return False
    return work_dtype(record.dtype) == record.dtype  # A part of a sum of 16-bit floats would be rounded.


@dataclass(frozen=True)
class Group:
    """Workers that have stores of their own."""

    name: str
    members: Membership

    @property
    def facts(self) -> dict[str, Any]:
        """What `create` says of it, alike on all members."""
        return {"group": self.name, "members": list(self.members.ranks)}


@dataclass
class _ProcessLinks:
    """The links of a process."""

    open: dict[int, StoreLink] = field(default_factory=dict)
    """Those of its stores that are not closed, by number."""
    opening: StoreLink | None = None
    """That of a store whose `create` was left waiting, and could not be taken back."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Those that this process has created a store of, by name."""


def group_of(node: NodeSession, name: str, members: Sequence[int] | None) -> Group:
    """Return a group of this worker's.

    Arguments:
        members: ranks in the job, each once; None: as in the first call.

    Raises:
        KVError: they are not what they can be, or others than in the first call, or this worker is not among them.
    """
    known, me, workers = _made(node).groups.get(name), node.rank, node.config.workers
    if members is None:
        if known is None:
            raise KVError(
                f"worker-{me} creates its first store of group {name!r}: name its members, as all of them do;"
                f" fix: create(..., group={name!r}, members=[...])"
            )
        return known
    absent = sorted(rank for rank in members if rank >= workers)
    if absent:
        which = f"{listed(tasks_of(absent))}: ranks of this job's workers go from 0 to {workers - 1}"
        raise KVError(f"group {name!r} has no member {which}")
    ranks = tuple(sorted(members))
    if me not in ranks:
        raise KVError(f"worker-{me} is no member of group {name!r}; its members are {listed(tasks_of(ranks))}")
    if known is not None and known.members.ranks != ranks:
        said = f"{ranks_text(known.members.ranks)} since its first store, and not {ranks_text(ranks)}"
        raise KVError(f"group {name!r} has the members {said}; fix: give other workers another name")
    return known or Group(name, Membership(ranks))


def open_link(
    node: NodeSession, what: str, facts: Mapping[str, Any], on_devices: bool = False, group: Group | None = None
) -> StoreLink:
    """Make the call `create` with all workers of the store, and return its link.

    Arguments:
        facts: what all of them must say alike.
        on_devices: the store is of a kind `dist_device_*`; workers may differ in that. After a call that was left
            waiting as the other kind, the servers hear of it from rank 0 only.
        group: those who share the store; None: all workers do.
    """
    made = _made(node)
    facts = {**facts, **(group.facts if group is not None else {})}
    link, made.opening = made.opening, None
    if link is not None and link.facts != facts:
        link.give_up(f"{what} was called instead")
        link.close()  # If the servers make it after all, it has no user.
        link = None
    if link is None:
        link = StoreLink(node, facts, [number for number, one in list(made.open.items()) if one.is_unused], group)
        link.is_on_devices = on_devices
    try:
        kind = {"on_devices": True} if link.is_on_devices else {}
        reply = link.together(what, Kind.OPEN, **link.facts, **kind, unused=link.unused)
    except BaseException as err:
        # The other members may make their next store of the group without the lost one, and number it as this one.
        if link.is_new or (group is not None and isinstance(err, PeerLost)):
            link.take_back()
        made.opening = link if link.held is not None else None
        raise
    if "instead" in reply:
        link.take_back()
        link = made.open[int(reply["instead"])]
        link.replaced()
    elif reply.get("on_devices") or on_devices:
        link.told = {"on_devices": True}
    made.open[link.store] = link
    if group is not None:
        made.groups[group.name] = group
    return link


def close_link(link: StoreLink) -> None:
    """Note that a store is closed: no later `create` takes its place."""
    _made(link.node).open.pop(link.store, None)


def _made(node: NodeSession) -> _ProcessLinks:
    if not isinstance(node.stores, _ProcessLinks):
        node.stores = _ProcessLinks()
    return node.stores
