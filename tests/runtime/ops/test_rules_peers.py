"""The rules against MXNet's optimizers and torch.optim themselves, step by step, in processes of theirs.

They need `.peers`, which `scripts/install peers` makes; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peers import python_of
from slowness import scaled

from distrun_runtime.ops import optimizers as rules

ROOT = Path(__file__).resolve().parents[3]
STEPS, LONG, SIZE = 12, 50, 7
LIMIT_S = scaled(100.0)

MXNET = """\
import json, sys
import mxnet as mx
import numpy as np

def array(values):
    return mx.nd.array(np.array([float.fromhex(x) for x in values]), dtype="float32")

# sgld's noise is another one in every process: without it, its step is compared.
mx.optimizer.optimizer.normal = lambda *_, **__: 0
cases = []
for name, params, weight, grads in json.load(sys.stdin):
    scheduler = params.pop("lr_scheduler", None)
    if scheduler:
        params["lr_scheduler"] = getattr(mx.lr_scheduler, scheduler[0])(**scheduler[1])
    update = mx.optimizer.get_updater(mx.optimizer.create(name, **params))
    weight, steps = array(weight), []
    for grad in grads:
        update(0, array(grad), weight)
        steps.append([x.hex() for x in weight.asnumpy().astype("float64").tolist()])
    cases.append(steps)
json.dump(cases, sys.stdout)
"""

TORCH = """\
import json, sys
import torch

torch.set_default_dtype(torch.float64)  # of what an optimizer keeps besides: NAdam's product

def tensor(values):
    return torch.tensor([float.fromhex(x) for x in values], dtype=torch.float64)

cases = []
for name, params, weight, grads in json.load(sys.stdin):
    weight, steps = tensor(weight), []
    every = params.pop("halved_every", len(grads))
    optimizer = getattr(torch.optim, name)([weight], foreach=False, **params)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, every, gamma=0.5)
    for grad in grads:
        weight.grad = tensor(grad)
        optimizer.step()
        schedule.step()
        steps.append([x.hex() for x in weight.tolist()])
    cases.append(steps)
json.dump(cases, sys.stdout)
"""

ALL = {"wd": 0.1, "clip_gradient": 0.3, "rescale_grad": 0.5}
# A weight decay of nag is ours alone: MXNet's kernel applies it twice.
MXNET_CASES: list[tuple[str, dict[str, Any]]] = [
    *[("sgd", {"learning_rate": 0.1, **more}) for more in ({}, {"momentum": 0.9}, {"momentum": 0.9, **ALL})],
    *[("nag", {"learning_rate": 0.1, **more}) for more in ({}, {"momentum": 0.9}, {"momentum": 0.9, **ALL, "wd": 0.0})],
    *[("adam", more) for more in ({}, {"learning_rate": 0.01, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3, **ALL})],
    *[("rmsprop", more) for more in ({}, {"gamma1": 0.8, "clip_weights": 0.5, **ALL}, {"centered": True, **ALL})],
    *[("adagrad", more) for more in ({}, {"learning_rate": 0.1, "eps": 1e-3, **ALL})],
    *[("ftrl", more) for more in ({}, {"learning_rate": 0.2, "lamda1": 0.3, "beta": 0.5, **ALL})],
    *[("lamb", {"learning_rate": 0.01, **more}) for more in ({}, {"bias_correction": False, **ALL})],
    *[("lamb", {"learning_rate": 0.01, **more, **ALL}) for more in ({"lower_bound": 10.0}, {"upper_bound": 0.5})],
    *[("lars", more) for more in ({"learning_rate": 1.0}, {"momentum": 0.9, "eta": 0.1, "eps": 0.01, **ALL})],
    *[("signum", more) for more in ({}, {"learning_rate": 0.1, "momentum": 0.5, "wd_lh": 0.3, **ALL})],
    *[("signum", {"learning_rate": 0.1, "momentum": 0.0, **more}) for more in ({}, ALL)],
    *[("dcasgd", {"learning_rate": 0.1, **more}) for more in ({}, {"lamda": 0.5, **ALL}, {"lamda": 0.0, "wd": 0.1})],
    *[("adadelta", more) for more in ({}, {"rho": 0.5, "epsilon": 1e-3, **ALL}, {"rho": 0.99, "wd": 0.01})],
    *[("adamax", more) for more in ({}, {"learning_rate": 0.01, "beta1": 0.5, "beta2": 0.9, **ALL})],
    *[("nadam", more) for more in ({}, {"learning_rate": 0.01, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3, **ALL})],
    ("nadam", {"learning_rate": 0.01, "schedule_decay": 2.0, "wd": 0.1}),
    *[("ftml", more) for more in ({}, {"learning_rate": 0.1, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3, **ALL})],
    ("test", {"rescale_grad": 0.5}),
]
# Of these the difference of two walks is compared, with gradients and without: the noise of both is the same.
NOISY: list[tuple[str, dict[str, Any]]] = [("sgld", more) for more in ({}, {"learning_rate": 0.1, **ALL})]
SCHEDULED: list[tuple[str, dict[str, Any]]] = [
    ("FactorScheduler", {"step": 2, "factor": 0.5, "base_lr": 0.3}),
    ("MultiFactorScheduler", {"step": [2, 5], "factor": 0.1, "base_lr": 0.3, "warmup_steps": 3}),
    ("PolyScheduler", {"max_update": 8, "base_lr": 0.3, "pwr": 2, "warmup_steps": 2, "warmup_begin_lr": 0.1}),
    ("CosineScheduler", {"max_update": 9, "base_lr": 0.3, "final_lr": 0.1, "warmup_steps": 2}),
]
TORCHS = {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.3}
ADAM = {"lr": 0.1, "amsgrad": True, **TORCHS}
MORE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "Adam": ADAM,
    "AdamW": ADAM,
    "RMSprop": {"lr": 0.1, "alpha": 0.9, "eps": 1e-3, "momentum": 0.9, "centered": True, "weight_decay": 0.3},
}
HALVING = {"type": "factor", "step": 20, "factor": 0.5}
# The arithmetic of both is the same where their epsilons, which stand at different places, are 0.
TORCH_CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("sgd", {"lr": 0.1, "wd": 0.1}, "SGD", {"lr": 0.1, "weight_decay": 0.1}),
    ("sgd", {"lr": 0.1, "momentum": 0.9}, "SGD", {"lr": 0.1, "momentum": 0.9}),
    (
        *("nag", {"lr": 0.1, "momentum": 0.9, "wd": 0.1}),
        *("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ),
    ("adam", {"lr": 0.01, "wd": 0.1, "epsilon": 0}, "Adam", {"lr": 0.01, "weight_decay": 0.1, "eps": 0}),
    ("adamw", {"lr": 0.01, "epsilon": 0}, "AdamW", {"lr": 0.01, "weight_decay": 0, "eps": 0}),
    ("rmsprop", {"lr": 0.01, "epsilon": 0}, "RMSprop", {"lr": 0.01, "alpha": 0.9, "eps": 0}),
    (
        *("rmsprop", {"lr": 0.01, "epsilon": 0, "centered": True, "gamma2": 0.5, "wd": 0.1}),
        *("RMSprop", {"lr": 0.01, "alpha": 0.9, "eps": 0, "centered": True, "momentum": 0.5, "weight_decay": 0.1}),
    ),
    ("adagrad", {"lr": 0.1, "eps": 0}, "Adagrad", {"lr": 0.1, "eps": 0}),
    # Under another rate, MXNet's momentum is that of the old rate for a while; torch's is not.
    *(
        (
            *("torch_sgd", {**more, "lr_scheduler": {"type": "factor", "step": 3, "factor": 0.5, "base_lr": 0.1}}),
            *("SGD", {"lr": 0.1, "halved_every": 3, **more}),
        )
        for more in ({}, {"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True})
    ),
    *(
        (f"torch_{name.lower()}", {**more, "lr_scheduler": HALVING}, name, {**more, "halved_every": 20})
        for name, all_more in MORE.items()
        for more in ({"lr": 0.01}, all_more, {**all_more, "maximize": True})
    ),
    # The same arithmetic, epsilon included; torch's own names of the parameters are taken too.
    ("torch_adamw", {}, "AdamW", {}),
    *(("torch_adamw", more, "AdamW", more) for more in ({"lr": 0.1, **TORCHS}, {"lr": 0.01, "weight_decay": 0.0})),
    ("adamax", {}, "Adamax", {}),
    ("adamax", TORCHS, "Adamax", TORCHS),
    ("nadam", {"lr": 0.002}, "NAdam", {}),
    *(("nadam", {"lr": 0.01, **more}, "NAdam", {"lr": 0.01, **more}) for more in (TORCHS, {"betas": (0.99, 0.9)})),
    *(("nadam", more, "NAdam", more) for more in ({"lr": 0.01, "momentum_decay": 2.0, **TORCHS},)),
    ("adadelta", {"eps": 1e-6}, "Adadelta", {}),
    *(("adadelta", more, "Adadelta", more) for more in ({"lr": 0.5, "rho": 0.5, "eps": 1e-3},)),
]


def walked_by(peer: str, program: str, cases: list[list[object]]) -> list[list[list[float]]]:
    """Let the peer run all cases in one process; numbers travel as hexadecimal floats, none is rounded."""
    command, env = [python_of(peer), "-c", program], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout[done.stdout.index("[[[") :])
    return [[[float.fromhex(x) for x in step] for step in case] for case in steps]


def start(steps: int = STEPS) -> tuple[list[str], list[list[str]]]:
    random = np.random.default_rng(0)
    weight, grads = random.normal(size=SIZE).astype("f4"), random.normal(size=(steps, SIZE)).astype("f4")
    return hexes(weight), [hexes(grad) for grad in grads]


def hexes(values: Any) -> list[str]:
    return [float(x).hex() for x in values]


def walk(name: str, params: dict[str, Any], dtype: str, size: float = 1.0, steps: int = STEPS) -> Iterator[Any]:
    """Yield our weight after each step; from weights and gradients times `size`."""
    numbers = [[float.fromhex(x) * size for x in given] for given in (start()[0], *start(steps)[1])]
    rule, weight = rules.make(name, params), np.array(numbers[0], dtype)
    state = rule.new_state(weight)
    for grad in numbers[1:]:
        rule.step(weight, np.array(grad, dtype), state)
        yield weight


def compare(name: str, params: dict[str, Any], steps: list[list[float]], dtype: str, tolerance: float) -> None:
    for number, (weight, right) in enumerate(zip(walk(name, params, dtype, steps=len(steps)), steps, strict=True)):
        text = "%s %s, step %d" % (name, params, number + 1)
        np.testing.assert_allclose(weight, right, rtol=tolerance, atol=tolerance, err_msg=text)


@pytest.mark.peers
def test_rules_and_schedules_are_mxnets() -> None:
    """To 1e-5: MXNet calculates in float32, its parameters included (1 - beta2 has 5 digits there)."""
    names = {"FactorScheduler": "factor", "MultiFactorScheduler": "multifactor"}
    names.update({"PolyScheduler": "poly", "CosineScheduler": "cosine"})
    ours = [*MXNET_CASES, *(("sgd", {"lr_scheduler": {"type": names[kind], **args}}) for kind, args in SCHEDULED)]
    theirs = [*MXNET_CASES, *(("sgd", {"lr_scheduler": given}) for given in SCHEDULED)]
    walks = walked_by("mxnet", MXNET, [[name, params, *start()] for name, params in theirs])
    for (name, params), steps in zip(ours, walks, strict=True):
        compare(name, params, steps, "float32", 1e-5)


@pytest.mark.peers
def test_the_step_of_sgld_without_its_noise_is_mxnets() -> None:
    walks = walked_by("mxnet", MXNET, [[name, params, *start()] for name, params in NOISY])
    for (name, params), steps in zip(NOISY, walks, strict=True):
        noisy, noise = walk(name, params, "float64"), walk(name, params, "float64", size=0.0)
        for one, other, right in zip(noisy, noise, steps, strict=True):
            np.testing.assert_allclose(one - other, right, rtol=1e-5, atol=1e-5, err_msg=str(params))


@pytest.mark.peers
def test_rules_whose_arithmetic_is_torchs_give_what_torch_gives() -> None:
    """To 1e-12, in float64: the order of a few multiplications differs."""
    walks = walked_by("torch", TORCH, [[name, params, *start(LONG)] for _, _, name, params in TORCH_CASES])
    for (name, params, _, _), steps in zip(TORCH_CASES, walks, strict=True):
        compare(name, params, steps, "float64", 1e-12)
