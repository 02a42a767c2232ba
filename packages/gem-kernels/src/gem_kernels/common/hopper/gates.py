"""Weights and slopes of the Hopper kernels, up to a constant factor that the kernels give to their sums instead: every instruction a score counts.

Only gates have one: f(x) = x (1 + e) / 2 with e = tanh u and u = x (A + B x^2), so that f'(x) = (1 + e) (1 + (1 - e) x u') / 2, where u' is the
derivative of u and x u' = 3 u - 2 A x. ``weights_of`` gives 2 f / scale, and ``slopes_of`` 2 f', at x = scale s.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.activations import TANH_U1, TANH_U3, U1, U3, activate, fast_tanh, slope_of
from gem_kernels.common.hopper.gluon import gl, gluon


@gluon.constexpr_function
def is_gate(ACTIVATION):
    """Whether an activation is computed as a gate."""
    return ACTIVATION in ("gelu_bf16", "gelu_tanh_bf16", "silu_bf16")


@gluon.jit
def finish(x, scale, ACTIVATION: gl.constexpr, SCALE_AFTER: gl.constexpr):
    """Sums of ``weights_of`` times values, with the factor that they lack, and with ``scale`` where it comes after the activation."""
    if is_gate(ACTIVATION):
        x = x * (0.5 * scale)
    elif SCALE_AFTER:
        x = x * scale
    return x


@gluon.jit
def finish_slopes(x, scale, ACTIVATION: gl.constexpr):
    """Sums over ``slopes_of`` times ``scale``, with the factor that they lack."""
    if is_gate(ACTIVATION):
        scale = 0.5 * scale
    return x * scale


@gluon.jit
def _tanh(s, scale, ACTIVATION: gl.constexpr):
    """e, and x u' or, but for silu, a third of it."""
    if ACTIVATION == "silu_bf16":
        u = s * (scale * 0.5)
        rise = u
    else:
        A: gl.constexpr = U1 if ACTIVATION == "gelu_bf16" else TANH_U1
        B: gl.constexpr = U3 if ACTIVATION == "gelu_bf16" else TANH_U3
        u = s * (s * s * (scale * scale * scale * B) + scale * A)
        rise = u - s * (scale * A * (2 / 3))
    return fast_tanh(u), rise


@gluon.jit
def weights_of(s, scale, ACTIVATION: gl.constexpr):
    """f(scale s), for gates 2 / scale times that."""
    if is_gate(ACTIVATION):
        e, _ = _tanh(s, scale * 1.0, ACTIVATION)
        y = s * e + s
    else:
        y = activate(s * scale, ACTIVATION)
    return y


@gluon.jit
def slopes_of(s, scale, ACTIVATION: gl.constexpr):
    """f'(scale s), for gates twice that."""
    if is_gate(ACTIVATION):
        e, rise = _tanh(s, scale * 1.0, ACTIVATION)
        steep = rise - e * rise
        steep = steep + 1.0 if ACTIVATION == "silu_bf16" else steep * 3.0 + 1.0
        slope = e * steep + steep
    else:
        slope = slope_of(s * scale, ACTIVATION)
    return slope
