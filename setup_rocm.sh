#!/usr/bin/env bash
# Sets up ROCm machines. Not built yet.
echo "setup_rocm.sh: not yet: the ROCm set-up is not built. On CPU: make serve" >&2
exit 1
