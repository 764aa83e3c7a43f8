"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# No example is refused for its time. What CI has of its own (examples that are the same each time) stays.
settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")
