"""Where the kernels come from: the cache, a compiler without one, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import millrace
from millrace.spark.compiled import load_kernels

PACKAGE = Path(millrace.__file__).parent

ROUND_TRIP = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
import numpy as np, pyarrow as pa
from millrace.records.compression import Codec
from millrace.spark import batches, columns
from millrace.spark.compiled import load_kernels
value = pa.array([b"a", None, b"c" * 100])
for _ in range(2):
    made = list(batches.encode(value, value, None, np.arange(3), np.arange(3), codec=Codec.ZSTD, max_batch_bytes=999))
    chunks, after = columns.decode(made[0].data, start_offset=0, end_offset=9, include_headers=True)
    assert chunks[0].value.equals(value) and chunks[0].key.equals(value) and after == 3
    assert batches.partition_for_keys(value, 7).tolist()[1] == -1
print("kernels:", load_kernels() is not None)
print("from:", columns.__file__)
"""


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_numba_python_does_it_and_says_so_once() -> None:
    output = run("import sys; sys.modules['numba'] = None\n" + ROUND_TRIP)
    assert output.count("WARNING numba is not usable") == 1
    assert "kernels: False" in output


def test_with_numba_switched_off_python_does_it() -> None:
    output = run(ROUND_TRIP, NUMBA_DISABLE_JIT="1")
    assert output.count("WARNING NUMBA_DISABLE_JIT is set") == 1
    assert "kernels: False" in output


def test_from_a_zip_with_no_place_for_a_cache_it_is_compiled(tmp_path: Path) -> None:
    # As Spark ships code to an executor that can write neither next to the code nor at home.
    archive = tmp_path / "millrace.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in PACKAGE.rglob("*.py"):
            zipped.write(path, f"millrace/{path.relative_to(PACKAGE)}")
    nowhere = tmp_path / "a file"
    nowhere.touch()
    places = {name: str(nowhere / "cache") for name in ("HOME", "XDG_CACHE_HOME")}
    output = run(ROUND_TRIP, PYTHONPATH=str(archive), NUMBA_CACHE_DIR="", **places)
    assert f"from: {archive}" in output
    assert "INFO compiled without a cache" in output
    assert "kernels: True" in output


def test_a_cached_kernel_is_not_compiled_again() -> None:
    kernels = load_kernels()
    assert kernels is not None
    program = """
from millrace.spark import kernels
for name in ("walk_batches", "measure_batches", "decode_records", "copy_headers", "encode_records"):
    kernel = getattr(kernels, name)
    assert sum(kernel.stats.cache_hits.values()) == 1 and not kernel.stats.cache_misses, kernel.stats
    assert len(kernel.signatures) == 1 and not kernel._can_compile
"""
    run(program)
