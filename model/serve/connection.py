"""One HTTP connection of the server, which ends when its client sends or reads too slowly."""

from uvicorn.protocols.http.auto import AutoHTTPProtocol

LOOK_SECONDS = 10  # a client that asks for nothing is sent away after once to twice this time


class WatchedConnection(AutoHTTPProtocol):
    """uvicorn's connection, without the right to stand open for ever: connections are limited, and others need them.

    It ends when for `LOOK_SECONDS` no request is complete but for its body, or when one takes `answer_seconds`,
    because its client does not read the answer.
    """

    def __init__(self, *args, answer_seconds, **values):
        super().__init__(*args, **values)
        self.answer_looks = 1 + answer_seconds // LOOK_SECONDS

    def connection_made(self, transport):
        super().connection_made(transport)
        self._look(None, 0)

    def _look(self, seen, looks):
        """`looks` is how often the request and whether it is answered were as `seen`."""
        if self not in self.connections:  # it has ended
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        state = self.cycle, is_idle
        looks = looks + 1 if state == seen else 0
        if looks >= (1 if is_idle else self.answer_looks):
            self.transport.abort()  # close would wait for a client that does not read
        else:
            self.loop.call_later(LOOK_SECONDS, self._look, state, looks)
