"""Files are replaced whole or not at all; whatever goes wrong is a FileError that says what."""

import os
from pathlib import Path

import pytest

from overlapc.core import files
from overlapc.core.errors import FileError
from overlapc.core.files import (
    load_plan,
    load_problem,
    load_profile,
    load_trace,
    read_text,
    save_plan,
    save_problem,
    save_profile,
    save_trace,
    write_file,
)
from overlapc.core.ir import Plan
from tests.plain.test_text import a_plan, a_problem


def test_all_kinds_save_and_load(tmp_path: Path) -> None:
    path, problem = tmp_path / "file", a_problem()
    save_problem(path, problem)
    assert load_problem(path) == problem
    save_trace(path, problem.trace)
    assert load_trace(path) == problem.trace
    save_profile(str(path), problem.profile)
    assert load_profile(str(path)) == problem.profile
    save_plan(path, a_plan())
    assert load_plan(path) == a_plan()
    with pytest.raises(FileError, match="file': found a plan, expected a profile: pass the prof"):
        load_profile(path)
    assert os.listdir(tmp_path) == ["file"]


def test_newlines_are_kept(tmp_path: Path) -> None:
    write_file(tmp_path / "file", "a\r\nb\rc\n")
    assert read_text(tmp_path / "file", "plan") == "a\r\nb\rc\n"


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str | Path, words: str) -> None:
        with pytest.raises(FileError, match=rf"cannot read the plan '.*': {words}"):
            load_plan(path)

    refused(tmp_path / "missing", "No such file or directory: pass the path of a file you may")
    refused(tmp_path, "Is a directory: ")
    refused("/dev/null", "found a pipe or device, expected a file")
    refused("nul\0byte", "embedded null byte: ")
    refused("x" * 5000, "File name too long: ")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "found a pipe or device, expected a file")
    (tmp_path / "loop").symlink_to("loop")
    refused(tmp_path / "loop", "Too many levels of symbolic links: ")
    (tmp_path / "bytes").write_bytes(b"overlapc \xff")
    refused(tmp_path / "bytes", "found 0xff at byte 9, expected UTF-8: make the plan again")
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    (tmp_path / "large").write_bytes(b"overlapc plan 1")
    refused(tmp_path / "large", "found more than 10 bytes, expected a plan of overlapc's")


def test_line_ends_of_windows_are_named(tmp_path: Path) -> None:
    save_plan(tmp_path / "plan", a_plan())
    sent = (tmp_path / "plan").read_bytes().replace(b"\n", b"\r\n")
    (tmp_path / "plan").write_bytes(sent)
    with pytest.raises(FileError, match="found Windows line ends in a plan, expected those it was"):
        load_plan(tmp_path / "plan")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_what_is_not_permitted(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    save_plan(path, a_plan())
    path.chmod(0)
    with pytest.raises(FileError, match="Permission denied"):
        load_plan(path)
    tmp_path.chmod(0o500)
    with pytest.raises(FileError, match="Permission denied"):
        save_plan(path, a_plan())


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_changes_nothing(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan"
    write_file(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(FileError, match=r"No space left on device: .* nothing was changed"):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan"]


def test_what_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "plan", "nul\0byte", tmp_path / ("x" * 5000)):
        with pytest.raises(FileError, match=r"cannot write '.*: pass a path where you may write"):
            save_plan(path, a_plan())
    with pytest.raises(FileError, match="cannot write"):
        write_file(tmp_path / "file", "\ud800")
    assert os.listdir(tmp_path) == []


def test_what_would_not_read_back_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    save_plan(path, a_plan())
    before = path.read_bytes()
    with pytest.raises(FileError, match="found '-1', expected a number"):
        save_plan(path, Plan("", "", (), (), bound_ns=-1))
    with pytest.raises(FileError, match="found names that are not Unicode text"):
        save_plan(path, Plan("", "", ("\ud83d\ude00",), ()))
    assert path.read_bytes() == before


def test_links_and_permissions_are_the_users(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/plan")
    save_plan(tmp_path / "link", a_plan())
    assert (tmp_path / "link").is_symlink()
    assert load_plan(tmp_path / "folder" / "plan") == a_plan()
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "folder" / "plan").stat().st_mode == plain.stat().st_mode
