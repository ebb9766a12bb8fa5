# ssd-serve on AMD GPUs (MI300X, MI325X, MI350X, MI355X), with what setup_rocm.sh installs.
# In the repository's root: docker build -f deploy/rocm.Dockerfile -t ssd-serve:rocm .
# The project has neither built this image nor run on such a GPU; `ssd doctor` in a container tells what works.

# The image that constraints-rocm.txt is written for.
FROM rocm/pytorch:rocm7.2.2_ubuntu24.04_py3.12_pytorch_release_2.9.1

RUN useradd --uid 10001 --create-home ssd && install -d -o ssd -g ssd /cache
WORKDIR /opt/ssd-serve
# An empty package first: a change of the sources does not install FlashInfer and the rest again.
COPY constraints.txt constraints-rocm.txt pyproject.toml setup_rocm.sh ./
COPY deploy/rocm_packages.py deploy/
RUN mkdir -p src/ssd_serve && touch README.md LICENSE src/ssd_serve/__init__.py \
    && PIP_NO_CACHE_DIR=1 ./setup_rocm.sh --image \
    && python3 -m pip install --no-cache-dir -c constraints.txt 'ray[serve]>=2.60' 'llguidance>=1.9' \
        'opentelemetry-sdk>=1.30' 'opentelemetry-exporter-otlp-proto-http>=1.30' \
    # With it Ray sees GPUs and their kinds by itself; ROCm has it, but not in every Python.
    && (python3 -c 'import amdsmi' || python3 -m pip install --no-cache-dir /opt/rocm/share/amd_smi) \
    && python3 -c 'import sys, torch; sys.exit(None if torch.version.hip else "this torch is not for ROCm")'
COPY . .
COPY deploy/healthcheck.py /opt/healthcheck.py
# HSA, HIP and NCCL: what AMD advises for inference on MI300X.
# Kernels are found by name, not by what compiled them: another torch or FlashInfer needs another folder.
ENV SSD_HOST=0.0.0.0 \
    HSA_NO_SCRATCH_RECLAIM=1 \
    HIP_FORCE_DEV_KERNARG=1 \
    NCCL_MIN_NCHANNELS=112 \
    SSD_CACHE_DIR=/cache/ssd-serve \
    HF_HOME=/cache/huggingface \
    FLASHINFER_WORKSPACE_BASE=/cache/rocm/torch-2.9.1_flashinfer-0.5.3+amd.2 \
    TRITON_CACHE_DIR=/cache/rocm/torch-2.9.1_flashinfer-0.5.3+amd.2/triton
VOLUME /cache
EXPOSE 8000
USER 10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60m CMD ["python3", "/opt/healthcheck.py"]
ENTRYPOINT ["python3", "-m", "ssd_serve"]
CMD ["serve"]
