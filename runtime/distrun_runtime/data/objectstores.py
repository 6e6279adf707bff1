"""Reads ranges of objects from S3, Google Cloud Storage, Azure Blob Storage and web servers, with retries.

The clients are those of fsspec: s3fs, gcsfs, adlfs and aiohttp. They find addresses of services, proxies and
credentials where their own documentation says, and in fsspec's configuration. Each answer names the object's size and
version: the ETag of S3, Azure and web servers (or their Last-Modified), the generation of Google. Nothing here keeps,
logs or raises a credential: the query string and the user of an address are masked.

Sources: RFC 9110 (ranges, status codes), "Error responses" of the Amazon S3 API reference.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import random
import re
from dataclasses import dataclass
from typing import Any, Awaitable, Callable
from urllib.parse import urlsplit

from distrun_runtime.errors import TimedOut

logger = logging.getLogger(__name__)

SCHEMES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "https": "aiohttp", "http": "aiohttp"}
"""The package that reads addresses of a scheme."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
TOLD_ATTEMPT = 4
"""The attempt from which on the log says that requests fail."""
CREDENTIALS_S = 5.0
"""Seconds in which a client must say where its credentials come from."""
WHOLE_LIMIT = 256 << 20
"""Bytes of the largest object that is read from a server that does not answer ranges."""

MISSING, DENIED, RANGE = (404,), (401, 403), 416
PASSING = (408, 425, 429)
"""Status codes below 500 that say: later."""
NO_CREDENTIALS = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "ExpiredTokenException")
"""Codes of S3 with status 400 that are about credentials."""
_IS_PASSING = re.compile(
    "Timeout|Connection|Incomplete|Payload|Streaming|HTTPClient|ServiceRe(quest|sponse)|ProxyError"
)
_IS_FINAL = re.compile("Credential|Certificate|Authentication|RefreshError|ProfileNotFound")
"""Names of exception classes of the clients, and of the classes that they derive from."""


@dataclass(frozen=True)
class Piece:
    """Bytes of an object, and what the whole object is."""

    content: bytes
    size: int
    version: str
    is_range: bool = True
    """False: the server does not answer ranges; `content` is the whole object."""


@dataclass(frozen=True)
class Denial:
    """What a server said in place of bytes; status 0: nothing, the client's text is why."""

    status: int
    text: str
    code: str = ""
    region: str = ""
    """Region of the bucket, if the request went to another one."""
    passes: bool = False
    """The same request may succeed later."""

    @property
    def kind(self) -> type[OSError]:
        """The class of the error that it is to the caller."""
        if self.status in MISSING:
            return FileNotFoundError
        return PermissionError if self.status in DENIED or self.code in NO_CREDENTIALS else OSError


class RefusedByServer(Exception):
    """Carries a `Denial` of a web server through the retries."""

    def __init__(self, denial: Denial) -> None:
        super().__init__(denial.text)
        self.denial = denial


def shown(address: str) -> str:
    """Return an address or path as it may be shown: without user, password and query string."""
    return plain(address) if "://" in address else address


def plain(text: str) -> str:
    """Return the first two lines of what a client or server said, with addresses in it masked."""
    line = ": ".join(text.strip().splitlines()[:2])[:400]
    return re.sub(r"\?[^\s'\"]+", "?***", re.sub(r"://[^/\s@]+@", "://***@", line))


def denial_of(error: BaseException) -> Denial:
    """Return what an exception of a client says. No side effects."""
    if isinstance(error, RefusedByServer):
        return error.denial
    response = getattr(error.__cause__ or error, "response", None)
    if isinstance(response, dict):  # botocore's ClientError, of which s3fs makes another one
        return _denial_of_s3(response)
    status = int(getattr(error, "status_code", None) or 0)  # Azure's
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    is_final, passes = _IS_FINAL.search(names), is_passing(status) or bool(_IS_PASSING.search(names))
    if is_final and "Certificate" not in names:
        status = status or 403
    text = f"{status or type(error).__name__}: {plain(str(error)) or 'no answer in time'}"
    return Denial(status, text, passes=passes and not is_final)


def _denial_of_s3(response: dict[str, Any]) -> Denial:
    said, meta = response["Error"], response.get("ResponseMetadata", {})
    status, code = int(meta.get("HTTPStatusCode", 0)), str(said.get("Code", ""))
    region = said.get("Region") or meta.get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
    is_wrong_region = status == 301 or code in ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
    passes = is_passing(status) or code in ("RequestTimeout", "SlowDown", "InternalError")
    text = plain(f"{status} {code}: {said.get('Message', '')}")
    return Denial(status, text, code, str(region or "another one") if is_wrong_region else "", passes)


def is_passing(status: int) -> bool:
    """Return whether a request that was answered with this status may succeed later."""
    return status >= 500 or status in PASSING


def pause_s(attempt: int, chance: float) -> float:
    """Return the seconds to wait after the attempt-th failed request, from 1: exponential, between half and all of it.

    Arguments:
        chance: a random number from 0 to 1, so that workers that failed together do not come back together.
    """
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)) * (0.5 + chance / 2))


class ObjectReader:
    """Reads ranges of one object: `await reader.get(0, 1000)` in the event loop `reader.loop`.

    Raises:
        FileNotFoundError: no scheme that is known.
        ImportError: the package of the scheme is missing.
        PermissionError: the client has no credentials, or not whole ones.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self._timeout_s = url, timeout_s
        parts = urlsplit(url)
        self._scheme = parts.scheme.lower()
        self._bucket, self._key = parts.netloc.rpartition("@")[2], url.partition("://")[2].partition("/")[2]
        _need_client(self._scheme, url)
        failure = ""
        try:
            self._files = _file_system(self._scheme)
        except Exception as error:  # clients without credentials say so in many ways
            failure = plain(str(error))
        if failure:
            raise PermissionError(f"{self._name()}: the client cannot start: {failure}{_FIXES.get(self._scheme, '')}")
        asks = {"s3fs": self._of_s3, "gcsfs": self._of_google, "adlfs": self._of_azure, "aiohttp": self._of_web}
        self._ask: Callable[[int, int], Awaitable[Piece]] = asks[SCHEMES[self._scheme]]
        self.loop: asyncio.AbstractEventLoop = self._files.loop

    async def get(self, begin: int, end: int) -> Piece:
        """Return bytes begin to end (or to the object's end); nothing, of size 0, where the object ends before.

        Raises:
            FileNotFoundError, PermissionError, OSError: the server refuses it; object, credentials and fix are named.
            TimedOut: no whole answer came before the deadline, for all the retries.
        """
        begun = self.loop.time()
        attempt = 0
        while True:
            attempt += 1
            left = begun + self._timeout_s - self.loop.time()
            try:
                piece = await asyncio.wait_for(self._ask(begin, end), min(self._timeout_s / 2, left))
                _need_whole(piece, begin, end)
                return piece
            except Exception as error:  # the clients share no class
                denial = denial_of(error)
            if denial.status == RANGE:
                return Piece(b"", 0, "")
            wait = pause_s(attempt, random.random())
            if attempt == TOLD_ATTEMPT and denial.passes:
                logger.warning("%s: %s; trying again for %g s", self._name(), denial.text, left)
            if not denial.passes or self.loop.time() + wait >= begun + self._timeout_s:
                break
            await asyncio.sleep(wait)
        # Not within the except clause: what the client raised may have the address, with its query string, in it.
        credentials = await self._credentials()
        if denial.passes:
            raise TimedOut(
                f"{self._name()}: no whole answer for bytes {begin} to {end} in {self._timeout_s:g} s"
                f" (DISTRUN_DATA_TIMEOUT) and {attempt} attempts; the last one: {denial.text}; credentials:"
                f" {credentials}"
            )
        raise denial.kind(f"{self._name()}: {denial.text}; credentials: {credentials}{self._fix(denial)}")

    def _name(self) -> str:
        """Return the object as errors name it."""
        if SCHEMES.get(self._scheme) == "aiohttp":
            return shown(self.url)
        return f"{shown(self.url)} (bucket {self._bucket}, key {plain(self._key)})"

    def _fix(self, denial: Denial) -> str:
        """Return what to do about it, to be put behind a message."""
        if denial.region:
            return f". The bucket is in region {denial.region}. fix: set AWS_DEFAULT_REGION to it"
        if denial.kind is FileNotFoundError:
            return ". fix: check the address"
        if denial.kind is not PermissionError:
            return ""
        if denial.code == "AccessDenied":
            return ". fix: allow these credentials s3:GetObject; without s3:ListBucket, a missing object looks the same"
        return _FIXES.get(self._scheme, "")

    # Each of these sends one request. None retries.

    async def _of_s3(self, begin: int, end: int) -> Piece:
        place = {"Bucket": self._bucket, "Key": self._key, "Range": f"bytes={begin}-{end - 1}"}
        found = await self._files._call_s3("get_object", **place)
        async with found["Body"] as body:
            content = await body.read()
        return Piece(content, _size(found.get("ContentRange"), len(content)), found["ETag"].strip('"'))

    async def _of_azure(self, begin: int, end: int) -> Piece:
        place = (self._bucket, self._key)
        async with self._files.service_client.get_blob_client(*place) as blob:
            stream = await blob.download_blob(offset=begin, length=end - begin, max_concurrency=1, retry_total=0)
            content = await stream.readall()
        found = stream.properties  # its size is that of the range
        return Piece(content, _size(found.content_range, len(content)), found.etag.strip('"'))

    async def _of_google(self, begin: int, end: int) -> Piece:
        await self._files._set_session()
        url = self._files.url(f"{self._bucket}/{self._key}")
        return await self._of_http(self._files.session, url, begin, end, self._files._get_headers(None))

    async def _of_web(self, begin: int, end: int) -> Piece:
        session = await self._files.set_session()
        return await self._of_http(session, self._files.encode_url(self.url), begin, end, {})

    async def _of_http(self, session: Any, url: Any, begin: int, end: int, headers: dict[str, str]) -> Piece:
        # A compressed answer has other bytes and ranges.
        ours = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        async with session.get(url, headers={**headers, **ours}) as found:
            status, told, content = found.status, found.headers, bytearray()
            async for chunk in found.content.iter_any():
                content += chunk
                if len(content) > max(WHOLE_LIMIT, end - begin):
                    break
            if status not in (200, 206):
                said = re.search(rb'"message": *"([^"]+)', content)  # Google's
                text = plain(f"{status} {said[1].decode(errors='replace') if said else found.reason}")
                raise RefusedByServer(Denial(status, text, passes=is_passing(status)))
            if len(content) > max(WHOLE_LIMIT, end - begin):
                text = f"the server does not answer ranges, and the object is larger than {WHOLE_LIMIT >> 20} MiB"
                raise RefusedByServer(Denial(0, f"{text}; copy it to this machine, such as by curl, and give its path"))
        version = told.get("X-Goog-Generation") or told.get("ETag") or told.get("Last-Modified", "")
        return Piece(bytes(content), _size(told.get("Content-Range"), len(content)), version, status == 206)

    async def _credentials(self) -> str:
        """Return where the credentials come from, never what they are."""
        try:
            return await asyncio.wait_for(_SOURCES[SCHEMES[self._scheme]](self._files, self.url), CREDENTIALS_S)
        except Exception as error:
            return f"not found ({type(error).__name__})"


def _need_client(scheme: str, url: str) -> None:
    """Check that addresses of a scheme can be read."""
    if scheme not in SCHEMES:
        how = f": hdfs dfs -get {shown(url)}" if scheme == "hdfs" else ""
        raise FileNotFoundError(
            f"{shown(url)} is an address of {scheme}://, expected a path or one of"
            f" {', '.join(f'{each}://' for each in SCHEMES)}. fix: copy the file here first{how}"
        )
    try:
        for package in ("fsspec", SCHEMES[scheme]):
            importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"{scheme}:// addresses are read by fsspec and {SCHEMES[scheme]}, of which {error.name} is missing. Type:"
            f"  pip install fsspec {SCHEMES[scheme]}"
        ) from error


def _file_system(scheme: str) -> Any:
    """Return fsspec's file system of a scheme. It is shared by the readers of this thread."""
    import fsspec

    options: dict[str, Any] = {"use_listings_cache": False}
    configured = fsspec.config.conf.get(scheme, {})
    if scheme == "s3":
        # The retries are ours, so that they have one deadline and are told of.
        options["config_kwargs"] = {**configured.get("config_kwargs", {}), "retries": {"max_attempts": 0}}
    if SCHEMES[scheme] == "aiohttp":
        options["client_kwargs"] = {"trust_env": True, **configured.get("client_kwargs", {})}
    files = fsspec.filesystem(scheme, **options)
    if scheme == "s3":
        files.retries = 1
    return files


def _need_whole(piece: Piece, begin: int, end: int) -> None:
    """Check that all bytes came that were asked for; a connection that is cut may look like an end."""
    expected = max(0, min(end, piece.size) - begin) if piece.is_range else piece.size
    if len(piece.content) != expected:
        raise ConnectionError(f"{len(piece.content)} of {expected} bytes came")


def _size(content_range: str | None, length: int) -> int:
    """Return the size of an object from a Content-Range such as `bytes 0-9/100`; without one, all of it came."""
    total = (content_range or "").rpartition("/")[2]
    return int(total) if total.isdigit() else length


_FIXES = {
    "s3": ". fix: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the instance a role;"
    " FSSPEC_S3_ANON=true for a public bucket",
    "gs": ". fix: set GOOGLE_APPLICATION_CREDENTIALS, or give the instance a service account",
    "az": ". fix: set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or a managed identity; or"
    " AZURE_STORAGE_CONNECTION_STRING",
}

_S3_SOURCES = {
    "env": "environment variables",
    "shared-credentials-file": "profile {profile} of the shared credentials file",
    "config-file": "profile {profile} of the AWS configuration file",
    "iam-role": "role of the instance",
    "container-role": "role of the container",
    "assume-role": "assumed role of profile {profile}",
    "explicit": "fsspec's configuration",
}


async def _source_of_s3(files: Any, url: str) -> str:
    if files.anon:
        return "none (anonymous)"
    found = await files.session.get_credentials()
    if found is None:
        return "none found"
    return _S3_SOURCES.get(found.method, str(found.method)).format(profile=files.session.profile or "default")


async def _source_of_google(files: Any, url: str) -> str:
    method = files.credentials.method
    return {"anon": "none (anonymous)", None: "none found"}.get(method, str(method))


async def _source_of_azure(files: Any, url: str) -> str:
    sources = ("connection_string", "credential", "account_key", "sas_token")
    return next((name.replace("_", " ") for name in sources if getattr(files, name, None)), "none (anonymous)")


async def _source_of_web(files: Any, url: str) -> str:
    parts = urlsplit(url)
    if "@" in parts.netloc:
        return "user in the address"
    return "query string of the address" if parts.query else "none in the address"


_SOURCES = {"s3fs": _source_of_s3, "gcsfs": _source_of_google, "adlfs": _source_of_azure, "aiohttp": _source_of_web}
