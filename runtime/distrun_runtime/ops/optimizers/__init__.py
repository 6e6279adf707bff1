"""Update rules: how a summed gradient changes a weight. By name and JSON parameters, never as code."""

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.ops.optimizers.base import (
    CLIP,
    COMMON,
    DECAY,
    LAZY,
    MULTI,
    PLAIN,
    RESCALE,
    SCHEDULE,
    Key,
    Knobs,
    Rates,
    Rule,
    State,
    check_keys,
    learning_rate,
)
from distrun_runtime.ops.optimizers.catalog import RULES, carry_state, make, renew_master
from distrun_runtime.ops.optimizers.norms import NormRule, Prepared
from distrun_runtime.ops.optimizers.spec import (
    RuleSpec,
    advice,
    change_of,
    decays_by_name,
    difference,
    rule_of,
    same,
    spec_of,
)
from distrun_runtime.ops.params import Param

__all__ = [
    "CLIP",
    "COMMON",
    "DECAY",
    "LAZY",
    "MULTI",
    "PLAIN",
    "RESCALE",
    "RULES",
    "SCHEDULE",
    "Array",
    "Key",
    "Knobs",
    "NormRule",
    "Param",
    "Prepared",
    "Rates",
    "Rule",
    "RuleSpec",
    "State",
    "advice",
    "carry_state",
    "change_of",
    "check_keys",
    "decays_by_name",
    "difference",
    "learning_rate",
    "make",
    "renew_master",
    "rule_of",
    "same",
    "spec_of",
]
