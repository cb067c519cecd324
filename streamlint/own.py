"""What in a call stack is the user's own code, and what a library's."""

from __future__ import annotations

import re

from streamlint.findings import SourceFrame

# Texts, which `re` compiles when first needed: most traces have no call stacks.
_LIBRARY_FILE = (
    r"(^|/)(site-packages|dist-packages|lib/python\d[\d.]*)/|^<|^$"
    r"|^/usr/(local/)?(include|lib)|^/usr/local/cuda|/include/c\+\+/"
    r"|/targets/[\w-]+-linux/include/|\.cudafe\d*\.stub\.c$"
)
_SYSTEM_MODULE = (
    r"^/(usr/)?lib|^\[|^/opt/nvidia/|site-packages|dist-packages"
    r"|/lib(cu|nv|torch|c10|python)|(^|/)python[\d.]*$"
)
_PYTHON_MODULE = r"(^|/)(lib)?python\d?[\d.]*(\.so[\d.]*)?$"
_CUDA_FUNCTION = (
    r"(\w+ )?_*(cuda|cudart|libcudart_static)[A-Z_]|cu[A-Z]\w*$|__device_stub__"
    r"|_start$|__libc_start_"
)
"""CUDA's runtime, which may be linked into the program, and what starts that."""


def in_own_code(frame: SourceFrame) -> bool:
    """Whether a frame is a line of the user's, not of a library or of Python."""
    return frame.line is not None and not re.search(_LIBRARY_FILE, frame.file)


def is_system_module(module: str) -> bool:
    """Whether a binary belongs to the system, CUDA, Python or a framework."""
    return not module or bool(re.search(_SYSTEM_MODULE, module))


def is_python_module(module: str) -> bool:
    """Whether a binary is Python's interpreter."""
    return bool(re.search(_PYTHON_MODULE, module))


def is_cuda_function(name: str) -> bool:
    """Whether a function is CUDA's, though it is in the user's own binary."""
    return bool(re.match(_CUDA_FUNCTION, name))


def module_name(module: str) -> str:
    """A module without its folder."""
    return module.rpartition("/")[2]
