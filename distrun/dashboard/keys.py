"""Decodes the input of a terminal into keys.

No side effects. Sequences may arrive in pieces. Pasted text (bracketed paste) is dropped, so that no key comes from the
clipboard.
"""

from __future__ import annotations

import codecs

ESCAPE_S = 0.05
"""An escape character that is followed by nothing for this time is the key Esc."""
LONGEST = 64
"""Bytes of an escape sequence; a longer one is dropped."""

_SEQUENCES = {
    "[A": "up",
    "[B": "down",
    "[C": "right",
    "[D": "left",
    "OA": "up",
    "OB": "down",
    "OC": "right",
    "OD": "left",
    "[H": "home",
    "[F": "end",
    "OH": "home",
    "OF": "end",
    "[1~": "home",
    "[4~": "end",
    "[7~": "home",
    "[8~": "end",
    "[5~": "pgup",
    "[6~": "pgdn",
    "[3~": "delete",
    "[Z": "backtab",
    "OM": "enter",
}
_CONTROLS = {"\r": "enter", "\n": "enter", "\t": "tab", "\x7f": "backspace", "\x08": "backspace", "\x0c": "ctrl-l"}
_PASTE_BEGINS = "[200~"
_PASTE_ENDS = "\x1b[201~"


class KeyDecoder:
    """Turns bytes into names of keys: a character, or `up`, `enter`, `esc` and so on."""

    def __init__(self) -> None:
        self._characters = codecs.getincrementaldecoder("utf-8")("ignore")
        self._waiting = ""
        self._is_pasting = False

    @property
    def is_waiting(self) -> bool:
        """Whether what came last may be the beginning of a sequence: after ESCAPE_S `expire` is to be called."""
        return bool(self._waiting) and not self._is_pasting

    def feed(self, data: bytes) -> list[str]:
        """Return the keys that are complete with these bytes."""
        self._waiting += self._characters.decode(data)
        keys: list[str] = []
        while self._waiting:
            if self._is_pasting:
                if not self._skip_paste():
                    break
                continue
            first = self._waiting[0]
            if first != "\x1b":
                self._waiting = self._waiting[1:]
                if first in _CONTROLS:
                    keys.append(_CONTROLS[first])
                elif first.isprintable():
                    keys.append(first)
                continue
            length = _length(self._waiting)
            if length == 0:
                break
            sequence, self._waiting = self._waiting[1:length], self._waiting[length:]
            if sequence == _PASTE_BEGINS:
                self._is_pasting = True
            elif sequence == "":
                keys.append("esc")
            elif sequence in _SEQUENCES:
                keys.append(_SEQUENCES[sequence])
        return keys

    def expire(self) -> list[str]:
        """Return the keys of what waits: nothing more has come of it."""
        if not self.is_waiting:
            return []
        is_lone, self._waiting = self._waiting == "\x1b", ""
        return ["esc"] if is_lone else []

    def _skip_paste(self) -> bool:
        end = self._waiting.find(_PASTE_ENDS)
        if end < 0:
            self._waiting = self._waiting[-len(_PASTE_ENDS) + 1 :]  # the end may have come in part
            return False
        self._waiting = self._waiting[end + len(_PASTE_ENDS) :]
        self._is_pasting = False
        return True


def _length(text: str) -> int:
    """Return how long the sequence is that a text begins with; 0: it is not complete. 1: it is the key Esc."""
    if len(text) == 1:
        return 0
    if text[1] == "\x1b":
        return 1
    if text[1] == "O":
        return 3 if len(text) > 2 else 0
    if text[1] != "[":
        return 1  # Alt and a key reads the same
    for at in range(2, min(len(text), LONGEST)):
        if "@" <= text[at] <= "~":
            return at + 1
    return LONGEST if len(text) >= LONGEST else 0
