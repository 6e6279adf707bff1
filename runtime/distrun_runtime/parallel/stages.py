"""Placement: which layers of a model run on which device, as a value that prints.

A model is a sequence of named layers. Neighbouring layers on one device are a *stage*; a batch passes through the
stages in their order. `place` makes the plan from devices that the user gives for layers, as MXNet's `group2ctx` did;
`distrun_runtime.parallel.balance` makes it from the layers' costs.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

BYTES_PER_S = 10e9
"""Assumed rate of a copy between two devices that do not share memory: about that of PCIe 3.0 with 16 lanes."""

_DEVICE = re.compile(r"(?P<kind>cpu|cuda|gpu)(:(?P<index>\d+))?(/(?P<stream>\d+))?")


@dataclass(frozen=True)
class StageDevice:
    """Where a stage runs: a GPU, or the CPU.

    Stages whose devices differ only in the stream (`cuda:0/0`, `cuda:0/1`) share a GPU. All stages on CPUs share the
    host's memory; the index tells them apart in a plan and means no particular core.
    """

    kind: str
    """`cpu` or `cuda`."""
    index: int = 0
    stream: int = 0

    @classmethod
    def parse(cls, text: str) -> StageDevice:
        """Read `cpu`, `cpu:1`, `cuda:0` or `cuda:0/1` (GPU 0, its second stream); `gpu` means `cuda`.

        Raises:
            ValueError: the text is none of these; names the nearest that is.
        """
        found = _DEVICE.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            forms = ["cpu", "cpu:0", "cpu:1", "cuda", "cuda:0", "cuda:1", "cuda:0/0", "cuda:0/1", "gpu:0", "gpu:0/0"]
            raise ValueError(
                f"device {text!r}: expected cpu, cpu:N, cuda:N or cuda:N/STREAM{nearest(str(text), forms)}"
            )
        kind = "cuda" if found["kind"] == "gpu" else found["kind"]
        return cls(kind, int(found["index"] or 0), int(found["stream"] or 0))

    @property
    def torch_name(self) -> str:
        """The name of the device for torch: `cpu`, or `cuda:0`."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    def shares_memory(self, other: StageDevice) -> bool:
        """Tell whether values reach the other device without a copy."""
        return self.torch_name == other.torch_name

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}" + (f"/{self.stream}" if self.stream else "")


@dataclass(frozen=True)
class LayerCost:
    """What a layer costs for one batch."""

    seconds: float
    """Of its forward and backward."""
    bytes_out: int = 0
    """Size of its output, and of the gradient that comes back."""


@dataclass(frozen=True)
class Stage:
    """Neighbouring layers that run on one device."""

    index: int
    """From 0, in the order in which a batch passes."""
    layers: tuple[str, ...]
    """Their names, in order."""
    device: StageDevice
    parameters: int
    """The number of elements of all parameters."""
    seconds: float | None = None
    """Expected time for the forward and backward of one batch and the copies of its input; None: no costs are known."""
    bytes_out: int | None = None
    """Bytes that go to the next stage for one batch; None: not known, or the last stage."""

    def __str__(self) -> str:
        return f"stage {self.index} ({self.span}, on {self.device})"

    @property
    def span(self) -> str:
        """Its layers in short: `lstm.0 to lstm.3`."""
        return self.layers[0] if len(self.layers) == 1 else f"{self.layers[0]} to {self.layers[-1]}"


@dataclass(frozen=True)
class StagePlan:
    """The plan of a placement: its stages, in the order in which a batch passes. `str` gives a table."""

    stages: tuple[Stage, ...]

    @property
    def seconds(self) -> float | None:
        """Expected time of the slowest stage for one batch: what a full pipeline takes for each; None: not known."""
        known = [stage.seconds for stage in self.stages if stage.seconds is not None]
        return max(known) if len(known) == len(self.stages) else None

    def bubble(self, parts: int) -> float:
        """Return the share of time that equal stages are idle, (S - 1) / (M + S - 1) for M parts of a batch.

        Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.
        """
        return (len(self.stages) - 1) / (parts + len(self.stages) - 1)

    def __str__(self) -> str:
        head = ("stage", "layers", "device", "parameters", "expected time", "bytes to the next")
        rows = [
            (
                str(stage.index),
                stage.span,
                str(stage.device),
                f"{stage.parameters:,}",
                "-" if stage.seconds is None else f"{stage.seconds * 1000:.1f} ms",
                "-" if stage.bytes_out is None else f"{stage.bytes_out:,}",
            )
            for stage in self.stages
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        # Words to the left, numbers to the right.
        forms = [f"{{:<{width}}}" if 1 <= place <= 2 else f"{{:>{width}}}" for place, width in enumerate(widths)]
        return "\n".join("  ".join(forms).format(*row).rstrip() for row in [head, *rows])


def named_layers(model: object) -> dict[str, nn.Module]:
    """Return the layers of a model by name, in the order in which they run.

    Arguments:
        model: `nn.Sequential`, `nn.ModuleList` or `nn.ModuleDict`, a list of modules, or a mapping of names to modules.
            An `nn.Sequential` inside is taken apart: its layers are `lstm.0`, `lstm.1`, ... Other modules are layers.
            Only layers are called, so only they may have hooks.

    Raises:
        TypeError: the model is something else, such as a module with a `forward` of its own.
        ValueError: there is no layer; two layers have one name; the model or an `nn.Sequential` inside has hooks.
    """
    from torch import nn

    if isinstance(model, nn.Module) and type(model) not in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
        raise TypeError(
            f"{type(model).__name__} does not tell in which order its layers run;"
            " give an nn.Sequential, or a list or mapping of its layers"
        )
    layers: dict[str, nn.Module] = {}
    for name, layer in _layers_below("", model):
        if name in layers:
            raise ValueError(f"layer {name!r} comes twice; give its module another name")
        layers[name] = layer
    if not layers:
        raise ValueError("the model has no layers")
    return layers


def _layers_below(prefix: str, model: Any) -> Iterable[tuple[str, nn.Module]]:
    from torch import nn

    if isinstance(model, nn.Module):
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if any(getattr(model, kind) for kind in hooks):
            found = repr(prefix[:-1]) if prefix else "the model"
            raise ValueError(f"{found} has hooks, but only its layers are called; register hooks on the layers")
        # Not named_children(): it leaves out a module that comes twice, which runs twice.
        items = model._modules.items()
    elif isinstance(model, Mapping):
        items = model.items()
    elif isinstance(model, Sequence) and not isinstance(model, str):
        items = enumerate(model)
    else:
        raise TypeError(f"expected an nn.Sequential, or a list or mapping of modules, found {type(model).__name__}")
    for key, layer in items:
        name = f"{prefix}{key}"
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer {name!r}: expected an nn.Module, found {type(layer).__name__}")
        if type(layer) is nn.Sequential:
            yield from _layers_below(f"{name}.", layer)
        else:
            yield name, layer


def place(
    model: object,
    devices: Mapping[str, str] | Sequence[str],
    costs: Mapping[str, LayerCost | float] | None = None,
    *,
    bytes_per_s: float | None = None,
) -> StagePlan:
    """Place layers on the devices that are given for them. Neighbouring layers on one device are one stage.

    A device that is named again for later layers gets another stage.

    Arguments:
        model: as for `named_layers`.
        devices: a mapping of groups of layers to devices, such as `{"embed": "cuda:0", "lstm.[0-3]": "cuda:0",
            "lstm.[4-7]": "cuda:1", "decode": "cuda:1"}`; or a list with the device of each layer, or of
            each module that the model has, for all of its layers. A group is the name
            of a layer, the name of an `nn.Sequential` or other beginning of names up to a dot (`lstm` is `lstm.0`,
            `lstm.1`, ...), or a pattern (`*`, `?`, `[0-3]`) of such names. Devices as for `StageDevice.parse`.
        costs: for the expected times of the plan: what `measure` returns, or seconds; nothing is decided by them.
        bytes_per_s: as for `balance`.

    Raises:
        TypeError: `devices` is neither a mapping nor a list.
        ValueError: a group that names no layer, a layer in no group or in two, a list of another length, a text that
            is no device, a parameter that layers of two stages share; costs of other layers.
    """
    layers = named_layers(model)
    if isinstance(devices, Mapping):
        places = _devices_by_group(list(layers), devices)
    elif isinstance(devices, Sequence) and not isinstance(devices, str):
        lengths = _layers_of_modules(model)
        if len(devices) == len(layers):
            lengths = [1] * len(layers)
        elif len(devices) != len(lengths):
            raise ValueError(
                f"{len(devices)} devices for {len(layers)} layers of {len(lengths)} modules: give a device for each"
                " layer or module, a mapping of groups to devices, or call balance(model, devices, costs)"
            )
        places = [StageDevice.parse(text) for text, count in zip(devices, lengths, strict=True) for _ in range(count)]
    else:
        raise TypeError(f"devices: expected a mapping of groups to devices or a list, found {type(devices).__name__}")
    runs = [(device, len(list(run))) for device, run in itertools.groupby(places)]
    return plan_of(layers, [length for _, length in runs], [device for device, _ in runs], costs, bytes_per_s)


def _layers_of_modules(model: Any) -> list[int]:
    """Return how many layers each module of a model has."""
    from torch import nn

    if isinstance(model, nn.Module):
        model = model._modules
    modules = model.values() if isinstance(model, Mapping) else model
    return [len(list(_layers_below("", {"": module}))) for module in modules]


def _devices_by_group(layers: Sequence[str], groups: Mapping[str, str]) -> list[StageDevice]:
    """Return the device of each layer."""
    members = {group: [name for name in layers if _is_in(name, group)] for group in groups}
    for group, names in members.items():
        if not names:
            known = [*layers, *dict.fromkeys(name.partition(".")[0] for name in layers)]
            raise ValueError(
                f"group {group!r} names no layer{nearest(group, known)}; the layers are {', '.join(layers)}"
            )
    places = []
    for name in layers:
        found = [group for group, names in members.items() if name in names]
        if not found:
            raise ValueError(
                f"layer {name!r} is in no group{nearest(name, groups)}; the groups are {', '.join(groups)}"
            )
        if len(found) > 1:
            raise ValueError(f"layer {name!r} is in several groups: {', '.join(map(repr, found))}")
        places.append(StageDevice.parse(groups[found[0]]))
    return places


def _is_in(layer: str, group: str) -> bool:
    """Tell whether a group names a layer, or a beginning of its name that ends before a dot."""
    ends = [place for place, letter in enumerate(layer) if letter == "."]
    return any(group == name or fnmatch.fnmatchcase(name, group) for name in [layer, *(layer[:end] for end in ends)])


def plan_of(
    layers: Mapping[str, nn.Module],
    lengths: Sequence[int],
    devices: Sequence[StageDevice],
    costs: Mapping[str, LayerCost | float] | None = None,
    bytes_per_s: float | None = None,
) -> StagePlan:
    """Return the plan of stages of these numbers of layers on these devices.

    Raises:
        ValueError: layers of two stages share a parameter or buffer; costs of other layers than these.
    """
    known = None if costs is None else layer_costs(list(layers), costs)
    names = list(layers)
    stages: list[Stage] = []
    for index, (length, device) in enumerate(zip(lengths, devices, strict=True)):
        begin = sum(lengths[:index])
        own = tuple(names[begin : begin + length])
        seconds = bytes_out = None
        if known is not None:
            seconds = sum(known[name].seconds for name in own)
            if index:
                rate = copy_rate(devices[index - 1], device, bytes_per_s)
                seconds += copy_seconds(known[names[begin - 1]].bytes_out, rate)
            bytes_out = known[own[-1]].bytes_out if index < len(lengths) - 1 else None
        tensors = {id(one): one.numel() for name in own for one in layers[name].parameters()}
        stages.append(Stage(index, own, device, sum(tensors.values()), seconds, bytes_out))
    _check_shared(layers, stages)
    return StagePlan(tuple(stages))


def _check_shared(layers: Mapping[str, nn.Module], stages: Sequence[Stage]) -> None:
    """Return if no two stages have a parameter or buffer in common."""
    owners: dict[int, tuple[Stage, str]] = {}
    for stage in stages:
        for layer in stage.layers:
            module = layers[layer]
            for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
                owner, other = owners.setdefault(id(tensor), (stage, f"{layer}.{name}"))
                if owner is not stage:
                    raise ValueError(
                        f"'{layer}.{name}' of {stage} is {other!r} of {owner}: layers that share a tensor have to be"
                        " in one stage"
                    )


def layer_costs(layers: Sequence[str], costs: Mapping[str, LayerCost | float]) -> dict[str, LayerCost]:
    """Return the costs of all layers, numbers as seconds.

    Raises:
        ValueError: a layer has no cost, or a negative one; a cost is of no layer.
    """
    for name in costs:
        if name not in layers:
            raise ValueError(f"a cost is given for {name!r}, which is no layer{nearest(name, layers)}")
    result = {}
    for name in layers:
        if name not in costs:
            raise ValueError(f"no cost is given for layer {name!r}; costs are given for {', '.join(costs)}")
        given = costs[name]
        cost = given if isinstance(given, LayerCost) else LayerCost(float(given))
        if not (cost.seconds >= 0 and cost.bytes_out >= 0):
            raise ValueError(f"layer {name!r}: expected a cost of at least 0, found {cost}")
        result[name] = cost
    return result


def copy_rate(source: StageDevice, target: StageDevice, bytes_per_s: float | None) -> float | None:
    """Return the rate of a copy between two stages in bytes per second; None: there is nothing to copy.

    Raises:
        ValueError: a given rate is not more than 0.
    """
    if bytes_per_s is not None:
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s: expected more than 0, found {bytes_per_s}")
        return bytes_per_s
    return None if source.shares_memory(target) else BYTES_PER_S


def copy_seconds(size: int, rate: float | None) -> float:
    """Return how long an output of `size` bytes and its gradient take from one stage to the next."""
    return 2 * size / rate if rate else 0.0


def check_present(device: StageDevice) -> None:
    """Return if this process has the device.

    Raises:
        ValueError: it has no such GPU; says which there are.
    """
    if device.kind == "cpu":
        return
    import torch

    count = torch.cuda.device_count()
    if device.index >= count:
        there = [f"cuda:{index}" for index in range(count)]
        raise ValueError(
            f"device {device} is not there: this process has {', '.join(there) or 'no GPU'}"
            f"{nearest(device.torch_name, there)}"
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the known name that is most like `name`, or an empty text."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""
