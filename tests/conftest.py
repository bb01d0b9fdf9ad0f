"""Settings for every test: how much hypothesis tries, and that the same change gives the same result in CI."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline: a busy two-core machine is not a failing property. In CI the examples are the same on every run; a
# developer's runs explore new ones.
settings.register_profile("millrace", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("millrace")
