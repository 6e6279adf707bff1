"""The scheduler's part in saving and loading a store's states, when all workers have asked. No side effects.

Save: every server writes its shards to a file of its own and answers with what is in it; the sum of that is the
manifest, which rank 0 writes last. Load: the workers are told first what is there (`look`), so that each reads its own
file before anything changes. Then every server reads and checks what its shards need (`stage`); only when all could,
the store gets the saved rule if it has none, and the servers put the values in their places (`commit`). The formats
are in docs/states.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distrun_runtime.errors import KVError
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps import role
from distrun_runtime.ps.agreement import Call, Rules, Subject
from distrun_runtime.ps.replies import answer
from distrun_runtime.ps.roster import Answers, Queries, Roster, Then
from distrun_runtime.ps.statefile import FORMAT, worker_file, worker_files


class Checkpoints:
    """What is saved and loaded at the moment."""

    def __init__(self, roster: Roster, queries: Queries, rules: Rules) -> None:
        self._roster = roster
        self._queries = queries
        self._rules = rules

    def save(self, store: Subject, calls: Mapping[int, Call]) -> list[role.Action]:
        """Have all servers write their files, then tell the workers what they wrote."""
        part = str(calls[0].message.body["part"])
        body = {"folder": calls[0].message.body["folder"], "part": part, "names": store.keys.names}

        def written(answers: Answers) -> list[role.Action]:
            if answers.errors:
                return _refuse(calls, answers)
            manifest = self._manifest(store, part, calls, answers)
            return [role.Send(call.link, answer(call.message, {"manifest": manifest})) for call in calls.values()]

        return self._tell(Kind.SAVE, store, body, written)

    def load(self, store: Subject, calls: Mapping[int, Call]) -> list[role.Action]:
        """Have all servers read what they need, then take it over; tell the workers what they have to know."""
        manifest = calls[0].message.body["manifest"]
        try:
            wrong = self._against(store, manifest)
        except (KVError, LookupError, TypeError, ValueError, AttributeError) as err:
            wrong = f"the manifest is malformed: {type(err).__name__}: {err}"
        if wrong:
            return _refuse(calls, Answers(errors=[wrong]))
        if calls[0].message.body.get("look"):
            return self._tell_workers(store, calls, manifest)
        saved = store.keys.saved_as(manifest["keys"])
        wanted = self._rules.spec(store.number) or _spec(manifest)
        body = {
            "action": "stage",
            "folder": calls[0].message.body["folder"],
            "manifest": manifest,
            "numbers": saved,
            "spec": None if wanted is None else dict(wanted.to_json()),
        }
        return self._tell(Kind.LOAD, store, body, lambda answers: self._staged(store, calls, manifest, answers))

    def _against(self, store: Subject, manifest: Mapping[str, Any]) -> str:
        if manifest.get("format") != FORMAT:
            return f"saved states of format {manifest.get('format')!r}; this version reads {FORMAT}"
        present, saved = self._rules.spec(store.number), _spec(manifest)
        if present is not None and saved is not None and present.name != saved.name:
            return f"the states were saved under the rule {saved.name!r}, the store has {present.name!r}"
        wrong = store.keys.differ_from(manifest["keys"])
        if not wrong:
            # All that the workers are told later is read once now: a manifest without it must change nothing.
            self._facts(store, manifest)
        return wrong

    def _staged(
        self, store: Subject, calls: Mapping[int, Call], manifest: Mapping[str, Any], answers: Answers
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
        return self._rules.restore(store.number, _spec(manifest), ruled)

    def _drop(self, store: Subject, calls: Mapping[int, Call], answers: Answers) -> list[role.Action]:
        return self._tell(Kind.LOAD, store, {"action": "drop"}, lambda _: _refuse(calls, answers))

    def _manifest(self, store: Subject, part: str, calls: Mapping[int, Call], answers: Answers) -> dict[str, Any]:
        rounds: dict[int, int] = {}
        for body in answers.bodies.values():
            for number, done in body["rounds"]:
                rounds[number] = max(rounds.get(number, 0), done)
        return {
            "format": FORMAT,
            "type": store.type,
            "data": part,
            "keys": store.keys.to_json(),
            "rule": self._rule(store),
            "workers": self._roster.expected["worker"],
            "servers": self._roster.expected["server"],
            "rounds": sorted(rounds.items()),
            "files": {
                **{body["file"]: body["holds"] for body in answers.bodies.values()},
                **{worker_file(rank): {} for rank, call in calls.items() if call.message.body.get("residuals")},
            },
        }

    def _facts(self, store: Subject, manifest: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "part": manifest["data"],
            "workers": manifest["workers"],
            "residuals": worker_files(manifest),
            "numbers": [[number, old] for number, old, _ in store.keys.saved_as(manifest["keys"])],
            "rounds": self._rounds(store, manifest),
            "rule": self._rule(store),
        }

    def _rounds(self, store: Subject, manifest: Mapping[str, Any]) -> list[list[int]]:
        """Return (number, round) of the keys whose rounds go on where the saved ones ended."""
        rounds = {int(old): int(done) for old, done in manifest["rounds"]} if store.is_sync else {}
        return [[number, rounds[old]] for number, old, _ in store.keys.saved_as(manifest["keys"]) if old in rounds]

    def _rule(self, store: Subject) -> dict[str, Any] | None:
        spec = self._rules.spec(store.number)
        return None if spec is None else dict(spec.to_json())

    def _tell_workers(
        self, store: Subject, calls: Mapping[int, Call], manifest: Mapping[str, Any]
    ) -> list[role.Action]:
        facts = self._facts(store, manifest)
        return [role.Send(call.link, answer(call.message, facts)) for call in calls.values()]

    def _tell(self, kind: Kind, store: Subject, body: Mapping[str, Any], then: Then) -> list[role.Action]:
        return self._queries.send(Message(kind, store=store.number, body=body), self._roster.alive("server"), then)


def _spec(manifest: Mapping[str, Any]) -> RuleSpec | None:
    return None if manifest["rule"] is None else RuleSpec.from_json(manifest["rule"])


def _refuse(calls: Mapping[int, Call], answers: Answers) -> list[role.Action]:
    return [role.Send(call.link, answers.refusal(call.message)) for call in calls.values()]
