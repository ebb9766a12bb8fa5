"""Deprecated import path of `ssd_serve.app.replicas`, which Ray Serve configurations of version 0.1 name."""

import logging
import warnings

from ssd_serve.app.replicas import app

__all__ = ["app"]

_RENAMED = "ssd_serve.replicas:app is now ssd_serve.app.replicas:app; change import_path of the Serve config"
warnings.warn(_RENAMED, DeprecationWarning, stacklevel=2)
logging.getLogger("ray.serve").warning(_RENAMED)
