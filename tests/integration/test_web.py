"""`distrun dashboard` as a user has it: the command, and the page in a real browser."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from distrun_cli import TIMEOUT_S, Distrun, wait_until
from recordedpage import JOB, recorded
from slowness import scaled

from distrun.dashboard.web import DashboardPort
from distrun_runtime.coordinator.jobstore import JobStore

NAME = "<img src=x onerror=document.body.remove()>"
TASK = """\
import os, time
while not os.path.exists("go"):
    time.sleep(0.02)
raise SystemExit("a <script>bad</script> end")
"""


class Served:
    """A dashboard that was started as a user does."""

    def __init__(self, distrun: Distrun, *words: str, **env: str) -> None:
        self._said = {
            name: distrun.home / f"{name}-{len(list(distrun.home.iterdir()))}" for name in ("stdout", "stderr")
        }
        with contextlib.ExitStack() as stack:
            files = {name: stack.enter_context(path.open("wb")) for name, path in self._said.items()}
            self.process = distrun.start("dashboard", *words, env=env, **files)
        self.url = str(wait_until(lambda: self.said("stdout").partition("\n")[0], TIMEOUT_S, "a URL is printed"))

    def said(self, stream: str) -> str:
        return self._said[stream].read_text()

    def get(self, path: str) -> Any:
        address, _, fragment = self.url.partition("#token=")
        token = fragment.partition("&")[0]
        request = urllib.request.Request(address + path, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=scaled(TIMEOUT_S)) as answer:
            return json.load(answer)

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(scaled(TIMEOUT_S))


@pytest.fixture
def serve(distrun: Distrun) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(*words: str, **env: str) -> Served:
        made.append(Served(distrun, *words, **env))
        return made[-1]

    yield start
    for each in made:
        each.process.terminate()
        each.process.wait()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    (tmp_path / "profile").mkdir()
    made = Browser(tmp_path / "profile")
    yield made
    made.close()


# ---------------------------------------------------------------------- the command


def test_ctrl_c_ends_it_and_a_signal_is_its_exit_code(serve: Callable[..., Served]) -> None:
    first, second = serve(), serve()
    assert first.get("api/jobs")["ids"] == []
    assert (first.end(), second.end(signal.SIGTERM)) == (0, 143)
    assert first.url != second.url


def test_in_an_ssh_session_it_says_how_the_port_is_forwarded(serve: Callable[..., Served]) -> None:
    served = serve(SSH_CONNECTION="10.0.0.1 5555 10.0.0.2 2222")
    port = served.url.partition("/#")[0].rpartition(":")[2]
    assert f"ssh -L {port}:127.0.0.1:{port} -p 2222 " in served.said("stderr")


def test_a_port_in_use_and_a_job_that_does_not_exist_are_said(serve: Callable[..., Served], distrun: Distrun) -> None:
    port = serve().url.partition("/#")[0].rpartition(":")[2]
    taken = distrun.answer("dashboard", "--port", port)
    assert taken.returncode == 2
    assert f"port {port} of 127.0.0.1 cannot be used: Address already in use" in taken.stderr.decode()
    assert distrun.answer("dashboard", "nothing").returncode == 2


def test_the_token_is_no_argument_of_the_browser_that_is_opened(
    serve: Callable[..., Served], distrun: Distrun, tmp_path: Path
) -> None:
    program, told = tmp_path / "opener", tmp_path / "told"
    program.write_text(
        f'#!/bin/sh\necho "$1" > {told}.new; stat -c %a "$(dirname "${{1#file://}}")" >> {told}.new\n'
        f'cat "${{1#file://}}" >> {told}.new; mv {told}.new {told}\n'
        'while [ -e "${1#file://}" ]; do sleep 0.05; done\n'  # a browser that goes on
    )
    program.chmod(0o755)
    served = serve("--open", DISPLAY=":99", BROWSER=str(program))
    url, mode, page = wait_until(lambda: told.exists() and told.read_text(), TIMEOUT_S, "it is opened").split("\n", 2)
    token = served.url.partition("token=")[2]
    assert token not in url
    assert mode == "700"
    assert token in page
    assert served.end(signal.SIGTERM) == 143
    assert not Path(url.removeprefix("file://")).exists()


def test_what_a_killed_one_left_for_the_browser_is_removed_by_the_next(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    given = {"DISPLAY": ":99", "BROWSER": "true", "TMPDIR": str(tmp_path / "tmp")}
    killed = serve("--open", **given)
    (left,) = wait_until(lambda: list((tmp_path / "tmp").glob("*/dashboard.html")), TIMEOUT_S)
    killed.process.kill()
    killed.process.wait()
    os.utime(left.parent, (0, 0))
    serve("--open", **given)
    (page,) = wait_until(
        lambda: [each for each in (tmp_path / "tmp").glob("*/dashboard.html") if each != left], TIMEOUT_S
    )
    assert not left.parent.exists()
    serve("--open", **given)  # one that lives keeps its own
    wait_until(lambda: len(list((tmp_path / "tmp").glob("*/dashboard.html"))) == 2, TIMEOUT_S)
    assert page.exists()


def test_without_a_desktop_open_says_so(serve: Callable[..., Served]) -> None:
    served = serve("--open", DISPLAY="", WAYLAND_DISPLAY="", BROWSER="")
    wait_until(lambda: "--open: there is no desktop" in served.said("stderr"), TIMEOUT_S)


# ---------------------------------------------------------------------- the page


@pytest.mark.slow
def test_a_real_job_is_found_in_the_list_followed_and_shown_after_its_end_whatever_it_prints(
    serve: Callable[..., Served], distrun: Distrun, browser: Browser
) -> None:
    (distrun.work / "task.py").write_text(TASK)
    words = ["-n", "2", "-s", "0", "python", "task.py", NAME]
    launched = distrun.begin(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: distrun.jobs and distrun.state()["state"] == "running", TIMEOUT_S, "the job runs")
    browser.look(400, 800)
    browser.open(serve().url)
    browser.until("document.querySelectorAll('#jobs tbody tr').length === 1")
    assert "token" not in browser.value("location.href")
    assert browser.value("document.querySelector('#jobs tbody').innerText.includes('<img')")
    while browser.value("document.activeElement.closest('#jobs a') === null"):
        browser.key("Tab")
    browser.key("Enter")
    browser.until("document.querySelectorAll('#tasks tbody tr').length === 2")
    assert browser.value("document.getElementById('state').innerText") == "running"
    assert browser.value("document.documentElement.scrollWidth") <= 400
    browser.value("at('only').value = 'worker-1', at('only').dispatchEvent(new Event('input')), true")
    browser.until("document.querySelectorAll('#tasks tbody tr').length === 1")
    browser.value("at('only').value = '', at('only').dispatchEvent(new Event('input')), true")
    (distrun.work / "go").touch()
    launched.wait(scaled(TIMEOUT_S))
    browser.until("document.getElementById('state').innerText === 'failed'")
    browser.until("document.getElementById('error-lines').innerText.includes('a <script>bad</script> end')")
    assert browser.value("document.getElementById('link').innerText") == "ended"
    assert not browser.value("document.querySelector('main img, script:not([src])')")
    assert browser.complaints == []


@pytest.mark.slow
def test_plots_are_drawn_in_both_colours_and_say_their_numbers(tmp_path: Path, browser: Browser) -> None:
    with recorded(tmp_path) as port:
        browser.open(port.address(JOB))
        browser.until("document.querySelectorAll('#reports canvas').length === 4")
        labels = browser.value("[...document.querySelectorAll('#reports .plot')].map((each) => each.ariaLabel)")
        assert "accuracy, last 0.8404, min 0.08  max 0.8404" in labels
        browser.until("document.querySelectorAll('#usage canvas').length === 4")
        browser.look(1600, 1000)
        browser.value(
            "picture = () => document.querySelectorAll('#reports canvas')[0].toDataURL(), before = picture(), true"
        )
        browser.look(1600, 1000, "dark")
        browser.until("picture() !== before")
        browser.value("before = picture(), at('axis').value = 'times', at('axis').dispatchEvent(new Event('change'))")
        browser.until("picture() !== before")
        assert browser.value("document.querySelector('figure b')") is None
        assert browser.value("lone([1, null, 2, 3, null, 4])") == [0, 5], "what no line joins is a point"
        marks = (
            "[1e-4, 2.5e-4, 12345.675].map((tick, at, all) => amount(tick, '', digits(all, [5e-5, 1e-5, 5e-3][at])))"
        )
        assert browser.value(marks)[2] == "12.345675k", "marks of an axis differ"
        assert browser.complaints == []
    browser.until("document.getElementById('link').innerText === 'no answer'")
    assert browser.value("document.querySelectorAll('#tasks tbody tr').length") == 9, "what was shown stays"


@pytest.mark.slow
def test_without_its_token_the_page_says_what_to_open_and_the_browser_need_not_keep_it(
    tmp_path: Path, browser: Browser
) -> None:
    port = DashboardPort(list, JobStore(tmp_path).find)
    port.start()
    nothing = "Object.defineProperty(window, 'localStorage', { get() { throw new Error('blocked'); } })"
    try:
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=nothing)
        browser.open(port.url)
        browser.until(
            "document.getElementById('problem').innerText.includes('Open the URL that distrun dashboard printed')"
        )
        browser.open(port.address())
        browser.until("!at('list').hidden")
    finally:
        port.close()
