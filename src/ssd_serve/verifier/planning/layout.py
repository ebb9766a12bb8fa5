"""The ways in which a verifier may draft, and moving its threads between them.

On CPUs the cores are the devices: while no drafter works beside the target, the target may have them all.
Knows threads and cores; no requests and no models.
"""

import os
from contextlib import suppress
from enum import Enum

import torch

from ssd_serve.base.devices import Device


class Layout(Enum):
    """Who drafts: a drafter on its own device, one inline on the target's, or nobody."""

    ASYNC = "async"
    SYNC = "sync"
    OFF = "off"


class Cores:
    """The target's cores: `beside` a drafter, and `alone`. Other devices than CPUs stay as they are."""

    def __init__(self, beside: Device, alone: Device | None) -> None:
        self._beside = beside
        self._alone = alone or beside
        self.may_be_alone = alone is not None
        """Whether the target may also compute without a drafter beside it, who drafts inline then."""

    @property
    def differ(self) -> bool:
        """Whether the target has other cores alone than beside a drafter."""
        return self._beside != self._alone

    def of(self, layout: Layout) -> Device:
        """The cores of a layout."""
        return self._beside if layout is Layout.ASYNC else self._alone

    def enter(self, layout: Layout, wide: bool = True) -> None:
        """Compute on the cores of this layout from now on, with as many threads; without `wide` with no more
        than beside a drafter, wherever a core is free."""
        device = self.of(layout)
        if device.kind != "cpu" or not device.indices or not self.differ:
            return
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError):  # cores may be taken from this process while it runs
                os.sched_setaffinity(0, device.indices)
        few = len(self._beside.indices) or len(device.indices)
        torch.set_num_threads(len(device.indices) if wide else min(few, len(device.indices)))
