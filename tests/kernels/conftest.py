"""Facts about the CUDA headers, asked of the compiler: no GPU takes part."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from kernels.build import build

# offsetof is a macro, and a macro splits a type at its commas: the type comes last here.
_OFFSET = """#include <cuda/std/cstddef>
#define OFFSET(member, ...) ([] { using T = __VA_ARGS__; return offsetof(T, member); }())"""


@pytest.fixture(scope="session")
def hold_in_cpp() -> Callable[[str, Iterable[str]], None]:
    """`hold_in_cpp(preamble, conditions)` compiles every condition as a static_assert: a BuildError names those that are false.

    OFFSET(member, type) is the byte at which a member lies.
    """
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings; install it with: pip install -e '.[gpu]'")

    def check(preamble: str, conditions: Iterable[str]) -> None:
        asserts = "\n".join(f"static_assert({condition});" for condition in conditions)
        assert asserts, "nothing to check"
        build(f'{_OFFSET}\n{preamble}\n{asserts}\nextern "C" __global__ void facts() {{}}\n', "facts", "sm_90a")

    return check
