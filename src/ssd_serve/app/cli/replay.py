"""`ssd replay`: finds a recorded session, runs it again in this process, and says whether it is the same.

Knows folders, headers and how to print; how a session is run again is the verifier's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ssd_serve.base.devices import parse_device, pin, this_machine
from ssd_serve.base.errors import RecordingError, SettingsError
from ssd_serve.base.logs import get_logger
from ssd_serve.base.settings import Settings
from ssd_serve.models.hub import find_model, fingerprint
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.verifier.assembly import AssembledVerifier, assemble_verifier
from ssd_serve.verifier.replay.recording import Header, versions
from ssd_serve.verifier.replay.replay import Replay, Replayed
from ssd_serve.verifier.replay.tape import FORMAT, HEADER, TAPE, ChunkTrace, RoundTrace, TapeReader

DIFFERENT = 1


class _Format(msgspec.Struct):
    """What a header of any version says."""

    format: int


@dataclass(frozen=True, slots=True)
class View:
    """What to show: every round (`verbose`), or those of one `request`; `until`: the last round to run."""

    until: int | None = None
    request: int | None = None
    verbose: bool = False


def run_replay(folder: Path, view: View, target: str | None = None) -> int:
    """Run a session again; 0 when it is the same, 1 when it differs. `target`: where the target is now."""
    session = find_session(folder)
    header = read_header(session)
    settings, notes = replay_settings(header, target)
    path = find_model(settings, settings.target, "target")
    if fingerprint(path) != header.weights:
        raise RecordingError(f"{path} is not the recorded {header.model}: name its folder with --target")
    print(f"{session}: {header.model}, mode {header.settings['mode']}, {header.started}")
    notes += _enter_cores(settings.target_device or "cpu")
    tape = TapeReader(session / TAPE)
    printer = Printer(view)
    replay = Replay(tape, header.measured, printer.show)
    log = get_logger("replay", "error")
    verifier = assemble_verifier(settings, lambda _: None, log=log, environment=replay.environment)
    for note in (*notes, *_model_notes(header, verifier)):
        print(f"note: {note}")
    result = replay.run(verifier.engine, view.until)
    if view.request is not None:
        text = Tokenizer(path).decode(printer.tokens)
        print(f"text of request {view.request}: {text!r}")
    print(_verdict(result, tape))
    return DIFFERENT if result.difference else 0


class Printer:
    """Prints rounds, and keeps the tokens of the request that is looked at."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.tokens: list[int] = []

    def show(self, number: int, told: RoundTrace) -> None:
        """Print a round if it is wanted."""
        parts = told.parts
        if self._view.request is not None:
            parts = tuple(part for part in parts if part.request == self._view.request)
            self.tokens.extend(token for part in parts for token in part.tokens)
        elif not self._view.verbose:
            return
        if parts:
            why = f" ({told.decision.why.value})" if told.decision is not None else ""
            print(f"round {number}: {'; '.join(_line(part) for part in parts)}{why}")


def _line(part: ChunkTrace) -> str:
    tokens = " ".join(map(str, part.tokens)) or "none"
    return (
        f"request {part.request} at {part.position}: rows {part.rows}+{len(part.nodes)}, "
        f"accepted {part.accepted}, tokens {tokens}"
    )


def _verdict(result: Replayed, tape: TapeReader) -> str:
    done = f"{result.rounds} rounds, {result.tokens} tokens, {result.requests} requests"
    if result.difference:
        return f"different after {done}: {result.difference}"
    end = ""
    if tape.cut:
        end = "; the recording is cut off within its last page"
    elif tape.full:
        end = "; the recording had reached its limit (SSD_RECORD_MB)"
    return f"the same: {done}{end}"


def find_session(folder: Path) -> Path:
    """The folder of one session: this one, or the newest below it."""
    if (folder / TAPE).is_file():
        return folder
    sessions = sorted(path.parent for path in folder.glob(f"*/{TAPE}"))
    if not sessions:
        raise RecordingError(f"{folder} holds no recorded session: name a folder that SSD_RECORD was set to")
    return sessions[-1]


def read_header(session: Path) -> Header:
    """What the session was; `RecordingError` where this version cannot replay it."""
    path = session / HEADER
    try:
        raw = path.read_bytes()
        recorded = msgspec.json.decode(raw, type=_Format).format
        if recorded != FORMAT:
            raise RecordingError(
                f"{session} was recorded in format {recorded}, this version reads format {FORMAT}: "
                "replay it with the version that recorded it"
            )
        return msgspec.json.decode(raw, type=Header)
    except FileNotFoundError as error:
        raise RecordingError(
            f"{session} has no {HEADER}: the verifier ended before it was ready, there is nothing to replay"
        ) from error
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise RecordingError(f"{path} is damaged: {error}") from error


def replay_settings(header: Header, target: str | None) -> tuple[Settings, list[str]]:
    """The recorded settings, as one process needs them, and what people should know of the changes."""
    notes: list[str] = []
    changes: dict[str, Any] = {"record": None, "model_wrapper": None, "run_dir": None, "tensor_parallel": 1}
    if target is not None:
        changes["target"] = target
    if header.ranks > 1:
        notes.append(f"{header.ranks} ranks are one here: sums may differ in their last bits")
    if header.attention:
        changes["tree_decode_backend"] = header.attention
    known = {name: value for name, value in header.settings.items() if name in Settings.model_fields}
    unknown = sorted(set(header.settings) - set(known))
    if unknown:
        notes.append(f"settings that this version does not have: {', '.join(unknown)}")
    notes += [
        f"recorded with {name} {there}, this is {here}"
        for name, here in versions().items()
        if (there := header.versions.get(name)) != here
    ]
    try:
        return Settings.model_validate({**known, **changes}), notes
    except ValueError as error:
        raise SettingsError(f"the recorded settings are none of this version: {error}") from error


def _enter_cores(name: str) -> list[str]:
    """Compute on the recorded cores; where they are not here, at least with as many threads."""
    device = parse_device(name)
    if device.kind != "cpu" or set(device.indices) <= set(this_machine().cores):
        pin(device)
        return []
    import torch

    torch.set_num_threads(len(device.indices))
    return [f"the cores of {device} are not here: sums may differ in their last bits"]


def _model_notes(header: Header, verifier: AssembledVerifier) -> list[str]:
    """How the same weights are computed otherwise than then."""
    facts = verifier.facts
    if verifier.hello.tokenizer != header.tokenizer:
        raise RecordingError(f"the tokenizer of {facts.name} is not the recorded one")
    pairs = (("kernels", header.kernels, facts.kernels), ("attention", header.attention, facts.attention))
    return [f"{what} were {then}, here they are {now}" for what, then, now in pairs if then != now]
