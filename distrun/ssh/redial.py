"""Another connection to an agent whose last one was cut: a relay on its host, and the proof of who we are.

The agent waits at a Unix socket in its private folder. The relay is a few lines of Python that sshd starts there; it
connects that socket with its standard input and output. What it needs is on its command line: a path, no secret.
"""

from __future__ import annotations

import secrets
import time

from distrun.ssh.ask import Abort
from distrun.ssh.connector import Link
from distrun_runtime.contract import session
from distrun_runtime.coordinator.channel import Greeting
from distrun_runtime.errors import WireError

GONE = "distrun: no agent waits here"
"""What the relay says if nothing listens: the agent has ended."""

# In no quotes but these, and without a `!`: see `target.remote_command`. It goes to the folder of the socket because
# the path may be too long for a socket's address.
REDIAL_RELAY = (
    'exec("import os,socket,sys,threading\\n'
    "def copy(read,write):\\n"
    " try:\\n"
    "  while True:\\n"
    "   data=read(65536)\\n"
    "   if not data: break\\n"
    "   write(data)\\n"
    " finally: os._exit(0)\\n"
    "def say(data):\\n"
    " while data: data=data[os.write(1,data):]\\n"
    "s=socket.socket(socket.AF_UNIX)\\n"
    "folder,name=os.path.split(sys.argv[1])\\n"
    "try:\\n"
    " os.chdir(folder)\\n"
    " s.connect(name)\\n"
    "except (FileNotFoundError,ConnectionRefusedError) as err:\\n"
    f' sys.exit(\\"{GONE}: %s\\" % err)\\n'
    "threading.Thread(target=copy,args=(lambda size:os.read(0,size),s.sendall),daemon=True).start()\\n"
    'copy(s.recv,say)")'
)


def prove(link: Link, key: str, limit_s: float, abort: Abort) -> bytes:
    """Prove over a relay that we know the key of the session, and check that its agent does; return what came after.

    Raises:
        WireError: it is not our agent, or it did not answer within `limit_s`.
        OSError: the connection broke.
        Aborted: it was given up.
    """
    until = time.monotonic() + limit_s
    greeting = Greeting()

    def read() -> bytes:
        data = link.read()
        abort.check()
        if data == b"":
            raise EOFError("the relay ended")
        if not data and time.monotonic() >= until:
            raise WireError("its agent does not answer")
        return data or b""

    rest = None
    while rest is None:
        rest = greeting.feed(read())
    nonce = secrets.token_hex(16)
    proof = session.proof(key, session.COORDINATOR, greeting.nonce, nonce)
    data = session.encode({"type": "prove", "nonce": nonce, "proof": proof})
    while data:
        data = data[link.write(data) :]
        abort.check()
    frame, rest = session.first(rest)
    while frame is None:
        frame, rest = session.first(rest + read())
    given = str(frame.header.get("proof", ""))
    if not session.is_proof(given, key, session.AGENT, greeting.nonce, nonce):
        raise WireError("it is not the agent of this job that answers")
    return rest
