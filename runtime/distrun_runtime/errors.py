"""What can go wrong on the cluster side.

    RuntimeFault
      + ContractError (ValueError)       a variable, plan or frame that is missing or malformed
          + PreflightFailure             a host cannot take its part in a job: kind, fix
      + WireError (ValueError)           bytes that are no message of ours: magic, version, length
      + Refused (ConnectionError)        the other side would not let us in, and says why
      + PeerLost (ConnectionError)       a node died or fell silent: which, where, when
      + TimedOut (TimeoutError)          what was awaited, from whom, for how long
      + KVError (ValueError)             a key, shape, dtype or rule that does not fit the store
          + RuleError                    a rule failed on a server; carries the server's traceback
      + StoreClosed (RuntimeError)       the store was closed, left, or inherited by a forked child
      + StageError (RuntimeError)        a stage of a pipeline failed: which, at which part of the batch
      + DataError (ValueError)           a data file that is damaged or not of its format: file, offset
      + JobStoreError (OSError)          a job's folder cannot be made, read or written
      + NoSuchJob (LookupError)          no job, or several, of that id or name; lists near ones

Each class also derives from the built-in that fits, so `except ValueError` catches what it should.
Standard library only; Python 3.8 (this file travels with the agent).
"""

from __future__ import annotations


class RuntimeFault(Exception):
    """The root of every error that the cluster side raises on purpose."""

    lost_peer: str = ""
    """Name of the node (`server-0`) that is the reason, because it is lost or did not answer; empty: none is."""


JOIN_ADVICE = "; a worker that runs out of data calls kv.join()"
"""What the errors of open rounds end with."""


def explain(err: RuntimeFault, what: str, advice: str = "") -> None:
    """Add the user's call to an error, in place, so that it keeps its type and where it was raised.

    Arguments:
        advice: in place of that to join.
    """
    err.args = (f"{what}: {err}".replace(JOIN_ADVICE, advice), *err.args[1:])


class ContractError(RuntimeFault, ValueError):
    """A variable, plan or frame is missing or malformed: which, what was found, what would be right."""


class PreflightFailure(ContractError):
    """A host cannot take its part in a job. `kind` is one word (docs/protocol.md), `fix` what the user can do."""

    def __init__(self, kind: str, text: str, fix: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.fix = fix


class WireError(RuntimeFault, ValueError):
    """Bytes arrived that are no message of ours."""


class Refused(RuntimeFault, ConnectionError):
    """The other side refused us and said why."""


class PeerLost(RuntimeFault, ConnectionError):
    """A node of the job died or fell silent; the message names role, rank, host and what was seen."""

    lost_peer = "a peer"


class TimedOut(RuntimeFault, TimeoutError):
    """A wait reached its deadline; the message says what was awaited, from whom and for how long."""


class KVError(RuntimeFault, ValueError):
    """A call does not fit the store: both sides of the difference are in the message."""

    is_of_device: bool = False
    """A GPU failed, or has too little memory; nothing is wrong with the call."""


class RuleError(KVError):
    """A rule failed on a server. `server_traceback` is the server's own; Python 3.11 and newer print it with ours."""

    def __init__(self, message: str, server_traceback: str = "") -> None:
        super().__init__(message)
        self.server_traceback = server_traceback
        if server_traceback:
            self.__notes__ = ["On the server: " + server_traceback.rstrip()]


class StoreClosed(RuntimeFault, RuntimeError):
    """The store cannot be used any more: closed, left, or inherited by a forked child."""


class StageError(RuntimeFault, RuntimeError):
    """A layer failed in a pipeline; the message names stage, layers, device and micro-batch. The cause is its error."""


class DataError(RuntimeFault, ValueError):
    """A data file is damaged or not what it should be; the message names file, offset, expected and found."""


class JobStoreError(RuntimeFault, OSError):
    """A job's folder cannot be made, read or written: which, and why."""


class NoSuchJob(RuntimeFault, LookupError):
    """No job, or more than one, has that id, beginning of an id, or name; the message lists what there is."""


def because_of(error: RuntimeFault, peer: str) -> RuntimeFault:
    """Return `error`, whose reason is the node `peer` (empty: not known)."""
    if peer:
        error.lost_peer = peer
    return error
