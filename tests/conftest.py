"""Settings for every test: how much hypothesis tries, and that the same change gives the same result in CI."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# No deadline: a busy two-core machine is not a failing property. In CI the examples are the same on every run; a
# developer's runs explore new ones.
settings.register_profile("millrace", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("millrace")

# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that; commands under test
# are sent Ctrl-C and must hear it, however the tests were started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
