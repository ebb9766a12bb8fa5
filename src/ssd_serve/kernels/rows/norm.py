"""Root-mean-square norm over the last dimension: x * weight / sqrt(mean(x^2) + epsilon).

On CPUs torch's own is a chain of operators that costs a small drafter more than its arithmetic. Here it is
three: with n the Euclidean norm, sqrt(mean(x^2) + e) = hypot(n, sqrt(e * size)) / sqrt(size), and the last
factor is folded into the weight. Computed in float32 whatever the dtype, and rounded once.
"""

import torch


class RmsNorm:
    """One norm. `weight` is [..., size]; its leading dimensions broadcast against the rows'.

    `scaled` is the weight times sqrt(size), `floor` is sqrt(epsilon * size).
    """

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        size = weight.shape[-1]
        self._weight = weight
        self._epsilon = epsilon
        self._native = weight.device.type != "cpu"  # one fused kernel on GPUs
        self.scaled = (weight.float() * size**0.5).contiguous()
        self.floor = (epsilon * size) ** 0.5
        self._floor = torch.tensor(self.floor)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., size] -> [..., size], in the dtype of the rows."""
        if self._native:
            return torch.rms_norm(rows, rows.shape[-1:], None, self._epsilon).mul_(self._weight)
        exact = rows.float()
        length: torch.Tensor = torch.linalg.vector_norm(exact, 2, -1, True)  # [..., 1]
        return (exact / length.hypot_(self._floor)).mul_(self.scaled).to(rows.dtype)
