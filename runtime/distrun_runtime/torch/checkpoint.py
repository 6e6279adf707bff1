"""Checkpoints: rank 0 writes and reads one file, and all workers get what it holds.

The file is torch's, and `torch.load(path, weights_only=True)` reads it:

    {"format": 1,
     "states": {"model": ..., "optimizer": ..., NAME: ...},     # what `state_dict` gave on rank 0
     "values": {NAME: ...},                                     # other values
     "streams": [{"torch": ..., "numpy": ..., ...}, ...]}       # random generators, of each rank
"""

from __future__ import annotations

import copy
import functools
import io
import os
import random
import re
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Union

import numpy as np
import torch

from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.ps.statefile import replacing
from distrun_runtime.torch.job import store
from distrun_runtime.torch.sampler import DistributedSampler

Path = Union[str, "os.PathLike[str]"]
Named = dict[str, Any]

FORMAT = 1
CHUNK_BYTES = 16 << 20
"""A file is sent in parts of this size."""


def save(path: Path, model: Any, optimizer: Any = None, scheduler: Any = None, **extra: Any) -> None:
    """Write a checkpoint: rank 0 replaces the file as a whole, the others wait until it is on the disk. Collective.

    Arguments:
        path: the file, on rank 0's host. Its folder must exist.
        model, optimizer, scheduler: objects with `state_dict`, which is called on all workers in the same order: it may
            be collective. Rank 0's states are saved. None: there is none.
        extra: more of these, such as `scaler=scaler, sampler=sampler`; and values of torch, Python and numbers of
            numpy, such as `epoch=epoch + 1`.

    The states of the random generators of torch, numpy and Python are saved too, those of each worker.

    Raises:
        TypeError: a model, optimizer or scheduler without `state_dict`.
        KVError: a worker could not give its state, or rank 0 not write the file, and why; the same on all workers. The
            file is what it was before.
    """
    states, values = _sorted(model, optimizer, scheduler, extra)
    kv = store()
    what, failure, found = f"save {os.fspath(path)}", None, {}
    for name, each in states.items():
        try:
            found[name] = each.state_dict()
            if _is_sharded(found[name]):
                raise KVError(
                    f"the state of {name} is sharded, as FSDP2 does it, and rank 0 has a part of it; fix: save it with"
                    " torch.distributed.checkpoint"
                )
        except Exception as err:  # the other workers call those that follow
            failure = failure or err
    streams = _of_all(kv, _streams(), failure, what)
    if kv.rank == 0:
        try:
            _write(
                os.path.realpath(path),
                {
                    "format": FORMAT,
                    "states": found,
                    "values": {name: _plain(each) for name, each in values.items()},
                    "streams": streams,
                },
            )
        except Exception as err:
            failure = err
    _of_all(kv, None, failure, what)


def resume(path: Path, model: Any, optimizer: Any = None, scheduler: Any = None, **extra: Any) -> SimpleNamespace:
    """Load a checkpoint, which rank 0 reads, on all workers; without a file, change nothing. Collective.

    Call it before or after the optimizer is wrapped. A run goes on bit by bit as if it had not been stopped; with
    another number of workers too, except for what their number decides. docs/torch.md names the exceptions.

    Arguments:
        path: the file, on rank 0's host; nothing is unpickled but tensors and plain values.
        model, optimizer, scheduler: as in `save`; each gets its state. What the file has beyond them is left alone.
        extra: by the names of `save`, objects that get their states, and for values what to begin with if there is no
            file, or no such value in it: `epoch=0`.

    Returns:
        The values as attributes: `resume(..., epoch=0).epoch`. Those that the file has beyond `extra`, too.

    Raises:
        TypeError: a model, optimizer or scheduler without `state_dict`.
        KVError: the file cannot be read, is no checkpoint, or lacks a state; or a sampler's state is of other data. The
            same on all workers. Nothing was changed then.
        RuntimeError, ValueError: torch's, if a state is of another model or optimizer.
    """
    states, values = _sorted(model, optimizer, scheduler, extra)
    kv = store()
    content = _content(kv, path)
    if content is None:
        return SimpleNamespace(**values)
    try:
        found = torch.load(content, map_location="cpu", weights_only=True)
        if found["format"] != FORMAT:
            raise KVError(f"expected format {FORMAT}, found {found['format']}")
    except Exception as err:
        raise KVError(f"{os.fspath(path)} is not a checkpoint of distrun_runtime.torch.save: {err}") from err
    missing = [name for name in states if name not in found["states"]]
    if missing:
        raise KVError(
            f"{os.fspath(path)} has no state of {', '.join(missing)}; it has {', '.join(found['states'])}. fix: save"
            " with the same arguments, or leave out what was not saved"
        )
    restore = functools.partial(_restore, found["streams"], kv.rank)
    samplers = {name: each for name, each in states.items() if isinstance(each, DistributedSampler)}
    for name, each in samplers.items():
        copy.copy(each).load_state_dict(found["states"][name])  # a state that is refused changes nothing
    for name, each in states.items():
        # A DataLoader draws a number when it begins; a run that was stopped within an epoch had drawn it.
        each.load_state_dict(found["states"][name], *([restore] if name in samplers else []))
    restore()
    return SimpleNamespace(**{**values, **found["values"]})


def _sorted(model: Any, optimizer: Any, scheduler: Any, extra: Mapping[str, Any]) -> tuple[Named, Named]:
    """Return what has a state, and what is a value, by names."""
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for name, each in named.items():
        if each is not None and not _has_state(each):
            raise TypeError(f"{name} is an object with state_dict and load_state_dict, not {each!r:.60}")
    given = {**{name: each for name, each in named.items() if each is not None}, **extra}
    states = {name: each for name, each in given.items() if _has_state(each)}
    return states, {name: each for name, each in given.items() if name not in states}


def _has_state(each: Any) -> bool:
    return hasattr(each, "state_dict") and hasattr(each, "load_state_dict")


def _is_sharded(state: Any) -> bool:
    """Return whether a state holds a DTensor."""
    if isinstance(state, (Mapping, list, tuple)):
        return any(map(_is_sharded, state.values() if isinstance(state, Mapping) else state))
    return hasattr(state, "full_tensor")


def _plain(value: Any) -> Any:
    """Return a number of numpy as Python's: the file has no types of numpy."""
    return value.item() if isinstance(value, np.generic) else value


def _write(path: str, state: Named) -> None:
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"{path} is not a file; it would be replaced by one")
    with replacing(path) as file:
        torch.save(state, file)
        file.flush()
        try:
            torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)
        except Exception as err:
            found = ", ".join(re.findall(r"GLOBAL ([\w.]+)", str(err))) or err
            raise TypeError(
                f"it could not be read without unpickling code ({found}); fix: save tensors, numbers, texts, and lists"
                " and dicts of these"
            ) from err


def _content(kv: KVStore, path: Path) -> io.BytesIO | None:
    """Return on all workers what rank 0's file holds; None if it has none."""
    what, size, failure, file = f"read {os.fspath(path)}", None, None, None
    try:
        if kv.rank == 0:
            file = open(path, "rb")  # noqa: SIM115  # closed below
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        pass
    except OSError as err:
        failure = err
    with file or nullcontext():
        size = _of_all(kv, size, failure, what)[0]
        if size is None:
            return None
        content, chunk = io.BytesIO(), np.zeros(min(size, CHUNK_BYTES), np.uint8)
        while content.tell() < size:
            part = chunk[: size - content.tell()]
            try:
                if file is not None and file.readinto(part.data) < len(part):
                    raise OSError("it became shorter while it was read")
            except OSError as err:
                failure = err
            _of_all(kv, None, failure, what)
            kv.broadcast(None, part, out=part)
            content.write(part.data)
    content.seek(0)
    return content


def _of_all(kv: KVStore, value: Any, failure: Exception | None, what: str) -> list[Any]:
    """Return the workers' values on all of them, or raise on all what has failed on one."""
    text = failure and f"worker-{kv.rank} could not {what}: {type(failure).__name__}: {failure}"
    found = kv.allgather_object([value, text])
    for _, said in found:
        if said:
            raise KVError(said) from failure
    return [each for each, _ in found]


def _streams() -> Named:
    """Return the states of this process's random generators, as lists and tensors."""
    _, keys, *of_numpy = np.random.get_state()
    version, words, gauss = random.getstate()
    streams = {
        **{
            "torch": torch.get_rng_state(),
            "numpy": torch.from_numpy(np.asarray(keys, np.int64)),
            "numpy_rest": of_numpy,
        },
        **{"python": torch.tensor(words), "python_rest": [version, gauss]},
    }
    return {**streams, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else streams


def _restore(streams: list[Named], rank: int) -> None:
    """Give this process's random generators the states of its rank, or, if there are none, a seed of its own."""
    if rank >= len(streams):
        seed = zlib.crc32(streams[0]["torch"].numpy().tobytes()) + rank
        torch.manual_seed(seed)
        np.random.seed(seed % (1 << 32))
        random.seed(seed)
        return
    own = streams[rank]
    torch.set_rng_state(own["torch"])
    np.random.set_state(("MT19937", own["numpy"].numpy().astype(np.uint32), *own["numpy_rest"]))
    version, gauss = own["python_rest"]
    random.setstate((version, tuple(own["python"].tolist()), gauss))
    if "cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
