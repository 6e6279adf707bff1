"""What the trainers of all workers must have alike where they update the weights themselves.

Each step adds up a fingerprint of it beside the gradients. If the sums show a difference, all workers see that in the
same step, before anybody updates; then they tell each other the details, and all come to the same result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distrun_runtime.errors import KVError
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.trainer.changes import OWN_HARM, SHOWN, Changed, chosen, digest, ranked
from distrun_runtime.trainer.exchange import Exchange
from distrun_runtime.trainer.parameter import Parameter
from distrun_runtime.trainer.updates import Updates

__all__ = ["NO_MARK", "Agreement", "Mark", "UpdateRule", "fingerprint", "rules_differ"]

Answers = Mapping[int, Mapping[str, Any]]
"""By rank, what each worker said."""

Mark = tuple[int, int]
"""A fingerprint."""

NO_MARK: Mark = (0, 0)
"""Where nothing is compared."""


class UpdateRule(NamedTuple):
    """How a trainer updates."""

    spec: RuleSpec
    divided: float | None
    """What the sums of its last update were multiplied by; None before the first."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a note."""
        return {"rule": self.spec.to_json(), "divided": self.divided}


class Agreement:
    """Compares this worker's trainer with those of all others.

    Threads: one at a time.
    """

    def __init__(self, params: Sequence[Parameter], updates: Updates, exchange: Exchange) -> None:
        self._params, self._updates, self._exchange = params, updates, exchange
        self._has_loaded = False
        self._usual: tuple[UpdateRule, Mark] | None = None
        """The fingerprint of a rule where no weight was changed: nearly every step asks for it."""

    def loaded(self) -> None:
        """Note that this worker has loaded states; whether the others have, the next step shows."""
        self._has_loaded = True

    def reached(self) -> None:
        """Note that all workers have what this one has."""
        self._has_loaded = False

    def mark(self, rule: UpdateRule, changed: Changed) -> Mark:
        """Return the fingerprint of what has to be alike on all workers."""
        is_usual = not changed and not self._has_loaded
        if is_usual and self._usual is not None and self._usual[0] == rule:
            return self._usual[1]
        facts = {
            **rule.to_json(),
            "weights": [[index, self._digest(index)] for index in changed.indices],
            "wrong": changed.wrong,
            "states": self._updates.digest() if self._has_loaded else "",
        }
        mark = fingerprint(facts)
        if is_usual:
            self._usual = rule, mark
        return mark

    def compare(self, rule: UpdateRule, changed: Changed) -> list[int]:
        """Find out what differs; all workers call this in the same step. Weights that all have changed become rank 0's.

        Returns:
            The parameters that any worker has changed. Their weights are alike now.

        Raises:
            KVError: what must not differ does. All workers raise the same.
        """
        names = [one.name for one in self._params]
        notes = self._exchange.tell({**rule.to_json(), **changed.to_json(), "loaded": self._has_loaded})
        differ = rules_differ(notes, names)
        if differ:
            raise KVError(
                "the trainers of the workers update by different rules, so their weights would differ: %s. fix: make"
                " the same changes (set_learning_rate, set_optimizer_params, multipliers, batch_size of update) on all"
                " workers before the same step; if earlier steps differed, call trainer.assign() on all workers"
                % differ
            )
        indices = sorted({index for note in notes.values() for index in note["changed"]})
        loaded = [rank for rank, note in sorted(notes.items()) if note["loaded"]]
        answers = self._exchange.tell(
            {
                "weights": [self._digest(index) for index in indices],
                "states": self._updates.digest() if loaded else "",
            }
        )
        if len({answer["states"] for answer in answers.values()}) > 1:
            raise KVError(
                "weights or states of the optimizer differ after load_states on %s; fix: call load_states on all"
                " workers, each with the same file" % ranked(loaded)
            )
        odd = {
            index
            for place, index in enumerate(indices)
            if len({answer["weights"][place] for answer in answers.values()}) > 1
        }
        some = {rank: {**note, "changed": sorted(odd.intersection(note["changed"]))} for rank, note in notes.items()}
        taken = chosen(some, notes, names, OWN_HARM)
        if taken:
            self._exchange.assign(taken)
        return indices

    def _digest(self, index: int) -> str:
        return digest([self._params[index].replicas[0].weight()])


def fingerprint(facts: Mapping[str, Any]) -> tuple[int, int]:
    """Return two numbers below 2**24 for facts in JSON: equal for equal facts, and hardly ever for different ones."""
    found = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode("utf-8"), digest_size=6).digest()
    return int.from_bytes(found[:3], "little"), int.from_bytes(found[3:], "little")


def rules_differ(notes: Answers, names: Sequence[str]) -> str:
    """Return how the rules of trainers differ, by rank, in words; empty: they are alike. No side effects.

    Arguments:
        notes: `rule` is a rule as JSON, `divided` what the last sums were multiplied by, or None.
        names: of the parameters, whose indices multipliers have as keys.
    """
    tables = {rank: _settings(note, names) for rank, note in sorted(notes.items())}
    found = []
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        groups: dict[str, list[int]] = {}
        for rank, table in tables.items():
            groups.setdefault(table.get(name, "not set"), []).append(rank)
        if len(groups) > 1:
            values = ", ".join("%s on %s" % (value, ranked(ranks)) for value, ranks in groups.items())
            found.append("%s is %s" % (name, values))
    if not found:
        return ""
    more = "; and %d more" % (len(found) - SHOWN) if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def _settings(note: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Return what a worker's rule says, by names for people."""
    rule = note["rule"]
    table = {"the optimizer": repr(rule["name"])}
    table.update((name, repr(value)) for name, value in rule["params"].items())
    for word in ("lr_mult", "wd_mult"):
        table.update(("%s of parameter %r" % (word, names[index]), repr(number)) for index, number in rule[word])
    divided = note["divided"]
    table["the batch_size of the last update"] = "none" if divided is None else "%g" % (1.0 / divided)
    return table
