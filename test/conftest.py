"""What all tests share: `--hypothesis-profile=long` fuzzes for minutes where the default takes seconds."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("long", max_examples=20_000, deadline=None)
