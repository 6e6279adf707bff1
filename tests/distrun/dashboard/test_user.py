from __future__ import annotations

import pytest

from distrun.dashboard import user
from distrun.dashboard.user import Action, User, VisibleRows

SHOWN = VisibleRows(tuple(f"worker-{rank}" for rank in range(10)), page=4, lines=100)


def press(man: User, *keys: str, shown: VisibleRows = SHOWN) -> list[Action]:
    """Press keys one by one, each in a read of its own."""
    return [action for key in keys for action in man.press(key, shown)]


def burst(man: User, *keys: str) -> list[Action]:
    """Press keys that come in one read."""
    return [action for number, key in enumerate(keys) for action in man.press(key, SHOWN, is_next=number > 0)]


def test_the_job_is_stopped_only_by_yes_and_enter() -> None:
    man = User()
    assert press(man, "x", "y", "e", "s") == []
    assert man.look.prompt == user.STOP
    assert press(man, "enter") == [Action.STOP_JOB]
    assert man.look.prompt == ""


@pytest.mark.parametrize("keys", [("enter",), ("y", "enter"), ("n",), ("y", "e", "s", "s"), ("esc",), ("Y",), ("up",)])
def test_anything_but_yes_cancels_the_stop(keys: tuple[str, ...]) -> None:
    man = User()
    assert press(man, "x", *keys) == []
    assert man.look.prompt == ""
    assert man.look.message == "the job goes on"


def test_an_answer_that_comes_with_the_key_that_asked_is_not_taken() -> None:
    man = User()
    assert burst(man, "x", "y", "e", "s", "enter") == []
    assert (man.look.prompt, man.look.typed) == (user.STOP, "")
    assert press(man, "y", "e", "x") == []


def test_keys_that_come_in_one_read_all_act() -> None:
    man = User()
    assert burst(man, "down", "down", "x", "n", "down", "enter") == []
    assert (man.look.chosen, man.look.mode) == ("worker-3", user.DETAIL)
    assert burst(man, "q", "x", "y", "e", "s", "enter", "esc", "l") == [Action.LOG]
    assert man.look.chosen == "worker-3"


def test_a_typo_in_yes_can_be_taken_back() -> None:
    assert press(User(), "x", "y", "e", "backspace", "e", "s", "enter") == [Action.STOP_JOB]


def test_arrows_choose_and_the_top_is_whatever_is_first() -> None:
    man = User()
    press(man, "down", "down")
    assert man.look.chosen == "worker-2"
    press(man, "pgdn")
    assert man.look.chosen == "worker-6"
    press(man, "end")
    assert man.look.chosen == "worker-9"
    press(man, "home")
    assert man.look.chosen == ""
    press(man, "up")
    assert man.look.chosen == ""


def test_texts_of_a_task_are_opened_and_left() -> None:
    man = User()
    press(man, "down")
    assert press(man, "l") == [Action.LOG]
    assert (man.look.mode, man.look.chosen) == (user.LOG, "worker-1")
    assert press(man, "S") == [Action.LOG, Action.STACK]
    assert man.look.chosen == "worker-1"
    assert press(man, "q") == []
    assert man.look.mode == user.MAIN
    assert press(man, "enter", "esc") == []
    assert press(man, "q") == [Action.LEAVE]


def test_a_log_is_scrolled_from_its_end() -> None:
    man = User()
    press(man, "l", "up", "pgup")
    assert man.look.first == 5
    press(man, "home")
    assert man.look.first == 96
    press(man, "end")
    assert man.look.first == 0
    press(man, "q", "?", "pgdn")
    assert man.look.first == 4


def test_a_filter_is_typed_changed_and_removed() -> None:
    man = User()
    press(man, "/", "g", "q", "backspace", "p", "enter")
    assert man.look.wanted == "gp"
    press(man, "/", "z", "esc")
    assert man.look.wanted == "gp"
    press(man, "esc")
    assert man.look.wanted == ""


def test_keys_change_order_panels_folding_and_hold_the_picture() -> None:
    man = User()
    press(man, "s", "f", "tab", "p")
    look = man.look
    assert (look.order, look.is_folded, look.panel, look.is_paused) == ("task", True, "reports", True)
    press(man, "backtab", "p", "f")
    assert (man.look.panel, man.look.is_paused, man.look.is_folded) == ("all", False, False)


def test_a_key_that_means_nothing_says_so() -> None:
    man = User()
    press(man, "%")
    assert "%" in man.look.message
    press(man, "down")
    assert man.look.message == ""


def test_nothing_can_be_opened_where_there_are_no_tasks() -> None:
    assert press(User(), "enter", "l", "S", "down", shown=VisibleRows()) == []
