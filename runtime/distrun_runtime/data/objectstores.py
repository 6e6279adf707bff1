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
import math
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
CHANCE = random.SystemRandom()
"""The numbers of `random` itself are the program's, which may have given a seed."""
TOLD_ATTEMPT = 4
"""The attempt from which on the log says that requests fail."""
CREDENTIALS_S = 5.0
"""Seconds in which a client must say where its credentials come from."""
ANSWER_BYTES = 1 << 16
"""Bytes of an answer with an error in which its message is looked for."""
LONG_BYTES = 1 << 20
"""Bytes of a range whose answer has half of the time at first, so that one that hangs is asked for again."""
WHOLE_LIMIT = 256 << 20
"""Bytes of the largest object that is read from a server that does not answer ranges."""

MISSING, DENIED, RANGE = (404,), (401, 403), 416
RETRYABLE = (408, 425, 429)
"""Status codes below 500 after which the same request may succeed later."""
NO_CREDENTIALS = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "ExpiredTokenException")
"""Codes of S3 with status 400 that are about credentials."""
CREDENTIALS_ATTEMPTS, NO_CREDENTIALS_ATTEMPTS = 6, 3
"""Attempts if the service of the credentials fails, and if there are none: it may not be ready yet."""
_IS_RETRYABLE = re.compile(
    "Timeout|Connection|Incomplete|Payload|Streaming|HTTPClient|ServiceRe(quest|sponse)|ProxyError"
)
_IS_CREDENTIALS_SERVICE = re.compile("MetadataRetrievalError|CredentialRetrievalError|TransportError")
_IS_FINAL = re.compile("Credential|Certificate|Authentication|RefreshError|ProfileNotFound")
"""Names of exception classes of the clients, and of the classes that they derive from."""


@dataclass(frozen=True)
class Piece:
    """Bytes of an object, and what the whole object is."""

    content: bytes
    size: int
    version: str
    is_range: bool = True
    """False: the server does not answer ranges, and sent the whole object."""


@dataclass(frozen=True)
class Denial:
    """The failure of a request, as the server answered it. Status 0: there is no answer; the text is the client's."""

    status: int
    text: str
    code: str = ""
    region: str = ""
    """Region of the bucket, if the request went to another one."""
    attempts: float = 1
    """Attempts after which the request is not sent again; infinite: it is until the deadline."""

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


def redacted(address: str) -> str:
    """Return an address or path as it may be shown: without user, password and query string."""
    scheme, is_address, rest = address.partition("://")
    if not is_address:
        return address
    place, has_query, _ = rest.partition("?")
    return f"{scheme}://{re.sub('^[^/]*@', '***@', place)}{'?***' if has_query else ''}"


def redacted_text(text: str) -> str:
    """Return the first two lines of a message of a client or server, with the secrets of addresses masked."""
    line = ": ".join(text.strip().splitlines()[:2])
    return re.sub(r"\?[^\s'\"]+", "?***", re.sub(r"://[^/\s]*@", "://***@", line))[:400]


def denial_of(error: BaseException) -> Denial:
    """Return what an exception of a client says. No side effects."""
    if isinstance(error, RefusedByServer):
        return error.denial
    response = getattr(error.__cause__ or error, "response", None)
    if isinstance(response, dict):  # botocore's ClientError, of which s3fs makes another one
        return _denial_of_s3(response)
    status = int(getattr(error, "status_code", None) or 0)  # Azure's
    chain = [error]
    while chain[-1].__cause__:
        chain.append(chain[-1].__cause__)
    names, *causes = [" ".join(kind.__name__ for kind in type(each).__mro__) for each in chain]
    is_final, attempts = _IS_FINAL.search(names), _attempts(status, bool(_IS_RETRYABLE.search(names)))
    if is_final and "Certificate" not in names:
        status = status or 403
    if is_final:
        attempts = NO_CREDENTIALS_ATTEMPTS if "NoCredentialsError" in names else 1
    if _IS_CREDENTIALS_SERVICE.search(" ".join([names, *causes])):
        attempts = CREDENTIALS_ATTEMPTS
    text = redacted_text(str(error)) or "no answer in time"
    return Denial(status, f"{status or type(error).__name__}: {text}", attempts=attempts)


def _denial_of_s3(response: dict[str, Any]) -> Denial:
    fault, meta = response["Error"], response.get("ResponseMetadata", {})
    status, code = int(meta.get("HTTPStatusCode", 0)), str(fault.get("Code", ""))
    region = fault.get("Region") or meta.get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
    is_wrong_region = status == 301 or code in ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
    attempts = _attempts(status, code in ("RequestTimeout", "SlowDown", "InternalError"))
    text = redacted_text(f"{status} {code}: {fault.get('Message', '')}")
    return Denial(status, text, code, str(region or "another one") if is_wrong_region else "", attempts)


def _attempts(status: int, is_retryable: bool = False) -> float:
    """Return how often a request is sent that failed with this status, or for another reason that `is_retryable`."""
    return math.inf if is_retryable or status >= 500 or status in RETRYABLE else 1


def pause_s(attempt: int, chance: float) -> float:
    """Return the seconds to wait after the attempt-th failed request, from 1: exponential, between half and all of it.

    Arguments:
        chance: a random number from 0 to 1, so that workers that failed together do not come back together.
    """
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)) * (0.5 + chance / 2))


class ObjectReader:
    """Reads ranges of one object: `await reader.get(0, 1000)` in the event loop `reader.loop`.

    Raises:
        FileNotFoundError: no scheme that is known, or no object in a bucket.
        ImportError: the package of the scheme is missing.
        PermissionError: the client has no credentials, or not whole ones.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self._timeout_s = url, timeout_s
        parts = urlsplit(url)
        self._scheme = parts.scheme.lower()
        self._bucket, self._key = parts.netloc.rpartition("@")[2], url.partition("://")[2].partition("/")[2]
        self._whole = ""
        """The remark that the server does not answer ranges."""
        _need_client(self._scheme, url)
        if SCHEMES[self._scheme] != "aiohttp" and not (self._bucket and self._key):
            raise FileNotFoundError(f"{redacted(url)} names no object, expected {self._scheme}://BUCKET/KEY")
        failure = ""
        try:
            self._files = _file_system(self._scheme)
        except Exception as error:  # clients without credentials say so in many ways
            failure = redacted_text(str(error))
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
                # A whole object takes its time: half of it would be in vain.
                is_long = self._whole or end - begin > LONG_BYTES
                limit_s = left if is_long else min(self._timeout_s / 2, left)
                return await asyncio.wait_for(self._ask(begin, end), limit_s)
            except Exception as error:  # the clients share no class
                denial = denial_of(error)
            if denial.status == RANGE:
                return Piece(b"", 0, "")
            wait = pause_s(attempt, CHANCE.random())
            is_retryable = attempt < denial.attempts
            if attempt == TOLD_ATTEMPT and is_retryable:
                logger.warning("%s: %s; trying again for %g s", self._name(), denial.text, left)
            if not is_retryable or self.loop.time() + wait >= begun + self._timeout_s:
                break
            await asyncio.sleep(wait)
        # Not within the except clause: what the client raised may have the address, with its query string, in it.
        credentials = await self._credentials()
        if denial.attempts == math.inf:
            raise TimedOut(
                f"{self._name()}: no whole answer for bytes {begin} to {end} in {self._timeout_s:g} s"
                f" (DISTRUN_DATA_TIMEOUT) and {attempt} attempts; the last one: {denial.text}{self._whole};"
                f" credentials: {credentials}"
            )
        raise denial.kind(f"{self._name()}: {denial.text}; credentials: {credentials}{self._fix(denial)}")

    def _name(self) -> str:
        """Return the object as errors name it."""
        if SCHEMES.get(self._scheme) == "aiohttp":
            return redacted(self.url)
        return f"{redacted(self.url)} (bucket {self._bucket}, key {redacted_text(self._key)})"

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
        try:
            found = await self._files._call_s3("get_object", **place)
        except Exception as error:
            if type(error).__name__ == "NoCredentialsError":
                await self._files.set_session(refresh=True)  # this one never looks for them again
            raise
        async with found["Body"] as body:
            content = await body.read()
        return _piece(content, found.get("ContentRange"), len(content), found["ETag"].strip('"'), (begin, end))

    async def _of_azure(self, begin: int, end: int) -> Piece:
        place = (self._bucket, self._key)
        async with self._files.service_client.get_blob_client(*place) as blob:
            stream = await blob.download_blob(offset=begin, length=end - begin, max_concurrency=1, retry_total=0)
            content = await stream.readall()
        found = stream.properties  # its size is that of the range
        return _piece(content, found.content_range, len(content), found.etag.strip('"'), (begin, end))

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
            size = found.content_length
            if status == 200:
                self._need_small(size or 0)
            # Of a whole object, the bytes behind the range are needed for its size alone.
            enough = {200: WHOLE_LIMIT + 1 if size is None else end, 206: end - begin + 1}.get(status, ANSWER_BYTES)
            async for chunk in found.content.iter_any():
                content += chunk
                if len(content) >= enough:
                    break
            if status not in (200, 206):
                message = re.search(rb'"message": *"([^"]+)', content)  # Google's
                text = redacted_text(f"{status} {message[1].decode(errors='replace') if message else found.reason}")
                raise RefusedByServer(Denial(status, text, attempts=_attempts(status)))
        if status == 200 and size is None:
            self._need_small(len(content))
        version = told.get("X-Goog-Generation") or told.get("ETag") or told.get("Last-Modified", "")
        given = told.get("Content-Range", "") if status == 206 else None
        return _piece(bytes(content), given, len(content) if size is None else size, version, (begin, end))

    def _need_small(self, size: int) -> None:
        """Check the size of a whole object, which a server sends in place of a range."""
        self._whole = f". The server does not answer ranges: the whole object, {size} bytes, is read each time"
        if size > WHOLE_LIMIT:
            text = f"the server does not answer ranges, and the object is larger than {WHOLE_LIMIT >> 20} MiB"
            raise RefusedByServer(Denial(0, f"{text}; copy it to this machine, such as by curl, and give its path"))

    async def _credentials(self) -> str:
        """Return where the credentials come from, never what they are."""
        try:
            return await asyncio.wait_for(_SOURCES[SCHEMES[self._scheme]](self._files, self.url), CREDENTIALS_S)
        except Exception as error:
            return f"not found ({type(error).__name__})"


def _need_client(scheme: str, url: str) -> None:
    """Check that addresses of a scheme can be read."""
    if scheme not in SCHEMES:
        how = f": hdfs dfs -get {redacted(url)}" if scheme == "hdfs" else ""
        raise FileNotFoundError(
            f"{redacted(url)} is an address of {scheme}://, expected a path or one of"
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
    if scheme == "gs":
        options["session_kwargs"] = {"auto_decompress": False, **configured.get("session_kwargs", {})}
    if SCHEMES[scheme] == "aiohttp":
        # A file that is sent with Content-Encoding is read as it is: its ranges are those of the compressed bytes.
        options["client_kwargs"] = {"trust_env": True, "auto_decompress": False, **configured.get("client_kwargs", {})}
    files = fsspec.filesystem(scheme, **options)
    if scheme == "s3":
        files.retries = 1
    return files


def _piece(content: bytes, told: str | None, size: int, version: str, wanted: tuple[int, int]) -> Piece:
    """Return the wanted bytes of an object, from begin to end, from an answer.

    Arguments:
        told: the Content-Range of the content; None: it is the whole object, or its beginning.
        size: of the object, unless `told` has it.

    Raises:
        RefusedByServer: another range than was asked for, or one without the object's size.
        ConnectionError: not all of its bytes came; a connection that is cut may look like an end.
    """
    begin, end = wanted
    if told is None:
        piece = Piece(content[begin:end], size, version, is_range=False)
    else:
        found = re.fullmatch(r"bytes (\d+)-[^/]*/(\d+)", told)
        if found is None or int(found[1]) != begin:
            text = f"expected the answer's Content-Range to be 'bytes {begin}-{end - 1}/SIZE', found {told!r:.80}"
            raise RefusedByServer(Denial(0, text))
        piece = Piece(content, int(found[2]), version)
    expected = max(0, min(end, piece.size) - begin)
    if len(piece.content) != expected:
        raise ConnectionError(f"{len(piece.content)} of {expected} bytes came")
    return piece


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
