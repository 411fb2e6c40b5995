"""A piece of work in a process made by fork()."""
import os
import pickle
import signal
import time

TIMEOUT_S = 60


def in_child(work):
    """The result of `work()` in the child. A hanging child is killed, which is a failure."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(work(), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    deadline = time.monotonic() + TIMEOUT_S
    os.set_blocking(reader, False)
    told, ended = b"", None
    while ended is None:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            ended = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"the child hung for {TIMEOUT_S} s")
        try:
            while part := os.read(reader, 1 << 20):
                told += part
        except BlockingIOError:
            time.sleep(0.005)
    os.close(reader)
    assert ended == 0, f"the child ended with {ended}"
    return pickle.loads(told)
