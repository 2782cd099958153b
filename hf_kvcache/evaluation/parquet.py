"""Every scored position of every cache, as a table for further statistics."""

from pathlib import Path

import numpy as np

from hf_kvcache.evaluation.results import Results


def write_samples(results: Results, path: Path) -> Path:
    """Write one row for each scored position and cache; gives the path. See docs/evaluation.md for the columns."""
    import pyarrow as pa
    from pyarrow import parquet

    positions = results.positions
    if positions is None:
        raise ValueError("no text was scored")
    shared = {
        "window": np.repeat(np.arange(len(positions.lengths)), positions.lengths),
        "document": positions.documents,
        "distance": positions.distances,
        "target": positions.targets,
        "confidence": positions.confidence,
    }
    count = len(positions.targets)
    writer = None
    for role, cache in (
        ("reference", results.reference),
        ("noise floor", results.noise_floor),
        *(("candidate", of) for of in results.caches),
    ):
        names = {"role": pa.array([role] * count), "cache": pa.array([cache.spec] * count)}
        table = pa.table(names | shared | vars(cache.samples))
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()
    return path
