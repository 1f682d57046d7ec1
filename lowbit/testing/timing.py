"""How long calls take on a GPU, the way decoding runs them: one CUDA graph over cold weights, median of its replays.

Knows graphs and events; it must not know what the calls compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

REPLAYS = 30
GRAPH_US = 2000.0  # of calls in a graph at the least, so that its start does not count
MOST_ROUNDS = 50
COLD = 20  # times the L2: what is read again has long been evicted
H200_L2_BYTES = 60 * 2**20
MOST_COPIES = 256


def num_copies(weight_bytes: int, l2_bytes: int = H200_L2_BYTES) -> int:
    """How many copies of a layer, called in turn, keep its weights cold."""
    return max(2, min(MOST_COPIES, -(-COLD * l2_bytes // weight_bytes)))


def graph_us(calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> float:
    """Median microseconds of one of `calls`, which run in order, over and over, within one graph on the current device.

    Each is called twice before, on the stream that is captured: compiled, and known not to follow a change of weights. Results are
    dropped at once, so that calls write where earlier ones wrote, as the layers of a model do.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (*calls, *calls):
            call()
        stream.synchronize()
        once = median(_replay_us(_capture(calls, 1, stream), stream, 3))
        rounds = max(1, min(MOST_ROUNDS, round(GRAPH_US / once)))
        return median(_replay_us(_capture(calls, rounds, stream), stream, replays)) / (rounds * len(calls))


def _capture(calls: Sequence[Callable[[], object]], rounds: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()  # the first one uploads it
    stream.synchronize()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, replays: int) -> list[float]:
    times: list[float] = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(stream)
        graph.replay()
        end.record(stream)
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times
