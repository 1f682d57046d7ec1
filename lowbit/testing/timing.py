"""How long calls take on a GPU, the way decoding runs them: one CUDA graph over cold weights, median of its replays.

Knows graphs and events; it must not know what the calls compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

REPLAYS = 30
COLD_BYTES = 20 * 60 * 2**20  # twenty times an H200's L2: what is read again has long been evicted
MOST_COPIES = 256


def num_copies(weight_bytes: int) -> int:
    """How many copies of a layer, called in turn, keep its weights cold."""
    return max(2, min(MOST_COPIES, -(-COLD_BYTES // weight_bytes)))


def graph_us(calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> float:
    """Median microseconds of one of `calls`, which run in order within one graph on the current device.

    Each is called twice before, on the stream that is captured: compiled, and known not to follow a change of weights.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in (*calls, *calls):
            call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            results = [call() for call in calls]
        times: list[float] = []
        for _ in range(replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    del results
    return median(times)
