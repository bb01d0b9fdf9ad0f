"""Whether processors are short, from what the kernel counts."""

from __future__ import annotations

import sys
import time

import pytest

from millrace.replication.contention import Contention, Use, use_of_this_thread

SECOND = 10**9


class Kernel:
    """Counts as it is told."""

    def __init__(self) -> None:
        self.use: Use | None = Use(0, 0)
        self.asked = 0

    def read(self) -> Use | None:
        self.asked += 1
        return self.use

    def passes(self, ran_s: float, waited_s: float) -> None:
        assert self.use is not None
        self.use = Use(self.use.ran + int(ran_s * SECOND), self.use.waited + int(waited_s * SECOND))


@pytest.mark.parametrize(
    ("ran_s", "waited_s", "high"),
    [(0.2, 0.3, True), (0.3, 0.1, False), (0.02, 0.1, False), (0.0, 0.0, False), (0.0, 1.0, True)],
)
def test_it_is_high_when_a_busy_thread_waits_as_long_as_it_runs(ran_s: float, waited_s: float, high: bool) -> None:
    kernel = Kernel()
    contention = Contention(kernel.read)
    assert not contention.is_high(10.0), "one sample shows nothing"
    kernel.passes(ran_s, waited_s)
    assert contention.is_high(11.0) is high
    kernel.passes(0.5, 0.0)
    assert not contention.is_high(12.0)


def test_the_kernel_is_asked_once_a_second() -> None:
    kernel = Kernel()
    contention = Contention(kernel.read)
    for step in range(100):
        contention.is_high(step / 20)
    assert kernel.asked == 5


def test_a_kernel_that_does_not_tell() -> None:
    kernel = Kernel()
    kernel.use = None
    contention = Contention(kernel.read)
    assert not any(contention.is_high(float(second)) for second in range(5))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts this, others do not")
def test_this_thread() -> None:
    before = use_of_this_thread()
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    after = use_of_this_thread()
    assert before is not None
    assert after is not None
    assert after.ran - before.ran > 0.04 * SECOND
