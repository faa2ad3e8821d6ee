"""The native kernels are built once, kept by what they were made of, and never a reason not to start."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build, compiling, levels, library

LEVEL = levels.LEVELS["avx2"]


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A directory of one small source without torch's headers, in place of the kernels' own."""
    directory = tmp_path / "csrc"
    directory.mkdir()
    (directory / "one.cpp").write_text('extern "C" __attribute__((visibility("default"))) int one() { return 1; }\n')
    monkeypatch.setattr(compiling, "SOURCES", directory)
    monkeypatch.setattr(compiling, "PREBUILT", tmp_path / "prebuilt")
    return directory


def test_a_library_is_built_once_and_again_only_when_a_source_changes(sources, tmp_path):
    first = compiling.find_or_build(LEVEL, tmp_path)
    made = first.stat().st_mtime_ns
    assert compiling.find_or_build(LEVEL, tmp_path) == first
    assert first.stat().st_mtime_ns == made
    (sources / "one.h").write_text("// another\n")
    assert compiling.find_or_build(LEVEL, tmp_path) != first


def test_a_library_built_ahead_needs_no_compiler(sources, tmp_path, monkeypatch):
    compiling.PREBUILT.mkdir()
    built = compiling.find_or_build(LEVEL, tmp_path)
    (compiling.PREBUILT / f"{compiling.stem(LEVEL)}.so").write_bytes(built.read_bytes())
    monkeypatch.setattr(compiling, "_COMPILERS", ("no-such-compiler",))
    assert compiling.find_or_build(LEVEL, tmp_path / "empty").parent == compiling.PREBUILT


def test_without_a_compiler_the_reason_is_said(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "_COMPILERS", ("no-such-compiler",))
    with pytest.raises(library.BuildError, match=r"no C\+\+ compiler"):
        compiling.find_or_build(LEVEL, tmp_path)


def test_a_source_that_does_not_compile_leaves_nothing_behind(sources, tmp_path):
    (sources / "two.cpp").write_text("this is no program\n")
    with pytest.raises(library.BuildError, match=r"ended with 1: .*two\.cpp"):
        compiling.find_or_build(LEVEL, tmp_path)
    assert not list((tmp_path / "kernels").glob("*.so"))


def test_a_cache_that_cannot_be_written_is_told(sources, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(library.BuildError, match="cannot be kept in"):
        compiling.find_or_build(LEVEL, tmp_path / "file")


def test_without_a_home_the_reason_is_said(sources, monkeypatch):
    def no_home(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(library.BuildError, match=r"cannot be kept in ~/.*home directory"):
        compiling.find_or_build(LEVEL)


@pytest.mark.parametrize("left", [0, 100, -100])
def test_a_library_that_lost_its_end_is_built_again(sources, tmp_path, left):
    built = compiling.find_or_build(LEVEL, tmp_path)
    whole = built.read_bytes()
    built.write_bytes(whole[:left])
    assert compiling.find_or_build(LEVEL, tmp_path).read_bytes() == whole


def test_what_a_killed_process_left_is_removed(sources, tmp_path):
    built = compiling.find_or_build(LEVEL, tmp_path)
    built.unlink()
    (built.parent / f"{built.stem}.making-1").mkdir()
    compiling.find_or_build(LEVEL, tmp_path)
    assert [path.suffix for path in sorted(built.parent.iterdir())] == [".lock", ".so"]


def test_who_waits_hears_how_far_compiling_has_come(sources, tmp_path):
    told = []
    for _ in range(2):
        compiling.find_or_build(LEVEL, tmp_path, lambda *parts: told.append(parts))
    assert told == [(0, 1), (1, 1)]


def test_one_prebuilt_for_another_torch_is_not_taken(sources, tmp_path, monkeypatch):
    compiling.PREBUILT.mkdir()
    compiling.build(LEVEL, compiling.PREBUILT / f"{compiling.stem(LEVEL)}.so")
    monkeypatch.setattr(compiling.torch, "__version__", "2.99.0")
    assert compiling.find_or_build(LEVEL, tmp_path).parent == tmp_path / "kernels"


def test_the_command_builds_ahead_and_says_where(sources, tmp_path, monkeypatch, capsys):
    directory = tmp_path / "ahead"
    monkeypatch.setattr(sys, "argv", ["build", "--level", "avx2", "--to", str(directory)])
    build.main()
    made = Path(capsys.readouterr().out.strip())
    assert made == directory / f"{compiling.stem(LEVEL)}.so"
    assert made.exists()


def test_the_command_says_why_it_could_not(sources, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiling, "_COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(sys, "argv", ["build", "--level", "avx2", "--to", str(tmp_path)])
    with pytest.raises(SystemExit):
        build.main()
    assert "there is no C++ compiler" in capsys.readouterr().err


def test_processes_that_start_together_build_one_library(sources, tmp_path):
    program = (
        "import sys; from pathlib import Path; from kernels.cpu import compiling, levels; "
        "compiling.SOURCES = Path(sys.argv[1]); "
        "print(compiling.find_or_build(levels.LEVELS['avx2'], Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", program, str(sources), str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=100)[0].strip() for process in running}
    assert len(paths) == 1
    assert Path(paths.pop()).exists()


def test_the_best_level_comes_first_and_holds_those_after_it():
    names = levels.supported()
    flags = [levels.LEVELS[name].cpu_flags for name in names]
    assert all(better >= worse for better, worse in itertools.pairwise(flags))
    assert "amx_emulated" not in names


@pytest.mark.parametrize("name", ["no-such-level", "neon", "amx"])
def test_a_level_that_the_cpu_does_not_run_is_refused(name):
    if name in levels.supported():
        pytest.skip("this CPU runs it")
    with pytest.raises(library.BuildError):
        library.ops(name)


def test_a_level_is_loaded_once_from_whichever_directory(tmp_path):
    first = library.ops()
    assert library.ops(levels.supported()[0], tmp_path) is first
    assert not list(tmp_path.iterdir())
