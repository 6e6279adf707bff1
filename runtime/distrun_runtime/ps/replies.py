"""Replies to a request: yes, and no with a reason. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distrun_runtime.errors import KVError
from distrun_runtime.protocol.message import Flag, Message
from distrun_runtime.ps import role


def answer(request: Message, body: Mapping[str, Any] | None = None) -> Message:
    """Return the reply that says: done."""
    return Message(request.kind, Flag.REPLY, store=request.store, request=request.request, body=body or {})


def refusal(
    request: Message, reason: str, error: str = "KVError", traceback: str = "", *, who: str = "", again: bool = False
) -> Message:
    """Return the reply that says why not; the caller raises `error`, a class of distrun_runtime.errors.

    Arguments:
        who: the name of the node that is lost, if that is why.
        again: nothing of the request was done, and it is to be sent again under its number, with its entries.
    """
    more = {name: text for name, text in (("traceback", traceback), ("who", who), ("again", again)) if text}
    body = {"reason": reason, "error": error, **more}
    flags = Flag.REPLY | Flag.ERROR
    return Message(request.kind, flags, store=request.store, request=request.request, body=body)


def failed(request: Message, event: role.Done) -> Message:
    """Return the refusal of a request whose work failed."""
    assert event.error is not None
    if isinstance(event.error, KVError):
        return refusal(request, str(event.error))
    # A user's class or function, most likely; where it failed is only known here.
    reason = "%s: %s" % (type(event.error).__name__, event.error)
    return refusal(request, reason, "RuleError", event.traceback)
