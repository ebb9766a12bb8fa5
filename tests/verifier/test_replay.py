"""A recorded session runs again as it was; what is changed, cut off or damaged is found and said."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from ssd_serve.app.cli.main import main
from ssd_serve.app.cli.replay import find_session, read_header
from ssd_serve.base.errors import PermissionProblemError, RecordingError
from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.verifier.assembly import assemble_verifier
from ssd_serve.verifier.observer import Turn
from ssd_serve.verifier.replay.recording import SessionRecorder, recorded_bytes, session_recorder
from ssd_serve.verifier.replay.replay import Replay, Replayed
from ssd_serve.verifier.replay.tape import HEADER, TAPE, Kind, RoundTrace, TapeReader, framed, read_pages
from tests.verifier.recorded_session import LOG, Recorded, ask, record, small


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(tmp_path_factory.mktemp("recorded"))


def replay(recorded: Recorded, folder: Path, seen: list[RoundTrace] | None = None) -> Replayed:
    rounds: list[RoundTrace] = [] if seen is None else seen
    run = Replay(
        TapeReader(folder / TAPE), read_header(folder).measured, lambda _number, told: rounds.append(told)
    )
    return run.run(
        assemble_verifier(recorded.settings, lambda _: None, log=LOG, environment=run.environment).engine
    )


def copy_of(recorded: Recorded, tmp_path: Path, tape: bytes | None = None) -> Path:
    folder = tmp_path / "20260101-000000-1"
    folder.mkdir()
    (folder / HEADER).write_bytes((recorded.folder / HEADER).read_bytes())
    (folder / TAPE).write_bytes((recorded.folder / TAPE).read_bytes() if tape is None else tape)
    return folder


def changed(recorded: Recorded, number: int) -> tuple[bytes, str]:
    """The tape with another last token of the round's first request, and how the difference is told."""
    tape, count, told = b"", 0, ""
    for page in read_pages(recorded.folder / TAPE):
        assert not isinstance(page, str)
        said = list(page.said)
        for index, each in enumerate(said):
            count += isinstance(each, RoundTrace)
            if isinstance(each, RoundTrace) and count == number and not told:
                part = each.parts[0]
                *before, last = part.tokens
                other = replace(part, tokens=(*before, last + 1))
                said[index] = RoundTrace((other, *each.parts[1:]))
                position = part.position + len(before)
                told = (
                    f"round {number}, request {part.request}, position {position}: "
                    f"recorded token {last + 1}, now token {last}"
                )
        tape += framed(replace(page, said=said))
    return tape, told


def test_the_session_had_what_makes_sessions_differ(recorded: Recorded) -> None:
    assert recorded.preemptions > 0
    assert recorded.prefix_hits > 0
    assert recorded.accepted > 0
    assert recorded.shortages > 0
    pages = [page for page in read_pages(recorded.folder / TAPE) if page != "cut"]
    assert {kind for page in pages for kind in page.kinds} == set(Kind) - {Kind.FULL}


@pytest.fixture(scope="module")
def again(recorded: Recorded) -> tuple[Replayed, list[RoundTrace]]:
    """The session run again: what is said of it, and all its rounds."""
    rounds: list[RoundTrace] = []
    return replay(recorded, recorded.folder, rounds), rounds


def test_a_session_runs_again_as_it_was(recorded: Recorded, again: tuple[Replayed, list[RoundTrace]]) -> None:
    result = again[0]
    assert result.difference == ""
    assert (result.rounds, result.tokens) == (recorded.rounds, recorded.tokens)
    assert result.requests == 2 * 12


@pytest.mark.slow
def test_it_is_the_same_every_time(recorded: Recorded, again: tuple[Replayed, list[RoundTrace]]) -> None:
    first = again[1]
    second: list[RoundTrace] = []
    replay(recorded, recorded.folder, second)
    assert first == second
    assert len(first) == recorded.rounds


def test_another_token_is_found_in_its_round(recorded: Recorded, tmp_path: Path) -> None:
    tape, told = changed(recorded, 37)
    assert told
    result = replay(recorded, copy_of(recorded, tmp_path, tape))
    assert result.difference == told
    assert result.rounds == 36


@pytest.mark.slow
def test_a_tape_that_is_cut_off_runs_as_far_as_it_goes(recorded: Recorded, tmp_path: Path) -> None:
    pages = [page for page in read_pages(recorded.folder / TAPE) if page != "cut"]
    while not any(isinstance(each, RoundTrace) for each in pages[-1].said):
        pages.pop()
    folder = copy_of(recorded, tmp_path, b"".join(map(framed, pages))[:-7])
    tape = TapeReader(folder / TAPE)
    run = Replay(tape, read_header(folder).measured)
    result = run.run(
        assemble_verifier(recorded.settings, lambda _: None, log=LOG, environment=run.environment).engine
    )
    assert tape.cut
    assert result.difference == ""
    assert result.rounds < recorded.rounds


def test_a_damaged_page_is_an_error_when_it_is_reached(recorded: Recorded, tmp_path: Path) -> None:
    pages = [framed(page) for page in read_pages(recorded.folder / TAPE) if page != "cut"]
    whole, start = b"".join(pages), sum(len(page) for page in pages[:-1])
    tape = whole[:-1] + bytes([whole[-1] ^ 1])
    seen: list[RoundTrace] = []
    with pytest.raises(RecordingError, match=f"damaged at byte {start}:"):
        replay(recorded, copy_of(recorded, tmp_path, tape), seen)
    assert seen


def test_a_limit_ends_the_recording_and_not_the_session(recorded: Recorded, tmp_path: Path) -> None:
    recorder = SessionRecorder(tmp_path / "sessions", 2000, LOG)
    settings = recorded.settings
    verifier = assemble_verifier(settings, lambda _: None, log=LOG, environment=small(recorder))
    recorder.begin(settings, verifier)
    for number in range(6):
        ask(verifier.engine, Submit(number, (1, 2, 3), SamplingParameters(max_tokens=20), number))
        while verifier.engine.busy:
            ask(verifier.engine, Turn.STEP)
        verifier.engine.observer.rests()
    tape = TapeReader(recorder.path / TAPE)
    run = Replay(tape, read_header(recorder.path).measured)
    result = run.run(assemble_verifier(settings, lambda _: None, log=LOG, environment=run.environment).engine)
    assert tape.full
    assert result.difference == ""
    assert 0 < result.rounds < verifier.engine.clocked.rounds


def test_sessions_of_a_folder_share_the_limit(recorded: Recorded, tmp_path: Path) -> None:
    settings = recorded.settings.model_copy(update={"record": tmp_path / "sessions", "record_mb": 1})
    for _ in range(3):  # a server that dies as soon as it has started
        recorder = session_recorder(settings, LOG)
        assert recorder is not None
        (recorder.path / TAPE).write_bytes(b"x" * 400_000)
        recorder.path.rename(recorder.path.with_name(f"earlier-{recorded_bytes(tmp_path / 'sessions')}"))
    before = sorted((tmp_path / "sessions").iterdir())
    assert session_recorder(settings, LOG) is None
    assert sorted((tmp_path / "sessions").iterdir()) == before


def test_the_recording_is_private_and_has_no_secrets(recorded: Recorded) -> None:
    assert stat.S_IMODE(recorded.folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in recorded.folder.iterdir())
    assert "sesame" not in (recorded.folder / HEADER).read_text()


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionProblemError, match="chmod 700"):
        SessionRecorder(tmp_path, 1 << 20, LOG)


def test_a_disk_that_is_full_ends_no_session(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, settings = tmp_path / "next", recorded.settings
    recorder = SessionRecorder(tmp_path / "first", 1 << 20, LOG)
    verifier = assemble_verifier(settings, lambda _: None, log=LOG, environment=small(recorder))

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", full)
    recorder.begin(settings, verifier)
    following = settings.model_copy(update={"record": folder})
    assert session_recorder(following, LOG) is None
    monkeypatch.undo()
    assert not (recorder.path / HEADER).exists()
    folder.chmod(0o755)
    with pytest.raises(PermissionProblemError, match="chmod 700"):
        session_recorder(following, LOG)


@pytest.mark.slow
def test_the_command_says_that_it_is_the_same(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded.folder.parent), "--request", "1"]) == 0
    out = capsys.readouterr().out
    assert f"the same: {recorded.rounds} rounds, {recorded.tokens} tokens, 24 requests" in out
    assert "text of request 1: " in out
    assert ": request 1 at 41: rows " in out


def test_the_command_stops_where_it_is_told_to(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recorded.folder), "--until", "5", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "round 5: request" in out
    assert "round 6: " not in out


@pytest.mark.slow
def test_the_command_ends_with_1_at_a_difference(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape, told = changed(recorded, 12)
    assert main(["replay", str(copy_of(recorded, tmp_path, tape))]) == 1
    assert told in capsys.readouterr().out


def test_what_cannot_be_replayed_is_a_clear_error(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(word: str) -> None:
        assert main(["replay", str(tmp_path)]) == 2
        assert word in capsys.readouterr().err

    refused("no recorded session")
    whole = (recorded.folder / TAPE).read_bytes()
    folder = copy_of(recorded, tmp_path, whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    refused("damaged at byte")
    header = json.loads((folder / HEADER).read_text())
    (folder / HEADER).write_text(json.dumps({**header, "weights": "0"}))
    refused("is not the recorded")
    (folder / HEADER).write_text(json.dumps({**header, "format": 99}))
    refused("recorded in format 99")
    (folder / HEADER).write_text("{")
    refused("is damaged")
    (folder / HEADER).unlink()
    refused("ended before it was ready")


def test_the_newest_session_is_taken(tmp_path: Path) -> None:
    for name in ("20260101-000000-9", "20260102-000000-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / TAPE).touch()
    assert find_session(tmp_path).name == "20260102-000000-1"
