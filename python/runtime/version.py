"""The version of the package. In its own module, because importing it from `runtime` also names the package that exports `Engine`."""

from __future__ import annotations

__version__ = "0.1.0"
