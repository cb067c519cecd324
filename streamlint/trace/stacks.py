"""Decodes Python call stacks that nsys stores as NVTX payloads.

Layout as measured on nsys 2025.3 captures: JSON where the export has it, else a
little-endian blob: u64 payload count, u64 schema id, u64 size, u64 offset; at the
offset u64 thread state, u32 state, u32 n, then n frames of u64 function, u64 file,
u32 line and 4 bytes of uninitialised padding. Frame 0 is the innermost.
"""

from __future__ import annotations

import json
import struct

PYTHON_BACKTRACE_DOMAIN = "Python Backtrace on CUDA"

_HEAD = struct.Struct("<4Q")
_STATE = struct.Struct("<QII")
_FRAME = struct.Struct("<QQI4x")
_MAX_FRAMES = 4_096

Frame = tuple[int, int, int]
"""StringIds key of the function, of the file, and the line."""


def decode_json(text: str) -> list[Frame]:
    """Frames of a JSON payload; empty where it isn't of the known shape."""
    try:
        listed = json.loads(text)[PYTHON_BACKTRACE_DOMAIN]["Frames"]
        if not isinstance(listed, list) or len(listed) > _MAX_FRAMES:
            return []
        frames = [(int(f["Function"]), int(f["File"]), int(f["Line"])) for f in listed]
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return []
    return frames if all(map(_is_sound, frames)) else []


def decode_blob(blob: bytes) -> list[Frame]:
    """Frames of a binary payload; empty where it isn't of the known shape."""
    try:
        _, _, size, offset = _HEAD.unpack_from(blob)
        _, _, count = _STATE.unpack_from(blob, offset)
        if count > _MAX_FRAMES or size != _STATE.size + count * _FRAME.size:
            return []
        at = range(offset + _STATE.size, offset + size, _FRAME.size)
        frames = [_FRAME.unpack_from(blob, i) for i in at]
    except (struct.error, OverflowError):
        return []
    return frames if all(map(_is_sound, frames)) else []


def _is_sound(frame: Frame) -> bool:
    """Whether its numbers can be keys of StringIds and a line."""
    function, file, line = frame
    return 0 <= function < 1 << 63 and 0 <= file < 1 << 63 and 0 <= line < 1 << 32


def encode_json(frames: list[Frame]) -> str:
    """A JSON payload with these frames and nothing else."""
    listed = [{"Function": f, "File": file, "Line": n} for f, file, n in frames]
    return json.dumps({PYTHON_BACKTRACE_DOMAIN: {"Frames": listed}})


def encode_blob(frames: list[Frame]) -> bytes:
    """A binary payload with these frames and nothing else."""
    size = _STATE.size + len(frames) * _FRAME.size
    head = _HEAD.pack(1, 0, size, _HEAD.size) + _STATE.pack(0, 0, len(frames))
    return head + b"".join(_FRAME.pack(*frame) for frame in frames)
