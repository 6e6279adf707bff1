"""The arrays of one store on a server: values, sums of rounds, states of rules, and who reads what.

Values of one dtype lie in an arena, in the order in which keys were initialised; a shard's index is what finds it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any, NamedTuple, Union, cast
from weakref import WeakValueDictionary

import numpy as np

from distrun_runtime.arrays.device import Arena, ArrayPlace, Device, DeviceArray, Run, copy, is_on_host, move, on_host
from distrun_runtime.arrays.dtypes import ALIGNED, Array, Buffer, DType, work_dtype
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops import update
from distrun_runtime.ops.optimizers import Knobs, NormRule, Prepared
from distrun_runtime.ops.reduce import Contribution, Dense, Sum
from distrun_runtime.protocol.message import DTYPES
from distrun_runtime.ps import statefile
from distrun_runtime.ps.shards import Store

ALIGNED_BYTES = 64 * 1024
"""Shards of at least so many bytes begin with a page of memory."""

Index = Union[int, slice, Array]
"""Of shards in a flat array."""
Extent = Mapping[int, tuple[int, int]]
"""How far arenas are used, by code of dtype."""


@dataclass(eq=False)
class PushedValues:
    """The elements that a message brings to shards of one dtype, cut where they are not neighbours in the arena."""

    shards: Array
    runs: list[Run]
    parts: list[DeviceArray]
    """For each run its elements, in the dtype or its work dtype."""

    def is_like(self, other: PushedValues) -> bool:
        """Whether both have the same runs of the same shards."""
        if self.shards is not other.shards and not np.array_equal(self.shards, other.shards):
            return False
        return self.runs == other.runs

    def take(self, at: Array, values: Values) -> PushedValues:
        """Return what is given to some of the shards, each by itself."""
        wanted, offset = set(at.tolist()), 0
        found: list[Run] = []
        parts: list[DeviceArray] = []
        for run, part in zip(self.runs, self.parts, strict=True):
            for _, one, [piece] in values.apart(self.shards, run, [part]):
                if one.first in wanted:
                    found.append(Run(len(found), len(found) + 1, one.begin, one.end, offset))
                    parts.append(piece)
                    offset += len(piece)
        return PushedValues(self.shards[at], found, parts)


@dataclass(eq=False)
class ShardProgress:
    """How far all shards of some set are, while they are in step: then they have had the same rounds, and what came for
    the next one is here."""

    number: int
    """What the shards have in `Store.progress` if no other set has changed their rounds since."""
    version: int = -1
    """Of the server, when that was last known."""
    done: int = 0
    """The round that is over."""
    side: int = -1
    """Of the arena that has the present values; -1: they are on several."""
    came: set[int] = field(default_factory=set)
    """Rows of the workers that have contributed to the next one."""
    kept: list[int] = field(default_factory=list)
    """Their messages, by the numbers in `Server.kept`."""
    parts: list[Array] = field(default_factory=list)
    """What the first of them brings to the runs of a set, if no other contribution came."""
    of: ShardSet | None = None
    """That set."""
    total: Arena | None = None
    """The sum of those that came, if they are several."""

    def begin_round(self, values: Values) -> None:
        """Nothing came for the next round."""
        self.came.clear()
        self.kept.clear()
        self.parts = []
        if self.total is not None and self.of is not None:
            values.spare_sums.setdefault(self.of.code, []).append(self.total)
        self.of = self.total = None

    def addends(self, values: Values, of: ShardSet, parts: list[Array]) -> list[tuple[Array, ...]]:
        """Return for each run what is to be added: what has come so far, and what comes now."""
        if self.of is None:
            return [(part,) for part in parts]
        if self.of is not of and self.total is None:  # They come in other frames.
            first, self.total = self.of, values.spare_arena(self.of.code)
            values.device.sums(
                [((part,), there) for part, there in zip(self.parts, first.views(self.total), strict=True)]
            )
        return list(zip(self.parts if self.total is None else of.views(self.total), parts, strict=True))

    def add(self, values: Values, of: ShardSet, parts: list[Array]) -> None:
        """Take in a contribution that is not the last one."""
        if self.of is None:
            self.of, self.parts = of, parts
            return
        addends = self.addends(values, of, parts)
        self.total = values.spare_arena(of.code) if self.total is None else self.total
        values.device.sums(zip(addends, of.views(self.total), strict=True))


@dataclass(eq=False)
class ShardSet:
    """Shards of one dtype whose values come by one message again and again (`ps.steady`)."""

    shards: Array
    first: int
    code: int
    """Of their dtype."""
    index: Index
    """Indexes flat arrays by them: by the one, or by a slice where they follow each other, which is quicker."""
    layout: Layout
    size: int
    """Bytes of their values."""
    progress: ShardProgress
    targets: dict[int, list[Array]] = field(default_factory=dict)
    """By the side of the arena: what the runs of the layout have there."""
    frames: dict[int, list[Buffer]] = field(default_factory=dict)
    """By the side: the values as an answer has them."""

    def views(self, arena: Arena, side: int = 0) -> list[DeviceArray]:
        """Return what the runs have in an arena."""
        return [arena.view(run.begin, run.end, side) for run in self.layout.runs]

    def has(self, table: Array, number: int) -> bool:
        """Whether all the shards have this number in a flat int64 array."""
        if len(self.shards) == 1:
            return bool(table.item(self.first) == number)
        return number.to_bytes(8, sys.byteorder, signed=True) * len(self.shards) == table[self.index].tobytes()


class LayoutRuns(list[Run]):
    """The runs of a layout. Where others come again they are made anew, so nothing is kept of these."""

    are_used = False
    """Their shards have been updated together."""


class Layout(NamedTuple):
    """Where the elements of a message's shards are, in the arena and in its frames."""

    shards: Array
    runs: LayoutRuns
    places: list[tuple[int, int, int]]
    """For each run its frame, and its first and last element in it."""


@dataclass(eq=False)
class Round:
    """The sums of one round so far."""

    where: Array
    """For each shard the number of the contribution that is all of its sum, or where the sum is; 0: nothing came."""
    open: int = 0
    """How many shards have a sum here."""
    held: dict[int, PushedValues] = field(default_factory=dict)
    """Contributions that are all of some shards' sums so far, by their numbers: they are referred to, not copied."""
    by_shard: dict[int, Sum] = field(default_factory=dict)
    """Sums that go by shard."""
    by_rank: dict[int, list[tuple[int, Contribution]]] = field(default_factory=dict)
    """Of deterministic stores: shard to what each rank gave."""
    arenas: dict[int, Arena] = field(default_factory=dict)
    """Sums in the work dtype, by code of the values' dtype."""
    lost: dict[int, tuple[BaseException, str]] = field(default_factory=dict)
    """Shard to why a contribution to it could not be added, with the traceback."""

    def hold(self, index: Index, given: PushedValues) -> None:
        """Keep what is given to shards that have no sum yet."""
        number = next(reversed(self.held), 0) + 1  # The last one has the highest number.
        self.held[number] = given
        self.where[index] = number


@dataclass(frozen=True)
class OpenUpdate:
    """An update between its two phases: it waits for norms."""

    rule: NormRule
    knobs: Knobs
    prepared: Prepared


class CopiedShards:
    """Where bytes of shards are in host memory because replies carry them now: others can carry the same.

    They stay no longer than the replies.
    """

    def __init__(self) -> None:
        self._memory: WeakValueDictionary[int, Array] = WeakValueDictionary()
        """By number, from 1."""
        self._count = 0
        self._where = np.zeros((3, 0), np.int64)
        """For each shard the number of the memory, 0: none; where it begins there; and which side was copied."""

    def grow(self, count: int) -> None:
        """Be ready for so many shards."""
        self._where = np.pad(self._where, ((0, 0), (0, count - self._where.shape[1])))

    def add(self, shards: Array, sides: Array, places: Array, memory: Array) -> int:
        """Note where in some memory shards are that were copied; return the memory's number."""
        self._count += 1
        # The array that all its parts refer to, which begins at the same place: it ends with the last reply.
        self._memory[self._count] = memory.base if isinstance(memory.base, np.ndarray) else memory
        self._where[:, shards] = np.stack([np.full_like(shards, self._count), places, sides])
        return self._count

    def find(self, shards: Array, sides: Array) -> tuple[Array, Array, dict[int, Array]]:
        """Return for each shard a number, 0: it was not copied; and a place; and the memory of each number."""
        numbers, places, copied = self._where[:, shards]
        numbers[copied != sides] = 0
        memory = {}
        for number in np.unique(numbers[numbers > 0]).tolist():
            found = self._memory.get(number)
            if found is None:
                numbers[numbers == number] = 0
            else:
                memory[number] = found
        return numbers, places, memory

    def forget(self, shards: Array) -> None:
        """The shards are written: what was copied is past."""
        if self._count:
            self._where[0, shards] = 0


class Values:
    """The arrays of one store, all on one device.

    On a GPU, weights are dense and are updated by kernels: rules that cannot be fused and rows are refused there.

    Arguments:
        is_sent: values are sent to other processes, which may map large ones.
    """

    def __init__(self, store: Store, device: Device, *, is_sent: bool = True) -> None:
        self.store = store
        self._is_sent = is_sent
        self.host = device
        """Has the answers of a store that is on a GPU."""
        self.device = device
        store.device = device.name
        self.arenas: dict[int, Arena] = {}
        """By code of dtype."""
        self.at = np.zeros(0, np.int64)
        """Position of each shard in the arena of its dtype."""
        self.side = np.zeros(0, np.int64)
        """The side of the arena that has a shard's present value."""
        self.lent = np.zeros((1, 0), np.int64)
        """By side and shard: how many replies read it."""
        self.lending = 0
        """How many replies read any."""
        self.copies = CopiedShards()
        """Of shards that are on a GPU."""
        self.shared_copies = CopiedShards()
        """Of these, copies on the GPU that processes of this host read there."""
        self.layouts: dict[tuple[int, tuple[int, ...]], Layout] = {}
        """By id of the array of shards, and the elements of the frames."""
        self.plans: dict[tuple[Any, ...], Any] = {}
        """What is known of messages that come again (`ps.steady`), and their `ShardSet`s."""
        self.plan_bytes = 0
        """About how much memory that takes."""
        self.plans_refused, self.plans_since = 0, 0
        """How many messages had no room there since some were forgotten, and the server's version then."""
        self.step_plans: dict[int, Any] = {}
        """By id of the runs: the rule's steps over shards that are updated together again and again (`arithmetic`)."""
        self.rounds: dict[int, Round] = {}
        self.spare_sums: dict[int, list[Arena]] = {}
        """Arenas of sums that are not used at the moment: memory that was written once stays."""
        self.rule: rules.Rule | None = None
        self.spec: rules.RuleSpec | None = None
        self.flat: dict[int, bool] = {}
        """Code of dtype to whether the rule steps over runs of shards."""
        self.flat_state: dict[int, dict[str, Arena]] = {}
        """Code of dtype to the arenas of the rule's state, by name."""
        self.steps = np.zeros(0, np.int64)
        """Updates of each shard whose state is flat; -1: none, and no state."""
        self.knobs: dict[int, Knobs] = {}
        """Shard to what its key has for itself, as far as that was asked for."""
        self.state: dict[int, dict[str, Any]] = {}
        """Shard to what a rule remembers that goes by shard."""
        self.open_updates: dict[int, dict[tuple[int, int], OpenUpdate]] = {}
        """Shard to (rank, round) to an update that waits for norms."""
        self.round_rows: dict[int, Array | None] = {}
        """Row-sparse shard to the rows that the last round brought; None: all."""
        self.residual: dict[int, DeviceArray] = {}
        """Shard to what encoded answers left out so far, float32."""
        self.has_residuals = False
        """Encoded answers were asked for that leave something out."""
        self.encoded: dict[int, dict[tuple[Any, ...], Buffer]] = {}
        """Shard to its value as encoded answers carry it, by codec and parameters: made once a round."""
        self.spare: dict[tuple[int, int, bool], list[int]] = {}
        """Deleted shards whose places are free: by code of dtype, elements, and whether they begin with a page."""
        self.staged: list[statefile.Staged | None] = []
        """For each shard what was read of saved states and is not taken over yet."""

    # Places

    @property
    def is_on_host(self) -> bool:
        """Whether the arrays are numpy's."""
        return not self.device.is_gpu

    def move(self, device: Device) -> None:
        """Have all arrays on another device: values, sums of open rounds, states, and what answers left out.

        Replies that were made before keep what they carry.

        Raises:
            KVError: the store has what only the host's memory can hold: rows, or a rule that cannot be fused. Or memory
                runs out, or another call of a GPU fails: then all arrays are where they were.
        """
        self._refuse(device, self.rule, np.arange(self.store.count))
        self.spare_sums.clear()
        move(self._places(), device)
        for arena in self._arenas():
            arena.make_on(device)
        self.device = device
        self.store.device = device.name
        self.plans.clear()
        self.plan_bytes = 0
        self.step_plans.clear()

    def _arenas(self) -> Iterator[Arena]:
        """Yield the arenas in use: of values, states, and sums of open rounds."""
        yield from self.arenas.values()
        for states in self.flat_state.values():
            yield from states.values()
        for of in self.rounds.values():
            yield from of.arenas.values()

    def _places(self) -> Iterator[ArrayPlace]:
        """Yield where arrays of the device are referred to."""
        for arena in self._arenas():
            yield from arena.places()
        for of in self.rounds.values():
            for given in of.held.values():
                yield from (
                    ArrayPlace(part, partial(given.parts.__setitem__, at)) for at, part in enumerate(given.parts)
                )
            for total in of.by_shard.values():
                if total.dense is not None:
                    yield ArrayPlace(total.dense.values, partial(_set_total, total))
            for known in of.by_rank.values():
                for at, (rank, each) in enumerate(known):
                    if isinstance(each, Dense):  # rows are only in the host's memory
                        yield ArrayPlace(each.values, partial(_set_contribution, known, at, rank))
        for shard, rest in self.residual.items():
            yield ArrayPlace(rest, partial(self.residual.__setitem__, shard))

    def _refuse(self, device: Device, rule: rules.Rule | None, shards: Array) -> None:
        """Refuse what a GPU does not do for these shards."""
        if not device.is_gpu:
            return
        if self.store.row_size[shards].any():
            raise KVError(f"store {self.store.number} has row-sparse keys: its values cannot be on {device.name}")
        if rule is not None and not update.can_fuse(rule):
            where = f"store {self.store.number}: weights on {device.name}"
            raise KVError(f"{where} cannot be updated by rule {rule.name!r}")

    def place(self, shards: Array, code: int) -> None:
        """Give new shards of one dtype their places, next to each other; memory is taken when they are written."""
        most = self.store.count
        if most > len(self.at):
            room = len(self.store.key)
            for name in ("at", "side", "lent", "steps"):
                old = getattr(self, name)
                new = np.zeros((*old.shape[:-1], room), old.dtype)
                new[..., : old.shape[-1]] = old
                if name == "steps":
                    new[old.shape[-1] :] = -1
                setattr(self, name, new)
            self.copies.grow(room)
            self.shared_copies.grow(room)
            for each in self.rounds.values():
                each.where = np.concatenate([each.where, np.zeros(room - len(each.where), np.int64)])
        arena = self.arenas.get(code)
        if arena is None:
            arena = self.arenas[code] = Arena(self.device, DTYPES[code], is_sent=self._is_sent)
            while arena.sides < len(self.lent):
                arena.add_side()
        lengths = self.store.length[shards]
        # What may be one of several pieces of a value.
        is_large = (self.store.offset[shards] > 0) | (lengths * arena.dtype.itemsize >= ALIGNED_BYTES)
        if self.spare:
            reused = [
                self._reuse(code, *its)
                for its in zip(shards.tolist(), lengths.tolist(), is_large.tolist(), strict=True)
            ]
            fresh = np.array([not each for each in reused])
            shards, lengths, is_large = shards[fresh], lengths[fresh], is_large[fresh]
        # Kernels work best on values that begin as those of other libraries do.
        multiple = ALIGNED if self.device.is_gpu and not self._is_sent else 1
        self.at[shards] = arena.reserve(lengths, is_large & self._is_sent, multiple)

    def _reuse(self, code: int, shard: int, length: int, is_large: bool) -> bool:
        """Give a new shard the place of a deleted one, if there is one that no reply reads."""
        places = self.spare.get((code, length, is_large), ())
        for number, old in enumerate(places):
            if not self.lent[:, old].any():
                self.at[shard] = self.at[old]
                del self.spare[code, length, is_large][number]
                return True
        return False

    def forget(self, shards: Array) -> None:
        """Forget shards, before `Store.forget`; others of their lengths will have their places."""
        for code, its, _ in self.codes(shards):
            for shard in its.tolist():
                length = int(self.store.length[shard])
                is_large = self.store.offset[shard] > 0 or length * DTYPES[code].itemsize >= ALIGNED_BYTES
                self.spare.setdefault((code, length, bool(is_large)), []).append(shard)
        self.steps[shards] = -1
        self.note_writes(shards)
        for known in (self.state, self.residual, self.knobs, self.open_updates, self.round_rows):
            for shard in shards.tolist():
                cast(dict[int, Any], known).pop(shard, None)
        for plans in (self.plans, self.layouts, self.step_plans):
            cast(dict[Any, Any], plans).clear()
        self.plan_bytes = 0

    def extent(self) -> Extent:
        """Return what `take_back` takes."""
        return {code: arena.extent() for code, arena in self.arenas.items()}

    def take_back(self, extent: Extent, shards: Array) -> None:
        """Take back the places of the shards that came last, and were given them since `extent` was returned."""
        for code, arena in self.arenas.items():
            arena.take_back(extent.get(code, (0, 0)))
        known = shards[shards < len(self.at)]
        self.at[known], self.side[known], self.steps[known] = 0, 0, -1
        for shard in known.tolist():
            self.state.pop(shard, None)

    def side_of(self, of: ShardSet) -> int:
        """Return the side that has the present values of all these shards; -1: they are on several."""
        side = int(self.side[of.first])
        return side if of.has(self.side, side) else -1

    def codes(self, shards: Array) -> list[tuple[int, Array, Array | None]]:
        """Return each code of dtype among shards, those that have it, and where these are among all; None: they are
        all."""
        found = self.store.dtype[shards]
        if not len(found) or (found == found[0]).all():
            return [(int(found[0]), shards, None)] if len(found) else []
        places = [(int(code), np.flatnonzero(found == code)) for code in np.unique(found)]
        return [(code, shards[at], at) for code, at in places]

    def weight(self, shard: int) -> DeviceArray:
        """Return the present value of a shard, flat; not to be written."""
        return self.view(shard, int(self.side[shard]))

    def view(self, shard: int, side: int) -> DeviceArray:
        """Return what one side has of a shard, flat."""
        return self.arenas[int(self.store.dtype[shard])].view(*self.span(shard), side)

    def span(self, shard: int) -> tuple[int, int]:
        """Return the positions of a shard's first element and behind its last one."""
        begin = int(self.at[shard])
        return begin, begin + int(self.store.length[shard])

    def named(self, shard: int) -> str:
        """Return what a shard is of, for people: `key 'w' of shape (2, 3)`."""
        key = int(self.store.key[shard])
        return f"key {self.store.name(key)!r} of shape {self.store.shapes.get(key, ())}"

    def row_count(self, shard: int) -> int:
        """Return a shard's number of rows; 0: its value is not row-sparse."""
        width = int(self.store.row_size[shard])
        return int(self.store.length[shard]) // width if width else 0

    def own(self, shard: int, keep: bool = True) -> DeviceArray:
        """Return a shard's value to be written: another side, with `keep` a copy of it, if it is lent."""
        present, side = self.weight(shard), int(self.side[shard])
        self.note_writes(np.array([shard]))
        if not self.lent[side, shard]:
            return present
        self.side[shard] = self.free_side(side, shard)
        target = self.weight(shard)
        if keep:
            self.device.sum([present], target)
        return target

    def free_side(self, present: int, shards: Index) -> int:
        """Return a side on which no reply reads any of the shards; the present one if that is."""
        for side in (present, *range(len(self.lent))):
            if not self.lent[side, shards].any():
                return int(side)
        for arena in self.arenas.values():
            while arena.sides <= len(self.lent):
                arena.add_side()
        self.lent = np.concatenate([self.lent, np.zeros((1, self.lent.shape[1]), np.int64)])
        return len(self.lent) - 1

    def gather(self, shards: Array) -> None:
        """Have on one side what is on several, if no reply reads it: then calls go over all of it again."""
        sides = self.side[shards]
        if (sides == sides[0]).all() or self.lent[:, shards].any():
            return
        for shard in shards[sides != sides[0]].tolist():
            present, self.side[shard] = self.weight(shard), sides[0]
            self.device.sum([present], self.weight(shard))

    def note_writes(self, shards: Array) -> None:
        """The values change: what was encoded or copied of them is past."""
        self.copies.forget(shards)
        self.shared_copies.forget(shards)
        if self.encoded:
            for shard in shards.tolist():
                self.encoded.pop(shard, None)

    def cut(
        self, shards: Array, found: Sequence[Run], parts: Iterable[Sequence[DeviceArray]]
    ) -> Iterator[tuple[Array, Run, Sequence[DeviceArray], int]]:
        """Yield parts of runs that lie on one side: shards, run, parts, and the side to write."""
        for_all = self._side_to_write(shards)  # Mostly there is one.
        for run, given in zip(found, parts, strict=True):
            here = shards[run.first : run.last]
            side = self._side_to_write(here) if for_all is None else for_all
            if side is not None:
                yield here, run, given, side
                continue
            for shard, one, pieces in self.apart(shards, run, given):
                alone = np.array([shard])
                yield alone, one, pieces, self.free_side(int(self.side[shard]), alone)

    def _side_to_write(self, shards: Array) -> int | None:
        """Return the side to which new values of shards go that are on one side and lent alike; None: they are not."""
        sides = self.side[shards]
        lent = self.lent[sides[0], shards]
        is_one = (sides == sides[0]).all() and (lent.all() or not lent.any())
        return self.free_side(int(sides[0]), shards) if is_one else None

    def apart(
        self, shards: Array, run: Run, parts: Sequence[DeviceArray]
    ) -> Iterator[tuple[int, Run, list[DeviceArray]]]:
        """Yield each shard of a run by itself, with its elements of the run's parts."""
        at = 0
        for number, shard in enumerate(shards[run.first : run.last].tolist(), run.first):
            end = at + int(self.store.length[shard])
            yield shard, Run(number, number + 1, run.begin + at, run.begin + end, 0), [part[at:end] for part in parts]
            at = end

    # Sums

    def write_sums(
        self, code: int, shards: Array, found: Sequence[Run], parts: Iterable[Sequence[DeviceArray]]
    ) -> None:
        """Write the sums of the parts of each run, which are the values of shards of one dtype from then on."""
        arena, sums, sides = self.arenas[code], [], []
        for here, piece, addends, side in self.cut(shards, found, parts):
            sums.append((addends, arena.view(piece.begin, piece.end, side)))
            sides.append((here, side))
        self.device.sums(sums)
        for here, side in sides:
            self.side[here] = side

    def targets(self, of: ShardSet, side: int) -> list[Array]:
        """Return what the runs of shards have on a side of their arena."""
        if side not in of.targets:
            of.targets[side] = of.views(self.arenas[of.code], side)
        return of.targets[side]

    def write_alike(self, of: ShardSet, addends: Sequence[Sequence[DeviceArray]], side: int) -> None:
        """Write sums, which are the values of shards on this side from then on."""
        self.device.sums(zip(addends, self.targets(of, side)))  # noqa: B905 (as many)
        if side != of.progress.side:
            self.side[of.index] = of.progress.side = side

    def round_of(self, number: int) -> Round:
        """Return the sums of a round."""
        found = self.rounds.get(number)
        if found is None:
            found = self.rounds[number] = Round(np.zeros(len(self.at), np.int64))
        return found

    def sums(self, of: Round, code: int) -> Arena:
        """Return where the sums of a round are."""
        if code not in of.arenas:
            of.arenas[code] = self.spare_arena(code)
        return of.arenas[code]

    def spare_arena(self, code: int) -> Arena:
        """Return a place for sums that are not used at the moment."""
        spare, like = self.spare_sums.setdefault(code, []), self.arenas[code]
        return spare.pop() if spare else Arena(self.device, work_dtype(like.dtype), like)

    def lose(self, number: int, shards: Array, error: BaseException, trace: str) -> None:
        """A contribution to a round of shards could not be added: their sums are of no use."""
        of = self.round_of(number)
        of.lost.update(dict.fromkeys(shards.tolist(), (error, trace)))

    def lost(self, number: int, shards: Array) -> tuple[BaseException, str] | None:
        """Return why a contribution to a round of shards is missing, with the traceback; None: none is."""
        of = self.rounds.get(number)
        if of is None or not of.lost:
            return None
        return next((of.lost[shard] for shard in shards.tolist() if shard in of.lost), None)

    def forget_sums(self, number: int, shards: Array) -> None:
        """The sums of some shards are used, or not wanted."""
        of = self.rounds.get(number)
        if of is None:
            return
        of.open -= int(np.count_nonzero(of.where[shards]))
        of.where[shards] = 0
        for shard in shards.tolist() if of.lost else ():
            of.lost.pop(shard, None)
        for known in (of.by_shard, of.by_rank) if of.by_shard or of.by_rank else ():
            for shard in shards.tolist():
                cast(dict[int, Any], known).pop(shard, None)
        if of.open <= 0:
            self._close(number, of)

    def _close(self, number: int, of: Round) -> None:
        for code, arena in of.arenas.items():
            self.spare_sums.setdefault(code, []).append(arena)
        del self.rounds[number]

    # States of a rule

    def is_flat(self, code: int) -> bool:
        """Whether the rule steps over runs of shards of a dtype."""
        if code not in self.flat:
            assert self.rule is not None
            self.flat[code] = update.is_flat(self.rule, DTYPES[code])
        return self.flat[code]

    def goes_flat(self, shard: int) -> bool:
        """Whether the rule steps over runs with this shard."""
        return not self.store.row_size[shard] and self.is_flat(int(self.store.dtype[shard]))

    def knobs_of(self, shard: int) -> Knobs:
        """Return what a shard's key has for itself."""
        found = self.knobs.get(shard)
        if found is None:
            assert self.spec is not None
            key = self.store.name(int(self.store.key[shard]))
            found = self.knobs[shard] = self.spec.knobs(key, int(self.store.offset[shard]))
        return found

    def state_of(self, shard: int) -> dict[str, Any] | None:
        """Return what the rule remembers of a shard: views where it is flat; None before its first step."""
        if self.rule is None or not self.goes_flat(shard):
            return self.state.get(shard)
        if self.steps[shard] < 0:
            return None
        begin, end = self.span(shard)
        arenas = self.flat_state.get(int(self.store.dtype[shard]), {})
        return {"updates": int(self.steps[shard]), **{name: arena.view(begin, end) for name, arena in arenas.items()}}

    def set_state(self, shard: int, state: Mapping[str, Any] | None) -> None:
        """Put a rule's state of a shard in place of what is there; None: it was never updated."""
        self.state.pop(shard, None)
        self.steps[shard] = -1
        if state is None:
            return
        if self.rule is None or not self.goes_flat(shard):
            self.state[shard] = dict(state)
            return
        begin, end = self.span(shard)
        code = int(self.store.dtype[shard])
        for name, value in state.items():
            if name != "updates":
                arena = self._state_arena(code, name, value.dtype)
                flat = value.reshape(-1)
                copy(flat.astype(arena.dtype, copy=False) if is_on_host(flat) else flat, arena.view(begin, end))
        self.steps[shard] = int(state.get("updates", 0))

    def start_state(self, code: int, shards: Array, begin: int, end: int, weight: DeviceArray) -> None:
        """Make the state of shards that were never updated, which lie next to each other."""
        assert self.rule is not None
        update.new_state(self.rule, weight, lambda name, dtype: self._state_arena(code, name, dtype).view(begin, end))
        self.steps[shards] = 0

    def renew_master(self, shard: int) -> None:
        """Take a weight that was assigned into its float32 master, if the rule keeps one."""
        state = self.state_of(shard)
        if state is None or "master" not in state:
            return
        master = on_host(state["master"])
        rules.renew_master(on_host(self.weight(shard)), {"master": master})
        if master is not state["master"]:
            copy(master, state["master"])

    def residual_of(self, shard: int) -> DeviceArray:
        """Return what encoded answers have left out of a shard so far; zeros at first."""
        found = self.residual.get(shard)
        if found is None:
            zeros = np.zeros(int(self.store.length[shard]), np.float32)
            found = self.residual[shard] = zeros if self.is_on_host else self.device.put(zeros)
        return found

    def saved(self) -> list[statefile.Saved]:
        """Return all shards as they are saved: views of weights and states where they are."""
        places = zip(self.store.key.tolist(), self.store.offset.tolist(), range(self.store.count), strict=False)
        return [
            statefile.Saved(key, offset, self.weight(shard), self.state_of(shard), self.residual.get(shard))
            for key, offset, shard in places
        ]

    def restore(self, staged: Iterable[tuple[int, statefile.Staged | None]]) -> None:
        """Put what was read for shards in its place."""
        self.rounds.clear()
        self.step_plans.clear()
        for shard, read in staged:
            if read is None:
                continue
            copy(read.weight, self.own(shard, keep=False))
            self.residual.pop(shard, None)
            if read.residual is not None:
                self.residual[shard] = read.residual if self.is_on_host else self.device.put(read.residual)
            self.set_state(shard, read.state)

    def _state_arena(self, code: int, name: str, dtype: DType) -> Arena:
        arenas = self.flat_state.setdefault(code, {})
        if name not in arenas:
            arenas[name] = Arena(self.device, dtype, self.arenas[code])
        return arenas[name]

    def set_rule(self, rule: rules.Rule | None, spec: rules.RuleSpec | None) -> None:
        """Install a rule; what state both rules know goes on. A user's rule may raise: then nothing has changed."""
        self._refuse(self.device, rule, np.arange(self.store.count))
        self.step_plans.clear()
        if rule is not None and self.rule is not None and self.keeps_state(rule):
            self.rule, self.spec, self.knobs = rule, spec, {}
            return
        carried: dict[int, dict[str, Any]] = {}
        for shard in range(self.store.count):
            state = self.state_of(shard)
            if rule is not None and state is not None:
                weight = self.weight(shard)
                state = rules.carry_state(rule, weight, state, update.new_state(rule, weight))
                # A copy: what is flat now may be written to other arenas.
                carried[shard] = _copied(self.device, state)
        self.rule, self.spec = rule, spec
        self.flat, self.flat_state, self.knobs, self.state = {}, {}, {}, {}
        self.steps[:] = -1
        for shard, state in carried.items():
            self.set_state(shard, state)

    def keeps_state(self, rule: rules.Rule) -> bool:
        """Whether a rule has the same state as the present one, all of it flat."""
        assert self.rule is not None
        if rule.name != self.rule.name or self.state or self.store.row_size[: self.store.count].any():
            return False
        stepped = set(self.store.dtype[np.flatnonzero(self.steps >= 0)].tolist())
        for code in self.arenas:
            if not self.is_flat(code) or not update.is_flat(rule, DTYPES[code]):
                return False
            state, present = rule.new_state(np.zeros((1,), DTYPES[code])), self.flat_state.get(code, {})
            # Arenas may be there though no shard was stepped: older states were restored.
            if (present or code in stepped) and {"updates", *present} != set(state):
                return False
        return True


def _set_total(total: Sum, values: DeviceArray) -> None:
    total.dense = Dense(values, is_own=True)


def _set_contribution(known: list[tuple[int, Contribution]], at: int, rank: int, values: DeviceArray) -> None:
    known[at] = rank, Dense(values, is_own=True)


def _copied(device: Device, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state; on a GPU it has arrays, and `updates`."""
    if device.is_gpu:
        return update.state_on(state, device)
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in state.items()}
