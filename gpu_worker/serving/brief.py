"""Computing beside the model's thread without slowing it down for good.

Torch computes with OpenMP. Each thread that ever did keeps a team of threads for as long as it
lives, and once all teams together are more threads than there are processors, GNU's library puts
them to sleep between products instead of letting them wait (``gomp_throttled_spin_count_var``). A
decode step is hundreds of products of a tenth of a millisecond each: docs/benchmarks.md says how
much longer it takes then. So only the model's thread keeps a team.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def compute_briefly(work: Callable[[], _T]) -> _T:
    """Do something on a thread that ends with it, and its team too; what comes of it.

    Raises:
        BaseException: what ``work`` raised. RuntimeError: no thread can be started.
    """
    done: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - belongs to the thread that asked
            failed.append(error)

    # A daemon: what hangs here does not keep a process that ends.
    thread = threading.Thread(target=run, name=threading.current_thread().name, daemon=True)
    thread.start()
    thread.join()
    if failed:
        # Taken out: an error that its own frames hold would keep all that they hold.
        raise failed.pop()
    return done.pop()
