"""Ids of jobs: short, pronounceable, unique in a store, e.g. `calm-otter-7f3`, or `digits-7f3` for a named job."""

from __future__ import annotations

import random
import re
from typing import Callable, Optional

from distrun_runtime.errors import JobStoreError

_FIRST = (
    "able amber apt blue bold brave brief bright brisk calm clean clear clever cool crisp deep eager early "
    "even fair fast fine firm fond free fresh full gentle glad gold good grand green happy keen kind lean "
    "light live loud lucky merry mild neat new nice noble open pale plain prime proud pure quick quiet rare "
    "ready red rich ripe round safe sharp shy silver slim smart smooth soft solid spry still strong sunny sure "
    "sweet swift tall tame tidy true vast warm wide wild wise young"
)
_SECOND = (
    "ant ape auk bat bear bee bird boar bream buck bull calf camel carp cat clam cod colt coot crab crane crow "
    "cub deer dog dove duck eagle eel elk emu ewe falcon fawn finch fish fox frog gnu goat goose grebe gull "
    "hare hawk hen heron horse ibex ibis jay kid kite koala lamb lark lemur lion llama loon lynx mink mole "
    "moose moth mouse mule newt ocelot okapi orca oryx otter owl ox panda perch pig pike pony puffin puma "
    "quail rabbit ram rat raven robin rook salmon seal shark sheep shrew shrimp skua sloth snail snipe sparrow "
    "squid stag stork swan swift tapir teal tern tiger toad trout turtle viper vole wasp weasel whale wolf "
    "wombat wren yak zebra"
)

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._]+")
_TRIES = 200
_NAME_LIMIT = 40


def new_id(taken: Callable[[str], bool], name: str = "", chance: Optional[random.Random] = None) -> str:
    """Return an id for which `taken` is false. It is also a legal file name, and begins with a letter or digit.

    Arguments:
        taken: whether the store has such a job.
        name: what the user calls the job; what no file name should hold becomes a hyphen.
        chance: source of randomness; the system's when absent (two launchers never draw alike).

    Raises:
        JobStoreError: the store is full of such ids.
    """
    chance = chance or random.SystemRandom()
    stem = _NOT_PLAIN.sub("-", name).strip("-._")[:_NAME_LIMIT].rstrip("-._")
    for _ in range(_TRIES):
        front = stem or f"{chance.choice(_FIRST.split())}-{chance.choice(_SECOND.split())}"
        wanted = f"{front}-{chance.randrange(16**3):03x}"
        if not taken(wanted):
            return wanted
    raise JobStoreError("no free job id of the form %s-xxx; choose another --name" % (stem or "word-word"))
