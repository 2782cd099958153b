"""Speed and memory of caches on your own model, side by side in one process. For any transformers `Cache`."""

from hf_kvcache.bench.report import write_report
from hf_kvcache.bench.results import BenchResults, CacheSpeed, Held, Measurement, Quartiles, Timing
from hf_kvcache.bench.run import Sizes, benchmark

__all__ = [
    "BenchResults",
    "CacheSpeed",
    "Held",
    "Measurement",
    "Quartiles",
    "Sizes",
    "Timing",
    "benchmark",
    "write_report",
]
