"""The rules of a job's stores, as the scheduler knows them: changed one at a time, on all servers or on none. Pure.

A rule is first tried by all servers (RULE with `check`: they make it and look whether it takes the weights they hold),
then put in its place by all. So what one server refuses, a module that only its host lacks or an element type that
only it holds, changes nothing anywhere. Should a server fail later, when the state is carried over, all go back to the
rule that was there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps import role
from distrun_runtime.ps.collective import Call
from distrun_runtime.ps.errands import Answers, Errands, Then
from distrun_runtime.ps.replies import answer
from distrun_runtime.ps.roster import Roster


@dataclass(frozen=True)
class _Change:
    """Something that wants its turn."""

    store: int
    wish: Callable[[Optional[RuleSpec]], Optional[RuleSpec]]
    """From the present rule to the one to come; None: none. Raises KVError."""
    then: Callable[[Optional[Answers]], list[role.Action]]
    """What follows; it is given what the servers had against it, or None."""


class Rulebook:
    """The rules of all stores."""

    def __init__(self, roster: Roster, errands: Errands) -> None:
        self._roster = roster
        self._errands = errands
        self._specs: dict[int, RuleSpec] = {}
        self._waiting: deque[_Change] = deque()
        self._is_changing = False

    def spec(self, store: int) -> RuleSpec | None:
        """Return the store's rule; None: it has none."""
        return self._specs.get(store)

    def ask(self, call: Call) -> list[role.Action]:
        """Take in one worker's RULE: another rule, none, or other parameters of the one there is."""
        body = call.message.body

        def then(answers: Answers | None) -> list[role.Action]:
            return [role.Send(call.link, answers.refusal(call.message) if answers else answer(call.message))]

        return self._queue(_Change(call.message.store, lambda old: _wish(old, body), then))

    def restore(
        self, store: int, spec: RuleSpec | None, then: Callable[[Answers | None], list[role.Action]]
    ) -> list[role.Action]:
        """Give a store the rule of its saved states, unless it has one."""
        return self._queue(_Change(store, lambda old: old or spec, then))

    def _queue(self, change: _Change) -> list[role.Action]:
        self._waiting.append(change)
        return self._next()

    def _next(self) -> list[role.Action]:
        actions: list[role.Action] = []
        while self._waiting and not self._is_changing:
            change = self._waiting.popleft()
            present = self.spec(change.store)
            try:
                wish = change.wish(present)
            except KVError as err:
                actions += change.then(Answers(errors=[str(err)]))
                continue
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as err:
                # Its sender's mistake; it may be another's message that we are handling now.
                actions += change.then(Answers(errors=["RULE is malformed: %s: %s" % (type(err).__name__, err)]))
                continue
            if wish == present:
                actions += change.then(None)
                continue
            self._is_changing = True
            actions += self._try(change, wish)
        return actions

    def _try(self, change: _Change, wish: RuleSpec | None) -> list[role.Action]:
        def tried(answers: Answers) -> list[role.Action]:
            if answers.errors:
                return self._over(change, answers)
            return self._tell(change.store, {"spec": _json(wish)}, lambda answers: self._put(change, wish, answers))

        return self._tell(change.store, {"spec": _json(wish), "check": True}, tried)

    def _put(self, change: _Change, wish: RuleSpec | None, answers: Answers) -> list[role.Action]:
        if answers.errors:
            back = {"spec": _json(self.spec(change.store))}
            return self._tell(change.store, back, lambda _: self._over(change, answers))
        if wish is None:
            self._specs.pop(change.store, None)
        else:
            self._specs[change.store] = wish
        return self._over(change, None)

    def _over(self, change: _Change, answers: Answers | None) -> list[role.Action]:
        self._is_changing = False
        return [*change.then(answers), *self._next()]

    def _tell(self, store: int, body: Mapping[str, Any], then: Then) -> list[role.Action]:
        return self._errands.send(Message(Kind.RULE, store=store, body=body), self._roster.alive("server"), then)


def _wish(present: RuleSpec | None, body: Mapping[str, Any]) -> RuleSpec | None:
    """Return the rule that a RULE asks for, where `present` is the store's."""
    if "change" in body:
        if present is None:
            raise KVError("the store has no rule whose parameters could be changed: call kv.set_optimizer first")
        return present.changed(body["change"])
    value = body["spec"]
    if value is None:
        return None
    wish = RuleSpec.from_json(value)
    if present is None:
        return wish
    if rules.same(present, wish):
        return present
    if not body.get("replace"):
        raise KVError(
            "the store has the rule %s; set_optimizer(%r, ..., replace=True) puts another in its place"
            % (rules.difference(present, wish), wish.name)
        )
    return wish


def _json(spec: RuleSpec | None) -> dict[str, Any] | None:
    return None if spec is None else dict(spec.to_json())
