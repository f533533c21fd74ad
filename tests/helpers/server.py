"""A server in separate processes for the duration of a test."""

import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress

import requests


def free_port():
    """A free port below the ephemeral ones. A server also binds ports at fixed distances from its own (port + 235 for
    attention data parallelism), which must not be ports of its own connections."""
    for port in range(10_000 + os.getpid() % 10_000, 32_000, 500):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no port between 10,000 and 32,000 is free")


@contextmanager
def running(command, environment, log, url):
    """Start a server that writes to the file ``log``, and yield its URL once ``/health`` answers."""
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()[-3000:]
            with suppress(requests.ConnectionError, requests.Timeout):
                if requests.get(f"{url}/health", timeout=10).ok:
                    break
            time.sleep(0.5)
        else:
            raise TimeoutError(f"the server is not up after 5 minutes: {log.read_text()[-3000:]}")
        yield url
    finally:
        with suppress(ProcessLookupError):  # the server has already ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
