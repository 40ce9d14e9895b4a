"""The process that matches regular expressions: started by ``matching``, killed when it runs on.

It is run as a file by ``python -I -S``, so it knows the standard library and nothing else.
Arguments: seconds of processor time, bytes of address space, bytes of answer. On stdin one JSON
object with ``expressions`` and ``names``; on stdout a line for each expression, as soon as it is
known: the indices of the names that it matches, or a text that says why there are none.
"""

import json
import re
import resource
import sys

_FAULT_CHARS = 200


def main() -> int:
    """Answer the one request on stdin."""
    cpu_seconds, address_bytes, answer_bytes = map(int, sys.argv[1:])
    for limit, value in (
        (resource.RLIMIT_AS, address_bytes),
        (resource.RLIMIT_FSIZE, answer_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(limit, (value, value))
    request = json.loads(sys.stdin.buffer.read())
    _processor_bound(cpu_seconds)
    for expression in request["expressions"]:
        answer = _answer(expression, request["names"])
        sys.stdout.write(json.dumps(answer) + "\n")
        # The number of lines tells which expression was at work when the process was killed.
        sys.stdout.flush()
        if isinstance(answer, str):
            break
    return 0


def _processor_bound(seconds: int) -> None:
    # Starting and reading the names are not the expressions' doing, so they don't count.
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 1))


def _answer(expression: str, names: list[str]) -> list[int] | str:
    try:
        compiled = re.compile(expression)
        return [index for index, name in enumerate(names) if compiled.fullmatch(name)]
    except (re.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return reason[:_FAULT_CHARS]


if __name__ == "__main__":
    raise SystemExit(main())
