"""Work runs without the GIL, one call at a time for each backend."""
import threading
import time

import numpy as np

import kv4
from forked import in_child
from small_cache import SmallCache


def test_other_threads_run_during_a_call():
    cache = SmallCache(row_format="bf16")
    manager = cache.manager
    step = manager.prepare_forward([kv4.StepItem(manager.admit(), range(64))])
    cache.append_all(range(64))
    handle, q = manager.acquire(2), np.ones((64, 128, 80), np.float32)
    stamps, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.0005):
            stamps.append(time.monotonic())

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        for _ in range(50):  # until one call takes long enough to be seen from outside
            start = time.monotonic()
            handle.attend(q)
            end = time.monotonic()
            quarter = (end - start) / 4
            if any(start + quarter < stamp < end - quarter for stamp in stamps):
                break
        else:
            raise AssertionError("no other thread ran while attend worked")
    finally:
        stop.set()
        ticker.join()
    manager.commit(step)


def test_threads_share_a_cache():
    cache = SmallCache()
    requests = [cache.manager.admit() for _ in range(4)]
    turn, failures = threading.Lock(), []

    def work(request, stream):
        try:
            for _ in range(20):
                with turn:  # a step belongs to one thread
                    cache.feed(request, 2, stream)
                assert cache.manager.length(request) % 2 == 0  # outside of a turn, calls are serialised
                cache.manager.export_image(request)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(r, i)) for i, r in enumerate(requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    alone = SmallCache()
    request = alone.manager.admit()
    alone.feed(request, 40, stream=2)
    assert alone.state(request) == cache.state(requests[2])


def test_a_child_goes_on_with_threads_of_its_own():
    """The parent's threads do not exist in a child: waiting for them would be for ever."""
    cache = SmallCache(kv4.make_cpu_backend(3))
    request = cache.manager.admit()
    cache.feed(request, 40)

    def go_on():
        cache.feed(request, 20)
        return cache.state(request)

    assert in_child(go_on) == go_on()  # the child's is a copy: the parent is where it was
