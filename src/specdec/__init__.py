"""Speculative decoding that changes nothing but the speed, and that you can check."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("specdec")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
