"Clocks: of calls on a GPU with and without their launches, of copies, of steps."
import time
from typing import Callable


def time_eager(call: Callable, device: str, repeats: int) -> float:
    "Seconds of a call as a program makes it, launches included; the best of three."
    import torch
    call()
    best = float("inf")
    for _ in range(3 if repeats > 1 else 1):
        if device == "cuda": torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats): call()
        if device == "cuda": torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def time_graph(call: Callable, repeats: int) -> float:
    "Seconds of a call's kernels alone: recorded once, replayed."
    import torch
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2): call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph): call()
    best = float("inf")
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(repeats): graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1000 / repeats)
    return best


def time_calls(call: Callable, device: str, repeats: int = 10) -> tuple[float, float]:
    "(kernels alone, with their launches), in seconds; the same number on a CPU."
    eager = time_eager(call, device, repeats)
    return (time_graph(call, repeats) if device == "cuda" else eager), eager


def copy_bandwidth(device: str) -> float:
    "Bytes per second that a large copy reads and writes, both counted."
    import torch
    size = 4 << 30 if device == "cuda" else 64 << 20
    if device == "cuda": size = min(size, torch.cuda.mem_get_info()[0] // 4)
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    seconds = time_eager(lambda: target.copy_(source), device, 3)
    return 2 * size / seconds
