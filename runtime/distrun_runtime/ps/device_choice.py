"""Decides on which device of a server the arrays of each store are.

    decide      the choice for one store, from what is known of it. No side effects.
    Placement   a server's devices, and what it has decided

| asked for | stores of kind `dist_device_*` | other stores |
|---|---|---|
| `cpu` | host | host |
| `auto` | the GPU if one is there and they fit, else the host | host |
| `gpu`, `gpu:N` | the GPU | the GPU |

A store whose work a GPU does not do is in the host's memory in any case: one with row-sparse keys, with a rule or
function of the user's, or with a rule that needs norms or depends on the place of each element. With `auto`, a store
fits if its weights, its rule's state, the sums of two rounds and what a message brings take no more than half of the
memory that was free when the first store came, less what the server's other stores there take. If that memory is not
there when values come, the store leaves the GPU. A store that has left the GPU stays away.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.device import Device
from distrun_runtime.arrays.dtypes import DType, is_float, work_dtype
from distrun_runtime.contract import gpus
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import ContractError, KVError
from distrun_runtime.ops import update
from distrun_runtime.ops.optimizers import Rule
from distrun_runtime.ps.routing import message_limit
from distrun_runtime.ps.shards import Store
from distrun_runtime.ps.values import Values

if TYPE_CHECKING:
    from distrun_runtime.arrays.gpu import GpuDevice


ROUNDS = 2
"""Rounds whose sums a store has to have room for."""
ON_CPU = "--server-device cpu (by hand: DISTRUN_SERVER_DEVICE=cpu for every server)"
"""How to have no GPU used."""


@dataclass(frozen=True)
class DeviceChoice:
    """Where a store is."""

    on_gpu: bool
    why: str = ""
    """In words; empty: it goes without saying."""
    is_unexpected: bool = False
    """The user asked for something else, or the store was elsewhere before."""


def decide(asked: str, on_devices: bool, need: int, room: int | None, obstacle: str = "") -> DeviceChoice:
    """Return where a store is, if a GPU is there.

    Arguments:
        asked: `auto`, `cpu`, `gpu` or `gpu:N`.
        on_devices: a worker has created it as a `dist_device_*` store.
        need: bytes that it takes on a GPU.
        room: bytes that the store may take on the GPU; None: any.
        obstacle: why a GPU does not do its work, in words; empty: it does.
    """
    if asked == gpus.CPU or (asked == gpus.AUTO and not on_devices):
        return DeviceChoice(False)
    if obstacle:
        return DeviceChoice(False, obstacle, asked != gpus.AUTO)
    why = f"weights, states and {ROUNDS} rounds need {_mib(need)}"
    if asked == gpus.AUTO and room is not None and need > room:
        left = f"{_mib(max(0, room))} are left of the server's part of the GPU's memory"
        return DeviceChoice(False, f"{why}, and {left}")
    return DeviceChoice(True, why)


def need_of(values: Values, rule: Rule | None) -> int:
    """Return how many bytes a store takes on a GPU at most: of its pool, and in the blocks that it makes there.

    These are its weights, the rule's state, what two rounds keep (a sum, and the contribution that came first as it
    came; in a deterministic store each worker's contribution), what one message brings, plain and scaled, and what
    encoded answers leave out.
    """
    from distrun_runtime.arrays.gpu_memory import rounded  # with the layer over CUDA

    store, total = values.store, 0
    message_bytes = message_limit(sys.maxsize, is_shared=True, is_on_one_host=True, on_devices=store.on_devices)
    for code, arena in values.arenas.items():
        shards = np.flatnonzero(store.dtype[: store.count] == code)
        lengths, work = store.length[shards], work_dtype(arena.dtype).itemsize
        state = {} if rule is None else rule.new_state(np.zeros(1, arena.dtype))
        sizes = [*([arena.dtype.itemsize] * arena.sides), *([] if store.is_deterministic else [work] * ROUNDS)]
        sizes += [each.itemsize for each in state.values() if isinstance(each, np.ndarray)]
        total += sum(rounded(count * size) for size in sizes for count in arena.sizes)
        kept = len(store.members.ranks) if store.is_deterministic else 1
        total += ROUNDS * kept * sum(rounded(length * work) for length in lengths.tolist())
        brought = min(int(lengths.sum()), max(int(lengths.max(initial=0)), message_bytes // arena.dtype.itemsize))
        total += 2 * rounded(brought * work)
        if (values.has_residuals or values.residual) and is_float(arena.dtype):
            total += sum(rounded(length * 4) for length in lengths.tolist())
    return total


def obstacle_of(store: Store, rule: Rule | None) -> str:
    """Return why a GPU does not do a store's work, in words; empty: it does."""
    sparse = np.flatnonzero(store.row_size[: store.count])
    if len(sparse):
        return f"key {store.name(int(store.key[sparse[0]]))!r} is row-sparse"
    if rule is None:
        return ""
    from distrun_runtime.ops import fuse  # with the layer over CUDA

    return fuse.why_not(rule)


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"


def _prepare(gpu: GpuDevice, dtypes: Sequence[DType], rule: Rule | None) -> None:
    """Compile and load the kernels that values of these dtypes and a rule need, so that no round waits for them.

    Not those of codecs, which take as long: the first message that is encoded has them compiled, if no worker of this
    host did so when the compression was set.
    """
    gpu.prepare(dtypes)
    if rule is not None:
        update.prepare(rule, dtypes, gpu)


class Placement:
    """The devices of a server, and which store is on which.

    Arguments:
        host: the device in the host's memory.
        asked: `auto`, `cpu`, `gpu` or `gpu:N`.
        index: which of the GPUs `auto` and `gpu` mean, modulo their number.
        limit: bytes that the server takes on a GPU at most; 0: half of what is free with `auto`, else all.

    Threads: one at a time.
    """

    def __init__(
        self,
        host: Device,
        asked: str = gpus.CPU,
        *,
        index: int = 0,
        limit: int = 0,
    ) -> None:
        self.host = host
        self.asked = asked
        self._index = index
        self._limit = limit
        self.say: Callable[[str, str], None] = lambda level, text: None
        """Writes a line to the server's log, given its level and text."""
        self.gpu: GpuDevice | None = None
        self.failed: KVError | None = None
        """What ended the search for a GPU, and every use of it by this process."""
        self._missing = ""
        """Why there is no GPU, once one was looked for in vain."""
        self._needs: dict[int, int] = {}
        """Stores that are on the GPU, to the bytes that they were found to need."""
        self._away: set[int] = set()
        """Stores that are not to come to the GPU any more."""
        self.let_go: Callable[[], None] = lambda: None
        """Called when memory of the GPU runs out: it drops arrays there that are not in use."""

    def open(self) -> None:
        """Look for the GPU that was asked for by name; with `auto` and `cpu` do nothing.

        Raises:
            ContractError: it is not there; says what is missing.
        """
        if self.asked in (gpus.AUTO, gpus.CPU):
            return
        try:
            self.gpu = self._opened()
        except KVError as err:
            raise ContractError(
                f"--server-device {self.asked} (DISTRUN_SERVER_DEVICE): {err}. To have no GPU used: {ON_CPU}"
            ) from err

    def place(self, values: Values, rule: Rule | None) -> Device:
        """Return the device where a store's arrays belong, and say so if that is new.

        Call it when keys were given their places, when the rule changes, and when residuals come. A store that is on
        the GPU may have to leave it. A GPU has then compiled all that it needs for this store.

        Raises:
            KVError: the GPU that was asked for by name cannot do the work, or a GPU has failed for good. What was
                decided before holds.
        """
        store = values.store
        may_be = self.asked != gpus.CPU and (self.asked != gpus.AUTO or store.on_devices)
        if may_be and store.number not in self._away and not store.is_relayed:
            gpu = self._found(store)
            if gpu is not None and self._goes(values, rule, gpu):
                return gpu
        return self.host

    def give_up(self, values: Values, err: KVError) -> bool:
        """A call of the GPU failed while a store's arrays were to be made there: with `auto`, the store is in the
        host's memory from now on. Return whether it is."""
        if self.asked != gpus.AUTO or self.gpu is None or self.gpu.failed is not None or not err.is_of_device:
            return False
        self._leave(values.store, DeviceChoice(False, str(err), is_unexpected=True))
        return True

    def forget(self, store: int | None = None) -> None:
        """A store, by its number, is closed; None: the job's next script begins, and there are no stores."""
        for number in [*self._needs, *self._away] if store is None else [store]:
            self._needs.pop(number, None)
            self._away.discard(number)
        self.trim()

    def trim(self) -> None:
        """Give memory of the GPU back that no store uses: other processes may want it."""
        if self.gpu is not None and self.gpu.failed is None:
            self.gpu.pool.trim()

    def _goes(self, values: Values, rule: Rule | None, gpu: GpuDevice) -> bool:
        store, number = values.store, values.store.number
        before = self._needs.get(number)
        obstacle = obstacle_of(store, rule)
        # A rule of the user's may not like weights that are not its own.
        need = 0 if obstacle else need_of(values, rule)
        limit = gpu.pool.limit
        room = None if limit is None else limit - sum(self._needs.values()) + (before or 0)
        choice = decide(self.asked, store.on_devices, need, room, obstacle)
        if choice.on_gpu:
            try:
                _prepare(gpu, [arena.dtype for arena in values.arenas.values()], rule)
            except KVError as err:
                if gpu.failed is not None or self.asked != gpus.AUTO:
                    raise
                choice = DeviceChoice(False, str(err), is_unexpected=True)
        if not choice.on_gpu:
            # Who looks for a reason why rounds take longer than before is to find it.
            self._leave(store, replace(choice, is_unexpected=choice.is_unexpected or before is not None))
            return False
        self._needs[number] = need
        if before is None:
            self._say_where(number, gpu.name, choice)
        return True

    def _leave(self, store: Store, choice: DeviceChoice) -> None:
        self._needs.pop(store.number, None)
        self._away.add(store.number)
        store.why_host = choice.why
        self._say_where(store.number, self.host.name, choice)

    def _say_where(self, number: int, device: str, choice: DeviceChoice) -> None:
        level = "WARNING" if choice.is_unexpected else "INFO"
        self.say(level, f"event=device store={number} device={device} reason={choice.why}")

    def _found(self, store: Store) -> GpuDevice | None:
        """Return the GPU; None: there is none, which is said once.

        Raises:
            KVError: a GPU has failed for good, and `failed` says so from now on.
        """
        if self.gpu is None and not self._missing:
            try:
                self.gpu = self._opened()
            except KVError as err:
                if getattr(err, "is_sticky", False):
                    self.failed = err
                    raise
                self._missing = str(err)
                self._say_where(store.number, self.host.name, DeviceChoice(False, self._missing))
        if self.gpu is None:
            store.why_host = self._missing
        return self.gpu

    def _drop_spares(self) -> None:
        self.let_go()  # which may come after the GPU

    def _opened(self) -> GpuDevice:
        _, _, number = self.asked.partition(":")
        seen = devices.gpus()
        gpu = seen.get(int(number) if number else self._index % seen.order.cuda.count())
        free = gpu.free_bytes()
        gpu.pool.limit = self._limit or (free // 2 if self.asked == gpus.AUTO else free)
        gpu.pool.spares = self._drop_spares
        gpu.pool.advice = "fix: launch with " + ON_CPU
        return gpu
