"""Rules that follow the gradient itself: sgd, nag, signum, dcasgd, sgld and test."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np

from distrun_runtime.arrays.dtypes import Array, name_of
from distrun_runtime.errors import KVError
from distrun_runtime.ops.optimizers.base import (
    COMMON,
    LAZY,
    MULTI,
    RESCALE,
    Rates,
    Rule,
    State,
    decay,
    learning_rate,
    subtract,
)
from distrun_runtime.ops.params import Json, Param

MOMENTUM = Param("momentum", 0.0, low=0.0, high=1.0)
CHUNK = 1 << 15
"""So many numbers of `noise` are made at once: their intermediate results stay in the processor's cache."""


def _seed(value: object) -> Json:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not 0 <= cast(float, value) < 2**63 or value != int(cast(float, value)):
        raise KVError(f"seed={value!r}: expected a whole number from 0 to 2**63 - 1")
    return int(cast(float, value))


def descend(weight: Array, step: Array, state: State, momentum: float) -> None:
    """Take a step downwards in place: v = momentum v - step, w += v; without a v in the state, w -= step."""
    if "momentum" in state:
        velocity = cast(Array, state["momentum"])
        velocity *= momentum
        velocity -= step
        weight += velocity
    else:
        weight -= step


class Sgd(Rule):
    """g' = clip(rescale_grad g) + wd w; v = momentum v - learning_rate g'; w += v.

    Source: MXNet's `SGD` (`sgd_update`, `sgd_mom_update`).
    """

    name = "sgd"
    table: ClassVar[tuple[Param, ...] | None] = (learning_rate(0.01), MOMENTUM, *COMMON, LAZY)

    def start(self, weight: Array) -> State:
        """Return the momentum v, if there is any."""
        return {"momentum": np.zeros_like(weight)} if self.params["momentum"] else {}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        descend(weight, self.descent(weight, grad, rates), state, self.number("momentum"))

    def descent(self, weight: Array, grad: Array, rates: Rates) -> Array:
        """Return learning_rate g' as a new array."""
        given = self.clipped(grad)
        if not rates.wd:
            return given * rates.learning_rate
        step = np.multiply(weight, rates.wd)
        np.add(given, step, out=step)
        step *= rates.learning_rate
        return step


class Nag(Sgd):
    """Nesterov's momentum. g' = clip(rescale_grad g) + wd w; v = momentum v - learning_rate g'.

    w += momentum v - learning_rate g'. Without momentum it is `sgd`.

    Source: MXNet's `NAG`, as its text has it, and torch's `SGD(nesterov=True)`. We differ: with a weight decay,
    `nag_mom_update` 1.9.1 reads w for the momentum after it has overwritten it, so that w decays twice a step.
    """

    name = "nag"
    table = (learning_rate(0.01), MOMENTUM, *COMMON)

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        if "momentum" not in state:
            super().update(weight, grad, state, rates)
            return
        step, velocity = self.descent(weight, grad, rates), cast(Array, state["momentum"])
        velocity *= self.number("momentum")
        velocity -= step
        weight -= step
        np.multiply(velocity, self.number("momentum"), out=step)
        weight += step


class Signum(Sgd):
    """g' = clip(rescale_grad g) + wd w; m = momentum m + (1 - momentum) g'; w -= learning_rate (sign(m) + wd_lh w).

    Without momentum (signSGD): w -= learning_rate (sign(rescale_grad g) + (wd + wd_lh) w).

    Source: MXNet's `Signum` (`signum_update`, `signsgd_update`); Bernstein et al., 2018. We differ: without momentum
    MXNet refuses wd_lh.
    """

    name = "signum"
    table = (learning_rate(0.01), replace(MOMENTUM, default=0.9), Param("wd_lh", 0.0, low=0.0), *COMMON)

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        step, share = self.rescaled(grad), self.number("wd_lh")
        if "momentum" in state:
            mean = cast(Array, state["momentum"])
            self.clip(step)
            decay(step, weight, rates)
            mean *= self.number("momentum")
            step *= 1.0 - self.number("momentum")  # step is used up: the sign of m goes there
            mean += step
            np.sign(mean, out=step)
        else:
            share += rates.wd
            np.sign(step, out=step)
        if share:
            weight *= 1.0 - rates.learning_rate * share
        subtract(weight, step, rates.learning_rate)


class Dcasgd(Sgd):
    """Asynchronous descent that corrects the delay of gradients. g' = clip(rescale_grad g), and with p for previous:

    v = momentum v - learning_rate (g' + wd w + lamda g' g' (w - p)); p = w; w += v.

    Source: MXNet's `DCASGD`; Zheng et al., 2017. As in MXNet, p is the weight before its last update by any worker; in
    the paper it is the weight that the gradient's worker had pulled. We differ: MXNet fails with a momentum.
    """

    name = "dcasgd"
    table = (learning_rate(0.01), MOMENTUM, Param("lamda", 0.04, low=0.0), *COMMON)

    def start(self, weight: Array) -> State:
        """Return p, and v if there is a momentum."""
        return {"previous": weight.copy(), **super().start(weight)}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        given, previous = self.cut(grad), cast(Array, state["previous"])
        step = np.subtract(weight, previous)
        step *= given
        step *= given
        step *= self.number("lamda")
        step += given
        decay(step, weight, rates)
        step *= rates.learning_rate
        previous[...] = weight
        descend(weight, step, state, self.number("momentum"))


class Sgld(Rule):
    """Langevin dynamics. g' = clip(rescale_grad g); w += -learning_rate / 2 (g' + wd w) + sqrt(learning_rate) x.

    x is noise of the standard normal distribution. It is a function of the seed, the key, the number of the update and
    the element's place in the key's value, and of nothing else (`noise`). So it is the same however a value is cut over
    servers, and on all workers where each trainer updates its own copy. Of a row-sparse gradient only its rows move.

    Source: MXNet's `SGLD`; Welling and Teh, 2011. We differ in where the noise comes from: there from the server's own
    generator, which no seed of the job sets.
    """

    name = "sgld"
    is_elementwise = False
    table = (learning_rate(0.01), Param("seed", 0.0, reader=_seed), *COMMON)

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        step = self.cut(grad)
        decay(step, weight, rates)
        subtract(weight, step, rates.learning_rate / 2)
        stream = json.dumps([int(cast(float, self.params["seed"])), rates.key, rates.updates])
        step = noise(stream, weight.shape, rates).astype(weight.dtype, copy=False)
        step *= math.sqrt(rates.learning_rate)
        weight += step


def noise(stream: str, shape: tuple[int, ...], rates: Rates) -> Array:
    """Return standard normal numbers of a shape, float64: one for each element, by its place in the key's value.

    The stream's start s is the first 8 bytes of the BLAKE2b digest of its text, little-endian. Place i has the number
    i + 1 of the SplitMix64 generator that starts with s; its upper 32 bits a and lower 32 bits b become
    sqrt(-2 ln((a + 1/2) / 2^32)) cos(2 pi b / 2^32) (Box and Muller).

    Arguments:
        stream: which numbers; another text gives others.
        rates: of the step: `offset` and `rows` say which places the elements have.
    """
    import hashlib  # with OpenSSL, which no other rule needs

    start = np.uint64(int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little"))
    count, row_size = math.prod(shape), max(1, math.prod(shape[1:]))
    result = np.empty(count)
    for first in range(0, count, CHUNK):
        places = np.arange(first, min(first + CHUNK, count))
        if rates.rows is not None:
            places = rates.rows[places // row_size] * row_size + places % row_size
        bits = (places + (rates.offset + 1)).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
        radius = np.sqrt(-2.0 * np.log(((bits >> np.uint64(32)) + 0.5) / 2.0**32))
        result[first : first + CHUNK] = radius * np.cos((bits & np.uint64(0xFFFFFFFF)) * (2 * math.pi / 2.0**32))
    return result.reshape(shape)


class Test(Rule):
    """w += rescale_grad g. Integer weights too, if rescale_grad is a whole number; they wrap around.

    Source: MXNet's `Test`.
    """

    __test__ = False  # pytest: a rule, not a set of tests
    name = "test"
    table = (RESCALE, MULTI)

    def check(self, dtype: np.dtype[Any]) -> None:
        """Return if weights of this dtype can be updated."""
        rescale = self.number("rescale_grad")
        if dtype.kind in "iu" and (rescale != int(rescale) or abs(rescale) >= 2**63):
            raise KVError(
                f"rule 'test' with rescale_grad={rescale:g} updates float weights, not {name_of(dtype)}: whole numbers"
                " only"
            )

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        if weight.dtype.kind in "iu":
            weight += grad * np.array(int(cast(float, self.params["rescale_grad"])), np.int64).astype(weight.dtype)
        else:
            weight += self.rescaled(grad)
