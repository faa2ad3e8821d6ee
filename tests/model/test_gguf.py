"""A conversion happens once, whole or not at all."""

import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from executor_svc.gguf import converted, made_once
from executor_svc.refusal import ModelRefused


def make_and_log(directory, log, barrier):
    def make(making):
        with log.open("a") as stream:
            stream.write("made\n")
        (making / "first").write_text("1")
        (making / "second").write_text("2")

    barrier.wait(timeout=30)
    made = made_once(directory, make)
    assert sorted(file.name for file in made.iterdir()) == ["first", "second"]


def test_of_several_processes_one_makes_it_and_all_find_it_whole(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    arguments = (tmp_path / "made", tmp_path / "log", barrier)
    processes = [context.Process(target=make_and_log, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "made\n"


def test_what_fails_half_way_leaves_nothing_and_may_be_tried_again(tmp_path):
    def fail(making):
        (making / "first").write_text("1")
        raise ModelRefused("no")

    with pytest.raises(ModelRefused):
        made_once(tmp_path / "made", fail)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    made = made_once(tmp_path / "made", lambda making: (making / "first").write_text("1"))
    assert (made / "first").read_text() == "1"


def test_a_process_that_dies_half_way_holds_up_nobody(tmp_path):
    code = (
        "import pathlib, signal, os, sys\n"
        "from executor_svc.gguf import made_once\n"
        "made_once(pathlib.Path(sys.argv[1]), lambda making: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    dead = subprocess.run([sys.executable, "-c", code, str(tmp_path / "made")], timeout=60, check=False)
    assert dead.returncode == -9
    assert made_once(tmp_path / "made", lambda making: None).is_dir()


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(tmp_path):
    file = tmp_path / "broken.gguf"
    file.write_bytes(os.urandom(4096))
    with pytest.raises(ModelRefused, match=r"broken\.gguf cannot be converted"):
        converted(file, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_file_that_changed_is_converted_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "executor_svc.gguf.convert", lambda file, making: (making / "copy").write_bytes(file.read_bytes())
    )
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    first = converted(file, tmp_path / "cache")
    assert converted(file, tmp_path / "cache") == first
    file.write_bytes(b"two")
    os.utime(file, ns=(time.time_ns(), time.time_ns() + 1))
    second = converted(file, tmp_path / "cache")
    assert (first / "copy").read_bytes() == b"one"
    assert (second / "copy").read_bytes() == b"two"
