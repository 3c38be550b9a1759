"""Ctrl-C that waits for a safe point."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C or SIGTERM came; a second one interrupts at once.

    Long work asks it where stopping loses nothing, saves, and raises KeyboardInterrupt itself.
    """
    came = False

    def handler(signum, frame):
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: came
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
