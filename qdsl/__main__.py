"""`qdsl` and `python -m qdsl`: the command line, which ends within a second of Ctrl-C, also while libraries are imported."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType

from qdsl.host import system, unfinished

SHOW_CURSOR = b"\x1b[?25h"
GRACE = 0.7                                                      # seconds for a command to tidy up after a signal


def main() -> None:
    """Run the command line.  After Ctrl-C it prints one line and exits with code 130."""
    received: list[int] = []
    succeeded: list[bool] = []
    atexit.register(_leave, succeeded)
    is_reported = threading.Event()

    def interrupt(number: int, _: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:    # as in the background of a shell script
        signal.signal(signal.SIGINT, interrupt)
    try:
        _exit_after_signals(is_reported)
        from qdsl.cli import main as command_line

        command_line()
        succeeded.append(True)
    except BaseException:                                        # imports make other errors of an interrupt
        if not received:
            raise
        is_reported.set()
        print(f"\n{unfinished.interrupt_text()}", file=sys.stderr)
        sys.exit(128 + received[0])


def _leave(succeeded: list[bool]) -> None:
    """Ends a process that succeeded after all other handlers of its exit, without the half second that libraries take."""
    if succeeded:
        os._exit(0)


def _exit_after_signals(is_reported: threading.Event) -> None:
    """Exit soon after SIGINT or SIGTERM even where the main thread is in a long call, which handlers of signals wait for."""
    reader, writer = os.pipe()
    system.stop_blocking(writer)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        system.block_interrupts()                                # the main thread alone decides when it is interrupted
        number = 0
        while number not in (signal.SIGINT, signal.SIGTERM):
            number = os.read(reader, 1)[0]
        time.sleep(GRACE)
        with suppress(OSError):
            if os.isatty(2):
                os.write(2, SHOW_CURSOR)                         # which a bar of progress hides
            if number == signal.SIGINT and not is_reported.is_set():
                os.write(2, f"\n{unfinished.interrupt_text()}\n".encode(errors="replace"))
        os._exit(128 + number)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
