"""Each rule, step by step, against its formula written out for float64."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from distrun_runtime.arrays.dtypes import narrow, parse, widen
from distrun_runtime.ops import optimizers as rules

STEPS = 12
SIZE = 9
# Relative to float64, after 12 steps of a few roundings each; adam's quotients lose a digit more.
TOLERANCE = {"float16": 2e-2, "bfloat16": 2e-1, "float32": 2e-5, "float64": 1e-12}
Array = npt.NDArray[np.float64]
Walk = Iterator[Array]
ALL = {"wd": 0.1, "clip_gradient": 0.4, "rescale_grad": 0.5}


def start() -> Array:
    return np.random.default_rng(4).normal(size=SIZE).astype(np.float16).astype(np.float64)


def gradients() -> list[Array]:
    """Numbers that every dtype here has exactly, so that only arithmetic is compared."""
    random = np.random.default_rng(3)
    return [narrow_wide(random.normal(size=SIZE)) for _ in range(STEPS)]


def narrow_wide(values: Array) -> Array:
    return np.round(values * 64) / 64


def cut(values: Array, limit: float | None) -> Array:
    return values if limit is None else np.minimum(np.maximum(values, -limit), limit)


# The formulas. Each yields the weight after every step; p has every parameter that it reads.


def sgd(p: dict[str, Any]) -> Walk:
    w, v = start(), np.zeros(SIZE)
    for g in gradients():
        v = p.get("momentum", 0) * v - p["learning_rate"] * (
            cut(p["rescale_grad"] * g, p["clip_gradient"]) + p["wd"] * w
        )
        w = w + v
        yield w


def nag(p: dict[str, Any]) -> Walk:
    w, v = start(), np.zeros(SIZE)
    mu = p.get("momentum", 0)
    for g in gradients():
        slope = cut(p["rescale_grad"] * g, p["clip_gradient"]) + p["wd"] * w
        v = mu * v + slope
        w = w - p["learning_rate"] * (slope + mu * v)
        yield w


def torch_sgd(p: dict[str, Any]) -> Walk:
    w, v = start(), np.zeros(SIZE)
    mu = p.get("momentum", 0)
    for t, g in enumerate(gradients(), 1):
        slope = torchs_slope(p, g, w)
        v = mu * v + (1 - p.get("dampening", 0) if t > 1 else 1) * slope
        w = w - p["learning_rate"] * (slope + mu * v if p.get("nesterov") else v)
        yield w


def torchs_slope(p: dict[str, Any], g: Array, w: Array) -> Array:
    return (-1 if p.get("maximize") else 1) * cut(p["rescale_grad"] * g, p["clip_gradient"]) + p["wd"] * w


def adam(p: dict[str, Any]) -> Walk:
    w, m, v = start(), np.zeros(SIZE), np.zeros(SIZE)
    b1, b2 = p.get("beta1", 0.9), p.get("beta2", 0.999)
    for t, g in enumerate(gradients(), 1):
        slope = cut(p["rescale_grad"] * g + p["wd"] * w, p["clip_gradient"])
        m, v = b1 * m + (1 - b1) * slope, b2 * v + (1 - b2) * slope**2
        rate = p["learning_rate"] * (1 - b2**t) ** 0.5 / (1 - b1**t)
        w = w - rate * m / (v**0.5 + p.get("epsilon", 1e-8))
        yield w


def adamw(p: dict[str, Any]) -> Walk:
    w, m, v = start(), np.zeros(SIZE), np.zeros(SIZE)
    b1, b2 = p.get("beta1", 0.9), p.get("beta2", 0.999)
    for t, g in enumerate(gradients(), 1):
        slope = cut(p["rescale_grad"] * g, p["clip_gradient"])
        m, v = b1 * m + (1 - b1) * slope, b2 * v + (1 - b2) * slope**2
        rate = p["learning_rate"] * ((1 - b2**t) ** 0.5 / (1 - b1**t) if p.get("correct_bias", True) else 1)
        w = w - rate * (m / (v**0.5 + p.get("epsilon", 1e-6)) + p["wd"] * w)
        yield w


def torch_adam(p: dict[str, Any], apart: bool = False) -> Walk:
    w, m, v, largest = start(), np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    b1, b2 = p.get("beta1", 0.9), p.get("beta2", 0.999)
    for t, g in enumerate(gradients(), 1):
        slope = torchs_slope({**p, "wd": 0} if apart else p, g, w)
        m, v = b1 * m + (1 - b1) * slope, b2 * v + (1 - b2) * slope**2
        largest = np.maximum(largest, v) if p.get("amsgrad") else v
        w = w - p["learning_rate"] * p["wd"] * w * apart
        w = w - p["learning_rate"] * (m / (1 - b1**t)) / ((largest / (1 - b2**t)) ** 0.5 + p.get("epsilon", 1e-8))
        yield w


def torch_adamw(p: dict[str, Any]) -> Walk:
    return torch_adam({**p, "wd": p["wd"] or 0.01}, apart=True)


def torch_rmsprop(p: dict[str, Any]) -> Walk:
    w, n, a, v = start(), np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    alpha = p.get("alpha", 0.99)
    for g in gradients():
        slope = torchs_slope(p, g, w)
        n, a = alpha * n + (1 - alpha) * slope**2, alpha * a + (1 - alpha) * slope
        step = slope / ((n - a**2 if p.get("centered") else n) ** 0.5 + p.get("epsilon", 1e-8))
        v = p.get("momentum", 0) * v + step
        w = w - p["learning_rate"] * v
        yield w


def adamax(p: dict[str, Any]) -> Walk:
    w, m, u = start(), np.zeros(SIZE), np.zeros(SIZE)
    b1, b2 = p.get("beta1", 0.9), p.get("beta2", 0.999)
    for t, g in enumerate(gradients(), 1):
        slope = cut(p["rescale_grad"] * g + p["wd"] * w, p["clip_gradient"])
        m, u = b1 * m + (1 - b1) * slope, np.maximum(b2 * u, np.abs(slope) + p.get("epsilon", 1e-8))
        w = w - p["learning_rate"] / (1 - b1**t) * m / u
        yield w


def nadam(p: dict[str, Any]) -> Walk:
    w, m, v = start(), np.zeros(SIZE), np.zeros(SIZE)
    b1, b2, decay = p.get("beta1", 0.9), p.get("beta2", 0.999), p.get("schedule_decay", 0.004)
    mu = [b1 * (1 - 0.5 * 0.96 ** (t * decay)) for t in range(STEPS + 2)]
    for t, g in enumerate(gradients(), 1):
        slope = cut(p["rescale_grad"] * g + p["wd"] * w, p["clip_gradient"])
        m, v = b1 * m + (1 - b1) * slope, b2 * v + (1 - b2) * slope**2
        product = np.prod(mu[1 : t + 1])
        ahead = (1 - mu[t]) * slope / (1 - product) + mu[t + 1] * m / (1 - product * mu[t + 1])
        w = w - p["learning_rate"] * ahead / ((v / (1 - b2**t)) ** 0.5 + p.get("epsilon", 1e-8))
        yield w


def rmsprop(p: dict[str, Any]) -> Walk:
    w, n, a, d = start(), np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    g1, g2, eps = p.get("gamma1", 0.9), p.get("gamma2", 0.9), p.get("epsilon", 1e-8)
    for g in gradients():
        slope = cut(p["rescale_grad"] * g + p["wd"] * w, p["clip_gradient"])
        n = g1 * n + (1 - g1) * slope**2
        if p.get("centered"):
            a = g1 * a + (1 - g1) * slope
            d = g2 * d - p["learning_rate"] * slope / (n - a**2 + eps) ** 0.5
            w = w + d
        else:
            w = w - p["learning_rate"] * slope / (n + eps) ** 0.5
        w = cut(w, p.get("clip_weights"))
        yield w


def adagrad(p: dict[str, Any]) -> Walk:
    w, h = start(), np.zeros(SIZE)
    for g in gradients():
        slope = cut(p["rescale_grad"] * g, p["clip_gradient"])
        h = h + slope**2
        w = w - p["learning_rate"] * (slope / (h + p.get("eps", 1e-7)) ** 0.5 + p["wd"] * w)
        yield w


def adadelta(p: dict[str, Any]) -> Walk:
    w, n, d = start(), np.zeros(SIZE), np.zeros(SIZE)
    rho, eps = p.get("rho", 0.9), p.get("epsilon", 1e-5)
    for g in gradients():
        slope = cut(p["rescale_grad"] * g, p["clip_gradient"])
        n = rho * n + (1 - rho) * slope**2
        step = (d + eps) ** 0.5 / (n + eps) ** 0.5 * slope
        d = rho * d + (1 - rho) * step**2
        w = w - p["learning_rate"] * (step + p["wd"] * w)
        yield w


def ftml(p: dict[str, Any]) -> Walk:
    w, v, d, z = start(), np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    b1, b2, eps = p.get("beta1", 0.6), p.get("beta2", 0.999), p.get("epsilon", 1e-8)
    for t, g in enumerate(gradients(), 1):
        slope = cut(p["rescale_grad"] * g + p["wd"] * w, p["clip_gradient"])
        v = b2 * v + (1 - b2) * slope**2
        now = (1 - b1**t) / p["learning_rate"] * ((v / (1 - b2**t)) ** 0.5 + eps)
        z = b1 * z + (1 - b1) * slope - (now - b1 * d) * w
        w, d = -z / now, now
        yield w


def ftrl(p: dict[str, Any]) -> Walk:
    w, z, n = start(), np.zeros(SIZE), np.zeros(SIZE)
    lr, l1, beta = p["learning_rate"], p.get("lamda1", 0.01), p.get("beta", 1)
    for g in gradients():
        slope = cut(p["rescale_grad"] * g, p["clip_gradient"])
        z = z + slope - ((n + slope**2) ** 0.5 - n**0.5) * w / lr
        n = n + slope**2
        w = np.where(np.abs(z) > l1, (np.sign(z) * l1 - z) / ((beta + n**0.5) / lr + p["wd"]), 0)
        yield w


def lamb(p: dict[str, Any]) -> Walk:
    w, m, v = start(), np.zeros(SIZE), np.zeros(SIZE)
    b1, b2 = p.get("beta1", 0.9), p.get("beta2", 0.999)
    for t, g in enumerate(gradients(), 1):
        slope = cut(p["rescale_grad"] * g, p["clip_gradient"])
        m, v = b1 * m + (1 - b1) * slope, b2 * v + (1 - b2) * slope**2
        c1, c2 = (1 - b1**t, 1 - b2**t) if p.get("bias_correction", True) else (1, 1)
        d = (m / c1) / ((v / c2) ** 0.5 + p.get("epsilon", 1e-6)) + p["wd"] * w
        r = min(max(np.linalg.norm(w), p.get("lower_bound", 0)), p.get("upper_bound", np.inf))
        w = w - p["learning_rate"] * r / np.linalg.norm(d) * d
        yield w


def lars(p: dict[str, Any]) -> Walk:
    w, v = start(), np.zeros(SIZE)
    for g in gradients():
        g_norm, w_norm = np.linalg.norm(p["rescale_grad"] * g), np.linalg.norm(w)
        rate = p["learning_rate"] * p.get("eta", 0.001) * w_norm / (g_norm + p["wd"] * w_norm + p.get("eps", 0))
        v = p.get("momentum", 0) * v - rate * (cut(p["rescale_grad"] * g, p["clip_gradient"]) + p["wd"] * w)
        w = w + v
        yield w


def signum(p: dict[str, Any]) -> Walk:
    w, m = start(), np.zeros(SIZE)
    mu, lr, decay = p.get("momentum", 0.9), p["learning_rate"], p.get("wd_lh", 0)
    for g in gradients():
        if mu:
            m = mu * m + (1 - mu) * (cut(p["rescale_grad"] * g, p["clip_gradient"]) + p["wd"] * w)
            w = (1 - lr * decay) * w - lr * np.sign(m)
        else:
            w = (1 - lr * (p["wd"] + decay)) * w - lr * np.sign(g)
        yield w


def dcasgd(p: dict[str, Any]) -> Walk:
    w, v = start(), np.zeros(SIZE)
    previous = w
    for g in gradients():
        slope = cut(p["rescale_grad"] * g, p["clip_gradient"])
        slope = slope + p["wd"] * w + p.get("lamda", 0.04) * slope**2 * (w - previous)
        v = p.get("momentum", 0) * v - p["learning_rate"] * slope
        previous, w = w, w + v
        yield w


def sgld(p: dict[str, Any]) -> Walk:
    w, lr = start(), p["learning_rate"]
    for t, g in enumerate(gradients(), 1):
        slope = cut(p["rescale_grad"] * g, p["clip_gradient"]) + p["wd"] * w
        w = w - lr / 2 * slope + lr**0.5 * noise(p.get("seed", 0), "null", t)
        yield w


def noise(seed: int, key: str, update: int) -> Array:
    """The noise of sgld as its text has it, number by number; `key` as JSON."""
    text = "[%d, %s, %d]" % (seed, key, update)
    state, result = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"), []
    for _ in range(SIZE):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        bits = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
        bits ^= bits >> 31
        first, second = ((bits >> 32) + 0.5) / 2**32, (bits % 2**32) / 2**32
        result.append(math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second))
    return np.array(result)


def test(p: dict[str, Any]) -> Walk:
    w = start()
    for g in gradients():
        w = w + p["rescale_grad"] * g
        yield w


test.__test__ = False  # type: ignore[attr-defined]  # pytest: a rule's formula

CASES: list[tuple[Callable[[dict[str, Any]], Walk], dict[str, Any]]] = [
    (sgd, {"learning_rate": 0.1}),
    (sgd, {"learning_rate": 0.1, "momentum": 0.9}),
    (sgd, {"learning_rate": 0.1, "momentum": 0.9, **ALL}),
    (nag, {"learning_rate": 0.1}),
    (nag, {"learning_rate": 0.1, "momentum": 0.9}),
    (nag, {"learning_rate": 0.1, "momentum": 0.9, **ALL}),
    (torch_sgd, {"learning_rate": 0.1}),
    (torch_sgd, {"learning_rate": 0.1, "momentum": 0.9, **ALL}),
    (torch_sgd, {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, **ALL}),
    (torch_sgd, {"learning_rate": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True, **ALL}),
    (adam, {"learning_rate": 0.01}),
    (adam, {"learning_rate": 0.01, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3, **ALL}),
    (adamw, {"learning_rate": 0.01}),
    (adamw, {"learning_rate": 0.01, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3, **ALL}),
    (adamw, {"learning_rate": 0.01, "correct_bias": False, **ALL}),
    (rmsprop, {"learning_rate": 0.01}),
    (rmsprop, {"learning_rate": 0.01, "gamma1": 0.8, "epsilon": 1e-3, "clip_weights": 0.7, **ALL}),
    (rmsprop, {"learning_rate": 0.01, "centered": True}),
    (rmsprop, {"learning_rate": 0.01, "centered": True, "gamma1": 0.8, "gamma2": 0.5, "clip_weights": 0.7, **ALL}),
    (adagrad, {"learning_rate": 0.1}),
    (adagrad, {"learning_rate": 0.1, "eps": 1e-3, **ALL}),
    (ftrl, {"learning_rate": 0.1}),
    (ftrl, {"learning_rate": 0.2, "lamda1": 0.3, "beta": 0.5, **ALL}),
    (lamb, {"learning_rate": 0.01}),
    (lamb, {"learning_rate": 0.01, "bias_correction": False, "epsilon": 1e-3, **ALL}),
    (lamb, {"learning_rate": 0.01, "lower_bound": 10.0, "beta1": 0.5, **ALL}),
    (lamb, {"learning_rate": 0.01, "upper_bound": 0.5, "beta2": 0.9, **ALL}),
    (lars, {"learning_rate": 10.0}),
    (lars, {"learning_rate": 1.0, "eta": 0.1, "eps": 0.01, "momentum": 0.9, **ALL}),
    (lars, {"learning_rate": 1.0, "eta": 0.1, "momentum": 0.9, "momentum_correction": False, **ALL}),
    (signum, {"learning_rate": 0.1}),
    (signum, {"learning_rate": 0.1, "momentum": 0.5, "wd_lh": 0.3, **ALL}),
    (signum, {"learning_rate": 0.1, "momentum": 0.0, "wd_lh": 0.3, **ALL}),
    (dcasgd, {"learning_rate": 0.1}),
    (dcasgd, {"learning_rate": 0.1, "momentum": 0.9, "lamda": 0.5, **ALL}),
    (sgld, {"learning_rate": 0.1}),
    (sgld, {"learning_rate": 0.1, "seed": 2**62 + 1, **ALL}),
    (torch_adam, {"learning_rate": 0.01}),
    (torch_adam, {"learning_rate": 0.1, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3, **ALL}),
    (torch_adam, {"learning_rate": 0.1, "amsgrad": True, "maximize": True, "beta2": 0.5, **ALL}),
    (torch_adamw, {"learning_rate": 0.01}),
    (torch_adamw, {"learning_rate": 0.1, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3, **ALL}),
    (torch_adamw, {"learning_rate": 0.1, "amsgrad": True, "maximize": True, "beta2": 0.5, **ALL}),
    (torch_rmsprop, {"learning_rate": 0.01}),
    (torch_rmsprop, {"learning_rate": 0.01, "alpha": 0.8, "epsilon": 1e-3, "maximize": True, **ALL}),
    (torch_rmsprop, {"learning_rate": 0.01, "centered": True, "momentum": 0.9, "alpha": 0.8, **ALL}),
    (adamax, {"learning_rate": 0.01}),
    (adamax, {"learning_rate": 0.01, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3, **ALL}),
    (nadam, {"learning_rate": 0.01}),
    (nadam, {"learning_rate": 0.01, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3, "schedule_decay": 2.0, **ALL}),
    (adadelta, {"learning_rate": 1.0}),
    (adadelta, {"learning_rate": 0.5, "rho": 0.5, "epsilon": 1e-3, **ALL}),
    (ftml, {"learning_rate": 0.01}),
    (ftml, {"learning_rate": 0.01, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3, **ALL}),
    (test, {"rescale_grad": 0.5}),
]


def expected(formula: Callable[[dict[str, Any]], Walk], params: dict[str, Any]) -> list[Array]:
    return list(formula({"wd": 0.0, "clip_gradient": None, "rescale_grad": 1.0, **params}))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("formula", "params"), CASES)
def test_every_step_is_the_formulas(
    formula: Callable[[dict[str, Any]], Walk], params: dict[str, Any], dtype: str
) -> None:
    rule, tolerance = rules.make(formula.__name__, params), TOLERANCE[dtype]
    weight = narrow(start().astype("f4"), parse(dtype)) if dtype == "bfloat16" else start().astype(dtype)
    state = rule.new_state(weight)
    for number, (grad, right) in enumerate(zip(gradients(), expected(formula, params), strict=True)):
        given = narrow(grad.astype("f4"), parse(dtype)) if dtype == "bfloat16" else grad.astype(dtype)
        before = given.copy()
        rule.step(weight, given, state)
        found = widen(weight).astype(np.float64)
        np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance, err_msg="step %d" % (number + 1))
        assert np.array_equal(given.view("u1"), before.view("u1")), "the gradient was changed"
    assert weight.dtype == parse(dtype)
    assert state["updates"] == STEPS


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("formula", "params"), CASES)
def test_a_master_of_half_precision_is_as_good_as_a_float32_weight(
    formula: Callable[[dict[str, Any]], Walk], params: dict[str, Any], dtype: str
) -> None:
    rule = rules.make(formula.__name__, {**params, "multi_precision": True})
    weight = narrow(start().astype("f4"), parse(dtype))
    single = widen(weight)
    state, other = rule.new_state(weight), rule.new_state(single)
    assert "master" not in other
    for grad in gradients():
        rule.step(weight, grad.astype("f4"), state)
        rule.step(single, grad.astype("f4"), other)
    assert np.array_equal(state["master"], single)
    assert np.array_equal(weight, narrow(single, parse(dtype)))
    assert all(value.dtype == np.float32 for value in state.values() if isinstance(value, np.ndarray))


def test_every_rule_has_a_formula_here() -> None:
    assert {formula.__name__ for formula, _ in CASES} == set(rules.RULES)
