"""GeGLU against its formula in fp64, with gradients."""

import torch

from kernels.geglu import geglu, geglu_reference


def test_values_and_gradients_are_those_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [(3 * torch.randn(7, 33, generator=generator)).requires_grad_() for _ in range(2)]
    wide = [x.detach().double().requires_grad_() for x in ours]
    y, expected = geglu(*ours), geglu_reference(*wide)
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)
    y.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(ours, wide, strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, atol=1e-3, rtol=1e-5)
