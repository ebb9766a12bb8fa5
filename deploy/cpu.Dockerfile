# ssd-serve on CPUs. In the repository's root: docker build -f deploy/cpu.Dockerfile -t ssd-serve:cpu .
# The project has not built this image; tests/deploy checks what can be checked without a container engine.

FROM python:3.12-slim-bookworm AS python

FROM python AS packages
ENV PATH=/opt/ssd/bin:$PATH
WORKDIR /build
# An empty package with our dependencies: a change of the sources does not install them again.
COPY constraints.txt pyproject.toml ./
RUN python -m venv /opt/ssd \
    && mkdir -p src/ssd_serve && touch README.md LICENSE src/ssd_serve/__init__.py \
    && pip install --no-cache-dir -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu '.[ray,structured,otel]' \
    && python -c 'import sys, torch; sys.exit(torch.version.cuda and "this torch is for CUDA, not for CPUs")'

FROM python AS wheel
WORKDIR /build
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python
# The compiler makes kernels for the processor at hand at the first start, into the volume.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home ssd && install -d -o ssd -g ssd /cache
COPY --from=packages /opt/ssd /opt/ssd
COPY deploy/healthcheck.py /opt/healthcheck.py
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    /opt/ssd/bin/pip install --no-cache-dir --no-index --no-deps --force-reinstall /wheel/*.whl
ENV PATH=/opt/ssd/bin:$PATH \
    SSD_HOST=0.0.0.0 \
    SSD_CACHE_DIR=/cache/ssd-serve \
    HF_HOME=/cache/huggingface
VOLUME /cache
EXPOSE 8000
USER 10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60m CMD ["python3", "/opt/healthcheck.py"]
ENTRYPOINT ["python3", "-m", "ssd_serve"]
CMD ["serve"]
