"""Who seals when: turns, order, and that nothing is left undone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvtier_engine.io_threads import IoThreads, Turn

TASKS = 200


class _Crowd:
    """Counts who is inside at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self.most = 0
        self.visits = 0

    def visit(self) -> None:
        with self._lock:
            self._inside += 1
            self.visits += 1
            self.most = max(self.most, self._inside)
        threading.Event().wait(0.0005)
        with self._lock:
            self._inside -= 1


def _store(crowd: _Crowd) -> Callable[[Turn], None]:
    def task(turn: Turn) -> None:
        crowd.visit()
        turn.end()
        threading.Event().wait(0.001)  # the write: not in its turn

    return task


def _load(crowd: _Crowd) -> Callable[[Turn], None]:
    def task(turn: Turn) -> None:
        threading.Event().wait(0.001)
        turn.begin()
        crowd.visit()

    return task


@pytest.mark.parametrize("turns", [1, 2])
def test_no_more_threads_than_turns_seal_or_open_at_a_time_and_every_task_is_done(turns: int) -> None:
    crowd, threads = _Crowd(), IoThreads(6, "test", turns=turns)

    def caller() -> None:
        for _ in range(TASKS // 10):
            threads.run_here([_store(crowd), _load(crowd)], load=False)

    callers = [threading.Thread(target=caller) for _ in range(3)]
    for one in callers:
        one.start()
    for _ in range(TASKS // 10):
        threads.submit([_store(crowd)] * 5, load=False)
        threads.submit([_load(crowd)] * 5, load=True)
    for one in callers:
        one.join(60)
        assert not one.is_alive()
    threads.stop()
    assert crowd.visits == TASKS + 3 * 2 * (TASKS // 10)
    assert 1 <= crowd.most <= turns


def test_a_thread_that_writes_holds_up_nobodys_sealing() -> None:
    threads, go_on = IoThreads(2, "test", turns=1), threading.Event()
    second = threading.Event()

    def first(turn: Turn) -> None:
        turn.end()
        assert go_on.wait(60)

    threads.submit([first, lambda turn: second.set()], load=False)
    assert second.wait(60)
    go_on.set()
    threads.stop()


def test_a_turn_that_a_task_forgot_is_given_back() -> None:
    threads, done = IoThreads(1, "test", turns=1), threading.Semaphore(0)
    threads.submit([lambda turn: done.release()] * 3, load=False)
    for _ in range(3):
        assert done.acquire(timeout=60)
    with pytest.raises(ZeroDivisionError):
        threads.run_here([lambda turn: 1 // 0], load=False)  # type: ignore[list-item, return-value]
    threads.run_here([lambda turn: done.release()], load=False)
    assert done.acquire(timeout=60)
    threads.stop()


def test_what_is_queued_when_the_threads_are_stopped_is_done_first() -> None:
    crowd, threads = _Crowd(), IoThreads(3, "test", turns=1)
    threads.submit([_store(crowd)] * 50, load=False)
    threads.submit([_load(crowd)] * 50, load=True)
    threads.stop()
    assert crowd.visits == 100
    assert not any(thread.is_alive() for thread in threads._threads)


def test_a_stream_of_loads_does_not_hold_up_a_store_for_ever() -> None:
    threads, stored = IoThreads(1, "test", turns=1), threading.Event()

    def load(turn: Turn) -> None:
        turn.begin()
        if not stored.is_set():
            threads.submit([load], load=True)

    threads.submit([load] * 3, load=True)
    threads.submit([lambda turn: stored.set()], load=False)
    assert stored.wait(60)
    threads.stop()
