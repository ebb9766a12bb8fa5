"""Placement, launchers and supervision of an engine's processes."""
