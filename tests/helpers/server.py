"""A server in processes of its own, for as long as a test needs it."""

import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress

import requests


def free_port():
    """A free port below those that the system hands out: the server also takes ports at fixed distances from its own
    (attention data parallelism, port + 235), and one of its own connections may have been given that very port."""
    for port in range(10_000 + os.getpid() % 10_000, 32_000, 500):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no port between 10,000 and 32,000 is free")


@contextmanager
def running(command, environment, log, url):
    """A server by its command, up when ``url`` answers at ``/health``; gives the URL. It writes to the file ``log``."""
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
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
