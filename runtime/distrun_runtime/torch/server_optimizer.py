"""An optimizer of torch whose steps the job's servers make: they keep its states, each server those of its part."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Dict, NamedTuple

import numpy as np
import torch

from distrun_runtime import kvstore
from distrun_runtime.errors import KVError
from distrun_runtime.ops.optimizers import RULES, RuleSpec
from distrun_runtime.ps import statefile
from distrun_runtime.store.keys import Key, is_async
from distrun_runtime.torch import job
from distrun_runtime.torch.buckets import memory

RULE_OF = {"sgd": "torch_sgd", "adam": "torch_adam", "adamw": "torch_adamw", "rmsprop": "torch_rmsprop"}
"""The rule with the arithmetic of torch's optimizer of a name. Other rules go by their own names."""
TORCHS = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
"""torch's names of parameters, where they are not those of the rules."""
BY_KEY = ("lr", "weight_decay")
"""What each group has for itself; other options are those of all groups."""
NO_OPTIONS = ("params", "param_names", "name", "initial_lr")
"""What a group may have besides options."""

MOVED = "was moved to other memory, as net.to() does; fix: move the model before the optimizer is made"
CHANGED = (
    "was changed by something else than step(), which would undo it; fix: call assign() on all workers after a change"
)
FROZEN = "requires no gradient any more, but its momentum and decay go on; fix: give its group lr=0 instead"


class _Flat(NamedTuple):
    """Parameters that share a key of the store; each is a view of a part of `weights`, in their order."""

    key: str
    group: int
    params: Sequence[Any]
    places: Sequence[int]
    """The addresses of the parameters."""
    weights: Any
    """Flat: an array of numpy's, or a tensor on another device than the CPU."""
    gradients: Any
    parts: Sequence[Any]
    """Views of `gradients`, one for each parameter, of its shape."""


class ServerOptimizer(torch.optim.Optimizer):  # type: ignore[misc]  # torch has no types here
    """An optimizer whose weights and states are on the servers: `step` sends gradients and gets weights.

    It takes the place of a `torch.optim` optimizer: param groups, `zero_grad`, closures and schedulers work as there.
    So does GradScaler, but scales differ after an inf on one worker (docs/torch.md). A gradient is the mean over the
    workers; `p.grad` stays this worker's own. All workers make it, and call `step`, together. At the start all get the
    parameters and buffers of rank 0. Parameters are moved into flat memory, one key for each dtype, device and group:
    `p.data` is a view of it, and after a step `p.grad` of such, too.

    Arguments:
        model: a module, of which buffers and frozen parameters then stay each worker's own; or parameters as
            `torch.optim` takes them, named or not, or param groups. Groups may differ in `lr` and `weight_decay`.
        rule: `sgd`, `adam`, `adamw`, `rmsprop`: torch's arithmetic; or a rule of the store by its name.
        asynchronous: each worker's gradients are applied when they arrive, and are not means (`dist_async`).
        staleness: of `asynchronous`: by how many steps a worker may be ahead of the slowest one. None: by any number.
        store: a store for this optimizer alone, without a rule; None: it makes one.
        states: a folder that all hosts share, in which `state_dict` saves what the servers have.
        options: those of the rule, by torch's names or ours.

    Raises:
        KVError: a rule or an option that is not known, with the nearest name; a parameter that requires no gradient, or
            whose name, shape, dtype or group is another one on another worker; a store of another kind.
    """

    _step_supports_amp_scaling = True  # GradScaler leaves `grad_scale` and `found_inf` to `step`.

    def __init__(
        self,
        model: Any,
        rule: str,
        *,
        asynchronous: bool = False,
        staleness: int | None = None,
        store: kvstore.KVStore | None = None,
        states: str | os.PathLike[str] | None = None,
        **options: object,
    ) -> None:
        name = RULE_OF.get(rule.lower(), rule) if isinstance(rule, str) else rule
        self._spec = RuleSpec.of(name, options)
        if self._spec.name not in RULES:
            raise KVError(f"ServerOptimizer has no rule {rule!r}; known are {', '.join(sorted({*RULE_OF, *RULES}))}")
        if self._spec.params.get("lr_scheduler"):
            raise KVError("lr_scheduler: a scheduler of torch.optim.lr_scheduler changes the rate of a ServerOptimizer")
        self._names: Dict[Any, str] = {}
        self._others: Dict[Any, str] = {}
        """Frozen parameters and buffers: they only start alike."""
        if isinstance(model, torch.nn.Module):
            self._names = {each: name for name, each in model.named_parameters() if each.requires_grad}
            self._others = {each: name for name, each in model.named_buffers()}
            self._others.update((each, name) for name, each in model.named_parameters() if not each.requires_grad)
        self._flats: list[_Flat] = []
        self._sent: list[dict[str, Any]] = []
        """The options of the groups, as the servers have them."""
        self._versions: list[int] = []
        """Of the parameters, in the order of `_flats`, when the store last wrote them."""
        self._states = states
        defaults = _as_torch(self._spec.params)
        self._options = tuple(defaults)
        super().__init__(list(self._names) if isinstance(model, torch.nn.Module) else model, defaults)
        self.kvstore = (
            _own_store(asynchronous, staleness) if store is None else _checked(store, asynchronous, staleness)
        )
        try:
            self._begin(self.param_groups)
        except BaseException as err:
            if store is None:
                self.kvstore.give_up(err)
            raise

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; all workers call it, with equal groups.

        Raises:
            KVError: as of a new optimizer.
        """
        others = {name: value for name, value in param_group.items() if name in NO_OPTIONS}
        given = {name: value for name, value in param_group.items() if name not in NO_OPTIONS}
        super().add_param_group({**others, **_as_torch(self._spec.changed({"params": given}).params)})
        if self._flats:
            self._begin(self.param_groups[-1:])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Have the servers make one step, and take the weights; return what `closure` returned.

        A parameter without a gradient on this worker has one of 0 here: it moves by momentum and weight decay.

        Raises:
            KVError: a weight was changed by something else; or an option is not right, or not the same in all groups.
            RuntimeFault: the exchange failed; names worker and key.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._follow()
        self._check_params()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        keys = [each.key for each in self._flats]
        if found_inf is not None and found_inf.item():
            self.kvstore.skip_round(keys, {"why": "a gradient is not finite"})
            return loss
        with torch.no_grad():
            for flat in self._flats:
                _fill(flat, None if scale is None else 1.0 / scale.item())
        share = 1.0 if is_async(self.kvstore.type) else 1.0 / self.kvstore.num_workers
        given, out = [each.gradients for each in self._flats], [each.weights for each in self._flats]
        self.kvstore.pushpull(keys, given, out=out, scale=share)
        self._written()
        return loss

    def assign(self) -> None:
        """Take the weights of rank 0, as they are now, for those of all workers; states stay. All workers call it.

        For programs that change weights by something else than `step`, such as `load_state_dict` of the model.
        """
        keys, weights = [each.key for each in self._flats], [each.weights for each in self._flats]
        self.kvstore.assign(keys, weights)
        self._pull()

    def state_dict(self) -> dict[str, Any]:
        """Return the options, and where the servers have saved weights and states. All workers call it.

        The folder holds what was saved last.

        Raises:
            KVError: the optimizer was made without `states`; or the folder cannot be written.
        """
        folder = self._folder("state_dict")
        self.kvstore.save_states(folder)
        return {**super().state_dict(), "state": {"folder": folder, "saved": self._saved(folder)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up weights, states and options, also those of a job of another size. All workers call it.

        Raises:
            KVError: the folder holds another save, or is not whole.
            ValueError: other groups of parameters.
        """
        there = state_dict.get("state", {})
        if not {"folder", "saved"} <= set(there):
            raise KVError("load_state_dict: expected what ServerOptimizer.state_dict returned, found states of torch's")
        folder = self._folder("load_state_dict")
        if self._saved(folder) != there["saved"]:
            raise KVError(
                f"load_state_dict: states in {folder} are not those of this state_dict: they were saved later"
            )
        super().load_state_dict({**state_dict, "state": {}})
        self.kvstore.load_states(folder)
        self._pull()

    def _folder(self, call: str) -> str:
        if self._states is None:
            raise KVError(
                f"{call}: the states are on the servers; fix: ServerOptimizer(..., states='folder'), a folder that all"
                " hosts share"
            )
        return os.path.abspath(self._states)

    def _saved(self, folder: str) -> object:
        return statefile.read_manifest(folder, "")["data"]

    # --- keys

    def _begin(self, groups: Sequence[dict[str, Any]]) -> None:
        """Compare the parameters of new groups with those of the other workers, and put them into the store."""
        is_first, numbered = not self._flats, list(enumerate(self.param_groups))[-len(groups) :]
        self.kvstore.agree(self._facts(numbered, is_first), "optimizers")
        rule = RULES[self._spec.name]
        is_flat = rule.is_elementwise and not rule.needs_norms
        alike: Dict[tuple[Any, ...], list[Any]] = {}
        for number, group in numbered:
            for place, each in enumerate(group["params"]):
                alike.setdefault((number, each.dtype, each.device, None if is_flat else place), []).append(each)
        new: list[_Flat] = []
        for (number, dtype, *_), params in alike.items():
            key = f"{len(self._flats) + len(new)}: {str(dtype).removeprefix('torch.')} of group {number}"
            if not is_flat:
                key += f", {self._names[params[0]]}"  # lars looks how it ends
            new.append(_flat(self.kvstore, key, number, params))
        if is_first:
            # Rate and decay of each key are its multipliers.
            common: Dict[str, Any] = dict(self._spec.params)
            common.update((name, 1.0) for name in common if TORCHS.get(name) in BY_KEY)
            self.kvstore.set_optimizer(self._spec.name, **common)
            if self._others:
                self.kvstore.broadcast(None, [*self._others], [*self._others])
        self._flats += new
        self._follow()
        self.kvstore.init([each.key for each in new], [each.weights for each in new])
        self._pull()

    def _facts(self, groups: Sequence[tuple[int, dict[str, Any]]], is_first: bool) -> dict[str, str]:
        """Name the parameters of numbered groups; return what has to be alike on all workers.

        Raises:
            KVError: a parameter that cannot be trained.
        """
        facts: Dict[str, str] = {"number of groups": str(len(self.param_groups))}
        for number, group in groups:
            facts[f"options of group {number}"] = json.dumps({name: str(group[name]) for name in self._options})
            facts[f"number of parameters of group {number}"] = str(len(group["params"]))
            names = group.get("param_names") or [f"{number}.{place}" for place, _ in enumerate(group["params"])]
            for given, each in zip(names, group["params"], strict=True):
                name = self._names.setdefault(each, self._others.get(each, given))
                if not each.requires_grad:
                    raise KVError(f"parameter {name!r} requires no gradient; leave it out")
                if not each.is_floating_point():
                    raise KVError(f"parameter {name!r} is of {each.dtype}; servers update real floats only")
                facts[f"parameter {name!r}"] = f"{each.dtype} {tuple(each.shape)} in group {number}"
        for each, name in self._others.items() if is_first else ():
            facts[f"{name!r}, which is not trained,"] = f"{each.dtype} {tuple(each.shape)}"
        return facts

    def _pull(self) -> None:
        self.kvstore.pull([each.key for each in self._flats], [each.weights for each in self._flats])
        self._written()

    def _written(self) -> None:
        """Record that the store has written the weights, for autograd and for `_check_params`."""
        params = [each for flat in self._flats for each in flat.params]
        for each in params:  # older versions of torch take no list
            torch.autograd.graph.increment_version(each)
        self._versions = [each._version for each in params]

    def _check_params(self) -> None:
        versions = iter(self._versions)
        for flat in self._flats:
            for each, place in zip(flat.params, flat.places, strict=True):
                is_changed = each._version != next(versions)
                is_moved, is_frozen = each.data_ptr() != place, not each.requires_grad
                if is_moved or is_changed or is_frozen:
                    found = MOVED if is_moved else CHANGED if is_changed else FROZEN
                    raise KVError(f"parameter {self._names[each]!r} {found}")

    # --- options

    def _follow(self) -> None:
        """Give the servers the groups' options if they have changed: rank 0 does, before it contributes to a round."""
        options = [_numbers({name: group[name] for name in self._options}) for group in self.param_groups]
        if options == self._sent:
            return
        found = [_as_torch(self._spec.changed({"params": each}).params) for each in options]
        for number, each in enumerate(found):
            for name in [name for name in each if name not in BY_KEY and each[name] != found[0][name]]:
                raise KVError(
                    f"group {number} has {name}={each[name]} and group 0 {name}={found[0][name]}; groups differ in"
                    f" {' and '.join(BY_KEY)} only; fix: a ServerOptimizer for each {name}"
                )
        if self.kvstore.rank == 0:
            shared = {name: value for name, value in found[0].items() if name not in BY_KEY}
            if self._sent and shared != {name: value for name, value in self._sent[0].items() if name not in BY_KEY}:
                self.kvstore.set_optimizer_params(**shared)
            by_key: list[Dict[Key, float]]
            by_key = [{each.key: found[each.group].get(name, 1.0) for each in self._flats} for name in BY_KEY]
            self.kvstore.set_multipliers(*by_key)
        self._sent = options


def _as_torch(params: dict[str, Any]) -> dict[str, Any]:
    """Return complete parameters of a rule as options of a group, by torch's names."""
    result = {TORCHS.get(name, name): value for name, value in params.items() if name != "lr_scheduler"}
    if "beta1" in result:
        result["betas"] = (result.pop("beta1"), result.pop("beta2"))
    return result


def _numbers(options: dict[str, Any]) -> dict[str, Any]:
    """Return options without tensors, which a learning rate may be."""
    return {name: each.item() if isinstance(each, torch.Tensor) else each for name, each in options.items()}


def _own_store(asynchronous: bool, staleness: int | None) -> kvstore.KVStore:
    if staleness is not None and not asynchronous:
        raise KVError("staleness bounds asynchronous steps; fix: ServerOptimizer(..., asynchronous=True)")
    if job.store().type == "local":
        return kvstore.create("local")
    return kvstore.create("dist_async", staleness=staleness) if asynchronous else kvstore.create("dist_sync")


def _checked(store: object, asynchronous: bool, staleness: int | None) -> kvstore.KVStore:
    if not isinstance(store, kvstore.KVStore):
        raise KVError(f"store is one that kvstore.create made, not {type(store).__name__}")
    if is_async(store.type) != asynchronous:
        fix = "dist_async" if asynchronous else "dist_sync"
        raise KVError(f"a {store.type!r} store is not for asynchronous={asynchronous}; fix: kvstore.create({fix!r})")
    if staleness is not None:
        raise KVError("staleness is the store's: kvstore.create('dist_async', staleness=...)")
    return store


def _flat(store: kvstore.KVStore, key: str, group: int, params: Sequence[Any]) -> _Flat:
    """Move parameters of one dtype and device into flat memory that the store moves fastest."""
    ends = np.cumsum([each.numel() for each in params]).tolist()

    def parts(tensor: Any) -> list[Any]:
        cut = zip(params, [0, *ends], ends, strict=False)
        return [tensor[start:end].view(each.shape) for each, start, end in cut]

    (own, weights), (theirs, gradients) = memory(store, ends[-1], params[0]), memory(store, ends[-1], params[0])
    with torch.no_grad():
        for each, part in zip(params, parts(own), strict=True):
            part.copy_(each)
            each.data = part
    return _Flat(key, group, params, [each.data_ptr() for each in params], weights, gradients, parts(theirs))


def _fill(flat: _Flat, scale: float | None) -> None:
    """Copy the parameters' gradients to where the store takes them, times `scale`; they are views of it then."""
    filled, given = [], []
    for each, part in zip(flat.params, flat.parts, strict=True):
        if each.grad is None:
            part.zero_()
            continue
        filled.append(part)
        if each.grad.layout is not torch.strided:
            part.copy_(each.grad.to_dense())
        elif each.grad.data_ptr() != part.data_ptr():
            given.append((each, part))
    if given:
        torch._foreach_copy_([part for _, part in given], [each.grad for each, _ in given])
        for each, part in given:
            each.grad = part
    if scale is not None and filled:
        torch._foreach_mul_(filled, scale)
