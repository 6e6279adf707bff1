"""What an agent can be asked before, or instead of, a job: one answer to each question.

A tool may keep the agent waiting, up to a deadline of its own. What it gives is JSON-able. Each module is imported when
it is first asked for.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

from distrun_runtime.errors import ContractError


def answer(what: str, args: Dict[str, Any]) -> Any:
    """Return the answer of the tool `what`.

    Raises:
        ContractError: there is no such tool, or it cannot do what was asked.
        LookupError, TypeError, ValueError: an argument is missing or malformed.
        OSError: the system refused something.
    """
    if what == "survey":
        from distrun_runtime.agent import survey

        return survey.survey()
    if what == "sweep":
        from distrun_runtime.agent import survey

        return survey.end(str(args["job"]), _grace_s(args))
    if what == "sweeps":
        from distrun_runtime.agent import survey

        return survey.end_all([str(job) for job in args["jobs"]], _grace_s(args))
    if what == "match":
        from distrun_runtime.agent import match

        return match.match(args)
    if what == "probe":
        from distrun_runtime.agent import probe

        return probe.probe(args)
    if what in ("listen", "connect", "close"):
        from distrun_runtime.agent import links

        return links.answer(what, args)
    raise ContractError("this agent has no tool %r" % what)


def _grace_s(args: Dict[str, Any]) -> Optional[float]:
    return None if args.get("grace_s") is None else float(args["grace_s"])
