"""The text of one choice as it grows: whole characters only, cut before a stop string, none of which ever shows."""

from model.text.detokenizer import StreamDecoder


class TextStream:
    """Turns output tokens into text that is safe to show.

    Text that might be the beginning of a stop string is held back until the next tokens decide.
    """

    def __init__(self, decoder: StreamDecoder, stop: tuple[str, ...] = ()) -> None:
        self._decoder = decoder
        self._stop = stop
        self._ready = ""
        """Safe to show, not taken yet."""
        self._held = ""
        """Decoded text that a stop string may still claim."""

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Add one token. Returns the stop string that it completes, if any; the text then ends before it.

        Text pushed with `may_stop` false belongs to no stop string.
        """
        self._held += self._decoder.push((token_id,))
        if not self._stop or not may_stop:
            self._ready, self._held = self._ready + self._held, ""
            return None
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda match: match[0])
            self._ready, self._held = self._ready + self._held[:at], ""
            return stop
        num_held = self._num_undecided()
        cut = len(self._held) - num_held
        self._ready, self._held = self._ready + self._held[:cut], self._held[cut:]
        return None

    def take(self) -> str:
        """What became safe to show since the last call."""
        text, self._ready = self._ready, ""
        return text

    def finish(self) -> str:
        """The rest, for a choice that no stop string ended; an incomplete character shows as U+FFFD."""
        text = self._ready + self._held + self._decoder.flush()
        self._ready = self._held = ""
        return text

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text that some stop string begins with."""
        longest = min(len(self._held), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
