"""Speaks to Hadoop's web services: where they are by its configuration files, fail-over, Kerberos, and files in HDFS.

Standard library only; with Kerberos, the package `gssapi` (`pip install 'distrun[kerberos]'`).
"""

from __future__ import annotations

import base64
import contextlib
import glob
import http.client
import http.cookiejar
import json
import os
import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

from distrun import formats
from distrun.backends.engine import ANSWER_S, MIB, SECRET, EngineError, execute, text_of, tries
from distrun.backends.yarn_answers import GPU, Container, listed
from distrun.errors import UsageError
from distrun.request import Needs
from distrun_runtime.contract.plan import SERVER, WORKER

if TYPE_CHECKING:
    from distrun.backends.engine import Submission


FILES = ("core-site.xml", "hdfs-site.xml", "yarn-site.xml")
"""Hadoop's configuration files that are read, a later one above an earlier."""
HOPS = 4
"""How many redirections of one request are followed."""
ANSWER_BYTES = 64 << 20
"""The longest answer that is read."""
_VARIABLE = re.compile(r"\$\{([^${}\s]+)\}")


# Configuration files


def read_site(folder: Path) -> dict[str, str]:
    """Return the properties of Hadoop's configuration files in a folder (HADOOP_CONF_DIR). A missing file has none.

    Raises:
        UsageError: a file cannot be read or is not XML.
    """
    found: dict[str, str] = {}
    for name in FILES:
        path = folder / name
        try:
            found.update(properties(path.read_bytes()))
        except FileNotFoundError:
            continue
        except (OSError, ElementTree.ParseError) as err:
            raise UsageError(f"{path} cannot be read: {err}", "correct the file, or give --yarn-rm URL") from err
    return found


def properties(text: bytes) -> dict[str, str]:
    """Return the properties of one configuration file. No side effects.

    Raises:
        ElementTree.ParseError: it is not XML.
    """
    if b"<!ENTITY" in text:
        raise ElementTree.ParseError("it defines entities")
    found = {}
    for each in ElementTree.fromstring(text).iter("property"):
        name, value = each.findtext("name"), each.findtext("value")
        if name and value is not None:
            found[name.strip()] = value.strip()
    return found


def shown_properties(said: Any) -> dict[str, str]:
    """Return the properties that a daemon shows at `/conf`, as JSON. No side effects."""
    rows = said.get("properties") if isinstance(said, dict) else None
    return {str(each["key"]): str(each["value"]) for each in rows or () if "key" in each and "value" in each}


def value(site: Mapping[str, str], name: str, default: str = "") -> str:
    """Return a property with `${other}` replaced by other properties. No side effects."""
    text = site.get(name) or default
    for _ in range(20):
        match = _VARIABLE.search(text)
        if match is None or match.group(1) not in site:
            break
        text = text[: match.start()] + site[match.group(1)] + text[match.end() :]
    return text


def resource_managers(site: Mapping[str, str]) -> tuple[str, ...]:
    """Return the addresses of the ResourceManagers' web services, `http://HOST:PORT`; none if no file says."""
    is_tls = value(site, "yarn.http.policy") == "HTTPS_ONLY"
    key, port = ("webapp.https.address", 8090) if is_tls else ("webapp.address", 8088)
    ids = [""]
    if value(site, "yarn.resourcemanager.ha.enabled").lower() == "true":
        ids = ["." + each for each in _words(value(site, "yarn.resourcemanager.ha.rm-ids"))] or ids
    found = []
    for each in ids:
        host = value(site, "yarn.resourcemanager.hostname" + each)
        address = value(site, f"yarn.resourcemanager.{key}{each}") or (f"{host}:{port}" if host else "")
        if address and not address.startswith("0.0.0.0"):
            found.append(("https://" if is_tls else "http://") + address)
    return tuple(found)


def name_nodes(site: Mapping[str, str]) -> tuple[str, ...]:
    """Return the addresses of WebHDFS on the NameNodes of the default file system; none if it is not HDFS."""
    default = urllib.parse.urlsplit(value(site, "fs.defaultFS"))
    if default.scheme in ("webhdfs", "swebhdfs"):
        return (("https://" if default.scheme == "swebhdfs" else "http://") + default.netloc,)
    if default.scheme != "hdfs":
        return ()
    is_tls = value(site, "dfs.http.policy") == "HTTPS_ONLY"
    key, port = ("dfs.namenode.https-address", 9871) if is_tls else ("dfs.namenode.http-address", 9870)
    service = default.hostname or ""
    ids = _words(value(site, "dfs.ha.namenodes." + service))
    found = []
    for suffix in [f".{service}.{each}" for each in ids] or [""]:
        address = value(site, key + suffix)
        if not address or address.startswith("0.0.0.0"):
            if suffix:
                continue
            address = f"{default.hostname}:{address.rpartition(':')[2] or port}"
        found.append(("https://" if is_tls else "http://") + address)
    return tuple(found)


def _words(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def addresses(text: str, option: str) -> tuple[str, ...]:
    """Return the addresses that the user typed, `URL[,URL...]`, without their paths. No side effects.

    Raises:
        UsageError: one is no http or https address.
    """
    found = []
    for each in _words(text):
        parts = urllib.parse.urlsplit(each if "://" in each else "http://" + each)
        try:
            is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_good = False
        if not is_good or parts.username is not None:
            raise UsageError(f"{option}: {each!r} is no address of a web service", f"{option} http://HOST:PORT")
        found.append(f"{parts.scheme}://{parts.netloc}")
    return tuple(found)


# Talking


class WebAnswer(NamedTuple):
    """What a web service said."""

    status: int
    body: bytes
    url: str

    @property
    def json(self) -> Any:
        """The body as JSON.

        Raises:
            EngineError: it is none.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as err:
            raise EngineError(f"{self.url} answered {self.status} and no JSON: {self.said}") from err

    @property
    def said(self) -> str:
        """What it said, in its own words and at most 2000 characters."""
        text = self.body.decode("utf-8", "replace").strip()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return re.sub(r"<[^>]*>|\s+", " ", text)[:2000].strip() or f"HTTP status {self.status}"
        if isinstance(value, dict):
            inner = value.get("RemoteException", value)
            if isinstance(inner, dict):
                text = str(inner.get("diagnostics") or inner.get("message") or text)
        return text.partition("\n\tat ")[0][:2000]

    def expect(self, what: str, *statuses: int, hint: str = "") -> WebAnswer:
        """Return itself. Raises EngineError, which begins with `what`: its status is none of these."""
        if self.status not in statuses:
            raise EngineError(f"{what}: {self.status}: {self.said}", hint)
        return self


class Web:
    """One kind of Hadoop's web services, at one or several addresses of which one is active. Threads may share it.

    Arguments:
        what: what it is called in messages: `ResourceManager`.
        addresses: `http://HOST:PORT`, at least one.
        user: who asks, where there is no Kerberos.
        ca: file with the certificates of authorities that are trusted with https; empty: the system's.
    """

    def __init__(self, what: str, addresses: Sequence[str], user: str, ca: str = "") -> None:
        self.what = what
        self.addresses = list(addresses)
        self._user = user
        try:
            context = ssl.create_default_context(cafile=ca or None)
        except OSError as err:
            raise UsageError(f"ca = {ca}: it cannot be read: {err}", "correct the configuration file") from err
        self._cookies = http.cookiejar.CookieJar()
        # No proxy: the services are addresses inside a cluster.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=context),
            urllib.request.HTTPCookieProcessor(self._cookies),
            _NoRedirects(),
        )

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        query: Mapping[str, str] | None = None,
        kind: str = "application/json",
        limit_s: float = ANSWER_S / 2,
    ) -> WebAnswer:
        """Ask the active service; whatever its status is, it is returned.

        Raises:
            EngineError: none of the addresses answers, or none is active.
        """
        why = []
        words = urllib.parse.urlencode({"user.name": self._user, **(query or {})})
        for address in tuple(self.addresses):
            try:
                answer = self._hop(method, f"{address}{path}?{words}", body, kind, limit_s)
            except (OSError, http.client.HTTPException) as err:
                why.append(f"{address}: {_reason(err)}")
                continue
            if _is_standby(answer):
                why.append(f"{address}: it is standby")
                continue
            if address != self.addresses[0]:  # next time this one is asked first
                self.addresses = [address, *(each for each in self.addresses if each != address)]
            return answer
        raise EngineError(
            f"the {self.what} does not answer: {'; '.join(why)}",
            "check its address, and whether it is up",
        )

    def json(self, path: str, **more: Any) -> Any:
        """Return what a path says. Raises EngineError: no answer, or another status than 200."""
        return self.ask("GET", path, **more).expect(f"the {self.what}, asked for {path}", 200).json

    def _hop(self, method: str, url: str, body: bytes | None, kind: str, limit_s: float) -> WebAnswer:
        """Ask one address, and those that it names; prove who asks if that is wanted."""
        proof = ""
        for _ in range(HOPS):
            request = urllib.request.Request(url, data=body, method=method)
            request.add_header("Accept", "application/json, */*;q=0.5")
            request.add_header("X-XSRF-Header", "distrun")  # wanted where rest-csrf is enabled
            if body is not None:
                request.add_header("Content-Type", kind)
            if proof:
                request.add_header("Authorization", "Negotiate " + proof)
            try:
                with self._opener.open(request, timeout=limit_s) as reply:
                    return WebAnswer(reply.status, reply.read(ANSWER_BYTES), _shown(url))
            except urllib.error.HTTPError as err:
                with err:
                    location = err.headers.get("Location", "")
                    wants = "negotiate" in " ".join(err.headers.get_all("WWW-Authenticate") or ()).lower()
                    if err.code in (301, 302, 303, 307, 308) and location:
                        url, proof = urllib.parse.urljoin(url, location), ""
                        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
                            raise OSError(f"it names {_shown(url)}") from None
                    elif err.code == 401 and wants and not proof:
                        proof = negotiate(urllib.parse.urlsplit(url).hostname or "")
                    else:
                        return WebAnswer(err.code, err.read(ANSWER_BYTES), _shown(url))
        raise OSError(f"it redirected {HOPS} times")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Leaves redirections to us: the method and the body must stay."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _is_standby(answer: WebAnswer) -> bool:
    if answer.status == 403:
        return b"StandbyException" in answer.body
    return b"This is standby RM" in answer.body[:2000]


def _reason(err: Exception) -> str:
    reason = getattr(err, "reason", None) or err
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__


def _shown(url: str) -> str:
    """Return an address without its query, which may hold a delegation token."""
    return url.partition("?")[0]


def negotiate(host: str) -> str:
    """Return what proves to a web service, by Kerberos (SPNEGO), who asks: base64.

    Raises:
        EngineError: there is no `gssapi`, or no ticket.
    """
    try:
        import gssapi
    except ImportError:
        raise EngineError(
            f"{host} wants Kerberos, and the package gssapi is not installed here", "pip install 'distrun[kerberos]'"
        ) from None
    try:
        name = gssapi.Name(f"HTTP@{host}", gssapi.NameType.hostbased_service)
        token = gssapi.SecurityContext(name=name, usage="initiate").step()
    except Exception as err:  # gssapi's own errors; which there are depends on its version
        raise EngineError(f"no Kerberos ticket for HTTP@{host}: {err}", "kinit, then the same command again") from err
    return base64.b64encode(token).decode("ascii")


# Files in HDFS


class HdfsFiles:
    """Small files of the user's in HDFS, by WebHDFS or HttpFS."""

    def __init__(self, web: Web) -> None:
        self._web = web

    def home(self) -> str:
        """Return the user's home folder. Raises EngineError."""
        answer = self._ask("GET", "", "GETHOMEDIRECTORY").expect("HDFS: asking for your home folder", 200)
        return str(answer.json["Path"])

    def make_private(self, folder: str) -> None:
        """Make a folder of mode 0700, or give that mode to one that is there. Raises EngineError."""
        for op in ("MKDIRS", "SETPERMISSION"):
            self._ask("PUT", folder, op, permission="700").expect(f"HDFS: making {folder}", 200)

    def write(self, path: str, data: bytes) -> None:
        """Make a new file of mode 0600, and its folder of mode 0700. Raises EngineError: also if it is there."""
        self.make_private(path.rpartition("/")[0])
        # `data`: HttpFS takes the bytes at once; a NameNode names a DataNode, which gets them.
        answer = self._ask("PUT", path, "CREATE", data, overwrite="false", permission="600", data="true")
        answer.expect(f"HDFS: writing {path}", 200, 201)

    def remove(self, path: str) -> None:
        """Remove a folder with all that is in it; a missing one is no error. Raises EngineError."""
        self._ask("DELETE", path, "DELETE", recursive="true").expect(f"HDFS: removing {path}", 200, 404)

    def _ask(self, method: str, path: str, op: str, body: bytes | None = None, **query: str) -> WebAnswer:
        where = "/webhdfs/v1" + urllib.parse.quote(path or "/")
        return self._web.ask(method, where, body, query={"op": op, **query}, kind="application/octet-stream")


# YARN's distributed shell: how a job is submitted where the services API is off and the program `yarn` is here.
#
# It starts equal containers, all with one script, and needs Java on this machine. Place and container have one name,
# the container's id. The script and the secret are uploaded by `yarn` into a folder of HDFS that only the user can
# enter.


MAIN = "org.apache.hadoop.yarn.applications.distributedshell.Client"
JAR = "hadoop-yarn-applications-distributedshell-*.jar"
SCRIPT = "agent.sh"
SECRET_FILE = "secret"
"""Name of the secret in `Submission.folder` and in a container."""
AM_LOGS = ("AppMaster.stderr", "AppMaster.stdout")
MASTER_MB = 512
"""Of the application master: the client's own default, 100 MiB, is too little where YARN watches memory."""
STARTED_S = 120.0
"""How long `yarn` may take until it says the application's id: it starts Java and uploads files."""
FOREVER_MS = 2**31 - 1
"""The shell's client would end the application after ten minutes; ours does not live so long."""


def program(config: Mapping[str, str]) -> str:
    """Return the path of `yarn`; empty: it is not here."""
    return shutil.which(config.get("yarn", "yarn")) or ""


def find_jar(yarn: str) -> str:
    """Return the path of the distributed shell's jar. Runs `yarn classpath`.

    Raises:
        EngineError: it is not found.
    """
    told = execute([yarn, "classpath"])
    folders = {os.path.dirname(each) if each.endswith((".jar", "*")) else each for each in told.out.strip().split(":")}
    found = sorted(path for folder in folders if folder for path in glob.glob(os.path.join(glob.escape(folder), JAR)))
    if not found:
        raise EngineError(f"no {JAR} on the class path of {yarn}", "say shell_jar = PATH in the section [yarn]")
    return found[-1]


def agent_script(submission: Submission) -> str:
    """Return the script that every container runs. No side effects."""
    words = submission.bootstrap.command(submission.python, "env:CONTAINER_ID", SECRET)
    resolved = f'"$(readlink -f {SECRET_FILE})"'
    return f"#!/bin/bash\nexec {' '.join(resolved if word == SECRET else formats.join([word]) for word in words)}\n"


def command(submission: Submission, yarn: str, jar: str, memory_mb: int) -> tuple[str, ...]:
    """Return what submits the job. No word of it is secret. No side effects."""
    options = submission.options
    # Each container must have so much that every task fits in it.
    needs = Needs(*map(max, zip(*(group.needs for group in submission.groups), strict=True)))
    megabytes = -(-needs.memory // MIB) or memory_mb
    resources = [f"memory-mb={megabytes}", f"vcores={max(1, needs.cores)}"]
    resources += [f"{GPU}={needs.gpus}"] if needs.gpus else []
    words = [yarn, "jar", jar, MAIN, "-jar", jar, "-appname", submission.marker, "-queue", options.queue or "default"]
    words += ["-num_containers", str(submission.tasks), "-container_resources", ",".join(resources)]
    words += ["-master_memory", str(MASTER_MB), "-timeout", str(FOREVER_MS)]
    words += ["-shell_script", str(submission.folder / SCRIPT), "-localize_files", str(submission.secret_file)]
    label, image = options.own.get("node_label", ""), options.own.get("docker_image", "")
    words += ["-node_label_expression", label] if label else []
    if image:
        words += ["-shell_env", "YARN_CONTAINER_RUNTIME_TYPE=docker"]
        words += ["-shell_env", f"YARN_CONTAINER_RUNTIME_DOCKER_IMAGE={image}"]
    return (*words, *options.args)


def submit(argv: Sequence[str], log: Path) -> str:
    """Run `yarn` until it has said the application's id, and return it. Its output goes to the file `log`.

    Raises:
        EngineError: it ended without, or took too long.
    """
    with log.open("wb") as out:
        try:
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        except OSError as err:
            raise EngineError(f"{argv[0]} cannot be started: {err.strerror}") from err
    try:
        for _ in tries(STARTED_S):
            has_ended = child.poll() is not None
            said = text_of(log)
            found = re.search(r"Submitted application (application_\d+_\d+)", said)
            if found:
                return found.group(1)
            if has_ended:
                break
        how = f"ended with {child.returncode}" if has_ended else f"said no application in {STARTED_S:g} s"
        raise EngineError(f"yarn {how}: {_why(said)}", f"read {log}")
    finally:
        # The application goes on without its client.
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _why(said: str) -> str:
    """Return what a Java program gives as its reason: its last line with an exception or error, else its last lines."""
    lines = said.strip().splitlines()
    errors = [line for line in lines if re.search(r"\b(\w+Exception|ERROR|FATAL|Error):? ", line)]
    return " ".join(errors[-1:] or lines[-3:])[:600]


def containers_of(said: Mapping[str, Any], servers: int) -> tuple[Container, ...]:
    """Return the containers that an attempt has, without the application master's: servers first. No side effects.

    It is unknown whether their files are there already.
    """
    rows = [(str(each.get("containerId", "")), each) for each in listed(said, "container")]
    rows += [(str(each.get("containerId", "")), each) for each in listed(said.get("containers"), "container")]
    ours = sorted((name, each) for name, each in rows if name and not name.endswith("_000001"))
    found = []
    for index, (name, each) in enumerate(ours):
        node = str(each.get("assignedNodeId") or each.get("nodeId") or "").partition(":")[0]
        found.append(Container(name, name, SERVER if index < servers else WORKER, node, "RUNNING", False))
    return tuple(found)


def refuse_args(args: Sequence[str]) -> None:
    """Raise UsageError for a word that only the services API understands."""
    for each in args:
        if each.startswith("{"):
            raise UsageError(
                "--engine-arg: the distributed shell takes its own words, not JSON",
                "say --engine-arg=-master_memory ...",
            )
