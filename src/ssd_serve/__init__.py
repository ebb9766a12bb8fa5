"""ssd-serve: an inference server that speculates while it verifies."""

__version__ = "0.1.0"
