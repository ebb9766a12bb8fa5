"""From "FlashInfer, please" to a package that is chosen, checked, imported and compiles into its own folder.

The port has not run yet. Knows neither what the kernels compute nor who wants them.
"""

from pathlib import Path

import torch

from ssd_serve.base.errors import UserError
from ssd_serve.base.logs import Logger
from ssd_serve.kernels.flashinfer.adapter import Package, import_package
from ssd_serve.kernels.flashinfer.compiled import Build, architecture, package_folder, use_folder
from ssd_serve.kernels.flashinfer.versions import choose, installed_versions


def load_package(device: torch.device, base: Path, log: Logger | None = None) -> Package:
    """The FlashInfer that is installed, for this GPU; compiled kernels are kept under `base`.

    To be called before anything imports `flashinfer`, once a process. The first attention of a kind then
    compiles for some minutes. Raises UserError where FlashInfer cannot be used here; the sentence says what
    to install or do.
    """
    if device.type != "cuda":
        raise UserError(f"FlashInfer attention needs a GPU, not {device.type}: use another attention backend")
    name, version = choose(installed_versions(), rocm=torch.version.hip is not None)
    build = Build(name, version, str(torch.__version__), architecture(device))
    # The port asks for the architecture of the current device while it is imported.
    with torch.cuda.device(device):
        cleared = use_folder(base, build, package_folder())
        if cleared and log is not None:
            log.info("stale compiled kernels removed", package=name, kernels=len(cleared))
        return import_package(name, version)
