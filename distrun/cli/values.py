"""Options whose values are numbers: an error names the option, the accepted range and what was found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from distrun import request
from distrun.errors import UsageError
from distrun_runtime.contract import environ

Function = TypeVar("Function", bound=Callable[..., Any])


def seconds(*names: str, low: float | None = None, variable: str = "", **more: Any) -> Callable[[Function], Function]:
    """Return an option for a time in seconds, from `low` (more than 0 if it is None) to a year.

    `variable` is one of the environment table whose range it has.
    """
    least = environ.BY_NAME[variable].low if variable else low

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
        return None if value is None else request.seconds("/".join(param.opts), value, least)

    return click.option(*names, type=str, callback=convert, metavar="S", **more)


def count(*names: str, low: int, high: int = request.MOST, **more: Any) -> Callable[[Function], Function]:
    """Return an option for a whole number from `low` to `high`."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
        if value == "p" and "-n" in param.opts:
            raise UsageError("there is no option -np", "it is mpirun's; type -n N")
        return None if value is None else request.count("/".join(param.opts), value, low, high)

    return click.option(*names, type=str, callback=convert, metavar="N", **more)
