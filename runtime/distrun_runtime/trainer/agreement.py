"""What all workers must have alike: their weights, and the rules of trainers that update by themselves.

Weights may be changed outside of steps: by `load_state_dict`, in place, or through `.data`. `Changes` notices it. Where
a store with several workers updates, the next step would undo such a change. The worker that notices it has the round
of its step skipped, with a note that says what was changed: so all workers hear of it in this very step, and nothing is
sent for it in any other. What follows from the notes is decided alike on every worker (`chosen`).

Where the trainers update, each step adds up a fingerprint beside the gradients, of the rule and of what was changed. If
the sums show a difference, all workers see that in the same step, before any of them updates; then they exchange the
details, and all come to the same result (`Agreement`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from distrun_runtime import kvstore
from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.contract import environ
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore, KVStoreBase
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.ps.shards import Notes
from distrun_runtime.trainer.exchange import StoreExchange, ThirdPartyExchange
from distrun_runtime.trainer.model import Buffers
from distrun_runtime.trainer.parameters import Parameter
from distrun_runtime.trainer.states import LocalRule, bits_of, digest

# --- weights that were changed outside of steps

SHOWN = 3
"""How many parameters or settings a message names."""


@dataclass(frozen=True)
class Changed:
    """Weights of this worker that were changed outside of steps."""

    indices: tuple[int, ...] = ()
    """Of the parameters."""
    wrong: str = ""
    """Why no worker can take the change, in words; empty: it can be taken."""

    def __bool__(self) -> bool:
        return bool(self.indices or self.wrong)

    def to_json(self) -> dict[str, Any]:
        """Return the note that says so."""
        return {"changed": list(self.indices), "wrong": self.wrong}


class Changes:
    """Notices weights that were changed outside of steps.

    A torch tensor counts the writes into it (`_version`) and says where its memory is. Both are compared with what
    they were when the trainer wrote the tensor last. So in-place operations are noticed (`clamp_`, `copy_`,
    `load_state_dict`), and another memory is (`.data =`, `net.to(...)`); a write past torch is not (`.data.clamp_()`,
    `.numpy()`, arrays of numpy). What was written but has the same values counts as unchanged.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._params = params
        self._marked: set[int] = set()

    def mark(self, indices: Iterable[int]) -> None:
        """Take parameters for changed until they are accepted: the trainer wrote them for this worker alone."""
        self._marked.update(indices)

    def accept(self, indices: Iterable[int] | None = None) -> None:
        """Take these weights, or all, as they are now for unchanged."""
        some = list(range(len(self._params)) if indices is None else indices)
        self._marked.difference_update(some)
        for index in some:
            self._params[index].remember()

    def suspects(self) -> list[int]:
        """Return the parameters that were written; their values may be the same."""
        return [index for index, one in enumerate(self._params) if index in self._marked or one.written_devices()]

    def against(self, suspects: Sequence[int], stored: Mapping[int, Array]) -> Changed:
        """Return which of the suspects have other values than the store; accept the rest.

        Arguments:
            stored: the store's values of the suspects, but for those that are row-sparse: their local rows need not
                be the store's.
        """
        changed, wrong = [], self.misfit(suspects)
        for index in [] if wrong else suspects:
            one = self._params[index]
            devices = one.written_devices()
            if index in stored:
                devices = [i for i, each in enumerate(one.replicas) if not _same(each.weight(), stored[index])]
            if not devices:
                self.accept([index])
                continue
            changed.append(index)
            wrong = wrong or _on_some(one, devices)
        return Changed(tuple(suspects if wrong else changed), wrong)

    def here(self) -> Changed:
        """Return which parameters were written, where no store has them; copies on several devices are made alike."""
        suspects = self.suspects()
        wrong = self.misfit(suspects)
        for index in [] if wrong else suspects:
            one = self._params[index]
            first, *others = [replica.weight() for replica in one.replicas]
            devices = one.written_devices()
            if all(_same(first, other) for other in others):
                continue
            wrong = wrong or _on_some(one, devices)
            if not wrong:
                self.mark([index])
                one.write(first.copy())
        return Changed(tuple(suspects), wrong)

    def misfit(self, suspects: Sequence[int]) -> str:
        """Return which of the suspects has another shape or dtype than before, in words; empty: none."""
        for one in (self._params[index] for index in suspects):
            for replica in one.replicas:
                found = replica.weight()
                if found.shape != one.shape or found.dtype != one.dtype:
                    return (
                        f"parameter {one.name!r} has shape {found.shape} and dtype {dtypes.name_of(found.dtype)} now,"
                        f" and had {one.shape} and {dtypes.name_of(one.dtype)} when the trainer was made; fix: close"
                        " the trainer and make another one"
                    )
        return ""


def is_skip(notes: Notes) -> bool:
    """Tell whether a worker wanted the step to be skipped (`Trainer.skip_step`), whatever others say."""
    return any(note is not None and SKIP.items() <= note.items() for note in notes.values())


SKIP = {"skip": True}
"""The note of a worker that wants a step to be skipped."""

STORE_HARM = "The store updates the weights, and would undo the change"
OWN_HARM = "Each worker updates its own weights, so they would differ from now on"


def _same(one: Array, other: Array) -> bool:
    """Tell whether two arrays have the same shape, dtype and bits."""
    return one.shape == other.shape and one.dtype == other.dtype and np.array_equal(bits_of(one), bits_of(other))


def chosen(notes: Notes, workers: Iterable[int], names: Sequence[str], harm: str) -> list[int]:
    """Return the parameters of which all workers take rank 0's weights. No side effects.

    Arguments:
        notes: by rank, a `Changed` as JSON; None of a worker that changed nothing.
        workers: the ranks of all workers. Those without a note take no part in steps at present.
        names: of the parameters.
        harm: what would come of the change, for people.

    Raises:
        KVError: not all workers have changed the same parameters. All workers raise the same.
    """
    for rank, note in sorted(notes.items()):
        if note and note.get("wrong"):
            raise KVError(f"worker-{rank}: {note['wrong']}")
    by_rank = {rank: set(note["changed"]) if note else set() for rank, note in notes.items()}
    every = sorted(set().union(*by_rank.values()))
    absent = [rank for rank in workers if rank not in notes]
    odd = [index for index in every if absent or not all(index in found for found in by_rank.values())]
    if not odd:
        return every
    parts = []
    for index in odd[:SHOWN]:
        who = [rank for rank, found in sorted(by_rank.items()) if index in found]
        rest = [rank for rank in sorted(by_rank) if rank not in who]
        parts.append(f"parameter {names[index]!r} on {_ranked(who)}{f' and not on {_ranked(rest)}' if rest else ''}")
    more = f" and {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
    gone = f"; {_ranked(absent)} takes no part in steps now (it has joined or left)" if absent else ""
    raise KVError(
        f"weights were changed outside of steps by only some workers: {'; '.join(parts)}{more}{gone}. {harm}."
        f" {UNDO if absent else ASSIGN}"
    )


UNDO = "fix: undo the change; make it on all workers when all of them make steps again"
"""What to do about weights that were changed while a worker takes no part in steps, nor in `assign`."""


ASSIGN = (
    "fix: make the change on all workers; or make it on rank 0 and call trainer.assign() on all workers, which gives"
    " them the weights of rank 0"
)
"""What to do about weights that were changed."""


def change_refused(changed: Changed, names: Sequence[str], harm: str) -> KVError:
    """Return the error of weights that were changed, where other workers cannot be asked."""
    if changed.wrong:
        return KVError(changed.wrong)
    more = f" and {len(changed.indices) - SHOWN} more" if len(changed.indices) > SHOWN else ""
    shown = ", ".join(f"parameter {names[index]!r}" for index in changed.indices[:SHOWN])
    return KVError(f"weights were changed outside of steps: {shown}{more}. {harm}. {ASSIGN}")


def _on_some(parameter: Parameter, devices: Sequence[int]) -> str:
    if len(devices) == len(parameter.replicas):
        return ""
    return (
        f"parameter {parameter.name!r} was changed outside of steps on {len(devices)} of its"
        f" {len(parameter.replicas)} devices only; fix: change it on all of them, or call trainer.assign() on"
        " all workers, which gives all devices the weights of rank 0's first"
    )


def _ranked(ranks: Iterable[int]) -> str:
    """Return the names of workers."""
    return ", ".join(f"worker-{rank}" for rank in ranks)


# --- trainers that update by themselves

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

    def __init__(self, params: Sequence[Parameter], rule: LocalRule, exchange: StoreExchange) -> None:
        self._params, self._rule, self._exchange = params, rule, exchange
        self.has_loaded = False
        """Whether this worker has loaded states, since all workers were found to have the same."""
        self._usual: tuple[UpdateRule, Mark] | None = None
        """The fingerprint of a rule where no weight was changed: nearly every step asks for it."""

    def mark(self, rule: UpdateRule, changed: Changed) -> Mark:
        """Return the fingerprint of what has to be alike on all workers."""
        is_usual = not changed and not self.has_loaded
        if is_usual and self._usual is not None and self._usual[0] == rule:
            return self._usual[1]
        facts = {
            **rule.to_json(),
            "weights": [[index, self._digest(index)] for index in changed.indices],
            "wrong": changed.wrong,
            "states": self._rule.digest() if self.has_loaded else "",
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
        notes = self._exchange.exchange_notes({**rule.to_json(), **changed.to_json(), "loaded": self.has_loaded})
        differ = _rules_differ(notes, names)
        if differ:
            raise KVError(
                "the trainers of the workers update by different rules, so their weights would differ:"
                f" {differ}. fix: make the same changes (set_learning_rate, set_optimizer_params, multipliers,"
                " batch_size of update) on all workers before the same step; if earlier steps differed, call"
                " trainer.assign() on all workers"
            )
        indices = sorted({index for note in notes.values() for index in note["changed"]})
        loaded = [rank for rank, note in sorted(notes.items()) if note["loaded"]]
        answers = self._exchange.exchange_notes(
            {
                "weights": [self._digest(index) for index in indices],
                "states": self._rule.digest() if loaded else "",
            }
        )
        if len({answer["states"] for answer in answers.values()}) > 1:
            raise KVError(
                f"weights or states of the optimizer differ after load_states on {_ranked(loaded)}; fix: call"
                " load_states on all workers, each with the same file"
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
    """Return two numbers below 2**24 for facts in JSON: equal for equal facts, and hardly ever for different ones.

    The sum of their squares over 2**15 workers fits into 64 bits.
    """
    found = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode("utf-8"), digest_size=6).digest()
    return int.from_bytes(found[:3], "little"), int.from_bytes(found[3:], "little")


def said_rules(notes: Notes) -> bool | None:
    """Return whether all workers said their rules in these notes; None: none did. No side effects."""
    said = [note is not None and "rule" in note for note in notes.values()]
    return all(said) if any(said) else None


def check_rules(notes: Notes, names: Sequence[str]) -> None:
    """Return if all workers want one rule of the store that they share. No side effects.

    Raises:
        KVError: they do not. All workers raise the same.
    """
    differ = _rules_differ({rank: {**(note or {}), "divided": None} for rank, note in notes.items()}, names)
    if differ:
        raise KVError(
            f"the trainers of the workers ask for different rules of the store: {differ}. fix: make the same changes"
            " (set_learning_rate, set_optimizer_params, multipliers) on all workers before the same step"
        )


def trainer_facts(spec: RuleSpec, names: Sequence[str], updates: bool) -> dict[str, str]:
    """Return what the trainers of all workers must have alike when they are made, by names for people."""
    table = _settings({"rule": spec.to_json(), "divided": None}, names)
    return {"update_on_kvstore": str(updates), **table}


def _rules_differ(notes: Answers, names: Sequence[str]) -> str:
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
            values = ", ".join(f"{value} on {_ranked(ranks)}" for value, ranks in groups.items())
            found.append(f"{name} is {values}")
    if not found:
        return ""
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def _settings(note: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Return what a worker's rule says, by names for people."""
    rule = note["rule"]
    table = {"the optimizer": repr(rule["name"])}
    table.update((name, repr(value)) for name, value in rule["params"].items())
    for word in ("lr_mult", "wd_mult"):
        table.update((f"{word} of parameter {names[index]!r}", repr(number)) for index, number in rule[word])
    divided = note["divided"]
    table["the batch_size of the last update"] = "none" if divided is None else f"{1.0 / divided:g}"
    return table


# The store of a trainer: whether it has one, and whether the store's rule updates the weights.
#
# Source: MXNet's gluon Trainer and its `_create_kvstore`. We differ where it fails or trains wrongly without a word: a
# store is made if the update is asked to happen there, and it is an error to ask for that without a store.


BIG = 16 * 1024 * 1024
"""Above so many elements in one parameter, a store named `local` only sums: its update is one thread's work."""


@dataclass(frozen=True)
class Case:
    """What the decision depends on."""

    kind: str | None
    """The store's type name; None: no store is wanted."""
    is_open: bool = False
    """An open store was given, not a name."""
    is_third_party: bool = False
    """It comes from another package: it knows `broadcast` and `pushpull` of whole arrays."""
    has_optimizer: bool = True
    """It can update weights: `is_capable("optimizer")`."""
    devices: int = 1
    largest: int = 0
    """Elements of the largest parameter."""
    sparse_weight: bool = False
    """Some weight is row-sparse."""
    sparse_grad: bool = False
    """Some gradient is row-sparse."""
    asked: bool | None = None
    """The argument `update_on_kvstore`; None: choose."""
    usual: bool = True
    """MXNET_UPDATE_ON_KVSTORE."""

    @property
    def is_dist(self) -> bool:
        """Tell whether several workers share the store."""
        return self.kind is not None and "dist" in self.kind

    @property
    def is_async(self) -> bool:
        """Tell whether it has no rounds."""
        return self.is_dist and "async" in (self.kind or "")


def decide(case: Case) -> bool:
    """Return whether a store updates the weights.

    Raises:
        KVError: the case asks for what cannot be; the message says what to change.
    """
    has_store = wants_store(case)
    update = _store_updates(case, has_store)
    if update and not has_store:
        raise KVError("update_on_kvstore=True needs a store: give kvstore='local' or another name, not None")
    if update and not case.has_optimizer:
        if case.asked or case.is_async or case.sparse_weight or (case.sparse_grad and case.is_dist):
            raise KVError(f"please set update_on_kvstore=False when training with {case.kind!r}: it cannot update")
        update = False
    if has_store and case.sparse_grad and case.is_third_party:
        raise KVError(
            f"store {case.kind!r} comes from another package and takes no row-sparse gradients; use dense ones"
        )
    return update


def wants_store(case: Case) -> bool:
    """Return whether there is a store; for this it need not be known what the store can.

    Raises:
        KVError: there must be one, and none is wanted.
    """
    if case.kind is None:
        if case.sparse_weight:
            raise KVError("row-sparse weights are kept in a store: give kvstore='local' or another name, not None")
        return False
    # One device of one machine has nothing to sum: a store that is made for it would only copy.
    is_alone = case.kind in ("local", "device") and not case.is_open and case.devices == 1
    return not is_alone or case.sparse_weight or case.asked is True


def _store_updates(case: Case, has_store: bool) -> bool:
    if case.asked is False:
        _may_be_refused(case)
        return False
    if case.asked is True or case.sparse_weight or case.is_async:
        return True
    if case.sparse_grad:
        return case.is_dist
    if case.kind == "local" and not case.is_open and case.largest > BIG:
        return False
    return has_store and case.usual


def _may_be_refused(case: Case) -> None:
    """Return if the update may happen outside the store."""
    if case.sparse_weight:
        raise KVError("cannot set update_on_kvstore=False when row-sparse weights are present: only the store has all")
    if case.sparse_grad and case.is_dist:
        raise KVError(
            f"cannot set update_on_kvstore=False on store {case.kind!r} with row-sparse gradients: leave"
            " update_on_kvstore out, or use dense gradients"
        )
    if case.is_async:
        raise KVError(f"please set update_on_kvstore=True when training in async mode ({case.kind!r})")


# --- the store, opened


@dataclass(frozen=True)
class Opened:
    """A trainer's store."""

    store: KVStoreBase | None
    is_own: bool
    """The trainer made it, and closes it."""
    exchange: StoreExchange | ThirdPartyExchange | None
    updates: bool
    """The store updates the weights."""
    has_rounds: bool
    """Several workers make every step together."""


def updates_itself(params: list[Parameter], given: str | KVStoreBase | None, asked: bool | None) -> bool | None:
    """Return whether the trainer updates the weights, not the store; None: that depends on the store itself.

    Raises:
        KVError: as `open_store`.
    """
    case = _case(params, given, asked)
    if not wants_store(case):
        return True
    if case.kind not in kvstore.TYPES:
        return None
    return not decide(case)


def open_store(
    params: list[Parameter], buffers: Buffers, given: str | KVStoreBase | None, asked: bool | None
) -> Opened:
    """Return the store that parameters are to be trained with, and how.

    Arguments:
        buffers: of the module that the parameters come from.
        given, asked: the trainer's `kvstore` and `update_on_kvstore`.

    Raises:
        KVError: they do not fit the parameters.
    """
    case = _case(params, given, asked)
    if not wants_store(case):
        decide(case)
        return Opened(None, False, None, False, False)
    # Decided before a store by name is made, as far as that is known: making one of a job takes all workers.
    if case.kind in kvstore.TYPES:
        decide(case)
    store: KVStoreBase = kvstore.create(given) if isinstance(given, str) else given  # type: ignore[assignment]
    try:
        return _opened(params, buffers, store, replace(case, kind=store.type), isinstance(given, str))
    except BaseException as err:
        if isinstance(given, str):
            store.give_up(err)
        raise


def leave(store: KVStoreBase, error: BaseException | None) -> None:
    """Close a store; after an error, without waiting for other workers."""
    if isinstance(store, KVStore):
        store.__exit__(None if error is None else type(error), error, None)
    else:
        store.close()


def _opened(params: list[Parameter], buffers: Buffers, store: KVStoreBase, case: Case, is_own: bool) -> Opened:
    if not isinstance(store, KVStore):
        updates = decide(replace(case, is_third_party=True, has_optimizer=False))
        return Opened(store, is_own, ThirdPartyExchange(store, params, buffers), updates, store.num_workers > 1)
    updates = decide(replace(case, has_optimizer=store.is_capable("optimizer")))
    has_rounds = case.is_dist and not case.is_async
    return Opened(store, is_own, StoreExchange(store, params, buffers, updates, has_rounds), updates, has_rounds)


def _case(params: list[Parameter], given: str | KVStoreBase | None, asked: bool | None) -> Case:
    if asked is not None and not isinstance(asked, bool):
        raise KVError(f"update_on_kvstore is True, False or None, not {asked!r}")
    if given is not None and not isinstance(given, (str, KVStoreBase)):
        raise KVError(f"kvstore is the name of a store, an open store or None, not {type(given).__name__}")
    kind = given.type if isinstance(given, KVStoreBase) else given and given.lower()
    return Case(
        kind=kind,
        is_open=given is not None and not isinstance(given, str),
        devices=len(params[0].replicas),
        largest=max(one.size for one in params),
        sparse_weight=any(one.stype != "default" for one in params),
        sparse_grad=any(one.grad_stype != "default" for one in params),
        asked=asked,
        usual=environ.read("MXNET_UPDATE_ON_KVSTORE"),
    )
