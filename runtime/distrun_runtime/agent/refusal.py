"""Why a host cannot take its part in a job."""

from __future__ import annotations

from distrun_runtime.errors import ContractError


class Refusal(ContractError):
    """`begin` cannot be followed here. `kind` is one word (docs/protocol.md), `fix` what the user can do about it."""

    def __init__(self, kind: str, text: str, fix: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.fix = fix
