"""How an operation becomes something kernels can call: vector types for numba, and decorators around LLVM builders.

An emitter is written once, as a Python function that builds LLVM values with ``b``, the llvmlite IRBuilder.
``instruction`` and ``memory`` give it numba's typing, so that simd.py and tile.py are tables of small emitters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.core import imputils as untyped_imputils
from numba.core.typing import templates as untyped_templates
from numba.extending import intrinsic, models, register_model, typeof_impl

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
LANES = 16

# numba's own annotations stop half way.
cgutils: Any = untyped_cgutils
_imputils: Any = untyped_imputils
_templates: Any = untyped_templates

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


class Static:
    """A value that kernels are compiled for: numba sees a type for each, and its int attributes as constants.

    ``value`` is hashable and its repr tells it from every other one.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class StaticType(types.Dummy):
    def __init__(self, value: Any) -> None:
        self.value = value
        super().__init__(f"static({value!r})")


@typeof_impl.register(Static)
def _typeof_static(static: Static, context: Any) -> StaticType:
    return StaticType(static.value)


@register_model(StaticType)
class StaticModel(models.OpaqueModel):
    """Nothing at run time."""


@_imputils.lower_constant(StaticType)  # type: ignore[untyped-decorator]
def _lower_static(context: Any, b: Any, static: StaticType, value: Static) -> Any:
    return context.get_dummy_value()


@_templates.infer_getattr
class StaticAttributes(_templates.AttributeTemplate):  # type: ignore[misc]
    key = StaticType

    def generic_resolve(self, static: StaticType, name: str) -> Any:
        return types.intp if isinstance(getattr(static.value, name, None), int) else None


@_imputils.lower_getattr_generic(StaticType)  # type: ignore[untyped-decorator]
def _lower_attribute(context: Any, b: Any, static: StaticType, value: Any, name: str) -> Any:
    return ir.Constant(I64, int(getattr(static.value, name)))


class Operand(Enum):
    """What an operand of ``instruction`` may be besides a numba type."""

    POINTER = "an array and an index of its elements, or an address and an index of bytes; the emitter gets a pointer"
    STATIC = "a Static; the emitter gets its value"
    COLUMNS = "a tuple of registers, one for each column; the emitter gets a list"


POINTER, STATIC, COLUMNS = Operand


def columns_of(vector: Vector, width: int) -> types.Type:
    """The type of a tuple of registers."""
    return types.UniTuple(vector, width)  # type: ignore[no-untyped-call]


Result = types.Type | Callable[..., types.Type]  # or a function of the Static values and of the types of column tuples


def instruction(result: Result, *operands: types.Type | Operand) -> Callable[[Emit], Any]:
    """Makes ``emit(b, *operands) -> LLVM value, or list of them for a tuple`` a function for kernels."""

    def wrap(emit: Emit) -> Any:
        return _intrinsic(emit, list(inspect.signature(emit).parameters)[1:], result, operands)

    return wrap


def _intrinsic(emit: Emit, names: list[str], result: Result, operands: Sequence[types.Type | Operand]) -> Any:
    parameters = ["typingctx"]
    for name, operand in zip(names, operands, strict=True):
        parameters += [name, f"{name}_index"] if operand is POINTER else [name]

    def define(typingctx: Any, *arguments: Any) -> Any:
        wanted: list[Any] = []
        chosen = []
        rest = iter(arguments)
        for operand in operands:
            given = next(rest)
            if operand is POINTER:
                next(rest)
                wanted += [given, types.intp]
                continue
            wanted.append(given if isinstance(operand, Operand) else operand)
            if operand is STATIC:
                chosen.append(given.value)
            elif operand is COLUMNS:
                chosen.append(given)
        kind = result(*chosen) if callable(result) and not isinstance(result, types.Type) else result
        return kind(*wanted), _lower(emit, operands)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])
    define.__signature__ = signature  # type: ignore[attr-defined]  # numba reads the arguments' names here
    define.__name__ = define.__qualname__ = emit.__name__
    define.__doc__ = emit.__doc__
    return intrinsic(define)


def _lower(emit: Emit, operands: Sequence[types.Type | Operand]) -> Emit:
    def lower(context: Any, b: Any, sig: Any, values: Any) -> Any:
        given = []
        rest = iter(zip(sig.args, values, strict=True))
        for operand in operands:
            kind, value = next(rest)
            if operand is POINTER:
                if isinstance(kind, types.Integer):
                    data = b.inttoptr(value, ir.PointerType(I8))
                else:
                    data = context.make_array(kind)(context, b, value).data
                given.append(b.gep(data, [next(rest)[1]]))
            elif operand is STATIC:
                given.append(kind.value)
            elif operand is COLUMNS:
                given.append([b.extract_value(value, column) for column in range(kind.count)])
            else:
                given.append(value)
        value = emit(b, *given)
        if isinstance(value, list):
            return context.make_tuple(b, sig.return_type, value)
        return context.get_dummy_value() if value is None else value

    return lower


def memory(result: types.Type, *operands: types.Type | Operand) -> Callable[[Emit], Any]:
    """Makes ``emit(b, pointer, *operands)`` a function of (array, index, *operands) for kernels."""
    return instruction(result, POINTER, *operands)


@memory(types.int64)
def address(b: Any, pointer: Any) -> Any:
    """Where array[index] is; stays valid as long as the array."""
    return b.ptrtoint(pointer, I64)


def c_call(arguments: int) -> Any:
    """A function for kernels that calls the C function at an address with so many int64 arguments."""

    def emit(b: Any, *values: Any) -> None:
        function = ir.FunctionType(ir.VoidType(), [I64] * arguments)
        b.call(b.inttoptr(values[0], ir.PointerType(function)), values[1:])

    names = ["function", *(f"argument{i}" for i in range(arguments))]
    return _intrinsic(emit, names, types.void, [types.int64] * (arguments + 1))
