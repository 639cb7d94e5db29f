"""What a file imports."""

from __future__ import annotations

import dis
from pathlib import Path
from types import CodeType


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever it does.

    Out of its byte code: `ast.parse` of Python 3.11.7 ends with "AST constructor recursion depth mismatch" where a
    garbage collection inside of it runs code, or lets another thread run code, that parses too.
    """
    names, module = set(), ""
    codes = [compile(path.read_text(), path, "exec")]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for instruction in dis.get_instructions(code):
            if instruction.opname == "IMPORT_NAME":
                module = instruction.argval
                names.add(module)
            elif instruction.opname == "IMPORT_FROM":
                names.add(f"{module}.{instruction.argval}")
    return names
