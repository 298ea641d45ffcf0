"""How an operation becomes something kernels can call: vector types for numba, and decorators around LLVM builders.

An emitter is written once, as a Python function that builds LLVM values with ``b``, the llvmlite IRBuilder.
``instruction`` and ``memory`` give it numba's typing, so that simd.py and tile.py are tables of small emitters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic, models, register_model

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
LANES = 16

cgutils: Any = untyped_cgutils

Emit = Callable[..., Any]


class Vector(types.Type):
    """A numba type whose value is one LLVM vector."""

    def __init__(self, name: str, element: ir.Type, lanes: int) -> None:
        self.llvm = ir.VectorType(element, lanes)
        super().__init__(name=name)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Vector) -> None:
        super().__init__(manager, fe_type, fe_type.llvm)  # type: ignore[no-untyped-call]


f32x16 = Vector("f32x16", F32, LANES)
i32x16 = Vector("i32x16", I32, LANES)
u8x64 = Vector("u8x64", I8, 4 * LANES)
mask16 = Vector("mask16", I1, LANES)


# ---- what emitters are written with: b is the llvmlite IRBuilder ----


def vector_of(element: ir.Type, lanes: int = LANES) -> ir.Type:
    return ir.VectorType(element, lanes)


def constant(llvm: ir.Type, value: float) -> ir.Constant:
    """A vector with every lane the same number."""
    return ir.Constant(llvm, [value] * llvm.count)


def broadcast(b: Any, scalar: Any, lanes: int = LANES) -> Any:
    undefined = ir.Constant(vector_of(scalar.type, lanes), ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(vector_of(I32, lanes), [0] * lanes))


def call(b: Any, name: str, result: ir.Type, *operands: Any) -> Any:
    """Calls an LLVM intrinsic or a C function by its name."""
    function = ir.FunctionType(result, [operand.type for operand in operands])
    return b.call(cgutils.get_or_insert_function(b.module, function, name), operands)


def pointer_to(b: Any, pointer: Any, llvm: ir.Type) -> Any:
    return b.bitcast(pointer, ir.PointerType(llvm))


def _define(emit: Emit, parameters: list[str], typed: Callable[..., Any], lower: Emit) -> Any:
    def define(typingctx: Any, *arguments: Any) -> Any:
        return typed(*arguments), lower

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    named = [inspect.Parameter(name, kind) for name in ["typingctx", *parameters]]
    define.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]  # numba reads the arguments' names here
    define.__name__ = define.__qualname__ = emit.__name__
    define.__doc__ = emit.__doc__
    return intrinsic(define)


def instruction(result: types.Type, *operands: types.Type) -> Callable[[Emit], Any]:
    """Makes ``emit(b, *operands) -> LLVM value`` a function for kernels."""

    def wrap(emit: Emit) -> Any:
        def lower(context: Any, b: Any, sig: Any, values: Any) -> Any:
            value = emit(b, *values)
            return context.get_dummy_value() if value is None else value

        return _define(emit, list(inspect.signature(emit).parameters)[1:], lambda *_: result(*operands), lower)

    return wrap


def memory(result: types.Type, *operands: types.Type) -> Callable[[Emit], Any]:
    """Makes ``emit(b, pointer, *operands)`` a function of (array, index, *operands) for kernels."""

    def wrap(emit: Emit) -> Any:
        def lower(context: Any, b: Any, sig: Any, values: Any) -> Any:
            data = context.make_array(sig.args[0])(context, b, values[0]).data
            value = emit(b, b.gep(data, [values[1]]), *values[2:])
            return context.get_dummy_value() if value is None else value

        parameters = ["array", "index", *list(inspect.signature(emit).parameters)[2:]]
        return _define(emit, parameters, lambda array, *_: result(array, types.intp, *operands), lower)

    return wrap
