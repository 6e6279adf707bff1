"""The program that an engine starts in place of the agent: it dials the coordinator and runs the agent it gets there.

An engine (mpirun, a queue system) starts one process for each place. It is a python3 of at least 3.8 with PROGRAM,
which is small enough for any command line or job script and holds nothing of the user's. Its arguments are words:

    PIN JOB PLACE SECRET LIMIT ADDRESS:PORT...

PLACE and SECRET may be `env:NAME`: the variable in which the engine says which process this is, and the one that an
engine's own file sets. Else SECRET is the path of a file of mode 0600. The secret itself is never an argument. LIMIT
is how long the coordinator is tried, in seconds.

PROGRAM compares the certificate's SHA-256 with PIN before it sends anything, proves itself and has the coordinator
prove itself (`contract/enrolment.py`), and only then reads the agent's blob from the connection, which stays the
agent's channel. Both end with exit code 6 (`facts.EXIT_START_FAILED`) if that fails.
"""

from __future__ import annotations

import binascii
import datetime
import functools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from distrun_runtime.contract import enrolment, facts

LIMIT = 4096
"""Bytes of PROGRAM, and of the line that `source` makes of it."""

# It first opens closed standard streams, as `streams.open_streams` does.
# The importer and START_DIALED of `blob` use these names of it: modules, s, r, dialed.
# No f-strings in it: an old Python must come to the message.
PROGRAM = f"""\
from signal import *
for n in SIGUSR1, SIGUSR2:
    signal(n, SIG_IGN)
import binascii, hashlib, hmac, json, os, socket, ssl, stat, sys, time, zlib

fd = 0
while fd < 3:
    fd = os.open(os.devnull, 2)
    os.set_inheritable(fd, fd < 3)
os.close(fd)
sys.stderr = sys.stderr or open(2, "w")

def fail(text):
    sys.stderr.write("distrun: " + text + "\\n")
    sys.exit({facts.EXIT_START_FAILED})

def named(word, forget):
    if not word.startswith("env:"):
        return word
    found = os.environ.pop(word[4:], "") if forget else os.environ.get(word[4:], "")
    return found or fail("the engine has not set " + word[4:])

def secret_of(word):
    if word.startswith("env:"):
        return named(word, True).strip()
    try:
        fd = os.open(word, os.O_RDONLY | os.O_NOFOLLOW)
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 63:
            fail("%s must be a file of your own with mode 0600" % word)
        return os.read(fd, 4096).decode("ascii").strip()
    except (OSError, ValueError) as err:
        fail("the secret cannot be read: %s" % err)

def line():
    b = b""
    while b.find(10) < 0:
        d = s.recv({enrolment.LINE_BYTES}) if len(b) < {enrolment.LINE_BYTES} else b""
        if not d:
            raise OSError("the connection ended during the enrolment")
        b += d
    head, _, rest = b.partition(bytes([10]))
    return json.loads(head.decode()), rest

def proof(side):
    words = "distrun-enrolment-{enrolment.VERSION}", side, "claim", job, place, pin, theirs, nonce
    return hmac.new(secret.encode(), "\\n".join(words).encode(), "sha256").hexdigest()

def enrol():
    global theirs
    if hashlib.sha256(s.getpeercert(True)).hexdigest() != pin:
        raise OSError("its certificate is not this job's; nothing was sent")
    hello, _ = line()
    if hello["version"] != {enrolment.VERSION}:
        raise OSError("it speaks version %s of the enrolment" % hello["version"])
    theirs = hello["nonce"]
    claim = dict(type="claim", job=job, place=place, nonce=nonce, proof=proof("agent"), program=True)
    s.sendall(json.dumps(claim).encode() + bytes([10]))
    answer, rest = line()
    if answer["type"] == "denied":
        fail("the coordinator refuses place %s: %s" % (place, answer["reason"]))
    if not hmac.compare_digest(answer["proof"], proof("coordinator")):
        raise OSError("the other side does not know this job's secret")
    return answer["key"], rest

if sys.version_info < (3, 8):
    fail("this host's %s is Python %s; 3.8 or newer is needed" % (sys.executable, sys.version.split()[0]))
pin, job, place, word, limit = sys.argv[1:6]
place, secret = named(place, False), secret_of(word)
nonce = binascii.hexlify(os.urandom({enrolment.NONCE_BYTES})).decode()
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname = False
context.verify_mode = ssl.CERT_NONE
until = time.monotonic() + float(limit)
pause = 0.2
key = why = ""
while not key:
    for word in sys.argv[6:]:
        host, _, port = word.rpartition(":")
        s = None
        try:
            s = socket.create_connection((host.strip("[]"), int(port)), 5)
            s = context.wrap_socket(s)
            key, r = enrol()
            break
        except Exception as err:
            why = "%s: %s" % (word, err)
            if s:
                s.close()
    else:
        if time.monotonic() > until:
            fail("place %s: no coordinator within %s s; %s" % (place, limit, why))
        time.sleep(pause)
        pause = min(2 * pause, 5)
try:
    s.settimeout(30)
    r = bytearray(r)
    while r.find(10) < 0:
        d = s.recv(65536)
        if not d or len(r) > 1 << 20:
            raise OSError("it ended")
        r += d
    l, _, r = bytes(r).partition(bytes([10]))
except OSError as err:
    fail("the connection broke before the agent had arrived: %s" % err)
importer, modules = [binascii.a2b_base64(each) for each in l.split()]
dialed = s.getpeername()[:2], sys.argv[6:], pin, job, place, nonce, key
exec(zlib.decompress(importer))
"""
"""Python source, at most LIMIT bytes."""


@functools.lru_cache(maxsize=1)
def source() -> str:
    """Return PROGRAM as one line of Python without a character that a shell would touch inside single quotes."""
    packed = binascii.b2a_base64(zlib.compress(PROGRAM.encode("ascii"), 9), newline=False).decode("ascii")
    return f'import binascii,zlib;exec(zlib.decompress(binascii.a2b_base64("{packed}")))'


class Bootstrap(NamedTuple):
    """What PROGRAM needs to know of a job."""

    job: str
    pin: str
    addresses: Sequence[str]
    """`ADDRESS:PORT` of the coordinator, the best first."""
    limit_s: float

    def command(self, python: str, place: str, secret: str) -> tuple[str, ...]:
        """Return the argument list for a place. No word of it is the user's, and each is safe in single quotes.

        Args:
            python: the interpreter.
            place: the place's name, or `env:NAME` of the variable in which the engine has it.
            secret: the path of a file of mode 0600 on the node, or `env:NAME`; never the secret.
        """
        return (python, "-I", "-c", source(), self.pin, self.job, place, secret, f"{self.limit_s:g}", *self.addresses)


# Makes the TLS certificate of one job, for agents that dial back.
#
# The certificate proves nothing by itself: agents compare its SHA-256 with the one that they were given, and ignore
# names and dates. The private key stays in memory. Where it has to go to another process, it goes by standard input or
# in a file of mode 0600 in a private folder, never on a command line.


_FROM = datetime.datetime(2000, 1, 1)
_UNTIL = datetime.datetime(2100, 1, 1)
"""Fixed dates, since the clocks of a job's hosts differ."""


def certificate(job: str) -> bytes:
    """Return a new self-signed certificate for the job of that id, EC P-256, no names but the job's, and then its key.

    They are as `ssl.SSLContext.load_cert_chain` reads them. Secret.
    """
    # They take 50 ms to import, and most jobs have no listener.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"distrun {job}"[:64])])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return made.public_bytes(serialization.Encoding.PEM) + private
