from __future__ import annotations


class EventHandle:
    def current_stream_wait(self) -> None: ...


class EventOverlap:
    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None: ...
