"""Has half of the calls for which there is a plan made without it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from distrun_runtime.store.plans import CallPlans


def alternate(seed: str, patch: Callable[[Any, str, Any], object]) -> None:
    """Have it so from now on; the same seed chooses the same calls. `patch` sets an attribute."""
    find, chance = CallPlans.find, random.Random(seed)

    def found(self: CallPlans, *call: Any) -> Any:
        plan = find(self, *call)
        return plan if chance.random() < 0.5 else None

    patch(CallPlans, "find", found)
