"""What a store does with pushes, what it can tell, and its states on disk: the public calls beside the data."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Union

from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.store import values
from distrun_runtime.store.compress import Setting
from distrun_runtime.store.hooks import Updater
from distrun_runtime.store.lifetime import Lifetime
from distrun_runtime.store.values import Key

Folder = Union[str, "os.PathLike[str]"]


class Controls(Lifetime):
    """Rules, compression, states, counters, traces."""

    # --- what a push does

    def set_optimizer(self, name: str, *, replace: bool = False, **params: object) -> None:
        """Update weights where they are stored: a push is then a gradient, a pull reads the weight.

        Any worker may call it. An equal repeat changes nothing and keeps the state (momentum, ...). With
        `replace`, what state both rules know by the same name goes on - after a new learning rate the momentum stays.

        Arguments:
            name: a rule of `distrun_runtime.ops.optimizers` (`sgd`, `adam`, ...), or `module:Class` for one of yours.
            params: the rule's parameters by name, for instance learning_rate=0.1, momentum=0.9. torch's names are
                understood as well: lr, weight_decay, betas, eps.

        Raises:
            KVError: unknown name or parameter; a different rule, or an updater, is in place and `replace` is False.
        """
        self._ready()
        self._set_rule(rules.spec_of(name, params), bool(replace))

    def set_optimizer_params(self, **params: object) -> None:
        """Change parameters of the rule that is in place; its state stays. All servers have them when it returns.

        Raises:
            KVError: there is no rule, or it has no such parameter or range.
        """
        self._ready()
        self._change_rule(rules.change_of(params=params))

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate of the rule that is in place: `set_optimizer_params(learning_rate=lr)`."""
        self.set_optimizer_params(learning_rate=lr)

    def set_multipliers(self, lr: Mapping[Key, float] | None = None, wd: Mapping[Key, float] | None = None) -> None:
        """Give keys factors of their own on the rule's learning rate and weight decay; other keys keep theirs.

        Arguments:
            lr, wd: key to factor, at least 0; 1 takes the factor back. The keys need no value yet.
        """
        self._ready()
        for given in (lr, wd):
            if not isinstance(given or {}, Mapping):
                raise KVError("multipliers are a dict of key to number, not %s" % type(given).__name__)
        factors = [{values.key_of(key): number for key, number in (given or {}).items()} for given in (lr, wd)]
        self._change_rule(rules.change_of({}, *factors))

    def set_updater(self, updater: Updater | None) -> None:
        """Let a function of yours update what is stored, in place of a rule; None removes either.

        Arguments:
            updater: `updater(key, received, stored)`, called with your own key for each key of a push; it changes
                `stored` in place. `received` is its own to change or keep. What it raises, the push raises.
                Distributed: a function that every server can import from a module named at launch.

        Raises:
            KVError: it cannot be called; or the servers cannot import it.
        """
        self._ready()
        if updater is not None and not callable(updater):
            raise KVError("an updater is a function (key, received, stored), not %s" % updater.__class__.__name__)
        self._set_updater(updater)

    def set_gradient_compression(self, params: Mapping[str, object], keys: object = None) -> None:
        """Compress what is sent from now on, with what was lost added to the next push (error feedback).

        Call it before `init`, on all workers alike.

        Arguments:
            params: `{"type": "2bit", "threshold": 0.5}`; types, parameters, `min_size` and `two_way` are those of
                docs/compression.md. `{"type": "none"}` ends it.
            keys: a key or a list of keys; None means all that have no setting of their own.

        Raises:
            KVError: unknown type or parameter; or a `local` store, in which nothing is sent.
        """
        self._ready()
        setting = Setting.of(params)
        self._compress(setting, None if keys is None else values.keys_of(keys))

    # --- states and facts

    def save_states(self, folder: Folder) -> None:
        """Write weights, rule states, rounds and residuals into a folder, all or nothing. All workers call it.

        Raises:
            KVError: a round is open: some worker has pushed a key more often than others.
        """
        self._ready()
        self._line.finish()
        self._save(_path(folder))

    def load_states(self, folder: Folder) -> None:
        """Take up what `save_states` wrote, also with another number of servers. All workers call it after `init`.

        Raises:
            KVError: the folder is not whole, or its keys do not fit the store's.
        """
        self._ready()
        self._line.finish()
        self._load(_path(folder))

    def stats(self) -> list[dict[str, Any]]:
        """Return counters since the start, one dict a server: bytes, keys, rounds, queue, updates, staleness."""
        self._ready()
        return self._stats()

    def profile(self, folder: Folder) -> AbstractContextManager[None]:
        """Return a context manager that records what workers and servers do, as Chrome trace files in `folder`.

        All workers enter and leave it.
        """
        self._ready()
        return self._profile(_path(folder))

    def num_dead_node(self, node_id: int = 7, timeout: float = 60) -> int:
        """Return the number of lost nodes among the roles of `node_id`: 1 scheduler + 2 servers + 4 workers.

        Arguments:
            timeout: taken for MXNet's sake; how long a node may be silent is PS_HEARTBEAT_TIMEOUT's to say.
        """
        self._ready()
        mask = operator.index(node_id) if hasattr(node_id, "__index__") else 0
        if not 0 < mask < 8:
            raise KVError("node_id is a sum of 1 (scheduler), 2 (servers), 4 (workers), not %.60r" % (node_id,))
        return self._num_dead(mask)

    def is_capable(self, capability: str) -> bool:
        """Tell whether the store has a capability; the only one with a name is `optimizer`: True.

        Raises:
            KVError: a capability without a name here.
        """
        if capability != "optimizer":
            raise KVError("no capability %r is known; there is 'optimizer'" % (capability,))
        return True


def _path(folder: Folder) -> str:
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise KVError("a folder is a path, such as 'states' or a pathlib.Path, not %.60r" % (folder,))
    return os.fspath(folder)
