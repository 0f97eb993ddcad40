"""Long work says what it does, and quick work nothing."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from overlapc.tools import progress
from overlapc.tools.progress import doing, stoppable


class Terminal:
    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(progress, "FIRST_S", 0.01)
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    monkeypatch.setattr(progress, "_REWRITE_S", 0.01)


def wait_until(said, text: str) -> str:
    """What was said in all once `text` is in it."""
    found = ""
    until = time.monotonic() + 30
    while text not in found and time.monotonic() < until:
        time.sleep(0.005)
        found += said()
    return found


def test_quick_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        with doing("tracing"), doing("solving") as note:
            note("almost")
    assert capsys.readouterr().err == ""


def test_long_work_says_what_it_is_at(soon: None, capsys: pytest.CaptureFixture[str]) -> None:
    with doing("planning"):
        with doing("solving") as note:
            note("12 plans")
            text = wait_until(lambda: capsys.readouterr().err, "12 plans")
        assert "overlapc: solving, 0 s: 12 plans\n" in text
        wait_until(lambda: capsys.readouterr().err, "overlapc: planning, 0 s\n")


def test_at_a_terminal_one_line_is_written_again_and_gone_at_the_end(
    soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with doing("solving"):
        wait_until(lambda: terminal.text, "solving")
    wait_until(lambda: "end" if terminal.text.endswith("\r\033[K") else "", "end")
    assert terminal.text.startswith("\r\033[Koverlapc: solving, 0 s")
    assert terminal.text.endswith("\r\033[K")
    assert "\n" not in terminal.text


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_only_the_first_rank_speaks(
    how: str, soon: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "environment":
        monkeypatch.setenv("RANK", "1")
    with doing("solving", 1 if how == "argument" else None) as note:
        note("12 plans")
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_sigterm_stops_as_ctrl_c_does() -> None:
    def stop() -> None:
        with stoppable():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_program_that_handles_sigterm_goes_on_doing_so() -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(True))
    try:
        with stoppable():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        assert seen == [True]
    finally:
        signal.signal(signal.SIGTERM, before)
