"""The terminal of the dashboard: takes over the screen, reads keys, draws lines, and restores everything at the end.

Drawing never blocks. The terminal is opened a second time, so that only this program's writes are non-blocking. A frame
that equals the last one is skipped. While the terminal has not taken a frame, later frames are dropped. Only changed
lines are written.

Text that this process and ssh write to stderr meanwhile goes to a file, which is printed after the screen is restored.
For use by one thread.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import select
import signal
import tempfile
import termios
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from distrun.dashboard import text
from distrun.dashboard.text import Glyphs, Line

READ_SIZE = 4096
GIVE_BACK_S = 0.5
"""How long a terminal that takes nothing is waited for when it is given back."""
_TAKE = b"\x1b[?1049h\x1b[?25l\x1b[?2004h\x1b[?7l\x1b[2J"
"""Second screen, no cursor, pasted text is marked, long lines are not continued on the next one."""
_GIVE_BACK = b"\x1b[0m\x1b[?7h\x1b[?2004l\x1b[?25h\x1b[?1049l"
_ERASE_REST = "\x1b[K"
_LFLAG, _CC, _IFLAG = 3, 6, 0


@dataclass(frozen=True)
class Appearance:
    """How the dashboard is drawn: with colours, and with ASCII characters only."""

    has_colour: bool = True
    is_ascii: bool = False


class Terminal:
    """The terminal that stdout and stdin are.

    Arguments:
        in_fd: where keys come from.
        out_fd: where the screen is.
        look: how it is drawn.
    """

    def __init__(self, in_fd: int = 0, out_fd: int = 1, look: Appearance = Appearance()) -> None:
        self._in = in_fd
        self._out = out_fd
        self._look = look
        self._fd = -1
        self._is_shared = False
        """`_fd` is `out_fd` itself: the terminal could not be opened again."""
        self._before: list[Any] | None = None
        self._ours: list[Any] = []
        """Settings of the terminal before, and while the screen is taken."""
        self._is_taken = False
        self._drawn: list[str] = []
        self._size = (0, 0)
        self._pending = b""
        self._err: IO[bytes] | None = None
        self._err_fd = -1

    def __enter__(self) -> Terminal:
        try:
            self.take()
        except BaseException:
            self.give_back()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.give_back()

    # ------------------------------------------------------------------ taking the screen, and giving it back

    def take(self) -> None:
        """Take the screen: no echo, keys one by one; Ctrl-C and Ctrl-Z stay signals."""
        self._open()
        settings: list[Any] = termios.tcgetattr(self._in)
        self._before = list(settings)
        settings[_LFLAG] &= ~(termios.ICANON | termios.ECHO)
        settings[_IFLAG] &= ~(termios.IXON | termios.ICRNL)
        characters = list(settings[_CC])
        characters[termios.VMIN], characters[termios.VTIME] = b"\x01", b"\x00"
        # Ctrl-\ would leave the screen taken, with a core dump.
        characters[termios.VQUIT] = bytes([os.fpathconf(self._in, "PC_VDISABLE") & 0xFF])
        settings[_CC] = characters
        self._ours = settings
        # First: a background process is stopped here, before it draws.
        self._set(settings)
        self._keep_stderr()
        self._is_taken = True
        self._pending = _TAKE
        self.redraw()
        self.flush()

    def give_back(self) -> None:
        """Give screen, cursor and echo back as they were. A terminal that is stuck, or gone, is no error."""
        if self._is_taken:
            self._is_taken = False
            self._pending = b""
            self._write_last(_GIVE_BACK)
        if self._before is not None:
            with contextlib.suppress(termios.error, OSError):
                self._set(self._before)
            self._before = None
        if self._fd >= 0:
            if self._is_shared:
                with contextlib.suppress(OSError):
                    os.set_blocking(self._fd, True)
            else:
                os.close(self._fd)
            self._fd = -1
        self._give_stderr_back()

    def suspend(self) -> None:
        """Give the terminal back, stop this process as Ctrl-Z does, and take the terminal again when it goes on."""
        self.give_back()
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        try:
            # This thread: it then stops before the next line, whichever threads there are.
            signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
        finally:
            signal.signal(signal.SIGTSTP, before)
        self.take()

    def again(self) -> None:
        """Take the screen once more, after this process was stopped in a way that it cannot notice (SIGSTOP)."""
        if self._is_taken:
            with contextlib.suppress(termios.error):
                self._set(self._ours)
            self._pending = _TAKE
            self.redraw()
            self.flush()

    def _set(self, settings: list[Any]) -> None:
        """Give the terminal settings. In the background this stops the process, and a signal ends the call then."""
        while True:
            try:
                termios.tcsetattr(self._in, termios.TCSANOW, settings)
                return
            except termios.error as err:
                if err.args[0] != errno.EINTR:
                    raise

    def _open(self) -> None:
        if self._fd >= 0:
            return
        try:
            flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            self._fd = os.open(os.ttyname(self._out), flags)
            self._is_shared = False
        except OSError:  # as in some containers, where the terminal has no name
            self._fd = self._out
            self._is_shared = True
            os.set_blocking(self._fd, False)

    def _keep_stderr(self) -> None:
        if not os.isatty(2):
            return
        self._err = tempfile.TemporaryFile()  # noqa: SIM115 - until the screen is given back
        self._err_fd = os.dup(2)
        os.set_inheritable(self._err_fd, False)
        os.dup2(self._err.fileno(), 2)

    def _give_stderr_back(self) -> None:
        if self._err is None:
            return
        os.dup2(self._err_fd, 2)
        os.close(self._err_fd)
        self._err.seek(0)
        said = self._err.read()
        self._err.close()
        self._err = None
        with contextlib.suppress(OSError):
            if said and select.select([], [2], [], GIVE_BACK_S)[1]:
                os.write(2, said[-READ_SIZE // 2 :])

    def _write_last(self, data: bytes) -> None:
        """Write what gives the screen back; what a stuck terminal has not taken is thrown away first."""
        until = time.monotonic() + GIVE_BACK_S
        was_flushed = False
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                if not select.select([], [self._fd], [], max(0.0, until - time.monotonic()))[1]:
                    if was_flushed:
                        return
                    was_flushed = True
                    with contextlib.suppress(termios.error):
                        termios.tcflush(self._fd, termios.TCOFLUSH)
            except OSError:
                return

    # ------------------------------------------------------------------ keys

    @property
    def keys(self) -> int:
        """The descriptor that is readable when a key was pressed."""
        return self._in

    def read(self) -> bytes | None:
        """Return what was typed; b"" if nothing was, None at the end of the terminal."""
        if not select.select([self._in], [], [], 0)[0]:
            return b""
        try:
            return os.read(self._in, READ_SIZE) or None
        except InterruptedError:
            return b""
        except OSError as err:
            return None if err.errno != errno.EAGAIN else b""

    # ------------------------------------------------------------------ drawing

    @property
    def glyphs(self) -> Glyphs:
        """The characters of charts and marks."""
        return text.ASCII if self._look.is_ascii else text.UNICODE

    @property
    def out(self) -> int:
        """The descriptor to wait for while `is_behind`."""
        return self._fd

    @property
    def is_behind(self) -> bool:
        """Whether the terminal has not taken the last frame yet."""
        return bool(self._pending)

    def size(self) -> tuple[int, int]:
        """Return columns and rows, 80 and 24 where the terminal does not say."""
        try:
            found = os.get_terminal_size(self._out)
        except OSError:
            return 80, 24
        return found.columns or 80, found.lines or 24

    def redraw(self) -> None:
        """Have the next frame draw every line."""
        self._drawn = []
        self._size = (0, 0)

    def draw(self, lines: Sequence[Line]) -> bool:
        """Draw a frame; return False if it was dropped, because the terminal has not taken the last one."""
        if self.is_behind and not self.flush():
            return False
        size = self.size()
        encoded = [self._encoded(line, size[0]) for line in lines[: size[1]]]
        parts = []
        if size != self._size:
            self._size, self._drawn = size, []
            parts.append("\x1b[0m\x1b[2J")
        for number, line in enumerate(encoded):
            if number >= len(self._drawn) or self._drawn[number] != line:
                parts.append(f"\x1b[{number + 1};1H{line}")
        parts += [f"\x1b[{number + 1};1H\x1b[K" for number in range(len(encoded), len(self._drawn))]
        self._drawn = encoded
        if parts:
            self._pending = "".join(parts).encode("utf-8", "replace")
            self.flush()
        return True

    def flush(self) -> bool:
        """Write what waits, as far as the terminal takes it at once; return whether it has taken all."""
        while self._pending:
            try:
                self._pending = self._pending[os.write(self._fd, self._pending) :]
            except BlockingIOError:
                return False
            except OSError:
                self._pending = b""  # it is gone: reading tells
        return True

    def _encoded(self, line: Line, columns: int) -> str:
        found = text.encode(line, self._look.has_colour)
        if text.line_width(line) < columns:
            found += _ERASE_REST  # in the last column it would erase what was written there
        return text.only_ascii(found) if self._look.is_ascii else found


# Decodes the input of a terminal into keys. No side effects. Sequences may arrive in pieces. Pasted text (bracketed
# paste) is dropped, so that no key comes from the clipboard.


ESCAPE_S = 0.05
"""An escape character that is followed by nothing for this time is the key Esc."""
LONGEST = 64
"""Bytes of an escape sequence; a longer one is dropped."""

_CURSOR = {"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end"}
_SEQUENCES = {
    **{lead + letter: key for lead in "[O" for letter, key in _CURSOR.items()},
    **{f"[{number}~": key for number, key in zip("14785", ("home", "end", "home", "end", "pgup"), strict=True)},
    **{"[6~": "pgdn", "[3~": "delete", "[Z": "backtab", "OM": "enter"},
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
