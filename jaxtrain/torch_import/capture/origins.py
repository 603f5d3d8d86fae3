"""Where the operations of a graph come from: the calls of modules around them, and the lines of code of each call."""

import re

import torch

from jaxtrain.torch_import.graph import Line, ModuleCall
from jaxtrain.torch_import.refusals import is_internal

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')


def origins_of(exported: torch.export.ExportedProgram) -> dict[str, tuple[ModuleCall, ...]]:
    """Return the calls around each operation of a program, outermost first, by the operation's name."""
    return {node.name: _calls(node) for node in exported.graph_module.graph.nodes if node.op == "call_function"}


def _calls(node: torch.fx.Node) -> tuple[ModuleCall, ...]:
    stack = node.meta.get("nn_module_stack") or {}
    lines = _lines_by_call(node.meta.get("stack_trace") or "")
    # The first calls are those of `torch.export` itself.
    own = [()] * (len(stack) - len(lines)) + lines[max(0, len(lines) - len(stack)) :]
    return tuple(
        ModuleCall(key, None if path == "" else path.removeprefix("module").removeprefix("."), found)
        for (key, (path, _)), found in zip(stack.items(), own, strict=True)
    )


def _lines_by_call(stack_trace: str) -> list[tuple[Line, ...]]:
    calls: list[list[Line]] = []
    for match in _FRAME.finditer(stack_trace):
        file, function = match["file"], match["function"]
        if file.endswith("/torch/nn/modules/module.py") and function == "_call_impl":
            calls.append([])
        elif calls and not is_internal(file):
            calls[-1].append(Line(file, int(match["line"]), function))
    return [tuple(lines) for lines in calls]
