"""Stop strings the obvious way, for tests to compare with.

`reference` reads the whole text at once, a character at a time: the first stop string that is complete ends
it. `SlowScanner` tries every beginning of every stop string at each piece of text.
"""


def reference(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


class SlowScanner:
    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        self._stops = stops
        self._include = include_stop
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        buffer = self._held + text
        _, stop = found = reference(buffer, self._stops, self._include)
        if stop is not None:
            return found
        keep = max(
            (
                length
                for stop in self._stops
                for length in range(min(len(stop) - 1, len(buffer)) + 1)
                if buffer.endswith(stop[:length])
            ),
            default=0,
        )
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def release(self) -> str:
        held, self._held = self._held, ""
        return held
