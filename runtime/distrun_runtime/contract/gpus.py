"""Which GPUs a task sees: `gpus=` of a hosts file, CUDA_VISIBLE_DEVICES of a place, and what its driver tells.

Also the device of a server (`--server-device`), which counts the GPUs that the server sees.

GPUs are named as CUDA_VISIBLE_DEVICES names them: by number, in the order of their PCI addresses, or by UUID, of which
the beginning is enough. They are NVIDIA's; nothing is known here of others.
"""

from __future__ import annotations

import re
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

from distrun_runtime.contract.dataclass import read

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
BY_PCI = "PCI_BUS_ID"
"""Value of ORDER by which CUDA numbers GPUs as nvidia-smi and hosts files do; its own default is fastest first."""
KIND = "gpus"
"""`kind` of a host with other GPUs than it is said to have, or too few."""
NO_DRIVER = "neither the library of NVIDIA's driver nor nvidia-smi is there"

AUTO, CPU, ANY_GPU = "auto", "cpu", "gpu"
"""Devices of a server: each store where it fits, all in the host's memory, all on a GPU. `gpu:N` is a certain one."""
DEVICES = "auto, cpu, gpu or gpu:N (cuda, cuda:N)"
"""What names the device of a server, in words."""

_NUMBER = r"(?a)[0-9]{1,4}"
_DEVICE = r"(?a)auto|cpu|(?:gpu|cuda)(:[0-9]{1,4})?"
_UUID = r"(?i)GPU-[0-9a-f-]{1,36}|MIG-[0-9a-f-]{1,36}|MIG-GPU-[0-9a-f-]{1,36}/[0-9]{1,3}/[0-9]{1,3}"


class Gpu(NamedTuple):
    """One GPU as the driver tells of it."""

    number: int
    uuid: str = ""
    name: str = ""
    memory: Optional[int] = None
    """Bytes."""
    instances: Optional[Tuple[str, ...]] = None
    """UUIDs of its MIG instances; None: it is not divided, and is used whole."""


class HostGpus(NamedTuple):
    """What a host's driver tells of its GPUs."""

    how: str = ""
    """What tells: `nvml` (the driver's library) or `smi` (the program nvidia-smi); empty: nothing."""
    driver: str = ""
    """Its version."""
    gpus: Tuple[Gpu, ...] = ()
    error: str = ""
    """Why it tells nothing, if there is a driver."""

    @property
    def names(self) -> Tuple[str, ...]:
        """What CUDA can be given: numbers, and UUIDs for the instances of a GPU that is divided (MIG)."""
        return tuple(
            name for gpu in self.gpus for name in ((str(gpu.number),) if gpu.instances is None else gpu.instances)
        )

    @property
    def kinds(self) -> str:
        """How many there are of which kind, in words: `2 x NVIDIA A100, 40 GiB`."""
        counts: Dict[str, int] = {}
        for gpu in self.gpus:
            size = "" if gpu.memory is None else f", {gpu.memory / (1 << 30):.0f} GiB"
            parts = "" if gpu.instances is None else f", {len(gpu.instances)} MIG instances"
            kind = f"{gpu.name or 'of unknown kind'}{size}{parts}"
            counts[kind] = counts.get(kind, 0) + 1
        return "; ".join(f"{count} x {kind}" for kind, count in counts.items())

    @property
    def source(self) -> str:
        """Who tells, in words."""
        return f"NVIDIA's driver {self.driver}" if self.driver else "NVIDIA's driver"


class View(NamedTuple):
    """The GPUs that the tasks of a place may see."""

    names: Tuple[str, ...] = ()
    source: str = ""
    """The source, in words; empty: none are known."""
    is_inherited: bool = False
    """They are those of the CUDA_VISIBLE_DEVICES that the place has, or some of them."""


class GpusUnfit(Exception):
    """The GPUs of a place are not those that are wanted. The text says what is wanted and what was found."""

    def __init__(self, text: str, fix: str) -> None:
        super().__init__(text)
        self.fix = fix


def is_list(text: str) -> bool:
    """Return whether a text names GPUs: different numbers, or different UUIDs, with commas between; one may end it."""
    items = text[:-1].split(",") if text.endswith(",") else text.split(",")
    if all(re.fullmatch(_NUMBER, item) for item in items):
        return len({int(item) for item in items}) == len(items)
    return all(re.fullmatch(_UUID, item) for item in items) and len({item.lower() for item in items}) == len(items)


def is_count(text: str) -> bool:
    """Return whether a text is how many GPUs, not which."""
    return bool(re.fullmatch(_NUMBER, text))


def listed(said: str) -> Tuple[str, ...]:
    """Return the GPUs that `gpus=` names: of `4` the first four numbers, of `0,2` these."""
    if not said:
        return ()
    return tuple(map(str, range(int(said)))) if is_count(said) else tuple(said.rstrip(",").split(","))


def server_device(text: str) -> str:
    """Return the device of a server as `auto`, `cpu`, `gpu` or `gpu:N`; empty: the text names none."""
    found = re.fullmatch(_DEVICE, text)
    if found is None:
        return ""
    if text in (AUTO, CPU):
        return text
    number = found.group(1)
    return ANY_GPU if number is None else f"{ANY_GPU}:{int(number[1:])}"


def found_of(value: Any) -> HostGpus:
    """Return what the helper's program tells of the driver; nothing if that is malformed."""
    try:
        return read(HostGpus, {**value, "gpus": value["gpus"]})
    except (LookupError, TypeError, ValueError, AttributeError):
        return HostGpus(error="what it tells of its GPUs cannot be read")


def view(said: str, inherited: Optional[str], found: HostGpus, host: str, where: str = "") -> View:
    """Return the GPUs that tasks may see: those that are there, narrowed to what the hosts file says of the host.

    What is there: what the place's own CUDA_VISIBLE_DEVICES lists (an engine or a login set it: that is only narrowed),
    else all that the driver tells of. If neither is known, what the hosts file says is believed.

    Arguments:
        said: `gpus=` of the host; empty: nothing. A count takes the first of those that are there.
        inherited: CUDA_VISIBLE_DEVICES of the place; None: it is not set.
        where: the line that says so, `hosts:3`, for the message.

    Raises:
        Unfit: the host has not what the hosts file says.
    """
    if inherited is None and not found.how:
        return View(listed(said), (where or "the hosts file") if said else "")
    here = found.names if inherited is None else seen(inherited, found)
    source = found.source if inherited is None else f"{VISIBLE}={inherited} of its agent"
    told = View(here, source, inherited is not None)
    if not said:
        return told
    if is_count(said):
        chosen = here[: int(said)]
        lacks = len(chosen) < int(said)
    else:
        matches = [(name, next((each for each in here if _is_same(each, name, found)), "")) for name in listed(said)]
        # Of what the place has, its own spelling; else the user's.
        chosen = tuple(each if told.is_inherited else name for name, each in matches)
        lacks = not all(each for _, each in matches)
    if lacks:
        which = "how many" if is_count(said) else "which"
        by = f" ({where})" if where else ""
        raise GpusUnfit(
            f"gpus={said} for {host}{by}, but {has(told)}",
            f"correct gpus= in the hosts file: it says {which} GPUs the job may use there",
        )
    return told._replace(names=chosen)


def seen(value: str, found: HostGpus) -> Tuple[str, ...]:
    """Return the GPUs of a CUDA_VISIBLE_DEVICES as CUDA reads it: up to the first that is no GPU, or one of before."""
    names: Dict[str, None] = {}
    uuids = [uuid for gpu in found.gpus for uuid in (gpu.uuid, *(gpu.instances or ()))]
    for item in value.split(","):
        name = item.strip()
        is_number = re.fullmatch(_NUMBER, name)
        if name in names or not (is_number or re.fullmatch(_UUID, name)):
            break
        if found.how and is_number and int(name) >= len(found.gpus):
            break
        if found.how and not is_number and not any(_begins(uuid, name) for uuid in uuids):
            break
        names[name] = None
    return tuple(names)


def check_room(host: str, workers: int, each: int, has_now: View) -> None:
    """Check that a host has GPUs for its workers, `each` of their own. Raises Unfit."""
    need, have = workers * each, len(has_now.names)
    if need <= have:
        _check_instances(host, each, has_now.names)
        return
    who = "one worker" if workers == 1 else f"{workers} workers"
    fits = have // workers
    fixes = [f"--gpus-per-worker {fits}"] if fits else []
    if have >= each:
        most = have // each
        fixes.append(
            f"at most {most} worker{'' if most == 1 else 's'} there (-n, or slots={most} with --placement pack)"
        )
    raise GpusUnfit(
        f"{who} on {host} with --gpus-per-worker {each} need{'s' if workers == 1 else ''} {need}"
        f" GPU{'' if need == 1 else 's'}, but {has(has_now)}",
        ", or ".join([*fixes, "hosts with more GPUs"]),
    )


def _check_instances(host: str, each: int, names: Sequence[str]) -> None:
    """CUDA shows a process one MIG instance only. Raises Unfit."""
    if each > 1 and any(name.upper().startswith("MIG-") for name in names):
        raise GpusUnfit(
            f"--gpus-per-worker {each} on {host}, whose GPUs are divided (MIG): a process sees one instance only",
            "--gpus-per-worker 1",
        )


def has(what: View) -> str:
    """Return how many GPUs there are, which, and who says so, in words."""
    count = len(what.names)
    are = "there is no GPU" if not count else "there is 1 GPU" if count == 1 else f"there are {count} GPUs"
    return f"{are} ({', '.join((','.join(what.names), what.source)) if count else what.source})"


def variables(sees: View, first: int, count: int, order: str = "") -> Dict[str, str]:
    """Return the variables by which a task sees `count` GPUs of a place, from `first` on; none if `count` is 0.

    `order`: CUDA_DEVICE_ORDER of the place, if it has one: numbers that it was given are of that order.
    """
    found = {VISIBLE: ",".join(sees.names[first : first + count])}
    if count:
        found[ORDER] = order if sees.is_inherited and order else BY_PCI
    return found


def _is_same(one: str, other: str, found: HostGpus) -> bool:
    """Return whether two names are of one GPU."""
    numbers = [int(name) if re.fullmatch(_NUMBER, name) else None for name in (one, other)]
    if None not in numbers:
        return numbers[0] == numbers[1]
    if numbers == [None, None]:
        return _begins(one, other) or _begins(other, one)
    number, uuid = (numbers[0], other) if numbers[1] is None else (numbers[1], one)
    return any(gpu.number == number and _begins(gpu.uuid, uuid) for gpu in found.gpus)


def _begins(uuid: str, name: str) -> bool:
    return uuid.lower().startswith(name.lower())
