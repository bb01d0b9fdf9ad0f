"""Finds the compiled kernels, or says once that they are not to be had and the slow path is taken.

What is not here: the kernels (`kernels`), and the Python twins of them (`columns`, `batches`).
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

logger = logging.getLogger(__name__)


@functools.cache
def load_kernels() -> ModuleType | None:
    """The module `kernels`, ready to be called; None where numba cannot be imported or is switched off.

    The first load on a machine compiles for some seconds, every later one takes what numba has cached.
    """
    try:
        import numba

        if getattr(numba.config, "DISABLE_JIT", 0):
            logger.warning("NUMBA_DISABLE_JIT is set: records are read and written by plain Python, many times slower")
            return None
        from millrace.spark import kernels
    except ImportError as error:
        logger.warning(
            "numba is not usable (%s): records are read and written by plain Python, many times slower", error
        )
        return None
    return kernels
