"""CUDA C++ kernels on a CPU, for tests: `emulated` replaces their compiler and launches by `cuda.h`, `cuda.cpp` and g++."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.layers.kernels import cuda_driver

HEADER = Path(__file__).with_name("cuda.h")
RUNTIME = HEADER.with_suffix(".cpp")
COMPILER = shutil.which("g++")
OTHERS = {
    "cvt.rn.f16x2.e4m3x2": "four_e4m3_to_float16",
    "mbarrier.try_wait": "wait_for_mbarrier",
    "%%cluster_ctarank": "rank_of_block",
    "%%cluster_nctarank": "blocks_of_cluster",
    "%%clusterid": "number_of_cluster",
    ".reg .u32 there, counter;": "send_to_block",
}
"""Functions of `cuda.h` for other asm than one instruction, by a part of it."""
PAGE = mmap.PAGESIZE


class EmulatedKernel:
    """Has the interface of `cuda_driver.Kernel`."""

    clusters_at_once = 1 << 30

    def __init__(self, launch: Any, threads: int, cluster: int) -> None:
        self._launch, self._threads, self._cluster = launch, threads, cluster

    def __call__(self, blocks: int, args: tuple[Any, ...], pdl: bool) -> None:
        held = [_parameter(arg) for arg in args]
        self._launch(blocks, self._threads, self._cluster, (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held)))


def _parameter(arg: Any) -> Any:
    if arg is None or isinstance(arg, torch.Tensor):
        return ctypes.c_void_p(None if arg is None else arg.data_ptr())
    return ctypes.c_int(arg) if isinstance(arg, int) else arg


@contextmanager
def emulated(folder: Path, modules: list[Any], multiprocessors: int) -> Iterator[None]:
    """Let the kernels of `modules` run on the CPU, as if the device had this many multiprocessors.

    Compiled programs lie in `folder`. They are those of later calls too, because their names are hashes of all that they consist of.
    """
    device = SimpleNamespace(multi_processor_count=multiprocessors)

    def compile_kernel(source: str, name: str, *, threads: int, cluster: int = 1, shared_bytes: int = 0) -> EmulatedKernel:
        return EmulatedKernel(compiled(source, name, folder), threads, cluster)

    def forget() -> None:
        for module in modules:
            for name, value in vars(module).items():
                if re.fullmatch(r"_\w*kernels?", name) and hasattr(value, "cache_clear"):
                    value.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver, "compile_kernel", compile_kernel)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: device)
        forget()
        yield
    forget()


def compiled(source: str, name: str, folder: Path) -> Any:
    """The launch function of a program's kernel."""
    program = host_source(source)
    known = set(re.findall(r"\w+", HEADER.read_text(encoding="utf-8")))
    others = sorted(set(re.findall(r"emulation::(\w+)\(", program)) - known)
    failures = "\n".join(f'template <class... T> void {other}(T&&...) {{ fail("{other} is not emulated"); }}' for other in others)
    text = f'#include "{HEADER.name}"\nnamespace emulation {{\n{failures}\n}}\n{program}\n{_launcher(source, name)}'
    base = _base(folder)
    library = base / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=base) as own:  # other processes may compile the same program
            file = Path(own) / "program.cpp"
            file.write_text(text, encoding="utf-8")
            _compile(file, built := file.with_suffix(".so"), "-O0", "-shared", "-nodefaultlibs", f"-I{base}", base / "runtime.so")
            built.rename(library)
    return ctypes.CDLL(str(library)).emulated_launch


@functools.cache
def _base(folder: Path) -> Path:
    """The part of `folder` for programs of this compiler and these emulation files: the header, parsed, and the runtime."""
    assert COMPILER is not None
    version = subprocess.run([COMPILER, "--version"], check=True, capture_output=True).stdout
    files = [path.read_bytes() for path in (HEADER, RUNTIME, Path(__file__))]
    base = folder / hashlib.sha256(b"".join([version, platform.machine().encode(), bytes(folder), *files])).hexdigest()[:24]
    if not base.exists():
        own = Path(tempfile.mkdtemp(dir=folder))
        shutil.copy(HEADER, header := own / HEADER.name)
        _compile(header, f"{header}.gch", "-O0")  # parsed once for all programs
        _compile(RUNTIME, own / "runtime.so", "-O2", "-shared")
        try:
            own.rename(base)
        except OSError:  # another process was faster
            shutil.rmtree(own)
    return base


def _compile(file: Path, out: Path | str, *flags: str | Path) -> None:
    assert COMPILER is not None
    subprocess.run([COMPILER, "-std=c++17", "-w", "-fPIC", "-fno-gnu-unique", "-o", out, file, *flags], check=True)


def host_source(source: str) -> str:
    """The program with calls of functions in `cuda.h` instead of asm, and with shared variables in the memory of their block."""
    source = re.sub(r"extern __shared__ [^;]*\bshared\[\];", "u8* const shared = (u8*)emulation::local(emulation::FIXED);", source)
    source = re.sub(r"__shared__ (?:__align__\(\d+\) )?(\w+) ([^;]+);", _variables, source)
    out, at = [], 0
    for found in re.finditer(r"\basm\s*(?:volatile)?\s*\(", source):
        end = _closing(source, found.end() - 1)
        out += [source[at : found.start()], _call(source[found.end() : end])]
        at = end + 1
    return "".join([*out, source[at:]])


def _variables(found: re.Match[str]) -> str:
    """Definitions of shared variables."""
    out = []
    for name, sizes in re.findall(r"(\w+)((?:\[[^\]]*\])*)(?:, |$)", found[2]):
        kind, place = f"shared_{name}_type", f"shared_{name}_place"
        out += [f"using {kind} = {found[1]}{sizes};", f"static const int {place} = emulation::allocate(sizeof({kind}), 16);"]
        out += [f"{kind}& {name} = *({kind}*)emulation::local({place});"]
    return " ".join(out)


def _closing(text: str, opening: int) -> int:
    """The position of the parenthesis that closes the one at `opening`."""
    depth, quoted = 0, False
    for i in range(opening, len(text)):
        if text[i] == '"':
            quoted = not quoted
        depth += 0 if quoted else (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError("unbalanced parentheses")


def _call(asm: str) -> str:
    """The call for the content of one asm statement."""
    literal = re.match(r'\s*((?:"[^"]*"\s*)+)', asm)
    assert literal is not None
    template = re.sub(r'"\s*"', "", literal[1]).strip().strip('"')
    operands, at = [], literal.end()
    for found in re.finditer(r'"[=+]?[a-z]+"\s*\(', asm):
        if found.start() >= at:
            at = _closing(asm, found.end() - 1)
            operands.append(asm[found.end() : at])
    other = next((name for part, name in OTHERS.items() if part in template), None)
    opcode = re.match(r"[\w.:]+", template)
    name = other or (re.sub(r"[.:]", "_", opcode[0]) if opcode else "several_instructions" if template else "nothing")
    return f"emulation::{name}({', '.join(operands)})"


def _launcher(source: str, name: str) -> str:
    head = re.search(rf'extern "C" __global__ void[^{{;]*?\b{name}\(', source)
    assert head is not None
    listed = source[head.end() : _closing(source, head.end() - 1)]
    types = [re.sub(r"\s*\b\w+\s*$", "", part) for part in listed.split(",")]
    args = ", ".join(f"*(std::remove_const_t<{kind}>*)args[{i}]" for i, kind in enumerate(types))
    kernel = f"static void emulated_kernel(void** args) {{ {name}({args}); }}"
    call = "emulation::launch(blocks, threads, cluster, emulated_kernel, args);"
    return f'{kernel}\nextern "C" void emulated_launch(int blocks, int threads, int cluster, void** args) {{ {call} }}'


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that ends where the process may not read."""
    size = tensor.numel() * tensor.element_size()
    space = mmap.mmap(-1, -(-size // PAGE) * PAGE + PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(space))
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + len(space) - PAGE), PAGE, 0)
    first = (len(space) - PAGE - size) // 16 * 16  # kernels read vectors of 16 bytes
    copied = torch.frombuffer(space, dtype=torch.uint8, count=size, offset=first).view(tensor.dtype).view(tensor.shape)
    return copied.copy_(tensor)
