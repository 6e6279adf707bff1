"""Hadoop's web services: where they are, which of several is asked, who asks, and files in HDFS."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from webservers import Reply, Server, servers

from distrun.backends import hadoop
from distrun.backends.engine import EngineError
from distrun.backends.hadoop import HdfsFiles, Web
from distrun.errors import UsageError

__all__ = ["servers"]


def site(folder: Path, **files: dict[str, str]) -> dict[str, str]:
    for name, rows in files.items():
        text = "".join(f"<property><name>{k}</name><value>{v}</value></property>" for k, v in rows.items())
        (folder / f"{name}-site.xml").write_text(f"<?xml version='1.0'?><configuration>{text}</configuration>")
    return hadoop.read_site(folder)


def test_addresses_come_from_the_configuration_files(tmp_path: Path) -> None:
    found = site(
        tmp_path,
        core={"fs.defaultFS": "hdfs://n1:8020"},
        yarn={
            "yarn.resourcemanager.hostname": "r1",
            "yarn.resourcemanager.webapp.address": "${my.host}:88",
            "my.host": "w",
        },
    )
    assert hadoop.resource_managers(found) == ("http://w:88",)
    assert hadoop.name_nodes(found) == ("http://n1:9870",)
    del found["yarn.resourcemanager.webapp.address"]
    assert hadoop.resource_managers(found) == ("http://r1:8088",)


def test_all_of_several_resource_managers_and_name_nodes_are_found(tmp_path: Path) -> None:
    found = site(
        tmp_path,
        core={"fs.defaultFS": "hdfs://prod"},
        hdfs={
            "dfs.nameservices": "prod",
            "dfs.ha.namenodes.prod": "a, b",
            "dfs.namenode.http-address.prod.a": "n1:9870",
            "dfs.namenode.http-address.prod.b": "n2:9870",
        },
        yarn={
            "yarn.http.policy": "HTTPS_ONLY",
            "yarn.resourcemanager.ha.enabled": "true",
            "yarn.resourcemanager.ha.rm-ids": "rm1,rm2",
            "yarn.resourcemanager.hostname.rm1": "r1",
            "yarn.resourcemanager.webapp.https.address.rm2": "r2:9999",
        },
    )
    assert hadoop.resource_managers(found) == ("https://r1:8090", "https://r2:9999")
    assert hadoop.name_nodes(found) == ("http://n1:9870", "http://n2:9870")


def test_a_folder_without_configuration_names_nothing(tmp_path: Path) -> None:
    assert hadoop.resource_managers(site(tmp_path)) == ()
    assert hadoop.name_nodes({"fs.defaultFS": "s3a://bucket"}) == ()


def test_a_damaged_configuration_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "yarn-site.xml").write_text("<configuration>")
    with pytest.raises(UsageError, match=r"yarn-site\.xml cannot be read"):
        hadoop.read_site(tmp_path)


def test_entities_of_a_configuration_file_are_not_expanded(tmp_path: Path) -> None:
    text = '<!DOCTYPE c [<!ENTITY a "aa">]><c><property><name>x</name><value>&a;</value></property></c>'
    (tmp_path / "yarn-site.xml").write_text(text)
    with pytest.raises(UsageError, match="entities"):
        hadoop.read_site(tmp_path)


@pytest.mark.parametrize("typed", ["ftp://h1", "http://", "http://h1:x", "http://me:secret@h1:8088"])
def test_an_address_that_is_none_is_refused(typed: str) -> None:
    with pytest.raises(UsageError, match="--yarn-rm"):
        hadoop.addresses(typed, "--yarn-rm")


def test_addresses_lose_their_paths_and_get_a_scheme() -> None:
    assert hadoop.addresses("h1:8088, https://h2:8090/cluster", "--yarn-rm") == ("http://h1:8088", "https://h2:8090")


def test_the_next_address_is_asked_when_one_is_down_or_standby(servers: Callable[[], Server]) -> None:
    standby, active = servers(), servers()
    standby.answer = lambda method, path, headers: (200, b"This is standby RM. The redirect url is: http://x/", {})
    web = Web("ResourceManager", ("http://127.0.0.1:1", standby.url, active.url), "ann")
    assert web.ask("GET", "/ws/v1/cluster/info").status == 200
    assert web.addresses[0] == active.url
    web.ask("GET", "/ws/v1/cluster/info")
    assert (len(standby.asked), len(active.asked)) == (1, 2)  # the one that answered is asked first


def test_a_standby_name_node_is_passed_over(servers: Callable[[], Server]) -> None:
    standby, active = servers(), servers()
    standby.answer = lambda *_: (403, b'{"RemoteException":{"exception":"StandbyException"}}', {})
    active.answer = lambda *_: (200, b'{"Path":"/user/ann"}', {})
    assert HdfsFiles(Web("NameNode", (standby.url, active.url), "ann")).home() == "/user/ann"


def test_all_addresses_are_named_when_none_answers() -> None:
    web = Web("ResourceManager", ("http://127.0.0.1:1", "http://127.0.0.1:2"), "ann")
    with pytest.raises(
        EngineError, match=r"ResourceManager does not answer: http://127.0.0.1:1: .*; http://127.0.0.1:2"
    ):
        web.ask("GET", "/")


def test_a_redirected_request_keeps_its_method_and_body(servers: Callable[[], Server]) -> None:
    name_node, data_node = servers(), servers()
    name_node.answer = lambda method, path, headers: (
        (200, b'{"boolean":true}', {}) if "CREATE" not in path else (307, b"", {"Location": data_node.url + path})
    )
    data_node.answer = lambda *_: (201, b"", {})
    HdfsFiles(Web("NameNode", (name_node.url,), "ann")).write("/user/ann/.distrun/x/secret", b"word\n")
    [(method, path, body, _)] = data_node.asked
    assert (method, body) == ("PUT", b"word\n")
    assert path.startswith("/webhdfs/v1/user/ann/.distrun/x/secret?")
    assert "permission=600" in path
    assert "overwrite=false" in path
    folders = [path for _, path, _, _ in name_node.asked[:2]]
    assert all("permission=700" in path for path in folders)
    assert all("user.name=ann" in path for path in folders)


def test_what_hdfs_refuses_is_said(servers: Callable[[], Server]) -> None:
    server = servers()
    said = {
        "RemoteException": {"exception": "AccessControlException", "message": "Permission denied: user=ann\n\tat x"}
    }
    server.answer = lambda *_: (403, json.dumps(said).encode(), {})
    with pytest.raises(EngineError, match=r"HDFS: making /a/b: 403: Permission denied: user=ann$"):
        HdfsFiles(Web("NameNode", (server.url,), "ann")).write("/a/b/c", b"")


def test_redirections_without_end_are_an_error(servers: Callable[[], Server]) -> None:
    server = servers()
    server.answer = lambda method, path, headers: (302, b"", {"Location": path})
    with pytest.raises(EngineError, match="redirected"):
        Web("ResourceManager", (server.url,), "ann").ask("GET", "/x")


def test_kerberos_is_answered_with_a_ticket_and_remembered(
    servers: Callable[[], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for gssapi: what crosses is checked, Kerberos itself is not."""
    asked = []

    class Context:
        def __init__(self, name: str, usage: str) -> None:
            asked.append((name, usage))

        def step(self) -> bytes:
            return b"ticket"

    kinds = SimpleNamespace(hostbased_service="host based")
    fake = SimpleNamespace(Name=lambda name, kind: f"{name} {kind}", NameType=kinds, SecurityContext=Context)
    monkeypatch.setitem(sys.modules, "gssapi", fake)  # type: ignore[arg-type]

    def answer(method: str, path: str, headers: dict[str, str]) -> Reply:
        if headers.get("Authorization") == "Negotiate " + base64.b64encode(b"ticket").decode():
            return 200, b'{"ok":1}', {"Set-Cookie": "hadoop.auth=signed; Path=/; HttpOnly"}
        if "hadoop.auth=signed" in headers.get("Cookie", ""):
            return 200, b'{"ok":2}', {}
        return 401, b"", {"WWW-Authenticate": "Negotiate"}

    server = servers()
    server.answer = answer
    web = Web("ResourceManager", (server.url,), "ann")
    assert web.json("/ws") == {"ok": 1}
    assert web.json("/ws") == {"ok": 2}
    assert asked == [("HTTP@127.0.0.1 host based", "initiate")]


def test_without_gssapi_the_error_says_what_to_install(
    servers: Callable[[], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gssapi", None)  # type: ignore[arg-type]
    server = servers()
    server.answer = lambda *_: (401, b"", {"WWW-Authenticate": "Negotiate"})
    with pytest.raises(EngineError, match="wants Kerberos") as raised:
        Web("ResourceManager", (server.url,), "ann").ask("GET", "/")
    assert raised.value.hint == "pip install 'distrun[kerberos]'"


def test_an_answer_that_is_a_page_is_told_as_words(servers: Callable[[], Server]) -> None:
    server = servers()
    server.answer = lambda *_: (404, b"<html><body><h1>Not  Found</h1></body></html>", {})
    with pytest.raises(EngineError, match="asked for /x: 404: Not Found"):
        Web("ResourceManager", (server.url,), "ann").json("/x")
