from __future__ import annotations

import os
import queue
import signal
import threading

from slowness import scaled

from distrun_runtime.contract.daemon import Interrupts

LIMIT_S = scaled(60.0)


def test_each_signal_is_told_even_while_the_main_thread_is_busy_and_others_take_the_delivery() -> None:
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    done = threading.Event()

    def send() -> None:
        # To this very thread, as the system may do with any signal of the process.
        for _ in range(2):
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        done.set()

    with Interrupts(names.put):
        thread = threading.Thread(target=send)
        thread.start()
        got = [names.get(timeout=LIMIT_S), names.get(timeout=LIMIT_S)]
        thread.join()
    assert got == ["INT", "INT"]
    assert done.is_set()


def test_ctrl_z_is_told_and_other_signals_of_the_process_are_left_alone() -> None:
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        with Interrupts(names.put):
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTSTP)
            assert names.get(timeout=LIMIT_S) == "TSTP"
        assert names.empty()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_for_tasks_are_told_unless_they_were_ignored() -> None:
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    before, other = signal.signal(signal.SIGUSR2, signal.SIG_IGN), signal.getsignal(signal.SIGUSR1)
    try:
        with Interrupts(names.put):
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert names.get(timeout=LIMIT_S) == "USR1"
        assert names.empty()
        assert signal.getsignal(signal.SIGUSR1) == other
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_handlers_wakeup_descriptor_and_thread_are_put_back() -> None:
    threads = threading.active_count()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)]
    with Interrupts(lambda name: None):
        assert signal.getsignal(signal.SIGINT) != handlers[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() <= threads


def test_outside_the_main_thread_nothing_is_touched() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def enter() -> None:
        with Interrupts(lambda name: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
