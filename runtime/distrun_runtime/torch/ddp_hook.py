"""Gradients of DistributedDataParallel, compressed on their way: `model.register_comm_hook(None, ddp_hook(kv))`."""

# DDP reads the annotations of a hook, as types and not as text: no `from __future__ import annotations` here.

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.futures import Future

from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.torch.process_group import TorchWork

Hook = Callable[[object, dist.GradBucket], Future[torch.Tensor]]


def ddp_hook(kv: KVStore, compression: str | Mapping[str, object] = "2bit") -> Hook:
    """Return a communication hook with which DDP means its gradients through the servers, compressed both ways.

    All workers make it, and register it at models of the same parameters. What compression leaves out of a parameter's
    gradient is added to its next one.

    Arguments:
        kv: a store of all the workers, whose servers sum; the hook's keys are in a store of their own.
        compression: a type, or with its parameters, as `kv.set_gradient_compression` takes them:
            `{"type": "2bit", "threshold": 0.001}`. `two_way` is True unless it says otherwise.

    Raises:
        KVError: no such compression, or the store has one worker.
    """
    if kv.num_workers == 1:
        raise KVError("ddp_hook: one worker sends nothing that could be compressed; fix: register no hook")
    return _StoreHook(kv, {"type": compression} if isinstance(compression, str) else compression).reduce


class _StoreHook:
    """The hook. Keys are those of parameters, not of buckets: DDP makes other buckets after the first step."""

    def __init__(self, kv: KVStore, compression: Mapping[str, object]) -> None:
        self._kv = kv.companion()
        self._kv.set_gradient_compression({"two_way": True, **compression})
        self._keys: dict[torch.Tensor, int] = {}

    def reduce(self, state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Return the future of a bucket : the means, in its own memory."""
        parameters, gradients = bucket.parameters(), [each.detach() for each in bucket.gradients()]
        new = [one for one in parameters if one not in self._keys]
        if new:
            self._keys.update((one, len(self._keys) + number) for number, one in enumerate(new))
            self._kv.init([self._keys[one] for one in new], [torch.zeros_like(one) for one in new])
        keys = [self._keys[one] for one in parameters]
        # Buckets come from the last layers first, and the next forward needs the first ones.
        call = self._kv.pushpull(keys, gradients, priority=bucket.index(), wait=False, scale=1 / self._kv.num_workers)
        work = TorchWork("a bucket of gradients", "DDP", bucket.index(), call.wait, bucket.buffer())
        call.add_done_callback(lambda _: work.end(work.make()))
        return work.get_future()
